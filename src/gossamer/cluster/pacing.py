"""Waiting with a purpose: a line of limited rate, turns on it, a watch over stalled transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_CONTINUES_S = 0.1
"""A sender that comes back within this time was busy or woken late: the line did not rest."""

_READ_LATE_S = 0.05
"""What is read so much later than it came in does not hold up what follows it."""


class Line:
    """One direction of a line that passes `rate` bytes per second, shared by all who use it.

    Time is passed in, so that the arithmetic is exact and can be tested without waiting. Users are
    served in the order in which they ask, piece by piece, so that those who send at once share the
    line evenly.

    Args:
        rate: bytes per second; None: unlimited.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_at = float("-inf")  # when all that was asked for so far has passed
        self._last_use = float("-inf")

    def send(self, num_bytes: int, now: float) -> float:
        """When the last of `num_bytes` that are ready now will have left.

        A line that has rested gives no credit; one whose user was merely woken late goes on where
        it was, which keeps the long-term rate exact.
        """
        if self.rate is None:
            return now
        if now - max(self._free_at, self._last_use) > _CONTINUES_S:
            self._free_at = now
        self._free_at += num_bytes / self.rate
        self._last_use = now
        return self._free_at

    def receive(self, num_bytes: int, now: float) -> float:
        """When `num_bytes` that are all here now may count as received.

        They came in while they were being sent, so a line that was free meanwhile adds nothing.
        """
        if self.rate is None:
            return now
        self._free_at = max(self._free_at + num_bytes / self.rate, now - _READ_LATE_S)
        return max(self._free_at, now)

    def charge(self, num_bytes: int, now: float) -> None:
        """Let `num_bytes` pass at once, before all others, who wait the longer for it."""
        if self.rate is not None:
            self._free_at = max(self._free_at, now) + num_bytes / self.rate

    def piece_bytes(self, seconds: float) -> float:
        """What passes in `seconds`."""
        return float("inf") if self.rate is None else self.rate * seconds


class Turn:
    """One message's turn to write to a peer.

    Messages that were written at once would share the line and all be complete at its end; one
    after the other, the first is complete early and can be worked on.
    """

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock, self._state = lock, "wanted"

    async def take(self, period_s: float, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Wait for it, and call `meanwhile` after each period."""
        acquiring = asyncio.ensure_future(self._lock.acquire())
        try:
            while not (await asyncio.wait([acquiring], timeout=period_s))[0]:
                await meanwhile()
        except BaseException:
            if acquiring.done():
                self._lock.release()
            acquiring.cancel()
            raise
        if self._state == "ended":
            self._lock.release()
        else:
            self._state = "held"

    def end(self) -> None:
        """Let the next one begin; called again, nothing."""
        if self._state == "held":
            self._lock.release()
        self._state = "ended"


class Watchdog:
    """Calls `on_stall` where `feed` is not called for `period_s`.

    A process that was frozen itself (stopped, or starved of its core) has seen nothing of its
    peers' progress: it gives them one more period.
    """

    def __init__(self, period_s: float, on_stall: Callable[[], object]) -> None:
        self._period_s, self._on_stall = period_s, on_stall
        self._loop = asyncio.get_running_loop()
        self.tripped = False
        self.fed_at = self._loop.time()
        self._due = self.fed_at + period_s
        self._timer = self._loop.call_at(self._due, self._check)

    def feed(self) -> None:
        """Something moved."""
        self.fed_at = self._loop.time()

    def stop(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        if now - self._due > self._period_s / 4:
            self.fed_at = now
        if self.fed_at + self._period_s <= now:
            self.tripped = True
            self._on_stall()
            return
        self._due = self.fed_at + self._period_s
        self._timer = self._loop.call_at(self._due, self._check)
