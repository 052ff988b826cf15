"""The experiments: an overconfident model, calibrated in training, in and out of domain.

    python train.py                                             # the toy world, from birth to calibration
    python train.py --model DIR --train FILE --eval FILE...     # the same loop on a real LLM

Every method that trains is one *direction*: a function of the bilevel problem that says where
theta (LoRA adapters) and alpha (the logit adjustment) should move. `fit` is the one loop they
share. The file goes: directions -> the loop -> scoring -> the toy's task -> a real model's task
-> running methods over tasks -> the command line.
"""
import argparse
import copy
import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm

from bilevel import (Bilevel, LogitAdjustment, Parser, bome_direction, check_output, negative_entropy,
                     parametric_cross_entropy, unflatten, write)
from data import IGNORE, Prompter, World, check_disjoint, collate, load_mcqa, question_key, supervise, within_context
from metrics import evaluate, fit_temperature, reliability_diagram
from model import Config, Transformer, add_lora, save_adapters

# --- The methods, as directions ------------------------------------------------------------------

def ft_direction(problem, args):
    """Plain fine-tuning: theta along -L_t, alpha stays."""
    L = problem.lower()
    L_t, L_a = problem.gradient(L)
    return unflatten(L_t, problem.theta), unflatten(0 * L_a, problem.alpha), {"lower": L.item()}


def reg_direction(problem, args):
    """Single level: theta and alpha both descend L + w F, the entropy as a plain regulariser."""
    L, F_value = problem.lower(), problem.upper()
    g_theta, g_alpha = problem.gradient(L + args.reg_weight * F_value)
    return (unflatten(g_theta, problem.theta), unflatten(g_alpha, problem.alpha),
            {"lower": L.item(), "upper": F_value.item()})


def calm_direction(problem, args):
    """CALM: both along BOME's joint direction."""
    return bome_direction(problem, args.inner_steps, args.inner_lr, args.eta)


DIRECTIONS = {"ft": ft_direction, "reg": reg_direction, "calm-scalar": calm_direction, "calm": calm_direction}
METHODS = ["aligned", "ts", *DIRECTIONS, "uniform"]       # uniform: every option alike, what "maximise entropy" wins by


# --- The loop they share -------------------------------------------------------------------------

@dataclasses.dataclass
class Task:
    """What an experiment hands to the methods, toy and real alike."""
    model: Transformer                                     # aligned, with adapters that are still the identity
    adapters: dict                                         # name -> parameter
    batch: callable                                        # generator -> ids (B, T), targets (B, T): labelled, domain A
    inputs: callable                                       # generator -> ids (B, T), mask (B, T): answer positions, no labels
    heldout: dict                                          # scoring -> Questions of domain A on which ts fits T
    tests: list                                            # (domain, scoring, Questions)


def fit(task, direction, mode, args, seed, name):
    """Train the adapters and a fresh LogitAdjustment along `direction` with AdamW; returns the
    adjustment and one report (dict of floats) a step. Every method starts from the same adapters."""
    generator = torch.Generator().manual_seed(seed)
    device = task.model.embed_tokens.weight.device
    with torch.no_grad():
        for key, p in task.adapters.items():
            bound = 1 / math.sqrt(p.shape[1]) if "lora_A" in key else 0.0
            p.copy_((2 * torch.rand(p.shape, generator=generator) - 1) * bound)
    adjustment = LogitAdjustment(task.model.config.vocab_size, mode).to(device)
    theta = list(task.adapters.values())
    alpha = [p for p in adjustment.parameters() if p.requires_grad]
    batch = {}                                             # the closures read the step's data from here

    def logits_at(ids, mask):
        return task.model.head(task.model.hidden(ids)[mask])               # (N, V), not (B, T, V)

    def lower():
        supervised = batch["targets"] != IGNORE
        return parametric_cross_entropy(logits_at(batch["ids"], supervised), batch["targets"][supervised], adjustment)

    def upper():
        logits = logits_at(batch["inputs"], batch["mask"])
        return negative_entropy(logits, adjustment if args.entropy_of == "adjusted" else None)

    problem = Bilevel(theta, alpha, lower, upper)
    optimizer = torch.optim.AdamW([{"params": theta, "lr": args.lr}, {"params": alpha, "lr": args.alpha_lr}],
                                  weight_decay=0.0)
    trace = []
    with tqdm(range(args.steps), desc=name, leave=False) as bar:
        for step in bar:
            batch["ids"], batch["targets"] = (x.to(device) for x in task.batch(generator))
            batch["inputs"], batch["mask"] = (x.to(device) for x in task.inputs(generator))
            d_theta, d_alpha, report = direction(problem, args)
            for key in ("lower", "upper"):
                if not math.isfinite(report.get(key, 0.0)):
                    raise FloatingPointError(f"{name}: the {key} loss is {report[key]} at step {step}; try a smaller --lr or --alpha-lr")
            for p, d in zip(theta + alpha, d_theta + d_alpha):
                p.grad = d
            optimizer.step()
            trace.append(report)
            bar.set_postfix({k: f"{v:.3f}" for k, v in report.items()})
    if not all(p.isfinite().all() for p in theta + alpha):
        raise FloatingPointError(f"{name}: a parameter is not finite after the last step; try a smaller --lr or --alpha-lr")
    return adjustment, trace


# --- Scoring multiple-choice questions -----------------------------------------------------------

def equal_scores(questions):
    """Zeros for the options there are, (n, most options), and -inf where a question has fewer."""
    scores = torch.full((len(questions), max(len(q.options) for q in questions)), -torch.inf, dtype=torch.float64)
    for i, q in enumerate(questions):
        scores[i, :len(q.options)] = 0
    return scores


@torch.no_grad()
def score_options(model, adjustment, questions, rule="sum", tokens_at_once=4096):
    """log-probability of every option under softmax(z~), (n, most options); -inf where a question has fewer.

    rule "sum": of the option's tokens together; "token", "char": that divided by its tokens or
    characters. One-token options cost one pass of the prompt.
    """
    device = model.embed_tokens.weight.device
    jobs = []                                              # (question, its options, token ids to run)
    for i, q in enumerate(questions):
        if all(len(option) == 1 for option in q.options):
            jobs.append((i, range(len(q.options)), q.prompt))
        else:
            jobs += [(i, [j], q.prompt + option[:-1]) for j, option in enumerate(q.options)]
    jobs.sort(key=lambda job: len(job[2]))                 # batches of like lengths waste no padding
    scores = equal_scores(questions)
    with tqdm(total=len(jobs), desc="scoring", leave=False, disable=len(jobs[-1][2]) < 8) as bar:   # not for the toy
        while jobs:
            size = max(1, tokens_at_once // len(jobs[-1][2]))
            chunk, jobs = jobs[-size:], jobs[:-size]       # longest first: memory peaks at once, not late
            ids, _ = collate([run for _, _, run in chunk])
            hidden = model.hidden(ids.to(device))          # (B, T, C)
            rows, columns, entries = [], [], []            # where tokens are predicted; (question, option, which place, token)
            for row, (i, options, _) in enumerate(chunk):
                q, first = questions[i], len(rows)
                depth = max(len(q.options[j]) for j in options)
                rows += [row] * depth
                columns += range(len(q.prompt) - 1, len(q.prompt) - 1 + depth)
                entries += [(i, j, first + t, token) for j in options for t, token in enumerate(q.options[j])]
            z = model.head(hidden[rows, columns])          # (places, V)
            log_p = (z if adjustment is None else adjustment(z)).float().log_softmax(-1)
            i, j, place, token = torch.tensor(entries).T
            scores.index_put_((i, j), log_p[place.to(device), token.to(device)].double().cpu(), accumulate=True)
            bar.update(len(chunk))
    for i, q in enumerate(questions):
        for j, option in enumerate(q.options):
            scores[i, j] /= {"sum": 1, "token": len(option), "char": q.lengths and q.lengths[j]}[rule]
    return scores


# --- The toy's task ------------------------------------------------------------------------------

def pretrain(world, args, seed):
    """A transformer trained on samples of the world: calibrated in both domains."""
    torch.manual_seed(seed)
    model, generator = Transformer(Config(world.vocab_size)).to(args.device), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    with tqdm(range(args.pretrain_steps), desc=f"world {seed}: pretraining", leave=False) as bar:
        for step in bar:
            warm, cool = min(1, (step + 1) / 50), 1 - step / args.pretrain_steps
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * warm * cool
            ids = world.statements(256, "all", "all", generator).to(args.device)          # (256, 5)
            loss = F.cross_entropy(model(ids[:, :-1])[:, -1], ids[:, -1])                 # only the answer can be learnt
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def align(model, world, args, seed):
    """DPO (Rafailov et al., 2023, arXiv 2305.18290) on domain B: overconfident there, by the rater's taste."""
    reference, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    for _ in tqdm(range(args.dpo_steps), desc=f"world {seed}: DPO", leave=False):
        prompts, chosen, rejected = (x.to(args.device) for x in world.preferences(256, "B", generator))
        log_p = model(prompts)[:, -1].log_softmax(-1)                                     # (256, V)
        with torch.no_grad():
            log_p_ref = reference(prompts)[:, -1].log_softmax(-1)
        reward = 0.1 * (log_p - log_p_ref)                                                # beta = 0.1
        margin = reward.gather(1, chosen[:, None]) - reward.gather(1, rejected[:, None])
        loss = -F.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def toy_task(args, seed):
    """World `seed`, its aligned model, and domain A's data; domain B is for testing only."""
    world = World(seed)
    model = align(pretrain(world, args, seed), world, args, seed).eval()
    generator = torch.Generator().manual_seed(seed)

    def batch(g):
        ids = world.statements(args.batch, "A", "train", g)                               # (n, 5)
        return supervise([(row[:-1], row[-1:]) for row in ids.tolist()])

    def inputs(g):
        ids, _ = world.prompts(args.batch, "A", "heldout", g)                             # (n, 4)
        return ids, torch.arange(ids.shape[1]).expand_as(ids) == ids.shape[1] - 1         # the answer follows the last

    ask = lambda domain, split: world.questions(args.limit, domain, split, generator)
    return Task(model, add_lora(model, args.rank, args.lora_alpha), batch, inputs, {"letter": ask("A", "heldout")},
                [("id", "letter", ask("A", "test")), ("ood", "letter", ask("B", "test"))])


# --- A real model's task -------------------------------------------------------------------------

def real_task(args, seed):
    """A Hugging Face model and question files: the training file is domain A, every --eval file is tested
    without the questions (by text) that were used to train, to fit T or in the upper level."""
    prompter = Prompter(args.model)
    files = {path: load_mcqa(path, args.skip_bad) for path in dict.fromkeys([args.train, *args.eval])}
    generator = torch.Generator().manual_seed(seed)

    def shuffled(rows):
        return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]

    unique = shuffled(list({question_key(row): row for row in files[args.train]}.values()))
    n = len(unique)
    if n < 5:
        raise ValueError(f"{args.train}: {n} different questions are too few to split")
    train, heldout, test = unique[:3 * n // 5], unique[3 * n // 5:4 * n // 5][:args.limit], unique[4 * n // 5:][:args.limit]
    used = {question_key(row) for row in train + heldout}
    tests = {"id": test}
    for path in args.eval:
        rows = [row for row in files[path] if question_key(row) not in used]
        if len(rows) < len(files[path]):
            print(f"{path}: {len(files[path]) - len(rows)} rows left out, their questions are among the training or held-out ones")
        name = Path(path).name.split(".")[0]
        if name in tests:
            raise ValueError(f"{path}: another test set is called {name!r} already")
        tests[name] = shuffled(rows)[:args.limit]
    for name, rows in tests.items():
        check_disjoint(training=train, heldout=heldout, **{f"{name} test": rows})
        if not rows:
            raise ValueError(f"{name}: no question is left to evaluate")

    model = Transformer.from_pretrained(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    context = model.config.max_position_embeddings
    form_of = lambda scoring: scoring.split("-")[0]                        # "text-sum" and "text-char" ask alike

    def ask(rows, scoring, what):
        questions, too_long = within_context([prompter.question(row, form_of(scoring)) for row in rows], context)
        if too_long:
            print(f"{what}, {scoring}: {too_long} questions left out, longer than the context of {context} tokens")
        beyond = max((t for q in questions for t in q.prompt + sum(q.options, [])), default=0)
        if beyond >= model.config.vocab_size:
            raise ValueError(f"{args.model}: the tokenizer has token {beyond}, the model's vocabulary ends at {model.config.vocab_size - 1}")
        if not questions:
            raise ValueError(f"{what}: no question fits into the context of {context} tokens")
        return questions

    heldout = {scoring: ask(heldout, scoring, "held-out") for scoring in args.scoring}
    tests = [(name, scoring, ask(rows, scoring, name)) for name, rows in tests.items() for scoring in args.scoring]
    prompts = [q.prompt for questions in heldout.values() for q in questions]
    forms = sorted({form_of(scoring) for scoring in args.scoring})

    def batch(g):
        examples, misses = [], 0
        while len(examples) < args.batch:                                  # what is longer than the context is drawn again
            row = train[int(torch.randint(len(train), (), generator=g))]
            fitting, too_long = within_context([prompter.question(row, forms[len(examples) % len(forms)])], context)
            examples += [(q.prompt, q.options[q.gold]) for q in fitting]
            misses = misses + too_long if too_long else 0
            if misses == 1000:
                raise ValueError(f"{args.train}: 1000 training questions in a row do not fit into the context of {context} tokens")
        return supervise(examples)

    def inputs(g):
        ids, real = collate([prompts[i] for i in torch.randint(len(prompts), (args.batch,), generator=g).tolist()])
        return ids, real & ~F.pad(real, (0, 1))[:, 1:]                     # the last real token: the answer follows it

    print(f"{args.model}: prompts in {prompter.form} form; {len(train)} training, {len(heldout[args.scoring[0]])} held-out questions")
    if args.show_prompt:
        for name, scoring, questions in tests[:len(args.scoring)]:
            print(f"\n{name}, {scoring} scoring\n{prompter.show(questions[0])}")
    return Task(model, add_lora(model, args.rank, args.lora_alpha), batch, inputs, heldout, tests)


# --- Methods over tasks --------------------------------------------------------------------------

def run_method(task, method, args, seed):
    """One method on one task: a row of numbers, a diagram as text and the predictions, for every test set."""
    adjustment, temperature = None, {}
    rule = lambda scoring: scoring.split("-")[1] if "-" in scoring else "sum"
    gold_of = lambda questions: torch.tensor([q.gold for q in questions])
    with torch.no_grad():
        for key, p in task.adapters.items():
            if "lora_B" in key:
                p.zero_()                                  # the aligned model again
    if method == "ts":
        for scoring, questions in task.heldout.items():
            temperature[scoring] = fit_temperature(score_options(task.model, None, questions, rule(scoring)), gold_of(questions))
    elif method in DIRECTIONS:
        mode = "scalar" if method == "calm-scalar" else "vector"
        adjustment, _ = fit(task, DIRECTIONS[method], mode, args, seed, method)
        if args.out and args.model:
            save_adapters(task.model, Path(args.out) / f"{method}-{seed}", adjustment)
    rows, diagrams, predictions = [], [], []
    for domain, scoring, questions in task.tests:
        if method == "uniform":
            scores = equal_scores(questions)
        else:
            scores = score_options(task.model, adjustment, questions, rule(scoring)) / temperature.get(scoring, 1.0)
        p, gold = scores.softmax(-1), gold_of(questions)   # (n, most options)
        about = {"method": method, "seed": seed, "domain": domain, "scoring": scoring}
        rows.append({**about, **evaluate(p, gold), **({"temperature": temperature[scoring]} if method == "ts" else {})})
        diagrams.append(reliability_diagram(p.max(-1).values, p.argmax(-1) == gold, title=f"{method}, {domain}, {scoring}"))
        predictions += [{**about, "domain": f"{domain}, {scoring}", "id": i, "probabilities": p[i, :len(q.options)].tolist(),
                         "choice": int(p[i].argmax()), "gold": q.gold} for i, q in enumerate(questions)]
    return rows, diagrams, predictions


COLUMNS = ["accuracy", "conf_ece", "cw_ece", "nll", "brier", "auroc"]


def table(rows):
    """The rows as text, a section for each test set: mean over seeds, and +- standard deviation if there are several."""
    lines = []
    for domain, scoring in dict.fromkeys((row["domain"], row["scoring"]) for row in rows):
        here = [row for row in rows if (row["domain"], row["scoring"]) == (domain, scoring)]
        n = "/".join(sorted({str(row["n"]) for row in here}))
        lines.append(f"\n{domain}, {scoring} scoring, n = {n}")
        lines.append(f"  {'method':14s}" + "".join(f"{column:>17s}" for column in COLUMNS))
        for method in dict.fromkeys(row["method"] for row in here):
            line = f"  {method:14s}"
            for column in COLUMNS:
                values = [row[column] for row in here if row["method"] == method]
                mean = sum(values) / len(values)           # statistics.mean and stdev know no NaN
                deviation = (sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)) ** 0.5
                line += (f"{mean:.3f}" + (f" +- {deviation:.3f}" if len(values) > 1 else "")).rjust(17)
            lines.append(line)
    return "\n".join(lines)


def document(args, rows):
    """{"config", "rows"} as JSON, which knows no NaN and no infinity: both become null."""
    rows = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    config = {k: v for k, v in vars(args).items() if k not in ("json", "out")}
    return json.dumps({"config": config, "rows": rows}, indent=1)


def run(args, kept):
    """Every method on every task; `kept` lists the files written so far."""
    make_task = real_task if args.model else toy_task
    if not args.model:
        torch.set_num_threads(1)                           # tensors this small only lose by sharing
    rows, predictions = [], []
    for seed in range(args.world_seed, args.world_seed + args.seeds):
        task = make_task(args, seed)
        for method in args.methods:
            new, diagrams, predicted = run_method(task, method, args, seed)
            rows, predictions = rows + new, predictions + predicted
            if seed == args.world_seed and method in ("aligned", "calm"):
                print("\n\n".join(["", *diagrams]))
            if args.out:
                Path(args.out).mkdir(parents=True, exist_ok=True)
                write(Path(args.out) / "results.json", document(args, rows))
                write(Path(args.out) / "predictions.jsonl", "\n".join(map(json.dumps, predictions)))
                kept[:] = [Path(args.out) / "results.json"]
    if args.json is not None:
        write(args.json, document(args, rows))
    print(table(rows))


# --- The command line ----------------------------------------------------------------------------

# Chosen on development worlds 0 and 1; a real model is larger, so its batches are smaller.
TOY = {"steps": 200, "batch": 64, "limit": 4000, "world_seed": 100}
REAL = {"steps": 20, "batch": 8, "limit": 200, "world_seed": 0}


def parse(argv):
    """Command line -> args, every value checked; ValueError or OSError says what is wrong."""
    def at_least(low, kind):
        def convert(text):
            value = kind(text)
            if not (value >= low and math.isfinite(value)):
                raise argparse.ArgumentTypeError(f"{text} is below {low}" if value < low else f"{text} is not a number")
            return value
        convert.__name__ = kind.__name__
        return convert
    count, size, share = at_least(1, int), at_least(0, int), at_least(0.0, float)

    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    a = parser.add_argument
    a("--methods", default=",".join(METHODS), help="comma-separated, or 'all'")
    a("--seeds", type=count, default=1, help="how many worlds (toy) or repetitions (real)")
    a("--world-seed", type=size, help=f"the first seed; {TOY['world_seed']} (toy), {REAL['world_seed']} (real)")
    a("--json", metavar="PATH", help="write every printed number there")
    a("--out", metavar="DIR", help="keep results.json, predictions.jsonl and a real model's adapters there, renewed after every method")
    a("--device", default="cpu", help="cpu, cuda, mps")
    real = parser.add_argument_group("a real model")
    real.add_argument("--model", metavar="DIR", help="a Hugging Face directory: Llama, Mistral, OLMo 2, Qwen 2 or Qwen 3")
    real.add_argument("--train", metavar="FILE", help="questions to train on, domain A: MMLU, ARC, OpenBookQA, MedMCQA files, or JSON lines")
    real.add_argument("--eval", metavar="FILE", nargs="+", action="extend", default=[], help="questions to test on")
    real.add_argument("--skip-bad", action="store_true", help="count and skip lines that cannot be read")
    real.add_argument("--show-prompt", action="store_true", help="print the first prompt, its tokens and what is scored")
    real.add_argument("--scoring", default="letter,text-char", help="any of letter, text-sum, text-token, text-char")
    real.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the frozen weights")
    real.add_argument("--limit", type=count, help=f"questions a test set, and held out; {TOY['limit']} (toy), {REAL['limit']} (real)")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=count, help=f"of every method that trains; {TOY['steps']} (toy), {REAL['steps']} (real)")
    train.add_argument("--batch", type=count, help=f"examples a step; {TOY['batch']} (toy), {REAL['batch']} (real)")
    train.add_argument("--lr", type=share, default=3e-4, help="AdamW's, for theta (the adapters)")
    train.add_argument("--alpha-lr", type=share, default=5e-3, help="AdamW's, for alpha (the logit adjustment)")
    train.add_argument("--inner-steps", type=count, default=3, help="BOME's T: gradient steps to theta_T")
    train.add_argument("--inner-lr", type=share, default=0.1, help="their size")
    train.add_argument("--eta", type=share, default=3.0, help="BOME's eta: how hard the training loss holds")
    train.add_argument("--entropy-of", default="adjusted", choices=["adjusted", "raw"], help="logits the entropy looks at")
    train.add_argument("--reg-weight", type=share, default=0.3, help="w of the method reg")
    train.add_argument("--rank", type=count, default=8, help="of the adapters")
    train.add_argument("--lora-alpha", type=share, default=16.0, help="their scale is this / rank")
    train.add_argument("--pretrain-steps", type=count, default=1000, help="toy only")
    train.add_argument("--dpo-steps", type=size, default=60, help="toy only")
    args = parser.parse_args(argv)

    for name, value in (REAL if args.model else TOY).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.methods = METHODS if args.methods == "all" else list(dict.fromkeys(args.methods.split(",")))
    args.scoring = list(dict.fromkeys(args.scoring.split(",")))
    for what, given, known in (("method", args.methods, METHODS),
                               ("scoring", args.scoring, ["letter", "text-sum", "text-token", "text-char"])):
        for name in given:
            if name not in known:
                raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    if args.model and not args.train:
        raise ValueError("--model needs --train FILE, the questions to train on")
    if not args.model and (args.train or args.eval):
        raise ValueError("--train and --eval need --model DIR")
    if args.json is not None:
        check_output(args.json)
    if args.out is not None:
        folder = Path(args.out).absolute()
        while not folder.exists():
            folder = folder.parent
        if not args.out or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise NotADirectoryError(f"--out {args.out}: {folder} is not a directory that can be written")
    try:
        torch.zeros(1, device=args.device).item()
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {args.device}: not available here") from None
    return args


def main(argv=None):
    """Run, and turn what can go wrong outside the code into one sentence and an exit code: 2, or 130 for Ctrl-C."""
    kept = []
    try:
        run(parse(argv), kept)
    except (MemoryError, torch.OutOfMemoryError):
        print("train.py: out of memory; --batch, --limit, --rank and --dtype bfloat16 lower it", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrain.py: interrupted" + "".join(f"; what had finished is in {path}" for path in kept), file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
