"""Where simulated workers are in their lives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Absence:
    """Why a worker is away, and when it returns (nanoseconds; None: never)."""

    return_ns: int | None
    reason: str


@dataclass
class Life:
    """One worker's phase.

    running    its method runs
    expelled   it runs, but the others have given it up, and it has not noticed yet
    down       it is away
    joining    it is back and waits for a donor's state
    ended      it has done its last round
    """

    phase: str = "running"
    absence: Absence | None = None
