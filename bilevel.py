"""Bilevel calibration: the parametric loss, and hypergradients exact and first-order.

    min_alpha F(alpha, theta*(alpha))   with   theta*(alpha) in argmin_theta L(theta, alpha)

The file goes from the problem to the solvers: (1) the two losses of CALM (arXiv 2608.07419),
(2) `Bilevel`, a problem made of two lists of tensors and two closures, (3) the exact
hypergradient by Hessian-vector products, (4) first-order directions that need none: unrolling
(for comparison), penalties, BOME, and BOME with a surrogate that persists, (5) a laboratory that
measures them all against the exact one: `python bilevel.py`, in seconds with `--problem quadratic` or
`--problem temperature`. Nothing before (5) knows of text or transformers. Subscripts are partial derivatives, t for
theta and a for alpha: L_t, L_a, L_tt, L_at, F_t, F_a. H is the Hessian L_tt. F is the upper loss in formulas; in code
F.something is torch.nn.functional.
"""
import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import os
import signal
import sys
import time
import warnings
from pathlib import Path

if __name__ == "__main__":                                 # importing torch takes seconds: Ctrl-C is no traceback there
    at_ctrl_c = signal.signal(signal.SIGINT, lambda *_: os._exit(os.write(2, b"\nbilevel.py: interrupted\n") and 130))

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


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
        """(..., V) -> (..., V), in float32 at least"""
        return self.log_scale.exp() * at_least_float32(logits) + self.offset


def at_least_float32(logits):
    """Half-precision logits as float32: the losses' sums over V items need it."""
    return logits if logits.dtype == torch.float64 else logits.float()


def adjusted(logits, adjustment):
    """z~, (..., V), in float32 at least; without an adjustment z. An item of logit -inf, which cannot occur, stays so:
    multiplied it would make the derivative by log_scale 0 x inf."""
    if adjustment is not None:
        never = logits == -torch.inf
        if never.any():
            logits = adjustment(logits.masked_fill(never, 0.0)).masked_fill(never, -torch.inf)
        else:
            logits = adjustment(logits)
    return at_least_float32(logits)


def parametric_cross_entropy(logits, targets, adjustment=None, ignore_index=-100, label_smoothing=0.0):
    """L: the mean cross-entropy (nats) of softmax(z~) over the supervised tokens.

    logits (..., V), targets (...) of ids; targets equal to `ignore_index` are not supervised.
    Without one supervised token the loss is zero, not NaN.
    """
    supervised = targets != ignore_index
    logits, targets = adjusted(logits[supervised], adjustment), targets[supervised]        # (N, V), (N,)
    if not len(targets):
        return logits.sum()                                                # an empty sum: zero, with a graph
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def negative_entropy(logits, adjustment=None, mask=None):
    """F: minus the mean entropy (nats) of softmax(z~) over the positions where `mask` is true.

    logits (..., V), -inf for an item that cannot occur; mask (...) of booleans or of 0 and 1, None
    for all positions. Needs no label. Without one position it is zero, not NaN.
    """
    if mask is not None:
        logits = logits[mask.bool()]                                       # (N, V)
    log_p = adjusted(logits, adjustment).log_softmax(-1)
    if not log_p.numel():
        return log_p.sum()
    return (log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1).mean()      # 0 log 0 = 0


def chunked(loss, head, hidden, *labels, chunk=256):
    """loss(head(hidden), *labels) without ever holding all the logits: `chunk` positions at a time,
    whose logits the backward pass computes again (Chen et al., 2016, arXiv 1604.06174).

    hidden (N, d) and labels (N,) at the N positions that count, and no others; head: (n, d) ->
    (n, V); loss: a mean over positions, such as lambda z, y: parametric_cross_entropy(z, y,
    adjustment) or lambda z: negative_entropy(z, adjustment). Extra memory is about that of one chunk,
    except under create_graph: a second derivative needs the graph of the first.
    """
    if len(hidden) <= chunk:                                               # nothing to gain
        return loss(head(hidden), *labels)
    total = lambda h, *y: len(h) * loss(head(h), *y)
    parts = zip(*(t.split(chunk) for t in (hidden, *labels)))
    return sum(checkpoint(total, *part, use_reentrant=False) for part in parts) / len(hidden)


# --- 2. A bilevel problem ------------------------------------------------------------------------

class Bilevel:
    """theta and alpha, lists of tensors that require gradients; lower() and upper(), closures that
    return the scalars L(theta, alpha) and F(alpha, theta) at the tensors' current values.

    outputs() and loss(z), optional, split L's data term as loss(outputs()), loss convex in z, for
    the Gauss-Newton matrix. reduce(g), optional, sums a flat first derivative over processes that each
    hold a part of the data. Vectors in theta's or alpha's space are flat, (N,) or (M,), in the
    order of the list. Raises ValueError for an empty list or a tensor that cannot be a parameter.
    """

    def __init__(self, theta, alpha, lower, upper, outputs=None, loss=None, reduce=lambda g: g):
        self.theta, self.alpha, self.lower, self.upper = list(theta), list(alpha), lower, upper
        self.outputs, self.loss, self.reduce = outputs, loss, reduce
        for name, tensors in (("theta", self.theta), ("alpha", self.alpha)):
            if not tensors:
                raise ValueError(f"{name} is empty: a bilevel problem needs at least one tensor in it")
            for i, t in enumerate(tensors):
                if not (t.is_leaf and t.requires_grad):
                    raise ValueError(f"{name}[{i}], shape {tuple(t.shape)}, is not a leaf tensor that requires gradients")

    def gradient(self, loss, create_graph=False):
        """Flat partial derivatives of a scalar `loss` with respect to theta, (N,), and alpha, (M,)."""
        return self.derivatives(loss, self.theta, self.alpha, create_graph=create_graph)

    def derivatives(self, loss, *lists, create_graph=False):
        """The flat derivative of a scalar `loss` with respect to each of some lists of tensors."""
        tensors = sum(lists, [])
        g = torch.autograd.grad(loss, tensors, create_graph=create_graph, allow_unused=True) \
            if loss.requires_grad else [None] * len(tensors)               # a constant loss moves nothing
        g = iter(g)
        return [self.reduce(flatten([next(g) for _ in part], part)) for part in lists]

    def move_theta(self, step):
        """theta += step, in place; step is flat, (N,)."""
        with torch.no_grad():
            for p, s in zip(self.theta, unflatten(step, self.theta)):
                p += s

    @contextlib.contextmanager
    def keep_theta(self):
        """On leaving, however that happens, theta holds the values it has now."""
        saved = [p.detach().clone() for p in self.theta]
        try:
            yield
        finally:
            assign(self.theta, saved)


@torch.no_grad()
def assign(tensors, values):
    """Give the tensors, which may be parameters, these values, in place."""
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)


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


def lower_gradient(problem):
    """L_t, (N,), with its graph. Raises ValueError naming a tensor of theta that L does not use:
    its row of the Hessian would be zero."""
    L = problem.lower()
    g = [None]                                                             # a constant: it does not use theta[0]
    if L.requires_grad:
        g = torch.autograd.grad(L, problem.theta, create_graph=True, allow_unused=True)
    for i, (t, p) in enumerate(zip(g, problem.theta)):
        if t is None:
            raise ValueError(f"the lower loss does not use theta[{i}], shape {tuple(p.shape)}: leave it out of theta")
    return flatten(g, problem.theta)


def hvp(gradient, tensors, vector):
    """Hessian-vector product L_tt v by double backward: the derivative of <L_t, v> by theta (Pearlmutter, 1994). By alpha
    it is L_at v.

    gradient: flat L_t, (N,), with its graph; tensors: theta or alpha, a list; vector (N,). Returns (N,) or (M,).
    """
    parts = [None] * len(tensors)
    if gradient.requires_grad:                                             # else L is linear in theta
        parts = torch.autograd.grad(gradient, tensors, vector, retain_graph=True, allow_unused=True)
    return flatten(parts, tensors)


def gauss_newton(problem):
    """v -> J' l_zz J v with z = outputs(), J = dz/dtheta: the Hessian without the curvature of the
    model itself, positive semi-definite where loss is convex in z (Schraudolph, 2002)."""
    if problem.outputs is None or problem.loss is None:
        raise ValueError("curvature 'gauss-newton' needs a Bilevel with outputs and loss")
    z = problem.outputs()
    at = z.detach().requires_grad_()
    l_z, = torch.autograd.grad(problem.loss(at), at, create_graph=True)
    u = torch.zeros_like(z, requires_grad=True)
    J_transposed = lambda u, **how: flatten(torch.autograd.grad(z, problem.theta, u, allow_unused=True, **how), problem.theta)
    Jt_u = J_transposed(u, create_graph=True)                              # linear in u

    def product(v):
        Jv, = torch.autograd.grad(Jt_u, u, v, retain_graph=True)           # so its derivative by u is J v
        l_zz_Jv, = torch.autograd.grad(l_z, at, Jv, retain_graph=True)
        return J_transposed(l_zz_Jv, retain_graph=True)

    return product


def conjugate_gradient(matvec, b, tol=1e-10, max_iter=1000):
    """Solve H x = b for a positive definite H given as `matvec` (Hestenes & Stiefel, 1952).

    b is (N,). Returns x, (N,), and a report: "products" used, relative "residual", and
    "negative_curvature", true when some p'Hp <= 0 was met, or none to rounding beside the largest
    curvature seen: then H is not positive definite, what CG has so far answers no question, and x
    is all NaN.
    """
    x, r = torch.zeros_like(b), b.clone()
    p, rr, norm, sharpest = r.clone(), r.dot(r), b.norm(), 0.0
    report = {"products": 0, "residual": 0.0 if norm == 0 else 1.0, "negative_curvature": False}
    while report["residual"] > tol and report["products"] < max_iter:
        Hp = matvec(p)
        report["products"] += 1
        curvature, pp = p.dot(Hp), p.dot(p)
        sharpest = max(sharpest, float(Hp.norm() / pp.sqrt()))
        if curvature <= torch.finfo(b.dtype).eps * sharpest * pp:
            report["negative_curvature"] = True
            return torch.full_like(b, torch.nan), report
        step = rr / curvature
        x, r = x + step * p, r - step * Hp
        rr, rr_old = r.dot(r), rr
        p = r + (rr / rr_old) * p
        report["residual"] = float(rr.sqrt() / norm)
    return x, report


def neumann(matvec, b, step, terms, tol=0.0):
    """H^{-1} b as step * sum_k (I - step H)^k b, k < terms: gradient descent on x'Hx/2 - b'x
    (Lorraine et al., 2020, arXiv 1911.02590). Returns x and a report like conjugate_gradient's.

    Raises ArithmeticError when a curvature is met at which the series diverges: step * curvature > 2;
    ValueError for a step that is not positive.
    """
    if not 0 < step < math.inf:
        raise ValueError(f"the Neumann series needs a positive step, not {step}")
    x, r, norm = torch.zeros_like(b), b.clone(), b.norm()
    report = {"products": 0, "residual": 0.0 if norm == 0 else 1.0, "negative_curvature": False}
    while report["residual"] > tol and report["products"] < terms:
        x = x + step * r
        Hr = matvec(r)
        report["products"] += 1
        curvature = float(r.dot(Hr) / r.dot(r))                            # free: the Rayleigh quotient of r
        if curvature <= 0:
            report["negative_curvature"] = True
            return torch.full_like(b, torch.nan), report
        if step * curvature > 2:
            raise ArithmeticError(f"the Neumann series diverges: step {step:g} x curvature {curvature:g} = "
                                  f"{step * curvature:g} is above 2; use a step below {2 / curvature:g}")
        r = r - step * Hr
        report["residual"] = float(r.norm() / norm)
    return x, report


def largest_eigenvalue(matvec, like, iterations=50):
    """Power iteration from a fixed random vector shaped like `like`, (N,); a lower bound that tightens."""
    v = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=like.dtype).to(like.device)
    for _ in range(iterations):
        v = v / v.norm()
        Hv = matvec(v)
        v, value = Hv, Hv.norm()
    return float(value)


def exact_hypergradient(problem, solver="cg", curvature="hessian", damping=0.0, tol=1e-10, max_iter=1000, step=None):
    """dF/dalpha = F_a - L_at H^{-1} F_t with H = L_tt + damping I: the implicit function theorem
    (for hypergradients: Pedregosa, 2016, arXiv 1602.02355), exact where L_t = 0 and damping = 0.

    solver: "cg"; "neumann", `max_iter` terms of size `step` (default 1 / largest eigenvalue); or
    "dense", the matrix itself, for tiny problems: the ground truth. curvature "gauss-newton"
    replaces L_tt by J' l_zz J - always definite with damping > 0, always biased, for points where
    L_tt is not definite. Returns a list of tensors shaped like alpha, and a report: "products",
    relative "residual", "gradient_norm" ||L_t||, "negative_curvature". Warns where the formula
    does not hold: where H is not positive definite (CG and Neumann then answer NaN), where
    ||L_t|| is not small beside ||F_t||, and where CG ran out of products. Raises ValueError for a
    gradient that is not finite.
    """
    with exact_mode():
        L_t = lower_gradient(problem)
        F_t, F_a = problem.gradient(problem.upper())
        for name, g in (("lower", L_t), ("upper", F_t)):
            if not g.isfinite().all():
                raise ValueError(f"the gradient of the {name} loss is not finite here")
        if curvature not in ("hessian", "gauss-newton"):
            raise ValueError(f"curvature must be 'hessian' or 'gauss-newton', not {curvature!r}")
        product = gauss_newton(problem) if curvature == "gauss-newton" else lambda v: hvp(L_t, problem.theta, v)
        H = lambda v: product(v) + damping * v
        if solver == "cg":
            v, report = conjugate_gradient(H, F_t, tol, max_iter)
        elif solver == "neumann":
            if step is None:
                largest = largest_eigenvalue(H, F_t)
                step = 1 / largest if largest > 0 else 1.0                 # no curvature at all: the series will say so
            v, report = neumann(H, F_t, step, max_iter, tol)
        elif solver == "dense":
            matrix = torch.vmap(H, chunk_size=16)(torch.eye(len(F_t), dtype=F_t.dtype, device=F_t.device))   # (N, N)
            eigenvalues = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
            singular = eigenvalues.abs().min() <= torch.finfo(F_t.dtype).eps * eigenvalues.abs().max()
            v = torch.full_like(F_t, torch.nan) if singular else torch.linalg.solve(matrix, F_t)
            report = {"products": len(F_t), "residual": float((matrix @ v - F_t).norm() / F_t.norm().clamp_min(1e-300)),
                      "negative_curvature": bool(singular or eigenvalues[0] < 0),
                      "smallest_eigenvalue": float(eigenvalues[0]), "largest_eigenvalue": float(eigenvalues[-1])}
        else:
            raise ValueError(f"solver must be 'cg', 'neumann' or 'dense', not {solver!r}")
        report["gradient_norm"] = float(L_t.detach().norm())
        if report["negative_curvature"]:
            warnings.warn("the lower level's Hessian has negative curvature here, or none: theta is not at a minimum and there "
                          "is no hypergradient; converge it first, or use curvature='gauss-newton' with damping > 0 (biased)")
        elif report["gradient_norm"] > 1e-3 * float(F_t.norm()):
            warnings.warn(f"||L_theta|| = {report['gradient_norm']:.1e} is not small: the formula holds at a minimum of the "
                          "lower level")
        if solver == "cg" and report["products"] == max_iter and report["residual"] > tol:
            warnings.warn(f"CG stopped after max_iter = {max_iter} products at relative residual {report['residual']:.1e}, "
                          f"above {tol:g}")
        return unflatten(F_a - hvp(L_t, problem.alpha, v), problem.alpha), report            # F_a - L_at v


# --- 4. First order ------------------------------------------------------------------------------

def unrolled_hypergradient(problem, steps, lr):
    """d/dalpha of F(alpha, theta_T): theta_T = `steps` gradient steps of size `lr` on L from theta,
    differentiated backwards (Maclaurin et al., 2015, arXiv 1502.03492).

    The step theta_{t+1} = theta_t - lr L_t turns an adjoint v, F_t at first, into v - lr L_tt v and
    adds - lr L_at v to the hypergradient; started at theta*, where theta never moves, the sum is
    the Neumann series with `steps` terms. The path is kept: `steps` copies of theta. theta is put
    back. Returns a list of tensors shaped like alpha, and a report.
    """
    with exact_mode(), problem.keep_theta():
        path = []
        for _ in range(steps):
            path.append([p.detach().clone() for p in problem.theta])
            L_t, _ = problem.gradient(problem.lower())
            problem.move_theta(-lr * L_t)
        v, h = problem.gradient(problem.upper())                           # F_t and F_a at theta_T
        for point in reversed(path):
            assign(problem.theta, point)
            L_t = lower_gradient(problem)
            h, v = h - lr * hvp(L_t, problem.alpha, v), v - lr * hvp(L_t, problem.theta, v)
    return unflatten(h, problem.alpha), {"products": steps, "gradients": 2 * steps + 1}


def minimise(problem, objective, tol=1e-10, max_iter=40):
    """Move theta to the minimum of objective() it is near, by Newton steps solved with CG, damped by
    Levenberg's rule while negative curvature is met. Stops at gradient norm `tol` or where rounding
    ends the progress; returns the norm. Raises ArithmeticError if the curvature stays negative or zero."""
    damping, best, stuck, definite = 0.0, math.inf, 0, False
    with exact_mode():
        for _ in range(max_iter):
            g, _ = problem.gradient(objective(), create_graph=True)
            norm = float(g.detach().norm())
            best, stuck = (norm, 0) if norm < best / 2 else (best, stuck + 1)
            if norm <= tol or stuck >= 2 and damping == 0:
                break
            H = lambda v: hvp(g, problem.theta, v) + damping * v
            step, report = conjugate_gradient(H, g.detach(), tol=1e-3, max_iter=1000)
            if report["negative_curvature"]:
                damping, definite = max(10 * damping, norm), False
                continue
            problem.move_theta(-step)
            definite = definite or damping == 0
            damping = damping / 10 if damping > 1e-9 else 0.0
    if not definite and norm > tol:
        raise ArithmeticError(f"no minimum found: the curvature is still negative, or none, at gradient norm {norm:.1e}")
    return norm


def penalty_hypergradient(problem, lam, symmetric=False, tol=1e-14, inner_steps=None, inner_lr=None):
    """F2SA (Kwon et al., 2023, arXiv 2301.10945): with theta_{+-} = argmin L +- F / lam and theta* = argmin L,

        h = F_a(theta_+) + lam (L_a(theta_+) - L_a(theta*)),                  error O(1 / lam)
        h = mean of F_a(theta_+), F_a(theta_-) + lam/2 (L_a(theta_+) - L_a(theta_-)),   O(1 / lam^2), if `symmetric`.

    theta_+ is the theta_lam of BOME's pair. The inner problems start at theta and are solved to gradient norm `tol`
    by Newton's method, so that the penalty's own error is seen (an inner error d costs about lam d) - or, with
    `inner_steps`, by that many gradient steps of size `inner_lr` each: same start, same steps. theta is put back.
    Returns a list shaped like alpha, and a report with "gradient_norms". Raises ArithmeticError where an inner problem
    has no minimum, as L - F / lam at small lam.
    """
    if not lam > 0:
        raise ValueError(f"lam must be positive, not {lam}")
    if inner_steps is not None and inner_lr is None:
        raise ValueError("inner_steps needs an inner_lr")
    report, at = {"gradient_norms": []}, []
    for sign in ((1, -1) if symmetric else (1, 0)):
        objective = lambda: problem.lower() + sign / lam * problem.upper() if sign else problem.lower()
        with problem.keep_theta():
            for _ in range(inner_steps or 0):
                problem.move_theta(-inner_lr * problem.gradient(objective())[0])
            if inner_steps is None:
                try:
                    minimise(problem, objective, tol)
                except ArithmeticError as error:
                    raise ArithmeticError(f"{('L', 'L + F / lam', 'L - F / lam')[sign]} at lam = {lam:g}: {error}") from None
            report["gradient_norms"].append(float(problem.gradient(objective())[0].norm()))
            at.append((problem.gradient(problem.lower())[1], problem.gradient(problem.upper())[1]))
    (L_a, F_a), (L_a_other, F_a_other) = at
    h = (F_a + F_a_other + lam * (L_a - L_a_other)) / 2 if symmetric else F_a + lam * (L_a - L_a_other)
    return unflatten(h, problem.alpha), report


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
    if inner_steps < 1 or inner_lr is None:
        raise ValueError(f"BOME needs at least 1 of inner_steps and an inner_lr, not {inner_steps} and {inner_lr}")
    theta, alpha = problem.theta, problem.alpha
    F_value = problem.upper()
    F_t, F_a = problem.gradient(F_value)
    L = problem.lower()
    if not L.requires_grad:
        raise ValueError("the lower loss uses neither theta nor alpha")
    L_t, L_a = problem.gradient(L)

    with problem.keep_theta():
        problem.move_theta(-inner_lr * L_t)                                # the first inner gradient is L_t(theta)
        for _ in range(inner_steps - 1):
            problem.move_theta(-inner_lr * problem.derivatives(problem.lower(), theta)[0])
        L_T = problem.lower()                                              # at theta_T only L_a is needed
        L_a_T, = problem.derivatives(L_T, alpha)

    q_t, q_a = L_t, L_a - L_a_T                                            # L(theta_T) does not move with theta
    norm2 = q_t.dot(q_t) + q_a.dot(q_a)
    lam = max(0.0, eta - float((F_t.dot(q_t) + F_a.dot(q_a)) / norm2)) if norm2 > 0 else 0.0
    report = {"lam": lam, "residual": float(L.detach() - L_T.detach()), "lower": float(L.detach()),
              "upper": float(F_value.detach())}
    return unflatten(F_t + lam * q_t, theta), unflatten(F_a + lam * q_a, alpha), report


@dataclasses.dataclass
class Surrogate:
    """What `persistent_direction` carries from one step to the next.

    lam: the fixed multiplier; about 1e3, round-off in float32 forbids much more. momentum: heavy
    ball's. tolerance: the relative residual up to which alpha moves at full speed. batches: how
    many mini-batches, one a call and of equal size, are averaged before the surrogate moves: all those of an epoch.
    """
    lam: float = 1e3
    momentum: float = 0.9
    tolerance: float = 0.01
    batches: int = 1
    shift: torch.Tensor = None                             # v = lam (theta_lam - theta_T), (N,)
    previous: torch.Tensor = None                          # v one step ago
    sharpest: torch.Tensor = None                          # direction of the largest curvature, (N,)
    sharpness: float = 0.0                                 # that curvature
    direction: torch.Tensor = None                         # h, (M,): alpha goes along it until there is a newer one
    scale: float = 0.0                                     # of alpha's step; zero until v has settled once
    sums: list = None                                      # over the mini-batches seen since v moved
    seen: int = 0                                          # their number
    steps: int = 0


def persistent_direction(problem, s):
    """BOME with a surrogate that is carried along instead of restarted, in 3 gradients a step (and 20 at the start).

    The exact hypergradient is F_a + L_at v with v = - H^-1 F_t, and v is what is carried along: the direction in
    which theta's minimum gives way when F pulls at it. BOME's pair is theta_lam, descending L + F / lam, and theta_T,
    descending L. Stepped apart, each lags behind its own moving minimum, and lam magnifies the difference of the
    lags. Here the pair is kept as theta_T - the caller's theta, which descends L alone by whatever optimiser - and the
    magnified difference v = lam (theta_lam - theta_T), so that the lag is common and cancels. v descends with heavy
    ball, H v being a difference of two first gradients:

        H v = lam (L_t(theta + v / lam) - L_t(theta)),   r = H v + F_t,   v <- v - r / sharpness + momentum (v - v_before)
        h = F_a + lam (L_a(theta + v / lam) - L_a(theta)) -> the hypergradient as r -> 0.

    Two rules keep it on its track. Every tenth step the product goes to power iteration, which
    follows the largest curvature, and so the step that is still stable. And the free relative residual
    ||r|| / ||F_t|| holds alpha: it waits until the residual was once below the tolerance, then
    moves at min(1, tolerance / residual) of its speed. The single-loop idea is that of F2SA.

    With mini-batches, noise enters h through H^-1, so small steps of v cannot average it in any
    affordable time. Instead v waits for s.batches of them, an epoch's, whose mean has no noise at
    all; alpha goes on meanwhile along the last h. theta must wait as well: step it where the
    report says "complete"; its direction is zero elsewhere.

    Returns (L_t, scaled h, report) like bome_direction; the report has the "residual", the "scale"
    of alpha's step, "sharpness" (1 / it is a safe step for theta), "complete" and "direction", h itself.
    """
    L = problem.lower()
    L_t, L_a = problem.gradient(L)

    def lower_at(shift):                                   # L's gradients at theta + shift / lam
        with problem.keep_theta():
            problem.move_theta(shift / s.lam)
            return problem.gradient(problem.lower())

    if s.shift is None:
        s.shift, s.previous, s.direction = torch.zeros_like(L_t), torch.zeros_like(L_t), torch.zeros_like(L_a)
        s.sharpest = torch.randn(L_t.shape, generator=torch.Generator().manual_seed(0), dtype=L_t.dtype).to(L_t.device)
        for _ in range(20):                                # a first guess, from one batch
            s.sharpest = s.lam * (lower_at(s.sharpest / s.sharpest.norm())[0] - L_t)       # H u
    measuring = s.steps % 10 == 0
    L_t_there, L_a_there = lower_at(s.sharpest / s.sharpest.norm() if measuring else s.shift)
    report, new = {"lam": s.lam, "lower": float(L.detach())}, [L_t, s.lam * (L_t_there - L_t)]
    if not measuring:
        F_value = problem.upper()
        F_t, F_a = problem.gradient(F_value)
        report["upper"] = float(F_value.detach())
        new += [F_t, F_a + s.lam * (L_a_there - L_a)]
    s.sums = [a + b for a, b in zip(s.sums, new)] if s.seen else new
    s.seen = (s.seen + 1) % s.batches
    complete = s.seen == 0
    if complete:
        s.steps += 1
        L_t, product, *rest = (a / s.batches for a in s.sums)              # H times the sharpest direction, or times v
        if measuring:
            s.sharpest, s.sharpness = product, max(0.9 * s.sharpness, float(product.norm()))
            if not 0 < s.sharpness < math.inf:
                raise ArithmeticError(f"the lower loss has curvature {s.sharpness} in theta: no surrogate can follow "
                                      "its minimum")
        else:
            F_t, s.direction = rest
            r, size = product + F_t, F_t.norm()
            residual = report["residual"] = float(r.norm() / (size if size > 0 else 1.0))  # F without theta: v stays zero
            s.shift, s.previous = s.shift - r / s.sharpness + s.momentum * (s.shift - s.previous), s.shift
            s.scale = s.tolerance / max(residual, s.tolerance) if s.scale or residual <= s.tolerance else 0.0
    report |= {"sharpness": s.sharpness, "scale": s.scale, "direction": s.direction, "complete": complete}
    d_theta = L_t if complete else torch.zeros_like(L_t)
    return unflatten(d_theta, problem.theta), unflatten(s.scale * s.direction, problem.alpha), report


# --- 5. The laboratory ---------------------------------------------------------------------------

def quadratic(mu=0.1, seed=0):
    """L = |A theta - B alpha|^2 / 2 + mu/2 |theta|^2, F = |theta - c|^2 / 2 + <alpha, d>: every answer has a closed form."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    A, B, c, d = draw(30, 40), draw(30, 8), draw(40), draw(8)
    A = A * torch.logspace(0, -1.5, 40, dtype=torch.float64)               # a spread of eigenvalues
    theta, alpha = draw(40).requires_grad_(), draw(8).requires_grad_()
    return Bilevel([theta], [alpha], lambda: ((A @ theta - B @ alpha) ** 2).sum() / 2 + mu / 2 * (theta ** 2).sum(),
                   lambda: ((theta - c) ** 2).sum() / 2 + alpha @ d)


def softmax_regression(mu=0.0, mode="scalar", entropy_of="adjusted", seed=0):
    """z = W x + b on 200 rows of 5 features and 4 classes, theta = (W, b), the last logit zero; F looks at 200 other rows.

    L = cross-entropy under a LogitAdjustment + mu/2 |theta|^2; entropy_of "raw": F takes the entropy of z, not of z~.
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    x, x_F, truth = draw(200, 5), draw(200, 5), draw(5, 4)
    u = torch.rand(200, 1, generator=g, dtype=torch.float64)                             # noisy labels: L has a minimum;
    targets = ((x @ truth).softmax(-1).cumsum(-1) < u).sum(-1).clamp_max(3)              # the same in every torch
    theta, adjustment = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True), LogitAdjustment(4, mode).double()
    logits = lambda x: F.pad(x @ theta[:5] + theta[5], (0, 1))                           # (200, 4)
    return Bilevel([theta], [p for p in adjustment.parameters() if p.requires_grad],
                   lambda: parametric_cross_entropy(logits(x), targets, adjustment) + mu / 2 * (theta ** 2).sum(),
                   lambda: negative_entropy(logits(x_F), adjustment if entropy_of == "adjusted" else None))


@functools.cache
def pretrained(seed):
    """A one-layer transformer trained on 64 statements of a toy world: model, ids and held-out ids, (64, 5) each."""
    from data import World
    from model import Config, Transformer
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    world = World(seed, subjects=4, relations=2, values=4, pool=4, shared=0, names=1)
    model = Transformer(Config(world.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                               num_attention_heads=2, num_key_value_heads=1)).double()
    ids, held_out = (world.statements(64, "all", "all", generator) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 300)
        loss = F.cross_entropy(model(ids[:, :-1])[:, -1], ids[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.lm_head.weight.requires_grad_(False)             # as under LoRA: what the lower level cannot re-fit
    return model, ids, held_out


def tiny_transformer(mu=0.1, seed=0, batch=64, dtype=torch.float64, unseen=False):
    """2,224 parameters in float64: the pretrained transformer and its 64 statements, head frozen.

    L = cross-entropy + mu/2 ||theta - theta_0||^2, theta_0 the pretrained point: without the proximal
    term the minimum is hardly determined. mu = 0.1 makes the easy problem (condition number about
    1e3), mu = 0.001 the hard one (about 1e5). `batch` rows of L and F at a time, the next ones after
    problem.draw(), all 64 until then. unseen: F looks at questions with a random token for their
    subject, which L does not hold: F_t is larger where L is flat, and so are the penalties' errors.
    """
    model, ids, held_out = copy.deepcopy(pretrained(seed))
    if unseen:
        held_out[:, 1] = torch.randint(model.config.vocab_size, (64,), generator=torch.Generator().manual_seed(seed))
    adjustment = LogitAdjustment(model.to(dtype).config.vocab_size).to(dtype)
    theta = [p for p in model.parameters() if p.requires_grad]
    theta_0 = [p.detach().clone() for p in theta]
    rows, epoch = slice(None), itertools.cycle(slice(i, i + batch) for i in range(0, 64, batch))

    def draw(every=False):
        nonlocal rows
        rows = slice(None) if every else next(epoch)

    def outputs():
        return model(ids[rows, :-1])[:, -1]                # (n, V)

    def data_term(logits):
        return parametric_cross_entropy(logits, ids[rows, -1], adjustment)

    def lower():
        return data_term(outputs()) + mu / 2 * sum(((p - p_0) ** 2).sum() for p, p_0 in zip(theta, theta_0))

    def upper():
        return negative_entropy(model(held_out[rows, :-1])[:, -1], adjustment)

    problem = Bilevel(theta, list(adjustment.parameters()), lower, upper, outputs, data_term)
    problem.draw = draw
    return problem


def converge(problem, sharpness, tol=1e-10):
    """Move theta to the minimum of L it rolls down to: heavy ball, whose steps are too short to leave
    the valley, then Newton. Returns ||L_t||; ArithmeticError where there is no minimum."""
    velocity = 0.0
    for _ in range(3000):
        L_t, _ = problem.gradient(problem.lower())
        if L_t.norm() < 1e-3:
            break
        velocity = 0.9 * velocity - L_t / sharpness
        problem.move_theta(velocity)
    return minimise(problem, problem.lower, tol)


def sharpness_of(problem):
    """Largest eigenvalue of L_tt here; 1 / it is a safe gradient step."""
    with exact_mode():
        L_t = lower_gradient(problem)
        return largest_eigenvalue(lambda v: hvp(L_t, problem.theta, v), L_t.detach())


def settled_bome(problem, T, inner_lr, budget=300):
    """BOME's alpha direction where it is used: at theta that has followed BOME's own theta direction, alpha held, for
    about `budget` inner steps, the same for every T. The seconds are those of the last direction alone."""
    with problem.keep_theta():
        for _ in range(max(1, budget // T)):
            start = time.perf_counter()
            d_theta, d_alpha, report = bome_direction(problem, T, inner_lr, eta=0.5)
            seconds = time.perf_counter() - start
            problem.move_theta(-inner_lr / max(1.0, report["lam"]) * flatten(d_theta, problem.theta))
    return d_alpha, {"gradients": T + 1.33, "seconds": seconds}


def peak_bytes(call):
    """Most memory that the tensors made during call() held at once, on the CPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")        # the profiler is talkative
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


TABLE_A = ("F_a alone", "30 products", "damping mu", "100 terms", "100 steps", "lam 1e+04", "T = 10")


def compare(h, truth):
    """Relative error and cosine of one alpha direction, (M,), to the true one."""
    return {"relative_error": float((h - truth).norm() / truth.norm()),
            "cosine": float(h.dot(truth) / (h.norm() * truth.norm()))}


def penalties(problem):
    """Jobs (method, setting, call) for both penalties over the range where their slopes show."""
    return [(method, f"lam {lam:.0e}", lambda lam=lam, symmetric=symmetric: penalty_hypergradient(problem, lam, symmetric))
            for method, symmetric in (("penalty", False), ("symmetric penalty", True)) for lam in (1e3, 1e4, 1e5)]


def at_one_point(problem, mu, memory):
    """Tables (a) and (b): facts about the converged point, and a row for every method and setting."""
    sharpness = sharpness_of(problem)
    reached = converge(problem, sharpness)
    truth, report = exact_hypergradient(problem, "dense")
    truth, sharpness = flatten(truth, problem.alpha), report["largest_eigenvalue"]
    facts = {"parameters": sum(p.numel() for p in problem.theta), "gradient_norm": reached, "largest_eigenvalue": sharpness,
             "condition_number": sharpness / report["smallest_eigenvalue"], "mu": mu}
    exact = lambda **options: (lambda: exact_hypergradient(problem, **options))
    step = 1 / sharpness
    jobs = [("lower level ignored", "F_a alone", lambda: (problem.gradient(problem.upper())[1:], {"gradients": 1}))]
    jobs += [("exact, CG", f"{k} products", exact(max_iter=k, tol=1e-13)) for k in (3, 10, 30, 100, 300)]
    if problem.outputs:
        jobs += [("Gauss-Newton, CG", "damping mu", exact(curvature="gauss-newton", damping=mu))]
    jobs += [("Neumann", f"{T} terms", exact(solver="neumann", max_iter=T, step=step)) for T in (1, 10, 100)]
    jobs += [("unrolled", f"{T} steps", lambda T=T: unrolled_hypergradient(problem, T, step)) for T in (10, 100)]
    jobs += penalties(problem)
    jobs += [("BOME, restarted", f"T = {T}", lambda T=T: settled_bome(problem, T, step)) for T in (1, 10, 100)]
    rows = measure(problem, jobs, truth)
    if memory:
        calls = {setting: call for _, setting, call in jobs} | {"T = 10": lambda: bome_direction(problem, 10, step, 0.5)}
        for r in rows:
            if r["setting"] in ("F_a alone", "30 products", "T = 10"):
                r["peak_bytes"] = peak_bytes(calls[r["setting"]])
    return facts, rows


def measure(problem, jobs, truth):
    """A row for every job (method, setting, call), against the true hypergradient, (M,); None for what has no minimum."""
    rows = []
    for method, setting, call in jobs:
        start, found = time.perf_counter(), {"relative_error": None, "cosine": None}
        try:
            h, report = call()
            found = compare(flatten(h, problem.alpha), truth)
        except ArithmeticError:
            report = {}
        # A product costs about two gradients; solving the penalty's inner problems is not counted.
        gradients = None if "penalty" in method else report.get("gradients", 2 * report.get("products", 1) + 3)
        rows.append({"method": method, "setting": setting, **found, "gradients": gradients, "peak_bytes": None,
                     "seconds": report.get("seconds", time.perf_counter() - start)})
    return rows


def along_a_trajectory(problem, kind, speed, budget, looks=3):
    """Table (c): alpha moves `speed` times its direction a step, theta follows, until `budget` gradients
    are spent; the direction is compared with the exact hypergradient at the minimum that theta is
    following, at `looks` places. kind: BOME's T, or a Surrogate."""
    persistent = isinstance(kind, Surrogate)
    cost = 3 if persistent else kind + 1.33
    steps, found, velocity, moved, lost_at = int(budget / cost), [], 0.0, 0.0, None
    sharpness = sharpness_of(problem)
    converge(problem, sharpness, tol=1e-6)
    for step in range(steps):
        problem.draw()                                     # the budget counts gradients of what it draws
        if persistent:
            d_theta, d_alpha, report = persistent_direction(problem, kind)
        else:
            d_theta, d_alpha, report = bome_direction(problem, kind, 1 / sharpness, 0.5)
        d_theta, d_alpha = flatten(d_theta, problem.theta), flatten(d_alpha, problem.alpha)
        if not persistent:
            problem.move_theta(-d_theta / (sharpness * max(1.0, report["lam"])))
        elif report["complete"]:
            sharpness = kind.sharpness
            velocity = kind.momentum * velocity - d_theta / sharpness
            problem.move_theta(velocity)
        moving = report.get("scale", 1.0) > 0
        if moving and len(found) <= (step + 1) * looks // steps:           # at once when alpha first moves, then evenly
            problem.draw(every=True)
            try:
                with problem.keep_theta():
                    converge(problem, sharpness, tol=1e-7)
                    truth = flatten(exact_hypergradient(problem, tol=1e-5, max_iter=3000)[0], problem.alpha)
            except ArithmeticError:                        # no minimum of L is left near theta: nothing to compare with
                lost_at = step
                break
            found.append(compare(report.get("direction", d_alpha), truth))
        with torch.no_grad():
            for p, d in zip(problem.alpha, unflatten(d_alpha, problem.alpha)):
                p -= speed * d
        moved += speed * float(d_alpha.norm())
    row = {"steps": steps, "gradients": budget, "speed": speed, "alpha_path": moved, "looks": len(found), "lost_at": lost_at,
           "mean_cosine": None, "worst_cosine": None, "cosine": None, "relative_error": None}
    if found:                                              # else alpha never moved, or the minimum was lost before
        errors, cosines = [f["relative_error"] for f in found], [f["cosine"] for f in found]
        row |= {"mean_cosine": sum(cosines) / len(found), "worst_cosine": min(cosines), "cosine": cosines[-1],
                "relative_error": sum(errors) / len(found)}
    return row


def language_model(directory, questions, mu=0.1, n=8, rank=8):
    """A real LLM: theta = LoRA on its attention projections; L = cross-entropy of n answers + mu/2 |theta|^2,
    F = negative entropy at n other answer positions. theta is first fine-tuned by 20 steps of L-BFGS."""
    from data import IGNORE, Prompter, load_mcqa, supervise
    from model import Transformer, add_lora
    prompter, rows = Prompter(directory), load_mcqa(questions)
    if len(rows) < 2 * n:
        raise ValueError(f"{questions}: {len(rows)} questions, and {2 * n} are needed")
    pick = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:2 * n].tolist()
    asked = [prompter.question(rows[i], "text") for i in pick]
    answered = [(q.prompt, q.options[q.gold]) for q in asked]
    (ids, targets), (ids_F, targets_F) = supervise(answered[:n]), supervise(answered[n:])                # (n, T) each
    supervised, first = targets != IGNORE, targets_F != IGNORE
    first &= first.cumsum(1) == 1                                          # where the answer starts: F needs no label
    torch.manual_seed(0)
    model = Transformer.from_pretrained(directory)
    theta = list(add_lora(model, rank, 2 * rank, targets=("q_proj", "k_proj", "v_proj", "o_proj")).values())
    theta_0 = [p.detach().clone() for p in theta]
    adjustment = LogitAdjustment(model.config.vocab_size)
    outputs = lambda: model.head(model.hidden(ids)[supervised])            # (answer tokens, V)
    data_term = lambda z: parametric_cross_entropy(z, targets[supervised], adjustment)
    proximal = lambda: mu / 2 * sum(((p - p_0) ** 2).sum() for p, p_0 in zip(theta, theta_0))
    problem = Bilevel(theta, list(adjustment.parameters()), lambda: data_term(outputs()) + proximal(),
                      lambda: negative_entropy(model.head(model.hidden(ids_F)[first]), adjustment), outputs, data_term)
    optimizer = torch.optim.LBFGS(theta, max_iter=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = problem.lower()
        loss.backward(inputs=theta)
        return loss

    optimizer.step(closure)
    return problem


def at_a_language_model(problem, mu, max_iter=60):
    """BOME and ignoring the lower level against the best reference there is: the Hessian where CG finds
    it definite, else Gauss-Newton plus mu, which is biased and named so."""
    h, report = exact_hypergradient(problem, tol=1e-4, max_iter=max_iter)
    reference = "exact, CG"
    if report["negative_curvature"]:
        h, report = exact_hypergradient(problem, curvature="gauss-newton", damping=mu, tol=1e-4, max_iter=max_iter)
        reference = "Gauss-Newton + mu, CG (biased)"
    truth = flatten(h, problem.alpha)
    with exact_mode():
        product = gauss_newton(problem)
        like = flatten(problem.theta, problem.theta).detach()
        sharpness = largest_eigenvalue(lambda v: product(v) + mu * v, like, iterations=10)
    facts = {"parameters": sum(p.numel() for p in problem.theta), "gradient_norm": report["gradient_norm"], "mu": mu,
             "largest_eigenvalue": sharpness, "condition_number": sharpness / mu, "reference": reference,
             "products": report["products"], "residual": report["residual"]}
    jobs = [("lower level ignored", "F_a alone", lambda: (problem.gradient(problem.upper())[1:], {"gradients": 1}))]
    jobs += [("BOME, restarted", f"T = {T}", lambda T=T: settled_bome(problem, T, 1 / sharpness, budget=10))
             for T in (1, 3, 10)]
    return facts, measure(problem, jobs, truth)


def under_a_temperature():
    """Table (d): sizes of F_a and of dF/dalpha in softmax_regression, where theta can undo what alpha does, and where not."""
    rows = []
    for entropy_of, mode, mu in (("adjusted", "scalar", 0.0), ("adjusted", "vector", 0.0), ("adjusted", "scalar", 0.1),
                                 ("adjusted", "vector", 0.1), ("raw", "scalar", 0.0), ("raw", "vector", 0.0)):
        problem = softmax_regression(mu, mode, entropy_of)
        reached = minimise(problem, problem.lower, 1e-14)
        h, report = exact_hypergradient(problem, tol=1e-14)
        F_a = problem.gradient(problem.upper())[1]
        rows.append({"problem": "temperature", "method": f"{entropy_of} entropy, {mode}", "setting": f"mu = {mu:g}",
                     "ignored": float(F_a.norm()), "hypergradient": float(flatten(h, problem.alpha).norm()),
                     "gradient_norm": reached, "products": report["products"]})
    return rows


def print_table(title, reading, facts, rows, columns):
    """A title, one line on how to read it, the facts about the point, and the rows in columns."""
    print(f"\n{title}\n{reading}")
    if facts:
        known = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()]
        print("  " + ", ".join(known).replace("_", " "))
    print(f"  {'method':30s}{'setting':14s}" + "".join(f"{c.replace('_', ' '):>16s}" for c in columns))
    for r in rows:
        line = f"  {r['method']:30s}{r['setting']:14s}"
        for column in columns:
            form = ".2e" if column == "relative_error" else ".4f" if "cosine" in column else ".4g"
            line += ("-" if r.get(column) is None else f"{r[column]:{form}}").rjust(16)
        print(line)


def plot(rows, path):
    """PNG of relative error against gradients spent, both problems."""
    from metrics import new_figure, save_png
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    figure = new_figure(figsize=(5 * len(problems), 4))
    axes = figure.subplots(1, len(problems), sharey=True, squeeze=False)[0]
    for ax, problem in zip(axes, problems):
        for method in ("exact, CG", "Neumann", "BOME, restarted"):
            points = [(r["gradients"], r["relative_error"]) for r in rows if (r["method"], r["problem"]) == (method, problem)]
            ax.loglog(*zip(*points), "o-", label=method)
        ax.set(title=problem, xlabel="gradients spent")
    axes[0].set_ylabel("relative error of the alpha direction")
    axes[0].legend()
    save_png(figure, path)


def main(argv=None):
    """The command line; returns the exit code: 0, 2 for bad input, 130 for Ctrl-C."""
    from metrics import Parser, check_output, complain
    parser = Parser(description="Every hypergradient against the exact one.", allow_abbrev=False,
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--problem", default="transformer", choices=["quadratic", "transformer", "temperature", "llm"],
                        help="whose hypergradients")
    parser.add_argument("--seeds", type=int, default=1, help="problems along whose trajectories directions are compared")
    parser.add_argument("--steps", type=int, default=120,
                        help="of the persistent surrogate along a trajectory; the others spend as many gradients")
    parser.add_argument("--model", metavar="DIR", help="of --problem llm: a Hugging Face directory")
    parser.add_argument("--train", metavar="FILE", help="of --problem llm: questions")
    parser.add_argument("--json", metavar="PATH", help="write every printed number there")
    parser.add_argument("--plot", metavar="PNG", help="draw table (b); needs matplotlib")
    try:
        args = parser.parse_args(argv)
        if args.problem == "llm" and not (args.model and args.train):
            raise ValueError("--problem llm needs --model DIR and --train FILE")
        if not (1 <= args.seeds <= 1e9 and 100 <= args.steps <= 1e9):
            raise ValueError("--seeds must be at least 1 and --steps at least 100, and neither above 1e9")
        if args.plot and args.problem in ("llm", "temperature"):
            raise ValueError("--plot draws table (b) of the quadratic or the transformer")
        for path in (args.json, args.plot):
            if path is not None:
                check_output(path)
        laboratory(args)
        return 0
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        return complain("bilevel.py", error)
    except KeyboardInterrupt:
        print("\nbilevel.py: interrupted", file=sys.stderr)
        return 130


def laboratory(args):
    """Run the problems asked for, print their tables, write --json and --plot."""
    from metrics import write_json
    warnings.simplefilter("ignore")                        # the tables show what the warnings warn of
    columns = ["relative_error", "cosine", "gradients", "seconds"]
    facts, rows = {}, []
    if args.problem == "llm":
        facts["llm"], rows = at_a_language_model(language_model(args.model, args.train), mu=0.1)
        print_table("A real LLM, LoRA on the attention projections",
                    "How to read it: errors are to the reference named below, at a point that is only nearly converged.",
                    facts["llm"], rows, columns)
    elif args.problem == "temperature":
        rows = under_a_temperature()
        print_table("(d) What theta can undo",
                    "How to read it: sizes of dF/dalpha, lower level ignored and exact. Where theta is free to re-fit the\n"
                    "adjusted logits, alpha changes nothing that F sees; a regulariser mu, or F of raw logits, makes it count.",
                    {}, rows, ["ignored", "hypergradient"])
    else:
        torch.set_num_threads(1)                           # tensors this small only lose by sharing
        make = quadratic if args.problem == "quadratic" else tiny_transformer
        for name, mu in (("easy", 0.1), ("hard", 0.001)):
            problem = make(mu)
            facts[name], here = at_one_point(problem, mu, memory=name == "easy")
            table_a = [r for r in here if r["setting"] in TABLE_A]
            print_table(f"(a) One converged point, {name} problem",
                        "How to read it: a cosine flatters; compare the relative error with that of ignoring the lower level.",
                        facts[name], table_a, columns + ["peak_bytes"])
            print_table(f"(b) Error against work, {name} problem",
                        "How to read it: T steps are T Neumann terms; a penalty's error falls as 1/lam, the symmetric one's as\n"
                        "1/lam^2, down to round-off; \"-\": L - F / lam has no minimum.",
                        {}, here, ["relative_error", "cosine", "gradients"])
            rows += [{"problem": name, **r} for r in here]
    if args.problem == "transformer":
        problem = tiny_transformer(unseen=True)
        converge(problem, sharpness_of(problem), tol=1e-14)
        here = measure(problem, penalties(problem), flatten(exact_hypergradient(problem, tol=1e-14)[0], problem.alpha))
        print_table("(b) Penalties where F looks at questions that L does not hold, easy problem",
                    "How to read it: the errors are larger, far above round-off, and fall as 1/lam and 1/lam^2 all the way.",
                    {}, here, ["relative_error", "cosine"])
        rows += [{"problem": "unseen", **r} for r in here]
        found = []
        kinds = (("BOME, restarted", "T = 1", lambda: 1), ("BOME, restarted", "T = 10", lambda: 10),
                 ("BOME, persistent", "full batch", Surrogate),
                 ("BOME, persistent", "batches of 16", lambda: Surrogate(batches=4)))
        for seed in range(args.seeds):
            for speed in (1e-3, 1e-2):
                for method, setting, kind in kinds:
                    problem = tiny_transformer(seed=seed, batch=16 if setting == "batches of 16" else 64)
                    row = {"problem": f"seed {seed}", "method": method, "setting": setting, "speed": speed}
                    start = time.perf_counter()
                    # Of mini-batches it takes four to move v, and v settles in some 80 moves.
                    steps = max(400, args.steps) if setting == "batches of 16" else args.steps
                    row |= along_a_trajectory(problem, kind(), speed, budget=3 * steps, looks=max(3, steps // 333))
                    found.append({**row, "seconds": time.perf_counter() - start})
        for speed in (1e-3, 1e-2):
            print_table(f"(c) Along a trajectory, alpha moving {speed:g} times its direction, {args.seeds} problem(s)",
                        "How to read it: equal gradients spent (with batches of 16, of a batch); the exact one is taken at the\n"
                        "minimum theta follows, until, at step \"lost at\", there is none.",
                        {}, [r for r in found if r["speed"] == speed],
                        ["mean_cosine", "worst_cosine", "relative_error", "alpha_path", "lost_at"])
        rows += found
    if args.json:
        said = {k: v for k, v in vars(args).items() if k not in ("json", "plot") and v is not None}
        command = "python bilevel.py " + " ".join(f"--{k} {Path(str(v)).name}" for k, v in said.items())     # no folders
        write_json(args.json, {"command": command, "problem": facts, "rows": rows})
    if args.plot:
        plot([r for r in rows if r["problem"] in ("easy", "hard")], args.plot)
    sys.stdout.flush()                                     # here a full disk is still an error like any other


if __name__ == "__main__":
    signal.signal(signal.SIGINT, at_ctrl_c)
    sys.exit(main())
