"""Answers to the README's exercises, one test each: read them after trying."""
import math

import numpy as np
import pytest
import torch

from bilevel import (Bilevel, LogitAdjustment, bome_direction, exact_hypergradient, exact_mode, flatten, hvp, lower_gradient, minimise,
                     negative_entropy, parametric_cross_entropy, penalty_hypergradient, quadratic, softmax_regression, unrolled_hypergradient)
from metrics import auroc, classwise_ece, ece, fit_temperature, nll
from model import Config, Transformer


def solved(problem):
    """theta at the minimum of L."""
    minimise(problem, problem.lower, 1e-13)
    return problem


def h_of(problem, **options):
    """The exact hypergradient, (M,)."""
    return flatten(exact_hypergradient(problem, tol=1e-14, **options)[0], problem.alpha)


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_exercise_01_lambda_is_a_straight_line_in_eta_with_a_kink_at_zero():
    """lam = max(0, eta - c) with c = <F', q'> / |q'|^2, F' and q' over theta and alpha together: c is one number a point,
    positive where F and L want the same. While lam > 0, the direction climbs q by eta |q'|^2 exactly, whatever F wants."""
    problem = solved(softmax_regression(mu=0.1))
    problem.move_theta(flatten(problem.theta, problem.theta).detach())     # twice the minimum: L and F both want less
    def step(eta):
        d_theta, d_alpha, report = bome_direction(problem, 3, 0.5, eta)
        return torch.cat([flatten(d_theta, problem.theta), flatten(d_alpha, problem.alpha)]), report["lam"]
    c = 100 - step(100)[1]
    assert c > 0.1
    assert step(c / 2)[1] == 0
    assert [step(c + extra)[1] for extra in (0.5, 3)] == pytest.approx([0.5, 3], rel=1e-9)
    (at_1, lam_1), (at_2, lam_2) = step(c + 1), step(c + 2)
    q = (at_2 - at_1) / (lam_2 - lam_1)                                    # all that eta changes is how much of q' there is
    assert float(at_1 @ q) == pytest.approx((c + 1) * float(q @ q), rel=1e-9)


def test_exercise_02_the_gradient_of_the_entropy_by_hand():
    """dF/dz_v = p_v (log p_v + H): zero at the uniform distribution - and at a certain one, which entropy cannot wake."""
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(3).requires_grad_()
    by_autograd, = torch.autograd.grad(negative_entropy(z), z)
    log_p = z.detach().log_softmax(-1)
    H = -(log_p.exp() * log_p).sum(-1, keepdim=True)                       # (6, 1)
    torch.testing.assert_close(by_autograd, log_p.exp() * (log_p + H) / len(z), rtol=1e-12, atol=1e-14)
    for logits, size in (([0.0, 0.0, 0.0], 1e-15), ([40.0, 0.0, 0.0], 1e-14), ([1.0, 0.0, 0.0], None)):
        z = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
        gradient, = torch.autograd.grad(negative_entropy(z), z)
        assert gradient.abs().max() > 0.1 if size is None else gradient.abs().max() < size


def test_exercise_03_ece_cannot_see_that_a_predictor_is_useless():
    """It says 1/4 to everything and is right a quarter of the time: both ECEs are 0, NLL and AUROC know better."""
    labels = np.arange(400) % 4
    p = np.full((400, 4), 0.25)
    confidence, correct = p.max(1), p.argmax(1) == labels
    assert ece(confidence, correct) == 0 and classwise_ece(p, labels) == 0
    assert nll(p, labels) == pytest.approx(math.log(4), rel=1e-12) and auroc(confidence, correct) == 0.5


def biased_questions():
    """Logits log p + (2, 0, 0) and labels that follow p exactly: ten rows for each p, in tenths. -> (n, 3), (n,), p (n, 3)"""
    tenths = torch.tensor([[7, 2, 1], [1, 7, 2], [2, 1, 7], [5, 3, 2], [2, 5, 3], [3, 2, 5]])
    labels = torch.cat([torch.arange(3).repeat_interleave(row) for row in tenths])
    p = (tenths.double() / 10).repeat_interleave(10, 0)
    return p.log() + torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64), labels, p


def test_exercise_04_a_temperature_cannot_mend_a_bias_and_an_offset_can():
    """T only shrinks all logits alike, so the wrong argmax stays; offset = -bias reaches the NLL below which none can go, H(p)."""
    z, labels, p = biased_questions()
    T = fit_temperature(z, labels)
    best = -float((p * p.log()).sum(1).mean())
    adjustment = LogitAdjustment(3).double()
    with torch.no_grad():
        adjustment.offset[0] = -2.0
        assert float(parametric_cross_entropy(z, labels, adjustment)) == pytest.approx(best, rel=1e-12)
    untouched, tempered = (float(parametric_cross_entropy(z / t, labels)) for t in (1.0, T))
    assert T > 1.2 and untouched > tempered > best + 0.1
    right = lambda z: int((z.argmax(1) == labels).sum())
    assert right(z / T) == right(z) < right(adjustment(z))


def test_exercise_05_a_prior_in_the_offset_while_training_is_gone_from_the_logits():
    """Labels drawn as likelihood x prior. Under offset = log prior, held, the minimum of L has softmax(z) = likelihood:
    what alpha explains, theta need not learn."""
    likelihood, prior = torch.tensor([[7, 2, 1], [1, 4, 5]]).double(), torch.tensor([5, 3, 2]).double()
    counts = (likelihood * prior).long()                                   # (contexts, classes)
    targets = torch.cat([torch.arange(3).repeat_interleave(row) for row in counts])
    context = torch.arange(2).repeat_interleave(counts.sum(1))
    for offset, learnt in ((torch.log(prior / 10), likelihood / 10), (torch.zeros(3), counts.double() / counts.sum(1, keepdim=True))):
        adjustment, z = LogitAdjustment(3).double(), torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
        adjustment.offset.data.copy_(offset)
        logits = lambda: torch.nn.functional.pad(z, (0, 1))                # the last logit is zero: softmax knows differences only
        lower = lambda: parametric_cross_entropy(logits()[context], targets, adjustment)
        solved(Bilevel([z], list(adjustment.parameters()), lower, lower))
        torch.testing.assert_close(logits().softmax(-1), learnt, rtol=1e-9, atol=1e-12)


def test_exercise_06_alpha_folds_into_the_head():
    """z~ = exp(log_scale) (W x) + offset = W' x + b': CALM's model is a plain model. One log_scale never changes an answer,
    one a token does."""
    torch.manual_seed(0)
    model = Transformer(Config(13, hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_bias=True)).double().requires_grad_(False)
    adjustment, ids = LogitAdjustment(13).double().requires_grad_(False), torch.randint(13, (8, 9))
    model.lm_head.bias.normal_()
    adjustment.log_scale.normal_()
    adjustment.offset.normal_()
    z = model(ids)
    expected = adjustment(z)
    model.lm_head.weight.mul_(adjustment.log_scale.exp()[:, None])
    model.lm_head.bias.mul_(adjustment.log_scale.exp()).add_(adjustment.offset)
    torch.testing.assert_close(model(ids), expected, rtol=1e-12, atol=1e-12)
    scalar = LogitAdjustment(13, "scalar").double()
    scalar.log_scale.data.fill_(-1.3)
    assert torch.equal(scalar(z).argmax(-1), z.argmax(-1)) and not torch.equal(expected.argmax(-1), z.argmax(-1))


def test_exercise_07_one_temperature_has_no_hypergradient_until_something_holds_theta():
    """theta*(alpha) = theta*(0) / exp(log_scale) leaves z~ as it was, so F cannot change - at any alpha. A regulariser
    on theta breaks this, and so does the entropy of raw z, which falls as theta shrinks: there h = -F_a of the adjusted one."""
    problem = softmax_regression()
    for log_scale in (0.0, -0.7):
        problem.alpha[0].data.fill_(log_scale)
        solved(problem)
        _, F_a = problem.gradient(problem.upper())
        assert abs(h_of(problem)) < 1e-10 and abs(F_a) > 0.1
    assert abs(h_of(solved(softmax_regression(mu=0.1)))) > 0.1
    adjusted, raw = solved(softmax_regression()), solved(softmax_regression(entropy_of="raw"))
    assert float(h_of(raw)) == pytest.approx(-float(adjusted.gradient(adjusted.upper())[1]), rel=1e-9)


def test_exercise_08_T_unrolled_steps_are_T_neumann_terms():
    """At theta*: F_a - L_at lr sum_{k < T} (I - lr L_tt)^k F_t, the same number; anywhere else, another one."""
    def by_hand(problem, T, lr):
        with exact_mode():
            L_t = lower_gradient(problem)
            v, F_a = problem.gradient(problem.upper())                     # v = (I - lr L_tt)^k F_t, k = 0 here
            total = torch.zeros_like(v)
            for _ in range(T):
                total, v = total + lr * v, v - lr * hvp(L_t, problem.theta, v)
            return F_a - flatten(torch.autograd.grad(L_t, problem.alpha, total), problem.alpha)

    problem = solved(softmax_regression(mu=0.1, mode="vector"))
    unrolled = lambda T: flatten(unrolled_hypergradient(problem, T, 0.5)[0], problem.alpha)
    for T in (1, 5, 20):
        assert relative(unrolled(T), by_hand(problem, T, 0.5)) < 1e-10
        assert relative(unrolled(T), by_hand(problem, T + 1, 0.5)) > 1e-4
    problem.move_theta(torch.ones(18, dtype=torch.float64))
    assert relative(unrolled(5), by_hand(problem, 5, 0.5)) > 1e-2


def slope(errors):
    """Of the error on a log-log plot, lam growing tenfold from one to the next."""
    return [math.log10(b / a) for a, b in zip(errors, errors[1:])]


def test_exercise_09_the_penalty_falls_as_1_over_lam_and_two_of_them_as_1_over_lam_squared():
    """error(lam) = a / lam + b / lam^2 + ...: in the symmetric form a cancels between +lam and -lam, and in Richardson's
    2 h(2 lam) - h(lam) as well."""
    problem = solved(quadratic())
    truth, lams = h_of(problem), (1e3, 1e4, 1e5)
    h = lambda lam, symmetric=False: flatten(penalty_hypergradient(problem, lam, symmetric, tol=1e-13)[0], problem.alpha)
    assert slope([relative(h(lam), truth) for lam in lams]) == pytest.approx([-1, -1], abs=0.02)
    assert slope([relative(h(lam, True), truth) for lam in lams[:2]]) == pytest.approx([-2], abs=0.02)
    assert slope([relative(2 * h(2 * lam) - h(lam), truth) for lam in lams[:2]]) == pytest.approx([-2], abs=0.02)


def test_exercise_10_a_newton_step_on_alpha():
    """Differences of the hypergradient at re-solved theta are the Hessian of F(alpha, theta*(alpha)). The quadratic's is
    constant, so one Newton step ends the upper level; a gradient step, as long as is stable, does not."""
    problem = quadratic()
    alpha, = problem.alpha
    start = alpha.detach().clone()

    def h(at):
        alpha.data.copy_(at)
        return h_of(solved(problem))

    h_0 = h(start)
    hessian = torch.stack([h(start + e) - h_0 for e in torch.eye(8, dtype=torch.float64)])                 # (8, 8)
    assert relative(hessian, hessian.T) < 1e-7
    newton = start - torch.linalg.solve(hessian, h_0)
    descent = start - h_0 / torch.linalg.eigvalsh(hessian)[-1]
    assert h(newton).norm() < 1e-7 * h_0.norm() and h(descent).norm() > 1e-2 * h_0.norm()

    def value(at):
        h(at)
        return problem.upper().item()

    lowest = value(newton)
    assert all(value(newton + sign * e) > lowest for e in torch.eye(8, dtype=torch.float64) for sign in (0.1, -0.1))
