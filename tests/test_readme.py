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


def test_the_toy_tables_are_the_committed_results():
    import train
    for name in ("toy", "toy_five_worlds"):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        assert train.table(rows).strip() in README
