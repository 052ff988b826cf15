"""train.py: the loop, the scoring of options, the toy's story and the command line."""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

import train
from bilevel import peak_bytes
from data import Question, World
from model import Config, Transformer
from test_model import small_checkpoint

ROOT = Path(train.__file__).parent
QUICK = ["--pretrain-steps", "20", "--dpo-steps", "5", "--steps", "3", "--limit", "50"]


def command(*argv, **kwargs):
    return subprocess.run([sys.executable, "train.py", *map(str, argv)], cwd=ROOT, capture_output=True, text=True, **kwargs)


# --- Scoring -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return Transformer(Config(30)).eval()


def test_options_score_as_the_definition_says(tiny):
    """Every option's log-probability, token by token from separate unpadded passes."""
    questions = [Question([1, 2, 3], [[4], [5, 6], [7, 8, 9]], 0, [2, 5, 10]), Question([3], [[4], [5]], 1, [1, 1])]
    for rule in ("sum", "token", "char"):
        scores = train.score_options(tiny, None, questions, rule)
        assert scores.shape == (2, 3) and scores[1, 2] == -torch.inf
        for i, q in enumerate(questions):
            for j, option in enumerate(q.options):
                total = 0.0
                for t, token in enumerate(option):
                    total += tiny(torch.tensor([q.prompt + option[:t]]))[0, -1].log_softmax(-1)[token].item()
                assert scores[i, j].item() == pytest.approx(total / {"sum": 1, "token": len(option), "char": q.lengths[j]}[rule], abs=1e-5)


def test_case_15_batching_and_padding_do_not_change_a_score(tiny):
    questions = [Question([1] * length, [[4, 5], [6]], 0) for length in (2, 40, 7)]
    together = train.score_options(tiny, None, questions)
    for i, q in enumerate(questions):
        torch.testing.assert_close(train.score_options(tiny, None, [q])[0], together[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(train.score_options(tiny, None, questions, tokens_at_once=1)[i], together[i], atol=1e-5, rtol=0)


def test_case_16_the_rule_decides_between_a_short_and_a_long_option(monkeypatch):
    """Sums -2.0 (one token) and -3.0 (three tokens): sum picks the first, per token the second."""
    class Fixed(torch.nn.Module):
        embed_tokens = torch.nn.Embedding(6, 1)
        def hidden(self, ids):
            return ids[..., None]
        def head(self, x):                                 # every token's log-probability, whatever came before
            p = torch.tensor([0.0, 0.0, -2.0, -1.0, 0.0, 0.0]).exp()
            p[[0, 1, 4, 5]] = (1 - p[2] - p[3]) / 4
            return p.log().expand(*x.shape[:-1], 6)
    q = [Question([0], [[2], [3, 3, 3]], 0, [1, 3])]
    torch.testing.assert_close(train.score_options(Fixed(), None, q, "sum"), torch.tensor([[-2.0, -3.0]], dtype=torch.float64))
    assert train.score_options(Fixed(), None, q, "token").argmax() == 1


def test_the_adjustment_is_part_of_the_predictor(tiny):
    adjustment = train.LogitAdjustment(30)
    with torch.no_grad():
        adjustment.offset[5] = 50.0
    q = [Question([1, 2], [[4], [5]], 0)]
    assert train.score_options(tiny, adjustment, q)[0].exp()[1].item() == pytest.approx(1.0)


def test_case_28_two_evaluations_are_identical(tiny):
    q = [Question([1, 2], [[4], [5]], 0)] * 5
    assert torch.equal(train.score_options(tiny, None, q), train.score_options(tiny, None, q))


# --- The toy -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def toy():
    """Development world 0, as the main job builds it, and its pretrained model."""
    torch.set_num_threads(1)
    args, kept = train.parse(["--limit", "4000", "--methods", "all", "--world-seed", "0"]), {}
    align = train.align
    def keep(model, *rest):
        kept["pretrained"] = {k: v.clone() for k, v in model.state_dict().items()}
        return align(model, *rest)
    train.align = keep
    try:
        return train.toy_task(args, seed=0), args, kept["pretrained"]
    finally:
        train.align = align


def rows_of(task, method, args, **settings):
    args = argparse.Namespace(**{**vars(args.of[method]), **settings})
    return {row["domain"]: row for row in train.run_method(task, method, args, 0)[0]}


def test_pretraining_calibrates_and_preference_alignment_alone_makes_overconfident(toy):
    task, args, pretrained = toy
    world = World(0)
    fresh = Transformer(Config(world.vocab_size))
    fresh.load_state_dict(pretrained)
    before = rows_of(train.Task(fresh, {}, None, None, None, {}, task.tests), "aligned", args)
    after = rows_of(task, "aligned", args)
    assert before["id"]["conf_ece"] < 0.04 and before["ood"]["conf_ece"] < 0.04
    assert after["id"]["conf_ece"] < 0.05 and after["ood"]["conf_ece"] > 0.12


def test_temperature_scaling_leaves_the_other_domain_overconfident_and_calm_does_not(toy):
    task, args, _ = toy
    aligned, ts, oracle, calm = (rows_of(task, method, args) for method in ("aligned", "ts", "ts-oracle", "calm-persistent"))
    error = lambda rows: rows["ood"]["conf_ece"]
    assert error(ts) > 0.9 * error(aligned) and error(oracle) < 0.3 * error(aligned)
    assert error(calm) < 0.6 * error(aligned) and calm["id"]["conf_ece"] < 0.08
    assert calm["ood"]["accuracy"] > aligned["ood"]["accuracy"] - 0.03 and calm["id"]["accuracy"] > aligned["id"]["accuracy"] - 0.015


@pytest.mark.parametrize("method", [name for name, m in train.METHODS.items() if m])
def test_every_method_starts_from_the_same_aligned_model(toy, method):
    task, args, _ = toy
    first = rows_of(task, "aligned", args)
    second = rows_of(task, method, args, steps=4)
    assert rows_of(task, "aligned", args) == first != second
    assert rows_of(task, method, args, steps=4) == second


def test_case_23_every_adapter_has_a_gradient_by_step_2(toy, monkeypatch):
    task, args, _ = toy
    seen = []
    def spy(problem, args, state):
        out = train.calm_direction(problem, args, state)
        seen.append([d.abs().max().item() for d in out[0]])
        return out
    monkeypatch.setitem(train.METHODS, "calm", train.Method(spy, ""))
    rows_of(task, "calm", args, steps=2)
    assert min(seen[1]) > 0


def test_case_27_the_first_non_finite_loss_stops_the_run_with_its_step_and_the_last_checkpoint(toy, monkeypatch, tmp_path):
    task, args, _ = toy
    calls = []
    def broken(problem, args, state):
        out = train.ft_direction(problem, args, state)
        calls.append(1)
        return out if len(calls) < 2 else (*out[:2], {"lower": float("nan")})
    monkeypatch.setitem(train.METHODS, "ft", train.Method(broken, ""))
    with pytest.raises(FloatingPointError, match="step 1.*checkpoint.pt"):
        rows_of(task, "ft", args, steps=3, out=str(tmp_path), save_every=1)


def trained(task, args, method, seed=0):
    adjustment, trace = train.fit(task, method, args, seed)
    return [p.detach().clone() for p in [*task.adapters.values(), *adjustment.parameters()]], trace


@pytest.mark.parametrize("method", ["calm", "calm-persistent", "calm-exact", "cft-binned"])
def test_case_26_resuming_continues_bit_for_bit(toy, method, tmp_path):
    """Seven steps at once, and five, a fresh start from the checkpoint, and two more: the same bits, and nothing but
    tensors and plain types in the file."""
    task, args, _ = toy
    args = argparse.Namespace(**{**vars(args.of[method]), "steps": 7, "settle": 0.0})
    whole, trace = trained(task, args, method)
    args.out, args.save_every = str(tmp_path), 5
    trained(task, args, method)
    assert len(train.read_checkpoint(tmp_path / "checkpoint.pt")["trace"]) == 5
    args.resume = True
    again, resumed = trained(task, args, method)
    assert resumed == trace and all(torch.equal(p, q) for p, q in zip(whole, again))
    args.lr = 1.0
    with pytest.raises(ValueError, match="made with other settings"):
        trained(task, args, method)
    (tmp_path / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(ValueError, match="not a checkpoint"):
        trained(task, args, method)


def test_ctrl_c_in_a_step_waits_for_its_end_and_saves_it(toy, monkeypatch, tmp_path):
    task, args, _ = toy
    def stops(problem, args, state):
        if state["step"] == 2:
            signal.raise_signal(signal.SIGINT)
        return train.ft_direction(problem, args, state)
    monkeypatch.setitem(train.METHODS, "ft", train.Method(stops, ""))
    args = argparse.Namespace(**{**vars(args.of["ft"]), "steps": 5, "out": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        train.fit(task, "ft", args, 0)
    assert len(train.read_checkpoint(tmp_path / "checkpoint.pt")["trace"]) == 3
    args.resume = True
    assert len(train.fit(task, "ft", args, 0)[1]) == 5     # step 2 is not done again


def test_alpha_is_held_at_the_start_and_at_the_end(toy):
    task, args, _ = toy
    its = argparse.Namespace(**{**vars(args.of["calm-persistent"]), "steps": 8, "wait": 0.25, "settle": 0.25})
    scale = [step["log_scale"] for step in train.fit(task, "calm-scalar", its, 0)[1]]
    assert scale[:2] == [0, 0] and len(set(scale[1:6])) == 5 and scale[5] == scale[6] == scale[7]


def test_a_full_batch_is_the_same_rows_at_every_step():
    args = train.parse([*QUICK, "--train-limit", "24", "--batch", "24", "--lr", "0", "--alpha-lr", "0", "--methods", "calm-scalar"])
    trace = train.fit(train.toy_task(args, 0), "calm-scalar", args.of["calm-scalar"], 0)[1]
    assert len({round(step["lower"], 5) for step in trace}) == len({round(step["upper"], 5) for step in trace}) == 1
    args = train.parse([*QUICK, "--lr", "0", "--alpha-lr", "0", "--methods", "calm-scalar"])
    trace = train.fit(train.toy_task(args, 0), "calm-scalar", args.of["calm-scalar"], 0)[1]
    assert len({round(step["lower"], 5) for step in trace}) == 3


def test_the_binned_penalty_pulls_towards_the_measured_accuracy():
    """All confident and all wrong: after 50 steps the bin's accuracy is 0, and the penalty spreads the top's probability."""
    z = torch.tensor([[3.0, 0.0, 0.0, 0.0]] * 8, requires_grad=True)
    alpha = torch.zeros(1, requires_grad=True)
    problem = train.Bilevel([z], [alpha], lambda: 0 * z.sum(), None, lambda: z, None)
    args, state = argparse.Namespace(bin_weight=1.0), {"targets": torch.ones(8, dtype=torch.long), "share": 1.0}
    for state["step"] in range(51):
        (d,), _, _ = train.binned_direction(problem, args, state)
    confidence = z[0].softmax(-1)[0].item()
    bin_of = int(confidence * 10)
    assert state["accuracy"][bin_of] == 0 and state["accuracy"][2] == 0.25
    assert (d[:, 0] > 0).all() and (d[:, 1:] < 0).all()    # descent lowers the top option and raises the others


def test_a_table_of_numbers_that_are_not_all_finite():
    row = {"domain": "id", "scoring": "letter", "method": "ft", "seed": 0, "n": 2, "accuracy": 1.0, "conf_ece": 0.1, "cw_ece": 0.1,
           "nll": float("inf"), "brier": 0.1, "auroc": float("nan")}
    text = train.table([row, {**row, "seed": 1, "auroc": 0.5}])
    assert "nan +- nan" in text and "1.000 +- 0.000" in text
    args = train.parse([])
    saved = json.loads(train.document(args, [row]), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert saved["rows"][0]["nll"] is None and saved["rows"][0]["auroc"] is None


def test_what_is_named_twice_counts_once_and_eval_adds_up():
    args = train.parse(["--model", "m", "--train", "t", "--eval", "a", "--eval", "b", "c", "--methods", "aligned,aligned",
                        "--scoring", "letter,letter"])
    assert args.eval == ["a", "b", "c"] and args.methods == ["aligned"] and args.scoring == ["letter"]


# --- The command line ----------------------------------------------------------------------------

def test_json_holds_every_printed_number(tmp_path):
    done = command(*QUICK, "--seeds", 2, "--world-seed", 7, "--json", tmp_path / "r.json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == result
    assert [(r["method"], r["seed"], r["domain"]) for r in result["rows"]] == \
        [(m, s, d) for s in (7, 8) for m in train.STORY for d in ("id", "ood")]
    assert train.table(result["rows"]) in done.stdout
    assert {"n", "accuracy", "conf_ece", "cw_ece", "nll", "brier"} <= result["rows"][0].keys()
    assert result["config"]["steps"] == 3


def test_open_answers_both_directions_and_pictures(tmp_path):
    done = command(*QUICK, "--scoring", "letter,open", "--open-limit", 12, "--samples", 4, "--train-domain", "B", "--seeds", 2,
                   "--methods", "aligned,ts,calm-persistent", "--steps", 8, "--check", 3, "--json", tmp_path / "r.json", "--plot", tmp_path / "p")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {(r["domain"], r["scoring"], r["trained_on"]) for r in rows} == {(d, s, "B") for d in ("id", "ood") for s in ("letter", "open")}
    assert all({"sem_ece", "sem_ece_split", "missing"} <= r.keys() and r["n"] == 12 for r in rows if r["scoring"] == "open")
    assert all(-1 <= r["cosine"] <= 1 for r in rows if r["method"] == "calm-persistent")
    assert "ood, open scoring, n = 12, trained on B and aligned on A" in done.stdout and "of 2" in done.stdout
    for name in ("reliability", "trajectory", "pareto"):
        assert (tmp_path / "p" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_select_follows_its_rule(tmp_path):
    done = command(*QUICK[:4], "--limit", 100, "--select", "--methods", "ft-hot", "--steps", 2, "--json", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "s.json").read_text())
    aligned, *rows = saved["rows"]
    assert len(rows) == 6 and aligned["method"] == "aligned"
    allowed = [r for r in rows if r["conf_ece"] <= 0.05 and r["accuracy"] >= aligned["accuracy"] - 0.01]
    best = max(allowed, key=lambda r: r["entropy"]) if allowed else min(rows, key=lambda r: r["conf_ece"])
    assert saved["chosen"] == {"ft-hot": best["flags"]} and done.stdout.count("<- chosen") == 1


def test_resume_goes_on_with_the_next_method(tmp_path):
    flags = [*QUICK, "--out", tmp_path / "out", "--methods"]
    assert command(*flags, "aligned,ft").returncode == 0
    done = command(*flags, "aligned,ft,reg", "--resume", "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [r["method"] for r in rows] == ["aligned", "aligned", "ft", "ft", "reg", "reg"]
    at_once = command(*QUICK, "--methods", "aligned,ft,reg", "--json", tmp_path / "once.json")
    assert at_once.returncode == 0 and json.loads((tmp_path / "once.json").read_text())["rows"] == rows
    assert len((tmp_path / "out" / "predictions.jsonl").read_text().splitlines()) == 300
    done = command(*flags, "aligned", "--resume", "--lr", 1)
    assert done.returncode == 2 and "made with other settings" in done.stderr


def test_ctrl_c_keeps_what_had_finished(tmp_path):
    run = subprocess.Popen([sys.executable, "train.py", *QUICK[:4], "--limit", "50", "--steps", "100000", "--methods", "aligned,calm",
                            "--out", tmp_path], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "predictions.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "interrupted; what had finished is in" in err and "Traceback" not in err
    assert [r["method"] for r in json.loads((tmp_path / "results.json").read_text())["rows"]] == ["aligned", "aligned"]


@pytest.mark.parametrize("argv, sentence", [
    (["--methods", "calm,magic"], "unknown method 'magic'"),
    (["--steps", "0"], "argument --steps: 0 is below 1"),
    (["--steps", "many"], "argument --steps"),
    (["--rank", "900000000", "--methods", "calm", "--pretrain-steps", "1"], "out of memory; --micro-batch"),
    (["--limit", "999999999999"], "is not a number up to 1e9"),
    (["--methods", "calm/seeds=1"], "'seeds' is not a setting of a method"), (["--methods", "calm/steps"], "argument --steps"),
    (["--methods", "ls/label-smoothing=2"], "are shares"), (["--resume"], "need --out"), (["--scoring", "text-sum"], "unknown scoring"),
    (["--nonsense"], "unrecognized arguments: --nonsense"),
    (["--lr", "nan"], "argument --lr"),
    (["--device", "tpu9"], "--device tpu9: not available here"),
    (["--model", "nowhere"], "--model needs --train"),
    (["--eval", "x"], "need --model"),
    (["--merge", "--out", "x"], "--merge needs"), (["--micro-batch", "-1"], "--micro-batch: -1 is below 0"),
    (["--json", ""], "is a directory"), (["--device", "meta"], "not available here"),
    (["--json", "no/such/folder/r.json"], "its folder does not exist"),
    (["--json", "."], "is a directory"),
    (["--out", "train.py"], "is not a directory"), (["--out", "train.py/x"], "is not a directory")])
def test_what_is_typed_wrong_gets_one_sentence_and_exit_code_2(argv, sentence):
    done = command(*argv)
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_bad_input_for_a_real_model_is_named_and_nothing_is_written(smollm2, questions, tmp_path):
    good = questions("mmlu")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "q", "choices": ["a"], "answer": 0}\n', encoding="utf-8")
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    (gpt2 / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    (gpt2 / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    for argv, sentence in (
            (["--model", tmp_path / "none", "--train", good], "none"),
            (["--model", smollm2, "--train", tmp_path / "none.jsonl"], "none.jsonl: no such file"),
            (["--model", smollm2, "--train", good, "--eval", bad], "bad.jsonl, line 1: a question needs 2 to 26 options"),
            (["--model", gpt2, "--train", good], "model_type 'gpt2' is not supported")):
        done = command(*argv, "--json", tmp_path / "r.json", "--out", tmp_path / "out")
        assert done.returncode == 2 and sentence in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "r.json").exists() and not (tmp_path / "out").exists()


def test_a_real_model_through_the_same_loop(smollm2, questions, tmp_path):
    done = command("--model", smollm2, "--train", questions("opentrivia"), "--eval", questions("mmlu"),
                   "--methods", "aligned,calm", "--steps", 2, "--batch", 2, "--limit", 4, "--dtype", "bfloat16",
                   "--json", tmp_path / "r.json", "--out", tmp_path / "out", "--show-prompt",
                   "--quantize", "--targets", "self_attn.[qv]_proj", "--merge", "--micro-batch", 1, "--checkpointing")
    assert done.returncode == 0, done.stderr
    adapters = json.loads((tmp_path / "out" / "calm-0" / "adapter_config.json").read_text())
    assert adapters["target_modules"] == ["q_proj", "v_proj"] and (tmp_path / "out" / "calm-0" / "merged" / "tokenizer.json").exists()
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    lines = [json.loads(line) for line in open(tmp_path / "out" / "predictions.jsonl", encoding="utf-8")]
    assert len(lines) == 4 * len(rows) and (tmp_path / "out" / "calm-0" / "adapter_model.safetensors").exists()
    again = subprocess.run([sys.executable, "metrics.py", tmp_path / "out" / "predictions.jsonl"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and "calm" in again.stdout
    assert "scored tokens" in done.stdout
    assert [(r["method"], r["domain"], r["scoring"]) for r in rows] == [
        (m, d, s) for m in ("aligned", "calm") for d in ("id", "mmlu") for s in ("letter", "text-char")]
    assert all(r["n"] == 4 for r in rows)
    assert "prompts in chat form" in done.stdout


# --- Merged models -------------------------------------------------------------------------------

@pytest.mark.parametrize("method, said", [("calm/mode=vector", "the offset is lm_head.bias"), ("calm-scalar", "complete for any reader")])
def test_a_merged_model_predicts_what_the_trained_one_does(method, said, tmp_path, capsys):
    """Here to 1e-5; in transformers the same, but for the offset, which it says it has no place for."""
    small_checkpoint(tmp_path / "base", "llama, tied")
    model, ids = Transformer.from_pretrained(tmp_path / "base"), torch.randint(67, (3, 9), generator=torch.Generator().manual_seed(0))
    task = train.Task(model, train.add_lora(model), lambda n, g: (ids, ids), lambda n, g: (ids, ids > 20), None, {}, [])
    args = train.parse(["--model", "m", "--train", "t", "--merge", "--out", str(tmp_path / "out"), "--methods", method, "--lr", "0.01",
                        "--alpha-lr", "0.1", "--steps", "3"]).of[method]
    adjustment, _ = train.train_method(task, method, args, seed=4)
    assert said in capsys.readouterr().out
    folder = tmp_path / "out" / f"{method.replace('/', '_')}-4" / "merged"
    with torch.no_grad():
        expected = adjustment(model(ids))
        assert (expected - model(ids)).abs().max() > 0.01
        assert (Transformer.from_pretrained(folder)(ids) - expected).abs().max() < 1e-5
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        assert (theirs + adjustment.offset - expected).abs().max() < 1e-5


# --- Memory --------------------------------------------------------------------------------------

def directions_of(task, args, method, seed=0):
    """Where `method` sends theta and alpha at its first two steps, flat, and its reports."""
    found, direction = [], train.METHODS[method].direction
    def spy(problem, args, state):
        out = direction(problem, args, state)
        found.append((train.flatten(out[0], problem.theta), train.flatten(out[1], problem.alpha), out[2]))
        return out
    train.METHODS[method].direction = spy
    try:
        train.fit(task, method, argparse.Namespace(**{**vars(args), "steps": 2}), seed)
    finally:
        train.METHODS[method].direction = direction
    return found


def same_directions(a, b, tolerance=1e-6):
    for (theta, alpha, report), (theta_2, alpha_2, report_2) in zip(a, b, strict=True):
        for x, y in ((theta, theta_2), (alpha, alpha_2)):
            assert (x - y).norm() <= tolerance * x.norm()
        assert report.keys() == report_2.keys() and report["lower"] == pytest.approx(report_2["lower"], rel=tolerance)


def ragged_task():
    """A random model in float64 with a large vocabulary, and rows with 2 or 6 supervised tokens, or none (case 25)."""
    torch.manual_seed(0)
    model = Transformer(Config(5000, hidden_size=32, intermediate_size=48)).double()
    def batch(n, g):
        ids, targets = torch.randint(5000, (4, 12), generator=g), torch.full((4, 12), train.IGNORE)
        counts = [(2, 6, 2, 6), (0, 6, 0, 2)][int(torch.randint(2, (), generator=g))]
        for row, tokens in enumerate(counts):
            targets[row, 5:5 + tokens] = torch.randint(5000, (tokens,), generator=g)
        return ids, targets
    def inputs(n, g):
        return torch.randint(5000, (4, 12), generator=g), torch.arange(12) > torch.tensor([[10], [8], [10], [7]])
    choices = lambda n, g: [Question(torch.randint(5000, (n,), generator=g).tolist(), [[4], [5], [6]], n % 3) for n in (3, 7, 5, 4)]
    return train.Task(model, train.add_lora(model), batch, inputs, choices, {}, [])


@pytest.fixture(scope="module")
def ragged():
    return ragged_task()


@pytest.mark.parametrize("method", ["calm", "calm-persistent", "calm-exact", "reg", "cft-binned"])
def test_case_25_micro_batches_chunks_of_logits_and_checkpointing_change_no_direction(ragged, method, monkeypatch):
    args = train.parse(["--methods", method, "--mode", "vector", "--products", "3", "--mu", "1"]).of[method]
    plain = directions_of(ragged, args, method)
    ways = [{"micro_batch": n} for n in (1, 3, 4)] + [{"checkpointing": True}, {"micro_batch": 1, "checkpointing": True}]
    for way in ways:
        same_directions(plain, directions_of(ragged, argparse.Namespace(**{**vars(args), **way}), method))
    rows, head = [], Transformer.head
    monkeypatch.setattr(Transformer, "head", lambda self, x: rows.append(len(x)) or head(self, x))
    monkeypatch.setattr(train, "LOGITS_AT_ONCE", 3 * 5000)
    same_directions(plain, directions_of(ragged, args, method))
    if method in ("calm", "calm-persistent", "reg"):
        assert max(rows) == 3                              # of up to 16 places


def test_micro_batches_and_checkpointing_need_less_memory():
    model, ids = Transformer(Config(50, num_hidden_layers=6, max_position_embeddings=128)), torch.randint(50, (16, 100))
    task = train.Task(model, train.add_lora(model), lambda n, g: (ids, torch.where(torch.arange(100) > 90, ids, train.IGNORE)),
                      lambda n, g: (ids, torch.arange(100).expand(16, 100) == 99), None, {}, [])
    args = train.parse(["--methods", "calm", "--inner-steps", "1"]).of["calm"]
    peak = lambda **way: peak_bytes(lambda: train.fit(task, "calm", argparse.Namespace(**{**vars(args), "steps": 1, **way}), 0))
    plain = peak()
    assert peak(micro_batch=2) < 0.4 * plain and peak(checkpointing=True) < 0.6 * plain


def test_what_runs_out_of_memory_ends_with_the_flags_that_need_less(monkeypatch, capsys):
    for failing in (lambda *_: torch.empty(2 ** 55), lambda *_: bytearray(2 ** 60)):
        monkeypatch.setattr(train, "run", failing)
        assert train.main([]) == 2
        said = capsys.readouterr().err
        assert said.startswith("train.py: out of memory; --micro-batch 1, --checkpointing") and said.count("\n") == 1
    monkeypatch.setattr(train, "run", lambda *_: torch.zeros(2) @ torch.zeros(3))          # another RuntimeError is a bug, and shown as one
    with pytest.raises(RuntimeError):
        train.main([])


# --- Several processes ---------------------------------------------------------------------------

def torchrun(*argv, processes=2):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), *map(str, argv)],
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def fit_everything(path):
    """Write what each method makes of theta and alpha on the ragged task, and its reports, from the first process."""
    task, found = ragged_task(), {}
    with train.processes():
        for method in ("ft", "reg", "iterate", "cft", "cft-binned", "calm", "calm-persistent"):
            steps = 52 if method == "cft-binned" else 6    # its bins' accuracies are of 50 steps
            args = train.parse(["--methods", method, "--steps", str(steps), "--mu", "1", "--batch", "4"]).of[method]
            found[method] = trained(task, args, method)
        if train.rank()[0] == 0:
            torch.save(found, path)


def test_two_processes_find_what_one_finds(tmp_path):
    """theta, alpha, lambda, losses: to 1e-6, on rows with uneven numbers of supervised tokens, in some steps all in one process."""
    fit_everything(tmp_path / "one.pt")
    done = torchrun(__file__, tmp_path / "two.pt")
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in ("one", "two"))
    for method in one:
        (values, trace), (values_2, trace_2) = one[method], two[method]
        for a, b in zip(values, values_2):
            assert (a - b).norm() <= 1e-6 * a.norm(), method
        for step, step_2 in zip(trace, trace_2, strict=True):
            assert step == pytest.approx(step_2, rel=1e-6, abs=1e-6), method


def test_the_same_command_under_torchrun(tmp_path):
    flags = [*QUICK, "--methods", "aligned,ts,cft-binned,calm,calm-persistent", "--scoring", "letter,open", "--open-limit", 5, "--out", tmp_path / "out"]
    assert command(*flags, "--json", tmp_path / "one.json").returncode == 0
    done = torchrun("train.py", *flags, "--json", tmp_path / "two.json")
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"{n}.json").read_text())["rows"] for n in ("one", "two"))
    assert len(one) == len(two) == 20
    for row, row_2 in zip(one, two):
        assert row.keys() == row_2.keys()
        assert all(row[k] == (row_2[k] if isinstance(row[k], str) else pytest.approx(row_2[k], rel=1e-6, abs=1e-6)) for k in row)
    assert done.stdout.count("id, letter scoring, n = 50") == 1            # only the first process prints


@pytest.mark.parametrize("argv, sentence", [(["--batch", 1], "--batch 1 has no rows for 2 processes"),
                                            (["--methods", "calm-exact"], "run in one process"), (["--check", 5], "run in one process")])
def test_what_several_processes_cannot_do(argv, sentence):
    done = torchrun("train.py", *QUICK, *argv)
    assert done.returncode != 0 and sentence in done.stderr


if __name__ == "__main__":                                 # under torchrun
    fit_everything(sys.argv[1])


# --- The scores of lm-evaluation-harness ---------------------------------------------------------

def harness_scores(directory, prompter, questions, batch=8):
    """log-probabilities of all options by lm-evaluation-harness, (n, options): the same texts, its own tokens, batches and model."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    harness = HFLM(pretrained=model, tokenizer=transformers.AutoTokenizer.from_pretrained(directory), batch_size=batch, device="cpu")
    text = lambda ids: prompter.tokenizer.decode(ids, skip_special_tokens=False)
    found = harness.loglikelihood([Instance("loglikelihood", {}, (text(q.prompt), text(option)), j)
                                   for q in questions for j, option in enumerate(q.options)], disable_tqdm=True)
    return torch.tensor([log_p for log_p, _ in found], dtype=torch.float64).view(len(questions), -1)


def same_choices(ours, theirs):
    """Whether the argmax of every row is the same, or two options that tie to rounding."""
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    i = torch.arange(len(ours))
    return bool(((ours.argmax(1) == theirs.argmax(1)) | ((theirs.amax(1) - theirs[i, ours.argmax(1)]).abs() < 4e-4)).all())


def test_scores_and_accuracy_are_those_of_lm_evaluation_harness(smollm2, questions, tmp_path):
    """100 questions on a small random model with a real tokenizer, and a few on SmolLM2 itself; sum of log-probabilities
    (letters, and the harness's acc) and their mean per character (its acc_norm)."""
    torch.manual_seed(0)
    tiny = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2))
    tiny.save_pretrained(tmp_path / "tiny")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tiny" / file).write_bytes((smollm2 / file).read_bytes())
    rows = train.load_mcqa(questions("opentrivia"))[::425][:100]
    for directory, n in ((tmp_path / "tiny", 100), (smollm2, 4)):
        model, prompter = Transformer.from_pretrained(directory), train.Prompter(directory)
        prompter.template = None                           # the plain form: the harness would count a chat prompt's last newline to the answer
        for form, rules in (("letter", ["sum"]), ("text", ["sum", "char"])):
            asked = [prompter.question(row, form) for row in rows[:n]]
            theirs = harness_scores(directory, prompter, asked)
            for rule in rules:
                expected = theirs / torch.tensor([q.lengths for q in asked]) if rule == "char" else theirs
                assert same_choices(train.score_options(model, None, asked, rule), expected), (directory.name, form, rule)
