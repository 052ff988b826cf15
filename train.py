"""The experiments: an overconfident model, calibrated in training, in and out of domain.

    python train.py                                             # the toy world, from birth to calibration
    python train.py --seeds 5 --methods all                     # every method on five worlds
    python train.py --model DIR --train FILE --eval FILE...     # the same loop on a real LLM
    torchrun --nproc_per_node 4 train.py ...                    # either on four devices, with the same result

Every method that trains is one *direction*: a function of the bilevel problem that says where
theta (LoRA adapters) and alpha (the logit adjustment) should move. `fit` is the one loop they
share. The file goes: several processes -> directions -> the loop -> scoring -> the toy's task -> a
real model's task -> running methods over tasks -> choosing hyperparameters -> the command line.
"""
import argparse
import collections
import contextlib
import copy
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path

if __name__ == "__main__":                                 # importing torch takes seconds: Ctrl-C is no traceback there
    at_ctrl_c = signal.signal(signal.SIGINT, lambda *_: os._exit(os.write(2, b"\ntrain.py: interrupted\n") and 130))

import torch
from torch import distributed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed
from tqdm import tqdm

from bilevel import (Bilevel, LogitAdjustment, Surrogate, assign, bome_direction, chunked, compare, exact_hypergradient, flatten,
                     negative_entropy, parametric_cross_entropy, persistent_direction, unflatten)
from data import (IGNORE, Asked, Prompter, World, check_disjoint, collate, kind_of, question_key, sample, stream, supervise,
                  within_context)
from metrics import (Parser, bootstrap_interval, check_output, complain, ece, evaluate, evaluate_open, fit_temperature,
                     group_answers, modal_answers, plot_accuracy, plot_reliability, plot_steps, reliability_diagram,
                     semantic_confidence, write_json)
from model import (PROJECTIONS, Config, Transformer, add_lora, generate, quantize_base, save_adapters, save_pretrained,
                   write_atomically)

# --- Several processes ---------------------------------------------------------------------------
# Under torchrun all processes do the same with the same random numbers, but each takes its share of the rows of every
# batch and of the options to score, and what they find is summed. So all of them hold the same theta and alpha.

@contextlib.contextmanager
def processes():
    """Join the other processes, if there are any; only the first of them prints."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or not distributed.is_torchelastic_launched():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group()                       # gloo for tensors on the CPU, nccl for those on a GPU
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if rank()[0] > 0:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield
    distributed.destroy_process_group()


def rank():
    """This process's number, and how many there are."""
    joined = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)


def summed(x):
    """x, any shape, replaced in place by its sum over all processes."""
    if rank()[1] > 1:
        distributed.all_reduce(x)
    return x


def summed_loss(part):
    """A loss of which this process has a part: its value is the sum of all parts, its gradient that of the part, until
    `Bilevel` sums the gradients."""
    return part + (summed(part.detach().clone()) - part.detach()) if rank()[1] > 1 else part


# --- The methods, as directions ------------------------------------------------------------------
# A direction takes the bilevel problem, the settings and a dict that holds the step's data and whatever
# the method carries from step to step. It returns where theta and alpha descend, and a report.

def ft_direction(problem, args, state):
    """Plain fine-tuning: theta along L_t, alpha stays."""
    L = problem.lower()
    L_t, L_a = problem.gradient(L)
    return unflatten(L_t, problem.theta), unflatten(0 * L_a, problem.alpha), {"lower": L.item()}


def binned_direction(problem, args, state, bins=10):
    """The regularised form of CFT (Xiao et al., ICML 2025, arXiv 2505.01997): fine-tuning on questions, and
    the top option's probability is pulled towards how often the options of its confidence bin were right
    in the last 50 steps, the others towards equal shares of the rest."""
    z = problem.outputs()                                  # (B, options)
    p, gold = z.softmax(-1), state["targets"]
    confidence, choice = p.detach().max(-1)
    bin_of = (confidence * bins).long().clamp_max(bins - 1)
    if state["step"] % 50 == 0:                            # the bins' accuracies, re-estimated
        right, count = state.get("counts", (z.new_zeros(bins), z.new_zeros(bins)))
        middle = (torch.arange(bins, device=z.device) + 0.5) / bins        # an empty bin is right as often as it says
        state["accuracy"] = torch.where(count > 0, right / count.clamp_min(1), middle)
        state["counts"] = z.new_zeros(bins), z.new_zeros(bins)
    for counts, amount in zip(state["counts"], ((choice == gold).to(z.dtype), torch.ones_like(confidence))):
        counts += summed(z.new_zeros(bins).index_add(0, bin_of, amount))
    top = state["accuracy"][bin_of][:, None]               # (B, 1)
    target = ((1 - top) / (p.shape[1] - 1)).expand_as(p).scatter(1, choice[:, None], top)
    L = problem.lower()
    g, a = problem.gradient(L - args.bin_weight * state["share"] * (target * z.log_softmax(-1)).sum(-1).mean())
    return unflatten(g, problem.theta), unflatten(0 * a, problem.alpha), {"lower": L.item()}


def reg_direction(problem, args, state):
    """Single level: theta and alpha both descend L + w F, the entropy as a plain regulariser."""
    L, F_value = problem.lower(), problem.upper()
    g_theta, g_alpha = problem.gradient(L + args.reg_weight * F_value)
    return (unflatten(g_theta, problem.theta), unflatten(g_alpha, problem.alpha),
            {"lower": L.item(), "upper": F_value.item()})


def iterate_direction(problem, args, state):
    """Uncoupled: a step on L, then a step on w F, in turn; theta and alpha follow both."""
    name, weight = (("upper", args.reg_weight) if state["step"] % 2 else ("lower", 1.0))
    value = getattr(problem, name)()
    g_theta, g_alpha = problem.gradient(weight * value)
    return unflatten(g_theta, problem.theta), unflatten(g_alpha, problem.alpha), {name: value.item()}


def calm_direction(problem, args, state):
    """CALM as published: both along BOME's joint direction."""
    return bome_direction(problem, args.inner_steps, args.inner_lr, args.eta)


def surrogate_direction(problem, args, state):
    """The improved first-order step: theta descends L alone, alpha the penalty's hypergradient at a surrogate that persists.
    A small lam and no momentum, for the noise of mini-batches; a tolerance that never holds alpha, as AdamW takes no more
    than the sign and size of many steps from it."""
    return persistent_direction(problem, state.setdefault("surrogate", Surrogate(lam=100.0, momentum=0.0, tolerance=1e9)))


def exact_direction(problem, args, state):
    """theta descends L, alpha the exact hypergradient by CG - where the Hessian has negative curvature,
    by CG on Gauss-Newton plus mu, which is biased."""
    h, report = hypergradient(problem, args)
    L = problem.lower()
    return unflatten(problem.gradient(L)[0], problem.theta), h, {"lower": L.item(), "upper": problem.upper().item(), **report}


def hypergradient(problem, args):
    """The hypergradient by CG at the current point, as a list, and a report: 1.0 in "gauss_newton" if it is Gauss-Newton's,
    and the relative "cg_residual" at which CG stopped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                    # theta is near its minimum, not at it: known and meant
        h, report = exact_hypergradient(problem, tol=1e-2, max_iter=args.products)
        indefinite = report["negative_curvature"]
        if indefinite:
            h, report = exact_hypergradient(problem, curvature="gauss-newton", damping=args.mu, tol=1e-2,
                                            max_iter=args.products)
    return h, {"gauss_newton": float(indefinite), "cg_residual": report["residual"]}


@dataclasses.dataclass
class Method:
    """A direction with the flags that make it this method; `strengths`: the flag that says how much of it, and values."""
    direction: callable
    flags: str
    strengths: tuple = ()


METHODS = {
    "aligned": None,                                       # the model before
    "ts": None, "ts-oracle": None,                         # T from domain A; T from the test set itself, a bound
    "ft": Method(ft_direction, "", ("steps", 75, 150, 300)),
    "ft-hot": Method(ft_direction, "--temperature 1.5", ("temperature", 1.35, 1.5, 1.8)),     # alpha fixed by hand
    "ls": Method(ft_direction, "--label-smoothing 0.1", ("label-smoothing", 0.05, 0.1, 0.2)),
    "cft": Method(ft_direction, "--choices", ("steps", 75, 150, 300)),
    "cft-binned": Method(binned_direction, "--choices", ("bin-weight", 0.3, 1.0, 3.0)),
    "reg": Method(reg_direction, "", ("reg-weight", 0.02, 0.05, 0.1)),
    "iterate": Method(iterate_direction, "", ("reg-weight", 0.01, 0.03, 0.1)),
    "calm": Method(calm_direction, "--mode vector --alpha-lr 1.4e-3", ("eta", 5, 10, 20)),
    "calm-scalar": Method(calm_direction, "--alpha-lr 1.4e-3", ("eta", 5, 10, 20)),
    "calm-persistent": Method(surrogate_direction, "--settle 0.5", ("alpha-lr", 2e-3, 2.8e-3, 4e-3)),
    "calm-exact": Method(exact_direction, "--settle 0.5", ("alpha-lr", 2e-3, 2.8e-3, 4e-3)),
    "uniform": None,                                       # every option alike: what "maximise entropy" wins by
}
STORY = ["aligned", "ts", "ft", "reg", "calm", "calm-scalar", "calm-persistent"]
ABLATIONS = ["calm-persistent/mode=vector", "calm-persistent/settle=0", "calm-scalar/settle=0.5", "calm/settle=0.5",
             "calm/entropy-of=raw", "calm/inner-steps=1", "calm/inner-steps=10", "calm/alpha-lr=5e-4",
             "calm/alpha-lr=5e-3"]
GAIN = [f"{name}/{phase}" for phase in ("steps=150/settle=0", "steps=300/settle=0.5")     # where does the gain come from?
        for name in (*(f"calm-scalar/inner-steps={T}" for T in (1, 3, 10, 100)), "calm-persistent", "calm-exact")]


# --- The loop they share -------------------------------------------------------------------------

@dataclasses.dataclass
class Task:
    """What an experiment hands to the methods, toy and real alike; B = examples a batch, T = tokens."""
    model: Transformer                                     # aligned, with adapters that are still the identity
    adapters: dict                                         # name -> parameter
    batch: callable                                        # B, generator -> ids, targets, (B, T) each: labelled, domain A
    inputs: callable                                       # B, generator -> ids, mask, (B, T) each: answer positions
    choices: callable                                      # B, generator -> Questions of domain A to train on, for cft
    valid: dict                                            # scoring -> Questions of domain A on which ts fits T
    tests: list                                            # (domain, scoring, Questions); these can be gone through again
    meaning: callable = None                               # tokens of a sampled answer -> what it means; None, "": nothing
    stop_ids: tuple = ()                                   # tokens that end an answer
    stop: dict = dataclasses.field(default_factory=dict)   # further arguments of `generate` that do


def answer_positions(questions):
    """Questions -> prompts (B, T) and a mask (B, T) that is true at each prompt's last token: the answer follows it."""
    ids, real = collate([q.prompt for q in questions])
    return ids, real & ~F.pad(real, (0, 1))[:, 1:]


@contextlib.contextmanager
def finish_the_step():
    """Ctrl-C waits for the end of the step, so that what is saved is whole: it fills the list that this yields. A second
    one does not wait."""
    interrupted = []

    def note(signum, frame):
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(signum)

    main_thread = threading.current_thread() is threading.main_thread()    # only it may handle signals
    before = signal.signal(signal.SIGINT, note) if main_thread else None
    try:
        yield interrupted
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, before)


ELSEWHERE = ("json", "out", "plot", "methods", "seeds", "resume", "save_every", "device", "merge", "of", "command")


def settings_of(args):
    """What must be the same for a run to be continued: everything but where things are written and when."""
    return {name: value for name, value in vars(args).items() if name not in ELSEWHERE}


def save(path, method, args, seed, problem, optimizer, generator, state, trace):
    """Everything that the steps to come depend on, tensors and plain types only, in one move."""
    carried = {name: state[name] for name in ("counts", "accuracy") if name in state}
    if "surrogate" in state:
        carried["surrogate"] = dataclasses.asdict(state["surrogate"])
    buffer = io.BytesIO()                                  # torch's own writer hides a full disk behind a RuntimeError
    torch.save({"method": method, "seed": seed, "settings": settings_of(args), "theta": problem.theta,
                "alpha": problem.alpha, "carried": carried, "optimizer": optimizer.state_dict(),
                "random": generator.get_state(), "trace": trace}, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda f: f.write(buffer.getbuffer()))


def read_checkpoint(path, device="cpu"):
    """The dict that `save` wrote; loading it runs no code."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        missing = {"method", "seed", "settings", "theta", "alpha", "carried", "optimizer", "random", "trace"} - set(saved)
    except Exception as error:                             # a torn file can make torch raise anything
        raise ValueError(f"{path}: not a checkpoint ({type(error).__name__})") from None
    if missing:
        raise ValueError(f"{path}: not a checkpoint of this program (it has no {', '.join(sorted(missing))})")
    return saved


def restore(path, method, args, seed, problem, optimizer, generator, state):
    """Put back what `save` wrote and return the trace, a report for every finished step; [] if the checkpoint is another
    method's or seed's."""
    saved = read_checkpoint(path, problem.theta[0].device)
    if (saved["method"], saved["seed"]) != (method, seed):
        return []
    if saved["settings"] != settings_of(args):
        raise ValueError(f"{path}: made with other settings; give the same flags, or another --out")
    assign(problem.theta + problem.alpha, saved["theta"] + saved["alpha"])
    optimizer.load_state_dict(saved["optimizer"])
    generator.set_state(saved["random"].cpu())
    state.update(saved["carried"])
    if "surrogate" in state:
        state["surrogate"] = Surrogate(**state["surrogate"])
    return saved["trace"]


def read_results(args):
    """The rows that an interrupted run left in --out; of its predictions only those of finished methods stay."""
    path, settings = Path(args.out, "results.json"), json.loads(json.dumps(settings_of(args)))
    predictions = path.with_name("predictions.jsonl")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        same = {name: saved["config"].get(name) for name in settings} == settings
        rows = [{key: math.nan if value is None else value for key, value in row.items()} for row in saved["rows"]]
        table(rows)                                        # has every row what is printed?
        finished = {(row["method"], row["seed"]) for row in rows}

        def stays(line):                                   # the last one may be torn
            whole = line.endswith(b"\n") and line.strip() and json.loads(line)
            return whole and (whole["method"], whole["seed"]) in finished

        if same and rank()[0] == 0:
            with open(predictions, "rb") as lines:
                write_atomically(predictions, lambda f: f.writelines(filter(stays, lines)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not the results of a run that can be continued ({error})") from None
    if not same:
        raise ValueError(f"{path}: made with other settings; give the same flags, or another --out")
    return rows


LOGITS_AT_ONCE = 2 ** 24                                   # positions x vocabulary: 64 MB in float32


def problem_of(task, adjustment, args, state):
    """CALM's bilevel problem on a task: L at the supervised tokens and F at the held-out answer positions of the step's
    data, which draw(generator) puts into `state`. Returns the problem and draw."""
    theta, alpha = list(task.adapters.values()), [p for p in adjustment.parameters() if p.requires_grad]
    theta_0 = [p.detach().clone() for p in theta]
    task.model.checkpointing, (number, ranks) = args.checkpointing, rank()

    def hidden_at(ids, mask):
        """The model's (N, C) at the N true places of mask (B, T): all that a loss has to see of the prompts, so with
        --micro-batch so many rows at a time run through the model, and once more in the backward pass."""
        part = lambda ids, mask: task.model.hidden(ids)[mask]
        if not 0 < args.micro_batch < len(ids):
            return part(ids, mask)
        rows = zip(ids.split(args.micro_batch), mask.split(args.micro_batch))
        return torch.cat([recomputed(part, *row, use_reentrant=False) for row in rows])

    def outputs():
        z = task.model.head(hidden_at(state["ids"], state["mask"]))        # (N, V), not (B, T, V)
        return adjustment(z).gather(1, state["options"]) if args.choices else z           # (B, options) or (N, V)

    def data_term(z, targets):
        if args.choices:
            return F.cross_entropy(z, targets)
        return parametric_cross_entropy(z, targets, adjustment, label_smoothing=args.label_smoothing)

    def mean_over(loss, hidden, *labels):                  # LOGITS_AT_ONCE of them at a time
        places = max(1, LOGITS_AT_ONCE // task.model.config.vocab_size)
        return chunked(loss, task.model.head, hidden, *labels, chunk=places)

    def lower():
        if args.choices:
            L = data_term(outputs(), state["targets"])
        else:
            L = mean_over(data_term, hidden_at(state["ids"], state["mask"]), state["targets"])
        moved = sum(((p - p_0) ** 2).sum() for p, p_0 in zip(theta, theta_0))
        return summed_loss(state["share"] * L + args.mu / 2 * moved / ranks)               # mu: one minimum, not a valley

    def entropy_term(z):
        return negative_entropy(z, adjustment if args.entropy_of == "adjusted" else None)

    def upper():
        F_value = mean_over(entropy_term, hidden_at(state["heldout"], state["heldout_mask"]))
        return summed_loss(state["heldout_share"] * F_value)

    def draw(generator):
        if args.choices:
            questions = task.choices(args.batch, generator)
            options = torch.tensor([sum(q.options, []) for q in questions])                  # (B, options), a token each
            (ids, mask), gold = answer_positions(questions), torch.tensor([q.gold for q in questions])
            new = {"ids": ids, "mask": mask, "targets": gold, "options": options}
        else:
            ids, targets = task.batch(args.batch, generator)
            new = {"ids": ids, "mask": targets != IGNORE, "targets": targets}
        new["heldout"], new["heldout_mask"] = task.inputs(args.batch, generator)
        mine = {key: x[number::ranks] for key, x in new.items()}
        for name, mask in (("share", "mask"), ("heldout_share", "heldout_mask")):          # of the places that count, here
            state[name] = int(mine[mask].sum()) / max(1, int(new[mask].sum()))
        if not args.choices:
            mine["targets"] = mine["targets"][mine["mask"]]                # (N,)
        state.update({key: x.to(theta[0].device) for key, x in mine.items()})

    return Bilevel(theta, alpha, lower, upper, outputs, lambda z: data_term(z, state["targets"]), summed), draw


def fit(task, method, args, seed):
    """Train the adapters and a fresh LogitAdjustment along the method's direction with AdamW; returns the
    adjustment and one report (dict of floats) a step. Every method starts from the same adapters.

    theta's learning rate is constant, then falls to zero over the second half. In the first `wait` and the last
    `settle` of the steps alpha is held and theta descends L alone: in a solution theta is at its minimum for *this* alpha.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in task.adapters.items():
            bound = 1 / math.sqrt(p.shape[1]) if "lora_A" in key else 0.0
            p.copy_((2 * torch.rand(p.shape, generator=generator) - 1) * bound)
    adjustment = LogitAdjustment(task.model.config.vocab_size, args.mode).to(task.model.embed_tokens.weight.device)
    with torch.no_grad():
        adjustment.log_scale.fill_(-math.log(args.temperature))
    state = {}                                             # the step's data, and what a method carries through the steps
    problem, draw = problem_of(task, adjustment, args, state)
    theta, alpha, direction = problem.theta, problem.alpha, METHODS[method.split("/")[0]].direction
    optimizer = torch.optim.AdamW([{"params": theta}, {"params": alpha, "lr": args.alpha_lr}], weight_decay=0.0)
    trace, checkpoint = [], Path(args.out or "", "checkpoint.pt")
    if args.resume and checkpoint.is_file():
        trace = restore(checkpoint, method, args, seed, problem, optimizer, generator, state)
    steps = tqdm(range(len(trace), args.steps), desc=method, leave=False, disable=None)
    with steps as bar, finish_the_step() as interrupted:
        for step in bar:
            moving = args.steps * args.wait <= step < args.steps * (1 - args.settle)         # alpha, that is
            optimizer.param_groups[0]["lr"] = args.lr * min(1, 2 * (1 - step / args.steps))
            state["step"] = step
            draw(generator)
            d_theta, d_alpha, report = (direction if moving else ft_direction)(problem, args, state)
            for key in ("lower", "upper"):
                if not math.isfinite(report.get(key, 0.0)):
                    last = f"; the last good checkpoint is {checkpoint}" if checkpoint.is_file() else ""
                    raise FloatingPointError(f"{method}: the {key} loss is {report[key]} at step {step}; "
                                             f"try a smaller --lr or --alpha-lr{last}")
            if args.check and step % args.check == args.check - 1 and moving:
                truth, about = hypergradient(problem, args)
                report |= {**compare(report.get("direction", flatten(d_alpha, alpha)), flatten(truth, alpha)), **about}
            for p, d in zip(theta + alpha, d_theta + (d_alpha if moving else [None] * len(alpha))):
                p.grad = d                                 # without one AdamW passes over a parameter
            optimizer.step()
            trace.append({key: value for key, value in report.items() if isinstance(value, float)})
            trace[-1]["log_scale"] = adjustment.log_scale.mean().item()
            bar.set_postfix({k: f"{v:.3f}" for k, v in trace[-1].items()})
            stop = summed(torch.tensor(float(len(interrupted)))) > 0       # anywhere
            if args.out and (stop or args.save_every and (step + 1) % args.save_every == 0) and rank()[0] == 0:
                save(checkpoint, method, args, seed, problem, optimizer, generator, state, trace)
            if stop:
                raise KeyboardInterrupt
    if not all(p.isfinite().all() for p in theta + alpha):
        raise FloatingPointError(f"{method}: a parameter is not finite after the last step; "
                                 "try a smaller --lr or --alpha-lr")
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
    number, ranks = rank()
    scores, longest, jobs = equal_scores(questions), len(jobs[-1][2]), jobs[number::ranks]
    with tqdm(total=len(jobs), desc="scoring", leave=False, disable=True if longest < 8 else None) as bar:  # not the toy
        while jobs:
            size = max(1, tokens_at_once // len(jobs[-1][2]))
            chunk, jobs = jobs[-size:], jobs[:-size]       # longest first: memory peaks at once, not late
            ids, _ = collate([run for _, _, run in chunk])
            hidden = model.hidden(ids.to(device))          # (B, T, C)
            rows, columns = [], []                         # where tokens are predicted
            entries = []                                   # (question, option, which of these places, token)
            for row, (i, options, _) in enumerate(chunk):
                q, first = questions[i], len(rows)
                depth = max(len(q.options[j]) for j in options)
                rows += [row] * depth
                columns += range(len(q.prompt) - 1, len(q.prompt) - 1 + depth)
                entries += [(i, j, first + t, token) for j in options for t, token in enumerate(q.options[j])]
            z = model.head(hidden[rows, columns])          # (places, V)
            log_p = (z if adjustment is None else adjustment(z)).float().log_softmax(-1)
            i, j, place, token = torch.tensor(entries).T
            scores.index_put_((i, j), log_p[place.to(device), token.to(device)].cpu().double(), accumulate=True)
            bar.update(len(chunk))
    summed(scores)
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
    with tqdm(range(args.pretrain_steps), desc=f"world {seed}: pretraining", leave=False, disable=None) as bar:
        for step in bar:
            warm, cool = min(1, (step + 1) / 50), 1 - step / args.pretrain_steps
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * warm * cool
            ids, targets = (x.to(args.device) for x in world.sentences(256, "all", "all", generator))
            answers = targets != IGNORE                    # only the answer can be learnt
            loss = F.cross_entropy(model.head(model.hidden(ids)[answers]), targets[answers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def align(model, world, args, seed, domain="B"):
    """DPO (Rafailov et al., 2023, arXiv 2305.18290) on one domain: overconfident there, by the rater's taste."""
    reference, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    for _ in tqdm(range(args.dpo_steps), desc=f"world {seed}: DPO", leave=False, disable=None):
        prompts, chosen, rejected = (x.to(args.device) for x in world.preferences(256, domain, generator))
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
    """World `seed`: aligned on one domain, the other domain's data to train on."""
    world, trained = World(seed, shared=args.shared), args.train_domain
    aligned = {"A": "B", "B": "A"}[trained]
    model = align(pretrain(world, args, seed), world, args, seed, aligned).eval()
    generator = torch.Generator().manual_seed(seed)

    def inputs(n, g):
        ids, _ = world.prompts(n, trained, "heldout", g)                         # (n, 4)
        return ids, torch.arange(ids.shape[1]).expand_as(ids) == ids.shape[1] - 1         # the answer follows the last

    def ask(domain, split, scoring):
        if scoring == "open":
            return world.open_questions(args.open_limit, domain, split, generator)
        return world.questions(args.limit, domain, split, generator)

    scorings = [scoring for scoring in ("letter", "open") if scoring in args.scoring]
    valid = {scoring: ask(trained, "valid", scoring) for scoring in scorings}
    tests = [(name, scoring, ask(domain, "test", scoring)) for scoring in scorings
             for name, domain in (("id", trained), ("ood", aligned))]

    def few(draw):
        """draw(n, g) from --train-limit rows that are drawn once; all of them if n is as many."""
        if not args.train_limit:
            return draw
        pool = draw(args.train_limit, generator)

        def again(n, g):
            rows = torch.randperm(args.train_limit, generator=g)[:n]
            return [x[rows] for x in pool]
        return again

    return Task(model, add_lora(model, args.rank, args.lora_alpha),
                batch=few(lambda n, g: world.sentences(n, trained, "train", g)), inputs=few(inputs),
                choices=lambda n, g: world.questions(n, trained, "train", g), valid=valid, tests=tests,
                meaning=lambda answer: world.meaning.get(tuple(answer), tuple(answer) or None), stop_ids=(world.END,))


# --- A real model's task -------------------------------------------------------------------------

HOLDS = {"mcqa": "multiple-choice questions", "qa": "open questions", "instructions": "instructions"}


def real_rows(args, generator):
    """The rows of --train and --eval -> the kind of the first, its parts {"training", "held-out" (the upper level's inputs),
    "validation" (T's)}, and the test sets, {name: (rows, the scorings that fit them)}.

    The rest of the training file is the test set "id", unless there is nothing to test in it. No test set has a question
    (by its text) of the three parts.
    """
    kinds = {path: kind_of(path) for path in [args.train, *args.eval]}
    fitting = {"mcqa": args.scoring, "qa": [s for s in args.scoring if s == "open"], "instructions": []}
    kind = kinds[args.train]
    for path in args.eval:
        if not fitting[kinds[path]]:
            need = "need --scoring open" if kinds[path] == "qa" else "can be trained on, not tested"
            raise ValueError(f"{path}: holds {HOLDS[kinds[path]]}, which {need}")
    if not fitting[kind] and not args.eval:
        raise ValueError(f"{args.train}: holds {HOLDS[kind]}, so what is tested must come from --eval")
    if kind != "mcqa" and any(its.choices for its in args.of.values()):
        raise ValueError(f"{args.train}: cft trains on option letters, and this file holds {HOLDS[kind]}")

    rows = ({**row, "id": i} for i, row in enumerate(stream(args.train, kind, args.skip_bad)))
    unique = list({question_key(row): row for row in rows}.values())
    n, tenths = len(unique), 6 if fitting[kind] else 8
    if n < 10:
        raise ValueError(f"{args.train}: {n} different questions are too few to split")
    unique = sample(unique, n, generator)
    cuts = [n * i // 10 for i in (0, tenths, tenths + 1, tenths + 2, 10)]
    limits = (args.train_limit, args.limit, args.limit, args.limit)
    train, heldout, valid, test = (unique[a:b][:limit] for a, b, limit in zip(cuts, cuts[1:], limits))
    parts = {"training": train, "held-out": heldout, "validation": valid}

    used = {question_key(row) for rows in parts.values() for row in rows}
    tests, dropped = {"id": (test, fitting[kind])} if fitting[kind] else {}, collections.Counter()

    def unused(path):
        for i, row in enumerate(stream(path, kinds[path], args.skip_bad)):
            if question_key(row) in used:
                dropped[path] += 1
            else:
                yield {**row, "id": i}

    for path in args.eval:
        name = Path(path).name.split(".")[0]
        if name in tests:
            raise ValueError(f"{path}: another test set is called {name!r} already")
        tests[name] = sample(unused(path), args.limit, generator), fitting[kinds[path]]
        if dropped[path]:
            print(f"{path}: {dropped[path]} rows left out, their questions are among the training or held-out ones")
    for name, (rows, _) in tests.items():
        check_disjoint(**parts, **{f"{name} test": rows})
        if not rows:
            raise ValueError(f"{name}: no question is left to evaluate")
    return kind, parts, tests


def real_task(args, seed):
    """A Hugging Face model, and files of questions: the training file, of any kind, is domain A. The upper level looks at
    one position of a held-out prompt: its last, where the answer starts."""
    prompter, generator = Prompter(args.model), torch.Generator().manual_seed(seed)
    kind, parts, tests = real_rows(args, generator)
    model = Transformer.from_pretrained(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    room = {form: model.config.max_position_embeddings - (args.answer_tokens if form == "open" else 0)     # for a prompt
            for form in ("letter", "text", "open")}

    def form_of(scoring):                                  # "text-sum" and "text-char" ask alike
        return scoring.split("-")[0] if kind == "mcqa" else "open"

    def ask(rows, form, what):
        """The rows as `Questions`, once they are known to fit the model."""
        questions, fitting, last = Asked(rows, prompter, form, room[form]), 0, 0
        for q in questions:
            fitting, last = fitting + 1, max(last, *q.prompt, *sum(q.options, []))
        if fitting < len(rows):
            print(f"{what}, {form}: {len(rows) - fitting} questions left out, longer than the context of {room[form]} tokens")
        if last >= model.config.vocab_size:
            raise ValueError(f"{args.model}: the tokenizer has token {last}, "
                             f"the model's vocabulary ends at {model.config.vocab_size - 1}")
        if not fitting:
            raise ValueError(f"{what}: no question fits into the context of {room[form]} tokens")
        return questions

    valid = {scoring: ask(parts["validation"], form_of(scoring), "validation") for scoring in args.scoring}
    forms = sorted({form_of(scoring) for scoring in args.scoring})
    heldout = [q for form in forms for q in ask(parts["held-out"], form, "held-out")]
    tests = [(name, scoring, ask(rows, scoring.split("-")[0], name)) for name, (rows, fitting) in tests.items()
             for scoring in fitting]

    def draw(n, g, forms):
        questions, misses, rows = [], 0, parts["training"]
        while len(questions) < n:                          # what is longer than the context is drawn again
            row, form = rows[int(torch.randint(len(rows), (), generator=g))], forms[len(questions) % len(forms)]
            fitting, too_long = within_context([prompter.question(row, form)], room[form])
            questions += fitting
            misses = misses + too_long if too_long else 0
            if misses == 1000:
                raise ValueError(f"{args.train}: 1000 training questions in a row do not fit into the context of "
                                 f"{room[form]} tokens")
        return questions

    def batch(n, g):
        return supervise([(q.prompt, q.options[q.gold]) for q in draw(n, g, forms)])

    def inputs(n, g):
        return answer_positions([heldout[i] for i in torch.randint(len(heldout), (n,), generator=g).tolist()])

    def choices(n, g):
        questions = draw(n, g, ["letter"])
        if len({len(q.options) for q in questions}) > 1:
            raise ValueError(f"{args.train}: cft needs questions that all have as many options")
        return questions

    print(f"{args.model}: prompts in {prompter.form} form; "
          + ", ".join(f"{len(rows)} {name}" for name, rows in parts.items()) + " questions")
    if args.show_prompt:
        first = {}                                         # scoring -> the first test set with it
        for name, scoring, questions in tests:
            first.setdefault(scoring, (name, questions))
        for scoring, (name, questions) in first.items():
            print(f"\n{name}, {scoring} scoring\n{prompter.show(next(iter(questions)))}")
    if args.quantize:
        quantize_base(model)
    text = lambda tokens: prompter.tokenizer.decode(tokens).lstrip()
    adapters = add_lora(model, args.rank, args.lora_alpha, args.targets.split(","))
    return Task(model, adapters, batch, inputs, choices, valid, tests,
                meaning=lambda tokens: text(tokens).partition("\n")[0],    # an answer ends with its first line
                stop_ids=prompter.stop_ids, stop={"stop": ("\n",), "decode": text})


# --- Methods over tasks --------------------------------------------------------------------------

def gold_of(questions):
    """The index of the right option of every question, (n,)."""
    return torch.tensor([q.gold for q in questions])


def scores_of(task, adjustment, questions, scoring):
    """`score_options` by the rule a scoring names: "text-char" divides by characters, "letter" and "open" by nothing."""
    rule = scoring.split("-")[1] if "-" in scoring else "sum"
    return score_options(task.model, adjustment, questions, rule)


QUESTIONS_AT_ONCE = 1024                                   # put into tokens and scored; only results are kept
LOGITS_TO_FIT = 2 ** 26                                    # answer tokens x vocabulary from which T is fitted: 256 MB


def parts_of(questions):
    """The questions, QUESTIONS_AT_ONCE of them at a time."""
    questions = iter(questions)
    return iter(lambda: list(itertools.islice(questions, QUESTIONS_AT_ONCE)), [])


def joined(parts):
    """Scores of all parts, (n, most options); -inf where a question has fewer."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=-torch.inf) for part in parts])


@torch.no_grad()
def answer_logits(model, questions):
    """Logits (N, V) where the tokens of the right answers are predicted, and these tokens, (N,): LOGITS_TO_FIT / V at most."""
    logits, tokens, most = [], [], LOGITS_TO_FIT // model.config.vocab_size
    for q in questions:
        ids, targets = (x.to(model.embed_tokens.weight.device) for x in supervise([(q.prompt, q.options[q.gold])]))
        logits.append(model.head(model.hidden(ids)[targets != IGNORE]).float().cpu())
        tokens.append(targets[targets != IGNORE].cpu())
        if sum(map(len, tokens)) >= most:
            break
    return torch.cat(logits)[:most], torch.cat(tokens)[:most]


def temperature_of(task, questions, scoring):
    """T by the NLL of the right options or, if questions have none but the right answer, of its tokens."""
    if len(next(iter(questions)).options) == 1:
        return fit_temperature(*answer_logits(task.model, questions))
    parts = [(scores_of(task, None, part, scoring), gold_of(part)) for part in parts_of(questions)]
    return fit_temperature(joined([scores for scores, _ in parts]), torch.cat([gold for _, gold in parts]))


def train_method(task, method, args, seed):
    """Bring the task's model to where `method` takes it. Returns the adjustment and the trace; None and [] for a method that
    trains nothing."""
    if METHODS[method.split("/")[0]] is None:
        with torch.no_grad():
            for key, p in task.adapters.items():
                if "lora_B" in key:
                    p.zero_()                              # the aligned model again
        return None, []
    adjustment, trace = fit(task, method, args, seed)
    if args.out and args.model and rank()[0] == 0:
        folder = Path(args.out) / f"{method.replace('/', '_')}-{seed}"
        save_adapters(task.model, folder, adjustment)
        if args.merge:
            save_pretrained(task.model, folder / "merged", adjustment)
            print(f"{folder / 'merged'}: a full model, LoRA and exp(log_scale) in its weights" + (
                "; the offset is lm_head.bias: a reader that knows no bias there, as transformers, ignores it and "
                "predicts softmax(exp(log_scale) z)" if adjustment.offset.any() else ", complete for any reader"))
    return adjustment, trace


def answer_by_option(task, questions, scoring, adjustment, T, uniform, tell):
    """The row of metrics of options scored by the model, and confidence and correctness, (n,) each."""
    scores, gold = [], []
    for part in parts_of(questions):
        scores.append(equal_scores(part) if uniform else scores_of(task, adjustment, part, scoring) / T)
        for q, p in zip(part, scores[-1].softmax(-1)):
            tell(len(gold), q, probabilities=p[:len(q.options)].tolist(), choice=int(p.argmax()), gold=q.gold)
            gold.append(q.gold)
    p, gold = joined(scores).softmax(-1), torch.tensor(gold)               # (n, most options), (n,)
    confidence, correct = p.max(-1).values, p.argmax(-1) == gold
    low, high = bootstrap_interval(ece, confidence, correct, trials=200)
    return {**evaluate(p, gold), "conf_ece_low": low, "conf_ece_high": high}, confidence, correct


def answer_in_words(task, questions, args, adjustment, T, label, tell):
    """The same of sampled answers, grouped by meaning; confidence and correctness of the questions that have an answer."""
    classes, golds = [], []
    for i, q in enumerate(tqdm(questions, desc=f"{label}: answers", leave=False, disable=None)):
        drawn = generate(task.model, q.prompt, args.answer_tokens, T, args.samples, adjustment, task.stop_ids, seed=i,
                         **task.stop)
        answers = [task.meaning(answer) for answer in drawn]
        classes.append(group_answers(answers, q.answers) if q.answers else answers)
        golds.append(q.answers[0] if q.answers else q.options[q.gold][0])
        choice, confidence = semantic_confidence(classes[-1])
        tell(i, q, samples=answers, classes=classes[-1], choice=choice,
             confidence=None if choice is None else confidence, gold=golds[-1])
    confidence, correct, _ = modal_answers(classes, golds)
    return evaluate_open(classes, golds), confidence, correct


def run_method(task, method, args, seed, note=lambda prediction: None):
    """One method on one task: a row of numbers and (title, confidence, correct) for every test set, and the trace. `note`
    is given a dict a question as soon as it is answered."""
    adjustment, trace = train_method(task, method, args, seed)
    learnt = {"log_scale": trace[-1]["log_scale"]} if trace else {}
    for key in ("cosine", "relative_error", "gauss_newton", "cg_residual"):                # means over the steps looked at
        known = [step[key] for step in trace if not math.isnan(step.get(key, math.nan))]
        if known:
            learnt[key] = sum(known) / len(known)
    rows, panels = [], []
    for domain, scoring, questions in task.tests:
        if (method, scoring) == ("uniform", "open"):
            continue
        about, T = {"method": method, "seed": seed, "domain": domain, "scoring": scoring}, 1.0
        if args.train_domain != "A":
            about["trained_on"] = args.train_domain
        if method in ("ts", "ts-oracle"):
            T = temperature_of(task, task.valid[scoring] if method == "ts" else questions, scoring)
            learnt = {"temperature": T}

        def tell(i, q, **answer):
            note({**about, "domain": f"{domain}, {scoring}", "id": i if q.id is None else q.id, **answer})

        if scoring == "open":
            numbers, *panel = answer_in_words(task, questions, args, adjustment, T, method, tell)
        else:
            numbers, *panel = answer_by_option(task, questions, scoring, adjustment, T, method == "uniform", tell)
        rows.append({**about, **numbers, **learnt})
        if len(panel[0]):                                  # some answer was not empty
            panels.append((f"{method}, {domain}, {scoring}", *panel))
    return rows, panels, trace


COLUMNS = ["accuracy", "conf_ece", "cw_ece", "nll", "auroc"]          # --json has them all
OPEN_COLUMNS = ["accuracy", "confidence", "sem_ece", "sem_ece_split"]


def table(rows):
    """The rows as text, a section for each test set. One seed: the calibration error with its bootstrap interval. Several:
    mean +- standard deviation, and in how many of them the error is below that of aligned, and of ts."""
    lines, sections = [], {}
    for row in rows:
        sections.setdefault((row.get("trained_on", "A"), row["scoring"], row["domain"]), []).append(row)
    for (trained, scoring, domain), here in sections.items():
        columns, error = (OPEN_COLUMNS, "sem_ece") if scoring == "open" else (COLUMNS, "conf_ece")
        if any("cosine" in row for row in here):           # --check
            columns = ["accuracy", "conf_ece", "nll", "log_scale", "cosine", "relative_error", "cg_residual"]
        n, seeds = "/".join(sorted({str(row["n"]) for row in here})), len({row["seed"] for row in here})
        of = {}                                            # method -> its rows
        for row in here:
            of.setdefault(row["method"], []).append(row)
        errors = {method: {row["seed"]: row[error] for row in its} for method, its in of.items()}
        rivals = [name for name in ("aligned", "ts") if seeds > 1 and name in of]
        width = max(16, *(len(method) + 2 for method in of))
        widths = {column: 22 if column == error else 17 for column in columns}

        lines.append(f"\n{domain}, {scoring} scoring, n = {n}" + ", trained on B and aligned on A" * (trained == "B"))
        lines.append(f"  {'method':{width}s}" + "".join(f"{column:>{widths[column]}s}" for column in columns)
                     + "".join(f"{'< ' + name:>11s}" for name in rivals))
        for method, its in of.items():
            line = f"  {method:{width}s}"
            for column in columns:
                values = [row[column] for row in its if column in row]
                mean = sum(values) / max(1, len(values))   # statistics.mean and stdev know no NaN
                deviation = (sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)) ** 0.5
                cell = "-" if not values else f"{mean:.3f}" + (f" +- {deviation:.3f}" if len(values) > 1 else "")
                if column == error and seeds == 1:
                    cell += f" [{its[0][f'{error}_low']:.3f}, {its[0][f'{error}_high']:.3f}]"
                line += cell.rjust(widths[column])
            for name in rivals:
                wins = sum(value < errors[name][seed] for seed, value in errors[method].items() if seed in errors[name])
                line += f"{'-' if method == name else f'{wins} of {seeds}':>11s}"
            lines.append(line)
        for method, its in of.items():
            if "temperature" in its[0]:
                lines.append(f"  T of {method}: " + ", ".join(f"{row['temperature']:.2f}" for row in its))
    return "\n".join(lines)


def document(args, rows, **more):
    """What --json holds: how the run was started, and its rows."""
    config = {name: value for name, value in vars(args).items() if name not in ("json", "out", "plot", "of", "command")}
    return {"command": args.command, "config": config, "rows": rows, **more}


def run(args, kept):
    """Every method on every task; `kept` lists the files written so far."""
    if not args.model:
        torch.set_num_threads(1)                           # tensors this small only lose by sharing
    shown, traces, results = [], {}, Path(args.out or "", "results.json")
    rows = read_results(args) if args.resume and results.is_file() else []
    writes, begun = args.out and rank()[0] == 0, bool(rows)
    for seed in range(args.world_seed, args.world_seed + args.seeds):
        task = real_task(args, seed) if args.model else toy_task(args, seed)
        for method in args.methods:
            if any((row["method"], row["seed"]) == (method, seed) for row in rows):
                continue                                   # --resume: it had finished
            with tempfile.TemporaryFile() as lines:        # --out has all predictions of a method, or none
                note = lambda prediction: writes and lines.write((json.dumps(prediction) + "\n").encode("utf-8"))
                new, panels, trace = run_method(task, method, args.of[method], seed, note)
                rows += new
                errors = [f"{r['domain']} {r['scoring']} {r.get('conf_ece', r.get('sem_ece')):.3f}" for r in new]
                print(f"seed {seed}, {method}: error {', '.join(errors)}", flush=True)
                if writes:
                    results.parent.mkdir(parents=True, exist_ok=True)
                    with open(results.with_name("predictions.jsonl"), "ab" if begun else "wb") as f:
                        lines.seek(0)
                        shutil.copyfileobj(lines, f)
                    write_json(results, document(args, rows))
                    begun, kept[:] = True, [results]
            if seed == args.world_seed and method in ("aligned", "ts", "calm", "calm-persistent"):
                shown += [panel for panel in panels if panel[0].endswith(args.scoring[0])]
            if seed == args.world_seed and "calm" in method:
                traces[method] = trace
    if args.json is not None:
        write_json(args.json, document(args, rows))
    if args.plot:
        folder, choices = Path(args.plot), [row for row in rows if "conf_ece" in row and row["method"] != "uniform"]
        folder.mkdir(parents=True, exist_ok=True)
        for draw, what, name in ((plot_reliability, shown, "reliability"), (plot_steps, traces, "trajectory"),
                                 (plot_accuracy, choices, "pareto")):
            if what:
                draw(what, folder / f"{name}.png")
    for title, confidence, correct in shown:
        print("\n" + reliability_diagram(confidence, correct, title=title))
    print(table(rows), flush=True)


# --- Choosing hyperparameters, by in-domain data only --------------------------------------------

LEARNING_RATES = (1e-3, 3e-3)


def settings_to_try(method, args):
    """On the toy a method without a slash stands for six settings of it: three strengths, two learning rates of theta."""
    if args.model or "/" in method or not METHODS[method]:
        return [method]
    flag, *strengths = METHODS[method].strengths
    return [f"{method}/{flag}={strength:g}/lr={lr:g}" for strength in strengths for lr in LEARNING_RATES]


def select(args):
    """Of several settings of a method the best, by domain A's validation questions, which no loss has seen, over the
    worlds (real: splits of the file) of --world-seed and --seeds.

    The rule on the toy, where A is calibrated and the best for A alone were to do nothing: among the settings whose
    mean conf-ECE is at most 0.05 and whose mean accuracy is at most 0.01 below the aligned model's, the one whose
    answers have the most entropy - how much uncertainty does it buy for what A may lose? - and if there is none, the
    one with the lowest conf-ECE. The rule for a real model, which is not calibrated on A: the lowest NLL.
    """
    if not args.model:
        torch.set_num_threads(1)
    found, scoring = {method: [] for method in args.methods}, args.scoring[0]
    for seed in range(args.world_seed, args.world_seed + args.seeds):
        task = real_task(args, seed) if args.model else toy_task(args, seed)
        questions = list(task.valid[scoring])
        if len(questions[0].options) == 1:
            raise ValueError(f"{args.train}: --select needs multiple-choice questions to compare settings by")
        for method in args.methods:
            adjustment, _ = train_method(task, method, args.of[method], seed)
            p = scores_of(task, adjustment, questions, scoring).softmax(-1)
            entropy = float(torch.special.entr(p).sum(-1).mean())
            found[method].append({**evaluate(p, gold_of(questions)), "entropy": entropy})
    keys = ("conf_ece", "accuracy", "nll", "entropy")
    rows = [{"method": name, "flags": " ".join("--" + setting.replace("=", " ") for setting in settings),
             **{key: sum(row[key] for row in found[method]) / args.seeds for key in keys}}
            for method in args.methods for name, *settings in [method.split("/")]]
    chosen = {}
    for name in dict.fromkeys(row["method"] for row in rows[1:]):
        here = [row for row in rows if row["method"] == name]
        allowed = [row for row in here if row["conf_ece"] <= 0.05 and row["accuracy"] >= rows[0]["accuracy"] - 0.01]
        if args.model:
            best = min(here, key=lambda row: row["nll"])
        elif allowed:
            best = max(allowed, key=lambda row: row["entropy"])
        else:
            best = min(here, key=lambda row: row["conf_ece"])
        chosen[name] = best["flags"]
    print("validation questions of domain A")
    for row in rows:
        print(f"  {row['method']:16s} {row['flags']:38s}" + "".join(f" {key} {row[key]:.3f}" for key in keys)
              + "  <- chosen" * (chosen.get(row["method"]) == row["flags"]))
    if args.json is not None:
        write_json(args.json, document(args, rows, chosen=chosen))


# --- The command line ----------------------------------------------------------------------------

REAL = ("--steps 20 --batch 8 --limit 200 --world-seed 0 --scoring letter,text-char --answer-tokens 16 "
        "--lr 3e-4 --inner-lr 0.1").split()
CHOSEN = {                                                 # by select(), on worlds 0-2: tests/results/selection.json
    "ft": "--steps 150 --lr 0.003",
    "ft-hot": "--temperature 1.5 --lr 0.001",
    "ls": "--label-smoothing 0.2 --lr 0.003",
    "cft": "--steps 75 --lr 0.003",
    "cft-binned": "--bin-weight 3 --lr 0.003",
    "reg": "--reg-weight 0.05 --lr 0.001",
    "iterate": "--reg-weight 0.03 --lr 0.003",
    "calm": "--eta 10 --lr 0.003",
    "calm-scalar": "--eta 10 --lr 0.003",
    "calm-persistent": "--alpha-lr 0.0028 --lr 0.001",
    "calm-exact": "--alpha-lr 0.0028 --lr 0.003",
}


def number(kind, low, high=10 ** 9):
    """An argparse type: numbers of this kind from `low` to `high`."""
    def convert(text):
        value = kind(text)
        if not low <= value <= high:                       # NaN is neither
            raise argparse.ArgumentTypeError(f"{text} is " + (f"below {low}" if value < low else f"not a number up to {high}"))
        return value
    convert.__name__ = kind.__name__                       # argparse says "invalid int value"
    return convert


def command_line():
    """The parser, and the names of the flags that may follow a method after slashes: those of the group "training"."""
    count, size, share = number(int, 1), number(int, 0), number(float, 0.0)
    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    a = parser.add_argument
    a("--methods", default=",".join(STORY), help=f"comma-separated, of {', '.join(METHODS)}; or all, ablations, strengths, "
      "gain; settings of one method follow its name: calm/inner-steps=10")
    a("--seeds", type=count, default=1, help="how many worlds (toy) or repetitions (real)")
    a("--world-seed", type=size, default=100, help="the first seed (a real model: 0)")
    a("--json", metavar="PATH", help="write every printed number there")
    a("--out", metavar="DIR", help="keep results.json, predictions.jsonl and a real model's adapters there, renewed after "
      "every method")
    a("--plot", metavar="DIR", help="PNGs of reliability, of CALM's steps and of accuracy against calibration; needs "
      "matplotlib")
    a("--device", default="auto", help="cuda, mps, cpu; auto: the first of these there is")
    a("--limit", type=count, default=4000, help="questions a test set, and held out (a real model: 200)")
    a("--train-limit", type=count, metavar="N", help="train on so many examples (toy: and as many held-out inputs) at most; "
      "--batch N is all of them")
    a("--scoring", default="letter", help="toy: letter, open; a real model: any of letter, text-sum, text-token, text-char, "
      "open (letter,text-char)")
    a("--select", action="store_true", help="choose among settings of the methods by validation questions of domain A")

    a = parser.add_argument_group("the toy world").add_argument
    a("--train-domain", default="A", choices=["A", "B"], help="trained on; the other one is aligned, and out of domain")
    a("--shared", type=number(int, 0, 16), default=2, help="of a domain's 16 value tokens, those that are the other's as well")
    a("--pretrain-steps", type=count, default=2200, help="of 256 sentences")
    a("--dpo-steps", type=size, default=60, help="of 256 comparisons")
    a("--open-limit", type=count, default=300, help="questions a test set with --scoring open")

    a = parser.add_argument_group("a real model").add_argument
    a("--model", metavar="DIR", help="a Hugging Face directory: Llama, Mistral, OLMo 2, Qwen 2 or Qwen 3")
    a("--train", metavar="FILE", help="to train on, domain A: multiple choice (MMLU, ARC, OpenBookQA, MedMCQA), open "
      "questions (PopQA, TriviaQA), instructions (Alpaca), or any of these as JSON lines; told apart by content")
    a("--eval", metavar="FILE", nargs="+", action="extend", default=[], help="questions to test on: multiple choice, or with "
      "--scoring open either kind")
    a("--skip-bad", action="store_true", help="count and skip lines that cannot be read")
    a("--show-prompt", action="store_true", help="before the run print the first prompt, its tokens and what is scored")
    a("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the frozen weights")
    a("--quantize", action="store_true", help="the frozen weights of the layers in 4 bits, NF4")
    a("--targets", default=",".join(PROJECTIONS), metavar="NAMES", help="layers with adapters: ends of their names, with "
      "wildcards")
    a("--merge", action="store_true", help="with --out: also a full model a method, adapters and logit adjustment in its "
      "weights")

    group = parser.add_argument_group("training")
    a = group.add_argument
    a("--steps", type=count, default=300, help="of every method that trains (a real model: 20)")
    a("--batch", type=count, default=64, help="examples a step (a real model: 8)")
    a("--micro-batch", type=size, default=0, metavar="N", help="so many rows in memory at a time, at a third more work; 0: "
      "the batch")
    a("--checkpointing", action="store_true", help="a layer in memory at a time, at a third more work")
    a("--lr", type=share, default=1e-3, help="AdamW's, for theta (the adapters; a real model: 3e-4)")
    a("--alpha-lr", type=share, default=3e-3, help="AdamW's, for alpha (the logit adjustment)")
    a("--mode", default="scalar", choices=["scalar", "vector"], help="alpha: one log_scale, or a log_scale and an offset a "
      "token")
    a("--wait", type=share, default=0.0, help="share of the steps, at the start, in which alpha is held")
    a("--settle", type=share, default=0.0, help="the same at the end")
    a("--mu", type=share, default=0.001, help="L has mu/2 |theta - theta_0|^2, theta_0 the adapters at the start")
    a("--inner-steps", type=count, default=3, help="BOME's T: gradient steps to theta_T")
    a("--inner-lr", type=share, default=0.1, help="their size")
    a("--eta", type=share, default=3.0, help="BOME's eta: how hard the training loss holds")
    a("--entropy-of", default="adjusted", choices=["adjusted", "raw"], help="logits the entropy looks at")
    a("--reg-weight", type=share, default=0.1, help="w of the methods reg and iterate")
    a("--label-smoothing", type=share, default=0.0, help="of L, as in the method ls")
    a("--temperature", type=number(float, 0.01), default=1.0, help="alpha starts at log_scale = -log of it")
    a("--choices", action="store_true", help="L is the loss on questions with their options, as in cft")
    a("--bin-weight", type=share, default=1.0, help="of the penalty of cft-binned")
    a("--products", type=count, default=20, help="of CG, in calm-exact and --check")
    a("--check", type=size, default=0, help="compare alpha's direction with the exact hypergradient every so many steps")
    a("--save-every", type=size, default=0, metavar="N", help="with --out: checkpoint.pt every N steps, and at Ctrl-C")
    a("--resume", action="store_true", help="with --out: go on from what is there, checkpoint and finished methods (of "
      "which --plot then draws accuracy only)")
    a("--rank", type=count, default=8, help="of the adapters")
    a("--lora-alpha", type=share, default=16.0, help="their scale is this / rank")
    a("--samples", type=number(int, 2), default=10, help="answers to a question with --scoring open")
    a("--answer-tokens", type=count, default=4, help="the longest answer with --scoring open (a real model: 16)")
    return parser, {action.dest for action in group._group_actions}


def parse(argv):
    """Command line -> args, every value checked. args.of[method] is the same for each method: its own flags (and on the toy
    those chosen for it), then what the user typed, then what follows its name after slashes; later wins.
    ValueError or OSError says what is wrong."""
    parser, settings = command_line()
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.model:
        args = parser.parse_args(REAL + argv)
    args.command = "python train.py " + shlex.join(argv)
    many = {"all": list(METHODS), "ablations": ABLATIONS, "gain": GAIN,
            "strengths": [f"{name}/{m.strengths[0]}={s:g}" for name, m in METHODS.items() if m for s in m.strengths[1:]]}
    args.methods = list(dict.fromkeys(name for given in args.methods.split(",") for name in many.get(given, [given])))
    args.scoring = list(dict.fromkeys(args.scoring.split(",")))
    scorings = ["letter", "text-sum", "text-token", "text-char", "open"] if args.model else ["letter", "open"]
    for what, given, known in (("method", [method.split("/")[0] for method in args.methods], list(METHODS)),
                               ("scoring", args.scoring, scorings)):
        for name in given:
            if name not in known:
                raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    if args.select:
        trying = [m for method in args.methods if METHODS[method.split("/")[0]] for m in settings_to_try(method, args)]
        args.methods = ["aligned", *dict.fromkeys(trying)]

    def parse_method(method):
        name, *given = method.split("/")
        for setting in given:
            if setting.split("=")[0].replace("-", "_") not in settings:
                raise ValueError(f"{method}: {setting.split('=')[0]!r} is not a setting of a method; "
                                 "see the group training of --help")
        own = METHODS[name].flags.split() if METHODS[name] else []
        own += REAL if args.model else CHOSEN.get(name, "").split()
        return parser.parse_args(own + argv + [part for setting in given for part in f"--{setting}".split("=", 1)])

    args.of = {method: parse_method(method) for method in args.methods}
    for method, its in args.of.items():
        if max(its.label_smoothing, its.wait, its.settle) > 1:
            raise ValueError(f"{method}: --label-smoothing, --wait and --settle are shares, at most 1")
        if rank()[1] > its.batch:
            raise ValueError(f"{method}: --batch {its.batch} has no rows for {rank()[1]} processes")
        if rank()[1] > 1 and (its.check or method.split("/")[0] == "calm-exact"):
            raise ValueError(f"{method}: calm-exact and --check run in one process, without torchrun")
        if (its.resume or its.save_every) and not args.out:
            raise ValueError(f"{method}: --resume and --save-every need --out DIR")
        if its.choices and args.model and "letter" not in args.scoring:
            raise ValueError(f"{method} trains on option letters: --scoring must have letter")
        if not args.model and max(its.batch, args.limit, args.open_limit) > 10 ** 6:
            raise ValueError(f"{method}: --batch, --limit and --open-limit are at most a million in the toy world")
    if args.model and not args.train:
        raise ValueError("--model needs --train FILE, the questions to train on")
    if not args.model and (args.train or args.eval):
        raise ValueError("--train and --eval need --model DIR")
    if args.merge and not (args.out and args.model):
        raise ValueError("--merge needs --out DIR and --model DIR")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs the package matplotlib: pip install matplotlib")
    if args.json is not None:
        check_output(args.json)
    for flag in ("out", "plot"):
        target = getattr(args, flag)
        if target is not None:
            folder = Path(target).absolute()
            while not folder.exists():
                folder = folder.parent
            if not target or not folder.is_dir() or not os.access(folder, os.W_OK):
                raise NotADirectoryError(f"--{flag} {target}: {folder} is not a directory that can be written")
    if rank()[0] > 0:
        args.json = args.plot = None                       # the first process writes
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=args.device).item()
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {args.device}: not available here") from None
    return args


def main(argv=None):
    """Run, and turn what can go wrong outside the code into one sentence and an exit code: 2, or 130 for Ctrl-C."""
    kept, args = [], None
    warnings.formatwarning = lambda message, *_, **__: f"train.py: {message}\n"             # without the line of the code
    try:
        with processes():
            args = parse(argv)
            if args.select:
                select(args)
            else:
                run(args, kept)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("out of memory|alloc|storage size", str(error)):
            raise
        return complain("train.py", "out of memory; --micro-batch 1, --checkpointing, --dtype bfloat16, --quantize, a smaller "
                        "--batch or --rank and fewer --targets lower it")
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        return complain("train.py", error)
    except KeyboardInterrupt:
        if rank()[0] == 0:
            print("\ntrain.py: interrupted" + "".join(f"; what had finished is in {path}" for path in kept)
                  + ("; --resume goes on from there" if args and args.out else ""), file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, at_ctrl_c)
    sys.exit(main())
