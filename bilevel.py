"""Bilevel calibration: the parametric loss, and hypergradients exact and first-order.

    min_alpha F(alpha, theta*(alpha))   with   theta*(alpha) in argmin_theta L(theta, alpha)

The file goes from the problem to the solvers: (1) the two losses of CALM (arXiv 2608.07419),
(2) `Bilevel`, a problem made of two lists of tensors and two closures, (3) the exact
hypergradient by Hessian-vector products, (4) BOME, the first-order step that needs none.
Nothing here knows of text or transformers; `python bilevel.py` compares (3) and (4) on a tiny
transformer. Subscripts in comments are partial derivatives: L_t, L_a, L_tt, L_at, F_t, F_a.
"""
import argparse
import json
import sys
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


# --- 1. The losses of CALM -----------------------------------------------------------------------

class LogitAdjustment(nn.Module):
    """Adjusted logits z~ = exp(log_scale) * z + offset; the identity at zero.

    mode "vector": log_scale and offset have one entry a vocabulary item, (V,), as in the
    vector-scaling loss of AutoBalance (arXiv 2201.01212). mode "scalar": log_scale is a single
    number, -log of a temperature, and offset is fixed at zero.
    """

    def __init__(self, vocab_size, mode="vector"):
        super().__init__()
        if mode not in ("vector", "scalar"):
            raise ValueError(f"mode must be 'vector' or 'scalar', not {mode!r}")
        self.log_scale = nn.Parameter(torch.zeros(vocab_size if mode == "vector" else ()))
        self.offset = nn.Parameter(torch.zeros_like(self.log_scale), requires_grad=mode == "vector")

    def forward(self, logits):
        """(..., V) -> (..., V)"""
        return self.log_scale.exp() * logits + self.offset


def parametric_cross_entropy(logits, targets, adjustment=None, ignore_index=-100, label_smoothing=0.0):
    """L: the mean cross-entropy (nats) of softmax(z~) over the supervised tokens.

    logits (..., V), targets (...) of ids; targets equal to `ignore_index` are not supervised.
    Without one supervised token the loss is zero, not NaN.
    """
    supervised = targets != ignore_index
    logits, targets = logits[supervised], targets[supervised]              # (N, V), (N,)
    if adjustment is not None:
        logits = adjustment(logits)
    if not len(targets):
        return logits.sum()                                                # an empty sum: zero, with a graph
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def negative_entropy(logits, adjustment=None, mask=None):
    """F: minus the mean entropy (nats) of softmax(z~) over the positions where `mask` is true.

    logits (..., V); mask (...) of booleans, None for all positions. Needs no label.
    """
    if mask is not None:
        logits = logits[mask]                                              # (N, V)
    if adjustment is not None:
        logits = adjustment(logits)
    log_p = logits.log_softmax(-1)
    return (log_p.exp() * log_p).sum(-1).mean()


# --- 2. A bilevel problem ------------------------------------------------------------------------

class Bilevel:
    """theta and alpha, lists of tensors that require gradients; lower() and upper(), closures that
    return the scalars L(theta, alpha) and F(alpha, theta) at the tensors' current values.

    Vectors in theta's or alpha's space are flat, (N,), in the order of the list.
    """

    def __init__(self, theta, alpha, lower, upper):
        self.theta, self.alpha, self.lower, self.upper = list(theta), list(alpha), lower, upper
        for name, tensors in (("theta", self.theta), ("alpha", self.alpha)):
            if not tensors:
                raise ValueError(f"{name} is empty: a bilevel problem needs at least one tensor in it")
            for i, t in enumerate(tensors):
                if not (t.is_leaf and t.requires_grad):
                    raise ValueError(f"{name}[{i}], shape {tuple(t.shape)}, is not a leaf tensor that requires gradients")

    def gradient(self, loss, create_graph=False):
        """Flat partial derivatives of a scalar `loss` with respect to theta, (N,), and alpha, (M,)."""
        g = torch.autograd.grad(loss, self.theta + self.alpha, create_graph=create_graph, allow_unused=True)
        n = len(self.theta)
        return flatten(g[:n], self.theta), flatten(g[n:], self.alpha)

    def move_theta(self, step):
        """theta += step, in place; step is flat, (N,)."""
        with torch.no_grad():
            for p, s in zip(self.theta, unflatten(step, self.theta)):
                p += s


def flatten(tensors, like):
    """List of tensors -> (N,); None, the derivative of an unused tensor, counts as zeros."""
    return torch.cat([(torch.zeros_like(p) if t is None else t).reshape(-1) for t, p in zip(tensors, like)])


def unflatten(vector, like):
    """(N,) -> list of tensors shaped like those of `like`."""
    return [part.view_as(p) for part, p in zip(vector.split([p.numel() for p in like]), like)]


# --- 3. The exact hypergradient ------------------------------------------------------------------

def exact_mode():
    """Second derivatives need attention's plain form: the fused kernels have only a first."""
    return sdpa_kernel(SDPBackend.MATH)


def hvp(gradient, theta, vector):
    """Hessian-vector product L_tt v by double backward: the derivative of <L_t, v> (Pearlmutter, 1994).

    gradient: flat L_t, (N,), with its graph; theta: the tensors it was taken by; vector (N,).
    """
    if not gradient.requires_grad:                                         # L is linear in theta
        return torch.zeros_like(vector)
    parts = torch.autograd.grad(gradient, theta, vector, retain_graph=True, allow_unused=True)
    return flatten(parts, theta)


def conjugate_gradient(matvec, b, tol=1e-10, max_iter=1000):
    """Solve H x = b for a positive definite H given as `matvec` (Hestenes & Stiefel, 1952).

    b is (N,). Returns x, (N,), and a report: "products" used, relative "residual", and
    "negative_curvature", true when some p'Hp <= 0 was met: then H is not positive definite, what
    CG has so far answers no question, and x is all NaN.
    """
    x, r = torch.zeros_like(b), b.clone()
    p, rr, norm = r.clone(), r.dot(r), b.norm()
    report = {"products": 0, "residual": 0.0 if norm == 0 else 1.0, "negative_curvature": False}
    while report["residual"] > tol and report["products"] < max_iter:
        Hp = matvec(p)
        report["products"] += 1
        curvature = p.dot(Hp)
        if curvature <= 0:
            report["negative_curvature"] = True
            return torch.full_like(b, torch.nan), report
        step = rr / curvature
        x, r = x + step * p, r - step * Hp
        rr, rr_old = r.dot(r), rr
        p = r + (rr / rr_old) * p
        report["residual"] = float(rr.sqrt() / norm)
    return x, report


def exact_hypergradient(problem, solver="cg", damping=0.0, tol=1e-10, max_iter=1000):
    """dF/dalpha = F_a - L_at [L_tt + damping I]^{-1} F_t, the implicit function theorem
    (for hypergradients: Pedregosa, 2016, arXiv 1602.02355), exact where L_t = 0.

    solver "cg": Hessian-vector products and conjugate gradients; "dense": the Hessian itself, for
    tiny problems, the ground truth. Returns a list of tensors shaped like alpha, and a report:
    CG's, and "gradient_norm", ||L_t|| at this point. Warns when negative curvature was met.
    """
    with exact_mode():
        theta = problem.theta
        L_t, _ = problem.gradient(problem.lower(), create_graph=True)
        F_t, F_a = problem.gradient(problem.upper())
        H = lambda v: hvp(L_t, theta, v) + damping * v
        if solver == "cg":
            v, report = conjugate_gradient(H, F_t, tol, max_iter)
        elif solver == "dense":
            matrix = torch.stack([H(e) for e in torch.eye(len(F_t), dtype=F_t.dtype, device=F_t.device)])   # (N, N)
            v = torch.linalg.solve(matrix, F_t)
            eigenvalues = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
            report = {"products": len(F_t), "residual": float((matrix @ v - F_t).norm() / F_t.norm()),
                      "negative_curvature": bool(eigenvalues[0] < 0), "largest_eigenvalue": float(eigenvalues[-1])}
        else:
            raise ValueError(f"solver must be 'cg' or 'dense', not {solver!r}")
        report["gradient_norm"] = float(L_t.detach().norm())
        if report["negative_curvature"]:
            warnings.warn("the lower level's Hessian has negative curvature here: theta is not at a minimum, "
                          "and there is no hypergradient; converge it first, or pass damping > 0 (biased)")
        cross = torch.autograd.grad(L_t, problem.alpha, v, allow_unused=True) if L_t.requires_grad else [None] * len(problem.alpha)
        return unflatten(F_a - flatten(cross, problem.alpha), problem.alpha), report


# --- 4. First order: BOME ------------------------------------------------------------------------

def bome_direction(problem, inner_steps, inner_lr, eta):
    """The joint descent direction of BOME (Liu et al., 2022, arXiv 2209.08709).

    theta_T = `inner_steps` gradient steps of size `inner_lr` on L(., alpha) from theta, with no
    gradient through them. The residual q = L(theta, alpha) - L(theta_T, alpha) replaces "theta is
    a minimiser": grad q = (L_t(theta), L_a(theta) - L_a(theta_T)), lam = max(0, eta - <grad F, grad q> / ||grad q||^2),
    and the direction is grad F + lam grad q. theta_T lives in theta's own memory and theta is
    put back: T + 1.33 gradients, and one copy of theta.

    Returns (theta direction, alpha direction, report), the directions as lists of tensors and the
    report with "lam", "residual" q, "lower" L and "upper" F.
    """
    if inner_steps < 1:
        raise ValueError(f"inner_steps must be at least 1, not {inner_steps}")
    theta, alpha = problem.theta, problem.alpha
    F_value = problem.upper()
    F_t, F_a = problem.gradient(F_value)
    L = problem.lower()
    L_t, L_a = problem.gradient(L)

    saved = [p.detach().clone() for p in theta]
    try:
        problem.move_theta(-inner_lr * L_t)                                # the first inner gradient is L_t(theta)
        for _ in range(inner_steps - 1):
            problem.move_theta(-inner_lr * flatten(torch.autograd.grad(problem.lower(), theta), theta))
        L_T = problem.lower()                                              # at theta_T only L_a is needed
        L_a_T = flatten(torch.autograd.grad(L_T, alpha, allow_unused=True), alpha)
    finally:
        with torch.no_grad():
            for p, s in zip(theta, saved):
                p.copy_(s)

    q_t, q_a = L_t, L_a - L_a_T
    norm2 = q_t.dot(q_t) + q_a.dot(q_a)
    lam = max(0.0, eta - float((F_t.dot(q_t) + F_a.dot(q_a)) / norm2)) if norm2 > 0 else 0.0
    report = {"lam": lam, "residual": float(L.detach() - L_T.detach()), "lower": float(L.detach()),
              "upper": float(F_value.detach())}
    return unflatten(F_t + lam * q_t, theta), unflatten(F_a + lam * q_a, alpha), report


# --- 5. The laboratory ---------------------------------------------------------------------------

def tiny_transformer(mu=0.1, seed=0):
    """2,224 parameters in float64: a one-layer transformer with a frozen head, pretrained on a toy world of 16 tokens.

    L = cross-entropy + mu/2 ||theta - theta_0||^2, theta_0 the pretrained point: without the proximal
    term the minimum is hardly determined and its Hessian hardly invertible.
    """
    from data import World
    from model import Config, Transformer
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    world = World(seed, subjects=4, relations=2, values=4, pool=4, shared=0)
    model = Transformer(Config(world.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                               num_attention_heads=2, num_key_value_heads=1)).double()
    statements = lambda n: world.statements(n, "all", "all", generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(300):
        ids = statements(64)
        loss = F.cross_entropy(model(ids[:, :-1])[:, -1], ids[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.lm_head.weight.requires_grad_(False)             # as under LoRA: what the lower level cannot re-fit
    ids, held_out = statements(64), statements(64)
    adjustment = LogitAdjustment(world.vocab_size).double()
    with torch.no_grad():
        for p in adjustment.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    theta = [p for p in model.parameters() if p.requires_grad]
    theta_0 = [p.detach().clone() for p in theta]

    def lower():
        proximal = sum(((p - p_0) ** 2).sum() for p, p_0 in zip(theta, theta_0))
        return parametric_cross_entropy(model(ids[:, :-1])[:, -1], ids[:, -1], adjustment) + mu / 2 * proximal

    def upper():
        return negative_entropy(model(held_out[:, :-1])[:, -1], adjustment)

    return Bilevel(theta, list(adjustment.parameters()), lower, upper)


def converge(problem, tol=1e-10, max_iter=50):
    """Move theta to the minimum of L: L-BFGS to its neighbourhood, then Newton steps by CG. Returns ||L_t||."""
    optimizer = torch.optim.LBFGS(problem.theta, max_iter=1000, tolerance_grad=1e-6, history_size=50,
                                  line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = problem.lower()
        loss.backward(inputs=problem.theta)
        return loss

    optimizer.step(closure)
    with exact_mode():
        for _ in range(max_iter):
            L_t, _ = problem.gradient(problem.lower(), create_graph=True)
            norm = float(L_t.detach().norm())
            if norm <= tol:
                break
            step, report = conjugate_gradient(lambda v: hvp(L_t, problem.theta, v), L_t.detach(), tol=1e-3)
            if report["negative_curvature"]:
                raise ArithmeticError(f"negative curvature at ||L_t|| = {norm:.1e}: no minimum here")
            problem.move_theta(-step)
    return norm


def settled_bome(problem, steps, inner_lr, eta, settle=300):
    """BOME's alpha direction where it is used: at theta settled under BOME's own theta direction, alpha held."""
    for _ in range(settle):
        d_theta, _, report = bome_direction(problem, steps, inner_lr, eta)
        problem.move_theta(-inner_lr / max(1.0, report["lam"]) * flatten(d_theta, problem.theta))
    return flatten(bome_direction(problem, steps, inner_lr, eta)[1], problem.alpha)


def compare(problem):
    """Rows of every method's alpha direction against the dense solve, at one converged point."""
    reached = converge(problem)
    theta_star = [p.detach().clone() for p in problem.theta]
    start = time.perf_counter()
    truth, report = exact_hypergradient(problem, "dense")
    truth, sharpness = flatten(truth, problem.alpha), report["largest_eigenvalue"]
    rows = [{"method": "exact, dense solve", "setting": f"{report['products']} products", "relative_error": 0.0, "cosine": 1.0,
             "seconds": time.perf_counter() - start}]

    def row(method, setting, direction):
        start = time.perf_counter()
        h = direction()
        rows.append({"method": method, "setting": setting, "relative_error": float((h - truth).norm() / truth.norm()),
                     "cosine": float(h.dot(truth) / (h.norm() * truth.norm())), "seconds": time.perf_counter() - start})
        with torch.no_grad():
            for p, p_star in zip(problem.theta, theta_star):
                p.copy_(p_star)

    row("exact, CG", "tol 1e-10", lambda: flatten(exact_hypergradient(problem, "cg")[0], problem.alpha))
    row("lower level ignored", "F_a alone", lambda: problem.gradient(problem.upper())[1])
    for T in (1, 10):
        row("BOME", f"T = {T}", lambda: settled_bome(problem, T, 1 / sharpness, eta=0.5))
    facts = {"parameters": len(flatten(theta_star, theta_star)), "gradient_norm": reached, "largest_eigenvalue": sharpness}
    return facts, rows


def main(argv=None):
    parser = argparse.ArgumentParser(description="Exact against first-order hypergradients on a tiny transformer, in float64.")
    parser.add_argument("--json", metavar="PATH", help="write every printed number there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)                               # tensors this small only lose by sharing
    facts, rows = compare(tiny_transformer())
    print(f"a transformer of {facts['parameters']} parameters, ||L_theta|| = {facts['gradient_norm']:.1e}, "
          f"largest eigenvalue of the Hessian {facts['largest_eigenvalue']:.1f}")
    print(f"{'method':22s}{'setting':>16s}{'relative error':>16s}{'cosine':>9s}{'seconds':>9s}")
    for r in rows:
        print(f"{r['method']:22s}{r['setting']:>16s}{r['relative_error']:16.1e}{r['cosine']:9.3f}{r['seconds']:9.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"problem": facts, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    sys.exit(main())
