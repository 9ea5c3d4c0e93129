"""Decoupled DiLoCo on the shipped text: unequal learners, lost learners, merge rules and codecs.

    python benchmarks/decoupled_text.py work [--limit N] [--out F]
    python benchmarks/decoupled_text.py table [--out F]

`work` does what PLAN lists, in its order: a row of tries chooses a method's learning rates, with a
seed of its own; the parts repeat the best of them with other seeds. Each result is appended to the
JSON-lines file, and what is in it already is skipped, so that the work can be cut into pieces.
`table` prints means and spreads over seeds.

All runs of a part see the same batches and steps, use AdamW inside with a cosine schedule, and
have cycles (rounds) of H = 24 steps of a virtual second each. With 16 learners there are half as
many cycles, for equal tokens in all. Killed learners are away for 20 s; a message that is awaited
for 10 s counts as lost (left to itself the simulator waits for three rounds and a minute, which is
no fair rival for those who wait).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gossamer.errors import GossamerError
from gossamer.measure.settings import Measure
from gossamer.methods import build_method
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults
from gossamer.sim.network import Network
from gossamer.sim.simulate import simulate
from gossamer.training.llama import LlamaShape
from gossamer.training.settings import Training
from gossamer.training.text import TextTask

INNER_STEPS, CYCLES, WORKERS = 24, 12, 8
MODEL = LlamaShape(dim=64, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=128, max_length=512)
TUNING_SEED = 100
SEEDS = (0, 1, 2)
RATES = (2.5e-3, 5e-3)
OUTER = ((0.4, 0.9), (0.7, 0.5), (0.7, 0.2))  # learning rate and momentum

# A label is a method with settings that are tuned together.
LABELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoupled": ("decoupled_diloco", {}),
    "average": ("decoupled_diloco", {"merge": "average"}),
    "diloco": ("diloco", {}),
    "data_parallel": ("data_parallel", {}),
}
UNEQUAL = Timing(step_time=1.0, speeds=(1.0,) * 4 + (0.82,) * 4, jitter=0.1)
WORLDS: dict[str, tuple[Timing, Faults]] = {
    "equal": (Timing(step_time=1.0), Faults()),
    "unequal": (UNEQUAL, Faults()),
    # By the clock: who waits for the dead does fewer steps between two of them.
    "killed": (
        Timing(step_time=1.0),
        Faults(
            crashes=tuple(
                CrashAt(worker=k % WORKERS, start=50.0 * (k + 1) + 0.5, return_after=20.0)
                for k in range(60)
            )
        ),
    ),
}

# What to do, in order: ("tune", label), or a part's cases (label, world, workers, settings).
Case = tuple[str, str, int, dict[str, Any]]
PLAN: tuple[tuple[str, Any], ...] = (
    ("tune", "decoupled"),
    (
        "cases",
        [
            ("decoupled", "unequal", 8, given)
            for given in ({}, {"quorum": 8}, {"quorum": 1, "grace": 0.0})
        ],
    ),
    ("tune", "diloco"),
    ("tune", "data_parallel"),
    (
        "cases",
        [
            (label, world, 8, {})
            for world in ("equal", "killed")
            for label in ("decoupled", "diloco", "data_parallel")
        ],
    ),
    ("tune", "average"),
    ("cases", [("average", "equal", 8, {})]),
    ("cases", [(label, "equal", 16, {}) for label in ("decoupled", "average")]),
    (
        "cases",
        [
            ("decoupled", "equal", 8, {"codec": codec})
            for codec in ("bf16", "int8", "int4", "int2", "int1")
        ],
    ),
)


def one_run(run: dict[str, Any]) -> dict[str, Any]:
    """Train once; what is reported of it. A run that diverges has no loss."""
    began = time.process_time()
    name, fixed = LABELS[run["label"]]
    timing, faults = WORLDS[run["world"]]
    measured: dict[str, Any] = {"eval_loss": None}
    try:
        result = simulate(
            method=build_method(name, {"inner_steps": INNER_STEPS, **fixed, **run["given"]}),
            task=TextTask(model=MODEL, batch_size=4, sequence_length=64, eval_sequences=256),
            workers=run["workers"],
            rounds=run["cycles"],
            training=Training(learning_rate=run["rate"], warmup_steps=INNER_STEPS),
            network=Network(bandwidth="1Gbit/s", latency="10ms", deadline="10s"),
            timing=timing,
            faults=faults,
            measure=Measure(every=0, workers=True),
            seed=run["seed"],
        )
    except GossamerError as error:
        measured["error"] = str(error)
    else:
        summary = result.summary
        names = ("eval_loss", "worker_eval_losses", "utilization", "time_s", "blocked_time_s",
                 "tokens", "bytes_sent", "consensus_l2", "records", "lost")  # fmt: skip
        measured = {name: summary[name] for name in names}
    return {**run, **measured, "cpu_s": round(time.process_time() - began, 1)}


NAMES = ("label", "world", "workers", "cycles", "seed", "rate", "given")


def identity(row: dict[str, Any]) -> str:
    """What makes two results the same piece of work."""
    return json.dumps([row[name] for name in NAMES], sort_keys=True)


def load(path: Path) -> list[dict[str, Any]]:
    """All results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tries(label: str) -> list[dict[str, Any]]:
    """The runs that choose a label's learning rates; data parallel has no outer step."""
    base = {"label": label, "world": "equal", "workers": WORKERS, "cycles": CYCLES}
    if label == "data_parallel":
        rates: tuple[float, ...] = (1.25e-3, *RATES)
        return [{**base, "seed": TUNING_SEED, "rate": rate, "given": {}} for rate in rates]
    return [
        {**base, "seed": TUNING_SEED, "rate": rate,
         "given": {"outer_learning_rate": outer, "outer_momentum": momentum}}
        for outer, momentum in OUTER
        for rate in RATES
    ]  # fmt: skip


def best_try(rows: list[dict[str, Any]], label: str) -> dict[str, Any] | None:
    """Rate and settings of the try with the least loss; None while one is missing."""
    wanted = {identity(run) for run in tries(label)}
    found = {identity(row): row for row in rows if identity(row) in wanted}
    finite = [row for row in found.values() if row["eval_loss"] is not None]
    if len(found) < len(wanted) or not finite:
        return None
    best = min(finite, key=lambda row: float(row["eval_loss"]))
    return {"rate": best["rate"], "given": best["given"]}


def runs_of(cases: list[Case], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases with the best settings of their label, seed by seed."""
    runs = []
    for seed in SEEDS:
        for label, world, workers, given in cases:
            best = best_try(rows, label)
            if best is None:
                raise SystemExit(f"{label} is not tuned yet")
            runs.append({
                "label": label, "world": world, "workers": workers,
                "cycles": CYCLES * WORKERS // workers, "seed": seed, "rate": best["rate"],
                "given": {**best["given"], **given},
            })  # fmt: skip
    return runs


def work(out: Path, limit: int) -> None:
    """Do what is planned and not done, up to the limit."""
    left = limit
    for kind, what in PLAN:
        for run in tries(what) if kind == "tune" else runs_of(what, load(out)):
            if identity(run) in {identity(row) for row in load(out)}:
                continue
            if left == 0:
                return
            row = one_run(run)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            left -= 1


def table(rows: list[dict[str, Any]]) -> None:
    """Loss (mean and spread over seeds, and each) and what a run cost, case by case."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        given = {k: v for k, v in row["given"].items() if not k.startswith("outer_")}
        outer = [v for k, v in row["given"].items() if k.startswith("outer_")]
        kind = "try" if row["seed"] == TUNING_SEED else "run"
        name = f"{kind} {row['label']} {row['world']} M={row['workers']} {given or ''}"
        cells.setdefault(f"{name} lr {row['rate']:g} outer {outer}", []).append(row)
    for name, same in cells.items():
        losses = [row["eval_loss"] for row in same]
        if None in losses:
            print(f"{name}: diverged ({losses})")
            continue
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        each = statistics.mean(statistics.mean(row["worker_eval_losses"]) for row in same)
        merged = [row["records"].get("merged_learners", {}).get("mean", 0.0) for row in same]
        print(
            f"{name}\n    loss {statistics.mean(losses):.4f} +- {spread:.4f} "
            f"({' '.join(f'{loss:.4f}' for loss in losses)}), workers' own {each:.4f}, "
            f"utilisation {statistics.mean(r['utilization'] for r in same):.1%}, "
            f"{statistics.mean(r['time_s'] for r in same):.0f} s, "
            f"merged {statistics.mean(merged):.2f}, "
            f"tokens {statistics.mean(r['tokens'] for r in same):.0f}, "
            f"bytes {statistics.mean(r['bytes_sent'] for r in same) / 1e6:.1f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("command", choices=["work", "table"])
    parser.add_argument("--out", type=Path, default=Path("decoupled_text.jsonl"))
    parser.add_argument("--limit", type=int, default=-1, help="runs to do now; -1: all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "table":
        table(load(given.out))
    else:
        work(given.out, given.limit)


if __name__ == "__main__":
    main()
