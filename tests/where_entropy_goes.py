"""Where does the entropy go? What one alpha a token, and one alpha in all, do to answers of either domain.

    python tests/where_entropy_goes.py [--seeds 3] [--json PATH]

For every method, over the toy's worlds from 100 on: the mean entropy of softmax(z~) where the answer follows and the
probability that the tokens of values get there, on test prompts of either domain; and the mean of log_scale, and of the
offset less the mean offset of all tokens, over the value tokens that only A has, that only B has, and over all that are no
values.
"""
import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from data import World
from metrics import write_json

METHODS = "aligned,calm-scalar,calm,calm-persistent,calm-persistent/mode=vector"


@torch.no_grad()
def look(world, model, adjustment, domain):
    """Entropy in nats, and the probability of value tokens, means over 2,000 test prompts of a domain."""
    ids, _ = world.prompts(2000, domain, "test", torch.Generator().manual_seed(0))
    logits = model(ids)[:, -1]                             # (2000, V)
    p = (logits if adjustment is None else adjustment(logits)).softmax(-1)
    return {f"entropy {domain}": float(torch.special.entr(p).sum(-1).mean()),
            f"values {domain}": float(p[:, world.tokens_of.any(0)].sum(-1).mean())}


@torch.no_grad()
def groups(world, adjustment):
    """Means of alpha, (V,) each, over groups of tokens."""
    a, b = (world.tokens_of[world.domain[domain]].any(0) for domain in "AB")                 # (V,) each
    found = {}
    for name, tokens in (("A only", a & ~b), ("B only", b & ~a), ("no value", ~(a | b))):
        found[f"log_scale {name}"] = float(adjustment.log_scale[tokens].mean())
        found[f"offset {name}"] = float((adjustment.offset - adjustment.offset.mean())[tokens].mean())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    args, rows = train.parse(["--methods", METHODS, "--limit", "1"]), []
    for seed in range(100, 100 + options.seeds):
        world, task = World(seed), train.toy_task(args, seed)
        for method in args.methods:
            adjustment, _ = train.train_method(task, method, args.of[method], seed)
            row = {"method": method, "seed": seed, **look(world, task.model, adjustment, "A"), **look(world, task.model, adjustment, "B")}
            if adjustment is not None and adjustment.log_scale.numel() > 1:
                row |= groups(world, adjustment)
            rows.append(row)
            print(", ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()), flush=True)
    if options.json:
        write_json(options.json, {"command": f"python tests/where_entropy_goes.py --seeds {options.seeds}", "rows": rows})


if __name__ == "__main__":
    main()
