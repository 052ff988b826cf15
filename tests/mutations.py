"""Would the tests notice? One flip of the mathematics at a time, and the tests that must then fail.

    python tests/mutations.py [--json PATH] [--only WORD]

Each flip is made in a copy of the tree in a temporary folder; exit code 1 if one survives, or if its fragment is not in
its file exactly once.
"""
import argparse
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# (what, file, fragment, what it becomes, test file, -k expression)
FLIPS = [
    # The losses
    ("sign of the entropy", "bilevel.py", "(log_p.exp() * log_p.masked_fill", "(-log_p.exp() * log_p.masked_fill", "test_bilevel", "losses_by_hand"),
    ("scale of the logits", "bilevel.py", "self.log_scale.exp() * at_least", "self.log_scale.neg().exp() * at_least", "test_bilevel", "identity_at_zero"),
    ("sign of the offset", "bilevel.py", "at_least_float32(logits) + self.offset", "at_least_float32(logits) - self.offset", "test_bilevel", "losses_by_hand or closed or hand"),
    ("ignored targets", "bilevel.py", "supervised = targets != ignore_index", "supervised = targets != ignore_index - 1", "test_bilevel", "masked"),
    ("mean over chunks", "bilevel.py", "lambda h, *y: len(h) * loss(head(h), *y)", "lambda h, *y: loss(head(h), *y)", "test_bilevel", "chunked_losses_equal"),
    ("items that cannot occur", "bilevel.py", "masked_fill(never, -torch.inf)", "masked_fill(never, 0.0)", "test_bilevel", "impossible_item_leaves"),
    # The exact hypergradient
    ("sign of the hypergradient", "bilevel.py", "F_a - hvp(L_t, problem.alpha, v), problem", "F_a + hvp(L_t, problem.alpha, v), problem", "test_bilevel", "case_01"),
    ("the direct part of it", "bilevel.py", "unflatten(F_a - hvp(", "unflatten(0 * F_a - hvp(", "test_bilevel", "case_01 or closed_form"),
    ("CG's step", "bilevel.py", "x + step * p, r - step * Hp", "x + step * p, r - 0.99 * step * Hp", "test_bilevel", "case_03"),
    ("CG's next direction", "bilevel.py", "p = r + (rr / rr_old) * p", "p = r - (rr / rr_old) * p", "test_bilevel", "case_03"),
    ("CG's negative curvature", "bilevel.py", "if curvature <= torch.finfo", "if -curvature <= torch.finfo", "test_bilevel", "case_03 or case_04"),
    ("Neumann's recursion", "bilevel.py", "r = r - step * Hr", "r = r + step * Hr", "test_bilevel", "closed_form"),
    ("Neumann's divergence", "bilevel.py", "if step * curvature > 2:", "if step * curvature > 2000:", "test_bilevel", "case_03"),
    ("Gauss-Newton", "bilevel.py", "torch.autograd.grad(l_z, at, Jv, retain_graph=True)", "torch.autograd.grad(l_z, at, 2 * Jv, retain_graph=True)", "test_bilevel", "gauss_newton"),
    ("the unrolled cross term", "bilevel.py", "h - lr * hvp(L_t, problem.alpha, v)", "h + lr * hvp(L_t, problem.alpha, v)", "test_bilevel", "unrolling"),
    ("the unrolled adjoint", "bilevel.py", "v - lr * hvp(L_t, problem.theta, v)", "v + lr * hvp(L_t, problem.theta, v)", "test_bilevel", "unrolling"),
    # First order
    ("sign of the penalty", "bilevel.py", "F_a + lam * (L_a - L_a_other)", "F_a - lam * (L_a - L_a_other)", "test_bilevel", "penalty_on_quadratics"),
    ("the symmetric penalty's half", "bilevel.py", "(F_a + F_a_other + lam * (L_a - L_a_other)) / 2", "(F_a + F_a_other) / 2 + lam * (L_a - L_a_other)", "test_bilevel", "penalty_on_quadratics"),
    ("lambda", "bilevel.py", "lam = max(0.0, eta - float(", "lam = max(0.0, eta + float(", "test_bilevel", "bome_direction_by_hand"),
    ("lambda's bound", "bilevel.py", "lam = max(0.0, eta - float(", "lam = max(-9.0, eta - float(", "test_bilevel", "bome_direction_by_hand"),
    ("grad q by alpha", "bilevel.py", "q_t, q_a = L_t, L_a - L_a_T", "q_t, q_a = L_t, L_a + L_a_T", "test_bilevel", "bome_direction_by_hand"),
    ("grad q by theta", "bilevel.py", "unflatten(F_t + lam * q_t, theta)", "unflatten(F_t - lam * q_t, theta)", "test_bilevel", "bome_direction_by_hand"),
    ("BOME's inner steps", "bilevel.py", "for _ in range(inner_steps - 1):", "for _ in range(inner_steps):", "test_bilevel", "bome_direction_by_hand"),
    ("the surrogate's residual", "bilevel.py", "r, size = product + F_t, F_t.norm()", "r, size = product - F_t, F_t.norm()", "test_bilevel", "surrogate_finds"),
    ("the surrogate's hypergradient", "bilevel.py", "F_a + s.lam * (L_a_there - L_a)", "F_a - s.lam * (L_a_there - L_a)", "test_bilevel", "surrogate_finds"),
    ("the surrogate's patience", "bilevel.py", "if s.scale or residual <= s.tolerance else 0.0", "", "test_bilevel", "surrogate_waits"),
    # Metrics
    ("the weights of ECE", "metrics.py", "return float(abs(gap_of_row(equal_width(confidence, bins), confidence, correct)).mean())",
     "return float(abs(np.unique(gap_of_row(equal_width(confidence, bins), confidence, correct))).mean())", "test_metrics", "hand_worked_bins"),
    ("which side of a bin is closed", "metrics.py", "return np.searchsorted(edges, confidence)", 'return np.searchsorted(edges, confidence, "right")', "test_metrics", "case_08"),
    ("bins of equal mass", "metrics.py", "smaller * bins // len(confidence)", "smaller * bins // (len(confidence) + 1)", "test_metrics", "adaptive_ece"),
    ("smooth ECE's kernel", "metrics.py", "np.exp(-(frequency * s) ** 2 / 2)", "np.exp(-(frequency * s) ** 2)", "test_metrics", "smooth_ece_equals_its_definition"),
    ("ties in AUROC", "metrics.py", "(below + upto).mean() / (2 * len(wrong))", "below.mean() / len(wrong)", "test_metrics", "auroc_counts_ties_half"),
    ("slope of the temperature fit", "metrics.py", "(b, high) if slope < 0", "(b, high) if slope > 0", "test_metrics", "case_12"),
    ("the temperature itself", "metrics.py", "    return 1 / b\n", "    return b\n", "test_metrics", "case_12"),
    ("Brier's label", "metrics.py", "difference[np.arange(len(labels)), labels] -= 1", "difference[np.arange(len(labels)), labels] -= 0.5", "test_metrics", "hand_worked_scores"),
    ("the floor's draws", "metrics.py", "rng.random(len(drawn)) < drawn", "rng.random(len(drawn)) > drawn", "test_metrics", "case_11"),
    ("the held-out half", "metrics.py", "shuffled[half:].count(choice)", "shuffled[:half].count(choice)", "test_metrics", "split"),
    # The model
    ("the scale of LoRA", "model.py", "F.linear(self.alpha / self.rank * low", "F.linear(self.rank / self.alpha * low", "test_model", "case_23_lora_starts"),
    ("the merged scale of LoRA", "model.py", "W + self.alpha / self.rank * (self.lora_B", "W + self.rank / self.alpha * (self.lora_B", "test_model", "case_23_merged"),
    ("the turn of rope", "model.py", "torch.cat((-b, a), dim=-1)", "torch.cat((b, -a), dim=-1)", "test_model", "case_22"),
    ("the layout of rope", "model.py", "angle = torch.cat((angle, angle), dim=-1)", "angle = angle.repeat_interleave(2, dim=-1)", "test_model", "case_22 or equal_transformers_in_both"),
    ("the ramp of yarn", "model.py", "slow * frequency / factor + (1 - slow) * frequency", "(1 - slow) * frequency / factor + slow * frequency", "test_model", "equal_transformers_in_both"),
    ("RMSNorm's eps", "model.py", "y.pow(2).mean(-1, keepdim=True) + self.eps", "y.pow(2).mean(-1, keepdim=True)", "test_model", "case_21"),
    ("the nibbles of NF4", "model.py", "codes[:, 0::2] << 4 | codes[:, 1::2]", "codes[:, 1::2] << 4 | codes[:, 0::2]", "test_model", "case_24 or nf4_by_hand"),
    ("the window of attention", "model.py", "~seen.tril(-window)", "~seen.tril(-window - 1)", "test_model", "equal_transformers_in_both"),
    ("the scale of a merged head", "model.py", "scale = adjustment.log_scale.exp()", "scale = adjustment.log_scale.neg().exp()", "test_model", "case_23_merged"),
    # Data
    ("the shift of the labels", "data.py", "torch.where(real, ids, IGNORE).roll(-1, dims=1)", "torch.where(real, ids, IGNORE).roll(-2, dims=1)", "test_data", "supervise"),
    ("the first supervised position", "data.py", "[len(prompt) - 1 for prompt, _ in examples]", "[len(prompt) for prompt, _ in examples]", "test_data", "supervise"),
    ("splits of subjects", "data.py", '"heldout": order[subjects // 2:', '"heldout": order[subjects // 2 - 1:', "test_data", "splits_are_disjoint"),
    ("disjoint rows", "data.py", "if seen.setdefault(question_key(row), name) != name:", "if seen.setdefault(row['question'], name) != name:", "test_data", "same_question"),
    ("the rater's taste", "data.py", "argsort(1, descending=True))\n        return ids, pair", "argsort(1))\n        return ids, pair", "test_data", "preferences"),
    ("MedMCQA counts from one", "data.py", "lambda: 1 - any(", "lambda: 0 * any(", "test_data", "medmcqa"),
    # The experiment
    ("the sign of DPO", "train.py", "loss = -F.logsigmoid(margin).mean()", "loss = -F.logsigmoid(-margin).mean()", "test_cases", "alignment"),
    ("options per token", "train.py", '"token": len(option)', '"token": 1', "test_train", "case_16"),
    ("the share of a process", "train.py", "summed_loss(state[\"share\"] * ", "summed_loss(", "test_train", "two_processes"),
    ("the proximal term", "train.py", "args.mu / 2 * moved / ranks", "0 * args.mu / 2 * moved / ranks", "test_cases", "proximal"),
    ("the penalty of cft-binned", "train.py", "L - args.bin_weight * ", "L + args.bin_weight * ", "test_train", "binned_penalty"),
    ("the temperature alpha starts at", "train.py", "fill_(-math.log(args.temperature))", "fill_(math.log(args.temperature))", "test_cases", "temperature"),
    ("theta's learning rate", "train.py", "args.lr * min(1, 2 * (1 - step / args.steps))", "args.lr * min(1, 2 * (step / args.steps))", "test_cases", "learning_rate"),
    ("where theta_T is left", "bilevel.py", "tensor.copy_(value)", "tensor.add_(0 * value)", "test_bilevel", "bome_direction_by_hand"),
]


def caught_by(folder, file, fragment, becomes, test, expression):
    """The first test that fails with the flip made, None if none does. The tests run in a fork of this process, which has
    imported everything but the project: that takes longer than most of them."""
    path, report = folder / file, folder / "report.txt"
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(fragment, becomes), encoding="utf-8")
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path[0] = str(folder / "tests")
        for stream in (1, 2):
            os.dup2(os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if stream == 1 else os.O_WRONLY | os.O_APPEND), stream)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"tests/{test}.py", "-k", expression])
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    path.write_text(original, encoding="utf-8")
    text = report.read_text(encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", text, re.MULTILINE)
    if code == 1 and failed:
        return failed[1]
    if code != 0:
        raise RuntimeError(f"{test}.py -k {expression!r} did not run:\n{text[-500:]}")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--only", metavar="WORD", default="", help="flips whose description holds it")
    args = parser.parse_args()
    rows, flips = [], [flip for flip in FLIPS if args.only in flip[0]]
    for what, file, fragment, *_ in flips:
        found = (ROOT / file).read_text(encoding="utf-8").count(fragment)
        if found != 1:
            print(f"{what}: {fragment!r} is {found} times in {file}")
            return 1
    os.environ.setdefault("CALM_SHARED", str(ROOT.parent / "shared"))
    sys.dont_write_bytecode = True                         # a flip and its undoing can fall into one second
    torch.set_num_threads(1)
    for name in ("bitsandbytes.functional", "hypothesis", "peft", "safetensors.torch", "tokenizers", "torchmetrics", "transformers"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
        for what, file, *flip in flips:
            start = time.perf_counter()
            by = caught_by(Path(folder), file, *flip)
            print(f"{what:34s}{file:12s}{by or 'SURVIVED'}   {time.perf_counter() - start:.0f} s", flush=True)
            rows.append({"flip": what, "file": file, "from": flip[0], "to": flip[1], "caught_by": by})
    if args.json:
        Path(args.json).write_text(json.dumps({"command": "python tests/mutations.py", "flips": rows}, indent=1) + "\n", encoding="utf-8")
    survived = sum(row["caught_by"] is None for row in rows)
    print(f"{len(rows)} flips, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
