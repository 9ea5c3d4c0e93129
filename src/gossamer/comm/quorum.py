"""Gathering from contributors who may be late or never come: a minimum quorum, then a grace window.

A request waits for K contributors however long that takes; then it waits for more, but only with
time that nobody misses: the result of the request is due `due_steps` steps after it, and what is
not needed for the work itself, times a safety factor, is grace.

    slack = due_steps * step - (quorum + sync)        grace = safety * slack, 0 where slack < 0

with `quorum` the time that the first K took. Estimates are renewed with every report, and the
window with them. All that decides is here, and is told the time: nothing waits, so it is tested
without waiting. `gather` is the thin loop around it.

Source: Decoupled DiLoCo (arXiv:2604.21428), its minimum quorum and its adaptive grace window; the
safety factor is below 1 there and not published.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from gossamer.errors import ConfigError, check

SAFETY = 0.9


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the grace window is computed from, in seconds.

    Args:
        step_s: one step of those who wait for the result; of the slowest, to be safe.
        sync_s: from the closing of the request until they have the result.
    """

    step_s: float
    sync_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """A contributor has something to give, from now on."""

    contributor: int


@dataclass(frozen=True, slots=True)
class Left:
    """A contributor is gone: it is waited for no more."""

    contributor: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A contributor is there whom the request did not count on."""

    contributor: int


Event = Report | Left | Joined


class Quorum:
    """One request, from its first moment to its closing.

    Args:
        requested_s: when it was made.
        minimum: K, contributors that it does not close without; at least 1.
        expected: those who may come; it closes early when all have.
        due_steps: tau, steps after the request by which the result is due; 0: no grace at all.
        estimate: used until a report brings a newer one.
        safety: gamma in [0, 1); 0: no grace.

    Raises `ConfigError` for a minimum below 1, negative steps, or a safety factor out of range.
    """

    def __init__(
        self,
        *,
        requested_s: float,
        minimum: int,
        expected: Iterable[int],
        due_steps: int,
        estimate: Estimate,
        safety: float = SAFETY,
    ) -> None:
        if minimum < 1 or due_steps < 0 or not 0 <= safety < 1:
            raise ConfigError(
                "a quorum needs a minimum of 1 or more, due_steps of 0 or more and a safety factor "
                f"from 0 to below 1; got {minimum}, {due_steps} and {safety}"
            )
        self.requested_s, self.minimum = requested_s, minimum
        self._due_steps = due_steps
        self._safety, self._estimate = safety, estimate
        self._missing = dict.fromkeys(sorted(expected))
        self._reported: dict[int, None] = {}  # in the order of their coming
        self._quorum_s: float | None = None  # when the K-th came
        self._closed_s: float | None = None  # when it was closed early
        self._newest_s = requested_s

    @property
    def contributors(self) -> tuple[int, ...]:
        """Those who have come, in the order of their index."""
        return tuple(sorted(self._reported))

    @property
    def missing(self) -> tuple[int, ...]:
        """Those who may still come."""
        return tuple(self._missing)

    @property
    def quorum_s(self) -> float | None:
        """When the minimum was reached; None before."""
        return self._quorum_s

    @property
    def is_unreachable(self) -> bool:
        """Whether there are too few contributors for the minimum, unless others join."""
        return len(self._reported) + len(self._missing) < self.minimum

    @property
    def closes_s(self) -> float | None:
        """When it closes as things stand; None while the minimum is not reached."""
        if self._closed_s is not None or self._quorum_s is None:
            return self._closed_s
        estimate = self._estimate
        spent_s = self._quorum_s - self.requested_s
        slack_s = self._due_steps * estimate.step_s - (spent_s + estimate.sync_s)
        return self._quorum_s + self._safety * max(0.0, slack_s)

    def is_closed(self, now_s: float) -> bool:
        """Whether it has closed by now."""
        closes_s = self.closes_s
        return closes_s is not None and closes_s <= now_s

    def report(self, contributor: int, at_s: float, estimate: Estimate | None = None) -> bool:
        """A contributor has come. Returns whether it is in time, and had not come before.

        The window is measured anew with `estimate`; where it is over by that, it ends now.
        """
        if not self._is_open(at_s) or contributor in self._reported:
            return False
        self._missing.pop(contributor, None)
        self._reported[contributor] = None
        if self._quorum_s is None and len(self._reported) >= self.minimum:
            self._quorum_s = at_s
        self._renew(at_s, estimate)
        return True

    def leave(self, contributor: int, at_s: float) -> None:
        """A contributor is gone; what it has given before stays."""
        if self._is_open(at_s):
            self._missing.pop(contributor, None)
            self._renew(at_s, None)

    def join(self, contributor: int, at_s: float) -> None:
        """A contributor is there (again); it may be waited for, within the window."""
        if self._is_open(at_s) and contributor not in self._reported:
            self._missing = dict.fromkeys(sorted([*self._missing, contributor]))

    def lower(self, minimum: int, at_s: float) -> None:
        """Be content with fewer, where the minimum is above `minimum`."""
        if self._is_open(at_s) and 1 <= minimum < self.minimum:
            self.minimum = minimum
            if self._quorum_s is None and len(self._reported) >= minimum:
                self._quorum_s = at_s
            self._renew(at_s, None)

    def take(self, event: Event, at_s: float, estimate: Estimate | None = None) -> None:
        """Any of the above."""
        if isinstance(event, Report):
            self.report(event.contributor, at_s, estimate)
        elif isinstance(event, Left):
            self.leave(event.contributor, at_s)
        else:
            self.join(event.contributor, at_s)

    def _is_open(self, at_s: float) -> bool:
        check(at_s >= self._newest_s, "the time of a quorum's events does not go backwards")
        self._newest_s = at_s
        return not self.is_closed(at_s)

    def _renew(self, at_s: float, estimate: Estimate | None) -> None:
        self._estimate = estimate or self._estimate
        if self._quorum_s is None:
            return
        closes_s = self.closes_s
        assert closes_s is not None
        if not self._missing or closes_s < at_s:
            self._closed_s = at_s


async def gather(
    quorum: Quorum,
    next_event: Callable[[float | None], Awaitable[Event | None]],
    now: Callable[[], float],
    estimate: Callable[[], Estimate],
) -> tuple[int, ...]:
    """Feed `quorum` with events until it closes; the contributors that came in time.

    Args:
        next_event: waits for the next event, at most so many seconds (None: as long as it takes);
            None where there was none.
        now: seconds.
        estimate: the newest estimate, asked for after each event.
    """
    while not quorum.is_closed(now()):
        closes_s = quorum.closes_s
        event = await next_event(None if closes_s is None else closes_s - now())
        if event is not None:
            quorum.take(event, now(), estimate())
        elif closes_s is not None:
            break  # the window is over, whatever is lost in the rounding of clocks
    return quorum.contributors
