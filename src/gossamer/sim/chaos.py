"""Failing chips: how a worker that is itself a machine of many thousand chips stops and goes on.

Chips fail as a Poisson process. A failure is noticed after a while, in which the worker trains on;
what fails until then is handled together. The worker stops to go on without the failed chips
(shrink), and again when they are back (grow). What fails while it is stopped is handled by that
stop. So between two shrinks a worker trains for 1/rate + notice seconds on average, and the share
of its time that it trains is

    goodput = 1 / (1 + D rate / (1 + notice rate)),      D = shrink + grow

Source: the failure model of Decoupled DiLoCo (arXiv:2604.21428) is known by its parameters only.
The times here are fitted to its table of goodputs, and stated as that: `ELASTIC` and `RESTART`.
Idle chips are not charged; a chip of a million that is away for a minute is nothing.
"""

from __future__ import annotations

import bisect
import heapq
import math

from pydantic import Field

from gossamer.seeding import derive_seed
from gossamer.settings import Settings
from gossamer.units import Count, Duration

YEAR_S = 365.0 * 86400.0
_SPAN = 1 << 63
_NS_PER_S = 1_000_000_000


class Chaos(Settings):
    """Failures of chips; the recipe's [faults.chaos].

    The defaults for notice, shrink and grow are fitted to published goodputs of elastic training,
    so that the worst of 25 cells is off by least (3.4 points; rms 1.5). How shrink and grow divide
    their sum of 25.5 s, and when chips return, is a choice of ours.
    """

    chips: Count = Field(gt=0, description="chips of the whole run, shared equally by the workers")
    chip_lifetime: Duration = Field(
        default=YEAR_S,
        gt=0,
        description="mean time between failures of one chip (the paper: 1 year)",
    )
    notice: Duration = Field(
        default=5.75, ge=0, description="from a failure to the stop that it causes (fitted)"
    )
    shrink: Duration = Field(
        default=12.75, gt=0, description="stop to go on without failed chips (fitted)"
    )
    grow: Duration = Field(
        default=12.75, ge=0, description="stop to take returned chips in; 0: none (fitted)"
    )
    chips_return: Duration = Field(
        default=60.0, ge=0, description="until failed chips are back (not published)"
    )

    def rate(self, num_workers: int) -> float:
        """Failures of one worker's chips per second."""
        return self.chips / num_workers / self.chip_lifetime

    def expected_goodput(self, num_workers: int) -> float:
        """The closed form that the process has in the long run."""
        rate = self.rate(num_workers)
        return 1 / (1 + (self.shrink + self.grow) * rate / (1 + self.notice * rate))


def elastic(chips: float) -> Chaos:
    """A worker that goes on without its failed chips."""
    return Chaos(chips=chips)


def restart(chips: float) -> Chaos:
    """A job without elasticity, which starts again from its checkpoint; rms error 1.1 points."""
    return Chaos(chips=chips, notice=5.0, shrink=86.0, grow=0.0)


class Stops:
    """When one worker is stopped, laid out as far as asked for; a pure function of its arguments.

    Args:
        chaos: rates and times.
        num_workers: that share the chips.
        seed, worker: name the stream of draws.
    """

    def __init__(self, chaos: Chaos, num_workers: int, seed: int, worker: int) -> None:
        self._mean_s = 1 / chaos.rate(num_workers)
        self._notice, self._shrink = _ns(chaos.notice), max(1, _ns(chaos.shrink))
        self._grow, self._away = _ns(chaos.grow), _ns(chaos.chips_return)
        self._key = (seed, "chaos", worker)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._shrinks = 0
        self._returns: list[int] = []  # heap: when failed chips are back
        # Laid out up to here. It has run for a while at time 0, when chips are away as at any time.
        self._now = -10 * (self._away + self._shrink + self._grow)
        self._due = self._next_shrink(self._now)

    def _next_shrink(self, after_ns: int) -> int:
        draw = (derive_seed(*self._key, self._shrinks) + 0.5) / _SPAN
        self._shrinks += 1
        return after_ns + max(1, _ns(-math.log(draw) * self._mean_s)) + self._notice

    def _lay_out(self, until_ns: int) -> None:
        """All stops that start before `until_ns`."""
        while True:
            grow = max(self._returns[0], self._now) if self._returns else None
            if grow is not None and grow <= self._due:
                if grow >= until_ns:
                    return
                heapq.heappop(self._returns)
                self._stop(grow, self._grow)
                self._due += self._grow  # failures, and the notice of them, count training time
                continue
            if self._due >= until_ns:
                return
            start = self._due
            self._stop(start, self._shrink)
            if self._grow:
                heapq.heappush(self._returns, start + self._away)
            self._due = self._next_shrink(self._now)

    def _stop(self, start_ns: int, length_ns: int) -> None:
        end = start_ns + length_ns
        if self._ends and self._ends[-1] == start_ns:
            self._ends[-1] = end
        else:
            self._starts.append(start_ns)
            self._ends.append(end)
        self._now = end

    def overlapping(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Stops, disjoint and in order, that share some time with [start_ns, end_ns), from 0 on."""
        self._lay_out(end_ns)
        first = bisect.bisect_right(self._ends, start_ns)
        last = bisect.bisect_left(self._starts, end_ns)
        return list(zip(self._starts[first:last], self._ends[first:last], strict=True))

    def until(self, at_ns: int) -> int:
        """When the stop that covers `at_ns` is over; `at_ns` itself where there is none."""
        covering = self.overlapping(at_ns, at_ns + 1)
        while covering:  # one may follow on the other
            at_ns = covering[-1][1]
            covering = self.overlapping(at_ns, at_ns + 1)
        return at_ns

    def next_change(self, after_ns: int) -> int:
        """When a stop next begins or ends."""
        covering = self.overlapping(after_ns, after_ns + 1)
        if covering:
            return self.until(after_ns)
        index = bisect.bisect_right(self._starts, after_ns)
        horizon = max(self._now, self._due, after_ns) + 1
        while index == len(self._starts):
            self._lay_out(horizon)
            horizon += self._due
        return self._starts[index]

    def stopped_ns(self, start_ns: int, end_ns: int) -> int:
        """How long it is stopped within [start_ns, end_ns)."""
        stops = self.overlapping(start_ns, end_ns)
        return sum(min(end, end_ns) - max(start, start_ns) for start, end in stops)


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)


def job_goodput(chaos: Chaos, *, seed: int, duration_s: float) -> float:
    """The share of its time that one job on all chips trains, by running its stops."""
    length = _ns(duration_s)
    return 1 - Stops(chaos, 1, seed, 0).stopped_ns(0, length) / length
