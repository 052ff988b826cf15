"""data.py: the toy world's promises, question files, prompts and tokens."""
import functools
import gzip
import json
import sys
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import data
from data import (IGNORE, Asked, Prompter, Question, World, check_disjoint, collate, kind_of, load_instructions, load_mcqa, load_qa,
                  question_key, sample, stream, supervise, within_context)


@pytest.fixture(scope="module")
def world():
    return World(seed=3)


def test_world_distributions_and_pools(world):
    top, half = world.p.max(-1).values, world.relations // 2
    torch.testing.assert_close(world.p.sum(-1), torch.ones(world.subjects, world.relations))
    assert top[:, :half].min() >= 0.7 and top[:, :half].max() <= 0.95
    assert top[:, half:].min() >= 0.3 and top[:, half:].max() <= 0.7
    a, b = world.tokens_of[:half].any(0), world.tokens_of[half:].any(0)
    assert a.sum() == 16 and b.sum() == 16 and (a & b).sum() == 2
    assert (world.tokens_of.sum(1) == 12).all()
    assert torch.equal(World(seed=3).p, world.p) and not torch.equal(World(seed=4).p, world.p)


@pytest.mark.parametrize("shared", [0, 8, 16])
def test_the_two_domains_share_as_many_value_tokens_as_asked(shared):
    world = World(seed=3, shared=shared)
    a, b = (world.p[:, world.domain[name]].sum((0, 1)) > 0 for name in "AB")
    assert (a & b).sum() == shared and (a | b).sum() == 32 - shared


def test_world_splits_are_disjoint_and_complete(world):
    parts = torch.cat([world.split[s] for s in ("train", "heldout", "valid", "test")])
    assert torch.equal(parts.sort().values, torch.arange(world.subjects))


def test_world_samples_follow_the_distributions(world):
    g = torch.Generator().manual_seed(0)
    ids = world.statements(20_000, "B", "test", g)
    s, r = ids[:, 1] - 2, ids[:, 2] - 2 - world.subjects
    assert set(r.tolist()) == set(world.domain["B"].tolist()) and set(s.tolist()) == set(world.split["test"].tolist())
    top = world.p[s, r].max(-1)
    hit = (top.indices == ids[:, 4]).float().mean()
    assert hit == pytest.approx(top.values.mean().item(), abs=4 * (0.25 / 20_000) ** 0.5)


def test_every_name_is_said_and_means_its_value(world):
    """Sentences say a value by names of one to three tokens, END follows, and the targets are the answer alone."""
    g = torch.Generator().manual_seed(0)
    ids, targets = world.sentences(500, "A", "train", g)
    assert ids.shape == targets.shape == (500, 8) and (targets[:, :3] == IGNORE).all() and (targets[:, -1] == IGNORE).all()
    lengths = set()
    for row, said in zip(ids.tolist(), targets.tolist()):
        answer = [t for t in said if t != IGNORE]
        assert answer == row[4:4 + len(answer)] and answer[-1] == world.END
        assert world.meaning[tuple(answer[:-1])] == answer[0] and world.p[row[1] - 2, row[2] - 2 - world.subjects][answer[0]] > 0
        lengths.add(len(answer))
    assert lengths == {2, 3, 4}
    names = [tuple(t for t in name if t not in (IGNORE, world.END)) for v in set(world.meaning.values()) for name in world.names[v].tolist()]
    assert len(names) == len(set(names)) == len(world.meaning) == 3 * 30


def test_open_questions_are_asked_of_the_same_facts(world):
    questions = world.open_questions(400, "B", "test", torch.Generator().manual_seed(0))
    for q in questions:
        p = world.p[q.prompt[1] - 2, q.prompt[2] - 2 - world.subjects]
        assert len(q.options) == 30 and p[q.options[q.gold][0]] > 0


def test_preferences_always_choose_the_likelier_answer(world):
    ids, chosen, rejected = world.preferences(500, "B", torch.Generator().manual_seed(0))
    p = world.p[ids[:, 1] - 2, ids[:, 2] - 2 - world.subjects]
    assert (p.gather(1, chosen[:, None]) > p.gather(1, rejected[:, None])).all()


def test_the_world_itself_is_a_calibrated_answerer_of_its_questions(world):
    """P(key | options) is p restricted to the options: mean confidence equals accuracy."""
    questions = world.questions(8000, "B", "all", torch.Generator().manual_seed(0))
    confidence, correct = [], []
    for q in questions:
        p = world.p[q.prompt[1] - 2, q.prompt[2] - 2 - world.subjects][[o[0] for o in q.options]]
        assert len({o[0] for o in q.options}) == 4 and p[q.gold] > 0
        confidence.append((p.max() / p.sum()).item())
        correct.append(p.argmax().item() == q.gold)
    gap = sum(confidence) / len(questions) - sum(correct) / len(questions)
    assert abs(gap) < 4 * (0.25 / 8000) ** 0.5


def test_supervise_marks_the_answer_and_nothing_else():
    ids, targets = supervise([([5, 6], [7]), ([1, 2, 3], [4, 9])])
    assert ids.tolist() == [[5, 6, 7, 0, 0], [1, 2, 3, 4, 9]]
    I = IGNORE
    assert targets.tolist() == [[I, 7, I, I, I], [I, I, 4, 9, I]]
    assert collate([[1], [2, 3]])[1].tolist() == [[True, False], [True, True]]


# --- Question files ------------------------------------------------------------------------------

ROW = {"question": "Is it?", "choices": ["None", "no", "é"], "answer": 0, "subject": "s"}
dumps = functools.partial(json.dumps, ensure_ascii=False)


@pytest.fixture
def write(tmp_path):
    """Function: contents -> a file that holds them. Its name never says what is in it."""
    def write(contents, name="file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode("utf-8"))
        return tmp_path / name
    return write


def mcqa(choices, answer, question="Is it?", subject=""):
    return {"question": question, "choices": choices, "answer": answer, "subject": subject}


# One sample a format, of the published shape: contents, rows.
ARC = ({"id": "Mercury_7", "question": {"stem": "Is it?", "choices": [{"text": "no", "label": "A"}, {"text": "yes", "label": "B"},
        {"text": "so", "label": "C"}]}, "answerKey": "B"}, mcqa(["no", "yes", "so"], 1))
FLAT = ({"id": "7", "question": "Is it?", "choices": {"text": ["no", "yes", "so", "None"], "label": ["1", "2", "3", "4"]},
         "answerKey": "2"}, mcqa(["no", "yes", "so", "None"], 1))
OBQA = ({"id": "7-1", "question": {"stem": "The sun is", "choices": [{"text": "a star", "label": "A"}, {"text": "cold", "label": "B"}]},
         "fact1": "f", "humanScore": "1.00", "answerKey": "A"}, mcqa(["a star", "cold"], 0, "The sun is"))
OBQA_FLAT = ({"id": "7-1", "question_stem": "The sun is", "choices": {"text": ["a star", "cold"], "label": ["A", "B"]},
              "answerKey": "B"}, mcqa(["a star", "cold"], 1, "The sun is"))
MMLU = ({"question": "Is it?", "subject": "logic", "choices": ["a", "b", "a", "d"], "answer": 3}, mcqa(["a", "b", "a", "d"], 3, subject="logic"))
LETTER = ({"question": " Is it? ", "choices": ["no ", "yes"], "answer": "B"}, mcqa(["no", "yes"], 1))
LABEL = ({"question": "Is it?", "choices": {"text": ["no", "yes"], "label": ["x", "y"]}, "answer": "y", "subject": None}, mcqa(["no", "yes"], 1))
NUMBERS = ({"question": "Is it?", "choices": [{"text": "no", "label": 1}, {"text": "yes", "label": 2}], "answerKey": 2}, mcqa(["no", "yes"], 1))
ALL = [ARC, FLAT, OBQA, OBQA_FLAT, MMLU, LETTER, LABEL, NUMBERS]


@pytest.mark.parametrize("record, row", ALL)
def test_json_formats(write, record, row):
    assert load_mcqa(write(dumps(record) + "\n")) == [row]


def test_a_json_array_in_any_layout_and_mixed_records(write):
    rows = [row for _, row in ALL]
    for indent in (None, 1):
        assert load_mcqa(write(dumps([record for record, _ in ALL], indent=indent))) == rows
    assert load_mcqa(write("\n".join(dumps(record) for record, _ in ALL))) == rows


def test_mmlu_csv(write):
    text = ('"Is it, or\nis it not?",no,"yes, it ""is""",None,4,B\nTwo,a,b,c,d,D\n\nThree,a,b,A\n'
            + "Many," + ",".join(map(str, range(26))) + ",Z\n")
    rows = load_mcqa(write(text))
    assert rows[0] == mcqa(["no", 'yes, it "is"', "None", "4"], 1, "Is it, or\nis it not?")
    assert [r["answer"] for r in rows] == [1, 3, 0, 25] and [len(r["choices"]) for r in rows] == [4, 4, 2, 26]
    assert load_mcqa(write("[x] and {y}?,a,b,c,d,C\n")) == [mcqa(["a", "b", "c", "d"], 2, "[x] and {y}?")]
    assert load_mcqa(write('{"x"} is?,a,b,c,d,C\n'))[0]["question"] == '{"x"} is?'
    with pytest.raises(ValueError, match="line 4: the gold key 'E' matches none of the options labelled A, B, C, D"):
        load_mcqa(write('"a\nb",1,2,3,4,A\n\nq,1,2,3,4,E\n'))


def test_medmcqa_counts_from_one_unless_a_zero_occurs(write):
    def answers(cops):
        file = write("\n".join(dumps({"id": "x", "question": "Is it?", "opa": "a", "opb": "b", "opc": "None", "opd": "d", "cop": cop,
                                      "choice_type": "single", "exp": None, "subject_name": "Anatomy", "topic_name": None}) for cop in cops))
        rows = load_mcqa(file)
        assert all(r["choices"] == ["a", "b", "None", "d"] and r["subject"] == "Anatomy" for r in rows)
        return [r["answer"] for r in rows]
    assert answers([1, 4, "2", 3]) == [0, 3, 1, 2]         # the authors' files
    assert answers([3, 0, 1, 2]) == [3, 0, 1, 2]           # the Hugging Face export
    assert answers([1, 2]) == [0, 1]                       # nothing tells: as the authors publish it
    for cops, complaint in (([0, 4], "line 2: the gold key '4' matches none of the options labelled 0, 1, 2, 3"),
                            ([-1], "line 1: the gold key '-1' matches none"), ([1, None], "line 2"), ([1, True], "line 2")):
        with pytest.raises(ValueError, match=complaint):
            answers(cops)


def test_case_13_option_labels_keys_and_the_option_none(write):
    assert FLAT[1]["answer"] == 1 and FLAT[1]["choices"][3] == "None"      # labels "1".."4", key "2"
    assert load_mcqa(write(dumps(FLAT[0]))) == [FLAT[1]]
    for n in (2, 3, 26):
        row = {"question": "q", "choices": [f"o{i}" for i in range(n)], "answer": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[n - 1]}
        assert load_mcqa(write(dumps(row)))[0]["answer"] == n - 1
    for n in (1, 27):
        with pytest.raises(ValueError, match=f"line 1: a question needs 2 to 26 options, this one has {n}"):
            load_mcqa(write(dumps({"question": "q", "choices": ["o"] * n, "answer": 0})))
    for key in ("5", "B", "", None):
        with pytest.raises(ValueError, match="file, line 3: the gold key .* matches none of the options labelled 1, 2, 3, 4"):
            load_mcqa(write(dumps(FLAT[0]) + "\n\n" + dumps({**FLAT[0], "answerKey": key})))


def test_a_key_that_reads_both_ways_is_an_error(write):
    row = {"question": "q", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answer": 1}
    with pytest.raises(ValueError, match="line 1: the gold key 1 matches several of the options"):
        load_mcqa(write(dumps(row)))
    with pytest.raises(ValueError, match="line 1: the gold key 'A' matches several of the options"):
        load_mcqa(write(dumps({**row, "choices": {"text": ["a", "b"], "label": ["A", "A"]}, "answer": "A"})))


def test_case_19_bom_crlf_and_gzip_read_like_their_plain_twin(write):
    json_lines = dumps(ROW) + "\n" + json.dumps(ROW) + "\n"
    table = '"Is\nit, é?",None,no,A\nq,1,2,B\n'
    tsv = "id\tquestion\tpossible_answers\n1\tIs it?\t" + '"[""é"", ""e""]"\n'
    for load, text in ((load_mcqa, json_lines), (load_mcqa, dumps([ROW, ROW], indent=1)), (load_mcqa, table), (load_qa, tsv)):
        rows = load(write(text))
        assert len(rows) == (1 if load is load_qa else 2)
        raw = text.encode("utf-8")
        for twin in (b"\xef\xbb\xbf" + raw, text.replace("\n", "\r\n").encode("utf-8"), gzip.compress(raw),
                     gzip.compress(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode("utf-8"))):
            assert load(write(twin)) == rows
    assert load_mcqa(write(json_lines)) == [ROW, ROW]


@pytest.mark.parametrize("line, complaint", [
    ("{", "neither a JSON object"), ("[1]", "neither a JSON object"), ("null", "neither"), (dumps(ROW) + "}", "neither"),
    ('{"choices": ["a", "b"], "answer": 0}', "no question text"), ('{"question": " ", "choices": ["a", "b"], "answer": 0}', "no question text"),
    ('{"question": "q", "choices": "ab", "answer": 0}', "not a list of texts"),
    ('{"question": "q", "choices": ["a", 1], "answer": 0}', "no option text: 1"),
    ('{"question": "q", "choices": ["a", ""], "answer": 0}', "no option text: ''"),
    ('{"question": "q", "choices": ["a", null], "answer": 0}', "no option text: None"),
    ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "gold key 2 matches none"),
    ('{"question": "q", "choices": ["a", "b"], "answer": -1}', "gold key -1 matches none"),
    ('{"question": "q", "choices": ["a", "b"], "answer": true}', "gold key True matches none"),
    ('{"question": "q", "choices": ["a", "b"], "answer": "0"}', "gold key '0' matches none"),
    ('{"question": "q", "choices": ["a", "b"]}', "gold key None matches none"),
    ('{"question": "q", "choices": {"text": ["a", "b"], "label": ["A"]}, "answerKey": "A"}', "labels are"),
    ('{"question": "q \\ud800", "choices": ["a", "b"], "answer": 0}', "question is not UTF-8"),
    ('{"question": {"stem": 3}, "answerKey": "A"}', "no question text"),
    ("[" * 100_000, "neither")])
def test_a_malformed_line_is_an_error_with_file_and_line(write, capsys, line, complaint):
    file = write(dumps(ROW) + "\n\n" + line + "\n" + dumps(ROW), "bad.jsonl")
    with pytest.raises(ValueError, match=f"bad.jsonl, line 3: .*{complaint}"):
        load_mcqa(file)
    assert load_mcqa(file, skip_bad=True) == [ROW, ROW]
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "1 unreadable rows left out" in printed and "line 3: " in printed


def test_bytes_that_are_not_utf8_cost_their_line_only(write):
    file = write(dumps(ROW).encode("utf-8") + b"\n" + dumps(ROW).encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="line 2: the option is not UTF-8 text"):
        load_mcqa(file)
    assert load_mcqa(file, skip_bad=True) == [ROW]


def test_a_torn_array_keeps_what_comes_before_the_tear_and_says_where_it_is(write):
    whole = dumps([ROW, ROW], indent=1)
    lines_a_row = whole.count("\n") // 2
    for torn in (whole[:-20], whole[:-2], whole + "\n[1]", "[" + dumps(ROW) + "\n, null,\n" + dumps(ROW)):
        with pytest.raises(ValueError, match=r"file, line \d+: neither"):
            load_mcqa(write(torn))
    with pytest.raises(ValueError, match=f"line {lines_a_row + 2}: "):
        load_mcqa(write(whole[:-20]))
    assert load_mcqa(write(whole[:-20]), skip_bad=True) == [ROW]
    assert load_mcqa(write("[" + dumps(ROW) + "\n, null,\n" + dumps(ROW) + "]"), skip_bad=True) == [ROW, ROW]


def test_unreadable_files_are_named(write, tmp_path):
    torn = gzip.compress(json.dumps(ROW).encode() * 50)[:-20]
    for contents, complaint in (("\n", ": holds no"), ("", ": holds no"), ("[]", ": holds no"), (b"\xff\xfe\x00", ", line 1: "),
                                (torn, ": not readable as gzip"), (b"\x1f\x8b\x08\x00garbage", ": not readable as gzip")):
        with pytest.raises(ValueError, match=f"file{complaint}"):
            load_mcqa(write(contents))
    with pytest.raises(ValueError, match="holds no.*line 1: "):
        load_mcqa(write("{"), skip_bad=True)               # nothing is left: no empty list
    with pytest.raises(FileNotFoundError, match="missing: no such file"):
        load_mcqa(tmp_path / "missing")


def test_a_directory_is_its_files_in_order_with_their_names_as_subjects(write, tmp_path):
    write("q1,a,b,A\n", "d/b_test.csv")
    write(gzip.compress(dumps(ROW).encode("utf-8")), "d/a.jsonl.gz")
    write("not a question", "d/.hidden")
    (tmp_path / "d" / "folder").mkdir()
    assert load_mcqa(tmp_path / "d") == [ROW, mcqa(["a", "b"], 0, "q1", subject="b_test")]
    write(dumps({"question": "q", "answer": "x"}), "qa/capitals.json")
    assert load_qa(tmp_path / "qa") == [{"question": "q", "answers": ["x"], "subject": "capitals"}]
    write("{", "d/c.csv")
    with pytest.raises(ValueError, match="c.csv, line 1: "):
        load_mcqa(tmp_path / "d")
    for name in "hgfedcba":
        write(f"{name},1,2,A\n", f"many/{name}")
    assert "".join(r["question"] for r in load_mcqa(tmp_path / "many")) == "abcdefgh"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: holds no"):
        load_mcqa(tmp_path / "empty")


def test_popqa(write):
    header = "id\tsubj\tprop\tobj\tquestion\tpossible_answers\n"
    quoted = header + '7\tGeorge Rankin\toccupation\tpolitician\tWhat is George Rankin\'s occupation?\t"[""politician"", ""pol\\u00edtico""]"\n'
    row = {"question": "What is George Rankin's occupation?", "answers": ["politician", "político"], "subject": "occupation"}
    assert load_qa(write(quoted)) == [row]
    assert load_qa(write(quoted.replace('"[', "[").replace(']"', "]").replace('""', '"'))) == [row]
    record = {"id": 7, "prop": "occupation", "question": row["question"], "possible_answers": '["politician", "político"]'}
    assert load_qa(write(dumps(record))) == [row]          # the Hugging Face export
    for cells, complaint in (("7\ts\tp\to\tq\tpolitician\n", "no answer"), ("7\ts\tp\n", "neither"), ("7\ts\tp\to\tq\t[]\n", "no answer"),
                             ("7\ts\tp\to\tq\t[1]\n", "no answer text: 1")):
        with pytest.raises(ValueError, match=f"file, line 3: .*{complaint}"):
            load_qa(write(quoted + cells))


def test_triviaqa(write):
    answer = {"Aliases": ["Sunset Bd", "Sunset Blvd"], "MatchedWikiEntityName": "", "NormalizedAliases": ["sunset blvd"],
              "NormalizedValue": "sunset boulevard", "Type": "WikipediaEntity", "Value": "Sunset Boulevard"}
    doc = {"Data": [{"Answer": answer, "EntityPages": [], "Question": "Which musical?", "QuestionId": "tc_2", "QuestionSource": "x"}] * 2,
           "Domain": "Web", "VerifiedEval": False, "Version": 1.0}
    row = {"question": "Which musical?", "answers": ["Sunset Boulevard", "Sunset Bd", "Sunset Blvd", "sunset blvd"], "subject": ""}
    for indent in (None, 4):
        assert load_qa(write(dumps(doc, indent=indent))) == [row, row]
        assert load_qa(write(dumps(dict(sorted(doc.items(), reverse=True)), indent=indent))) == [row, row]
    flat = {"question": "Which musical?", "question_id": "tc_2", "answer": {"aliases": answer["Aliases"], "value": "Sunset Boulevard",
            "normalized_aliases": ["sunset blvd"], "normalized_value": "x", "type": "y"}}
    assert load_qa(write(dumps(flat))) == [row]
    doc["Data"][1] = {"Question": "Unanswered?"}           # the test files have no Answer
    with pytest.raises(ValueError, match=r"file, line \d+: no answer"):
        load_qa(write(dumps(doc, indent=4)))
    assert load_qa(write(dumps(doc)), skip_bad=True) == [row]


def test_plain_questions_and_answers(write):
    lines = [{"question": "q", "answer": "x", "subject": "s"}, {"question": "q", "answers": ["x", "y", "x"]}, {"question": "q", "answer": ["x"]}]
    assert [(r["answers"], r["subject"]) for r in load_qa(write("\n".join(map(dumps, lines))))] == [(["x"], "s"), (["x", "y"], ""), (["x"], "")]


def test_case_17_answers_stay_as_spelt_and_empty_ones_never_count(write):
    nfd, nfc = "Montre\u0301al", "Montréal"
    lines = [{"question": "q", "answers": ["A", "", " ", None]}, {"question": "q", "answers": [nfd, nfc]}]
    assert [r["answers"] for r in load_qa(write("\n".join(map(dumps, lines))))] == [["A"], [nfd, nfc]]
    for answer in ("", [], [""], None, {}, 10, [10], {"value": None}):
        with pytest.raises(ValueError, match="line 1: no answer"):
            load_qa(write(dumps({"question": "q", "answer": answer})))


def test_instructions(write):
    rows = [{"instruction": "Add.", "input": "1 and 2", "output": "3"}, {"instruction": "Say hi.", "input": "", "output": "hi"}]
    expected = [{"prompt": "Add.\n\n1 and 2", "answer": "3"}, {"prompt": "Say hi.", "answer": "hi"}]
    assert load_instructions(write(dumps(rows, indent=4))) == expected
    assert load_instructions(write("\n".join(map(dumps, rows + expected)))) == expected * 2
    silent = write(dumps([*rows, {"instruction": "Be silent.", "input": "", "output": ""}]))
    with pytest.raises(ValueError, match="file, line 1: no output text"):
        load_instructions(silent)
    assert load_instructions(silent, skip_bad=True) == expected


def test_the_kind_of_a_file_is_told_by_its_first_record(write, tmp_path):
    for record, _ in ALL:
        assert kind_of(write(dumps(record))) == kind_of(write(dumps([record]))) == "mcqa"
    assert kind_of(write("q,a,b,A\n")) == kind_of(write("")) == kind_of(write("not a row")) == "mcqa"
    assert kind_of(write(dumps({"question": "q", "opa": "a", "cop": 1}))) == "mcqa"
    assert kind_of(write("id\tquestion\tpossible_answers\n1\tq\t[]\n")) == "qa"
    for record in ({"question": "q", "answer": "x"}, {"question": "q", "answers": []}, {"Question": "q", "Answer": {"Value": "v"}}):
        assert kind_of(write("{\n" + dumps(record) if record.get("answer") else dumps(record))) == "qa"       # after a torn line, too
    assert kind_of(write(dumps({"Data": [{"Question": "q", "Answer": {"Value": "v"}}]}))) == "qa"
    for record in ({"instruction": "i", "input": "", "output": "o"}, {"prompt": "p", "answer": "a"}):
        assert kind_of(write(gzip.compress(dumps([record]).encode("utf-8")))) == "instructions"
    write("", "d/a.csv")
    write(dumps({"question": "q", "answer": "x"}), "d/b.json")
    assert kind_of(tmp_path / "d") == "qa"


# --- Files of any size ---------------------------------------------------------------------------

@pytest.mark.parametrize("block", [5, 17, 64, 2 ** 16])
def test_an_array_read_in_blocks_is_the_array(write, monkeypatch, block):
    """Values and line numbers, wherever a block may end: in a string, an escape, a number, a gap."""
    monkeypatch.setattr(data, "BLOCK", block)
    values = [{"a": 'x"\\\n\u00e9' * n, "b": [n, -12.5e3, None, True]} for n in range(8)] + [12345678901, 1.25, "]", "", [], {}]
    for indent in (None, 2):
        text = dumps(values, indent=indent)
        with data.opened(write(text)) as f:
            found = list(data.json_array(f, 1))
        assert [value for _, value in found] == values
        lines = text.splitlines()
        assert indent is None or all(value in ([], {}) or lines[n - 1].strip()[:1] in '{"[1' for n, value in found)
        with data.opened(write(text[:-3])) as f:
            assert list(data.json_array(f, 1))[-1][1] is None


def test_a_file_is_read_in_memory_that_does_not_grow_with_it(write):
    """In every format, plain and gzipped: Python's own count of what is allocated at the peak."""
    def text(kind, n):
        rows = [{"question": f"Question {i}, which is of an ordinary length, is it not?", "choices": [f"option {j} of {i}" for j in "abcd"], "answer": 1}
                for i in range(n)]
        if kind == "csv":
            return "".join(f"\"{r['question']}\",{','.join(r['choices'])},B\n" for r in rows)
        if kind == "tsv":
            return "id\tquestion\tpossible_answers\n" + "".join(f"{i}\t{r['question']}\t{dumps(r['choices'])}\n" for i, r in enumerate(rows))
        return dumps(rows) if kind == "array" else "\n".join(map(dumps, rows))
    for kind in ("lines", "array", "csv", "tsv"):
        peaks = []
        for n in (500, 4000):
            raw = text(kind, n).encode("utf-8")
            file = write(gzip.compress(raw) if kind == "lines" else raw)
            tracemalloc.start()
            try:
                assert sum(1 for _ in stream(file, kind_of(file))) == n
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        assert peaks[1] < peaks[0] + 2 ** 18, (kind, peaks)                # the files differ by twice that, their rows by much more


def test_a_sample_is_every_row_as_often_and_the_whole_file_if_it_is_short():
    g, counts = torch.Generator().manual_seed(0), torch.zeros(7, 3)
    for _ in range(7000):
        for place, row in enumerate(sample(iter(range(7)), 3, g)):
            counts[row, place] += 1
    assert (counts.sum(1) - 3000).abs().max() < 4 * (7000 * 3 / 7 * 4 / 7) ** 0.5            # each row, binomially
    assert (counts - 1000).abs().max() < 4 * (7000 / 7 * 6 / 7) ** 0.5     # in each place
    assert sorted(sample(range(5), 9, g)) == list(range(5))
    assert sample(range(100), 9, torch.Generator().manual_seed(1)) == sample(range(100), 9, torch.Generator().manual_seed(1))


def test_the_same_question_whatever_its_spelling_and_disjoint_rows():
    a, b, c = {"question": "Is  it\nso?"}, {"question": "is it SO?"}, {"prompt": "Café"}
    assert question_key(a) == question_key(b) and question_key(c) == question_key({"question": "cafe\u0301"})
    check_disjoint(training=[a, b], heldout=[c], evaluation=[])
    with pytest.raises(ValueError, match="the training and evaluation rows share the question 'is it so\\?'"):
        check_disjoint(training=[a], heldout=[c], evaluation=[b])


values = st.recursive(st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.sampled_from(["", " ", "A", "1", "é", "\ud800", '["x"]']),
                      lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "label", "stem", "choices", "value", "Aliases"]),
                                                                                  inner, max_size=4), max_leaves=8)
KEYS = ["question", "Question", "question_stem", "choices", "answer", "Answer", "answers", "answerKey", "subject", "subject_name", "prop", "opa", "opb",
        "opc", "opd", "cop", "possible_answers", "instruction", "input", "output", "prompt", "Data"]
torn = st.sampled_from([dumps([r for r, _ in ALL], indent=1), "\n".join(dumps(r) for r, _ in ALL), '"Is\nit?",a,"b, c",None,d,C\n' * 3,
                        "id\tquestion\tpossible_answers\n" + '1\tq\t"[""a""]"\n' * 2, dumps({"Data": [{"Question": "q", "Answer": {"Value": "v"}}] * 2})])
contents = st.one_of(
    st.binary(max_size=60), st.binary(max_size=40).map(lambda b: b"\x1f\x8b\x08" + b), st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace")),
    st.text('[]{}",:\t\n \\01Aquestion', max_size=60).map(str.encode),
    st.lists(st.dictionaries(st.sampled_from(KEYS), values, max_size=8) | values, max_size=3).map(lambda v: json.dumps(v).encode()),
    st.lists(st.dictionaries(st.sampled_from(KEYS), values, max_size=8) | values, max_size=3).map(lambda v: "\n".join(map(json.dumps, v)).encode()),
    st.tuples(torn, st.integers(0, 2000)).map(lambda p: p[0].encode("utf-8")[:p[1]]),
    st.tuples(torn, st.integers(1, 300)).map(lambda p: gzip.compress(p[0].encode("utf-8"))[:-p[1]]))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents, st.booleans())
def test_whatever_a_file_holds_it_is_rows_or_a_valueerror_that_names_it(tmp_path, contents, skip_bad):
    file = tmp_path / "fuzz"
    file.write_bytes(contents)
    for load, keys in ((load_mcqa, {"question", "choices", "answer", "subject"}), (load_qa, {"question", "answers", "subject"}),
                       (load_instructions, {"prompt", "answer"})):
        try:
            rows = load(file, skip_bad)
        except ValueError as error:
            assert "fuzz" in str(error) and type(error) is ValueError
            continue
        assert rows and all(set(row) == keys for row in rows)
        for row in rows:
            json.dumps(row, ensure_ascii=False).encode("utf-8")            # nothing in it that cannot be written or tokenised
            assert "choices" not in row or 0 <= row["answer"] < len(row["choices"]) <= 26 and all(row["choices"])
            assert "answers" not in row or row["answers"] and all(row["answers"])


def test_real_files(questions):
    mmlu = load_mcqa(questions("mmlu"))
    assert len(mmlu) == 14042 and len({r["subject"] for r in mmlu}) == 57
    assert sum(len(set(r["choices"])) < 4 for r in mmlu) == 9              # equal options are kept
    assert len(load_mcqa(questions("opentrivia"))) == 42473


# --- Prompts -------------------------------------------------------------------------------------

def test_case_14_letters_are_the_tokens_that_follow_the_real_prompt(smollm2):
    prompter = Prompter(smollm2)
    row = {"question": "Which is a colour?", "choices": ["Red", "Dog", "Oslo", "Four"], "answer": 0}
    q = prompter.question(row, "letter")
    assert prompter.form == "chat"
    assert q.options == [[49], [50], [51], [52]]                           # "A" without a space, as after the template
    text = prompter.tokenizer.decode(q.prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n") and "A. Red\nB. Dog" in text
    t = prompter.question(row, "text")
    assert [prompter.tokenizer.decode(o) for o in t.options] == row["choices"] and t.lengths == [3, 3, 4, 4]


def test_plain_prompts_without_a_chat_template(smollm2, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    prompter = Prompter(tmp_path)
    q = prompter.question(ROW, "letter")
    assert prompter.form == "plain"
    assert prompter.tokenizer.decode(q.prompt).endswith("\nAnswer:")
    assert q.options == [[330], [389], [340]]                              # " A", " B", " C": here a space comes before


def test_case_14_exactly_one_beginning_of_sequence_token(smollm2, tmp_path):
    """A tokenizer that puts <|im_start|> before every text, with and without a template that writes it too."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Prompter(tmp_path).question(ROW, "letter").prompt[:2].count(bos) == 1
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}\n"}), encoding="utf-8")
    assert Prompter(tmp_path).question(ROW, "letter").prompt.count(bos) == 1


def test_case_14_one_bos_whoever_asks_for_it(model_dir):
    bos = {"bos_token": "<s>"}
    with_bos, without = "{{ bos_token }}{{ messages[0].content }}\n", "{{ messages[0].content }}\n"
    for settings in ({**bos, "chat_template": with_bos}, {**bos, "chat_template": without}, bos, None, {**bos, "add_bos_token": True}):
        q = model_dir(settings).question(ROW, "text")
        assert q.prompt[0] == 0 and (q.prompt + q.options[0]).count(0) == 1 and 1 not in q.prompt + q.options[0]
    for settings in (bos, {**bos, "chat_template": without}):              # a tokenizer that only ends texts
        assert 0 not in model_dir(settings, bos=False).question(ROW, "text").prompt
    assert model_dir({**bos, "add_bos_token": True}, bos=False).question(ROW, "text").prompt.count(0) == 1
    assert model_dir({**bos, "add_bos_token": False}).question(ROW, "text").prompt.count(0) == 0


def test_case_14_letters_that_cannot_be_told_apart_are_named(model_dir):
    row = mcqa(["a", "b", "c", "d"], 0, "q")
    with pytest.raises(ValueError, match="tokenizer.json: the option letters A, B, C, D are not, after the prompt, one token each"):
        model_dir().question(row, "letter")                # " A" is two tokens
    chat = {"chat_template": "{{ messages[0].content }}\n"}
    assert len({o[0] for o in model_dir(chat).question(row, "letter").options}) == 4
    with pytest.raises(ValueError, match="the option letters B, D are not"):
        model_dir(chat, without="BD").question(row, "letter")              # both the unknown token
    model_dir(chat, without="D").question(row, "letter")   # alone it is still a token of its own


def test_case_15_prompts_are_never_cut_and_what_does_not_fit_is_counted(model_dir):
    prompter = model_dir()                                 # its tokenizer.json asks for five tokens, padded
    q = prompter.question(mcqa(["yes", "no"], 0, "x" * 500), "text")
    assert len(q.prompt) > 500 and prompter.tokenizer.decode(q.prompt).endswith("Answer:")
    small, large = Question([1] * 7, [[1], [1, 2]], 0), Question([1] * 8, [[1], [1, 2]], 0)
    assert within_context([small, large, small], 9) == ([small, small], 1)
    assert within_context([small, large], 10) == ([small, large], 0) and within_context([], 10) == ([], 0)


def test_the_prompts_are_those_of_transformers(smollm2, model_dir, tmp_path):
    """Ids of the real model's prompt, and texts of templates wherever a directory may keep them."""
    from transformers import AutoTokenizer
    text = "Question: Is it?\nA. None\nB. no\nC. é\nAnswer with the letter of the right option."
    def theirs(directory, **kw):
        return AutoTokenizer.from_pretrained(directory).apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False, **kw)
    assert Prompter(smollm2).question(ROW, "letter").prompt == theirs(smollm2)
    template = ("{%- for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}{{ bos_token + m['role'] + eos_token }}\n"
                "{{ m.content | trim }}{% if tools is none %}!{% endif %}{% endfor %}\n{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}\n\n")
    special = {"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}, "eos_token": "</s>", "pad_token": None,
               "tokenizer_class": "PreTrainedTokenizerFast"}
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    for settings, file in (({**special, "chat_template": template}, None), ({**special, "chat_template": named}, None),
                           ({**special, "chat_template": "not this"}, template)):
        prompter = model_dir(settings, file)
        assert prompter.form == "chat" and prompter.render(text, "") == theirs(tmp_path, tokenize=False)


def test_templates_get_their_functions_and_a_sandbox(model_dir):
    import datetime
    render = lambda template: model_dir({"chat_template": template}).render("hi", "")
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    for template, complaint in (("{{ raise_exception('only\nsystems') }}", r"fails on a prompt \(only systems\)"), ("{{ 1 / 0 }}", "division"),
                                ("{{ messages[0].role.nothing.at_all }}", "no attribute"), ("{{ messages.append(1) }}", "unsafe"),
                                ("{{ ''.__class__.__mro__ }}", "unsafe"), ("{% for %}", "not valid"), ("{{ 'x' ", "not valid"),
                                ("{{ '\ud800' }}", "surrogates")):
        with pytest.raises(ValueError, match=f"tokenizer_config.json: the chat template .*{complaint}") as error:
            render(template)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="chat_template.jinja: the chat template is not valid"):
        model_dir({"chat_template": "fine"}, "{% if %}")


@pytest.mark.parametrize("settings", ["{", "", "[]", "nothing", '{"a": 1} x', {"chat_template": 3}, {"chat_template": [{"name": "x", "template": "y"}, 1]},
                                      {"chat_template": [{"name": ["default"]}]}, {"chat_template": {}}])
def test_settings_that_are_not_settings_are_one_sentence(model_dir, settings):
    with pytest.raises(ValueError, match="tokenizer_config.json: ") as error:
        model_dir(settings)
    assert "\n" not in str(error.value)


def test_without_the_optional_packages(model_dir, monkeypatch, tmp_path):
    model_dir({"chat_template": "{{ messages[0].content }}"})
    for name in ("jinja2", "jinja2.sandbox"):
        monkeypatch.setitem(sys.modules, name, None)
    prompter = Prompter(tmp_path)
    assert prompter.form.startswith("plain (") and "jinja2" in prompter.form
    assert prompter.render("hi", "Answer:") == "hi\nAnswer:"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        Prompter(tmp_path)


def test_directories_without_a_readable_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json: no such file"):
        Prompter(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer"):
        Prompter(tmp_path)


def test_open_questions_end_with_the_turn_and_instructions_are_their_own_prompt(model_dir, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}', encoding="utf-8")
    prompter = model_dir({"bos_token": "<s>", "eos_token": "</s>"})
    assert prompter.stop_ids == (1, 2, 0)                  # the turn's end first
    text = lambda ids: prompter.tokenizer.decode(ids, skip_special_tokens=False)
    q = prompter.question({"question": "Is it?", "answers": ["yes", "so"]}, "open")
    assert text(q.prompt) == "<s>Question: Is it?\nAnswer in a few words.\nAnswer:" and [text(o) for o in q.options] == [" yes</s>"]
    assert q.answers == ["yes", "so"] and q.gold == 0
    q = prompter.question({**ROW, "answer": 1, "id": 7}, "open")           # without its options
    assert [text(o) for o in q.options] == [" no</s>"] and q.answers == ["no"] and (q.gold, q.id) == (0, 7)
    q = prompter.question({"prompt": "Add.\n\n1 and 2", "answer": "3"}, "open")
    assert text(q.prompt) == "<s>Add.\n\n1 and 2\nAnswer:" and text(q.options[0]) == " 3</s>"
    assert prompter.show(q).splitlines()[-1].endswith("[Ġ] [3] [</s>]")
    rows = [{"question": "short", "answers": ["a"]}, {"question": "long" * 50, "answers": ["a"]}]
    asked = Asked(rows, prompter, "open", 100)
    assert [q.answers for q in asked] == [q.answers for q in asked] == [["a"]]               # again and again


def test_show_has_the_text_the_tokens_and_the_scored_ones(smollm2):
    prompter = Prompter(smollm2)
    text = prompter.show(prompter.question(ROW, "letter"))
    assert "Question: Is it?\nA. None\nB. no\nC. é\n" in text and "<|im_start|>" in text and "Question : ĠIs Ġit ?" in text
    assert text.splitlines()[-3:] == ["* ... ass istant Ċ [A]", "  ... ass istant Ċ [B]", "  ... ass istant Ċ [C]"]
    texts = prompter.show(prompter.question({**ROW, "choices": ["a giraffe", "no"]}, "text")).splitlines()
    assert texts[-2].startswith("* ... ass istant Ċ [a] [Ġg")
