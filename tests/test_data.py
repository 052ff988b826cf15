"""data.py: the toy world's promises, question files, prompts and tokens."""
import gzip
import json

import pytest
import torch

from data import IGNORE, Prompter, World, collate, load_mcqa, supervise


@pytest.fixture(scope="module")
def world():
    return World(seed=3)


def test_world_distributions_and_pools(world):
    top, half = world.p.max(-1).values, world.relations // 2
    torch.testing.assert_close(world.p.sum(-1), torch.ones(world.subjects, world.relations))
    assert top[:, :half].min() >= 0.7 and top[:, :half].max() <= 0.95
    assert top[:, half:].min() >= 0.3 and top[:, half:].max() <= 0.7
    a, b = world.tokens_of[:half].any(0), world.tokens_of[half:].any(0)
    assert a.sum() == 16 and b.sum() == 16 and (a & b).sum() == 8
    assert (world.tokens_of.sum(1) == 12).all()
    assert torch.equal(World(seed=3).p, world.p) and not torch.equal(World(seed=4).p, world.p)


def test_world_splits_are_disjoint_and_complete(world):
    parts = torch.cat([world.split[s] for s in ("train", "heldout", "test")])
    assert torch.equal(parts.sort().values, torch.arange(world.subjects))


def test_world_samples_follow_the_distributions(world):
    g = torch.Generator().manual_seed(0)
    ids = world.statements(20_000, "B", "test", g)
    s, r = ids[:, 1] - 2, ids[:, 2] - 2 - world.subjects
    assert set(r.tolist()) == set(world.domain["B"].tolist()) and set(s.tolist()) == set(world.split["test"].tolist())
    top = world.p[s, r].max(-1)
    hit = (top.indices == ids[:, 4]).float().mean()
    assert hit == pytest.approx(top.values.mean().item(), abs=4 * (0.25 / 20_000) ** 0.5)


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


def test_case_19_bom_crlf_and_gzip_read_like_their_plain_twin(tmp_path):
    text = json.dumps(ROW, ensure_ascii=False) + "\n" + json.dumps(ROW) + "\n"
    (tmp_path / "plain").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8"))
    (tmp_path / "crlf").write_bytes(text.replace("\n", "\r\n").encode("utf-8"))
    (tmp_path / "zip").write_bytes(gzip.compress(text.encode("utf-8")))
    assert load_mcqa(tmp_path / "plain") == [ROW, ROW]
    assert all(load_mcqa(tmp_path / name) == [ROW, ROW] for name in ("bom", "crlf", "zip"))


@pytest.mark.parametrize("line, complaint", [
    ("{", "not a JSON object"), ("[1]", "not a JSON object"), ('{"choices": ["a", "b"], "answer": 0}', "no question"),
    ('{"question": "q", "choices": ["a"], "answer": 0}', "2 to 26 options, this one has 1"),
    ('{"question": "q", "choices": "ab", "answer": 0}', "not a list of strings"),
    ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "'answer' 2 is not the index"),
    ('{"question": "q", "choices": ["a", "b"], "answer": true}', "not the index"),
    ('{"question": "q", "choices": ["a", "b"]}', "not the index")])
def test_a_malformed_line_is_an_error_with_file_and_line(tmp_path, line, complaint):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(ROW) + "\n\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"bad.jsonl, line 3: .*{complaint}"):
        load_mcqa(file)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "torn.gz").write_bytes(gzip.compress(json.dumps(ROW).encode() * 50)[:-20])
    for name, complaint in (("empty", "holds no question"), ("binary", "not readable"), ("torn.gz", "not readable")):
        with pytest.raises(ValueError, match=f"{name}: {complaint}"):
            load_mcqa(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing: no such file"):
        load_mcqa(tmp_path / "missing")


def test_real_files(questions):
    assert len(load_mcqa(questions("mmlu"))) == 14042
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
