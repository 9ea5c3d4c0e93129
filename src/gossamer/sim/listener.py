"""How a simulation tells the outside what happens, and how the outside stops it."""

from __future__ import annotations

from typing import Any, Protocol


class Listener(Protocol):
    """Receives what a run reports, in order. Nothing that it does can change the run."""

    def on_start(self, total_steps: int, start_steps: int) -> None:
        """Inner steps that the run will do over all workers, and how many are done (resumed)."""

    def on_steps(self, num_steps: int) -> None:
        """A worker has done inner steps."""

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """kind: "start", "round", "measure", "fault", "lost", "joined", "checkpoint", "end"."""


class NullListener:
    """Hears nothing."""

    def on_start(self, total_steps: int, start_steps: int) -> None:
        """Ignored."""

    def on_steps(self, num_steps: int) -> None:
        """Ignored."""

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Ignored."""


class StopFlag:
    """Asks a run to stop at its next round boundary; safe to set from a signal handler."""

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        self._requested = True

    @property
    def requested(self) -> bool:
        return self._requested
