"""A worker process for tests: `python programs.py '{"coordinator": ..., "method": ..., ...}'`.

Prints one JSON event a line. The job is small: TinyMLP, a method by name, four workers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch

from gossamer.cluster.job import Job
from gossamer.cluster.worker import WorkerProcess
from gossamer.methods import build_method
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training


def make_job(options: dict[str, Any]) -> Job:
    return Job(
        method=build_method(options["method"], options.get("hyperparameters", {})),
        task=TinyMLP(num_hidden=options.get("hidden", 16)),
        training=Training(
            workers=options.get("workers", 4),
            rounds=options.get("rounds", 5),
            learning_rate=0.02,
            warmup_steps=3,
        ),
        seed=options.get("seed", 11),
        deadline_s=options.get("deadline_s", 20.0),
        step_time_s=options.get("step_time_s", 0.0),
        rejoin_moments=options.get("rejoin_moments", "donor"),
        checkpoint_every=options.get("checkpoint_every", 1),
    )


def tell(kind: str, fields: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    process = WorkerProcess(
        make_job(options),
        coordinator=options["coordinator"],
        folder=Path(options["folder"]) if options.get("folder") else None,
        worker=options.get("worker"),
        rate=options.get("rate"),
        delay_s=options.get("delay_s", 0.0),
        events=tell,
    )
    tell("end", {"summary": asyncio.run(process.run())})


if __name__ == "__main__":
    main()
