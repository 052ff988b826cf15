"""bilevel.py against closed forms, finite differences and the cases that must hold."""
import argparse
import contextlib
import io
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies
from torch.nn import functional as F

import bilevel
from bilevel import (Bilevel, LogitAdjustment, Surrogate, bome_direction, chunked, conjugate_gradient, exact_hypergradient, exact_mode,
                     flatten, hvp, minimise, negative_entropy, neumann, parametric_cross_entropy, penalty_hypergradient, persistent_direction,
                     unflatten, unrolled_hypergradient)
from model import Config, Transformer


def scalar(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def relative(a, b):
    return float((a - b).norm() / b.norm())


# --- The losses ----------------------------------------------------------------------------------

def test_adjustment_is_the_identity_at_zero_and_temperature_scaling_as_a_scalar():
    z = torch.randn(5, 7)
    assert torch.equal(LogitAdjustment(7)(z), z)
    scalar_mode = LogitAdjustment(7, mode="scalar")
    with torch.no_grad():
        scalar_mode.log_scale.fill_(-math.log(2.0))
    torch.testing.assert_close(scalar_mode(z), z / 2)
    assert [p.shape for p in scalar_mode.parameters() if p.requires_grad] == [torch.Size([])]
    with pytest.raises(ValueError, match="matrix"):
        LogitAdjustment(7, mode="matrix")


def test_what_theta_can_undo_is_the_committed_table():
    committed = json.loads((Path(__file__).parent / "results" / "bilevel_temperature.json").read_text())["rows"]
    for row, saved in zip(bilevel.under_a_temperature(), committed, strict=True):
        assert (row["method"], row["setting"]) == (saved["method"], saved["setting"])
        assert [row[key] for key in ("ignored", "hypergradient")] == pytest.approx([saved[key] for key in ("ignored", "hypergradient")], rel=1e-8, abs=1e-12)


def test_losses_by_hand():
    """Logits log(1, 3): probabilities 1/4, 3/4. With scale 2: 1/10, 9/10. With offset log 3 on the first: 1/2, 1/2."""
    z = torch.log(torch.tensor([[1.0, 3.0]], dtype=torch.float64))
    targets, adjustment = torch.tensor([0]), LogitAdjustment(2).double()
    H = lambda *p: -sum(q * math.log(q) for q in p)
    assert parametric_cross_entropy(z, targets).item() == pytest.approx(math.log(4))
    assert negative_entropy(z).item() == pytest.approx(-H(0.25, 0.75))
    with torch.no_grad():
        adjustment.log_scale.fill_(math.log(2))
    assert parametric_cross_entropy(z, targets, adjustment).item() == pytest.approx(math.log(10))
    assert negative_entropy(z, adjustment).item() == pytest.approx(-H(0.1, 0.9))
    with torch.no_grad():
        adjustment.log_scale.zero_()
        adjustment.offset[0] = math.log(3)
    assert parametric_cross_entropy(z, targets, adjustment).item() == pytest.approx(math.log(2))
    assert negative_entropy(z, adjustment).item() == pytest.approx(-math.log(2))


def test_masked_tokens_do_not_count():
    z, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    mask = torch.rand(2, 5) > 0.5
    masked = torch.where(mask, targets, -100)
    torch.testing.assert_close(parametric_cross_entropy(z, masked, label_smoothing=0.1),
                               F.cross_entropy(z.flatten(0, 1), masked.flatten(), label_smoothing=0.1))
    torch.testing.assert_close(negative_entropy(z, mask=mask), negative_entropy(z[mask]))


def test_case_27_a_batch_with_every_label_masked_is_zero_and_not_nan():
    z = torch.randn(2, 3, 7, requires_grad=True)
    loss = parametric_cross_entropy(z, torch.full((2, 3), -100), LogitAdjustment(7))
    loss.backward()
    assert loss.item() == 0 and z.grad.abs().sum() == 0


def test_half_precision_logits_are_summed_in_float32():
    torch.manual_seed(0)
    z, targets = torch.randn(4, 50_000).bfloat16(), torch.arange(4)
    adjustment = LogitAdjustment(50_000, mode="scalar")
    with torch.no_grad():
        adjustment.log_scale.fill_(0.003)
    torch.testing.assert_close(parametric_cross_entropy(z, targets), F.cross_entropy(z.float(), targets))
    torch.testing.assert_close(parametric_cross_entropy(z, targets, adjustment), F.cross_entropy(z.float() * math.exp(0.003), targets))
    torch.testing.assert_close(negative_entropy(z), negative_entropy(z.float()))


def test_entropy_with_no_position_with_integer_masks_and_with_impossible_items():
    z = torch.randn(2, 3, 7, requires_grad=True)
    assert negative_entropy(z, mask=torch.zeros(2, 3, dtype=torch.bool)).item() == 0
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    torch.testing.assert_close(negative_entropy(z, mask=mask), negative_entropy(z[mask.bool()]))
    possible = z.detach()[..., :5]
    padded = torch.cat([possible, torch.full((2, 3, 2), -torch.inf)], -1).requires_grad_()
    loss = negative_entropy(padded)
    loss.backward()
    torch.testing.assert_close(loss, negative_entropy(possible))
    assert padded.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["scalar", "vector"])
def test_an_impossible_item_leaves_both_losses_and_their_gradients_as_without_it(mode):
    torch.manual_seed(0)
    possible, targets = torch.randn(6, 5), torch.tensor([0, 4, 2, 1, 1, -100])
    padded = torch.cat([possible, torch.full((6, 2), -torch.inf)], -1)
    for loss in (lambda z, a: negative_entropy(z, a), lambda z, a: parametric_cross_entropy(z, targets, a)):
        found = []
        for z in (possible, padded):
            adjustment = LogitAdjustment(z.shape[1], mode)
            with torch.no_grad():
                adjustment.log_scale.fill_(0.3)
            value = loss(z, adjustment)
            value.backward()
            found.append((value.detach(), adjustment.log_scale.grad if mode == "scalar" else adjustment.log_scale.grad[:5]))
        torch.testing.assert_close(found[0], found[1])


def test_chunked_losses_equal_the_plain_ones():
    """Value, gradients by theta and alpha, and a Hessian-vector product; 50 positions in chunks of 16."""
    torch.manual_seed(0)
    hidden, W, y = torch.randn(50, 6).double(), torch.randn(6, 11).double(), torch.randint(11, (50,))
    hidden, W, adjustment = hidden.requires_grad_(), W.requires_grad_(), LogitAdjustment(11).double()
    tensors = [hidden, W, *adjustment.parameters()]
    def derivatives(value):
        g = flatten(torch.autograd.grad(value, tensors, create_graph=True), tensors)
        v = torch.linspace(-1, 1, len(g), dtype=g.dtype)
        return value, g, hvp(g, tensors, v), hvp(g, tensors, -v)           # twice: the graph is kept
    head = lambda h: h @ W
    for loss, labels in ((lambda z, y: parametric_cross_entropy(z, y, adjustment, label_smoothing=0.1), [y]),
                         (lambda z: negative_entropy(z, adjustment), [])):
        plain = derivatives(loss(head(hidden), *labels))
        for a, b in zip(derivatives(chunked(loss, head, hidden, *labels, chunk=16)), plain):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        assert chunked(loss, head, hidden[:0], *(part[:0] for part in labels)).item() == 0


def test_chunked_losses_need_the_memory_of_a_chunk():
    hidden, head, y = torch.randn(512, 8, requires_grad=True), torch.nn.Linear(8, 8000), torch.randint(8000, (512,))
    adjustment = LogitAdjustment(8000)
    for loss, labels in ((lambda z, y: parametric_cross_entropy(z, y, adjustment), [y]), (lambda z: negative_entropy(z, adjustment), [])):
        plain = bilevel.peak_bytes(lambda: loss(head(hidden), *labels).backward())
        assert bilevel.peak_bytes(lambda: chunked(loss, head, hidden, *labels, chunk=64).backward()) < plain / 4


# --- The exact hypergradient ---------------------------------------------------------------------

def test_case_01_exact_differs_from_ignoring_the_lower_level():
    a, w = scalar(2.0), scalar(2.0)
    problem = Bilevel([w], [a], lambda: w ** 2 - 2 * a * w + a ** 2, lambda: a * w - 2 * a + 1)
    for solver in ("cg", "dense"):
        (h,), report = exact_hypergradient(problem, solver)
        assert h.item() == pytest.approx(2.0, abs=1e-12) and h.shape == ()
        assert report["gradient_norm"] == 0 and not report["negative_curvature"]
    assert problem.gradient(problem.upper())[1].item() == 0.0


def test_case_02_zero_dimensional_tensors_count_as_size_one():
    w, l = scalar(3.0), scalar(3.0)
    problem = Bilevel([w], [l], lambda: (w - l) ** 2 / 2, lambda: w ** 2 / 2)
    assert exact_hypergradient(problem)[0][0].item() == pytest.approx(3.0)


def test_case_03_cg_takes_two_products_on_two_eigenvalues():
    H = torch.diag(torch.tensor([1.0, 100.0], dtype=torch.float64))
    x, report = conjugate_gradient(lambda v: H @ v, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(x, torch.tensor([1.0, 0.01], dtype=torch.float64))
    assert report["products"] == 2


def test_case_04_negative_curvature_is_reported_and_no_number_returned():
    H = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    x, report = conjugate_gradient(lambda v: H @ v, torch.ones(2, dtype=torch.float64))
    assert report["negative_curvature"] and x.isnan().all()
    w, a = torch.ones(2, dtype=torch.float64, requires_grad=True), scalar(1.0)
    problem = Bilevel([w], [a], lambda: (w @ H @ w) / 2 + a * w.sum(), lambda: w.sum())
    for solver in ("cg", "dense"):
        with pytest.warns(UserWarning, match="negative curvature"):
            assert exact_hypergradient(problem, solver)[1]["negative_curvature"]


def tiny_problem(mu=0.1, **config):
    """A transformer of some 500 parameters on fixed random tokens, with a proximal term."""
    torch.manual_seed(0)
    model = Transformer(Config(12, 8, 8, 1, 2, 1, **config)).double()
    ids, targets = torch.randint(12, (16, 5)), torch.randint(12, (16, 5))
    adjustment = LogitAdjustment(12).double()
    theta = list(model.parameters())
    start = [p.detach().clone() for p in theta]
    proximal = lambda: mu / 2 * sum(((p - s) ** 2).sum() for p, s in zip(theta, start))
    return model, Bilevel(theta, list(adjustment.parameters()),
                          lambda: parametric_cross_entropy(model(ids), targets, adjustment) + proximal(),
                          lambda: negative_entropy(model(ids), adjustment))


@pytest.mark.parametrize("tied", [True, False])
def test_case_05_06_hvp_through_attention_equals_finite_differences(tied):
    model, problem = tiny_problem(tie_word_embeddings=tied)
    assert len(problem.theta) == len({id(p) for p in problem.theta})
    with exact_mode():
        g, _ = problem.gradient(problem.lower(), create_graph=True)
    v = F.normalize(torch.randn_like(g), dim=0)
    Hv, eps = hvp(g, problem.theta, v), 1e-5
    problem.move_theta(eps * v)
    up, _ = problem.gradient(problem.lower())
    problem.move_theta(-2 * eps * v)
    down, _ = problem.gradient(problem.lower())
    assert relative(Hv, (up - down) / (2 * eps)) < 1e-8


def test_case_05_the_hessian_is_symmetric_with_dropout():
    model, problem = tiny_problem(dropout=0.2)
    model.train()
    with exact_mode():
        g, _ = problem.gradient(problem.lower(), create_graph=True)
    u, v = torch.randn_like(g), torch.randn_like(g)
    assert abs(float(u @ hvp(g, problem.theta, v) - v @ hvp(g, problem.theta, u))) < 1e-10


def test_case_07_what_is_empty_or_not_a_parameter_is_named():
    w = scalar(1.0)
    with pytest.raises(ValueError, match="alpha is empty"):
        Bilevel([w], [], lambda: w, lambda: w)
    with pytest.raises(ValueError, match=r"theta\[1\], shape \(3,\)"):
        Bilevel([w, torch.ones(3)], [w], lambda: w, lambda: w)


# --- BOME ----------------------------------------------------------------------------------------

def test_bome_direction_by_hand():
    """L = (w - a)^2 / 2, F = w^2 / 2 at w = 2, a = 0; one step of 0.5 gives theta_T = 1.
    grad q = (w - a, -(w - a) + (theta_T - a)) = (2, -1), grad F = (2, 0), <.,.> = 4, ||grad q||^2 = 5."""
    w, a = scalar(2.0), scalar(0.0)
    problem = Bilevel([w], [a], lambda: (w - a) ** 2 / 2, lambda: w ** 2 / 2)
    (d_w,), (d_a,), report = bome_direction(problem, inner_steps=1, inner_lr=0.5, eta=3.0)
    lam = 3.0 - 4 / 5
    assert report["lam"] == pytest.approx(lam) and report["residual"] == pytest.approx(2.0 - 0.5)
    assert d_w.item() == pytest.approx(2 + 2 * lam) and d_a.item() == pytest.approx(-lam)
    assert w.item() == 2.0                                                 # theta is put back
    # Two inner steps: theta_T = 0.5, so grad q = (2, -1.5).
    _, (d_a,), report = bome_direction(problem, inner_steps=2, inner_lr=0.5, eta=3.0)
    assert report["lam"] == pytest.approx(3.0 - 4 / 6.25) and d_a.item() == pytest.approx(-1.5 * report["lam"])
    # A small eta where F and q already agree: lambda stops at zero.
    assert bome_direction(problem, 1, 0.5, 0.1)[2]["lam"] == 0.0


def test_bome_puts_theta_back_when_an_inner_step_fails():
    w, a, calls = scalar(2.0), scalar(0.0), []
    def lower():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return (w - a) ** 2 / 2
    with pytest.raises(KeyboardInterrupt):
        bome_direction(Bilevel([w], [a], lower, lambda: w ** 2), 5, 0.5, 1.0)
    assert w.item() == 2.0


# --- Quadratics, where every answer has a closed form ---------------------------------------------

def quadratic(seed, n=6, m=3, spread=1.0):
    """L = theta'H theta/2 - theta'C alpha, F = |theta - c|^2/2 + d'alpha: theta* = H^-1 C alpha and
    dF/dalpha = d + C' H^-1 (theta* - c). Returns the problem at theta*, H and that hypergradient."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    Q, _ = torch.linalg.qr(draw(n, n))
    H = Q @ torch.diag(torch.logspace(-spread / 2, spread / 2, n, dtype=torch.float64)) @ Q.T
    C, c, d, a = draw(n, m), draw(n), draw(m), draw(m).requires_grad_()
    with torch.no_grad():
        w = torch.linalg.solve(H, C @ a).requires_grad_()
        truth = d + C.T @ torch.linalg.solve(H, w - c)
    return Bilevel([w], [a], lambda: w @ H @ w / 2 - w @ C @ a, lambda: ((w - c) ** 2).sum() / 2 + d @ a), H, truth


@settings(max_examples=50, deadline=None)
@given(strategies.integers(0, 10 ** 6))
def test_exact_equals_the_closed_form_on_random_quadratics(seed):
    problem, H, truth = quadratic(seed)
    for options in ({"solver": "cg", "tol": 1e-13}, {"solver": "dense"}, {"solver": "neumann", "max_iter": 5000, "tol": 1e-13}):
        (h,), report = exact_hypergradient(problem, **options)
        assert relative(h, truth) < 1e-10 and report["gradient_norm"] < 1e-12
    damped = exact_hypergradient(problem, damping=0.5)[0][0]
    F_t, F_a = problem.gradient(problem.upper())
    L_t, _ = problem.gradient(problem.lower(), create_graph=True)
    v = torch.linalg.solve(H + 0.5 * torch.eye(len(H), dtype=H.dtype), F_t)
    assert relative(damped, F_a - torch.autograd.grad(L_t, problem.alpha, v)[0]) < 1e-9


@settings(max_examples=20, deadline=None)
@given(strategies.integers(0, 10 ** 6))
def test_the_penalty_on_quadratics(seed):
    """Here theta_{+-} = (H +- I/lam)^-1 (C alpha +- c/lam), and both forms follow."""
    problem, H, truth = quadratic(seed)
    errors = {symmetric: [relative(penalty_hypergradient(problem, lam, symmetric)[0][0], truth) for lam in (1e2, 1e3)]
              for symmetric in (False, True)}
    assert errors[False][1] < 0.15 * errors[False][0] and errors[True][1] < 0.02 * errors[True][0]


def test_penalty_with_gradient_steps_starts_and_stops_both_sides_alike():
    problem, H, truth = quadratic(3)
    before = problem.theta[0].detach().clone()
    h, report = penalty_hypergradient(problem, 1e3, symmetric=True, inner_steps=400, inner_lr=0.3)
    assert relative(h[0], truth) < 1e-2 and torch.equal(problem.theta[0], before) and len(report["gradient_norms"]) == 2


def test_case_03_neumann_diverges_with_an_error_that_says_so():
    H = torch.diag(torch.tensor([1.0, 100.0], dtype=torch.float64))
    with pytest.raises(ArithmeticError, match=r"diverges: step 0.1 x curvature .* is above 2"):
        neumann(lambda v: H @ v, torch.ones(2, dtype=torch.float64), step=0.1, terms=100)
    x, _ = neumann(lambda v: H @ v, torch.ones(2, dtype=torch.float64), step=0.015, terms=3000)
    torch.testing.assert_close(x, torch.tensor([1.0, 0.01], dtype=torch.float64))
    H[1, 1] = -1.0
    x, report = neumann(lambda v: H @ v, torch.tensor([0.1, 1.0], dtype=torch.float64), step=0.1, terms=100)
    assert report["negative_curvature"] and x.isnan().all()


def test_what_an_exact_solve_cannot_give_is_said():
    problem, H, truth = quadratic(0, n=20, spread=4.0)
    with pytest.warns(UserWarning, match="CG stopped after max_iter = 3 products"):
        exact_hypergradient(problem, max_iter=3)
    for step in (0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="positive step"):
            exact_hypergradient(problem, "neumann", step=step)
    t, a = scalar(2.0), scalar(2.0)
    flat = Bilevel([t], [a], lambda: (t - a) ** 4, lambda: t ** 2)         # no curvature at the minimum
    for solver in ("cg", "neumann", "dense"):
        with pytest.warns(UserWarning, match="negative curvature here, or none"):
            (h,), report = exact_hypergradient(flat, solver)
        assert report["negative_curvature"] and h.isnan()
    with pytest.raises(ArithmeticError, match="curvature 0.0"):
        persistent_direction(Bilevel([t], [a], lambda: t * a, lambda: t ** 2), Surrogate())
    with pytest.raises(ValueError, match="not finite"):
        exact_hypergradient(Bilevel([t], [a], lambda: (t - a) ** 2, lambda: t * float("nan")))
    constant = Bilevel([t], [a], lambda: torch.tensor(1.0), lambda: t * a)
    with pytest.raises(ValueError, match=r"does not use theta\[0\]"):
        exact_hypergradient(constant)
    with pytest.raises(ValueError, match="neither theta nor alpha"):
        bome_direction(constant, 1, 0.1, 0.5)
    with pytest.raises(ValueError, match="lam must be positive"):
        penalty_hypergradient(problem, 0.0)


def test_an_upper_loss_without_theta_has_its_own_gradient_only():
    t, a = scalar(3.0), scalar(3.0)
    problem = Bilevel([t], [a], lambda: (t - a) ** 2 / 2, lambda: a ** 2)
    for solver in ("cg", "neumann", "dense"):
        (h,), report = exact_hypergradient(problem, solver)
        assert h.item() == pytest.approx(6.0)
    surrogate = Surrogate(lam=1024.0)
    moves = [persistent_direction(problem, surrogate)[1][0].item() for _ in range(4)]
    assert moves[1:] == pytest.approx([6.0] * 3)


def test_gauss_newton_is_the_hessian_of_a_linear_model():
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    w, a = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss = lambda z: F.cross_entropy(z + a, y)
    problem = Bilevel([w], [a], lambda: loss(x @ w), lambda: (w ** 2).sum(), outputs=lambda: x @ w, loss=loss)
    minimise(problem, lambda: problem.lower() + 0.05 * (w ** 2).sum())
    pick = dict(solver="cg", damping=0.1, tol=1e-13)
    with pytest.warns(UserWarning, match="is not small"):
        a_hessian, a_gn = (exact_hypergradient(problem, curvature=c, **pick)[0][0] for c in ("hessian", "gauss-newton"))
    assert relative(a_gn, a_hessian) < 1e-9
    with pytest.raises(ValueError, match="needs a Bilevel with outputs"):
        exact_hypergradient(quadratic(0)[0], curvature="gauss-newton")
    for wrong in ({"solver": "magic"}, {"curvature": "magic"}):
        with pytest.raises(ValueError, match="magic"):
            exact_hypergradient(quadratic(0)[0], **wrong)


def test_case_07_a_parameter_the_lower_loss_does_not_use_is_named():
    w, unused, a = scalar(1.0), torch.ones(3, dtype=torch.float64, requires_grad=True), scalar(1.0)
    problem = Bilevel([w, unused], [a], lambda: (w - a) ** 2, lambda: w ** 2)
    with pytest.raises(ValueError, match=r"does not use theta\[1\], shape \(3,\)"):
        exact_hypergradient(problem)


def test_one_scalar_temperature_has_a_zero_hypergradient_unless_the_lower_level_is_held():
    """Logits z = theta (free), one temperature, adjusted entropy: theta absorbs any scale, so F cannot change."""
    torch.manual_seed(0)
    p = torch.rand(5, 4, dtype=torch.float64).softmax(-1)                  # soft targets: the minimum is finite
    def problem(mu, adjusted=True):
        theta = p.log().clone().requires_grad_()
        log_scale = scalar(0.0)
        scale = lambda z: log_scale.exp() * z
        lower = lambda: -(p * scale(theta).log_softmax(-1)).sum(-1).mean() + mu / 2 * (theta ** 2).sum() \
            + 0.05 * (theta.mean(-1) ** 2).sum()                           # fixes the one direction softmax does not see
        upper = lambda: negative_entropy(scale(theta) if adjusted else theta)
        made = Bilevel([theta], [log_scale], lower, upper)
        assert minimise(made, lower, tol=1e-13) < 1e-12
        return exact_hypergradient(made, tol=1e-14)[0][0].item(), made.gradient(upper())[1].item()
    h, F_a = problem(0.0)
    assert abs(h) < 1e-12 and abs(F_a) > 1e-2                              # what ignoring the lower level would say
    assert abs(problem(0.0, adjusted=False)[0]) > 1e-2                     # raw entropy sees the scale
    assert abs(problem(0.01)[0]) > 1e-3                                    # a regulariser brings it back


def test_the_persistent_surrogate_finds_the_exact_hypergradient():
    problem, H, truth = quadratic(1, spread=2.0)
    surrogate = Surrogate(lam=1e3)
    before = problem.theta[0].detach().clone()
    for _ in range(800):
        _, (h,), report = persistent_direction(problem, surrogate)
    assert torch.equal(problem.theta[0], before)                           # the caller moves theta
    assert report["scale"] == 1.0 and report["residual"] < 1e-8 and relative(h, truth) < 1e-6
    assert surrogate.sharpness == pytest.approx(torch.linalg.eigvalsh(H)[-1].item(), rel=0.02)


def test_the_persistent_surrogate_waits_before_it_moves_alpha():
    problem, _, _ = quadratic(1)
    surrogate = Surrogate()
    scales = [persistent_direction(problem, surrogate)[2]["scale"] for _ in range(200)]
    assert scales[:3] == [0.0, 0.0, 0.0] and max(scales) == 1.0


# --- The laboratory ------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def laboratory():
    torch.set_num_threads(1)
    problem = bilevel.tiny_transformer()
    sharpness = bilevel.sharpness_of(problem)
    assert bilevel.converge(problem, sharpness) < 1e-10
    return problem, sharpness


def test_exact_equals_finite_differences_of_the_whole_problem(laboratory):
    """Five random directions of alpha: F(alpha, theta*(alpha)) re-solved on both sides."""
    (problem, _), generator, eps = laboratory, torch.Generator().manual_seed(1), 1e-3
    h = flatten(exact_hypergradient(problem, "dense")[0], problem.alpha)
    cg = flatten(exact_hypergradient(problem, "cg")[0], problem.alpha)
    assert relative(cg, h) < 1e-8

    def value(step):                                       # F at alpha + step, theta re-converged, both put back
        with torch.no_grad(), problem.keep_theta():
            for p, s in zip(problem.alpha, unflatten(step, problem.alpha)):
                p += s
            with torch.enable_grad():
                assert minimise(problem, problem.lower, tol=1e-13) < 1e-11
            F_value = problem.upper().item()
            for p, s in zip(problem.alpha, unflatten(step, problem.alpha)):
                p -= s
        return F_value

    for _ in range(5):
        d = F.normalize(torch.randn(len(h), generator=generator, dtype=h.dtype), dim=0)
        # Fourth order: with eps = 1e-3 truncation and rounding both stay near 1e-9.
        slope = (8 * (value(eps * d) - value(-eps * d)) - (value(2 * eps * d) - value(-2 * eps * d))) / (12 * eps)
        assert abs(slope - float(h @ d)) < 1e-8 * float(h.norm())


def test_unrolling_at_the_minimum_is_the_neumann_series(laboratory):
    problem, sharpness = laboratory
    for T in (1, 10, 50):
        unrolled = flatten(unrolled_hypergradient(problem, T, 1 / sharpness)[0], problem.alpha)
        series = flatten(exact_hypergradient(problem, "neumann", max_iter=T, step=1 / sharpness)[0], problem.alpha)
        assert relative(unrolled, series) < 1e-10


def slopes(problem, symmetric):
    """Of the penalty's error against lam, both logarithmic, between 1e3, 1e4 and 1e5."""
    truth = flatten(exact_hypergradient(problem, tol=1e-14)[0], problem.alpha)
    errors = [relative(flatten(penalty_hypergradient(problem, lam, symmetric)[0], problem.alpha), truth) for lam in (1e3, 1e4, 1e5)]
    return [math.log10(b / a) for a, b in zip(errors, errors[1:])]


@pytest.mark.parametrize("make", [lambda: bilevel.tiny_transformer(mu=1.0, unseen=True), bilevel.quadratic], ids=["transformer", "quadratic"])
def test_penalty_slopes(make):
    problem = make()                                       # mu = 1: from lam = 1e3 on the first power of 1 / lam rules, whatever the rounding
    bilevel.converge(problem, bilevel.sharpness_of(problem), tol=1e-14)
    assert slopes(problem, symmetric=False) == pytest.approx([-1, -1], abs=0.1)
    assert slopes(problem, symmetric=True) == pytest.approx([-2, -2], abs=0.2)


def test_a_penalty_without_a_minimum_is_an_error():
    """L - F / lam of the hard quadratic is flat in one direction at lam = 1 / mu and falls without end below it."""
    problem = bilevel.quadratic(mu=0.001)
    bilevel.converge(problem, bilevel.sharpness_of(problem))
    truth = flatten(exact_hypergradient(problem, "dense")[0], problem.alpha)
    for lam in (300.0, 1e3):
        with pytest.raises(ArithmeticError, match=rf"L - F / lam at lam = {lam:g}: no minimum"):
            penalty_hypergradient(problem, lam, symmetric=True)
    assert relative(flatten(penalty_hypergradient(problem, 2e3, symmetric=True)[0], problem.alpha), truth) < 0.01
    t, a = torch.ones(3, dtype=torch.float64, requires_grad=True), scalar(1.0)
    for upper in (lambda: (t ** 2).sum(), lambda: t.sum() * a):
        for symmetric in (False, True):
            with pytest.raises(ArithmeticError, match="no minimum"):       # L is linear in theta
                penalty_hypergradient(Bilevel([t], [a], lambda: a * t.sum(), upper), 1e3, symmetric)
            assert torch.equal(t, torch.ones_like(t))
    row, = bilevel.measure(problem, [("symmetric penalty", "lam", lambda: penalty_hypergradient(problem, 300, True))], truth)
    assert row["relative_error"] is None


def test_cg_in_float32(laboratory):
    problem, _ = laboratory
    truth = flatten(exact_hypergradient(problem)[0], problem.alpha)
    tensors = [*problem.theta, *problem.alpha]
    in_64 = [p.detach().clone() for p in tensors]
    twin = bilevel.tiny_transformer(dtype=torch.float32)
    with torch.no_grad():
        for p, q in zip([*twin.theta, *twin.alpha], in_64):
            p.copy_(q)
    h = flatten(exact_hypergradient(twin, tol=1e-7, max_iter=200)[0], twin.alpha)
    assert h.dtype == torch.float32 and relative(h.double(), truth) < 1e-5


def test_the_surrogate_of_mini_batches_is_that_of_their_mean():
    """Four batches of 16 and one of all 64 rows, alpha held: the same v, h and direction of theta, call by call."""
    whole, parts = bilevel.tiny_transformer(), bilevel.tiny_transformer(batch=16)
    one, four = Surrogate(), Surrogate(batches=4)
    for problem in (whole, parts):
        bilevel.converge(problem, bilevel.sharpness_of(problem))
    for _ in range(30):
        d_whole = persistent_direction(whole, one)
        for _ in range(4):
            parts.draw()
            d_parts = persistent_direction(parts, four)
            if not d_parts[2]["complete"]:
                assert not any(d.any() for d in d_parts[0])
        four.sharpness, four.sharpest = one.sharpness, one.sharpest        # its first guess came from one batch
    assert d_parts[2]["complete"] and relative(four.shift, one.shift) < 1e-6
    assert relative(d_parts[2]["direction"], d_whole[2]["direction"]) < 1e-6


def test_persistent_with_mini_batches_along_a_trajectory():
    found = bilevel.along_a_trajectory(bilevel.tiny_transformer(batch=16), Surrogate(batches=4), speed=1e-2, budget=2400)
    assert found["mean_cosine"] > 0.99 and found["worst_cosine"] > 0.95 and found["relative_error"] < 0.15


def test_persistent_against_restarted_along_a_trajectory():
    torch.set_num_threads(1)
    persistent = bilevel.along_a_trajectory(bilevel.tiny_transformer(), Surrogate(), speed=1e-2, budget=900)
    restarted = bilevel.along_a_trajectory(bilevel.tiny_transformer(), 10, speed=1e-2, budget=900)
    assert persistent["mean_cosine"] > 0.99 and persistent["worst_cosine"] > 0.95 and persistent["relative_error"] < 0.15
    assert restarted["mean_cosine"] < 0.95 and restarted["relative_error"] > 1


def command(*argv):
    """bilevel.py in this process: its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bilevel.main(list(map(str, argv)))
    return argparse.Namespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def test_unrolling_a_lower_loss_that_is_linear_in_theta():
    """theta_2 = theta - 2 lr alpha, so d theta_2^2 / d alpha = - 4 lr theta_2."""
    theta, alpha = scalar(1.0), scalar(3.0)
    (h,), _ = unrolled_hypergradient(Bilevel([theta], [alpha], lambda: theta * alpha, lambda: theta ** 2), steps=2, lr=0.1)
    assert h.item() == pytest.approx(-4 * 0.1 * (1 - 0.6)) and theta.item() == 1


def test_a_trajectory_on_which_alpha_never_moves_is_a_row_without_cosines():
    row = bilevel.along_a_trajectory(bilevel.tiny_transformer(), Surrogate(tolerance=1e-12), 1e-3, budget=6)
    assert row["looks"] == 0 and row["mean_cosine"] is None and row["alpha_path"] == 0


def test_command_on_the_quadratic(tmp_path):
    done = command("--problem", "quadratic", "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["problem"]["easy"]["condition_number"] > 100 and (tmp_path / "b.png").stat().st_size > 10_000
    assert all({"method", "setting", "relative_error", "cosine", "seconds", "gradients", "peak_bytes"} <= r.keys() for r in result["rows"])
    cg = [r["relative_error"] for r in result["rows"] if r["method"] == "exact, CG" and r["problem"] == "easy"]
    assert cg[-1] < 1e-10 < cg[0]


def test_command_on_the_transformer_prints_the_committed_numbers(tmp_path, monkeypatch):
    """All of it but the long jobs: one penalty, and no trajectory, which have tests of their own."""
    steps = []
    spent = lambda problem, kind, speed, budget, looks: steps.append(budget / 3) or {"mean_cosine": speed}
    monkeypatch.setattr(bilevel, "penalties", lambda problem: [("penalty", "lam 1e+04", lambda: penalty_hypergradient(problem, 1e4))])
    monkeypatch.setattr(bilevel, "along_a_trajectory", spent)
    done = command("--json", tmp_path / "b.json", "--steps", 100)
    assert done.returncode == 0, done.stderr
    row = lambda r: (r["problem"], r["method"], r["setting"], r.get("speed"))
    rows = {row(r): r for r in json.loads((tmp_path / "b.json").read_text())["rows"]}
    committed = {row(r): r for r in json.loads((Path(__file__).parent / "results" / "bilevel.json").read_text())["rows"]}
    assert len(rows) == 16 * 2 + 1 + 8 and rows.keys() <= committed.keys()
    for key, r in rows.items():
        # Beyond round-off; and torch.multinomial, which draws the statements, draws others in other versions of torch.
        if r["problem"] in ("easy", "hard", "unseen") and r["relative_error"] > 1e-6 and torch.__version__.startswith("2.13."):
            assert r["relative_error"] == pytest.approx(committed[key]["relative_error"], rel=0.05), key
    assert steps == [100, 100, 100, 400] * 2
    error = lambda problem, method, setting: rows[problem, method, setting, None]["relative_error"]
    for problem in ("easy", "hard"):                       # whatever was drawn
        assert error(problem, "exact, CG", "300 products") < 1e-6 < error(problem, "exact, CG", "3 products")
        assert error(problem, "unrolled", "10 steps") == pytest.approx(error(problem, "Neumann", "10 terms"), rel=1e-6)
        assert error(problem, "penalty", "lam 1e+04") < 0.1 < 1 < error(problem, "lower level ignored", "F_a alone")
    assert all(title in done.stdout for title in ("(a) One converged point, hard", "(b) Error against work", "(c) Along a trajectory"))


def test_command_on_a_language_model(tiny_llm, tmp_path):
    """Without the lower level the error is that of F_a alone, to the hypergradient where CG finds one."""
    questions = [{"question": f"What is {i}?", "choices": ["odd", "even"], "answer": i % 2} for i in range(20)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    done = command("--problem", "llm", "--model", tiny_llm, "--train", tmp_path / "q.jsonl", "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "b.json").read_text())
    problem = bilevel.language_model(tiny_llm, tmp_path / "q.jsonl")
    gauss_newton = "biased" in result["problem"]["llm"]["reference"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth, report = exact_hypergradient(problem, tol=1e-4, max_iter=60, curvature="gauss-newton" if gauss_newton else "hessian",
                                            damping=0.1 if gauss_newton else 0.0)
    truth, F_a = flatten(truth, problem.alpha), problem.gradient(problem.upper())[1]
    assert result["rows"][0]["relative_error"] == pytest.approx(float((F_a - truth).norm() / truth.norm()), rel=1e-3)
    assert [r["setting"] for r in result["rows"]] == ["F_a alone", "T = 1", "T = 3", "T = 10"] and not report["negative_curvature"]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions[:15])))
    done = command("--problem", "llm", "--model", tiny_llm, "--train", tmp_path / "q.jsonl")
    assert done.returncode == 2 and "15 questions, and 16 are needed" in done.stderr


@pytest.mark.parametrize("argv, sentence", [
    (["--problem", "llm"], "--problem llm needs --model"), (["--seeds", "0"], "--seeds must be at least 1"),
    (["--json", "no/such/folder/b.json"], "no/such/folder"), (["--json", "."], "."), (["--problem", "magic"], "magic"),
    (["--problem", "llm", "--model", "nowhere", "--train", "none"], "nowhere")])
def test_command_on_bad_input(argv, sentence):
    done = command(*argv)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
