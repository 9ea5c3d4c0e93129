"""A long run of a tiny model in which workers are killed again and again: what grows?

    python benchmarks/soak.py --rounds 1000 --kill-every 20 --json

Worker 0 is never killed, the others are in turn, each as soon as the one before is back. Every few
rounds each worker notes its resident memory, asyncio tasks, threads and file descriptors, and so
does this program of the coordinator's memory. The slope is that of worker 0 after its warm-up (half
of the run, in which the C library's pools fill), by least squares; medians are given for each tenth
of the run, so that one sees where it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from gossamer.cluster.coordinator import serve
from gossamer.cluster.job import Job
from gossamer.cluster.plan import CoordinatorSettings
from gossamer.cluster.process_memory import return_freed_memory
from gossamer.cluster.worker import WorkerProcess
from gossamer.methods import build_method
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

FORK = multiprocessing.get_context("fork")  # torch is imported once
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
SAMPLE_EVERY = 5
SILENCE_S = 60.0

T = TypeVar("T")


def make_job(options: argparse.Namespace) -> Job:
    return Job(
        method=build_method(options.method, {"inner_steps": options.inner_steps}),
        task=TinyMLP(num_hidden=options.hidden),
        training=Training(workers=options.workers, rounds=options.rounds, learning_rate=0.01),
        deadline_s=options.deadline,
        step_time_s=options.step_time,
        checkpoint_every=0,
    )


def rss_kib(process: int | str = "self") -> int:
    """Resident memory of a process, now."""
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return pages * PAGE_KIB


def usage() -> dict[str, int]:
    """Of this process, now."""
    return {
        "rss_kib": rss_kib(),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }


def show_tasks(name: str) -> None:
    """What every task of this process waits for, on stderr."""
    print(f"--- {name}", file=sys.stderr)
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


async def explained(name: str, work: Coroutine[Any, Any, T]) -> T:
    """`work`, with its tasks shown where a signal asks for them."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, show_tasks, name)
    return await work


def work(options: argparse.Namespace, worker: int, address: str, pipe: Connection) -> None:
    """A worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return_freed_memory()

    def tell(kind: str, fields: dict[str, Any]) -> None:
        if kind == "boundary":
            sample = usage() if fields["round"] % SAMPLE_EVERY == 0 else {}
            pipe.send(("boundary", {"round": fields["round"], **sample}))
        elif kind in ("joined", "out_of_sync", "lost"):
            pipe.send((kind, fields))

    process = WorkerProcess(
        make_job(options), coordinator=address, worker=worker, events=tell, digests=False
    )
    summary = asyncio.run(explained(f"worker {worker}", process.run()))
    pipe.send(("end", {"records": summary["records"]}))


def coordinate(options: argparse.Namespace, folder: Path, pipe: Connection) -> None:
    """The coordinator's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = make_job(options)
    settings = CoordinatorSettings(
        store=folder / "run.sqlite",
        workers=options.workers,
        rounds=options.rounds,
        deadline=job.deadline_s,
        configuration=job.configuration,
    )
    asyncio.run(serve(settings, on_start=pipe.send))


@dataclass
class Soak:
    """The run, seen from outside."""

    options: argparse.Namespace
    address: str
    processes: dict[int, multiprocessing.process.BaseProcess] = field(default_factory=dict)
    pipes: dict[int, Connection] = field(default_factory=dict)
    coordinator: int = 0  # its process id
    samples: dict[int, list[dict[str, int]]] = field(default_factory=dict)
    coordinator_samples: list[dict[str, int]] = field(default_factory=list)
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    newest: int = 0
    kills: int = 0
    back_after_s: list[float] = field(default_factory=list)
    longest_round_s: float = 0.0
    surprises: list[str] = field(default_factory=list)
    _last_at: float = 0.0
    _killed: tuple[int, int, float] | None = None  # worker, in round, when

    def start(self, worker: int) -> None:
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=work, args=(self.options, worker, self.address, there))
        process.start()
        there.close()
        self.processes[worker], self.pipes[worker] = process, here

    def kill(self, worker: int) -> None:
        self.processes[worker].kill()
        self.processes[worker].join()
        self._drain(worker)
        self.pipes[worker].close()
        self._killed = (worker, self.newest, time.monotonic())
        self.kills += 1
        self.start(worker)

    def _drain(self, worker: int) -> None:
        try:
            while self.pipes[worker].poll():
                self.heard(worker, *self.pipes[worker].recv())
        except EOFError:
            pass

    def heard(self, worker: int, kind: str, fields: dict[str, Any]) -> None:
        if kind == "boundary":
            self._passed(worker, fields)
        elif kind == "joined" and self._killed is not None and self._killed[0] == worker:
            self.back_after_s.append(time.monotonic() - self._killed[2])
            self._killed = None
        elif kind == "out_of_sync":
            self.surprises.append(f"worker {worker}: {fields['reason']}")
        elif kind == "end":
            self.ended[worker] = fields

    def _passed(self, worker: int, fields: dict[str, Any]) -> None:
        if worker == 0:
            now = time.monotonic()
            if self._last_at:
                self.longest_round_s = max(self.longest_round_s, now - self._last_at)
            self._last_at, self.newest = now, fields["round"]
            if "rss_kib" in fields:
                sample = {"round": self.newest, "rss_kib": rss_kib(self.coordinator)}
                self.coordinator_samples.append(sample)
        if "rss_kib" in fields:
            self.samples.setdefault(worker, []).append(fields)

    def run(self) -> None:
        """Until the last round, or until the time is over."""
        options, began = self.options, time.monotonic()
        for worker in range(options.workers):
            self.start(worker)
        victim, next_kill = 0, options.kill_every
        while len(self.ended) < options.workers and time.monotonic() - began < options.seconds:
            ready = wait([p for w, p in self.pipes.items() if w not in self.ended], SILENCE_S)
            if not ready:
                for process in self.processes.values():
                    os.kill(process.pid or 0, signal.SIGUSR1)
                time.sleep(2.0)
                raise SystemExit(f"nothing happened for {SILENCE_S:g} s in round {self.newest}")
            for worker, pipe in list(self.pipes.items()):
                if pipe in ready:
                    try:
                        self.heard(worker, *pipe.recv())
                    except EOFError:
                        raise SystemExit(f"worker {worker} ended by itself") from None
            last = options.rounds - options.kill_every
            if self._killed is None and next_kill <= self.newest < last:
                victim = victim % (options.workers - 1) + 1
                next_kill = self.newest + options.kill_every
                self.kill(victim)

    def _by_tenth(self, samples: list[dict[str, int]]) -> list[int]:
        """The median of resident memory in each tenth of the run."""
        tenths: list[list[int]] = [[] for _ in range(10)]
        for sample in samples:
            tenths[min(9, 10 * sample["round"] // self.newest)].append(sample["rss_kib"])
        return [round(statistics.median(tenth)) for tenth in tenths if tenth]

    def report(self) -> dict[str, Any]:
        mine = self.samples[0]
        warm = [s for s in mine if s["round"] >= self.newest / 2]
        rounds, rss = [s["round"] for s in warm], [s["rss_kib"] for s in warm]
        slope = statistics.linear_regression(rounds, rss).slope if len(warm) > 1 else float("nan")
        return {
            "method": self.options.method,
            "workers": self.options.workers,
            "parameters": make_job(self.options).build_engine().layout.numel,
            "rounds": self.newest,
            "kills": self.kills,
            "back": len(self.back_after_s),
            "back_after_s_max": max(self.back_after_s, default=None),
            "longest_round_s": self.longest_round_s,
            "surprises": self.surprises,
            "rss_kib_slope_per_1000_rounds": 1000 * slope,
            "rss_kib_first_last": [rss[0], rss[-1]] if rss else None,
            "rss_kib_by_tenth": self._by_tenth(mine),
            "coordinator_rss_kib_by_tenth": self._by_tenth(self.coordinator_samples),
            "workers_newest": {w: s[-1] for w, s in sorted(self.samples.items())},
            "most": {
                name: {w: max(s[name] for s in seen) for w, seen in sorted(self.samples.items())}
                for name in ("rss_kib", "tasks", "threads", "files")
            },
            "worker_0": mine[:: max(1, len(mine) // 20)],
        }


def warm_up(options: argparse.Namespace) -> None:
    """Import what torch imports when it is first used, before anything is forked."""
    torch.set_num_threads(1)
    engine = make_job(options).build_engine()
    engine.train(engine.new_replicas(1)[1][0], 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--kill-every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--method", default="diloco")
    parser.add_argument("--inner-steps", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2000)
    parser.add_argument("--step-time", type=float, default=0.02)
    parser.add_argument("--deadline", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    warm_up(options)
    with tempfile.TemporaryDirectory() as folder:
        here, there = FORK.Pipe(duplex=False)
        coordinator = FORK.Process(target=coordinate, args=(options, Path(folder), there))
        coordinator.start()
        soak = Soak(options, here.recv(), coordinator=coordinator.pid or 0)
        try:
            soak.run()
            report = soak.report()
        finally:
            for process in (*soak.processes.values(), coordinator):
                process.kill()
                process.join()
    if options.json:
        print(json.dumps(report, indent=1))
        return
    for name, value in report.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
