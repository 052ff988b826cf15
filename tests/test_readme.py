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
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    assert "products" in capsys.readouterr().out


def test_the_laboratory_table_is_the_committed_result():
    rows = json.loads((RESULTS / "bilevel.json").read_text())["rows"]
    found = re.findall(r"^\| ([^|]+), ([^|,]+) \| ([\d.e+-]+) \| ([\d.e+-]+) \|$", README, re.M)
    assert len(found) >= 10
    for method, setting, easy, hard in found:
        for problem, printed in (("easy", easy), ("hard", hard)):
            error, = [r["relative_error"] for r in rows if (r["problem"], r["method"], r["setting"]) == (problem, method, setting)]
            assert f"{error:.1e}" == printed


def test_the_toy_tables_are_the_committed_results():
    import train
    for name in ("toy", "toy_five_worlds"):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        assert train.table(rows).strip() in README
