"""Costs as ratios within one run; seconds mean nothing across machines.

    python tests/benchmark.py [--json PATH]

In units of one gradient of L, on a transformer of 2 million parameters in float32, one thread.
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bilevel import (Bilevel, LogitAdjustment, Surrogate, bome_direction, conjugate_gradient, exact_mode, hvp,
                     largest_eigenvalue, lower_gradient, negative_entropy, parametric_cross_entropy, peak_bytes,
                     unrolled_hypergradient)
from model import Config, Transformer


def problem():
    torch.manual_seed(0)
    model = Transformer(Config(1000, hidden_size=192, intermediate_size=512, num_hidden_layers=4))
    model.requires_grad_(True)
    ids, held_out = torch.randint(1000, (16, 32)), torch.randint(1000, (16, 32))
    targets = torch.randint(1000, (16, 32))
    adjustment = LogitAdjustment(1000)
    return Bilevel(list(model.parameters()), list(adjustment.parameters()),
                   lambda: parametric_cross_entropy(model(ids), targets, adjustment),
                   lambda: negative_entropy(model(held_out), adjustment))


def ratios(jobs, unit, repeats=7):
    """Median over interleaved repeats of each job's time over the unit's in the same round."""
    unit()
    found = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            unit()
            middle = time.perf_counter()
            job()
            found[name].append((time.perf_counter() - middle) / (middle - start))
    return {name: statistics.median(values) for name, values in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    torch.set_num_threads(1)
    p = problem()
    one = lambda: p.gradient(p.lower())
    v = torch.randn(sum(t.numel() for t in p.theta))

    def hvp_from_scratch():
        with exact_mode():
            hvp(lower_gradient(p), p.theta, v)

    with exact_mode():
        start = lower_gradient(p)
        damping = 1.2 * largest_eigenvalue(lambda u: hvp(start, p.theta, u), v)
    del start

    def cg(products):                                      # damped beyond any negative curvature, so that no solve stops early
        with exact_mode():
            L_t = lower_gradient(p)
            _, report = conjugate_gradient(lambda u: hvp(L_t, p.theta, u) + damping * u, v, tol=0.0, max_iter=products)
            assert report["products"] == products and not report["negative_curvature"]

    surrogate = Surrogate()
    bome_direction(p, 1, None, 0, surrogate)               # its 20 power iterations, once
    jobs = {"hvp, from scratch": hvp_from_scratch, "CG-10": lambda: cg(10), "CG-20": lambda: cg(20),
            "unroll-10": lambda: unrolled_hypergradient(p, 10, 1e-3),
            "BOME T = 1": lambda: bome_direction(p, 1, 1e-3, 0.5), "BOME T = 3": lambda: bome_direction(p, 3, 1e-3, 0.5),
            "BOME T = 10": lambda: bome_direction(p, 10, 1e-3, 0.5), "BOME persistent": lambda: bome_direction(p, 1, None, 0, surrogate)}
    time_of = ratios(jobs, one)
    time_of["hvp, graph kept"] = (time_of["CG-20"] - time_of["CG-10"]) / 10
    allowed = {"hvp, graph kept": 2.5, "CG-10": 28, "BOME T = 1": 1.1 * 2.4, "BOME T = 3": 1.1 * 4.4, "BOME T = 10": 1.1 * 11.4}
    gradient_bytes = peak_bytes(one)
    memory_of = {name: peak_bytes(job) / gradient_bytes for name, job in {
        "CG-2": lambda: cg(2), "CG-10": lambda: cg(10), "unroll-10": jobs["unroll-10"], "BOME T = 1": jobs["BOME T = 1"],
        "BOME T = 10": jobs["BOME T = 10"], "BOME persistent": jobs["BOME persistent"]}.items()}
    print(f"in units of one gradient of L ({sum(t.numel() for t in p.theta):,} parameters)\n{'':20s}{'time':>9s}{'allowed':>9s}{'memory':>9s}")
    for name in dict.fromkeys([*time_of, *memory_of]):
        t, m = time_of.get(name), memory_of.get(name)
        print(f"{name:20s}" + "".join(" " * 9 if x is None else f"{x:9.2f}" for x in (t, allowed.get(name), m)))
    if args.json:
        Path(args.json).write_text(json.dumps({"command": "python tests/benchmark.py", "time": time_of, "memory": memory_of}, indent=1))
    return int(any(time_of[name] > most for name, most in allowed.items()))


if __name__ == "__main__":
    sys.exit(main())
