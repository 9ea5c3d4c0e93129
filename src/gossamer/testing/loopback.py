"""The conformance suite's harness over gRPC on this machine, and links that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.cluster.certs import Credentials, worker_name
from gossamer.cluster.limits import Limits
from gossamer.cluster.transport import GrpcTransport
from gossamer.comm.context import Tag
from gossamer.testing.harness import LetterScenario, Scenario

KEEPALIVE_S = 1.0
_SCENARIO_S = 60.0
_PIECE_BYTES = 1 << 16


class CuttableLink:
    """A TCP forwarder to one address that can let nothing through, as a cut cable does.

        link = CuttableLink("127.0.0.1:4000")
        address = await link.open()         # connect here instead
        link.cut(); link.restore(); link.reset(); await link.close()

    A cut is silent: connections stay, and what is sent waits, and follows when it is restored.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._writers: dict[asyncio.StreamWriter, None] = {}
        self._pumps: dict[asyncio.Task[None], None] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._accepts = True
        self.address = ""
        self.forwarded_bytes = 0

    async def open(self) -> str:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    def cut(self) -> None:
        """Let nothing through."""
        self._open.clear()

    def restore(self) -> None:
        """Let everything through."""
        self._open.set()

    def reset(self) -> None:
        """Break all connections and take no new ones, as when the process at the end dies."""
        self._accepts = False
        for writer in list(self._writers):
            writer.transport.abort()

    def lead_to(self, target: str) -> None:
        """Take connections again, to a new address."""
        self.target, self._accepts = target, True

    async def close(self) -> None:
        """End everything."""
        self.reset()
        self.restore()
        if self._server is not None:
            self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        if self._pumps:
            await asyncio.wait(list(self._pumps))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = None
        host, _, port = self.target.rpartition(":")
        try:
            if not self._accepts:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            self._writers.pop(writer, None)
            return
        self._writers[far_writer] = None
        loop = asyncio.get_running_loop()
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = loop.create_task(self._pump(source, sink))
            self._pumps[pump] = None
            pump.add_done_callback(lambda done: self._pumps.pop(done, None))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(_PIECE_BYTES):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
                self.forwarded_bytes += len(data)
        except ConnectionError:
            pass  # either end may break; the other end learns of it below
        finally:
            sink.transport.abort()
            self._writers.pop(sink, None)


class _Endpoints:
    """Implements `Endpoints`."""

    def __init__(
        self, num_workers: int, certs: Path | None, limits: Limits, rate: float | None
    ) -> None:
        self.keepalive_s = limits.keepalive
        self._num_workers, self._certs, self._limits, self._rate = num_workers, certs, limits, rate
        self._transports: list[GrpcTransport] = []
        self._links: dict[tuple[int, int], CuttableLink] = {}  # from, to
        self._dead: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._transports = [self._transport(worker) for worker in range(self._num_workers)]
        addresses = [await transport.start() for transport in self._transports]
        for src in range(self._num_workers):
            for dst in range(self._num_workers):
                if src != dst:
                    link = self._links[src, dst] = CuttableLink(addresses[dst])
                    self._transports[src].set_peer(dst, await link.open())

    def _transport(self, worker: int) -> GrpcTransport:
        credentials = None
        if self._certs is not None:
            credentials = Credentials.load(self._certs, worker_name(worker))
        return GrpcTransport(
            worker, "conformance", listen="127.0.0.1:0", credentials=credentials,
            limits=self._limits, rate=self._rate,
        )  # fmt: skip

    async def close(self) -> None:
        await asyncio.gather(*(transport.close(0.0) for transport in self._transports))
        await asyncio.gather(*self._dead)
        for link in self._links.values():
            await link.close()

    def __getitem__(self, worker: int) -> GrpcTransport:
        return self._transports[worker]

    def letters(self, worker: int) -> GrpcTransport:
        return self._transports[worker]

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def under_way(self, src: int, dst: int, tag: Tag) -> None:
        while not self._transports[dst].knows_of(src, tag):
            await asyncio.sleep(0.005)

    def _links_of(self, worker: int) -> list[CuttableLink]:
        return [link for ends, link in self._links.items() if worker in ends]

    async def kill(self, worker: int) -> None:
        for link in self._links_of(worker):
            link.reset()
        loop = asyncio.get_running_loop()
        self._dead.append(loop.create_task(self._transports[worker].close(0.0)))
        for other in range(self._num_workers):
            if other != worker:
                self._transports[other].peer_lost(worker)

    async def revive(self, worker: int) -> None:
        transport = self._transports[worker] = self._transport(worker)
        address = await transport.start()
        for (src, dst), link in self._links.items():
            if worker in (src, dst):
                link.lead_to(address if dst == worker else link.target)
            if src == worker:
                transport.set_peer(dst, link.address)
        for other in range(self._num_workers):
            if other != worker:
                self._transports[other].peer_back(worker)

    def cut(self, first: int, second: int) -> None:
        self._links[first, second].cut()
        self._links[second, first].cut()

    def restore(self, first: int, second: int) -> None:
        self._links[first, second].restore()
        self._links[second, first].restore()


class LoopbackHarness:
    """Implements `Harness` with `GrpcTransport` on 127.0.0.1.

    Args:
        certs: folder of `gossamer certs`; None: plain text.
        limits: of every worker.
    """

    def __init__(self, certs: Path | None = None, limits: Limits | None = None) -> None:
        self._certs = certs
        self._limits = limits or Limits(keepalive=KEEPALIVE_S, untaken_max=500_000.0)

    def run(self, num_workers: int, scenario: Scenario, *, rate: float | None = None) -> None:
        """See `Harness.run`. Raises `RuntimeError` where a task is left over at the end."""
        asyncio.run(self._run(num_workers, scenario, rate))

    def run_letters(
        self, num_places: int, scenario: LetterScenario, *, rate: float | None = None
    ) -> None:
        """See `LetterHarness.run_letters`."""
        asyncio.run(self._run(num_places, scenario, rate))

    async def _run(
        self, num_workers: int, scenario: Callable[[_Endpoints], Any], rate: float | None
    ) -> None:
        ends = _Endpoints(num_workers, self._certs, self._limits, rate)
        async with asyncio.timeout(_SCENARIO_S):
            await ends.open()
            try:
                await scenario(ends)
            finally:
                await ends.close()
        await asyncio.sleep(0)
        left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        if left:
            raise RuntimeError(f"tasks left over: {left}")
