"""Ten thousand connections to one worker of a run, and what that does to it.

    python benchmarks/hostile_connections.py --connections 10000 --json

Three workers with certificates train a small model. From round 5 on somebody without one opens
connections to worker 0 as fast as it can, says nothing, nonsense, or the beginning of a greeting on
each, and keeps what is not hung up on. The run shall end as if nothing had happened: with the
parameters of the simulated run, bit for bit. Memory is that of worker 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gossamer.cluster.certs import COORDINATOR, Credentials, issue, worker_name
from gossamer.cluster.coordinator import serve
from gossamer.cluster.job import Job
from gossamer.cluster.plan import CoordinatorSettings
from gossamer.cluster.process_memory import return_freed_memory
from gossamer.cluster.worker import WorkerProcess
from gossamer.methods import build_method
from gossamer.sim.simulate import simulate
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

FORK = multiprocessing.get_context("fork")  # torch is imported once
WORKERS = 3
BEGIN = 5  # the round in which the attack begins
GREETINGS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # of TLS, and then nothing
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes(range(256)),
)


def make_job(rounds: int) -> Job:
    return Job(
        method=build_method("diloco", {"inner_steps": 4}),
        task=TinyMLP(num_hidden=1000),
        training=Training(workers=WORKERS, rounds=rounds, learning_rate=0.01),
        deadline_s=20.0,
        step_time_s=0.05,
        checkpoint_every=0,
    )


def status_of(process: int | str, name: str) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def look_at(process: int) -> dict[str, int]:
    """Resident memory now and at most, and open files."""
    return {
        "rss_kib": status_of(process, "VmRSS"),
        "peak_kib": status_of(process, "VmHWM"),
        "files": len(os.listdir(f"/proc/{process}/fd")),  # noqa: PTH208
    }


def work(job: Job, worker: int, address: str, certs: Path, pipe: Connection) -> None:
    """A worker's process."""
    return_freed_memory()

    def tell(kind: str, fields: dict[str, Any]) -> None:
        if kind == "boundary":
            pipe.send((kind, {"round": fields["round"], "port": process.port}))
        elif kind in ("lost", "out_of_sync"):
            pipe.send((kind, fields))

    process = Telling(
        job, coordinator=address, worker=worker, events=tell, digests=False,
        credentials=Credentials.load(certs, worker_name(worker)),
    )  # fmt: skip
    asyncio.run(process.run())
    pipe.send(("end", {"parameters": process._replica.parameters.numpy().tobytes()}))


class Telling(WorkerProcess):
    """Says where it listens."""

    @property
    def port(self) -> int:
        return int(self._address.rpartition(":")[2])


def coordinate(job: Job, folder: Path, certs: Path, pipe: Connection) -> None:
    settings = CoordinatorSettings(
        store=folder / "run.sqlite", workers=WORKERS, rounds=job.training.rounds,
        deadline=job.deadline_s, configuration=job.configuration,
    )  # fmt: skip
    credentials = Credentials.load(certs, COORDINATOR)
    asyncio.run(serve(settings, credentials=credentials, on_start=pipe.send))


class Attack:
    """Connections to a port, by what became of them."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self.opened = self.refused = self.hung_up = 0
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Open all of them; returns when each is hung up on, or `end` was called."""
        gate = asyncio.Semaphore(500)  # attempts at a time
        await asyncio.gather(*(self._one(index, gate) for index in range(self._count)))

    def end(self) -> None:
        """Close what is still open."""
        self._over.set()

    async def _one(self, index: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            try:
                async with asyncio.timeout(30.0):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                self.refused += 1
                return
            self.opened += 1
            with contextlib.suppress(ConnectionError):
                writer.write(GREETINGS[index % len(GREETINGS)])
                await writer.drain()
        ended = asyncio.create_task(self._until_hung_up(reader))
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([ended, over], return_when=asyncio.FIRST_COMPLETED)
        self.hung_up += ended.done()
        for task in (ended, over):
            task.cancel()
        writer.transport.abort()

    async def _until_hung_up(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass


async def attack(port: int, victim: int, count: int) -> dict[str, Any]:
    """Attack a process; what it looked like meanwhile."""
    began, attackers = time.monotonic(), Attack(port, count)
    task = asyncio.create_task(attackers.run())
    looks = [look_at(victim)]
    while not task.done() and time.monotonic() - began < 60.0:
        await asyncio.wait([task], timeout=0.2)
        looks.append(look_at(victim))
    left_open = attackers.opened - attackers.hung_up
    attackers.end()
    await task
    return {
        "opened": attackers.opened, "refused": attackers.refused,
        "hung_up_on": attackers.opened - left_open, "seconds": time.monotonic() - began,
        "most_files": max(look["files"] for look in looks),
    }  # fmt: skip


def boundary(pipe: Connection, round_index: int) -> dict[str, Any]:
    """Wait for a worker's boundary."""
    while True:
        kind, fields = pipe.recv()
        if kind == "boundary" and fields["round"] >= round_index:
            return dict(fields)
        if kind != "boundary":
            raise SystemExit(f"{kind}: {fields}")


def harm(pipe: Connection, worker: int, expected: bytes) -> tuple[list[str], int]:
    """What went wrong for a worker until its end, and the rounds that it told of."""
    wrong, newest = [], 0
    while True:
        kind, fields = pipe.recv()
        if kind == "boundary":
            newest = fields["round"]
        elif kind == "end":
            if fields["parameters"] != expected:
                wrong.append(f"worker {worker} ended with other parameters")
            return wrong, newest
        else:
            wrong.append(f"worker {worker}: {kind} {fields}")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    job, certs = make_job(options.rounds), folder / "certs"
    simulated = simulate(method=job.method, task=job.task, training=job.training, seed=job.seed)
    issue(certs, WORKERS)
    here, there = FORK.Pipe(duplex=False)
    processes = [FORK.Process(target=coordinate, args=(job, folder, certs, there))]
    processes[0].start()
    address, pipes = here.recv(), []
    for worker in range(WORKERS):
        mine, its = FORK.Pipe(duplex=False)
        pipes.append(mine)
        processes.append(FORK.Process(target=work, args=(job, worker, address, certs, its)))
        processes[-1].start()
        its.close()
    try:
        victim = processes[1].pid or 0
        began = boundary(pipes[0], BEGIN)
        before = look_at(victim)
        attacked = asyncio.run(attack(began["port"], victim, options.connections))
        while pipes[0].poll():
            began = boundary(pipes[0], 0)
        after = look_at(victim)
        told = [
            harm(pipe, worker, simulated.parameters[worker].numpy().tobytes())
            for worker, pipe in enumerate(pipes)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {
        **attacked,
        "rounds_meanwhile": began["round"] - BEGIN,
        "harm": [line for wrong, _ in told for line in wrong],
        "before": before,
        "after": after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.connections + 1000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        sys.exit(f"{wanted} open files are needed, and at most {hard} are allowed: ulimit -n")
    job = make_job(1)  # imports what torch imports when it is first used
    engine = job.build_engine()
    engine.train(engine.new_replicas(1)[1][0], 1)
    with tempfile.TemporaryDirectory() as name:
        # Children that were forked before keep their own, usual limit.
        report = measure_with_files(options, Path(name), wanted)
    print(json.dumps(report, indent=1) if options.json else report)


def measure_with_files(options: argparse.Namespace, folder: Path, wanted: int) -> dict[str, Any]:
    """The attacker alone may open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    del soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return measure(options, folder)


if __name__ == "__main__":
    main()
