"""bilevel.py against closed forms, finite differences and the cases that must hold."""
import math

import pytest
import torch
from torch.nn import functional as F

import bilevel
from bilevel import (Bilevel, LogitAdjustment, bome_direction, conjugate_gradient, exact_hypergradient, exact_mode,
                     flatten, hvp, negative_entropy, parametric_cross_entropy)
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


# --- The laboratory ------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def laboratory():
    torch.set_num_threads(1)
    problem = bilevel.tiny_transformer()
    assert bilevel.converge(problem) < 1e-10
    return problem


def test_exact_equals_finite_differences_of_the_whole_problem(laboratory):
    """Five random directions of alpha: F(alpha, theta*(alpha)) re-solved on both sides."""
    problem, generator, eps = laboratory, torch.Generator().manual_seed(1), 1e-3
    h = flatten(exact_hypergradient(problem, "dense")[0], problem.alpha)
    cg = flatten(exact_hypergradient(problem, "cg")[0], problem.alpha)
    assert relative(cg, h) < 1e-8

    def value(step):                                       # F at alpha + step, theta re-converged, alpha put back
        with torch.no_grad():
            for p, s in zip(problem.alpha, bilevel.unflatten(step, problem.alpha)):
                p += s
        bilevel.converge(problem, tol=1e-12)
        F_value = problem.upper().item()
        with torch.no_grad():
            for p, s in zip(problem.alpha, bilevel.unflatten(step, problem.alpha)):
                p -= s
        return F_value

    for _ in range(5):
        d = F.normalize(torch.randn(len(h), generator=generator, dtype=h.dtype), dim=0)
        # Fourth order: with eps = 1e-3 truncation and rounding both stay near 1e-9.
        slope = (8 * (value(eps * d) - value(-eps * d)) - (value(2 * eps * d) - value(-2 * eps * d))) / (12 * eps)
        assert abs(slope - float(h @ d)) < 1e-8 * float(h.norm())
