"""What can be typed wrong, torn, full or interrupted: always one sentence and exit code 2 or 130, nothing half-written."""
import contextlib
import gzip
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import bilevel
import data
import metrics
import model
import train
from data import Question

ROOT = Path(train.__file__).parent
fixed = lambda examples: settings(max_examples=examples, deadline=None, derandomize=True, database=None)


# --- Command lines -------------------------------------------------------------------------------

def said(main, argv):
    """main(argv): exit code and what stood on stderr. An exception is a traceback: it is not caught."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
    return code or 0, err.getvalue()


def flags_of(program):
    return sorted(set(re.findall(r'(?:\ba|add_argument)\("(--[a-z-]+)"', Path(program.__file__).read_text(encoding="utf-8"))))


WORDS = ["", " ", "0", "1", "-1", "2.5", "1e9", "999999999999", "9" * 5000, "nan", "inf", "-inf", "1e-400", "many", "True", "None", "calm", "aligned,ts", "all",
         "calm/steps=3", "calm/steps", "calm/steps=", "calm/help", "calm/", "/", "calm/resume", "calm/save-every=1", "ls/label-smoothing=2", "calm/mode=x", ",",
         "letter", "open", "letter,open", "text-sum", "A", "B", "cpu", "auto", "cuda:99", "tpu", "meta", ".", "..", "/dev/null", "/dev/full", "no/such/file", "train.py",
         "é", "\ud800", "\0", "--", "-", "--help", "x=y", "q_proj", "[", "*", "float32", "vector", "raw"]


def command_lines(program):
    return st.lists(st.one_of(st.tuples(st.sampled_from(flags_of(program)), st.sampled_from(WORDS) | st.text(max_size=4)),
                              st.tuples(st.sampled_from(flags_of(program))), st.tuples(st.sampled_from(WORDS))),
                    max_size=5).map(lambda parts: [word for part in parts for word in part])


@pytest.fixture(scope="module")
def idle():
    """The programs without their work: what is typed is parsed and checked, then nothing happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", lambda args, kept: None)
        patch.setattr(train, "select", lambda args, parse_method: None)
        patch.setattr(bilevel, "laboratory", lambda args: 0)
        yield


def one_sentence(code, err, program):
    assert code in (0, 2), (code, err)
    if code == 2:
        assert err.startswith(f"{program}.py: ") and err.count("\n") == 1 and len(err) > len(program) + 10, err
    else:
        assert err == ""


@fixed(400)
@given(argv=command_lines(train))
def test_whatever_is_typed_at_train_is_run_or_refused_in_one_sentence(idle, argv):
    one_sentence(*said(train.main, argv), "train")


@fixed(150)
@given(argv=command_lines(bilevel))
def test_whatever_is_typed_at_bilevel_is_run_or_refused_in_one_sentence(idle, argv):
    one_sentence(*said(bilevel.main, argv), "bilevel")


GOOD = '{"method": "m", "domain": "d", "probabilities": [0.6, 0.4], "choice": 0, "gold": 1}\n'


@fixed(60)
@given(argv=st.lists(st.one_of(st.tuples(st.just("--bins"), st.sampled_from(WORDS)), st.tuples(st.sampled_from(["--json", "--plot"]), st.sampled_from(
    ["", ".", "/", "/dev/null", "/dev/full", "no/such/file", "\0", "--"])), st.tuples(st.sampled_from(WORDS))), max_size=3))
def test_whatever_is_typed_at_metrics_is_run_or_refused_in_one_sentence(tmp_path_factory, argv):
    path = tmp_path_factory.getbasetemp() / "predictions.jsonl"
    path.write_text(GOOD)
    one_sentence(*said(metrics.main, [str(path), *(word for part in argv for word in part)]), "metrics")


def test_sizes_no_machine_has_are_one_sentence():
    for argv, sentence in ((["--limit", "999999999999"], "up to 1e9"), (["--limit", "1000000000"], "at most"), (["--batch", "1000000000"], "at most"),
                           (["--pretrain-steps", "1", "--rank", "1000000000", "--methods", "calm"], "out of memory")):
        code, err = said(train.main, argv)
        assert code == 2 and sentence in err and err.splitlines()[-1].startswith("train.py: "), err


def test_help_of_every_program_says_the_defaults():
    for program, default in ((train, "(default: auto)"), (bilevel, "(default: 120)"), (metrics, "(default 10)")):
        text = subprocess.run([sys.executable, program.__file__, "--help"], capture_output=True, text=True, check=True).stdout
        assert default in " ".join(text.split()) and all(flag in text for flag in flags_of(program))


def test_device_auto_takes_the_best_there_is(monkeypatch):
    tried = []
    monkeypatch.setattr(torch, "zeros", lambda *size, device, zeros=torch.zeros: tried.append(device) or zeros(*size))
    for cuda, mps, device in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        assert train.parse([]).device == train.parse(["--device", "auto"]).device == tried[-1] == device
    assert train.parse(["--device", "cpu"]).device == "cpu"


def test_a_bound_of_the_temperature_is_a_sentence_without_file_and_line(tmp_path):
    argv = ["--pretrain-steps", "1", "--dpo-steps", "0", "--limit", "20", "--methods", "ts"]
    done = subprocess.run([sys.executable, "-c", "import sys, train, warnings; train.fit_temperature = lambda z, y: warnings.warn('at the bound') or 1.0; "
                           "sys.exit(train.main(sys.argv[1:]))", *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "train.py: at the bound\n"


# --- Files ---------------------------------------------------------------------------------------

def tiny_task():
    torch.manual_seed(0)
    toy = model.Transformer(model.Config(20, 8, 12, 1, 2, 1)).eval()
    batch = lambda n, g: (torch.randint(20, (n, 4), generator=g), torch.randint(20, (n, 4), generator=g))
    inputs = lambda n, g: (torch.randint(20, (n, 4), generator=g), torch.ones(n, 4, dtype=torch.bool))
    choices = lambda n, g: [Question([1, 2], [[3], [4], [5]], i % 3) for i in range(n)]
    return train.Task(toy, model.add_lora(toy, 2, 4), batch, inputs, choices, {}, [])


def continue_from(path):
    """Go on from a checkpoint: what fit() does with it."""
    args = train.parse(["--out", str(path.parent), "--resume", "--methods", "calm-persistent", "--steps", "3", "--settle", "0"]).of["calm-persistent"]
    return train.fit(tiny_task(), "calm-persistent", args, 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """name -> (reader of a path, the name the file must have, good bytes)."""
    folder = tmp_path_factory.mktemp("good")
    args = train.parse(["--out", str(folder), "--save-every", "2", "--methods", "calm-persistent", "--steps", "3", "--settle", "0"]).of["calm-persistent"]
    train.fit(tiny_task(), "calm-persistent", args, 0)
    toy = model.Transformer(model.Config(20, 8, 12, 1, 2, 1))
    model.save_pretrained(toy, folder / "m")
    torch.save(toy.state_dict(), folder / "m" / "pytorch_model.bin")
    model.add_lora(toy, 2, 4)
    model.save_adapters(toy, folder / "a", train.LogitAdjustment(20))
    config = json.loads((folder / "m" / "config.json").read_text()) | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0,
                                                                     "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    run = train.parse(["--methods", "aligned"])
    results = train.document(run, [{"method": "aligned", "seed": 0, "domain": "id", "n": 1, "conf_ece": 0.1}])

    def saved_results(path):
        path.with_name("predictions.jsonl").write_text(json.dumps({"method": "aligned", "seed": 0}) + "\n")
        run.out = path.parent
        return train.read_results(run)

    def adapters(path, name):
        for file in (folder / "a").iterdir():
            if file.name != name:
                (path.parent / file.name).write_bytes(file.read_bytes())
        return model.load_adapters(model.Transformer(model.Config(20, 8, 12, 1, 2, 1)), path.parent)

    read = lambda file: (folder / file).read_bytes()
    index = json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}).encode()
    mcqa = '{"question": "q", "choices": ["a", "b"], "answer": 0}\n' * 3
    shards = lambda path: [(path.parent / name).touch() for name in "xy"] and model.find_shards(path.parent)
    return {"mcqa": (data.load_mcqa, "q.jsonl", mcqa.encode()), "mcqa, gzip": (data.load_mcqa, "q.jsonl.gz", gzip.compress(mcqa.encode())),
            "qa": (data.load_qa, "q.jsonl", b'{"Data": [{"Question": "q", "Answer": {"Value": "v"}}]}'),
            "instructions": (data.load_instructions, "i.json", b'[{"instruction": "i", "input": "", "output": "o"}]'),
            "predictions": (metrics.read_predictions, "p.jsonl", GOOD.encode() * 3), "predictions, gzip": (metrics.read_predictions, "p.gz", gzip.compress(GOOD.encode())),
            "weights": (lambda path: list(model.read_safetensors(path)), "w.safetensors", read("m/model.safetensors")),
            "weights, bin": (lambda path: list(model.read_bin(path)), "w.bin", read("m/pytorch_model.bin")),
            "index": (shards, "model.safetensors.index.json", index),
            "config": (lambda path: model.read_config(path.parent), "config.json", json.dumps(config).encode()),
            "adapter config": (lambda path: adapters(path, "adapter_config.json"), "adapter_config.json", read("a/adapter_config.json")),
            "adapter weights": (lambda path: adapters(path, "adapter_model.safetensors"), "adapter_model.safetensors", read("a/adapter_model.safetensors")),
            "checkpoint": (continue_from, "checkpoint.pt", read("checkpoint.pt")), "results": (saved_results, "results.json", results.encode())}


READERS = ["mcqa", "mcqa, gzip", "qa", "instructions", "predictions", "predictions, gzip", "weights", "weights, bin", "index", "config", "adapter config",
           "adapter weights", "checkpoint", "results"]


def read_or_refuse(read, path, must_fail=False):
    """A damaged file is read (the damage may not show) or refused by a ValueError or OSError of one line that names it."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            read(path)
    except (ValueError, ArithmeticError, OSError) as error:
        message = f"{error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        assert "\n" not in message and (path.name in message or str(path.parent) in message or isinstance(error, FloatingPointError)), repr(error)
    else:
        assert not must_fail


@pytest.mark.parametrize("name", READERS)
def test_a_good_file_is_read_and_what_is_no_file_is_named(files, name, tmp_path):
    read, file, good = files[name]
    (tmp_path / file).write_bytes(good)
    if name != "index":
        read(tmp_path / file)
    for i, content in enumerate((None, b"", b"\0" * 40, b"null", b"3", b'"text"', b"[" * 100_000, good[:len(good) // 2])):
        folder = tmp_path / str(i)
        folder.mkdir()
        if content is None:
            (folder / file).mkdir()                        # a directory for a file
        else:
            (folder / file).write_bytes(content)
        read_or_refuse(read, folder / file, must_fail="mcqa" not in name or i < 7)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_by_name(files, name, tmp_path):
    read, file, good = files[name]
    rng = random.Random(name)
    for trial in range(60 if name in ("checkpoint", "adapter weights") else 150):
        damaged = bytearray(good[:rng.randrange(len(good))] if trial % 4 == 0 else good)
        # Half of the flips go where the structure is: the first and last bytes.
        for _ in range(rng.choice((1, 1, 3, 30))):
            at = rng.randrange(len(damaged) or 1) if trial % 2 else rng.choice((rng.randrange(min(len(damaged), 200) or 1), -1 - rng.randrange(min(len(damaged), 200) or 1)))
            if damaged:
                damaged[at] ^= 1 << rng.randrange(8)
        (tmp_path / file).write_bytes(damaged)
        read_or_refuse(read, tmp_path / file)


VALUES = [None, True, -1, 0, 0.5, 10 ** 30, float("inf"), float("nan"), "", "x", [], [1, "a"], {}, {"a": None}]


@pytest.mark.parametrize("name", ["predictions", "index", "config", "adapter config", "results", "weights", "adapter weights"])
def test_a_value_of_another_type_is_read_or_refused_by_name(files, name, tmp_path):
    read, file, good = files[name]
    head, tail = (good.split(b"\n")[0], b"") if name == "predictions" else (good, b"")
    if "weights" in name:
        length = int.from_bytes(good[:8], "little")
        head, tail = good[8:8 + length], good[8 + length:]

    def places(value, path=()):
        yield path
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield from places(value[key], (*path, key))

    rng, document = random.Random(name), json.loads(head)
    for place in [p for p in places(document) if p][:200]:
        for other in rng.sample(VALUES, 5):
            changed = json.loads(head)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = other
            text = json.dumps(changed).encode()
            (tmp_path / file).write_bytes((len(text).to_bytes(8, "little") if "weights" in name else b"") + text + tail)
            read_or_refuse(read, tmp_path / file)
