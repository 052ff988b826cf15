"""train.py: the loop, the scoring of options, the toy's story and the command line."""
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from data import Question, World
from model import Config, Transformer

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
    args, kept = train.parse(["--limit", "2000"]), {}
    align = train.align
    def keep(model, *rest):
        kept["pretrained"] = {k: v.clone() for k, v in model.state_dict().items()}
        return align(model, *rest)
    train.align = keep
    try:
        return train.toy_task(args, seed=0), args, kept["pretrained"]
    finally:
        train.align = align


def rows_of(task, method, args):
    return {row["domain"]: row for row in train.run_method(task, method, args, 0)[0]}


def test_pretraining_calibrates_and_preference_alignment_alone_makes_overconfident(toy):
    task, args, pretrained = toy
    world = World(0)
    fresh = Transformer(Config(world.vocab_size))
    fresh.load_state_dict(pretrained)
    before = rows_of(train.Task(fresh, {}, None, None, {}, task.tests), "aligned", args)
    after = rows_of(task, "aligned", args)
    assert before["id"]["conf_ece"] < 0.04 and before["ood"]["conf_ece"] < 0.04
    assert after["id"]["conf_ece"] < 0.05 and after["ood"]["conf_ece"] > 0.12


def test_temperature_scaling_leaves_the_other_domain_overconfident_and_calm_does_not(toy):
    task, args, _ = toy
    aligned, ts, calm = (rows_of(task, method, args)["ood"]["conf_ece"] for method in ("aligned", "ts", "calm"))
    assert ts > 0.75 * aligned and calm < 0.5 * aligned


def test_every_method_starts_from_the_same_aligned_model(toy):
    task, args, _ = toy
    first = rows_of(task, "aligned", args)
    args.steps = 3
    second = rows_of(task, "calm", args)
    assert rows_of(task, "aligned", args) == first != second
    assert rows_of(task, "calm", args) == second


def test_case_23_every_adapter_has_a_gradient_by_step_2(toy):
    task, args, _ = toy
    seen = []
    def spy(problem, args):
        out = train.calm_direction(problem, args)
        seen.append([d.abs().max().item() for d in out[0]])
        return out
    args.steps = 2
    train.fit(task, spy, "vector", args, 0, "spy")
    assert min(seen[1]) > 0


def test_case_27_the_first_non_finite_loss_stops_the_run_with_its_step(toy):
    task, args, _ = toy
    args.steps = 3
    calls = []
    def broken(problem, args):
        out = train.ft_direction(problem, args)
        calls.append(1)
        return out if len(calls) < 2 else (*out[:2], {"lower": float("nan")})
    with pytest.raises(FloatingPointError, match="step 1"):
        train.fit(task, broken, "vector", args, 0, "broken")


def test_a_table_of_numbers_that_are_not_all_finite():
    row = {"domain": "id", "scoring": "letter", "method": "ft", "n": 2, "accuracy": 1.0, "conf_ece": 0.1, "cw_ece": 0.1,
           "nll": float("inf"), "brier": 0.1, "auroc": float("nan")}
    text = train.table([row, {**row, "auroc": 0.5}])
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
        [(m, s, d) for s in (7, 8) for m in train.METHODS for d in ("id", "ood")]
    assert train.table(result["rows"]) in done.stdout
    assert {"n", "accuracy", "conf_ece", "cw_ece", "nll", "brier"} <= result["rows"][0].keys()
    assert result["config"]["steps"] == 3


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
    (["--nonsense"], "unrecognized arguments: --nonsense"),
    (["--lr", "nan"], "argument --lr"),
    (["--device", "tpu9"], "--device tpu9: not available here"),
    (["--model", "nowhere"], "--model needs --train"),
    (["--eval", "x"], "need --model"),
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
                   "--json", tmp_path / "r.json", "--out", tmp_path / "out", "--show-prompt")
    assert done.returncode == 0, done.stderr
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
