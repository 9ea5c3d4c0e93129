"""What a worker process takes in memory, in multiples of its parameters P, and what that counts.

    python benchmarks/worker_memory.py --method diloco LocalM1M2 --json

A few workers on this machine train models of two sizes for some rounds. Each notes the peak of its
resident memory after the first round, above what it had with everything imported and nothing built.
Two sizes tell what grows with the model (copies of P) from what does not (buffers of gRPC, code).

The allowance is 1.15 times (model + outer state + one payload): 4 P for the model (parameters,
gradient, two moments of AdamW), the P of the method's state tensors, and 1 P for a payload.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.cluster.coordinator import serve
from gossamer.cluster.job import Job
from gossamer.cluster.plan import CoordinatorSettings
from gossamer.cluster.process_memory import return_freed_memory
from gossamer.cluster.worker import WorkerProcess
from gossamer.comm.state import state_tensors
from gossamer.methods import build_method
from gossamer.training.settings import Training

FORK = multiprocessing.get_context("fork")  # torch is imported once
TENSORS = 32
MODEL = 4  # parameters, gradient, and AdamW's two moments
PAYLOAD = 1


class Blocks:
    """A model of TENSORS vectors; a step costs little and allocates a vector at a time."""

    unit = "samples"
    units_per_batch = 1

    def __init__(self, num_parameters: int) -> None:
        self.block = num_parameters // TENSORS
        self._direction = torch.linspace(-1, 1, self.block)

    def build(self) -> nn.Module:
        module = nn.Module()
        for index in range(TENSORS):
            module.register_parameter(f"block{index}", nn.Parameter(torch.zeros(self.block)))
        return module

    def train_batch(self, worker: int, step: int) -> float:
        return 1.0 + worker + step

    def eval_batches(self) -> list[float]:
        return [0.0]

    def loss(self, model: nn.Module, batch: float) -> Tensor:
        return batch * sum(torch.dot(self._direction, p) for p in model.parameters())


def make_job(options: argparse.Namespace, method: str, num_parameters: int) -> Job:
    return Job(
        method=build_method(method, {"inner_steps": 2}),
        task=Blocks(num_parameters),
        training=Training(workers=options.workers, rounds=options.rounds, learning_rate=1e-4),
        checkpoint_every=options.checkpoint_every,
    )


def memory_bytes(name: str) -> int:
    """A line of /proc/self/status: VmRSS now, VmHWM the peak."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def work(  # noqa: PLR0917 - arguments of a process
    options: argparse.Namespace,
    job: Job,
    worker: int,
    address: str,
    folder: Path,
    pipe: Connection,
) -> None:
    """A worker's process, which gives memory back as `gossamer worker` does."""
    return_freed_memory()
    before = memory_bytes("VmRSS")
    peaks: list[int] = []

    def tell(kind: str, fields: dict[str, Any]) -> None:
        if kind == "boundary":
            peaks.append(memory_bytes("VmHWM"))
            forget_peak()

    process = WorkerProcess(
        job, coordinator=address, worker=worker, events=tell, digests=False,
        folder=folder if options.checkpoint_every else None,
    )  # fmt: skip
    asyncio.run(process.run())
    pipe.send((max(peaks[2:]) - before, memory_bytes("VmRSS") - before))


def coordinate(job: Job, folder: Path, pipe: Connection) -> None:
    settings = CoordinatorSettings(
        store=folder / "run.sqlite", workers=job.training.workers, rounds=job.training.rounds,
        deadline=job.deadline_s, configuration=job.configuration,
    )  # fmt: skip
    asyncio.run(serve(settings, on_start=pipe.send))


def peak_bytes(options: argparse.Namespace, method: str, num_parameters: int) -> int:
    """The largest peak of the workers of one run."""
    job = make_job(options, method, num_parameters)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here, there = FORK.Pipe(duplex=False)
        coordinator = FORK.Process(target=coordinate, args=(job, folder, there))
        coordinator.start()
        address = here.recv()
        pipes, processes = [], []
        for worker in range(options.workers):
            mine, its = FORK.Pipe(duplex=False)
            args = (options, job, worker, address, folder, its)
            processes.append(FORK.Process(target=work, args=args))
            processes[-1].start()
            its.close()
            pipes.append(mine)
        try:
            return max(pipe.recv()[0] for pipe in pipes)
        finally:
            for process in (*processes, coordinator):
                process.kill()
                process.join()


def measure(options: argparse.Namespace, method: str) -> dict[str, Any]:
    small, large = (int(millions * 1e6) for millions in options.millions)
    peaks = [peak_bytes(options, method, size) for size in (small, large)]
    copies = (peaks[1] - peaks[0]) / (4 * (large - small))
    job = make_job(options, method, small)
    _, (replica,) = job.build_engine().new_replicas(1)
    state = job.method.init(replica)
    outer = sum(tensor.numel() for tensor in state_tensors(state).values()) / replica.layout.numel
    allowed = 1.15 * (MODEL + outer + PAYLOAD)
    return {
        "method": method,
        "peak_in_p": round(peaks[1] / (4 * large), 2),  # all of it, at the larger size
        "growth_in_p": round(copies, 2),  # of the peak with P alone
        "rest_mb": round((peaks[0] - 4 * copies * small) / 1e6, 1),
        "outer_state_in_p": round(outer, 2),
        "allowed_in_p": round(allowed, 2),
        "met": peaks[1] / (4 * large) <= allowed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", nargs="+", default=["diloco", "GlobalM1LocalM2", "LocalM1M2"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--millions", type=float, nargs=2, default=[4.0, 12.0])
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = make_job(options, "diloco", TENSORS * 64)  # imports what torch imports when first used
    engine = job.build_engine()
    engine.train(engine.new_replicas(1)[1][0], 1)
    for method in options.method:
        row = measure(options, method)
        print(json.dumps(row) if options.json else row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
