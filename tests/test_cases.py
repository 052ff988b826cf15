"""More of the kinds of input on which tools like this one have failed their users; the rest stand beside what they test."""
import argparse
import math

import pytest
import torch
from torch.nn import functional as F

import train
from bilevel import Bilevel, LogitAdjustment, exact_hypergradient, exact_mode, flatten, negative_entropy, parametric_cross_entropy
from data import IGNORE, Question, World
from model import Config, NF4Linear, Transformer, add_lora, nf4_dequantize, nf4_quantize, quantize_base
from test_robust import tiny_task


def toy(**config):
    torch.manual_seed(0)
    return Transformer(Config(**{**dict(vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                        num_key_value_heads=1), **config})).double()


# --- What fit() hands to the methods ---------------------------------------------------------------

def problem_of(monkeypatch, task=None, method="ft", steps=1, **settings):
    """What fit() hands to a method at every step: [(the problem, theta's lr)], theta as it was then, and the adjustment."""
    seen = []
    def look(problem, args, state):
        seen.append((problem, float(problem.lower().detach()), [p.detach().clone() for p in problem.theta], [p.detach().clone() for p in problem.alpha]))
        return train.ft_direction(problem, args, state)
    monkeypatch.setitem(train.METHODS, method, train.Method(look, ""))
    args = argparse.Namespace(**{**vars(train.parse(["--methods", method]).of[method]), "steps": steps, "settle": 0.0, **settings})
    train.fit(task or tiny_task(), method, args, 0)
    return seen


def test_the_proximal_term_is_half_mu_times_the_squared_distance(monkeypatch):
    """One batch for ever: L differs between mu = 0 and mu = 3 by 3/2 |theta - theta_0|^2 where theta is the same."""
    def look(problem, args, state):
        with torch.no_grad():
            for p in problem.theta:
                p += 0.01
        seen.append(float(problem.lower().detach()))
        n.append(sum(p.numel() for p in problem.theta))
        return train.ft_direction(problem, args, state)
    seen, n = [], []
    monkeypatch.setitem(train.METHODS, "ft", train.Method(look, ""))
    for mu in (0.0, 3.0):
        args = argparse.Namespace(**{**vars(train.parse(["--methods", "ft"]).of["ft"]), "steps": 1, "mu": mu})
        train.fit(tiny_task(), "ft", args, 0)
    assert seen[1] - seen[0] == pytest.approx(3 / 2 * n[0] * 0.01 ** 2, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_alpha_starts_at_the_temperature(monkeypatch, temperature):
    (_, _, _, (log_scale,)), = problem_of(monkeypatch, temperature=temperature)
    z = torch.randn(3, 20)
    adjustment = LogitAdjustment(20, "scalar")
    adjustment.log_scale.data.copy_(log_scale)
    torch.testing.assert_close(adjustment(z), z / temperature)


def test_theta_s_learning_rate_is_constant_then_falls_to_zero(monkeypatch):
    """AdamW's step is its rate where the gradient stays what it was: one batch for ever, and tiny steps."""
    task, ids = tiny_task(), torch.randint(20, (8, 4))
    task.batch = lambda n, g: (ids, ids)
    thetas = [flatten(theta, theta) for _, _, theta, _ in problem_of(monkeypatch, task, steps=8, lr=1e-4)]
    moved = torch.stack([b - a for a, b in zip(thetas, thetas[1:])])
    moved = moved[:, moved[0] != 0].abs().median(1).values                 # lora_B: lora_A's first gradient is zero
    torch.testing.assert_close(moved, 1e-4 * torch.tensor([1, 1, 1, 1, 1, 0.75, 0.5]), rtol=0.05, atol=0)


def test_alignment_moves_probability_to_what_the_rater_prefers():
    torch.manual_seed(0)
    world = World(0, subjects=12, relations=4)
    model = Transformer(Config(world.vocab_size))
    prompts, chosen, rejected = world.preferences(500, "B", torch.Generator().manual_seed(1))

    def margin():
        with torch.no_grad():
            log_p = model(prompts)[:, -1].log_softmax(-1)
        return (log_p.gather(1, chosen[:, None]) - log_p.gather(1, rejected[:, None])).mean().item()
    before = margin()
    train.align(model, world, argparse.Namespace(dpo_steps=10, device="cpu"), 0)
    assert margin() > before + 0.1


# --- Hypergradients --------------------------------------------------------------------------------

def finite_differences(problem, v, eps=1e-5):
    problem.move_theta(eps * v)
    up, _ = problem.gradient(problem.lower())
    problem.move_theta(-2 * eps * v)
    down, _ = problem.gradient(problem.lower())
    problem.move_theta(eps * v)
    return (up - down) / (2 * eps)


@pytest.mark.parametrize("config", [{}, {"sliding_window": 2}, {"qk_norm": "full"}, {"norm_after": True, "tie_word_embeddings": True}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_case_05_second_derivatives_in_exact_mode_with_and_without_checkpointing(config, checkpointing):
    model = toy(**config)
    model.checkpointing = checkpointing
    ids, targets, theta = torch.randint(12, (4, 5)), torch.randint(12, (4, 5)), list(model.parameters())
    adjustment = LogitAdjustment(12).double()
    problem = Bilevel(theta, list(adjustment.parameters()), lambda: parametric_cross_entropy(model(ids), targets, adjustment), lambda: theta[0].sum())
    with exact_mode():
        L_t = problem.gradient(problem.lower(), create_graph=True)[0]
        v = F.normalize(torch.randn_like(L_t), dim=0)
        Hv = flatten(torch.autograd.grad(L_t, theta, v), theta)
    expected = finite_differences(problem, v)
    assert (Hv - expected).norm() < 1e-7 * expected.norm()


def test_case_07_a_quantised_base_in_exact_mode_is_the_same_base_held_in_full():
    model = toy()
    quantize_base(model)
    plain = toy()
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = model.get_submodule(name).weight
    ids, targets, found = torch.randint(12, (4, 5)), torch.randint(12, (4, 5)), []
    for m in (model, plain):
        torch.manual_seed(1)
        theta = list(add_lora(m, 2, 4).values())
        for p in theta:
            p.data.normal_(std=0.3)
        adjustment = LogitAdjustment(12).double()
        problem = Bilevel(theta, list(adjustment.parameters()), lambda: parametric_cross_entropy(m(ids), targets, adjustment)
                          + 50 * sum((p ** 2).sum() for p in theta), lambda: negative_entropy(m(ids), adjustment))
        with pytest.warns(UserWarning, match="not small"):
            found.append(flatten(exact_hypergradient(problem)[0], problem.alpha))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_case_07_what_cannot_be_theta_is_named():
    """The 4-bit weight itself, a frozen weight, whole numbers: the sentence says which."""
    model = toy()
    quantize_base(model)
    alpha = [torch.zeros(1, requires_grad=True)]
    layer = model.layers[0].mlp.up_proj
    assert isinstance(layer, NF4Linear)
    for theta in ([layer.weight], [layer.codes], [model.norm.weight]):
        with pytest.raises(ValueError, match=r"theta\[0\], shape \([\d, ]+\), is not a leaf tensor that requires gradients"):
            Bilevel(theta, alpha, lambda: 0, lambda: 0)
    with pytest.raises(ValueError, match="theta is empty"):
        Bilevel([], alpha, lambda: 0, lambda: 0)


# --- Answers, files, weights -----------------------------------------------------------------------

class Spoken(torch.nn.Module):
    """A model whose every next-token distribution is the same given one."""
    def __init__(self, log_p):
        super().__init__()
        self.embed_tokens, self.log_p = torch.nn.Embedding(len(log_p), 1), torch.tensor(log_p).log_softmax(-1)

    def hidden(self, ids):
        return ids[..., None]

    def head(self, x):
        return self.log_p.expand(*x.shape[:-1], -1)


def test_case_16_each_rule_can_pick_another_option():
    """Tokens of -1, -2 and -4 (before they are normalised): options of 1, 3 and 2 tokens and 12, 2 and 6 characters."""
    model = Spoken([-2.0, -1.0, -4.0, 3.0])
    q = [Question([0], [[0], [1, 1, 1], [2, 2]], 0, [12, 2, 6])]
    token = [float(model.log_p[i]) for i in range(3)]
    sums = torch.tensor([[token[0], 3 * token[1], 2 * token[2]]], dtype=torch.float64)
    scores = {rule: train.score_options(model, None, q, rule) for rule in ("sum", "token", "char")}
    torch.testing.assert_close(scores["sum"], sums)
    torch.testing.assert_close(scores["token"], sums / torch.tensor([1, 3, 2]))
    torch.testing.assert_close(scores["char"], sums / torch.tensor([12, 2, 6]))
    assert [int(scores[rule].argmax()) for rule in ("sum", "token", "char")] == [0, 1, 0]
    with pytest.raises(KeyError):
        train.score_options(model, None, q, "guess")


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 129, 200])
def test_case_24_nf4_keeps_the_last_value_of_any_length(size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    again = nf4_dequantize(*nf4_quantize(x), x.shape)
    if size % 64 == 1:
        assert again[-1] == x[-1]                          # alone in its block: its own absmax
    for block, back in zip(x.split(64), again.split(64)):
        assert back[block.abs().argmax()] == block[block.abs().argmax()]
        assert (back - block).abs().max() <= block.abs().max() * 0.16      # half of the widest step between NF4 values
    assert not nf4_dequantize(*nf4_quantize(0 * x), x.shape).any()


def test_case_22_per_vocabulary_hyperparameters_have_the_logits_width(monkeypatch):
    """The tokenizer may know fewer tokens than the model has rows (padded vocabularies)."""
    (problem, _, _, alpha), = problem_of(monkeypatch, mode="vector")
    assert [p.shape for p in alpha] == [(20,), (20,)]


@pytest.mark.parametrize("counts", [(2, 6), (0, 8), (1, 1, 5), (3, 0, 0, 7)])
def test_case_25_micro_batches_of_any_make_up_give_the_big_batch_s_gradient(counts, monkeypatch):
    ids, targets = torch.randint(20, (len(counts), 9)), torch.full((len(counts), 9), IGNORE)
    for row, n in enumerate(counts):
        targets[row, :n] = torch.randint(20, (n,))
    found = []
    for micro_batch in (0, 1, 2):
        def keep(problem, args, state):
            found.append(flatten(train.ft_direction(problem, args, state)[0], problem.theta))
            return train.ft_direction(problem, args, state)
        monkeypatch.setitem(train.METHODS, "ft", train.Method(keep, ""))
        task = tiny_task()
        task.batch = lambda n, g: (ids, targets)
        train.fit(task, "ft", argparse.Namespace(**{**vars(train.parse(["--methods", "ft"]).of["ft"]), "steps": 1, "micro_batch": micro_batch}), 0)
    assert all((g - found[0]).norm() < 1e-6 * found[0].norm() for g in found[1:])


@pytest.mark.parametrize("method", ["ft", "reg", "calm", "calm-persistent"])
def test_case_27_a_batch_without_a_supervised_token_is_no_nan(method):
    task = tiny_task()
    task.batch = lambda n, g: (torch.randint(20, (n, 4), generator=g), torch.full((n, 4), IGNORE))
    args = argparse.Namespace(**{**vars(train.parse(["--methods", method]).of[method]), "steps": 3, "settle": 0.0})
    adjustment, trace = train.fit(task, method, args, 0)
    assert len(trace) == 3 and all(math.isfinite(v) for step in trace for v in step.values()) and trace[0]["lower"] == 0
    assert all(p.isfinite().all() for p in [*task.adapters.values(), *adjustment.parameters()])


def test_case_28_two_evaluations_of_one_model_are_identical_whatever_came_between():
    task = tiny_task()
    questions = [Question([1] * n, [[2], [3, 4], [5]], 0, [1, 2, 1]) for n in (3, 9, 5, 9, 2)]
    first = train.score_options(task.model, None, questions, "char")
    torch.manual_seed(99)
    train.fit(task, "ft", argparse.Namespace(**{**vars(train.parse(["--methods", "ft"]).of["ft"]), "steps": 2}), 0)
    assert not torch.equal(train.score_options(task.model, None, questions, "char"), first)
    train.train_method(task, "aligned", None, 0)
    assert torch.equal(train.score_options(task.model, None, questions, "char"), first)

