"""One step per communication: GASLoC against decentralised baselines on the shipped text.

    python benchmarks/gossip_one_step.py tune --workers 8 --out F
    python benchmarks/gossip_one_step.py run --workers 16 --tuned-at 8 --out F
    python benchmarks/gossip_one_step.py table F

`tune` makes the TRIES of each method on each topology, with a seed of their own; `run` repeats the
best of them with other seeds. Both append each result to the JSON-lines file and skip what is in it
already, so that the work can be cut into pieces (`--limit`). `table` prints means and spreads over
the seeds, and the differences to GASLoC, seed by seed.

All see the same tokens and use AdamW inside, with a cosine schedule. Each step of a worker is
followed by one communication, or runs beside one: P values to each neighbour of the round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gossamer.measure.settings import Measure
from gossamer.methods import build_method
from gossamer.sim.simulate import simulate
from gossamer.training.llama import LlamaShape
from gossamer.training.settings import Training
from gossamer.training.text import TextTask

STEPS = 200
BATCH = 2  # sequences of LENGTH bytes
LENGTH = 64
MODEL = LlamaShape(dim=64, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=128, max_length=512)
STEPS_IN_A_ROUND = 10  # of methods whose rounds are for reporting only
TUNING_SEED = 100
SEEDS = (0, 1, 2)

# What a topology is called by each kind of method. Meetings need a fixed graph.
RING = dict.fromkeys(("gasloc", "dsgd", "sgp", "ad_psgd", "a2cid2"), "ring")
EXPONENTIAL = dict.fromkeys(RING, "exponential")
RANDOM = {
    "gasloc": "random_pairs", "dsgd": "random_pairs", "sgp": "random_pairs",
    "ad_psgd": "complete", "a2cid2": "complete",
}  # fmt: skip
TOPOLOGIES = {"ring": RING, "exponential": EXPONENTIAL, "random": RANDOM}

RATES = (1.25e-3, 2.5e-3, 3.75e-3, 5e-3, 7.5e-3, 1e-2)
HALF = (2.5e-3, 5e-3, 7.5e-3)
METHODS = ("gasloc", "dsgd", "sgp", "ad_psgd", "a2cid2")


def tries(method: str, topology: str) -> list[tuple[float, dict[str, Any]]]:
    """Six (learning rate, hyperparameters) for each method."""
    if method == "dsgd":
        orders = ("combine_then_adapt", "adapt_then_combine")
        return [(rate, {"order": order}) for order in orders for rate in HALF]
    if method == "gasloc":  # outer momentum lengthens a step to 1 / (1 - gamma)
        choices: list[tuple[float, dict[str, Any]]] = [
            (2.5e-3, {"gamma": 0.2}),
            (5e-3, {"gamma": 0.2}),
            (1.25e-3, {"gamma": 0.5}),
            (2.5e-3, {"gamma": 0.5}),
        ]
        last = {"gamma": 0.35} if topology == "random" else {"alpha": "auto", "gamma": "auto"}
        choices += [(rate, last) for rate in HALF[:2]]
        return [(rate, {"eta": 1.0, **given}) for rate, given in choices]
    return [(rate, {}) for rate in RATES]


def one_run(
    method: str, topology: str, *, workers: int, rate: float, given: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Train once; what is reported of it."""
    in_a_round = 1 if method == "gasloc" else STEPS_IN_A_ROUND
    if method != "data_parallel":
        given = {**given, "topology": TOPOLOGIES[topology][method]}
    began = time.process_time()
    result = simulate(
        method=build_method(method, {"inner_steps": in_a_round, **given}),
        task=TextTask(model=MODEL, batch_size=BATCH, sequence_length=LENGTH),
        workers=workers,
        rounds=STEPS // in_a_round,
        training=Training(learning_rate=rate, warmup_steps=STEPS // 10),
        measure=Measure(every=0, workers=True),
        seed=seed,
    )
    summary = result.summary
    each = next(e for e in reversed(result.history) if e["kind"] == "measure")
    return {
        "method": method, "topology": topology, "workers": workers, "seed": seed,
        "rate": rate, "given": given, "steps": STEPS,
        "eval_loss": summary["eval_loss"],
        "worker_eval_loss": statistics.mean(each["worker_eval_losses"]),
        "consensus_l2": summary["consensus_l2"],
        "vectors_per_step": summary["bytes_sent_total"] / workers / STEPS / model_bytes(result),
        "tokens": summary["samples"],
        "cpu_s": round(time.process_time() - began, 1),
    }  # fmt: skip


def model_bytes(result: Any) -> int:
    """Bytes of one model's parameters."""
    return int(result.parameters.shape[1]) * 4


def identity(row: dict[str, Any]) -> str:
    """What makes two results the same piece of work."""
    names = ("method", "topology", "workers", "seed", "rate", "steps")
    given = {key: value for key, value in row["given"].items() if key != "topology"}
    return json.dumps([*(row[name] for name in names), given], sort_keys=True)


def load(path: Path) -> list[dict[str, Any]]:
    """All results so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def best_try(
    rows: list[dict[str, Any]], method: str, topology: str, workers: int
) -> tuple[float, dict[str, Any]] | None:
    """The try with the least held-out loss; None while one is missing."""
    found = {
        identity(row): row["eval_loss"]
        for row in rows
        if (row["topology"], row["workers"], row["seed"]) == (topology, workers, TUNING_SEED)
    }
    base = {"method": method, "topology": topology, "workers": workers, "seed": TUNING_SEED}
    losses = {}
    for index, (rate, given) in enumerate(tries(method, topology)):
        name = identity({**base, "rate": rate, "given": given, "steps": STEPS})
        if name not in found:
            return None
        losses[index] = found[name]
    return tries(method, topology)[min(losses, key=losses.__getitem__)]


def planned(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs that the command is about, done or not."""
    runs: list[dict[str, Any]] = []
    for topology in TOPOLOGIES:
        for method in METHODS:
            base = {"method": method, "topology": topology, "workers": arguments.workers}
            if arguments.command == "tune":
                for rate, given in tries(method, topology):
                    runs.append({**base, "rate": rate, "given": given, "seed": TUNING_SEED})
                continue
            best = best_try(rows, method, topology, arguments.tuned_at)
            if best is not None:
                for seed in SEEDS:
                    runs.append({**base, "rate": best[0], "given": best[1], "seed": seed})
    return runs


def work(arguments: argparse.Namespace) -> None:
    """Do what is planned and not done, up to the limit."""
    left = arguments.limit
    done = {identity(row) for row in load(arguments.out)}
    for run in planned(load(arguments.out), arguments):
        if left == 0 or identity({**run, "steps": STEPS}) in done:
            continue
        row = one_run(**run)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        left -= 1


def table(rows: list[dict[str, Any]]) -> None:
    """Mean and spread over the seeds, and differences to GASLoC with the same seed."""
    cells: dict[tuple[int, str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["seed"] != TUNING_SEED and row["steps"] == STEPS:
            key = (row["workers"], row["topology"], row["method"])
            cells.setdefault(key, {})[row["seed"]] = row
    for (workers, topology, method), by_seed in cells.items():
        losses = [row["eval_loss"] for row in by_seed.values()]
        each = statistics.mean(row["worker_eval_loss"] for row in by_seed.values())
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        reference = cells.get((workers, topology, "gasloc"), {})
        differences = [
            row["eval_loss"] - reference[seed]["eval_loss"]
            for seed, row in sorted(by_seed.items())
            if seed in reference
        ]
        first = next(iter(by_seed.values()))
        settings = {k: v for k, v in first["given"].items() if k not in ("topology", "eta")}
        print(
            f"M={workers:<3d}{topology:12s}{method:8s}{statistics.mean(losses):.4f} +- {spread:.4f}"
            f"  workers' own {each:.4f}  to gasloc "
            + " ".join(f"{difference:+.4f}" for difference in differences)
            + f"  vectors/step {first['vectors_per_step']:.2f}  lr {first['rate']:g} {settings}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["tune", "run", "table"])
    parser.add_argument("--out", type=Path, default=Path("gossip_one_step.jsonl"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tuned-at", type=int, default=8, help="workers of the tries to choose by")
    parser.add_argument("--limit", type=int, default=-1, help="runs to do now; -1: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "table":
        table(load(arguments.out))
    else:
        work(arguments)


if __name__ == "__main__":
    main()
