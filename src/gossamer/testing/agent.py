"""A worker's transport in a process of its own, which another process drives.

`python -m gossamer.testing.agent` imports everything once and then forks an agent for each line of
JSON that it reads. An agent enters a network namespace before it opens anything, starts a
`GrpcTransport` there and does what it is told over a Unix socket: commands as JSON, tensors as raw
bytes behind them.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer import errors
from gossamer.cluster.certs import Credentials, worker_name
from gossamer.cluster.limits import Limits
from gossamer.cluster.transport import GrpcTransport
from gossamer.cluster.wire import DTYPES, raw_bytes
from gossamer.comm.context import Tag, Transfer
from gossamer.errors import CommError

_CLONE_NEWNET = 0x40000000
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}

Fields = dict[str, Any]


def enter_namespace(name: str) -> None:
    """Open the sockets of this thread, and of those that it starts, in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------- what is said


def say(line: Connection, fields: Fields, payload: Tensor | None = None) -> None:
    """Send a message, with a tensor behind it where there is one."""
    if payload is not None:
        fields = {**fields, "dtype": str(payload.dtype), "shape": list(payload.shape)}
    line.send_bytes(json.dumps(fields).encode())
    if payload is not None:
        line.send_bytes(raw_bytes(payload).numpy().tobytes())


def hear(line: Connection) -> tuple[Fields, Tensor | None]:
    """The next message. Raises `EOFError` where the other end is gone."""
    fields: Fields = json.loads(line.recv_bytes())
    if "dtype" not in fields:
        return fields, None
    raw, dtype = bytearray(line.recv_bytes()), _DTYPES[fields["dtype"]]
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return fields, flat.reshape(fields["shape"])


def describe(error: CommError) -> list[str]:
    """An error's class, as `gossamer.errors` has it, and its words."""
    kind = next(kind for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
    return [kind.__name__, str(error)]


def error_from(described: list[str]) -> CommError:
    """The reverse of `describe`."""
    kind: type[CommError] = getattr(errors, described[0])
    return kind(described[1])


# ------------------------------------------------------------------------------------ the agent


class _Agent:
    """One transport, and the commands that are under way."""

    def __init__(self, line: Connection, transport: GrpcTransport) -> None:
        self._line, self._transport = line, transport
        self._transfers: dict[int, Transfer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def listen(self) -> None:
        """Take commands, in a thread of its own."""
        try:
            while True:
                self._loop.call_soon_threadsafe(self._do, *hear(self._line))
        except (EOFError, OSError):
            os._exit(1)  # whoever drives this is gone

    def _do(self, told: Fields, payload: Tensor | None) -> None:
        number, what = told["number"], told["what"]
        transport = self._transport
        if what == "send":
            assert payload is not None
            tag = Tag(*told["tag"])
            transfer = transport.send(told["dst"], tag, payload, exact=told["exact"])
            self._transfers[number] = transfer
        elif what == "cancel":
            self._transfers[told["transfer"]].cancel()
        elif what == "abandon":
            if told["request"] in self._tasks:  # else its answer is on the way
                self._tasks[told["request"]].cancel()
        elif what == "set_peer":
            transport.set_peer(told["worker"], told["address"])
        elif what == "peer_lost":
            transport.peer_lost(told["worker"])
        elif what == "peer_back":
            transport.peer_back(told["worker"])
        elif what == "begin_round":
            transport.begin_round(told["round"])
        else:
            work = getattr(self, f"_{what}")(told)
            self._tasks[number] = self._loop.create_task(self._finish(number, work))
        # After the first step of a task that has just been made: it waits by then.
        self._loop.call_soon(say, self._line, {"number": number, "begun": True})

    async def _finish(self, number: int, work: Any) -> None:
        fields: Fields = {"number": number}
        payload: Tensor | None = None
        try:
            payload = await work
        except CommError as error:
            fields["error"] = describe(error)
        except asyncio.CancelledError:
            fields["error"] = describe(CommError("the driver waits for it no longer"))
        del self._tasks[number]
        say(self._line, fields, payload)

    async def _recv(self, told: Fields) -> Tensor:
        return await self._transport.recv(told["src"], Tag(*told["tag"]), told["timeout_s"])

    async def _delivered(self, told: Fields) -> None:
        await self._transfers[told["transfer"]].delivered()

    async def _under_way(self, told: Fields) -> None:
        while not self._transport.knows_of(told["src"], Tag(*told["tag"])):
            await asyncio.sleep(0.005)

    async def _close(self, told: Fields) -> None:
        """End the transport. An error where it leaves tasks behind."""
        await self._transport.close(0.0)
        await asyncio.sleep(0)
        known = {asyncio.current_task(), *self._tasks.values()}
        left = [t for t in asyncio.all_tasks() if t not in known and t.get_name() != "agent"]
        if left:
            raise CommError(f"tasks left over: {left}")


async def _serve(line: Connection, options: Fields) -> None:
    current = asyncio.current_task()
    assert current is not None
    current.set_name("agent")
    worker = options["worker"]
    credentials = None
    if options["certs"] is not None:
        credentials = Credentials.load(Path(options["certs"]), worker_name(worker))
    transport = GrpcTransport(
        worker, options["run_id"], listen=options["listen"], credentials=credentials,
        limits=Limits.model_validate(options["limits"]), rate=options["rate"],
    )  # fmt: skip
    address = await transport.start()
    agent = _Agent(line, transport)
    say(line, {"pid": os.getpid(), "address": address})
    threading.Thread(target=agent.listen, daemon=True).start()
    await asyncio.Event().wait()  # it ends when its driver says so, or is gone


def _be_agent(options: Fields) -> None:
    if options["namespace"] is not None:
        enter_namespace(options["namespace"])
    line: Connection = Client(options["socket"], "AF_UNIX")
    asyncio.run(_serve(line, options))


def main() -> None:
    """Fork an agent for each line of stdin."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for text in sys.stdin:
        if os.fork() == 0:
            try:
                _be_agent(json.loads(text))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                raise
            finally:
                sys.stderr.flush()
                os._exit(1)


if __name__ == "__main__":
    main()
