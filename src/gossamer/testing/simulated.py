"""The conformance suite's harness over the simulated world's message service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gossamer.comm.context import Tag
from gossamer.comm.letters import Letter, Mail
from gossamer.comm.transport import Transport
from gossamer.sim.clock import NS_PER_S, VirtualLoop, to_ns
from gossamer.sim.faults import FaultPlan, Faults
from gossamer.sim.letters import Letters
from gossamer.sim.network import Network, SimNetwork
from gossamer.sim.post import Message, Post
from gossamer.testing.harness import LetterScenario, Scenario

_LOOK_NS = 10_000_000  # how often the network looks whether a link was cut


class SimTransport:
    """One worker's end of a `Post`."""

    def __init__(self, post: Post, worker: int) -> None:
        self._post, self._worker = post, worker

    def send(self, dst: int, tag: Tag, payload: Tensor, *, exact: bool = False) -> Message:
        """See `Transport.send`."""
        return self._post.send(
            self._worker, dst, tag, payload, num_bytes=payload.nbytes, exact=exact
        )

    async def recv(self, src: int, tag: Tag, timeout_s: float) -> Tensor:
        """See `Transport.recv`."""
        return await self._post.recv(self._worker, src, tag, timeout_s)

    def begin_round(self, round_index: int) -> None:
        """See `Transport.begin_round`."""
        self._post.begin_round(self._worker, round_index)

    def peer_lost(self, worker: int) -> None:
        """The post knows."""

    def peer_back(self, worker: int) -> None:
        """The post knows."""


class SimMail:
    """One place's end of the simulator's letters."""

    def __init__(self, letters: Letters, place: int) -> None:
        self._letters, self._place = letters, place

    def post(
        self,
        dst: int,
        kind: str,
        payload: Tensor,
        *,
        step: int,
        part: int = 0,
        note: tuple[int, ...] = (),
        exact: bool = False,
    ) -> None:
        """See `Mail.post`."""
        self._letters.send(
            self._place, dst, kind, payload,
            step=step, part=part, note=note, num_bytes=payload.nbytes, exact=exact,
        )  # fmt: skip

    def poll(self, src: int, kind: str, part: int = 0) -> Letter | None:
        """See `Mail.poll`."""
        return self._letters.poll(self._place, src, kind, part)

    async def mail(self, seen: int, timeout: float | None = None) -> int:
        """See `Mail.mail`."""
        return await self._letters.mail(self._place, seen, timeout)


class _CutLinks(FaultPlan):
    """A plan without faults, but for links that are cut by hand."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(Faults(), num_workers, seed=0)
        self.down: set[frozenset[int]] = set()  # membership tests only
        self.has_link_faults = True

    # The plan's own answers are functions of the time; these change by hand.
    def link_up(self, src: int, dst: int, time_ns: int) -> bool:
        return frozenset((src, dst)) not in self.down

    def next_link_change(self, time_ns: int) -> int | None:
        return time_ns + _LOOK_NS


class _Endpoints:
    """Implements `Endpoints`."""

    def __init__(self, loop: VirtualLoop, num_workers: int, network: Network) -> None:
        self.keepalive_s = network.keepalive
        self._loop, self._links = loop, _CutLinks(num_workers)
        sim_network = SimNetwork(loop, network, num_workers, self._links, seed=0)
        self._post = Post(loop, sim_network, num_workers, sim_network.latency_ns)
        self._network = sim_network
        self._alive = [True] * num_workers
        self._letters = Letters(loop, sim_network, num_workers, lambda place: self._alive[place])
        self._transports = [SimTransport(self._post, worker) for worker in range(num_workers)]

    def __getitem__(self, worker: int) -> Transport:
        return self._transports[worker]

    def letters(self, worker: int) -> Mail:
        return SimMail(self._letters, worker)

    def now(self) -> float:
        return self._loop.time_ns() / NS_PER_S

    async def under_way(self, src: int, dst: int, tag: Tag) -> None:
        await asyncio.sleep(2 * _LOOK_NS / NS_PER_S)

    async def kill(self, worker: int) -> None:
        self._alive[worker] = False
        self._post.kill(worker)
        self._letters.gone(worker)

    async def revive(self, worker: int) -> None:
        self._alive[worker] = True
        self._post.revive(worker)
        self._letters.back(worker)

    def cut(self, first: int, second: int) -> None:
        self._links.down.add(frozenset((first, second)))

    def restore(self, first: int, second: int) -> None:
        self._links.down.discard(frozenset((first, second)))


class SimHarness:
    """Implements `Harness` in virtual time.

    Args:
        latency_s: one way.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s

    def run(self, num_workers: int, scenario: Scenario, *, rate: float | None = None) -> None:
        """See `Harness.run`."""
        self._run(num_workers, scenario, rate)

    def run_letters(
        self, num_places: int, scenario: LetterScenario, *, rate: float | None = None
    ) -> None:
        """See `LetterHarness.run_letters`."""
        self._run(num_places, scenario, rate)

    def _run(
        self, num_workers: int, scenario: Callable[[_Endpoints], Any], rate: float | None
    ) -> None:
        loop = VirtualLoop(start_ns=to_ns(1.0))  # type: ignore[abstract]
        network = Network(bandwidth=rate or 1e9, latency=self._latency_s, keepalive=0.7)
        try:
            loop.run_until_complete(scenario(_Endpoints(loop, num_workers, network)))
        finally:
            loop.close()
