"""The demo's comparison over several seeds: held-out loss of each method, equal tokens.

    python benchmarks/text_methods.py --seeds 3 --out results.json

Results are saved after every run, so that a long comparison can be cut short.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from gossamer.config import load_recipe, prepare, variant
from gossamer.sim.simulate import simulate

METHODS = (
    "data_parallel",
    "local_sgd",
    "diloco",
    "GlobalM1",
    "GlobalM1LocalM2",
    "GlobalM1LocalM2-subset:mix2_subset=layers.0",
    "LocalM1M2",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("text_methods.json"))
    parser.add_argument("--recipe", type=Path, default=None, help="default: the demo's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shipped = Path(__file__).parent.parent / "src" / "gossamer" / "data" / "demo.toml"
    losses: dict[str, list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        overrides = [f"seed={seed}", f"train.rounds={arguments.rounds}", "measure.every=0"]
        base = load_recipe(arguments.recipe or shipped, overrides)
        for name in METHODS:
            recipe = variant(base, name)
            task = prepare(recipe).task
            summary = simulate(
                method=recipe.method, task=task, training=recipe.train, network=recipe.network,
                timing=recipe.timing, measure=recipe.measure, seed=recipe.seed,
            ).summary  # fmt: skip
            row = {key: summary[key] for key in ("eval_loss", "js_distance", "consensus_l2")}
            losses.setdefault(name, []).append(row)
            arguments.out.write_text(json.dumps(losses, indent=1))
            print(seed, name, round(summary["eval_loss"], 4), flush=True)
    for name, rows in losses.items():
        values = [row["eval_loss"] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:45s} {statistics.mean(values):.4f} +- {spread:.4f}")


if __name__ == "__main__":
    main()
