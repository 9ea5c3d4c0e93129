"""Letters between simulated workers and syncers; see `gossamer.comm.letters`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from gossamer.comm.collectives import is_finite
from gossamer.comm.context import Tag
from gossamer.comm.letters import Letter
from gossamer.errors import CommError, DataRace
from gossamer.sim.clock import VirtualLoop, to_ns
from gossamer.sim.flow import Flow, FlowState
from gossamer.sim.network import SimNetwork
from gossamer.sim.post import digest

Key = tuple[int, str, int]  # sender, kind, part


@dataclass(slots=True)
class _Box:
    """What has come for one place, and who waits there."""

    arrived: dict[Key, Letter] = field(default_factory=dict)
    newest: dict[Key, int] = field(default_factory=dict)  # step of the newest that has come
    news: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class Letters:
    """The letters of a simulated world.

    Args:
        num_places: workers, and syncers after them.
        is_alive: whether a place has a process.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        network: SimNetwork,
        num_places: int,
        is_alive: Callable[[int], bool],
    ) -> None:
        self._loop, self._network, self._is_alive = loop, network, is_alive
        self._boxes = [_Box() for _ in range(num_places)]
        self._flying: dict[Flow, None] = {}
        self._leaving: dict[tuple[int, Key], Flow] = {}  # by receiver: the newest

    def send(
        self,
        src: int,
        dst: int,
        kind: str,
        payload: Tensor,
        *,
        step: int,
        part: int,
        note: tuple[int, ...],
        num_bytes: int,
        exact: bool,
    ) -> None:
        """Start a transfer of `num_bytes`, in place of an older letter that has not all left."""
        key = (src, kind, part)
        older = self._leaving.pop((dst, key), None)
        if older in self._flying and older.state is not FlowState.ARRIVING:
            del self._flying[older]
            self._network.cancel(older)
        if not self._is_alive(dst):
            return
        fingerprint = 0 if exact else digest(payload)
        letter = Letter(src, step, note, payload)

        def arrive(flow: Flow, error: CommError | None) -> None:
            if flow in self._flying:
                del self._flying[flow]
                self._deliver(dst, key, letter, fingerprint, error, exact=exact)

        tag = Tag(kind, 0, step=step, part=part)
        flow = Flow(src=src, dst=dst, num_bytes=num_bytes, tag=tag, on_done=arrive)
        flow.control, flow.subject_to_failure = exact, not exact
        self._flying[flow] = None
        self._leaving[dst, key] = flow
        self._network.start(flow)

    def _deliver(
        self,
        dst: int,
        key: Key,
        letter: Letter,
        fingerprint: int,
        error: CommError | None,
        *,
        exact: bool,
    ) -> None:
        if not exact and digest(letter.payload) != fingerprint:
            raise DataRace(
                f"worker {letter.src} wrote to a letter on its way to worker {dst} ({key[1]}); "
                "send a copy"
            )
        box = self._boxes[dst]
        if error is not None or not self._is_alive(dst):
            return
        if not exact and not is_finite(letter.payload):
            return
        if letter.step <= box.newest.get(key, -1):
            return  # a newer one, or this one, has come before
        own = Letter(letter.src, letter.step, letter.note, letter.payload.clone())
        box.arrived[key], box.newest[key] = own, letter.step
        self._wake(box)

    def _wake(self, box: _Box) -> None:
        box.news += 1
        waiting, box.waiting = box.waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def poll(self, dst: int, src: int, kind: str, part: int) -> Letter | None:
        """Take the newest letter, if one has come."""
        return self._boxes[dst].arrived.pop((src, kind, part), None)

    async def mail(self, dst: int, seen: int, timeout_s: float | None) -> int:
        """See `LetterContext.mail`."""
        box = self._boxes[dst]
        if box.news > seen or (timeout_s is not None and timeout_s <= 0):
            return box.news
        waiter: asyncio.Future[None] = self._loop.create_future()
        box.waiting.append(waiter)
        timer: asyncio.Handle | None = None
        if timeout_s is not None:
            until = self._loop.time_ns() + max(1, to_ns(timeout_s))
            timer = self._loop.call_at_ns(until, _end, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in box.waiting:
                box.waiting.remove(waiter)
        return self._boxes[dst].news

    def gone(self, place: int) -> None:
        """A process is gone, with what it had; the network has failed what was on its way."""
        self._boxes[place] = _Box(news=self._boxes[place].news)
        for flow in [f for f in self._flying if place in (f.src, f.dst)]:
            del self._flying[flow]
        self.tell_all()

    def back(self, place: int) -> None:
        """A process is there, and starts its letters anew."""
        for box in self._boxes:
            box.newest = {key: step for key, step in box.newest.items() if key[0] != place}
        self.tell_all()

    def tell_all(self) -> None:
        """Somebody has come or gone."""
        for box in self._boxes:
            self._wake(box)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
