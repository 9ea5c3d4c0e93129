"""Worker processes that are started, watched, started again when they die, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gossamer.cluster.export import syncer_folder
from gossamer.errors import ConfigError

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the first, second, ... restart
HEALTHY_S = 600.0  # whoever has lived so long has all restarts again
KILLED_S = 2.0  # within which a process that is killed is gone
REFUSED = 2  # the exit code of a process that will be refused again

Tell = Callable[[int, str, dict[str, Any]], None]  # worker, kind, fields


class Process(Protocol):
    """One worker process."""

    @property
    def place(self) -> str:
        """Where it runs, for people."""

    async def wait(self) -> int:
        """Its exit code, when it has ended; negative: the signal that ended it."""

    def stop(self) -> None:
        """Ask it to end after the step that it is in."""

    def kill(self) -> None:
        """End it at once."""

    def last_words(self) -> str:
        """The last line that it wrote to stderr; empty where there is none."""


class Starter(Protocol):
    """A way to start worker processes."""

    async def start(self, worker: int, tell: Tell) -> Process:
        """Start one; `tell` hears its events."""


@dataclass
class Life:
    """What the supervisor knows of one worker."""

    state: Literal["starting", "alive", "pausing", "finished", "given up"] = "starting"
    restarts: int = 0  # in a row
    place: str = ""


class Supervisor:
    """Keeps one process alive for each worker, until all have finished.

    Args:
        starter: how to start a process.
        workers: indices.
        restarts: how often in a row a worker that has died is started again.
        tell: hears the workers' events, and "started", "died" and "given_up".
    """

    def __init__(
        self,
        starter: Starter,
        workers: Sequence[int],
        *,
        restarts: int,
        tell: Tell,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._starter, self._tell = starter, tell
        self._restarts, self._pauses_s = restarts, pauses_s
        self.lives = {worker: Life() for worker in workers}
        self._processes: dict[int, Process] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until each worker has finished, or was given up, or `stop` has ended all.

        Raises `ConfigError` where a process is refused: it would be so again.
        """
        tasks = [asyncio.create_task(self._keep(worker)) for worker in self.lives]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            self._stopping.set()
            for process in self._processes.values():
                process.kill()
            await asyncio.wait(tasks, timeout=KILLED_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def let_go(self) -> None:
        """Start nobody again: the run is over."""
        self._stopping.set()

    async def stop(self, grace_s: float) -> list[int]:
        """End all processes; those that take longer than `grace_s` are killed, and returned."""
        self._stopping.set()
        for process in self._processes.values():
            process.stop()
        loop = asyncio.get_running_loop()
        due = loop.time() + grace_s
        while self._processes and loop.time() < due:
            await asyncio.sleep(0.02)
        late = sorted(self._processes)
        for process in self._processes.values():
            process.kill()
        return late

    async def _keep(self, worker: int) -> None:
        loop, life = asyncio.get_running_loop(), self.lives[worker]
        while not self._stopping.is_set():
            began_s = loop.time()
            process = await self._starter.start(worker, self._tell)
            self._processes[worker] = process
            life.state, life.place = "alive", process.place
            self._tell(worker, "started", {"place": process.place, "restarts": life.restarts})
            try:
                code = await process.wait()
            finally:
                del self._processes[worker]
            if code == 0:
                life.state = "finished"
                return
            if code == REFUSED:
                words = process.last_words().removeprefix("error: ")
                raise ConfigError(f"worker {worker}: {words}")
            if self._stopping.is_set():
                return
            if loop.time() - began_s > HEALTHY_S:
                life.restarts = 0
            died = {"exit": describe_exit(code), "last_words": process.last_words()}
            if life.restarts >= self._restarts:
                life.state = "given up"
                self._tell(worker, "given_up", died)
                return
            pause_s = self._pauses_s[min(life.restarts, len(self._pauses_s) - 1)]
            life.state, life.restarts = "pausing", life.restarts + 1
            left = self._restarts - life.restarts
            self._tell(worker, "died", {**died, "pause_s": pause_s, "restarts_left": left})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


# ------------------------------------------------------------------------------- on this machine


class LocalStarter:
    """Worker processes on this machine, which end when this process does.

    Args:
        arguments: of `gossamer worker` or `gossamer syncer`, for the process at a place.
        folder: each one's `worker-NNN/log.txt` or `syncer-NNN/log.txt` in it takes what it says on
            stderr.
        threads: torch threads of each.
        num_workers: places after so many are syncers; None: all are workers.
    """

    def __init__(
        self,
        arguments: Callable[[int], list[str]],
        *,
        folder: Path,
        threads: int,
        num_workers: int | None = None,
    ) -> None:
        self._arguments, self._folder, self._threads = arguments, folder, threads
        self._num_workers = num_workers

    async def start(self, worker: int, tell: Tell) -> Process:
        """Start one."""
        root, command = self._folder / f"worker-{worker:03d}", worker_command
        if self._num_workers is not None and worker >= self._num_workers:
            root = syncer_folder(self._folder, worker - self._num_workers)
            command = syncer_command
        root.mkdir(parents=True, exist_ok=True)
        log = root / "log.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        with log.open("ab") as file:
            offset = file.tell()
            child = await asyncio.create_subprocess_exec(
                *command(self._arguments(worker)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone
                env=environment,
            )
        return _LocalProcess(child, worker, tell, log, offset)


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a worker process that is tied to the one that starts it."""
    return [sys.executable, "-m", "gossamer", "worker", *arguments, "--tied"]


def syncer_command(arguments: Sequence[str]) -> list[str]:
    """The same of a syncer process."""
    return [sys.executable, "-m", "gossamer", "syncer", *arguments, "--tied"]


class _LocalProcess:
    """One child process, which tells an event a line on its stdout."""

    def __init__(
        self, child: asyncio.subprocess.Process, worker: int, tell: Tell, log: Path, offset: int
    ) -> None:
        self._child, self._worker, self._tell = child, worker, tell
        self._log, self._offset = log, offset
        self.place = f"process {child.pid}"

    async def wait(self) -> int:
        """Hear it out."""
        assert self._child.stdout is not None
        async for line in self._child.stdout:
            told = parse_event(line)
            if told is not None:
                self._tell(self._worker, *told)
        return await self._child.wait()

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(number)

    def last_words(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def parse_event(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """Kind and fields of a line of a worker's stdout; None for anything else printed there."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        return None
    return fields.pop("kind"), fields
