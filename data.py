"""The toy world, the readers of published question files, prompts and batches.

`World` is where an aligned model's overconfidence can be watched from birth: every fact is a
*distribution* over answers, so a model trained on samples is calibrated, and a model aligned to
"prefer the likelier answer" is not. The rest turns files of multiple-choice questions into
prompts, token ids and batches for a real model.
"""
import dataclasses
import gzip
import json
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
    two domains, but are spelt with some of the same tokens.

    A sequence is five tokens: [Q] subject relation [A] value. Subjects are split into "train"
    (labelled fine-tuning), "heldout" (inputs of the upper level, temperature fit) and "test".
    """
    Q, A = 0, 1                                            # the two marker tokens

    def __init__(self, seed, subjects=120, relations=8, values=12, pool=16, shared=8):
        g = self.generator = torch.Generator().manual_seed(seed)
        self.subjects, self.relations = subjects, relations
        first_value = 2 + subjects + relations
        self.vocab_size = first_value + 2 * pool - shared
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
        order = torch.randperm(subjects, generator=g)
        self.split = {"all": order, "train": order[:subjects // 2], "heldout": order[subjects // 2:3 * subjects // 4],
                      "test": order[3 * subjects // 4:]}
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


# --- Question files ------------------------------------------------------------------------------

def read_lines(path):
    """Yield (line number, text) of a plain or gzipped UTF-8 file, byte-order mark and CRLF dropped, blank lines skipped."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as f:
        zipped = f.read(2) == b"\x1f\x8b"
    try:
        with (gzip.open if zipped else open)(path, "rt", encoding="utf-8-sig") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text ({error})") from None


def load_mcqa(path):
    """JSON lines of {"question", "choices", "answer", "subject"} -> list of such dicts.

    "choices" holds 2 to 26 different strings, "answer" is the index of the right one. Raises
    ValueError naming file and line.
    """
    rows = []
    for number, line in read_lines(path):
        def require(good, what):
            if not good:
                raise ValueError(f"{path}, line {number}: {what}")
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        require(isinstance(row, dict), "not a JSON object")
        question, choices, answer = row.get("question"), row.get("choices"), row.get("answer")
        require(isinstance(question, str) and question.strip(), "no question text under 'question'")
        require(isinstance(choices, list) and all(isinstance(c, str) for c in choices), "'choices' is not a list of strings")
        require(2 <= len(choices) <= 26, f"a question needs 2 to 26 options, this one has {len(choices)}")
        require(isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices),
                f"'answer' {answer!r} is not the index of one of the {len(choices)} options")
        rows.append({"question": question.strip(), "choices": choices, "answer": answer, "subject": str(row.get("subject", ""))})
    if not rows:
        raise ValueError(f"{path}: holds no question")
    return rows


# --- Prompts and tokens --------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Prompter:
    """A model directory's tokenizer and prompt form: question rows -> `Question`s in tokens.

    Prompts use the model's chat template when it has one and jinja2 is installed, otherwise a
    plain "Question: ... Answer:" form; `form` says which.
    """

    def __init__(self, directory):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError("a real model needs the package tokenizers: pip install tokenizers") from None
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:                         # the tokenizers package raises nothing narrower
            raise ValueError(f"{path}: not a tokenizer ({error})") from None
        settings = Path(directory) / "tokenizer_config.json"
        self.settings = json.loads(settings.read_text(encoding="utf-8-sig")) if settings.is_file() else {}
        self.template, self.form = None, "plain"
        if self.settings.get("chat_template"):
            try:
                from jinja2.sandbox import ImmutableSandboxedEnvironment
            except ImportError:
                self.form = "plain (the chat template needs the package jinja2)"
            else:
                environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
                self.template, self.form = environment.from_string(self.settings["chat_template"]), "chat"
        # What the tokenizer itself puts before any text: a beginning-of-sequence token, or nothing.
        self.prefix = self.tokenizer.encode("").ids[:1]

    def render(self, text, lead):
        """The prompt's text: `text` as the user's turn, or in plain form followed by `lead`."""
        if self.template is None:
            return f"{text}\n{lead}"
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in self.settings.items()
                   if k.endswith("_token") and v is not None and not isinstance(v, bool)}
        return self.template.render(messages=[{"role": "user", "content": text}], add_generation_prompt=True, **special)

    def encode(self, text):
        """Token ids with exactly one beginning-of-sequence token where the tokenizer wants one."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids if ids[:1] == self.prefix else self.prefix + ids

    def continuation(self, prompt, answer):
        """Token ids of `answer` as they occur after `prompt` (its text)."""
        before, whole = self.encode(prompt), self.encode(prompt + answer)
        if whole[:len(before)] != before or len(whole) == len(before):
            raise ValueError(f"the answer {answer!r} has no tokens of its own after the prompt {prompt[-40:]!r}")
        return whole[len(before):]

    def question(self, row, scoring):
        """A question row -> `Question`. "letter": the options are listed and answered by letter;
        "text": the answer is an option's own text."""
        text, space = f"Question: {row['question']}", "" if self.template else " "
        if scoring == "letter":
            labels = LETTERS[:len(row["choices"])]
            text += "".join(f"\n{letter}. {choice}" for letter, choice in zip(labels, row["choices"]))
            text += "\nAnswer with the letter of the right option."
            prompt, answers = self.render(text, "Answer:"), labels
        else:
            prompt, answers = self.render(text + "\nAnswer in a few words.", "Answer:"), row["choices"]
        options = [self.continuation(prompt, space + answer) for answer in answers]
        if scoring == "letter" and (any(len(o) > 1 for o in options) or len({o[0] for o in options}) < len(options)):
            raise ValueError(f"the option letters {', '.join(labels)} are not distinct single tokens after the prompt")
        return Question(self.encode(prompt), options, row["answer"], [len(a) for a in answers])
