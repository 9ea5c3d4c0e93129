"""What goes wrong in a simulated run: one plan of faults, fixed by the run's seed.

Faults come by schedule (this worker, at this time) or by rate (so many per worker and hour). The
latter are Poisson arrivals with exponential durations. Each draw is a pure function of (seed,
kind, worker, index), so what a plan answers does not depend on what it was asked before.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from gossamer.errors import ConfigError
from gossamer.seeding import derive_seed
from gossamer.settings import Settings
from gossamer.sim.chaos import Chaos, Stops
from gossamer.sim.clock import to_ns
from gossamer.units import Duration, format_duration

WindowKind = Literal["outage", "hang", "slow"]

_draw = functools.lru_cache(maxsize=1 << 14)(derive_seed)  # uniform in [0, 2**63)
_SPAN = 1 << 63


def happens(probability: float, seed: int, *key: int | str) -> bool:
    """A draw that is true with `probability`; the same for the same seed and key."""
    return probability > 0.0 and _draw(seed, *key) < int(probability * _SPAN)


def _exponential_ns(mean_s: float, seed: int, *key: int | str) -> int:
    """An exponential duration of at least one nanosecond."""
    return max(1, to_ns(-math.log((_draw(seed, *key) + 0.5) / _SPAN) * mean_s))


# ---------------------------------------------------------------------------------------- settings

_WORKER = Field(ge=0, description="worker index")
_START = Field(ge=0, description="when it begins, in virtual time")
_DURATION = Field(gt=0, description="how long it lasts")
_RATE_MAX = 1e6  # faults in an hour: 278 a second
_LOAD_MAX = 5.0  # drawn faults of one kind that a worker has at a time, on average


def _rate_field(what: str) -> float:
    value: float = Field(default=0.0, ge=0, le=_RATE_MAX, description=f"{what} per worker and hour")
    return value


class Outage(Settings):
    """A worker's link carries nothing for a while."""

    worker: int = _WORKER
    start: Duration = _START
    duration: Duration = _DURATION


class Partition(Settings):
    """No bytes between groups of workers for a while."""

    groups: tuple[tuple[int, ...], ...] = Field(
        min_length=1, description="groups of worker indices; workers not named form a last group"
    )
    start: Duration = _START
    duration: Duration = _DURATION

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = [worker for group in self.groups for worker in group]
        for worker in named:
            if worker < 0:
                raise ValueError(f"worker indices are 0 or more; got {worker}")
            if named.count(worker) > 1:
                raise ValueError(f"worker {worker} is named more than once in groups {self.groups}")
        return self


class SlowPhase(Settings):
    """A worker computes slowly for a while."""

    worker: int = _WORKER
    start: Duration = _START
    duration: Duration = _DURATION
    factor: float = Field(ge=1, description="how many times longer a step takes")


class Hang(Settings):
    """A worker's process is frozen for a while: it computes nothing and answers nothing."""

    worker: int = _WORKER
    start: Duration = _START
    duration: Duration = _DURATION


class CrashAt(Settings):
    """A worker's process dies, and perhaps returns."""

    worker: int = _WORKER
    start: Duration = Field(gt=0, description="when it dies, in virtual time")
    return_after: Duration | None = Field(
        default=None, gt=0, description="how long it stays away; left out: for good"
    )


class Faults(Settings):
    """The recipe's [faults]: scheduled faults, and rates at which more are drawn."""

    outages: tuple[Outage, ...] = Field(default=(), description="links that are down for a while")
    partitions: tuple[Partition, ...] = Field(
        default=(), description="phases in which groups of workers cannot reach each other"
    )
    slow: tuple[SlowPhase, ...] = Field(default=(), description="phases of slow compute")
    hangs: tuple[Hang, ...] = Field(default=(), description="processes that freeze for a while")
    crashes: tuple[CrashAt, ...] = Field(
        default=(), description="processes that die, and perhaps return"
    )
    chaos: Chaos | None = Field(default=None, description="failing chips; left out: none")
    outage_rate: float = _rate_field("outages")
    hang_rate: float = _rate_field("hangs")
    slow_rate: float = _rate_field("slow phases")
    crash_rate: float = _rate_field("crashes")
    mean_outage: Duration = Field(default=30.0, gt=0, description="mean length of a drawn outage")
    mean_hang: Duration = Field(default=30.0, gt=0, description="mean length of a drawn hang")
    mean_slow: Duration = Field(default=60.0, gt=0, description="mean length of a drawn slow phase")
    slow_factor: float = Field(
        default=2.0, ge=1, description="how many times longer a step takes in a drawn slow phase"
    )
    mean_downtime: Duration = Field(
        default=600.0, gt=0, description="mean time that a worker stays away after a drawn crash"
    )
    rejoin_moments: Literal["donor", "reset", "keep"] = Field(
        default="donor",
        description="a returning worker's inner optimizer moments: taken from its donor, reset to "
        "zero, or kept from its own last checkpoint",
    )

    @model_validator(mode="after")
    def _check_loads(self) -> Self:
        """Faults that overlap without end would freeze a worker, or its link, for good."""
        for name, rate, mean_s in (
            ("outage", self.outage_rate, self.mean_outage),
            ("hang", self.hang_rate, self.mean_hang),
            ("slow", self.slow_rate, self.mean_slow),
        ):
            load = rate * mean_s / 3600.0
            if load > _LOAD_MAX:
                raise ValueError(
                    f"{name}_rate: {rate:g} an hour of {mean_s:g} s each make {load:.3g} at a time "
                    f"on every worker, and at most {_LOAD_MAX:g} are allowed; lower it or "
                    f"mean_{name}"
                )
        return self


# -------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A fault lasts over [start_ns, end_ns). `factor` is how much slower a slow phase is."""

    start_ns: int
    end_ns: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Crash:
    """A worker dies at `at_ns` and returns at `return_ns` (None: never)."""

    at_ns: int
    return_ns: int | None


class _Timeline:
    """Windows of one kind and worker in the order of their start, laid out as far as asked for.

    Overlaps are kept: this is the raw list.
    """

    def __init__(
        self,
        scheduled: Iterable[Window],
        *,
        rate: float,
        mean_s: float,
        factor: float,
        key: tuple[int, str, int],
    ) -> None:
        self._rate, self._mean_s, self._factor, self._key = rate, mean_s, factor, key
        self._scheduled = deque(sorted(scheduled))  # those not laid out yet
        self._num_drawn = 0
        self._drawn: Window | None = None  # the next one
        if rate > 0:
            self._draw(0)
        self.is_empty = not self._scheduled and self._drawn is None
        self._windows: list[Window] = []
        self._starts: list[int] = []
        self._ends_max: list[int] = []  # latest end among the windows so far

    def overlapping(self, start_ns: int, end_ns: int) -> list[Window]:
        """Windows that share some time with [start_ns, end_ns)."""
        if self.is_empty:
            return []
        self._extend(end_ns)
        first = bisect.bisect_right(self._ends_max, start_ns)
        candidates = self._windows[first : bisect.bisect_left(self._starts, end_ns)]
        return [window for window in candidates if window.end_ns > start_ns]

    def next_start(self, after_ns: int) -> Window | None:
        """The first window that starts after `after_ns`."""
        self._extend(after_ns + 1)
        index = bisect.bisect_right(self._starts, after_ns)
        if index == len(self._starts):
            upcoming = self._upcoming()
            if upcoming is None:
                return None
            self._extend(upcoming.start_ns + 1)
        return self._windows[index]

    def next_boundary(self, after_ns: int) -> int | None:
        """The first start or end of a window after `after_ns`."""
        if self.is_empty:
            return None
        boundaries = [window.end_ns for window in self.overlapping(after_ns, after_ns + 1)]
        following = self.next_start(after_ns)
        if following is not None:
            boundaries.append(following.start_ns)
        return min(boundaries, default=None)

    def _upcoming(self) -> Window | None:
        """The next window that is not laid out yet."""
        if not self._scheduled:
            return self._drawn
        first = self._scheduled[0]
        return first if self._drawn is None else min(first, self._drawn)

    def _extend(self, until_ns: int) -> None:
        """Lay out all windows that start before `until_ns`."""
        while (window := self._upcoming()) is not None and window.start_ns < until_ns:
            self._windows.append(window)
            self._starts.append(window.start_ns)
            self._ends_max.append(max([window.end_ns, *self._ends_max[-1:]]))
            if window is self._drawn:
                self._draw(window.start_ns)
            else:
                self._scheduled.popleft()

    def _draw(self, after_ns: int) -> None:
        """Poisson arrivals: an exponential gap from the last start; then an exponential length."""
        index = self._num_drawn
        start_ns = after_ns + _exponential_ns(3600.0 / self._rate, *self._key, index, "gap")
        length_ns = _exponential_ns(self._mean_s, *self._key, index, "length")
        self._drawn = Window(start_ns, start_ns + length_ns, self._factor)
        self._num_drawn += 1


class FaultPlan:
    """All faults of a run, as a pure function of (`faults`, `num_workers`, `seed`).

    Workers are all places, syncers included; chips are those of the first `num_training` only.

    Raises `ConfigError` where a fault names a worker that the run does not have.
    """

    def __init__(
        self, faults: Faults, num_workers: int, seed: int, *, num_training: int | None = None
    ) -> None:
        _check_workers(faults, num_workers)
        self.faults, self.num_workers, self.seed = faults, num_workers, seed
        self._num_training = num_workers if num_training is None else num_training
        self._outages = self._timelines(
            "outage", faults.outages, faults.outage_rate, faults.mean_outage
        )
        self._hangs = self._timelines("hang", faults.hangs, faults.hang_rate, faults.mean_hang)
        self._slow = self._timelines(
            "slow", faults.slow, faults.slow_rate, faults.mean_slow, faults.slow_factor
        )
        self._crashes = self._timelines("crash", (), faults.crash_rate, faults.mean_downtime)
        self._stops = (
            [Stops(faults.chaos, self._num_training, seed, w) for w in range(self._num_training)]
            if faults.chaos is not None
            else []
        )
        self._partitions = [_as_partition(p, num_workers) for p in faults.partitions]
        self._change_cache: tuple[int, int | None] | None = None
        self.has_link_faults = bool(self._partitions) or not all(t.is_empty for t in self._outages)
        """Whether a link can ever be down."""

    def _timelines(
        self,
        kind: str,
        scheduled: Sequence[Outage | Hang | SlowPhase],
        rate: float,
        mean_s: float,
        slow_factor: float = 1.0,
    ) -> list[_Timeline]:
        return [
            _Timeline(
                [_as_window(fault) for fault in scheduled if fault.worker == worker],
                rate=rate,
                mean_s=mean_s,
                factor=slow_factor,
                key=(self.seed, kind, worker),
            )
            for worker in range(self.num_workers)
        ]

    def windows(self, kind: WindowKind, worker: int, start_ns: int, end_ns: int) -> list[Window]:
        """What of `kind` befalls `worker` within [start_ns, end_ns), clipped to it.

        Disjoint and in order; where slow phases overlap the slowest counts.
        """
        timeline = {"outage": self._outages, "hang": self._hangs, "slow": self._slow}[kind][worker]
        return _disjoint(timeline.overlapping(start_ns, end_ns), start_ns, end_ns)

    def next_crash(self, worker: int, after_ns: int) -> Crash | None:
        """The first crash of `worker` later than `after_ns` (whether or not it is away then)."""
        found = []
        drawn = self._crashes[worker].next_start(after_ns)
        if drawn is not None:
            found.append(Crash(drawn.start_ns, drawn.end_ns))
        for fault in self.faults.crashes:
            at_ns = to_ns(fault.start)
            if fault.worker == worker and at_ns > after_ns:
                away = fault.return_after
                found.append(Crash(at_ns, None if away is None else at_ns + max(1, to_ns(away))))
        # Of two at the same instant the longer absence counts.
        return min(found, default=None, key=lambda crash: (crash.at_ns, -_forever(crash.return_ns)))

    def frozen_until(self, worker: int, at_ns: int) -> int:
        """When the hang that covers `at_ns` is over; `at_ns` itself where there is none."""
        hangs = self._hangs[worker]
        while covering := hangs.overlapping(at_ns, at_ns + 1):  # hangs may follow on one another
            at_ns = max(window.end_ns for window in covering)
        return at_ns

    def stopped_until(self, worker: int, at_ns: int) -> int:
        """When `worker` computes again, after hangs and failures of its chips."""
        until = self.frozen_until(worker, at_ns)
        while worker < len(self._stops) and (later := self._stops[worker].until(until)) > until:
            until = self.frozen_until(worker, later)
        return until

    def stopped_ns(self, worker: int, start_ns: int, end_ns: int) -> int:
        """For how long of [start_ns, end_ns) it computes nothing, for the same reasons."""
        stops = self.windows("hang", worker, start_ns, end_ns)
        if worker < len(self._stops):
            mine = self._stops[worker].overlapping(start_ns, end_ns)
            stops = _disjoint([*stops, *(Window(*stop) for stop in mine)], start_ns, end_ns)
        return sum(stop.end_ns - stop.start_ns for stop in stops)

    def slow_factor(self, worker: int, at_ns: int) -> float:
        """How many times longer work takes on `worker` at `at_ns` (1.0: full speed)."""
        covering = self._slow[worker].overlapping(at_ns, at_ns + 1)
        return max((window.factor for window in covering), default=1.0)

    def next_compute_change(self, worker: int, after_ns: int) -> int | None:
        """When a hang, a slow phase or a stop of `worker` next begins or ends."""
        changes = [t[worker].next_boundary(after_ns) for t in (self._hangs, self._slow)]
        changes += [stops.next_change(after_ns) for stops in self._stops[worker : worker + 1]]
        return min((change for change in changes if change is not None), default=None)

    def link_up(self, src: int, dst: int, at_ns: int) -> bool:
        """Whether bytes can move from `src` to `dst` at `at_ns`."""
        if not self.has_link_faults:
            return True
        if any(self._outages[worker].overlapping(at_ns, at_ns + 1) for worker in (src, dst)):
            return False
        return not any(
            window.start_ns <= at_ns < window.end_ns and group_of[src] != group_of[dst]
            for window, group_of in self._partitions
        )

    def next_link_change(self, after_ns: int) -> int | None:
        """When an outage or a partition next begins or ends; None: never again."""
        if not self.has_link_faults:
            return None
        if self._change_cache is not None:
            cached_from, cached = self._change_cache
            if cached_from <= after_ns and (cached is None or after_ns < cached):
                return cached
        changes = [timeline.next_boundary(after_ns) for timeline in self._outages]
        for window, _ in self._partitions:
            changes += [ns for ns in (window.start_ns, window.end_ns) if ns > after_ns]
        change = min((ns for ns in changes if ns is not None), default=None)
        self._change_cache = (after_ns, change)
        return change

    def describe(self) -> list[str]:
        """One line per scheduled fault, in order of time, and one per rate; for failure reports."""
        faults = self.faults
        timed = [(o.start, f"worker {o.worker}: link down for {_time(o.duration)}")
                 for o in faults.outages]  # fmt: skip
        timed += [(p.start, f"partition {_groups(p)} for {_time(p.duration)}")
                  for p in faults.partitions]  # fmt: skip
        timed += [(s.start, f"worker {s.worker}: {s.factor:g} times slower for {_time(s.duration)}")
                  for s in faults.slow]  # fmt: skip
        timed += [(h.start, f"worker {h.worker}: hangs for {_time(h.duration)}")
                  for h in faults.hangs]  # fmt: skip
        for c in faults.crashes:
            back = (
                "for good" if c.return_after is None else f"returns after {_time(c.return_after)}"
            )
            timed.append((c.start, f"worker {c.worker}: crashes, {back}"))
        lines = [f"at {_time(start)}: {what}" for start, what in sorted(timed)]
        slower = f", {faults.slow_factor:g} times slower"
        rates = (
            ("outages", faults.outage_rate, faults.mean_outage, ""),
            ("hangs", faults.hang_rate, faults.mean_hang, ""),
            ("slow phases", faults.slow_rate, faults.mean_slow, slower),
            ("crashes", faults.crash_rate, faults.mean_downtime, ""),
        )
        lines += [
            f"{what}: {rate:g} per worker and hour, mean {_time(mean)}{more} (seed {self.seed})"
            for what, rate, mean, more in rates
            if rate > 0
        ]
        if faults.chaos is not None:
            rate = faults.chaos.rate(self._num_training)
            lines.append(f"chips: {3600 * rate:g} failures per worker and hour (seed {self.seed})")
        return lines


def _as_window(fault: Outage | Hang | SlowPhase) -> Window:
    start_ns = to_ns(fault.start)
    factor = fault.factor if isinstance(fault, SlowPhase) else 1.0
    return Window(start_ns, start_ns + max(1, to_ns(fault.duration)), factor)


def _as_partition(fault: Partition, num_workers: int) -> tuple[Window, list[int]]:
    """Its window, and each worker's group; workers not named are group -1."""
    group_of = [-1] * num_workers
    for index, group in enumerate(fault.groups):
        for worker in group:
            group_of[worker] = index
    start_ns = to_ns(fault.start)
    return Window(start_ns, start_ns + max(1, to_ns(fault.duration))), group_of


def _disjoint(windows: Sequence[Window], start_ns: int, end_ns: int) -> list[Window]:
    """Clip to [start_ns, end_ns) and resolve overlaps; neighbours of equal factor are joined."""
    clipped = [Window(max(w.start_ns, start_ns), min(w.end_ns, end_ns), w.factor) for w in windows]
    cuts = sorted({ns for w in clipped for ns in (w.start_ns, w.end_ns)})
    pieces: list[Window] = []
    for left, right in itertools.pairwise(cuts):
        factors = [w.factor for w in clipped if w.start_ns <= left < w.end_ns]
        if not factors:
            continue
        factor = max(factors)
        if pieces and pieces[-1].end_ns == left and pieces[-1].factor == factor:
            pieces[-1] = Window(pieces[-1].start_ns, right, factor)
        else:
            pieces.append(Window(left, right, factor))
    return pieces


def _check_workers(faults: Faults, num_workers: int) -> None:
    named = [("outages", fault.worker) for fault in faults.outages]
    named += [("slow", fault.worker) for fault in faults.slow]
    named += [("hangs", fault.worker) for fault in faults.hangs]
    named += [("crashes", fault.worker) for fault in faults.crashes]
    named += [("partitions", w) for p in faults.partitions for group in p.groups for w in group]
    for section, worker in named:
        if worker >= num_workers:
            raise ConfigError(
                f"faults.{section}: worker {worker} is not in this run, which has "
                f"{num_workers} workers (0 to {num_workers - 1})"
            )


def _forever(ns: int | None) -> float:
    return math.inf if ns is None else ns


def _time(seconds: float) -> str:
    return format_duration(seconds)


def _groups(partition: Partition) -> str:
    named = [",".join(str(worker) for worker in group) for group in partition.groups]
    return " | ".join([*named, "others"])
