"""The toy world, the readers of published question files, prompts and batches.

`World` is where an aligned model's overconfidence can be watched from birth: every fact is a
*distribution* over answers, so a model trained on samples is calibrated, and a model aligned to
"prefer the likelier answer" is not. The rest is for a real model: published question files into
rows (plain dicts), rows into prompts, prompts into token ids and batches.
"""
import contextlib
import csv
import dataclasses
import datetime
import functools
import gzip
import io
import itertools
import json
import re
import sys
import unicodedata
import zlib
from pathlib import Path

import torch

IGNORE = -100                                              # a target that is not supervised


@dataclasses.dataclass
class Question:
    """A multiple-choice question in tokens; the toy's and a real model's are alike."""
    prompt: list                                           # token ids
    options: list                                          # one list of token ids an option
    gold: int                                              # index of the right option
    lengths: list = None                                   # characters of each option's text
    answers: list = None                                   # texts that are right, where the model answers in its own words
    id: int = None                                         # its row's place in the file


def within_context(questions, context):
    """The `Question`s whose prompt and longest option fit into `context` tokens, and how many others there are.
    To be skipped and counted: a prompt that is cut in the middle is another prompt."""
    fitting = [q for q in questions if len(q.prompt) + max(map(len, q.options)) <= context]
    return fitting, len(questions) - len(fitting)


def collate(sequences, pad=0):
    """Lists of token ids -> ids (B, T) padded on the right, and where they are real, (B, T) of booleans."""
    longest = max(map(len, sequences))
    ids = torch.tensor([s + [pad] * (longest - len(s)) for s in sequences])
    lengths = torch.tensor([len(s) for s in sequences])
    return ids, torch.arange(longest) < lengths[:, None]


def supervise(examples):
    """(prompt, answer) pairs of token ids -> ids (B, T) and targets (B, T): target t is the token
    that follows position t if it belongs to the answer, else IGNORE."""
    ids, real = collate([prompt + answer for prompt, answer in examples])
    targets = torch.where(real, ids, IGNORE).roll(-1, dims=1)
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in examples])
    targets[torch.arange(ids.shape[1]) < starts[:, None]] = IGNORE         # the prompt itself
    targets[:, -1] = IGNORE                                                # nothing follows the last token
    return ids, targets


# --- The toy world -------------------------------------------------------------------------------

class World:
    """Subjects x relations; each pair has a distribution over value tokens.

    Domain A, the first half of the relations, is fairly certain (its top value has probability
    0.7-0.95), domain B less so (0.3-0.7). Every relation uses `values` of its domain's `pool` of
    value tokens, and `shared` tokens belong to both pools: answers mean different things in the
    two domains, but are spelt with some of the same tokens. A value has `names` names of one, two, ...
    tokens: its own token and what may follow it ("Rome", "Rome in Italy"), which says nothing new.

    A sequence is [Q] subject relation [A] name [END]; `meaning` takes a name, a tuple of tokens, to its
    value. Subjects are split into "train" (labelled fine-tuning), "heldout" (inputs of the upper level), "valid"
    (temperature fit, choice of hyperparameters) and "test".
    """
    Q, A = 0, 1                                            # the two marker tokens

    def __init__(self, seed, subjects=360, relations=8, values=12, pool=16, shared=2, names=3):
        g = self.generator = torch.Generator().manual_seed(seed)
        self.subjects, self.relations = subjects, relations
        first_value = 2 + subjects + relations
        first_tail = first_value + 2 * pool - shared
        self.END = first_tail + 8                          # after 8 tokens that only continue names
        self.vocab_size = self.END + 1 if names > 1 else first_tail
        pools = {"A": torch.arange(pool) + first_value, "B": torch.arange(pool) + first_value + pool - shared}
        self.p = torch.zeros(subjects, relations, self.vocab_size)         # p(value | subject, relation)
        for r in range(relations):
            domain = "A" if r < relations // 2 else "B"
            low, high = (0.7, 0.95) if domain == "A" else (0.3, 0.7)
            tokens = pools[domain][torch.randperm(pool, generator=g)[:values]]
            for s in range(subjects):
                order = tokens[torch.randperm(values, generator=g)]
                top = low + (high - low) * torch.rand((), generator=g)
                rest = torch.empty(values - 1).exponential_(generator=g)   # a flat Dirichlet, once normalised
                self.p[s, r, order[0]] = top
                self.p[s, r, order[1:]] = (1 - top) * rest / rest.sum()
        self.tokens_of = self.p.sum(0) > 0                                 # (relations, V): a relation's values
        self.names, self.meaning = torch.full((self.vocab_size, names, names + 1), IGNORE), {}     # name, END, padding
        for value in range(first_value, first_tail if names > 1 else first_value):
            for i in range(names):
                name = [value] + torch.randint(first_tail, self.END, (i,), generator=g).tolist()
                self.names[value, i, :i + 2] = torch.tensor(name + [self.END])
                self.meaning[tuple(name)] = value
        order = torch.randperm(subjects, generator=g)
        self.split = {"all": order, "train": order[:subjects // 2], "heldout": order[subjects // 2:4 * subjects // 6],
                      "valid": order[4 * subjects // 6:5 * subjects // 6], "test": order[5 * subjects // 6:]}
        self.domain = {"all": torch.arange(relations), "A": torch.arange(relations // 2),
                       "B": torch.arange(relations // 2, relations)}

    def prompts(self, n, domain, split, generator):
        """n random (subject, relation) pairs -> prompts (n, 4) and their value distributions (n, V)."""
        pick = lambda items: items[torch.randint(len(items), (n,), generator=generator)]
        s, r = pick(self.split[split]), pick(self.domain[domain])
        ids = torch.stack([torch.full_like(s, self.Q), 2 + s, 2 + self.subjects + r, torch.full_like(s, self.A)], 1)
        return ids, self.p[s, r]

    def statements(self, n, domain, split, generator):
        """n true-to-the-world statements: ids (n, 5), the last token a sample of the fact's distribution."""
        ids, p = self.prompts(n, domain, split, generator)
        return torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)

    def sentences(self, n, domain, split, generator):
        """n statements that say the value by any of its names -> ids (n, T) and targets (n, T), as from `supervise`."""
        ids = self.statements(n, domain, split, generator)                 # (n, 5)
        name = torch.randint(self.names.shape[1], (n,), generator=generator)
        ids = torch.cat([ids[:, :4], self.names[ids[:, 4], name]], 1)      # (n, 4 + names + 1), padded with IGNORE
        targets = ids.roll(-1, dims=1)
        targets[:, :3] = targets[:, -1] = IGNORE
        return ids.clamp_min(0), targets

    def preferences(self, n, domain, generator):
        """n comparisons: prompts (n, 4), chosen (n,), rejected (n,). Two different answers are drawn from the
        fact's distribution, and the rater always prefers the likelier one."""
        ids, p = self.prompts(n, domain, "all", generator)
        pair = torch.multinomial(p, 2, generator=generator)                # (n, 2), without replacement
        pair = pair.gather(1, p.gather(1, pair).argsort(1, descending=True))
        return ids, pair[:, 0], pair[:, 1]

    def questions(self, n, domain, split, generator, options=4):
        """n multiple-choice `Question`s with one-token options.

        The key is a sample of the fact's distribution, the distractors are other values of the same
        relation, so the calibrated answer is p restricted to the options and renormalised.
        """
        ids, p = self.prompts(n, domain, split, generator)
        key = torch.multinomial(p, 1, generator=generator)                 # (n, 1)
        others = self.tokens_of[ids[:, 2] - 2 - self.subjects].float().scatter(1, key, 0.0)
        choices = torch.cat([key, torch.multinomial(others, options - 1, generator=generator)], 1)
        order = torch.rand(n, options, generator=generator).argsort(1)     # where the key lands is random
        return [Question(prompt, [[o] for o in opts], gold) for prompt, opts, gold in
                zip(ids.tolist(), choices.gather(1, order).tolist(), order.argmin(1).tolist())]

    def open_questions(self, n, domain, split, generator):
        """n `Question`s to be answered in the model's own words: every value of the world is an option."""
        ids, p = self.prompts(n, domain, split, generator)
        values = sorted(set(self.meaning.values()))
        gold = torch.multinomial(p, 1, generator=generator)[:, 0].tolist()
        return [Question(prompt, [[v] for v in values], values.index(v)) for prompt, v in zip(ids.tolist(), gold)]


# --- Question files: from bytes to records -------------------------------------------------------

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BLOCK = 2 ** 16                                            # characters read at a time


@contextlib.contextmanager
def opened(path):
    """A plain or gzipped UTF-8 file to read from, without byte-order mark. A byte that is not UTF-8 becomes
    a lone surrogate, so that `clean` can blame the row it stands in instead of the whole file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as f:
        opener = gzip.open if f.read(2) == b"\x1f\x8b" else open
    with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n") as f:
        try:
            yield f
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: not readable as gzip ({error})") from None


def parse_json(text, at=0):
    """(value, position after it) of the JSON that starts at text[at]; (None, len(text)) where that is not JSON."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text)


def read_object(path):
    """The JSON object that a file holds, or a ValueError."""
    with opened(path) as f:
        text = f.read().strip()
    value, end = parse_json(text)
    if not isinstance(value, dict) or end < len(text):
        raise ValueError(f"{path}: not a JSON object")
    return value


def json_array(f, start):
    """Yield (line number, value) of the array that opens just before character `start` of a file, of which a block
    and a value are held at a time; where the array is torn comes a last None."""
    number, text, at, counted = 1, f.read(start), start, 0
    while True:
        at = re.compile(r"[\s,]*").match(text, at).end()
        number, counted = number + text.count("\n", counted, at), at
        value, end = (None, at) if text.startswith("]", at) else parse_json(text, at)
        if end == len(text) and (more := f.read(max(BLOCK, end - at))):    # perhaps cut by the block's end: again, with more
            text, at, counted = text[at:] + more, 0, 0
            continue
        if text.startswith("]", at):
            break
        yield number, value
        if value is None and end == len(text):
            return
        at = end
    if (text[at + 1:] + f.read(BLOCK)).strip()[:1] not in ("", ",", "}"):  # the end of the file, or of TriviaQA's object
        yield number, None


def csv_rows(lines, delimiter=","):
    """Yield (line number, tuple of cells) of every row that is not blank; None is a row that csv cannot read."""
    reader = csv.reader(lines, delimiter=delimiter)
    while True:
        number = reader.line_num + 1
        try:
            cells = tuple(next(reader))
        except StopIteration:
            return
        except csv.Error:
            cells = None
        if cells != ():
            yield number, cells


def read_records(path):
    """Yield (line number, record) of a file, told apart by what its beginning holds.

    A record is a dict (a JSON object, or a row under a tab-separated header that names a column
    "question"), a tuple (the cells of a CSV row), or None where the line is neither. JSON comes as
    lines, as one array, or as TriviaQA's object with an array under "Data".
    """
    with opened(path) as f:
        head = f.read(BLOCK)
    header = head.strip().partition("\n")[0].rstrip("\r").split("\t")
    _, first = next(csv_rows(io.StringIO(head)), (1, None))
    keyed = bool(first) and first[-1].strip() in tuple(LETTERS[:len(first) - 2])           # a question, options, a letter
    looks_like_csv = keyed or not head.lstrip().startswith(("{", "["))                     # its question may start so, too
    array = re.match(r'\s*(\{[^][{}]*"Data"\s*:\s*)?\[', head)
    with opened(path) as f:
        lines = (line.replace("\r\n", "\n") for line in f)
        if len(header) > 1 and "question" in header:
            for number, cells in itertools.islice(csv_rows(lines, "\t"), 1, None):
                yield number, dict(zip(header, cells)) if cells and len(cells) == len(header) else None
        elif looks_like_csv:
            yield from csv_rows(lines)
        elif array:
            yield from json_array(f, array.end())
        else:
            for number, line in enumerate(map(str.strip, lines), 1):
                if line:
                    value, end = parse_json(line)
                    yield number, value if end == len(line) else None


def files_of(path):
    """The file, or all files of a directory in sorted order (hidden ones and subdirectories aside)."""
    path = Path(path)
    return sorted(f for f in path.iterdir() if f.is_file() and f.name[0] != ".") if path.is_dir() else [path]


def kind_of(path):
    """"mcqa", "qa" or "instructions", by the keys of the first record: which loader the file is for."""
    for file in files_of(path):
        for _, record in read_records(file):
            if isinstance(record, dict):
                keys = {key.lower() for key in record}
                if "question" not in keys and keys & {"instruction", "prompt"}:
                    return "instructions"
                if not keys & {"choices", "opa", "answerkey"} and not isinstance(record.get("question"), dict):
                    return "qa"
            if record is not None:
                return "mcqa"
    return "mcqa"


def stream(path, kind, skip_bad=False):
    """The rows that `load_mcqa`, `load_qa` or `load_instructions` returns (`kind` as from `kind_of`), one at a time: a file
    of any size is read in the memory of a few rows. In a directory a row without a subject gets its file's name, less its
    ending."""
    good, bad, first_bad = 0, 0, ""
    for file in files_of(path):
        convert = {"mcqa": mcqa_converter(file), "qa": qa_row, "instructions": instruction_row}[kind]
        for number, record in read_records(file):
            try:
                row = convert(record)
            except ValueError as error:
                first_bad = first_bad or f"{file}, line {number}: {error}"
                if not skip_bad:
                    raise ValueError(first_bad) from None
                bad += 1
                continue
            if Path(path).is_dir() and row.get("subject") == "":
                row["subject"] = Path(file.name.removesuffix(".gz")).stem
            good += 1
            yield row
    if not good:
        raise ValueError(f"{path}: holds no question" + f" ({first_bad})" * bool(bad))
    if bad:
        print(f"{path}: {bad} unreadable rows left out, the first: {first_bad}", file=sys.stderr)


def sample(rows, n, generator):
    """At most n of the rows in random order, every choice equally likely; no more than n are held (reservoir sampling:
    Vitter, 1985, algorithm R)."""
    kept = []
    for i, row in enumerate(rows):
        place = i if i < n else int(torch.randint(i + 1, (), generator=generator))
        if place < n:
            kept[place:place + 1] = [row]
    return [kept[i] for i in torch.randperm(len(kept), generator=generator).tolist()]


# --- Question files: from records to rows --------------------------------------------------------

def clean(value, name, optional=False):
    """`value` without white space around it, "" for an optional None; ValueError if it is not a text, or is empty."""
    if optional and value is None:
        return ""
    if not isinstance(value, str) or not (optional or value.strip()):
        raise ValueError(f"no {name} text: {value!r:.40}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the {name} is not UTF-8 text") from None
    return value.strip()


# A multiple-choice format is a function: record -> question, choices, gold key, subject, all still unchecked.

def mmlu_csv(cells):
    """MMLU's CSV (github.com/hendrycks/test): question, options, letter of the right one; no header."""
    return cells[0], list(cells[1:-1]), cells[-1], None


def medmcqa(record, first):
    """MedMCQA (medmcqa.github.io): options opa to opd, the right one's number under cop, counted from `first`."""
    choices = {"text": [record.get("op" + x) for x in "abcd"], "label": [first + i for i in range(4)]}
    return record.get("question"), choices, str(record.get("cop")), record.get("subject_name")


def arc(record):
    """ARC and OpenBookQA (allenai.org/data): question.stem, question.choices, answerKey; on the Hugging
    Face hub flattened to question or question_stem, choices, answerKey. The key is always a label."""
    inner = record["question"] if isinstance(record.get("question"), dict) else record
    question = inner.get("stem", inner.get("question_stem", inner.get("question")))
    return question, inner.get("choices"), str(record.get("answerKey")), record.get("subject")


def plain(record):
    """question, choices, answer (a 0-based index or a label), subject: MMLU as JSON (cais/mmlu on the hub), yours."""
    return record.get("question"), record.get("choices"), record.get("answer"), record.get("subject")


def texts_and_labels(choices):
    """[{"text", "label"}, ...], {"text": [...], "label": [...]} or [text, ...], which A, B, ... label -> texts, labels."""
    if isinstance(choices, dict):
        texts, labels = choices.get("text"), choices.get("label")
    elif isinstance(choices, list) and choices and all(isinstance(c, dict) for c in choices):
        texts, labels = [c.get("text") for c in choices], [c.get("label") for c in choices]
    else:
        texts, labels = choices, list(LETTERS[:len(choices)]) if isinstance(choices, list) else None
    if not isinstance(texts, list):
        raise ValueError("the choices are not a list of texts")
    if not 2 <= len(texts) <= len(LETTERS):
        raise ValueError(f"a question needs 2 to {len(LETTERS)} options, this one has {len(texts)}")
    if not isinstance(labels, list) or len(labels) != len(texts):
        raise ValueError(f"{len(texts)} options, but their labels are {labels!r:.40}")
    return [clean(t, "option") for t in texts], [str(label).strip() for label in labels]


def mcqa_row(record, first_cop):
    """A record of any of these formats -> {"question", "choices", "answer" (index), "subject"}; first_cop() is where
    MedMCQA's cop starts."""
    if isinstance(record, tuple) and len(record) > 1:
        question, choices, key, subject = mmlu_csv(record)
    elif not isinstance(record, dict):
        raise ValueError("neither a JSON object nor a CSV row of a question, its options and a letter")
    elif "opa" in record:
        question, choices, key, subject = medmcqa(record, first_cop())
    elif "answerKey" in record or isinstance(record.get("question"), dict):
        question, choices, key, subject = arc(record)
    else:
        question, choices, key, subject = plain(record)
    question = clean(question, "question")
    choices, labels = texts_and_labels(choices)
    right = {i for i, label in enumerate(labels) if isinstance(key, (int, str)) and label == str(key).strip()}
    if type(key) is int and 0 <= key < len(labels):        # a boolean is no index
        right.add(key)
    if len(right) != 1:
        raise ValueError(f"the gold key {key!r:.40} matches {'several' if right else 'none'} of the options "
                         f"labelled {', '.join(labels):.80}")
    return {"question": question, "choices": choices, "answer": right.pop(),
            "subject": clean(subject, "subject", optional=True)}


def mcqa_converter(file):
    """The `mcqa_row` for one file, which is read twice if it is MedMCQA's."""
    return functools.partial(mcqa_row, first_cop=functools.cache(
        lambda: 1 - any(isinstance(r, dict) and str(r.get("cop")) == "0" for _, r in read_records(file))))


def load_mcqa(path, skip_bad=False):
    """Multiple-choice questions -> list of {"question", "choices" (2 to 26 texts), "answer" (index), "subject"}.

    `path` is a file, plain or gzipped, or a directory of files (`stream`). Formats are told apart by
    content: those of `mmlu_csv`, `medmcqa`, `arc` and `plain`. An "answer" that is a number is a
    0-based index, one that is a string is a label: the option's own, or A, B, ... where it has none; a
    key that can be read both ways is an error. MedMCQA's cop counts from 1 in the authors' files and
    from 0 in the Hugging Face export: a file in which a 0 occurs counts from 0, any other from 1.
    Options with equal texts are kept (MMLU has nine such questions).

    Raises ValueError naming file and line; with `skip_bad` such rows are left out and one line on
    stderr counts them. A file that is broken as a whole (a torn gzip) is an error either way.
    """
    return list(stream(path, "mcqa", skip_bad))


def qa_row(record):
    """A record of any format that `load_qa` names -> {"question", "answers", "subject"}."""
    if not isinstance(record, dict):
        raise ValueError("neither a JSON object nor a tab-separated row under a header")
    record = {k.lower(): v for k, v in record.items()}     # TriviaQA writes Question, its Hugging Face copy question
    answer = record.get("answer")
    if isinstance(record.get("possible_answers"), str):
        found = [parse_json(record["possible_answers"])[0]]
    elif isinstance(answer, dict):
        answer = {k.lower().replace("_", ""): v for k, v in answer.items()}
        found = [answer.get(name) for name in ("value", "aliases", "normalizedaliases")]
    else:
        found = [record.get("possible_answers", record.get("answers", answer))]
    answers = [clean(a, "answer", optional=True) for f in found for a in (f if isinstance(f, list) else [f])]
    answers = list(dict.fromkeys(a for a in answers if a))  # an empty answer would match silence
    if not answers:
        raise ValueError("no answer")
    return {"question": clean(record.get("question"), "question"), "answers": answers,
            "subject": clean(record.get("subject", record.get("prop")), "subject", optional=True)}


def load_qa(path, skip_bad=False):
    """Open-ended questions -> list of {"question", "answers" (all accepted texts, as the file spells them), "subject"}.

    Told apart by content: PopQA (github.com/AlexTMallen/adaptive-retrieval; tab-separated under a
    header, "possible_answers" a JSON list, "prop" the subject), TriviaQA (nlp.cs.washington.edu/triviaqa;
    {"Data": [{"Question", "Answer": {"Value", "Aliases", "NormalizedAliases"}}]}, or its Hugging Face
    copy in lower case), and JSON lines or an array of {"question", "answer" or "answers", "subject"}.
    Files, directories and errors as in `load_mcqa`.
    """
    return list(stream(path, "qa", skip_bad))


def instruction_row(record):
    """A record of any format that `load_instructions` names -> {"prompt", "answer"}."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if "instruction" not in record:
        return {"prompt": clean(record.get("prompt"), "prompt"), "answer": clean(record.get("answer"), "answer")}
    prompt, more = clean(record["instruction"], "instruction"), clean(record.get("input"), "input", optional=True)
    return {"prompt": f"{prompt}\n\n{more}" if more else prompt, "answer": clean(record.get("output"), "output")}


def load_instructions(path, skip_bad=False):
    """Instructions with answers -> list of {"prompt", "answer"}.

    Alpaca (github.com/tatsu-lab/stanford_alpaca; an array of {"instruction", "input", "output"}, the
    input under the instruction after a blank line), the same as JSON lines, or {"prompt", "answer"}.
    A row without an answer teaches nothing and is an error: Alpaca has a few, so give `skip_bad`.
    """
    return list(stream(path, "instructions", skip_bad))


def question_key(row):
    """What makes two rows the same question: its text, whatever the case, white space and Unicode form."""
    text = row["question"] if "question" in row else row["prompt"]
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def check_disjoint(**parts):
    """ValueError if two of the named lists of rows share a question: check_disjoint(training=..., evaluation=...)."""
    seen = {}
    for name, rows in parts.items():
        for row in rows:
            if seen.setdefault(question_key(row), name) != name:
                raise ValueError(f"the {seen[question_key(row)]} and {name} rows share the question {question_key(row)!r:.80}")


# --- Prompts and tokens --------------------------------------------------------------------------

def compile_template(source, path):
    """A chat template ready to render. It is someone else's code, so jinja2's sandbox runs it, with
    the functions that templates expect: raise_exception(text) and strftime_now(format)."""
    import jinja2.sandbox

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                               extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:                             # a template can fail in any way Python can
        raise ValueError(f"{path}: the chat template is not valid ({' '.join(str(error).split())})") from None


class Prompter:
    """A model directory's tokenizer and prompt form: rows -> `Question`s in tokens. `stop_ids` end an answer, the first of
    them a turn: they are the eos_token of tokenizer_config.json and the eos_token_id of generation_config.json and config.json.

    Prompts use the model's chat template when it has one and jinja2 is installed, otherwise a
    plain "Question: ... Answer:" form; `form` says which. The template is the file
    chat_template.jinja or the entry of tokenizer_config.json (of several, the one named "default").
    Raises ValueError in one sentence that names the file.
    """

    def __init__(self, directory):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError("a real model needs the package tokenizers: pip install tokenizers") from None
        self.path = Path(directory) / "tokenizer.json"
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        try:
            self.tokenizer = Tokenizer.from_file(str(self.path))
            sample = self.tokenizer.encode("a")
        except Exception as error:                         # the tokenizers package raises nothing narrower
            raise ValueError(f"{self.path}: not a tokenizer ({error})") from None
        self.tokenizer.no_truncation()                     # some files ask for it, and it would cut prompts silently
        self.tokenizer.no_padding()
        self.template_path, settings = Path(directory) / "tokenizer_config.json", {}
        if self.template_path.is_file():
            settings = read_object(self.template_path)
        source = settings.get("chat_template")
        if isinstance(source, list):
            named = [t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"]
            source = named[0] if named else source
        if (Path(directory) / "chat_template.jinja").is_file():
            self.template_path = Path(directory) / "chat_template.jinja"
            with opened(self.template_path) as f:
                source = f.read().replace("\r\n", "\n")
        if source is not None and not isinstance(source, str):
            raise ValueError(f"{self.template_path}: chat_template is neither a text nor a list with one named 'default'")
        special = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
        self.special = {k: v for k, v in special.items() if isinstance(v, str)}
        ids = [self.tokenizer.token_to_id(self.special.get("eos_token", ""))]
        for name in ("generation_config.json", "config.json"):
            if (Path(directory) / name).is_file():
                found = read_object(Path(directory) / name).get("eos_token_id")
                ids += found if isinstance(found, list) else [found]
        self.stop_ids = tuple(dict.fromkeys(i for i in ids if type(i) is int))
        # What belongs before any text, a beginning-of-sequence token or nothing: as the tokenizer does it,
        # unless tokenizer_config.json says otherwise.
        self.prefix = sample.ids[:1] if sample.special_tokens_mask[:1] == [1] else []
        if isinstance(settings.get("add_bos_token"), bool):
            bos = self.tokenizer.token_to_id(self.special.get("bos_token", ""))
            self.prefix = [bos] if settings["add_bos_token"] and bos is not None else []
        self.template, self.form = None, "plain"
        if source:
            try:
                self.template, self.form = compile_template(source, self.template_path), "chat"
            except ImportError:
                self.form = "plain (the chat template needs the package jinja2: pip install jinja2)"

    def render(self, text, lead):
        """The prompt's text: `text` as the user's turn, or in plain form followed by `lead`."""
        if self.template is None:
            return f"{text}\n{lead}"
        try:
            prompt = self.template.render(messages=[{"role": "user", "content": text}], tools=None, documents=None,
                                          add_generation_prompt=True, **self.special)
            prompt.encode("utf-8")                         # a template may hold what no tokenizer can read
            return prompt
        except Exception as error:                         # as above
            why = " ".join(str(error).split())
            raise ValueError(f"{self.template_path}: the chat template fails on a prompt ({why})") from None

    def encode(self, text):
        """Token ids with exactly one beginning-of-sequence token where the tokenizer wants one."""
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:                         # as above
            raise ValueError(f"{self.path}: the tokenizer fails on a prompt ({error})") from None
        return ids if ids[:1] == self.prefix else self.prefix + ids

    def continuation(self, prompt, before, answer):
        """Token ids of `answer` as they occur after `prompt`, whose own are `before`."""
        whole = self.encode(prompt + answer)
        if whole[:len(before)] != before or len(whole) == len(before):
            raise ValueError(f"{self.path}: the answer {answer!r:.80} has no tokens of its own after the prompt "
                             f"{prompt[-40:]!r}")
        return whole[len(before):]

    def question(self, row, scoring):
        """A row of any file -> `Question`. "letter": the options are listed and answered by letter, each one token of its own,
        ValueError if not; "text": the answer is an option's own text; "open": there are no options, only the right answer
        (the first of several) and the token that ends a turn. An instruction is its own prompt."""
        text, choices = row.get("prompt") or f"Question: {row['question']}", row.get("choices")
        if scoring == "open":
            accepted = [choices[row["answer"]]] if choices else row.get("answers") or [row["answer"]]
            answers, gold, end = accepted[:1], 0, list(self.stop_ids[:1])
        else:
            answers, gold, accepted, end = choices if scoring == "text" else LETTERS[:len(choices)], row["answer"], None, []
        if scoring == "letter":
            text += "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
            text += "\nAnswer with the letter of the right option."
        elif "question" in row:
            text += "\nAnswer in a few words."
        prompt, space = self.render(text, "Answer:"), "" if self.template else " "
        before = self.encode(prompt)
        options = [self.continuation(prompt, before, space + answer) + end for answer in answers]
        if scoring == "letter":
            bad = [a for a, o in zip(answers, options) if len(o) > 1 or options.count(o) > 1]
            if bad:
                raise ValueError(f"{self.path}: the option letters {', '.join(bad)} are not, after the prompt, "
                                 "one token each and all different")
        return Question(before, options, gold, [len(a) for a in answers], accepted, row.get("id"))

    def show(self, question):
        """A `Question` for a reader: its prompt as text, as token strings, and every option with the tokens that
        are scored in [brackets] after the prompt's last ones; * is the right option."""
        name = lambda ids: " ".join(repr(self.tokenizer.id_to_token(i))[1:-1] for i in ids)
        lines = [f"prompt, {self.form} form:", self.tokenizer.decode(question.prompt, skip_special_tokens=False),
                 "", f"the same in {len(question.prompt)} tokens:", name(question.prompt), "", "scored tokens:"]
        for i, option in enumerate(question.options):
            scored = " ".join(f"[{name([t])}]" for t in option)
            lines.append(f"{'*' if i == question.gold else ' '} ... {name(question.prompt[-3:])} {scored}")
        return "\n".join(lines)


@dataclasses.dataclass
class Asked:
    """Rows as `Question`s, those that fit into the context: made anew each time they are gone through, so that the rows
    are all that stays in memory."""
    rows: list
    prompter: Prompter
    scoring: str
    context: int

    def __iter__(self):
        for row in self.rows:
            yield from within_context([self.prompter.question(row, self.scoring)], self.context)[0]
