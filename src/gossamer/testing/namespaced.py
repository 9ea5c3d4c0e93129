"""The conformance suite's harness over gRPC between network namespaces (see `namespaces`).

    reason = missing()                  # of `gossamer.testing.namespaces`
    with namespaced(3, certs) as harness:
        check(harness)

Each transport lives in a process of its own inside its host; a killed one is killed indeed, and a
cut link loses packets. The scenario runs here, over proxies: payloads are copied to the process on
`send`, so that what a rule says of the payload's memory is not tested by this harness.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.cluster.limits import Limits
from gossamer.comm.context import Tag
from gossamer.testing.agent import error_from, hear, say
from gossamer.testing.harness import PATIENCE_S, Scenario
from gossamer.testing.namespaces import Hosts, shaped_hosts

KEEPALIVE_S = 1.0
MBIT = 1000.0
_PORT = 7000
_SCENARIO_S = 60.0

Answer = Future[Tensor | None]


class RemoteTransfer:
    """A transfer of another process."""

    def __init__(self, end: RemoteEnd, number: int) -> None:
        self._end, self._number = end, number

    async def delivered(self) -> None:
        """See `Transfer.delivered`."""
        await self._end.outcome("delivered", {"transfer": self._number})

    def cancel(self) -> None:
        """See `Transfer.cancel`."""
        self._end.cancel_transfer(self._number)


class RemoteEnd:
    """A transport in another process; implements `Transport`.

    What a transport does at once has been done there when it returns here.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line
        hello, _ = hear(line)
        self.pid, self.address = int(hello["pid"]), str(hello["address"])
        self._number = 0
        self._begun: dict[int, Future[None]] = {}
        self._answers: dict[int, Answer] = {}
        self._gone = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                told, payload = hear(self._line)
                if "begun" in told:
                    self._begun.pop(told["number"]).set_result(None)
                    continue
                answer = self._answers.pop(told["number"])
                if not answer.set_running_or_notify_cancel():
                    continue
                if "error" in told:
                    answer.set_exception(error_from(told["error"]))
                else:
                    answer.set_result(payload)
        self._gone.set()
        self._line.close()

    def _ask(
        self,
        what: str,
        fields: dict[str, Any],
        *,
        payload: Tensor | None = None,
        answer: Answer | None = None,
    ) -> int:
        """Have something done, or begun; the number of the request."""
        number = self._number = self._number + 1
        begun = self._begun[number] = Future()
        if answer is not None:
            self._answers[number] = answer
        say(self._line, {"number": number, "what": what, **fields}, payload)
        begun.result(PATIENCE_S)
        return number

    async def outcome(self, what: str, fields: dict[str, Any]) -> Tensor | None:
        """What something that waits comes to."""
        answer: Answer = Future()
        number = self._ask(what, fields, answer=answer)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._ask("abandon", {"request": number})
            raise

    def cancel_transfer(self, number: int) -> None:
        """See `Transfer.cancel`."""
        self._ask("cancel", {"transfer": number})

    def set_peer(self, worker: int, address: str) -> None:
        """Where another listens."""
        self._ask("set_peer", {"worker": worker, "address": address})

    def send(self, dst: int, tag: Tag, payload: Tensor, *, exact: bool = False) -> RemoteTransfer:
        """See `Transport.send`."""
        fields = {"dst": dst, "tag": list(tag), "exact": exact}
        return RemoteTransfer(self, self._ask("send", fields, payload=payload))

    async def recv(self, src: int, tag: Tag, timeout_s: float) -> Tensor:
        """See `Transport.recv`."""
        payload = await self.outcome("recv", {"src": src, "tag": list(tag), "timeout_s": timeout_s})
        assert payload is not None
        return payload

    def begin_round(self, round_index: int) -> None:
        """See `Transport.begin_round`."""
        self._ask("begin_round", {"round": round_index})

    def peer_lost(self, worker: int) -> None:
        """See `Transport.peer_lost`."""
        self._ask("peer_lost", {"worker": worker})

    def peer_back(self, worker: int) -> None:
        """See `Transport.peer_back`."""
        self._ask("peer_back", {"worker": worker})

    def kill(self) -> None:
        """End the process without a word."""
        os.kill(self.pid, signal.SIGKILL)
        self._gone.wait(PATIENCE_S)

    async def close(self) -> None:
        """End the transport, then the process. Raises `CommError` where tasks are left over."""
        if not self._gone.is_set():
            await self.outcome("close", {})
            self.kill()


class _Endpoints:
    """Implements `Endpoints`."""

    def __init__(self, forge: _Forge, num_workers: int, hosts: Hosts, options: dict[str, Any]):
        self.keepalive_s = float(options["limits"]["keepalive"])
        self._forge, self._hosts, self._options = forge, hosts, options
        self._cut: list[tuple[int, int]] = []
        self._ends = [self._start(worker) for worker in range(num_workers)]
        for worker in range(num_workers):
            self._introduce(worker)

    def _start(self, worker: int) -> RemoteEnd:
        return self._forge.start(
            {
                **self._options,
                "worker": worker,
                "namespace": self._hosts.name(worker),
                "listen": f"{self._hosts.address(worker)}:{_PORT}",
            }
        )

    def _others(self, worker: int) -> list[int]:
        return [other for other in range(len(self._ends)) if other != worker]

    def _introduce(self, worker: int) -> None:
        for other in self._others(worker):
            self._ends[worker].set_peer(other, self._ends[other].address)

    def __getitem__(self, worker: int) -> RemoteEnd:
        return self._ends[worker]

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def under_way(self, src: int, dst: int, tag: Tag) -> None:
        await self._ends[dst].outcome("under_way", {"src": src, "tag": list(tag)})

    async def kill(self, worker: int) -> None:
        self._ends[worker].kill()
        for other in self._others(worker):
            self._ends[other].peer_lost(worker)

    async def revive(self, worker: int) -> None:
        self._ends[worker] = self._start(worker)  # at the address that it had
        self._introduce(worker)
        for other in self._others(worker):
            self._ends[other].peer_back(worker)

    def cut(self, first: int, second: int) -> None:
        self._hosts.part(first, second)
        self._cut.append((first, second))

    def restore(self, first: int, second: int) -> None:
        self._cut.remove((first, second))
        self._hosts.reunite(first, second)

    async def close(self) -> None:
        for pair in list(self._cut):
            self.restore(*pair)
        await asyncio.gather(*(end.close() for end in self._ends))


class _Forge:
    """Makes agents from one process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "agents.sock")
        self._listener = Listener(self._socket, "AF_UNIX", backlog=16)
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "gossamer.testing.agent"], stdin=subprocess.PIPE, text=True
        )

    def start(self, options: dict[str, Any]) -> RemoteEnd:
        """An agent."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps({**options, "socket": self._socket}) + "\n")
        self._parent.stdin.flush()
        return RemoteEnd(self._listener.accept())

    def close(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(PATIENCE_S)
        self._listener.close()


class NamespaceHarness:
    """Implements `Harness`; made by `namespaced`."""

    def __init__(self, forge: _Forge, hosts: Hosts, certs: Path, limits: Limits) -> None:
        self._forge, self._hosts, self._certs, self._limits = forge, hosts, certs, limits

    def run(self, num_workers: int, scenario: Scenario, *, rate: float | None = None) -> None:
        """See `Harness.run`. Raises `CommError` where a process has tasks left over at the end."""
        options = {
            "run_id": "conformance",
            "certs": str(self._certs),
            "limits": self._limits.model_dump(mode="json"),
            "rate": rate,
        }
        asyncio.run(self._run(_Endpoints(self._forge, num_workers, self._hosts, options), scenario))

    async def _run(self, ends: _Endpoints, scenario: Scenario) -> None:
        async with asyncio.timeout(_SCENARIO_S):
            try:
                await scenario(ends)
            finally:
                await ends.close()


@contextmanager
def namespaced(
    num_hosts: int, certs: Path, limits: Limits | None = None
) -> Iterator[NamespaceHarness]:
    """A harness on `num_hosts` hosts of this machine, with mutual TLS.

    Args:
        num_hosts: the most workers of a scenario.
        certs: folder of `gossamer certs`.
        limits: of every worker.
    """
    limits = limits or Limits(keepalive=KEEPALIVE_S, untaken_max=500_000.0)
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(num_hosts, mbit=MBIT) as hosts:
        forge = _Forge(Path(folder))
        try:
            yield NamespaceHarness(forge, hosts, certs, limits)
        finally:
            forge.close()
