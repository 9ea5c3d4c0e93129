"""Decoupled DiLoCo on the shipped text: unequal learners, merge rules and codecs.

    python benchmarks/decoupled_text.py --part hardware --seed 0 --out results.jsonl

Each call runs one case and appends a line; without --case, it lists the cases of a part.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gossamer.measure.settings import Measure
from gossamer.methods import DataParallel, DecoupledDiLoCo, DiLoCo, Method
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults
from gossamer.sim.network import Network
from gossamer.sim.simulate import simulate
from gossamer.training.settings import Training
from gossamer.training.task_settings import TextSettings

H = 24


def cases(part: str) -> dict[str, tuple[Method, dict[str, Any]]]:
    """Method and further arguments of each case of a part."""
    grace = DecoupledDiLoCo(inner_steps=H)
    unequal: dict[str, Any] = {
        "timing": Timing(step_time=1.0, speeds=(1,) * 4 + (0.82,) * 4, jitter=0.1)
    }
    if part == "hardware":
        changes: dict[str, dict[str, Any]] = {
            "K=8": {"quorum": 8},
            "K=1": {"grace": 0.0},
            "K=1+grace": {},
        }
        return {n: (grace.model_copy(update=c), unequal) for n, c in changes.items()}
    if part == "merge":
        sizes = [(rule, m) for rule in ("rda", "average") for m in (8, 16)]
        return {
            f"{rule} M={m}": (grace.model_copy(update={"merge": rule}), {"workers": m})
            for rule, m in sizes
        }
    if part == "codec":
        names = ("none", "bf16", "int8", "int4", "e3m0", "int2", "int1")
        return {n: (grace.model_copy(update={"codec": n}), {}) for n in names}
    if part == "baselines":
        crashes = [CrashAt(worker=k % 8, start=50.0 * (k + 1), return_after=20) for k in range(4)]
        killed: dict[str, Any] = {"faults": Faults(crashes=tuple(crashes))}
        methods: dict[str, Method] = {
            "decoupled": grace,
            "diloco": DiLoCo(inner_steps=H),
            "data_parallel": DataParallel(inner_steps=H),
        }
        found: dict[str, tuple[Method, dict[str, Any]]] = {n: (m, {}) for n, m in methods.items()}
        return found | {f"{n}, killed": (m, killed) for n, m in methods.items()}
    raise SystemExit(f"no part {part!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--part", required=True)
    parser.add_argument("--case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("decoupled_text.jsonl"))
    given = parser.parse_args()
    found = cases(given.part)
    if given.case is None:
        print("\n".join(found))
        return
    method, more = found[given.case]
    workers = more.get("workers", 8)
    rounds = given.rounds * 8 // workers  # equal tokens in all
    training = Training(workers=workers, rounds=rounds, batch_size=4, sequence_length=64,
                        learning_rate=4e-3, warmup_steps=20)  # fmt: skip
    settings: dict[str, Any] = {
        "timing": Timing(step_time=1.0),
        "network": Network(bandwidth="1Gbit/s", latency="10ms"),
        **more,
    }
    settings.pop("workers", None)
    task = TextSettings(model="llama-tiny").build(training)
    quiet = Measure(every=0)
    result = simulate(
        method=method, task=task, training=training, measure=quiet, seed=given.seed, **settings
    )
    keys = ("eval_loss", "utilization", "time_s", "tokens", "bytes_sent_total")
    merged = result.summary["records"].get("merged_learners", {}).get("mean")
    line = {"part": given.part, "case": given.case, "seed": given.seed, "rounds": rounds}
    line |= {key: result.summary[key] for key in keys} | {"merged_learners": merged}
    with given.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(line)


if __name__ == "__main__":
    main()
