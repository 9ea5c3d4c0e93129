"""Real processes for tests: started by forking, told apart, killed and stopped; see `programs`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from programs import HeldTask, make_job

from gossamer.cluster.certs import issue
from gossamer.cluster.job import Job
from gossamer.testing.namespaces import HUB_ADDRESS, Hosts

PATIENCE_S = 60.0
"""For what happens within a second or two unless the machine is very busy."""

PORT = 7000  # on hosts of their own

Event = dict[str, Any]


class Process:
    """One forked process and what it has told."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.pid = 0
        self.events: list[Event] = []
        self.ended = False
        self._changed = threading.Condition()
        self._line: socket.socket | None = None

    def connected(self, line: socket.socket, reader: Iterator[bytes], hello: Event) -> None:
        """It has come: hear it to its end."""
        with self._changed:
            self._line, self.pid = line, hello["pid"]
            self._changed.notify_all()
        for text in reader:
            with self._changed:
                self.events.append({**json.loads(text), "at": time.monotonic()})
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise AssertionError(
                    f"{self.name}: no {what} within {timeout_s:g} s: {self.tail()}"
                )
            return condition()

    @property
    def name(self) -> str:
        return f"{self.options['program']} {self.options.get('worker', '')}"

    def find(self, kind: str, **fields: Any) -> list[Event]:
        """Its events of a kind with these fields, in order."""
        return [
            e
            for e in list(self.events)
            if e["event"] == kind and all(e.get(name) == value for name, value in fields.items())
        ]

    def wait(
        self, kind: str, *, count: int = 1, timeout_s: float = PATIENCE_S, **fields: Any
    ) -> Event:
        """The `count`-th such event."""

        def found() -> Event | None:
            events = self.find(kind, **fields)
            if len(events) >= count:
                return events[count - 1]
            if self.ended:
                raise AssertionError(f"{self.name} ended without {kind} {fields}: {self.tail()}")
            return None

        event: Event = self._until(found, f"{kind} {fields}", timeout_s)
        return event

    def nothing_for(self, kind: str, seconds: float, **fields: Any) -> None:
        """For so long there is no such event."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.find(kind, **fields), seconds)
        assert not came, (kind, fields)

    def wait_until(self, what: str, condition: Callable[[Process], Any]) -> None:
        self._until(lambda: condition(self), what, PATIENCE_S)

    def tail(self) -> str:
        """What it told last, for people."""
        rare = [e for e in self.events if e["event"] not in ("position", "boundary")][-10:]
        told = [*rare, *[e for e in self.events if e["event"] == "boundary"][-3:]]
        return "\n".join(str(event)[:200] for event in told)

    def wait_pid(self) -> None:
        self._until(lambda: self.pid, "process", PATIENCE_S)

    def go(self) -> None:
        """Let it go on from where it is held."""
        assert self._line is not None
        self._line.sendall(b"\n")

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        self._until(lambda: self.ended, "end", PATIENCE_S)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def stop_for(self, seconds: float) -> None:
        """Frozen for so long, and not a moment of it heard from."""
        self.stop()
        with self._changed:
            known = len(self.events)
            self._changed.wait_for(lambda: len(self.events) > known + 1, seconds)
            assert len(self.events) <= known + 1, "it was stopped"
        self.resume()

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        self.wait_pid()
        os.kill(self.pid, number)

    def end(self) -> None:
        """Make sure that it is gone."""
        if self.pid and not self.ended:
            with contextlib.suppress(ProcessLookupError):  # it ended, and we have not heard yet
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


class Forge:
    """Makes processes from one that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "tests.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(64)
        self._processes: dict[int, Process] = {}
        self._next = 0
        self._parent = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("programs.py")), self._address],
            stdin=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(line,), daemon=True).start()

    def _hear(self, line: socket.socket) -> None:
        reader = line.makefile("rb")
        hello = json.loads(reader.readline())
        self._processes[hello["id"]].connected(line, reader, hello)
        reader.close()

    def start(self, options: dict[str, Any]) -> Process:
        self._next += 1
        process = self._processes[self._next] = Process(options)
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps({**options, "id": self._next}) + "\n")
        self._parent.stdin.flush()
        return process

    def end_all(self) -> None:
        for process in self._processes.values():
            process.end()
            process.close()
        self._processes = {}

    def close(self) -> None:
        self.end_all()
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(PATIENCE_S)
        # A thread in accept() is woken by shutdown, not by close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Cluster:
    """One run: a coordinator process and its workers, on `hosts` where they are given."""

    def __init__(self, forge: Forge, folder: Path, hosts: Hosts | None = None, **job: Any) -> None:
        self._forge, self.folder, self.job_options, self._hosts = forge, folder, job, hosts
        self.workers: dict[int, Process] = {}
        self.syncers: dict[int, Process] = {}
        self.job: Job = make_job(job, lambda point, round_index: None)
        self.address = "127.0.0.1:0"
        self._on_hub: dict[str, Any] = {}
        if hosts is not None:
            self.address = f"{HUB_ADDRESS}:{PORT}"
            certs = folder / "certs"
            issue(certs, self.job.training.workers, num_syncers=self.job.method.num_syncers)
            self._on_hub = {"namespace": hosts.hub_name, "certs": str(certs)}
        self.coordinator = self.start_coordinator()

    def start_coordinator(self) -> Process:
        """A coordinator; where there was one, at its address and with its store."""
        job = self.job
        settings = {
            "listen": self.address,
            "store": str(self.folder / "run.sqlite"),
            "workers": job.training.workers,
            "syncers": job.method.num_syncers,
            "rounds": job.training.rounds,
            "deadline": job.deadline_s,
            "configuration": job.configuration,
            **self.job_options.get("coordinator_settings", {}),
        }
        process = self._forge.start(
            {"program": "coordinator", "settings": settings, **self._on_hub}
        )
        self.address = process.wait("listening")["address"]
        self.coordinator = process
        return process

    def with_workers(self, workers: int, *, run_id: str | None) -> Cluster:
        """A new coordinator for the workers' checkpoints of a run, with another number of them."""
        options = {**self.job_options, "workers": workers}
        options["coordinator_settings"] = {"run_id": run_id}
        return Cluster(self._forge, self.folder, self._hosts, **options)

    def start(self, worker: int, **options: Any) -> Process:
        """Start a worker process, or start it again."""
        given = {"program": "worker", "worker": worker, "coordinator": self.address}
        if self.job_options.get("saves"):
            given["folder"] = str(self.folder)
        if self._hosts is not None:
            given["listen"] = f"{self._hosts.address(worker)}:{PORT}"
            given |= {**self._on_hub, "namespace": self._hosts.name(worker)}
        process = self._forge.start({**self.job_options, **given, **options})
        self.workers[worker] = process
        return process

    def start_all(
        self, holds: dict[int, list[tuple[str, int]]] | None = None, **options: Any
    ) -> None:
        for worker in range(self.job.training.workers):
            self.start(worker, hold=(holds or {}).get(worker, []), **options)

        for index in range(self.job.method.num_syncers):
            self.start_syncer(index)

    def start_syncer(self, index: int = 0, **options: Any) -> Process:
        """Start a syncer process, or start it again."""
        given = {"program": "syncer", "index": index, "coordinator": self.address}
        process = self._forge.start(
            {**self.job_options, **given, "folder": str(self.folder), **options}
        )
        self.syncers[index] = process
        return process

    def others(self, *without: int) -> list[Process]:
        return [p for w, p in self.workers.items() if w not in without]

    def finish(self, *workers: int) -> dict[int, Event]:
        """The last words of these workers, by default of all."""
        names = workers or tuple(self.workers)
        return {worker: self.workers[worker].wait("end") for worker in names}


@contextmanager
def forge_in(folder: Path) -> Iterator[Forge]:
    forge = Forge(folder)
    try:
        yield forge
    finally:
        forge.close()


__all__ = ["PATIENCE_S", "Cluster", "Event", "Forge", "HeldTask", "Process", "forge_in"]
