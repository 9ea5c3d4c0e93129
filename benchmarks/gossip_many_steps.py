"""Many local steps: GASLoC against DiLoCo on the shipped text, and where links and workers differ.

    python benchmarks/gossip_many_steps.py tune --workers 8 --out F
    python benchmarks/gossip_many_steps.py run --workers 16 --tuned-at 8 --out F
    python benchmarks/gossip_many_steps.py differences --out F
    python benchmarks/gossip_many_steps.py table F

`tune` makes the nine TRIES of each method with a seed of their own; `run` repeats the best of them
with other seeds. `differences` takes the best at 8 workers into networks with the times of a 1.5B
model (bf16 payloads, H = 100 steps of 2.355 s), where one worker's link is ten times slower, or
one worker computes four times slower, and notes the evaluation loss after each round against
virtual time.
All append each result to the JSON-lines file and skip what is in it already, so that the work can
be cut into pieces (`--limit`). `table` prints means, spreads and times to DiLoCo's final loss.

All see the same tokens, use AdamW inside with a cosine schedule, and agree after each H steps.
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
from gossamer.sim.compute import Timing
from gossamer.sim.network import Network, WorkerLink
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.llama import LlamaShape
from gossamer.training.settings import Training
from gossamer.training.text import TextTask

# A step here stands for two of the 1.5B model: rounds of H = 100 take as long, at half the cost.
INNER_STEPS, STANDS_FOR, ROUNDS = 50, 2, 10
BATCH = 2  # sequences of LENGTH bytes
LENGTH = 64
MODEL = LlamaShape(dim=64, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=128, max_length=512)
TUNING_SEED = 100
SEEDS = (0, 1, 2)
RATES = (1.5e-3, 3e-3, 6e-3)

# Nine tries each: three learning rates times three outer settings.
OUTER: dict[str, list[dict[str, Any]]] = {
    "diloco": [
        {"outer_learning_rate": 0.7, "outer_momentum": 0.9},
        {"outer_learning_rate": 0.7, "outer_momentum": 0.5},
        {"outer_learning_rate": 1.0, "outer_momentum": 0.2},
    ],
    "gasloc pairs": [
        {"eta": 0.7, "gamma": 0.5},
        {"eta": 0.7, "gamma": 0.5, "form": "B"},
        {"eta": 1.0, "gamma": 0.2},
    ],
    "gasloc rings": [
        {"eta": 0.7, "gamma": 0.7, "form": "B"},
        {"eta": 0.7, "gamma": 0.5, "form": "B"},
        {"eta": 1.0, "gamma": 0.2},
    ],
}
TOPOLOGIES = {"gasloc pairs": "random_pairs", "gasloc rings": "random_ring"}

SLOW_LINK, SLOW_WORKER = 10, 4
BANDWIDTHS = ("100Mbit/s", "400Mbit/s", "1Gbit/s")
SLOW_LINKS = tuple(f"slow_link {bandwidth}" for bandwidth in BANDWIDTHS)
WORLDS = (*(f"uniform {bandwidth}" for bandwidth in BANDWIDTHS), *SLOW_LINKS, "slow_worker 1Gbit/s")
# Rules whose steps depend on the world: these train in it. The others' numbers are the same in all.
ADAPTS = {**dict.fromkeys(SLOW_LINKS, "by_time"), "slow_worker 1Gbit/s": "by_speed"}
# Rounds of those: at first 12 everywhere; then as many as end within about half of DiLoCo's time.
MORE_ROUNDS = {
    "slow_link 100Mbit/s": (12, 20),
    "slow_link 400Mbit/s": (12, 15),
    "slow_link 1Gbit/s": (12,),
    "slow_worker 1Gbit/s": (12, 15),
}


def one_run(run: dict[str, Any]) -> dict[str, Any]:
    """Train once; what is reported of it."""
    began = time.process_time()
    in_world = run["world"] in ADAPTS
    result = simulated(run, run["world"] if in_world else "", numerics="real")
    measured = [event for event in result.history if event["kind"] == "measure"]
    summary = result.summary
    curve = [[e["time_s"], e["eval_loss"]] for e in measured if e["round"] > 0]
    times = {}
    if run["world"] == "all":
        for world in WORLDS:
            empty = simulated(run, world, numerics="none")
            times[world] = [e["time_s"] for e in empty.history if e["kind"] == "round"]
    return {
        **run,
        "steps": INNER_STEPS * run["rounds"],
        "eval_loss": summary["eval_loss"],
        "worker_eval_loss": statistics.mean(measured[-1]["worker_eval_losses"]),
        "consensus_l2": summary["consensus_l2"],
        "time_s": summary["time_s"],
        "utilization": summary["utilization"],
        "bytes_sent": summary["bytes_sent"],
        "tokens": summary["samples"],
        "records": summary["records"],
        "curve": curve if run["world"] else [],
        "times": times,
        "cpu_s": round(time.process_time() - began, 1),
    }


def simulated(run: dict[str, Any], world: str, *, numerics: Any) -> SimulationResult:
    """A run in a world; "" is one in which time does not matter."""
    label = run["method"]
    given = {**run["given"], "inner_steps": INNER_STEPS}
    if label in TOPOLOGIES:
        given["topology"] = TOPOLOGIES[label]
    network, timing = world_of(world, run["workers"])
    every = 1 if run["world"] and numerics == "real" else 0
    return simulate(
        method=build_method(label.split()[0], given),
        task=TextTask(model=MODEL, batch_size=BATCH, sequence_length=LENGTH),
        workers=run["workers"],
        rounds=run["rounds"],
        training=Training(learning_rate=run["rate"], warmup_steps=INNER_STEPS),
        network=network,
        timing=timing,
        measure=Measure(every=every, workers=True),
        seed=run["seed"],
        numerics=numerics,
    )


def world_of(world: str, workers: int) -> tuple[Network, Timing]:
    """The network and the times of a world."""
    if not world:
        return Network(), Timing()
    kind, bandwidth = world.split()
    network = Network(bandwidth=bandwidth)
    if kind == "slow_link":
        slow = WorkerLink(worker=0, bandwidth=network.bandwidth / SLOW_LINK)
        network = Network(bandwidth=bandwidth, workers=(slow,))
    speeds = (1 / SLOW_WORKER, *[1.0] * (workers - 1)) if kind == "slow_worker" else None
    timing = Timing(
        parameters=1.5e9, payload_dtype="bf16", step_time=2.355 * STANDS_FOR, speeds=speeds
    )
    return network, timing


NAMES = ("method", "workers", "seed", "rate", "rounds", "world", "given")


def identity(row: dict[str, Any]) -> str:
    """What makes two results the same piece of work."""
    return json.dumps([row[name] for name in NAMES], sort_keys=True)


def load(path: Path) -> list[dict[str, Any]]:
    """All results so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def best_try(rows: list[dict[str, Any]], method: str, workers: int) -> dict[str, Any] | None:
    """Rate and hyperparameters of the try with the least loss; None while one is missing."""
    found = [
        row
        for row in rows
        if (row["method"], row["workers"], row["seed"], row["world"])
        == (method, workers, TUNING_SEED, "")
    ]
    if len(found) < len(RATES) * len(OUTER[method]):
        return None
    best = min(found, key=lambda row: row["eval_loss"])
    return {"rate": best["rate"], "given": best["given"]}


def planned(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs that the command is about, done or not."""
    runs: list[dict[str, Any]] = []
    base = {"workers": arguments.workers, "rounds": ROUNDS, "world": ""}
    for method, outer in OUTER.items():
        if arguments.command == "tune":
            for given in outer:
                for rate in RATES:
                    tried = {"method": method, "rate": rate, "given": given, "seed": TUNING_SEED}
                    runs.append({**base, **tried})
            continue
        best = best_try(rows, method, arguments.tuned_at)
        if best is None:
            continue
        for seed in SEEDS:
            run = {**base, "method": method, **best, "seed": seed}
            if arguments.command == "run":
                runs.append(run)
            elif method in ("diloco", "gasloc pairs"):
                runs += in_worlds(run)
    return runs


def in_worlds(run: dict[str, Any]) -> list[dict[str, Any]]:
    """A run for all worlds in which it does the same; and GASLoC in those it adapts to."""
    found = [{**run, "world": "all"}]
    if run["method"] != "diloco":
        for world, rule in ADAPTS.items():
            given = {**run["given"], "local_steps": rule}
            for rounds in MORE_ROUNDS[world]:
                found.append({**run, "given": given, "rounds": rounds, "world": world})
    return found


def work(arguments: argparse.Namespace) -> None:
    """Do what is planned and not done, up to the limit."""
    left = arguments.limit
    done = {identity(row) for row in load(arguments.out)}
    for run in planned(load(arguments.out), arguments):
        same = {identity(run), identity({**run, "world": "all"})}  # its numbers are the same
        if left == 0 or same & done:
            continue
        row = one_run(run)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({k: v for k, v in row.items() if k != "curve"}), flush=True)
        left -= 1


def time_to(curve: list[list[float]], loss: float) -> float | None:
    """Virtual hours until the first measurement with at most this loss."""
    return next((at / 3600 for at, value in curve if value <= loss), None)


def curve_in(row: dict[str, Any], world: str) -> list[list[float]]:
    """(seconds, evaluation loss) after each round of a run in a world."""
    if row["world"] != "all":
        measured: list[list[float]] = row["curve"]
        return measured
    losses = [loss for _, loss in row["curve"]]
    return [[at, loss] for at, loss in zip(row["times"][world], losses, strict=True)]


def table_of_losses(rows: list[dict[str, Any]]) -> None:
    """Losses with their spread, and differences to DiLoCo's, seed by seed."""
    cells: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["seed"] != TUNING_SEED and row["world"] in ("", "all"):
            cells.setdefault((row["workers"], row["method"]), {})[row["seed"]] = row
    for (workers, method), by_seed in sorted(cells.items()):
        losses = [row["eval_loss"] for row in by_seed.values()]
        each = statistics.mean(row["worker_eval_loss"] for row in by_seed.values())
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        reference = cells.get((workers, "diloco"), {})
        excess = " ".join(
            f"{row['eval_loss'] / reference[seed]['eval_loss'] - 1:+.2%}"
            for seed, row in sorted(by_seed.items())
            if seed in reference
        )
        first = next(iter(by_seed.values()))
        print(
            f"M={workers:<3d}{method:13s}{statistics.mean(losses):.4f} +- {spread:.4f}  "
            f"workers' own {each:.4f}  to diloco {excess}  lr {first['rate']:g} {first['given']}"
        )


def table_of_times(rows: list[dict[str, Any]]) -> None:
    """Virtual time to DiLoCo's final loss in each world, seed by seed."""
    base = {(r["method"], r["seed"]): r for r in rows if r["world"] == "all"}
    for world in WORLDS:
        for seed in SEEDS:
            reference = base.get(("diloco", seed))
            if reference is None:
                continue
            goal, whole = reference["eval_loss"], reference["times"][world][-1] / 3600
            line = f"{world:22s} seed {seed}  diloco {goal:.4f} in {whole:.2f} h"
            others = [r for r in rows if r["world"] == world and r["seed"] == seed]
            if ("gasloc pairs", seed) in base:
                others.insert(0, base["gasloc pairs", seed])
            for row in others:
                curve = curve_in(row, world)
                rule = row["given"].get("local_steps", "equal")
                at = time_to(curve, goal)
                reached = "never" if at is None else f"{at:.2f} h ({whole / at:.2f}x)"
                end = f"{curve[-1][1]:.4f} at {curve[-1][0] / 3600:.2f} h"
                line += f"  {rule}, {row['rounds']} rounds: {reached}, end {end}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["tune", "run", "differences", "table"])
    parser.add_argument("--out", type=Path, default=Path("gossip_many_steps.jsonl"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tuned-at", type=int, default=8, help="workers of the tries to choose by")
    parser.add_argument("--limit", type=int, default=-1, help="runs to do now; -1: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "table":
        table_of_losses(load(arguments.out))
        table_of_times(load(arguments.out))
    else:
        work(arguments)


if __name__ == "__main__":
    main()
