"""What the README tells a reader to type works, and its tables come from the committed results."""
import contextlib
import importlib
import io
import json
import re
import statistics
import textwrap
from pathlib import Path

import pytest
import torch

from bilevel import Bilevel, bome_direction, negative_entropy, parametric_cross_entropy, print_table
from model import Transformer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "tests" / "results"


@pytest.fixture(scope="module")
def examples():
    """Every python example of the README, run: the names it has defined and what it has printed, by a word in it."""
    ran = []
    for example in re.findall(r"```python\n(.*?)```", README, re.S):
        names, printed = {}, io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example, "README.md", "exec"), names)
        ran.append((example, names, printed.getvalue()))
    return lambda word: next((names, printed) for example, names, printed in ran if word in example)


def test_the_example_of_a_bilevel_problem_agrees_with_the_exact_one(examples):
    names, printed = examples("log_decay")
    assert "products" in printed
    exact, first_order = names["exact"], names["first_order"]
    assert f"{float(100 * (first_order - exact).norm() / exact.norm()):.2f} %" in README


def test_the_step_on_a_stock_model_raises_entropy_lowers_L_and_is_that_of_our_transformer(examples, tmp_path):
    here, printed = examples("transformers")
    found = re.findall(r"L ([\d.]+), entropy on held-out inputs ([\d.]+), lambda ([\d.]+)", printed)
    L, H, lam = (list(map(float, column)) for column in zip(*found))
    assert len(L) == 20 and L[-1] < L[0] / 4 and H[-1] > H[0] + 0.5 and min(lam) > 0
    llm, adjustment = here["llm"].double(), here["adjustment"].double()
    llm.save_pretrained(tmp_path)
    ours = Transformer.from_pretrained(tmp_path, dtype=torch.float64)
    named = dict(ours.named_parameters())
    same = [named[name.removeprefix("model.")] for name, _ in llm.named_parameters()]      # in the same order
    problem = Bilevel(same, list(adjustment.parameters()),
                      lower=lambda: parametric_cross_entropy(ours(here["ids"])[:, :-1], here["labels"][:, 1:], adjustment),
                      upper=lambda: negative_entropy(ours(here["held_out"])[:, -1], adjustment))
    theirs, own = (bome_direction(p, 3, 1e-3, 2.0) for p in (here["problem"], problem))
    for a, b in zip(theirs[0] + theirs[1], own[0] + own[1]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)             # transformers norms and rotates in float32
    assert theirs[2] == pytest.approx(own[2], rel=1e-5)


LINK = r"\[`(\w+)`\]\((\w+)\.py(?:#L\d+)?\)"


def linked(text):
    """The README with every [`name`](file.py#L1) at the line where the function or class begins."""
    def link(match):
        name, module = match.groups()
        lines = (ROOT / f"{module}.py").read_text(encoding="utf-8").splitlines()
        line, = [i for i, line in enumerate(lines, 1) if re.match(rf"(def|class) {name}\b", line)]
        return f"[`{name}`]({module}.py#L{line})"
    return re.sub(LINK, link, text)


def test_every_link_to_a_function_goes_to_its_line():
    assert linked(README) == README and len(re.findall(LINK, README)) >= 20
    for name, module in re.findall(LINK, README):
        assert callable(getattr(importlib.import_module(module), name))


def test_the_readme_has_as_many_exercises_as_answers():
    import test_exercises
    numbers = [name.split("_")[2] for name in dir(test_exercises) if name.startswith("test_exercise_")]
    asked = re.findall(r"^(\d+)\. \*", README.split("## Exercises")[1], re.M)
    assert sorted(map(int, numbers)) == list(map(int, asked)) == list(range(1, 11))


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


def rows_of(name):
    return json.loads((RESULTS / name).read_text())["rows"]


def undone_table(rows):
    """The README's table of what theta can undo, from bilevel_temperature.json."""
    return "\n".join(["| entropy of, and alpha | mu | size of F_a | size of dF/dalpha |", "|---|---|---|---|",
                      *(f"| {r['method']} | {r['setting'].removeprefix('mu = ')} | {r['ignored']:.3f} | {r['hypergradient']:.3f} |" for r in rows)])


def values(rows, method, domain, key):
    return [r[key] for r in rows if (r["method"], r["domain"]) == (method, domain)]


def mean(*where):
    found = values(*where)
    return sum(found) / len(found)


def picture(rows):
    """The README's sentence on the picture, from toy.json."""
    said, right, error = ({m: mean(rows, m, "ood", key) for m in ("aligned", "calm-persistent")} for key in ("confidence", "accuracy", "conf_ece"))
    a, c = "aligned", "calm-persistent"
    return f"""answers in a domain that the training did not see: the aligned model says {said[a]:.2f} on average and is right {right[a]:.2f}
of the time. Calibrated in training on *another* domain, it says {said[c]:.2f} and is right {right[c]:.2f} of the time: the error halves, from
{error[a]:.3f} to {error[c]:.3f}, and is not gone."""


def temperatures(rows):
    """The README's sentence on the temperatures that five worlds want, from toy_all.json."""
    ours, best = (values(rows, method, "ood", "temperature") for method in ("ts", "ts-oracle"))
    return (f"in five worlds the T that A's validation questions want lies between {min(ours):.2f} and {max(ours):.2f}, the T that B's test questions want between {min(best):.2f} and {max(best):.2f}.")


def not_holding(rows):
    """The README's list of what does not hold, from toy_all.json."""
    ece = lambda method, domain="ood": mean(rows, method, domain, "conf_ece")
    lost = lambda method, domain: 100 * (mean(rows, "aligned", domain, "accuracy") - mean(rows, method, domain, "accuracy"))
    p = values(rows, "calm-persistent", "ood", "conf_ece")
    return f"""- *The published form gains nothing here.* `calm` leaves B's error at {ece('calm'):.3f} (aligned: {ece('aligned'):.3f}) and loses {lost('calm', 'ood'):.1f} points of
  accuracy there and {lost('calm', 'id'):.1f} in A. `calm-scalar` repairs B ({ece('calm-scalar'):.3f}) for {lost('calm-scalar', 'ood'):.1f} and {lost('calm-scalar', 'id'):.1f} points.
- *A pays for B.* Every method that raises entropy makes the calibrated domain underconfident: A goes from {ece('aligned', 'id'):.3f} to {ece('calm-persistent', 'id'):.3f}
  with `calm-persistent` and to {ece('calm-exact', 'id'):.3f} with `calm-exact`.
- *Worlds differ.* `calm-persistent` leaves B between {min(p):.3f} and {max(p):.3f}.
- *A hand does nearly as well*: a fixed temperature, `ft-hot`, with no upper level, takes B to {ece('ft-hot'):.3f} (`calm-exact`: {ece('calm-exact'):.3f})."""


def test_what_the_readme_says_in_numbers_is_a_committed_result():
    for said in (picture(rows_of("toy.json")), temperatures(rows_of("toy_all.json")), not_holding(rows_of("toy_all.json"))):
        assert " ".join(said.split()) in " ".join(README.split())


CHOICE = [("accuracy", "accuracy"), ("conf-ECE", "conf_ece")]
BOTH = [(name, domain, *column) for name, domain in (("A", "id"), ("B", "ood")) for column in CHOICE]
FURTHER = [("B", "ood", "NLL", "nll"), ("B", "ood", "AUROC", "auroc")]
CHECKED = [("", "ood", "log_scale", "log_scale"), ("", "ood", "cosine", "cosine"), ("", "ood", "relative error", "relative_error"),
           ("", "ood", "CG residual", "cg_residual")]
OPEN = [("accuracy", "accuracy"), ("confidence", "confidence"), ("Sem-ECE", "sem_ece"), ("Sem-ECE split", "sem_ece_split")]
REAL = [(name, name if name == "exams" else "id", *column) for name in ("trivia", "exams") for column in (*CHOICE, ("NLL", "nll"), ("AUROC", "auroc"))]
TABLES = {                                                 # marker in the README -> file of rows, columns, rivals
    "ALL": ("toy_all.json", BOTH + FURTHER, ("aligned", "ts")),
    "ABL": ("toy_ablations.json", BOTH + FURTHER[:1], ("aligned",)),
    "EXACT": ("toy_exact.json", BOTH + CHECKED, ()),
    "GAIN": ("toy_gain.json", BOTH + CHECKED, ()),
    "OPEN A": ("toy_open_a.json", [(name, domain, *c) for name, domain in (("A", "id"), ("B", "ood")) for c in OPEN], ("aligned",)),
    "OPEN B": ("toy_open_b.json", [(name, domain, *c) for name, domain in (("B", "id"), ("A", "ood")) for c in OPEN], ("aligned",)),
    "REAL": ("topics.json", REAL, ("aligned", "ts")),
}


def side_by_side(rows, columns, rivals):
    """Markdown: a row a method, mean +- standard deviation over worlds or splits; the last columns say in how many of them its
    error out of domain is below that of a rival."""
    error = next(column for column in reversed(columns) if column[3] in ("conf_ece", "sem_ece"))
    n, = {row["n"] for row in rows}
    lines = [f"| method (n = {n:,}) | " + " | ".join([f"{name} {what}".strip() for name, _, what, _ in columns] + [f"< {rival}" for rival in rivals]) + " |",
             "|---" * (1 + len(columns) + len(rivals)) + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for _, domain, _, key in columns:
            here = [row[key] for row in rows if (row["method"], row["domain"]) == (method, domain) and key in row]
            cells.append(f"{statistics.mean(here):.3f} ± {statistics.stdev(here):.3f}" if here else "-")
        of = lambda name: {row["seed"]: row[error[3]] for row in rows if (row["method"], row["domain"]) == (name, error[1])}
        for rival in rivals:
            wins = sum(value < of(rival)[seed] for seed, value in of(method).items())
            cells.append("-" if method == rival else f"{wins} of {len(of(method))}")
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


SHARED = (0, 2, 8, 16)                                     # value tokens that both domains have


def shared_table():
    """Markdown: a row a method, a column a number of shared tokens: B's conf-ECE, and A's in brackets."""
    worlds = [rows_of(f"toy_shared_{shared}.json") for shared in SHARED]
    n, = {row["n"] for rows in worlds for row in rows}
    lines = [f"| B's conf-ECE, in brackets A's (n = {n:,}) | " + " | ".join(f"{shared} shared" for shared in SHARED) + " |", "|---" * 5 + "|"]
    for method in dict.fromkeys(row["method"] for row in worlds[0]):
        cells = [(values(rows, method, "ood", "conf_ece"), values(rows, method, "id", "conf_ece")) for rows in worlds]
        lines.append(f"| `{method}` | " + " | ".join(f"{statistics.mean(b):.3f} ± {statistics.stdev(b):.3f} ({statistics.mean(a):.3f})"
                                                     for b, a in cells) + " |")
    return "\n".join(lines)


def entropy_table(rows):
    """Markdown: where the entropy goes, means over worlds, from toy_entropy.json."""
    columns = ["entropy A", "entropy B", "values A", "values B", "log_scale A only", "log_scale B only", "log_scale no value"]
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        here = [[row[column] for row in rows if row["method"] == method and column in row] for column in columns]
        lines.append(f"| `{method}` | " + " | ".join(f"{statistics.mean(numbers):.2f}" if numbers else "-" for numbers in here) + " |")
    return "\n".join(lines)


def with_tables(text):
    """The README with a table made from its committed rows after every marker: `python tests/test_readme.py` writes them."""
    import train
    tables = {name: side_by_side(rows_of(file), columns, rivals) for name, (file, columns, rivals) in TABLES.items()}
    tables["TOY"] = f"```\n{train.table(rows_of('toy.json')).strip()}\n```"                # what the first command prints
    llm, printed = json.loads((RESULTS / "bilevel_llm.json").read_text()), io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_table("", "", llm["problem"]["llm"], llm["rows"], ["relative_error", "cosine", "gradients", "seconds"])
    tables["LLM"] = f"```\n{printed.getvalue().strip()}\n```"
    tables |= {"SHARED": shared_table(), "ENTROPY": entropy_table(rows_of("toy_entropy.json")),
               "UNDONE": undone_table(rows_of("bilevel_temperature.json"))}
    for name, table in tables.items():
        text, found = re.subn(rf"<!--{name}-->\n(```\n.*?```|(\|.*\n)*\|.*)", lambda _: f"<!--{name}-->\n{table}", text, flags=re.S if table.startswith("```") else 0)
        assert found == 1, f"the README has {found} markers <!--{name}-->"
    return text


def test_every_table_of_the_experiments_is_made_from_the_committed_results():
    assert with_tables(README) == README


PROSE = {                                                  # how a paragraph begins -> the files its numbers come from
    "What this shows.": ["toy_all.json", "toy_borrowed.json"], "One alpha in all against": ["toy_ablations.json"],
    "Here `calm-exact` is what": ["toy_exact.json"], "Two cautions. With": ["toy_gain.json"], "**The finding, in three": ["toy_exact.json", "toy_gain.json"],
    "Sampling is harder": ["toy_open_a.json", "toy_open_b.json"], "The downloaded model": ["topics.json"],
    "All methods raise the entropy": ["toy_entropy.json"],
    "With all tokens shared the": ["toy_shared_0.json", "toy_shared_2.json", "toy_shared_8.json", "toy_shared_16.json"],
}


def known(rows):
    """The numbers that a paragraph may say of rows: means, least and largest values over seeds, in themselves and beside `aligned`."""
    found, by = set(), {}
    for row in rows:
        by.setdefault((row["method"], row.get("domain"), row.get("trained_on")), {})[row["seed"]] = row
    for (_, *where), here in by.items():
        rivals = by.get(("aligned", *where), {})
        for key in ("accuracy", "conf_ece", "nll", "auroc", "confidence", "sem_ece", "temperature", "cosine", "relative_error",
                    "cg_residual", "entropy A", "entropy B"):
            its = [row[key] for row in here.values() if key in row]
            ratios = [row[key] / rivals[seed][key] for seed, row in here.items() if key in row and key in rivals.get(seed, {})]
            for numbers in (its, ratios):
                if numbers:
                    found |= {min(numbers), max(numbers), statistics.mean(numbers)}
    return found


@pytest.mark.parametrize("beginning", PROSE)
def test_every_number_of_a_paragraph_is_in_the_committed_results(beginning):
    text = README[README.index(beginning):]
    assert README.count(beginning) == 1
    text = re.split(r"\n(?:#|<!--|!\[|\*\*(?!The finding)|Then as|Two cautions)", text)[0]
    truth = set().union(*(known(rows_of(file)) for file in PROSE[beginning]))
    numbers = re.findall(r"(?<![\w.])\d+\.\d\d+", text)
    assert numbers
    for number in numbers:
        digits = len(number.split(".")[1])
        assert any(f"{value:.{digits}f}" == number for value in truth), number


def test_the_settings_of_the_methods_are_those_that_were_chosen():
    import train
    chosen = json.loads((RESULTS / "selection.json").read_text())["chosen"]
    assert train.CHOSEN == chosen


def test_the_settings_of_the_real_model_are_those_that_were_chosen():
    chosen = json.loads((RESULTS / "topics_selection.json").read_text())["chosen"]
    command = json.loads((RESULTS / "topics.json").read_text())["command"] + " --eta 3"      # as it is when not given
    for name, flags in chosen.items():
        for flag, value in re.findall(r"--(\S+) (\S+)", flags):
            assert re.search(rf"[,/ ]{name}/{flag}={value}|--{flag} {value}", command), (name, flag)


def test_every_flip_of_the_mathematics_was_caught():
    from mutations import FLIPS
    flips = json.loads((RESULTS / "mutations.json").read_text())["flips"]
    assert [flip["flip"] for flip in flips] == [flip[0] for flip in FLIPS] and all(flip["caught_by"] for flip in flips)
    assert f"{len(flips)} times" in README


def test_pictures_of_the_readme_are_there():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).read_bytes()[:4] == b"\x89PNG"


def costs(result):
    """The README's paragraph on what things cost, from benchmark.json."""
    t, m, r = result["time"], result["memory"], result["ratio"]
    return f"""**Costs**, in units of one gradient of L (`python tests/benchmark.py`, 2 million parameters, one thread):
Hessian-vector product {t['hvp, graph kept']:.2f} with the graph kept, CG-10 {t['CG-10']:.1f}, BOME {t['BOME T = 1']:.2f} / {t['BOME T = 3']:.2f} /
{t['BOME T = 10']:.2f} at T = 1 / 3 / 10 and {t['BOME persistent']:.2f} persistent; memory of CG {m['CG-10']:.2f} whatever the number of products,
of BOME {m['BOME T = 10']:.2f} whatever T. On SmolLM2-135M (`--model DIR`; float32, one thread, 8 x 64 tokens): a forward pass takes
{r['forward / transformers']:.2f} of the time of transformers, a LoRA step {r['LoRA step / peft']:.2f} of that of peft, and ten sampled answers of 16
tokens are {r['transformers.generate / ten answers of 16 tokens']:.2f} times as fast as `transformers.generate`. Scoring options takes
{r['letters / lm_eval']:.2f} (letters) and {r['texts / lm_eval']:.2f} (texts) of the time of lm-evaluation-harness. A step of `calm` takes
{r['calm T = 1 / reg']:.2f} / {r['calm T = 3 / reg']:.2f} times one of `reg` at T = 1 / 3 - counting gradients, (T + 1.4) / 2 - and {r['memory, calm / ft']:.2f} times the
memory of plain fine-tuning (`calm-persistent` {r['memory, calm-persistent / ft']:.2f}); with `--micro-batch 1`, `ft` needs
{100 * r['memory, ft --micro-batch 1 / ft']:.0f} % of its memory. At 128,000 items of vocabulary and 2,048 tokens the losses in chunks
need {100 * r['memory, L in chunks / plain']:.1f} % (L) and {100 * r['memory, F in chunks / plain']:.1f} % (F) of the plain form's extra memory."""


def test_the_costs_are_the_committed_result():
    assert " ".join(costs(json.loads((RESULTS / "benchmark.json").read_text())).split()) in " ".join(README.split())


if __name__ == "__main__":                                 # after new results or code: tables, links and costs again
    paragraph = textwrap.fill(" ".join(costs(json.loads((RESULTS / "benchmark.json").read_text())).split()), 112,
                              break_long_words=False, break_on_hyphens=False)
    text = re.sub(r"\*\*Costs\*\*.*?(?=\n\n)", lambda _: paragraph, linked(with_tables(README)), flags=re.S)
    (ROOT / "README.md").write_text(text, encoding="utf-8")
