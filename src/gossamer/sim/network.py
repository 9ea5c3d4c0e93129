"""The simulated network: links that concurrent transfers share by max-min fairness.

Every worker has a full-duplex link: an upload and a download capacity. A pair of workers can have
a narrower path, and latency. Whenever a transfer starts or ends, or a link goes down or comes
back, all rates are planned anew, once per instant of virtual time.

All arithmetic is in integers: time in nanoseconds, rates in millionths of a byte per second, and
what is left of a transfer in units of rate times time. So results are exact, do not depend on the
order in which flows are listed, and planning again without a cause changes nothing. That is why
a snapshot can be taken at any instant without disturbing the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from gossamer.comm.context import Tag
from gossamer.errors import (
    CommError,
    ConfigError,
    InvariantViolated,
    LinkFailed,
    PayloadCorrupt,
    check,
)
from gossamer.settings import Settings
from gossamer.sim.clock import VirtualLoop, to_ns
from gossamer.sim.faults import FaultPlan, happens
from gossamer.sim.flow import RATE_PER_BYTE_PER_S, WORK_PER_BYTE, Flow, FlowState
from gossamer.sim.sharing import max_min_rates
from gossamer.units import Duration, Rate

__all__ = ["Flow", "Network", "PairLink", "SimNetwork", "WorkerLink"]

_BANDWIDTH_MIN = 0.125  # bytes per second; below, shares of it would be rounded to nothing
_BANDWIDTH_MAX = 1e12  # keeps rates within 64 bits

# ---------------------------------------------------------------------------------------- settings


def _rate_field(description: str) -> float | None:
    value: float | None = Field(
        default=None, ge=_BANDWIDTH_MIN, le=_BANDWIDTH_MAX, description=description
    )
    return value


class WorkerLink(Settings):
    """What one worker's link has otherwise than the rest."""

    worker: int = Field(ge=0, description="worker index")
    bandwidth: Rate | None = _rate_field("bytes per second each way")
    upload: Rate | None = _rate_field("bytes per second out of the worker; before `bandwidth`")
    download: Rate | None = _rate_field("bytes per second into the worker; before `bandwidth`")
    latency: Duration | None = Field(
        default=None, ge=0, description="one way; of two workers' the larger one counts"
    )


class PairLink(Settings):
    """What the path between two workers has otherwise than their links."""

    source: int = Field(ge=0, description="sending worker")
    destination: int = Field(ge=0, description="receiving worker")
    bandwidth: Rate | None = _rate_field("bytes per second on this path; the links limit it too")
    latency: Duration | None = Field(default=None, ge=0, description="one way, on this path")
    both_ways: bool = Field(default=True, description="the same from destination to source")

    def directions(self) -> list[tuple[int, int]]:
        """The (source, destination) pairs that this speaks of."""
        there = (self.source, self.destination)
        return [there, there[::-1]] if self.both_ways else [there]


FailureUnit = Literal["worker", "step", "transfer", "collective"]


class Network(Settings):
    """The recipe's [network]: rates, latency, and how often a transfer fails."""

    bandwidth: Rate = Field(
        default=12.5e6, ge=_BANDWIDTH_MIN, le=_BANDWIDTH_MAX,
        description="bytes per second per worker, each way (100 Mbit/s)",
    )  # fmt: skip
    upload: Rate | None = _rate_field("bytes per second out of each worker; before `bandwidth`")
    download: Rate | None = _rate_field("bytes per second into each worker; before `bandwidth`")
    latency: Duration = Field(default=0.0, ge=0, description="one way")
    workers: tuple[WorkerLink, ...] = Field(default=(), description="overrides per worker")
    pairs: tuple[PairLink, ...] = Field(default=(), description="overrides per pair of workers")
    failure_probability: float = Field(
        default=0.0, ge=0, lt=1, description="that one failure unit fails"
    )
    failure_unit: FailureUnit = Field(
        default="worker",
        description="what fails together: a worker's link during one collective, a step of a "
        "collective, a single transfer, or a whole collective",
    )
    corruption_probability: float = Field(
        default=0.0, ge=0, lt=1, description="that a transfer's payload arrives damaged"
    )
    deadline: Duration | None = Field(
        default=None, gt=0,
        description="after which an awaited message counts as lost; left out: derived from the "
        "network, the model and the step time",
    )  # fmt: skip
    keepalive: Duration = Field(
        default=3.5, gt=0, description="a transfer that moves nothing for so long has failed"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        workers = [link.worker for link in self.workers]
        for worker in workers:
            if workers.count(worker) > 1:
                raise ValueError(f"workers: worker {worker} is given more than once")
        pairs = [pair for link in self.pairs for pair in link.directions()]
        for source, destination in pairs:
            if source == destination:
                raise ValueError(f"pairs: worker {source} has no link to itself")
            if pairs.count((source, destination)) > 1:
                raise ValueError(
                    f"pairs: the path {source} -> {destination} is given more than once "
                    f"(both_ways covers both directions)"
                )
        return self

    def validate_for(self, num_workers: int) -> None:
        """Raise `ConfigError` where an override names a worker that the run does not have."""
        named = [("workers", link.worker) for link in self.workers]
        for link in self.pairs:
            named += [("pairs", link.source), ("pairs", link.destination)]
        for section, worker in named:
            if worker >= num_workers:
                raise ConfigError(
                    f"network.{section}: worker {worker} is not in this run, which has "
                    f"{num_workers} workers (0 to {num_workers - 1})"
                )


# ----------------------------------------------------------------------------------------- network

_Arrival = tuple[int, tuple[int, int, int, Tag, int], int, Flow]


class SimNetwork:
    """All transfers of a run, on one virtual loop.

    Args:
        loop: the clock.
        settings: rates, latency, failures.
        num_workers: workers are 0 .. num_workers - 1.
        faults: outages and partitions.
        seed: of the failure draws, which are pure functions of it and of what a flow is.

    Raises `ConfigError` where `settings` do not fit `num_workers`.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        settings: Network,
        num_workers: int,
        faults: FaultPlan,
        seed: int,
    ) -> None:
        settings.validate_for(num_workers)
        self.settings = settings
        self._loop, self._num_workers, self._faults, self._seed = loop, num_workers, faults, seed
        self._keepalive_ns = max(1, to_ns(settings.keepalive))
        self._capacity, self._pair_link = _capacities(settings, num_workers)
        self._worker_latency_ns = [to_ns(settings.latency)] * num_workers
        for worker_link in settings.workers:
            if worker_link.latency is not None:
                self._worker_latency_ns[worker_link.worker] = to_ns(worker_link.latency)
        self._pair_latency_ns = {
            pair: to_ns(link.latency)
            for link in settings.pairs
            if link.latency is not None
            for pair in link.directions()
        }
        self._active: dict[Flow, None] = {}
        self._arrivals: list[_Arrival] = []  # a heap
        self._serial = 0
        self._next_due_ns: int | None = None
        self._timer_ns: int | None = None
        self._cancel_timer: Callable[[], None] | None = None
        self._plan_requested = False
        self._links_change_ns: int | None = -1  # until when `_link_up` holds; None: for ever
        self._link_up: dict[tuple[int, int], bool] = {}
        self.bytes_delivered = 0
        """Bytes of all flows that arrived undamaged."""

    # --------------------------------------------------------------------------------- questions

    def latency_ns(self, src: int, dst: int) -> int:
        """One-way latency from `src` to `dst`."""
        own = self._pair_latency_ns.get((src, dst))
        if own is not None:
            return own
        return max(self._worker_latency_ns[src], self._worker_latency_ns[dst])

    def estimate_ns(self, src: int, dst: int, num_bytes: int) -> int:
        """Time of a transfer that shares its links with nobody, latency included."""
        rate = min(self._capacity[link] for link in self._links_of(src, dst))
        return -(-num_bytes * WORK_PER_BYTE // rate) + self.latency_ns(src, dst)

    def active_flows(self) -> list[Flow]:
        """Flows whose `on_done` is still to come, in an order of their content."""
        arriving = [entry[3] for entry in self._arrivals if entry[3].state is FlowState.ARRIVING]
        return sorted([*self._active, *arriving], key=Flow.order)

    # ----------------------------------------------------------------------------------- actions

    def start(self, flow: Flow) -> None:
        """Begin a transfer; `flow.on_done` is called from the loop, never from within `start`."""
        if flow.state is not FlowState.NEW or flow.src == flow.dst or flow.num_bytes < 0:
            raise InvariantViolated(f"not a new flow of 0 or more bytes to another worker: {flow}")
        flow.state = FlowState.ACTIVE
        flow.started_ns = flow.updated_ns = self._loop.time_ns()
        flow.remaining = flow.num_bytes * WORK_PER_BYTE
        self._join(flow)
        self._request_plan()

    def cancel(self, flow: Flow) -> None:
        """Give a flow up without a word; no effect once it is done."""
        if flow.state is FlowState.ACTIVE:
            del self._active[flow]
            self._request_plan()
        flow.state = FlowState.DONE

    def abort(self, worker: int, error: CommError) -> None:
        """End all flows from and to `worker` now; `on_done` tells `error` after the latency."""
        for _, _, _, flow in self._arrivals:
            if flow.state is FlowState.ARRIVING and worker in (flow.src, flow.dst):
                flow.error = flow.error or error
        for flow in list(self._active):
            if worker in (flow.src, flow.dst):
                self._end(flow, error)
        self._request_plan()

    def restore(self, flows: Iterable[tuple[Flow, dict[str, int | str]]]) -> None:
        """Take up flows from their snapshots; the clock shows the time when these were taken."""
        for flow, snapshot in flows:
            check(flow.state is FlowState.NEW, "only a new flow can be restored")
            flow.load(snapshot)
            if flow.state is FlowState.ACTIVE:
                self._join(flow)
            else:
                check(flow.state is FlowState.ARRIVING, "a flow that is done cannot be restored")
                self._push_arrival(flow)
        self._next_due_ns = min((f.due_ns for f in self._active if f.due_ns >= 0), default=None)
        self._arm()
        # Where nothing changed at that instant this finds the rates that the flows have already.
        self._request_plan()

    # ---------------------------------------------------------------------------------- planning

    def _join(self, flow: Flow) -> None:
        flow.links = self._links_of(flow.src, flow.dst)
        self._active[flow] = None

    def _links_of(self, src: int, dst: int) -> tuple[int, ...]:
        pair = self._pair_link.get((src, dst))
        ends = (src, self._num_workers + dst)
        return ends if pair is None else (*ends, pair)

    def _request_plan(self) -> None:
        """Plan once at the end of this instant, whatever else happens in it."""
        if not self._plan_requested:
            self._plan_requested = True
            self._loop.call_at_end_of_instant(self._plan)

    def _plan(self) -> None:
        self._plan_requested = False
        now_ns = self._loop.time_ns()
        self._refresh_links(now_ns)
        moving: list[Flow] = []
        for flow in list(self._active):
            if not self._is_up(flow, now_ns):
                self._set_rate(flow, 0, now_ns)
            elif flow.remaining == 0:
                self._end(flow, None)
            else:
                moving.append(flow)
        rates = max_min_rates([flow.links for flow in moving], self._capacity)
        for flow, rate in zip(moving, rates, strict=True):
            if flow.rate != rate or flow.due_ns < 0:
                self._set_rate(flow, rate, now_ns)
        self._next_due_ns = min((flow.due_ns for flow in self._active), default=None)
        self._arm()

    def _set_rate(self, flow: Flow, rate: int, now_ns: int) -> None:
        flow.remaining -= flow.rate * (now_ns - flow.updated_ns)
        flow.updated_ns, flow.rate = now_ns, rate
        if rate > 0:
            check(flow.remaining > 0, "a flow that is through was planned again")
            flow.stalled_ns = -1
            flow.due_ns = now_ns - (-flow.remaining // rate)
        else:
            if flow.stalled_ns < 0:
                flow.stalled_ns = now_ns
            flow.due_ns = flow.stalled_ns + self._keepalive_ns

    def _refresh_links(self, now_ns: int) -> None:
        if self._links_change_ns is not None and now_ns >= self._links_change_ns:
            self._link_up.clear()
            self._links_change_ns = self._faults.next_link_change(now_ns)

    def _is_up(self, flow: Flow, now_ns: int) -> bool:
        if not self._faults.has_link_faults:
            return True
        pair = (flow.src, flow.dst)
        if pair not in self._link_up:
            self._link_up[pair] = self._faults.link_up(*pair, now_ns)
        return self._link_up[pair]

    def _arm(self) -> None:
        """Set the one timer to whatever comes next: an end, an arrival, a link's change."""
        events = [self._next_due_ns]
        if self._active:  # otherwise nobody cares, and an idle network must let the clock rest
            events.append(self._links_change_ns)
        if self._arrivals:
            events.append(self._arrivals[0][0])
        next_ns = min((event for event in events if event is not None), default=None)
        if next_ns == self._timer_ns:
            return
        if self._cancel_timer is not None:
            self._cancel_timer()
        self._timer_ns, self._cancel_timer = next_ns, None
        if next_ns is not None:
            self._cancel_timer = self._loop.call_at_ns(next_ns, self._tick).cancel

    # ------------------------------------------------------------------------------------ events

    def _tick(self) -> None:
        self._timer_ns = self._cancel_timer = None
        now_ns = self._loop.time_ns()
        if self._next_due_ns is not None and now_ns >= self._next_due_ns:
            for flow in [flow for flow in self._active if 0 <= flow.due_ns <= now_ns]:
                self._end(flow, self._stall_error(flow))
            self._request_plan()
        if self._links_change_ns is not None and now_ns >= self._links_change_ns:
            self._request_plan()
        while self._arrivals and self._arrivals[0][0] <= now_ns:
            flow = heapq.heappop(self._arrivals)[3]
            if flow.state is FlowState.ARRIVING:
                flow.state = FlowState.DONE
                self.bytes_delivered += flow.num_bytes if flow.error is None else 0
                flow.on_done(flow, flow.error)
        if not self._plan_requested:
            self._arm()

    def _stall_error(self, flow: Flow) -> CommError | None:
        if flow.rate > 0:
            return None
        return LinkFailed(
            f"nothing moved from worker {flow.src} to worker {flow.dst} for "
            f"{self.settings.keepalive:g} s: the link between them is down"
        )

    def _end(self, flow: Flow, error: CommError | None) -> None:
        """The flow leaves the links; its fate is known to the receiver after the latency."""
        del self._active[flow]
        now_ns = self._loop.time_ns()
        flow.error = self._draw_error(flow) if error is None else error
        flow.remaining, flow.rate, flow.updated_ns = 0, 0, now_ns
        flow.state = FlowState.ARRIVING
        flow.arrives_ns = now_ns + self.latency_ns(flow.src, flow.dst)
        self._push_arrival(flow)

    def _push_arrival(self, flow: Flow) -> None:
        self._serial += 1  # only ever compared for flows that are equal in everything else
        heapq.heappush(self._arrivals, (flow.arrives_ns, flow.order(), self._serial, flow))

    def _draw_error(self, flow: Flow) -> CommError | None:
        settings, tag, seed = self.settings, flow.tag, self._seed
        unit = settings.failure_unit
        if flow.subject_to_failure or (flow.control and unit == "worker"):
            for key in _failure_keys(unit, flow):
                if happens(settings.failure_probability, seed, "failure", *key):
                    return LinkFailed(
                        f"the transfer {tag} from worker {flow.src} to worker {flow.dst} was lost"
                    )
        transfer = _failure_keys("transfer", flow)[0]
        if flow.subject_to_failure and happens(
            settings.corruption_probability, seed, "corruption", *transfer
        ):
            return PayloadCorrupt(
                f"the transfer {tag} from worker {flow.src} to worker {flow.dst} arrived damaged: "
                f"its checksum differs"
            )
        return None


def _failure_keys(unit: FailureUnit, flow: Flow) -> list[tuple[int | str, ...]]:
    """Keys of the draws that decide about a flow: it fails where any of them does."""
    tag = flow.tag
    collective = (tag.kind, tag.round_index, tag.step, tag.attempt)
    if unit == "worker":
        return [(flow.src, *collective), (flow.dst, *collective)]
    if unit == "step":
        return [(*collective, tag.phase, tag.part)]
    if unit == "collective":
        return [collective]
    return [(flow.src, flow.dst, *collective, tag.phase, tag.part, tag.epoch)]


def _capacities(
    settings: Network, num_workers: int
) -> tuple[list[int], dict[tuple[int, int], int]]:
    """Capacity per link (uploads, downloads, narrow paths), and which pair has which path."""

    def capacity(*choices: float | None) -> int:
        bytes_per_s = next(choice for choice in choices if choice is not None)
        return round(bytes_per_s * RATE_PER_BYTE_PER_S)

    common = settings.bandwidth
    uploads = [capacity(settings.upload, common)] * num_workers
    downloads = [capacity(settings.download, common)] * num_workers
    for own in settings.workers:
        uploads[own.worker] = capacity(own.upload, own.bandwidth, settings.upload, common)
        downloads[own.worker] = capacity(own.download, own.bandwidth, settings.download, common)
    capacities = uploads + downloads
    pair_link = {}
    for link in settings.pairs:
        if link.bandwidth is not None:
            for pair in link.directions():
                pair_link[pair] = len(capacities)
                capacities.append(capacity(link.bandwidth))
    return capacities, pair_link
