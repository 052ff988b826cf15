"""What the README tells a reader to type works, and its tables come from the committed results."""
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "tests" / "results"


def test_every_python_example_runs(capsys):
    examples = re.findall(r"```python\n(.*?)```", README, re.S)
    assert examples
    names = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert "products" in capsys.readouterr().out
    exact, first_order = names["exact"], names["first_order"]
    assert f"{float(100 * (first_order - exact).norm() / exact.norm()):.2f} %" in README


def test_the_laboratory_table_is_the_committed_result():
    rows = json.loads((RESULTS / "bilevel.json").read_text())["rows"]
    found = re.findall(r"^\| ([^|]+), ([^|,]+) \| ([\d.e+-]+) \| ([\d.e+-]+) \|$", README, re.M)
    assert len(found) >= 10
    for method, setting, easy, hard in found:
        for problem, printed in (("easy", easy), ("hard", hard)):
            error, = [r["relative_error"] for r in rows if (r["problem"], r["method"], r["setting"]) == (problem, method, setting)]
            assert f"{error:.1e}" == printed


def penalty_table(rows):
    """The README's errors of both penalties where F looks at questions that L does not hold, against lam."""
    rows = {(r["method"], r["setting"]): r["relative_error"] for r in rows if r["problem"] == "unseen"}
    methods, settings = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    return "\n".join(["| | " + " | ".join(settings) + " |", "|---" * (len(settings) + 1) + "|",
                      *(f"| {m} | " + " | ".join(f"{rows[m, s]:.1e}" for s in settings) + " |" for m in methods)])


def test_the_penalty_table_is_the_committed_result():
    assert penalty_table(json.loads((RESULTS / "bilevel.json").read_text())["rows"]) in README


def trajectory_table(rows):
    """The README's summary of the trajectories, over all problems, from the rows of bilevel.json."""
    lines = ["| surrogate | alpha's step | mean cosine | worst cosine | mean relative error | minimum lost |", "|---|---|---|---|---|---|"]
    rows = [r for r in rows if r["problem"].startswith("seed")]
    for method, setting, speed in dict.fromkeys((r["method"], r["setting"], r["speed"]) for r in sorted(rows, key=lambda r: r["speed"])):
        here = [r for r in rows if (r["method"], r["setting"], r["speed"]) == (method, setting, speed)]
        mean = lambda key: sum(r[key] for r in here) / len(here)
        lost = sum(r["lost_at"] is not None for r in here)
        lines.append(f"| {method.split(', ')[1]}, {setting} | {speed:g} | {mean('mean_cosine'):.3f} | {min(r['worst_cosine'] for r in here):.3f} | "
                     f"{mean('relative_error'):.2f} | {lost} of {len(here)} |")
    return "\n".join(lines)


def test_the_trajectory_table_is_the_committed_result():
    assert trajectory_table(json.loads((RESULTS / "bilevel.json").read_text())["rows"]) in README


def test_every_table_of_the_experiments_is_a_committed_result():
    import train
    for path in sorted(RESULTS.glob("*.json")):
        saved = json.loads(path.read_text())
        rows = saved.get("rows", [])
        if "chosen" not in saved and rows and "scoring" in rows[0]:
            assert train.table(rows).strip() in README, path.name


def test_the_settings_of_the_methods_are_those_that_were_chosen():
    import train
    chosen = json.loads((RESULTS / "selection.json").read_text())["chosen"]
    assert {name: flags for name, flags in train.CHOSEN.items() if name != "calm-exact"} == chosen
    assert train.CHOSEN["calm-exact"] == chosen["calm-persistent"]


def test_pictures_of_the_readme_are_there():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).read_bytes()[:4] == b"\x89PNG"


def costs(result):
    """The README's paragraph on what things cost, from benchmark.json."""
    t, m, r = result["time"], result["memory"], result["ratio"]
    return f"""**Costs**, in units of one gradient of L (`python tests/benchmark.py`, 2 million parameters, one thread):
Hessian-vector product {t['hvp, graph kept']:.2f} with the graph kept, CG-10 {t['CG-10']:.1f}, BOME {t['BOME T = 1']:.2f} / {t['BOME T = 3']:.2f} /
{t['BOME T = 10']:.2f} at T = 1 / 3 / 10 and {t['BOME persistent']:.2f} persistent; memory of CG {m['CG-10']:.2f} whatever the number of products,
of BOME {m['BOME T = 10']:.2f} whatever T. On SmolLM2-135M (`--model DIR`; float32, one thread, 8 x 64 tokens, beside other jobs on the same cores): a forward pass takes
{r['forward / transformers']:.2f} of the time of transformers, a LoRA step {r['LoRA step / peft']:.2f} of that of peft, and ten sampled answers of 16
tokens are {r['transformers.generate / ten answers of 16 tokens']:.2f} times as fast as `transformers.generate`. A step of `calm` takes
{r['calm T = 1 / reg']:.2f} / {r['calm T = 3 / reg']:.2f} times one of `reg` at T = 1 / 3 - counting gradients, (T + 1.4) / 2 - and {r['memory, calm / ft']:.2f} times the
memory of plain fine-tuning (`calm-persistent` {r['memory, calm-persistent / ft']:.2f}); with `--micro-batch 1`, `ft` needs
{100 * r['memory, ft --micro-batch 1 / ft']:.0f} % of its memory. At 128,000 items of vocabulary and 2,048 tokens the losses in chunks
need {100 * r['memory, L in chunks / plain']:.1f} % (L) and {100 * r['memory, F in chunks / plain']:.1f} % (F) of the plain form's extra memory."""


def test_the_costs_are_the_committed_result():
    assert " ".join(costs(json.loads((RESULTS / "benchmark.json").read_text())).split()) in " ".join(README.split())
