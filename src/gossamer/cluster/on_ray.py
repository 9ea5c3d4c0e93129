"""Worker processes that a Ray cluster places: the extra `gossamer[ray]`.

One actor a worker starts the same `gossamer worker` process as `LocalStarter` does, on whichever
machine Ray puts it, and hands on what it says. An actor that is lost with its machine looks like a
worker that has died, and is started again elsewhere.

The tests use a small stand-in for Ray's interface (`tests/cluster/fake_ray.py`). On a local Ray
2.60 it was tried once: a whole run, a killed worker, a killed actor, and Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.cluster.addresses import is_loopback, split_address
from gossamer.cluster.launch import Process, Tell, parse_event, worker_command
from gossamer.errors import ConfigError

POLL_S = 0.5  # between two questions to an actor
KEPT_LINES = 20  # of what a worker says on stderr


class WorkerActor:
    """What runs on the machine that Ray has chosen: one worker process, and its words.

    Args:
        config: the recipe, as TOML.
        arguments: of `gossamer worker`, after the recipe.
        threads: torch threads.
        host: where the worker listens; None: at this machine's address.
    """

    def __init__(self, config: str, arguments: list[str], threads: int, host: str) -> None:
        self._folder = tempfile.TemporaryDirectory()  # ends with the actor
        path = Path(self._folder.name) / "config.toml"
        path.write_text(config, encoding="utf-8")
        command = worker_command([str(path), *arguments, "--listen", f"{host}:0"])
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end is the worker's: it ends when the actor does
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self._told: deque[bytes] = deque()
        self._words: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self._child.stdout, self._told.append)),
            threading.Thread(target=self._read, args=(self._child.stderr, self._hear)),
        ]
        for reader in self._readers:
            reader.daemon = True
            reader.start()

    def _read(self, stream: Any, take: Callable[[bytes], None]) -> None:
        for line in stream:
            take(line)

    def _hear(self, line: bytes) -> None:
        self._words = [*self._words, line.decode(errors="replace").rstrip()][-KEPT_LINES:]

    def poll(self) -> tuple[list[bytes], int | None, str]:
        """What it has told since last asked, its exit code if it has ended, its last words."""
        code = self._child.poll()
        if code is not None:
            for reader in self._readers:
                reader.join()
        told = [self._told.popleft() for _ in range(len(self._told))]
        return told, code, self._words[-1] if self._words else ""

    def close(self) -> None:
        """Let go of a process that has ended, or is about to."""
        self._child.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        self._folder.cleanup()

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(number)


class RayStarter:
    """Starts each worker in an actor of its own.

    Args:
        coordinator: its address, which the machines of the cluster must reach.
        folder: the run's, on a file system that all of them share; holds `config.toml`.
        threads: CPUs that Ray reserves for a worker, and its torch threads.
        ray: the module; None imports it.

    Raises `ConfigError` where Ray is not installed.
    """

    def __init__(self, coordinator: str, *, folder: Path, threads: int, ray: Any = None) -> None:
        self._ray = ray if ray is not None else import_ray()
        self._coordinator, self._folder, self._threads = coordinator, folder.resolve(), threads
        self._config = (folder / "config.toml").read_text(encoding="utf-8")
        if not self._ray.is_initialized():
            self._ray.init()

    async def start(self, worker: int, tell: Tell) -> Process:
        """Start one."""
        arguments = ["--join", self._coordinator, "--index", str(worker),
                     "--out", str(self._folder)]  # fmt: skip
        local = is_loopback(split_address(self._coordinator)[0])
        actor_class = self._ray.remote(_HostedActor).options(
            num_cpus=self._threads, max_restarts=0, name=None
        )
        actor = actor_class.remote(self._config, arguments, self._threads, local)
        return _RayProcess(self._ray, actor, worker, tell)


class _HostedActor(WorkerActor):
    """Listens at the address of the node that Ray has put it on."""

    def __init__(self, config: str, arguments: list[str], threads: int, local: bool) -> None:
        host = "127.0.0.1" if local else import_ray().util.get_node_ip_address()
        super().__init__(config, arguments, threads, host)


class _RayProcess:
    """A worker process behind an actor."""

    def __init__(self, ray: Any, actor: Any, worker: int, tell: Tell) -> None:
        self._ray, self._actor, self._worker, self._tell = ray, actor, worker, tell
        self._words = ""
        self.place = "a Ray actor"

    async def wait(self) -> int:
        """Ask until it has ended; an actor that is lost counts as killed."""
        loop = asyncio.get_running_loop()
        while True:
            question = self._actor.poll.remote()
            try:
                told, code, self._words = await loop.run_in_executor(None, self._ray.get, question)
            except self._ray.exceptions.RayError as error:
                self._words = " ".join(str(error).split())
                return -signal.SIGKILL
            for line in told:
                event = parse_event(line)
                if event is not None:
                    self._tell(self._worker, *event)
            if code is not None:
                self._ray.kill(self._actor)
                return int(code)
            await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        self._actor.signal.remote(int(signal.SIGTERM))

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def last_words(self) -> str:
        return self._words


def import_ray() -> Any:
    """The `ray` module. Raises `ConfigError` naming the extra."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(
            "launching on Ray needs ray; install the extra: pip install 'gossamer[ray]'"
        ) from None
    return ray
