"""What can be typed wrong, torn, full or interrupted: always one sentence and exit code 2 or 130, nothing half-written."""
import contextlib
import gzip
import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
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
ROW = {"method": "aligned", "seed": 0, "domain": "id", "scoring": "letter", "n": 1, "conf_ece": 0.1, "conf_ece_low": 0.0, "conf_ece_high": 0.2}
fixed = lambda examples: settings(max_examples=examples, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module", autouse=True)
def warnings_as_before():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        yield


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


@contextlib.contextmanager
def idle():
    """The programs without their work: what is typed is parsed and checked, then nothing happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", lambda args, kept: None)
        patch.setattr(train, "select", lambda args: None)
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
def test_whatever_is_typed_at_train_is_run_or_refused_in_one_sentence(argv):
    with idle():
        one_sentence(*said(train.main, argv), "train")


@fixed(150)
@given(argv=command_lines(bilevel))
def test_whatever_is_typed_at_bilevel_is_run_or_refused_in_one_sentence(argv):
    with idle():
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
    for argv, sentence in ((["--limit", "999999999999"], "up to 1000000000"), (["--limit", "1000000000"], "at most a million"), (["--batch", "1000000000"], "at most"),
                           (["--pretrain-steps", "1", "--rank", "1000000000", "--methods", "calm"], "out of memory")):
        code, err = said(train.main, argv)
        assert code == 2 and sentence in err and err.splitlines()[-1].startswith("train.py: "), err


@pytest.mark.parametrize("program, default", [(train, "(default: auto)"), (bilevel, "(default: 120)"), (metrics, "(default 10)")])
def test_help_says_every_flag_and_the_defaults(program, default, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and default in text and all(flag in text for flag in flags_of(program))


def test_device_auto_takes_the_best_there_is(monkeypatch):
    tried = []
    monkeypatch.setattr(torch, "zeros", lambda *size, device, zeros=torch.zeros: tried.append(device) or zeros(*size))
    for cuda, mps, device in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        assert train.parse([]).device == train.parse(["--device", "auto"]).device == tried[-1] == device
    assert train.parse(["--device", "cpu"]).device == "cpu"


def test_a_warning_is_a_sentence_without_file_and_line():
    """Such as that of a fitted temperature at its bound."""
    assert said(train.main, ["--steps", "0"])[0] == 2
    assert warnings.formatwarning("at the bound", UserWarning, "metrics.py", 238) == "train.py: at the bound\n"


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
    results = json.dumps(train.document(run, [ROW]))

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
            "predictions, open": (metrics.read_predictions, "p.jsonl", b'{"classes": ["a", null, 3, ["b"]], "gold": "a"}\n' * 3),
            "weights": (lambda path: list(model.read_safetensors(path)), "w.safetensors", read("m/model.safetensors")),
            "weights, bin": (lambda path: list(model.read_bin(path)), "w.bin", read("m/pytorch_model.bin")),
            "index": (shards, "model.safetensors.index.json", index),
            "config": (lambda path: model.read_config(path.parent), "config.json", json.dumps(config).encode()),
            "adapter config": (lambda path: adapters(path, "adapter_config.json"), "adapter_config.json", read("a/adapter_config.json")),
            "adapter weights": (lambda path: adapters(path, "adapter_model.safetensors"), "adapter_model.safetensors", read("a/adapter_model.safetensors")),
            "checkpoint": (continue_from, "checkpoint.pt", read("checkpoint.pt")), "results": (saved_results, "results.json", results.encode())}


READERS = ["mcqa", "mcqa, gzip", "qa", "instructions", "predictions", "predictions, gzip", "predictions, open", "weights", "weights, bin", "index", "config", "adapter config",
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
        read_or_refuse(read, folder / file, must_fail=(name, i) not in {("checkpoint", 0), ("mcqa", 7)})


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


@pytest.mark.parametrize("name", ["predictions", "predictions, open", "index", "config", "adapter config", "results", "weights", "adapter weights"])
def test_a_value_of_another_type_is_read_or_refused_by_name(files, name, tmp_path):
    read, file, good = files[name]
    head, tail = (good.split(b"\n")[0], b"") if name.startswith("predictions") else (good, b"")
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


def test_a_file_that_cannot_be_read_is_named_by_every_program(tmp_path, monkeypatch):
    locked = tmp_path / "locked.jsonl"
    locked.write_text(GOOD)
    (tmp_path / "config.json").touch()
    refuse = lambda path, *args, **more: (_ for _ in ()).throw(PermissionError(13, "Permission denied", str(path)))
    with monkeypatch.context() as patch:                   # the superuser may read everything
        for name in ("builtins.open", "io.open", "pathlib.Path.read_bytes", "pathlib.Path.read_text"):
            patch.setattr(name, refuse)
        for read in (data.load_mcqa, data.load_qa, data.load_instructions, lambda path: model.read_config(path.parent)):
            with pytest.raises(PermissionError):
                read(locked)
        assert said(metrics.main, [str(locked)]) == (2, f"metrics.py: {locked}: Permission denied\n")


@pytest.mark.parametrize("broken", [
    '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "[UNK]"}}',           # knows no token for "a"
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}', '{"version": "1.0", "model": {}}'])
def test_a_tokenizer_that_cannot_encode_is_named(broken, tmp_path):
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer"):
        data.Prompter(tmp_path)


def test_a_tokenizer_that_fails_on_a_prompt_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}')
    with pytest.raises(ValueError, match="tokenizer.json: the tokenizer fails on a prompt"):
        data.Prompter(tmp_path).question({"question": "Who?", "choices": ["x", "y"], "answer": 0}, "letter")


def test_a_resume_outlives_a_torn_last_prediction_and_keeps_what_had_finished(tmp_path):
    args = train.parse(["--methods", "aligned", "--out", str(tmp_path)])
    row = {**ROW, "seed": 100}
    metrics.write_json(tmp_path / "results.json", train.document(args, [row]))
    (tmp_path / "predictions.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"method": "ts", "seed": 100}) + '\n{"method": "ts", "se')
    assert train.read_results(args) == [row] and (tmp_path / "predictions.jsonl").read_text() == json.dumps(row) + "\n"
    for lacking in ("domain", "scoring", "n", "conf_ece", "conf_ece_low", "method", "seed"):                 # edited by hand
        metrics.write_json(tmp_path / "edited.json", train.document(args, [{key: row[key] for key in row if key != lacking}]))
        (tmp_path / "edited.json").replace(tmp_path / "results.json")
        with pytest.raises(ValueError, match=f"not the results of a run that can be continued .'{lacking}"):
            train.read_results(args)
    metrics.write_json(tmp_path / "results.json", train.document(args, [row]))
    (tmp_path / "predictions.jsonl").write_text('{"method"\n' + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="not the results of a run that can be continued"):
        train.read_results(args)


# --- A full disk ---------------------------------------------------------------------------------

SMALL = ["--pretrain-steps", "3", "--dpo-steps", "1", "--limit", "20", "--steps", "2"]


@contextlib.contextmanager
def disk_of(size):
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size, methods", [(100, "aligned"), (3000, "aligned,ft"), (20_000, "ft")])
def test_a_disk_that_fills_is_one_sentence_and_leaves_nothing_half_written(size, methods, tmp_path):
    """100 bytes hold no results, 3,000 no second method's predictions, 20,000 no checkpoint."""
    flags = [*SMALL, "--methods", methods]
    keep = ["--out", str(tmp_path / "out"), "--save-every", "1", "--json", str(tmp_path / "r.json")]
    with disk_of(size):
        code, err = said(train.main, [*flags, *keep])
    assert (code, err) == (2, "train.py: File too large\n")
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(name.endswith(".partial") for name in left) and "r.json" not in left
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
    assert said(train.main, [*flags, *keep, "--resume"]) == said(train.main, [*flags, "--json", str(tmp_path / "fresh.json")]) == (0, "")
    rows = lambda name: json.loads((tmp_path / name).read_text())["rows"]
    assert rows("r.json") == rows("out/results.json") == rows("fresh.json")


def test_a_full_disk_while_adapters_are_saved_leaves_none(tmp_path, monkeypatch):
    toy = tiny_task().model
    for fails in ("adapter_model.safetensors", "adapter_config.json"):
        def no_space(source, target, replace=os.replace):
            if str(target).endswith(fails):
                raise OSError(28, "No space left on device")
            replace(source, target)
        monkeypatch.setattr(model.os, "replace", no_space)
        with pytest.raises(OSError, match="No space"):
            model.save_adapters(toy, tmp_path / fails)
        assert not list((tmp_path / fails).glob("*.partial")) and not (tmp_path / fails / fails).exists()
        monkeypatch.undo()


@pytest.mark.parametrize("name, argv, without", [
    ("train", [*SMALL, "--methods", "aligned"], ""), ("bilevel", ["--problem", "quadratic"], "program.at_one_point = lambda *_, **__: ({}, [])"),
    ("metrics", ["p.jsonl"], "")])
def test_what_cannot_be_printed_or_written_is_one_sentence(name, argv, without, tmp_path):
    (tmp_path / "p.jsonl").write_text(GOOD)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", f"import sys, {name} as program; {without}; sys.exit(program.main(sys.argv[1:]))".replace("; ;", ";"), *argv],
                              cwd=tmp_path, text=True, env=buffered, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, f"{name}.py: No space left on device\n")


@pytest.mark.parametrize("program, argv", [(train, [*SMALL, "--methods", "aligned"]), (metrics, ["p.jsonl"])])
def test_a_full_device_for_json_is_one_sentence(program, argv, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert said(program.main, [*argv, "--json", "/dev/full"]) == (2, f"{program.__name__}.py: No space left on device\n")


# --- Ctrl-C --------------------------------------------------------------------------------------

def test_json_goes_through_links_and_into_pipes(tmp_path):
    path, link = tmp_path / "p.jsonl", tmp_path / "link.json"
    path.write_text(GOOD)
    link.symlink_to(tmp_path / "there.json")
    assert metrics.main([str(path), "--json", str(link)]) == 0
    done = subprocess.run([sys.executable, "metrics.py", path, "--json", "/dev/stdout"], cwd=ROOT, capture_output=True, text=True)
    piped, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert done.returncode == 0 and link.is_symlink() and piped == json.loads((tmp_path / "there.json").read_text())


@pytest.mark.parametrize("program", ["train.py", "bilevel.py", "metrics.py"])
def test_ctrl_c_while_torch_is_imported(program):
    run = subprocess.Popen([sys.executable, program, "x"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    while "libtorch" not in Path(f"/proc/{run.pid}/maps").read_text():     # the import has begun
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=60) == ("", f"\n{program}: interrupted\n") and run.returncode == 130


def test_ctrl_c_at_any_moment_is_one_sentence_and_the_run_goes_on_from_there(tmp_path):
    flags = [*SMALL, "--steps", "60", "--methods", "aligned,calm,ft", "--save-every", "10"]
    # A shell's background jobs ignore Ctrl-C, and so would their children.
    run = ("import signal, sys, train; signal.signal(signal.SIGINT, signal.default_int_handler); print('ready', flush=True); "
           "sys.exit(train.main(sys.argv[1:]))")
    assert said(train.main, [*flags, "--out", str(tmp_path / "whole")]) == (0, "")
    rng, codes = random.Random(0), []
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", run, *flags, "--out", tmp_path / "out", "--resume"], cwd=ROOT, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
        child.stdout.readline()
        time.sleep(rng.uniform(0.05, 1.0))
        child.send_signal(2)
        _, err = child.communicate(timeout=60)
        codes.append(child.returncode)
        assert codes[-1] in (0, 130) and "Traceback" not in err and (codes[-1] == 0 or re.fullmatch(r"\ntrain.py: interrupted.*\n", err)), err
        for path in tmp_path.rglob("*.json"):
            json.loads(path.read_text())
        assert not list(tmp_path.rglob("*.partial"))
    assert 130 in codes
    assert said(train.main, [*flags, "--out", str(tmp_path / "out"), "--resume"]) == (0, "")
    whole, resumed = (json.loads((tmp_path / name / "results.json").read_text())["rows"] for name in ("whole", "out"))
    assert resumed == whole
