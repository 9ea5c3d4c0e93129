"""Decoupled DiLoCo under fault plans by the thousand, and its memory over ten thousand steps.

    python benchmarks/decoupled_soak.py plans --seeds 1000 [--first 0] [--out F]
    python benchmarks/decoupled_soak.py memory [--steps 10000] [--out F]

`plans` draws settings, speeds, links and faults from each seed, and checks that every token is
accounted for and merged at most once, that no merge has made NaN, and that the run ends. It prints
the seeds that fail and what else was seen, and exits with 1 where one has failed.

`memory` kills a learner or a syncer every 50 s of virtual time, and prints resident memory,
objects of Python, letters and tasks, tenth by tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from gossamer.errors import GossamerError
from gossamer.measure.settings import Measure
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults
from gossamer.sim.listener import NullListener
from gossamer.sim.network import Network
from gossamer.sim.simulate import simulate
from gossamer.testing.accounts import AccountedDiLoCo
from gossamer.testing.decoupled_cases import Poisoned, random_case
from gossamer.training.settings import Training

LEARNERS, INNER_STEPS = 4, 24


def plans(first: int, count: int) -> dict[str, Any]:
    """Run the cases of some seeds; what was seen of them."""
    seen: Counter[str] = Counter()
    failed: dict[int, str] = {}
    began = time.process_time()
    for seed in range(first, first + count):
        case = random_case(seed)
        try:
            result = case.run()
        except (GossamerError, AssertionError) as error:
            failed[seed] = f"{type(error).__name__}: {error}"
            print(seed, failed[seed], flush=True)
            continue
        if result is None:
            seen["runs that lost all learners"] += 1
            continue
        accounts = case.method.accounts
        seen["shares merged"] += len(accounts.shares)
        seen["learners' lives"] += len(accounts.lives)
        seen["lives cut short"] += sum(not life.has_finished for life in accounts.lives)
        seen["runs with unheard merges"] += accounts.unheard_tokens() > 0
        seen["learners that diverged"] += sum(
            lost["cause"] == "non_finite" for lost in result.summary["lost"]
        )
    cpu_s = round(time.process_time() - began, 1)
    return {"first": first, "seeds": count, "failed": failed, "seen": dict(seen), "cpu_s": cpu_s}


class Tenths(NullListener):
    """Looks at this process each time that a tenth of all steps is done."""

    def __init__(self, total: int) -> None:
        self.looks: list[dict[str, float]] = []
        self._every, self._done = total // 10, 0

    def on_steps(self, num_steps: int) -> None:
        before = self._done // self._every
        self._done += num_steps
        if self._done // self._every > before:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.looks.append({
                "rss_mb": round(pages * 4096 / 1e6, 1),
                "objects": len(gc.get_objects()),
                "tasks": len(asyncio.all_tasks()),
            })  # fmt: skip


def memory(steps: int) -> dict[str, Any]:
    """One long run in which somebody dies every 50 s."""
    rounds = -(-steps // INNER_STEPS)
    crashes = tuple(
        CrashAt(worker=k % (LEARNERS + 1), start=50.0 * (k + 1) + 0.5, return_after=20.0)
        for k in range(steps // 50)
    )
    method, tenths = AccountedDiLoCo(inner_steps=INNER_STEPS), Tenths(LEARNERS * steps * 9 // 10)
    result = simulate(
        method=method,
        task=Poisoned(None, 0),
        workers=LEARNERS,
        rounds=rounds,
        training=Training(learning_rate=0.02, clip_norm=0),
        network=Network(bandwidth="1Mbit/s", latency="50ms", deadline="10s"),
        timing=Timing(step_time=1.0, jitter=0.1),
        faults=Faults(crashes=crashes),
        measure=Measure(every=0),
        listener=tenths,
    )
    method.accounts.check(result)
    return {
        "steps": rounds * INNER_STEPS,
        "crashes": len(crashes),
        "lives": len(method.accounts.lives),
        "shares_merged": len(method.accounts.shares),
        "tenths": tenths.looks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("command", choices=["plans", "memory"])
    parser.add_argument("--seeds", type=int, default=1000, help="how many plans")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=10_000, help="virtual steps of each learner")
    parser.add_argument("--out", type=Path, help="JSON-lines file that the result is appended to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    is_plans = given.command == "plans"
    found = plans(given.first, given.seeds) if is_plans else memory(given.steps)
    text = json.dumps({"command": given.command, **found})
    print(text)
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    sys.exit(1 if found.get("failed") else 0)


if __name__ == "__main__":
    main()
