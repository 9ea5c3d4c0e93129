"""What the virtual loop schedules: calls, at whole nanoseconds."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.sim.clock import VirtualLoop

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Seconds as the nearest integer number of nanoseconds."""
    return round(seconds * NS_PER_S)


class ScheduledCall(asyncio.TimerHandle):
    """A scheduled call. `_callback` is None once it has run or was cancelled."""

    __slots__ = ()

    def __init__(
        self,
        loop: VirtualLoop,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when_ns: int,
    ) -> None:
        self._loop = loop
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._context = context
        self._when = when_ns  # -1: from call_soon, never in the heap
        self._cancelled = False

    def cancel(self) -> None:
        """Do not run it; no effect once it has run."""
        if self._callback is None:
            return
        self._callback = None
        self._args = ()
        self._cancelled = True
        if self._when >= 0:
            self._loop._timer_cancelled()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        """Seconds of virtual time."""
        return self._when / NS_PER_S

    def __repr__(self) -> str:
        return f"<ScheduledCall when_ns={self._when} callback={self._callback!r}>"
