"""Every exception that Gossamer raises on purpose.

GossamerError
├── ConfigError (ValueError)      the user's mistake, found before a run (exit 2)
│   └── JoinRefused               a coordinator refuses a process (in cluster.control)
├── CheckpointError               a checkpoint is missing, damaged or of another run
├── NonFiniteError                a loss, gradient or parameter became NaN or infinite
├── EncodingError                 values that a codec cannot hold, or a payload that is not its own
├── CommError                     a peer or a link let us down; the method decides what it means
│   ├── LinkFailed                a transfer was lost on the way
│   │   └── PayloadCorrupt        it arrived, but damaged or non-finite
│   ├── PeerLost                  the process at the other end is gone
│   ├── TimedOut                  nothing came within the deadline
│   ├── CollectiveFailed          an all-or-nothing collective did not complete
│   └── OutOfSync                 the others have gone on without us: take a donor's state
├── SimulationError               the simulated world found something that must not happen
│   ├── Deadlock                  every task waits and no timer is left
│   ├── DataRace                  a payload was written to while it was on its way
│   └── InvariantViolated         an internal consistency check failed
├── RunFailed                     the run cannot go on (exit 3)
└── Interrupted                   stopped by the user; a checkpoint exists (exit 130)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GossamerError(Exception):
    """Base of all typed errors."""


class ConfigError(GossamerError, ValueError):
    """A configuration that cannot be run: what was given, what is allowed, what to do."""


class CheckpointError(GossamerError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class NonFiniteError(GossamerError):
    """Training diverged: a loss, gradient or parameter is NaN or infinite.

    Args:
        what: the quantity that is not finite ("training loss", "outer gradient", ...).
        worker: index of the worker whose value it is.
        step: inner steps that the worker had completed.
        learning_rate: the inner learning rate in force at that step.
    """

    def __init__(self, what: str, *, worker: int, step: int, learning_rate: float) -> None:
        self.what, self.worker, self.step, self.learning_rate = what, worker, step, learning_rate
        super().__init__(
            f"{what} of worker {worker} is not finite after {step} inner steps "
            f"(learning rate {learning_rate:g}); a smaller learning rate, a longer warm-up or "
            f"gradient clipping usually helps"
        )


class EncodingError(GossamerError):
    """Values that a codec cannot hold (not finite, too large), or a payload that is not its own."""


class CommError(GossamerError):
    """A message did not get through. Raised where it is awaited."""


class LinkFailed(CommError):
    """A transfer was lost on the way; the peer may be alive."""


class PayloadCorrupt(LinkFailed):
    """A payload arrived damaged, or holding NaN or infinity, and was refused."""


class PeerLost(CommError):
    """The process at the other end is gone."""


class TimedOut(CommError):
    """Nothing arrived within the deadline."""


class CollectiveFailed(CommError):
    """An all-or-nothing collective did not complete; nobody used its result."""


class OutOfSync(CommError):
    """The others have gone on; this worker must take its state from a donor."""


class SimulationError(GossamerError):
    """The simulated world found something that must not happen."""


class Deadlock(SimulationError):
    """Every task waits and no timer is left."""


class DataRace(SimulationError):
    """A payload was written to between `send` and its delivery."""


class InvariantViolated(SimulationError):
    """An internal consistency check failed; please report it with the seed."""


class RunFailed(GossamerError):
    """The run cannot go on."""


class Interrupted(GossamerError):
    """The user stopped the run; it can be resumed."""


def check(condition: bool, message: str) -> None:
    """Raise `InvariantViolated` unless `condition` holds (unlike `assert`, also under `-O`)."""
    if not condition:
        raise InvariantViolated(message)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """A hint like `; did you mean 'diloco'?`, or the allowed names where none is near."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "allowed: " + ", ".join(names)
