"""The simulated network: closed forms, fairness, conservation, failures, snapshots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer.sim.network as network_module
from gossamer.comm.context import Tag
from gossamer.errors import (
    CommError,
    ConfigError,
    InvariantViolated,
    LinkFailed,
    PayloadCorrupt,
    PeerLost,
)
from gossamer.sim.clock import NS_PER_S, VirtualLoop
from gossamer.sim.faults import FaultPlan, Faults
from gossamer.sim.network import Flow, Network, SimNetwork
from gossamer.sim.sharing import (
    _max_min_rates_scalar,
    _max_min_rates_vectorised,
    max_min_rates,
)
from gossamer.units import parse_rate

MB = 1_000_000
TAG = Tag("test", 0)


class Bench:
    """A network on its own loop, and a log of what arrived when."""

    def __init__(
        self,
        num_workers: int,
        faults: Faults | None = None,
        *,
        start_ns: int = 0,
        seed: int = 0,
        **network: Any,
    ) -> None:
        self.loop = VirtualLoop(start_ns)
        plan = FaultPlan(faults or Faults(), num_workers, seed)
        network.setdefault("bandwidth", "1MB/s")
        self.network = SimNetwork(self.loop, Network(**network), num_workers, plan, seed)
        self.log: list[tuple[int, int, int, CommError | None]] = []

    def flow(self, src: int, dst: int, num_bytes: int, tag: Tag = TAG, **flags: bool) -> Flow:
        return Flow(src, dst, num_bytes, tag, self._done, **flags)

    def start(self, src: int, dst: int, num_bytes: int, tag: Tag = TAG, **flags: bool) -> Flow:
        flow = self.flow(src, dst, num_bytes, tag, **flags)
        self.network.start(flow)
        return flow

    def at(self, seconds: float, action: Callable[..., object], *args: object) -> None:
        self.loop.call_at_ns(round(seconds * NS_PER_S), action, *args)

    def _done(self, flow: Flow, error: CommError | None) -> None:
        self.log.append((flow.src, flow.dst, self.loop.time_ns(), error))

    def run(self) -> dict[tuple[int, int], float]:
        """Seconds at which each pair's flow arrived; all must have got through."""
        self.loop.run_forever()
        assert [entry for entry in self.log if entry[3] is not None] == []
        return {(src, dst): ns / NS_PER_S for src, dst, ns, _ in self.log}


# ------------------------------------------------------------------------------- closed forms


def test_one_flow_takes_bytes_over_rate_plus_latency() -> None:
    bench = Bench(2, bandwidth="100Mbit/s", latency="30ms")
    bench.start(0, 1, 3_000_000_000)
    assert bench.network.estimate_ns(0, 1, 3_000_000_000) == 240 * NS_PER_S + 30_000_000
    assert bench.run() == {(0, 1): 240.03}
    assert bench.network.bytes_delivered == 3_000_000_000


def test_two_flows_share_a_link_until_one_ends() -> None:
    bench = Bench(3)
    bench.start(0, 1, 1 * MB)
    bench.start(0, 2, 2 * MB)
    # 0.5 MB/s each until 2 s; then the longer one has 1 MB left at 1 MB/s.
    assert bench.run() == {(0, 1): 2.0, (0, 2): 3.0}


def test_a_late_start_slows_what_is_on_its_way() -> None:
    bench = Bench(3)
    bench.start(1, 0, 2 * MB)
    bench.at(1, bench.start, 2, 0, 2 * MB)
    # Alone for 1 s: 1 MB is left, at half rate until 3 s; the other then has 1 MB left.
    assert bench.run() == {(1, 0): 3.0, (2, 0): 4.0}


def test_links_are_full_duplex() -> None:
    bench = Bench(2)
    bench.start(0, 1, MB)
    bench.start(1, 0, MB)
    assert bench.run() == {(0, 1): 1.0, (1, 0): 1.0}


def test_three_links_of_different_capacity() -> None:
    # Worker 0 sends at 9, worker 4 receives at 4 and worker 5 at 2 (MB/s).
    bench = Bench(
        6,
        bandwidth="100MB/s",
        workers=[
            {"worker": 0, "upload": "9MB/s"},
            {"worker": 4, "download": "4MB/s"},
            {"worker": 5, "download": "2MB/s"},
        ],
    )
    flows = [bench.start(src, dst, 1000 * MB) for src, dst in ((0, 4), (1, 4), (0, 5), (0, 3))]
    bench.at(1e-9, bench.loop.stop)
    bench.loop.run_forever()
    # Filling: at 2 the links into 4 (two flows) and 5 (one flow) are full; the last takes the rest.
    assert [flow.rate_bytes_per_s / MB for flow in flows] == [2, 2, 2, 5]


@pytest.mark.parametrize("num_workers", [2, 3, 8, 40])
def test_a_ring_runs_at_full_rate(num_workers: int) -> None:
    bench = Bench(num_workers, latency="10ms")
    for worker in range(num_workers):
        bench.start(worker, (worker + 1) % num_workers, MB)
    assert set(bench.run().values()) == {1.01}


def test_overrides_per_worker_and_pair() -> None:
    bench = Bench(
        4,
        upload="2MB/s",
        download="4MB/s",
        latency="1ms",
        workers=[{"worker": 1, "bandwidth": "1MB/s", "latency": "5ms"}],
        pairs=[
            {"source": 2, "destination": 3, "bandwidth": "0.5MB/s", "latency": "7ms"},
            {"source": 0, "destination": 3, "latency": 0, "both_ways": False},
        ],
    )
    expected = {(0, 2): 0.501, (0, 1): 1.005, (1, 0): 1.005, (2, 3): 2.007, (3, 2): 2.007,
                (0, 3): 0.5, (3, 0): 0.501}  # fmt: skip
    for (src, dst), seconds in expected.items():
        assert bench.network.estimate_ns(src, dst, MB) == round(seconds * NS_PER_S), (src, dst)
        alone = Bench(4)
        alone.network = SimNetwork(
            alone.loop, bench.network.settings, 4, FaultPlan(Faults(), 4, 0), 0
        )
        alone.start(src, dst, MB)
        assert alone.run() == {(src, dst): seconds}


def test_a_flow_of_no_bytes_takes_the_latency_alone() -> None:
    bench = Bench(3, latency="20ms")
    bench.start(0, 1, MB)
    bench.start(0, 2, 0)
    assert bench.run() == {(0, 2): 0.02, (0, 1): 1.02}


def test_flows_never_end_within_start_even_without_latency() -> None:
    bench = Bench(2)
    bench.start(0, 1, 0)
    assert bench.log == []
    bench.run()
    assert bench.log == [(0, 1, 0, None)]


def test_the_callback_may_start_the_next_flow() -> None:
    bench = Bench(2)
    times: list[int] = []

    def again(flow: Flow, error: CommError | None) -> None:
        times.append(bench.loop.time_ns())
        if len(times) < 5:
            bench.network.start(Flow(0, 1, MB * (len(times) % 2), TAG, again))

    bench.network.start(Flow(0, 1, 0, TAG, again))
    bench.run()
    assert times == [0, NS_PER_S, NS_PER_S, 2 * NS_PER_S, 2 * NS_PER_S]


def test_all_pairs_of_64_workers_are_planned_once_and_end_at_one_instant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(64, latency="1ms")
    planned: list[int] = []

    def counted(links: Sequence[tuple[int, ...]], capacity: Sequence[int]) -> list[int]:
        planned.append(len(links))
        return max_min_rates(links, capacity)

    monkeypatch.setattr(network_module, "max_min_rates", counted)
    for src in range(64):
        for dst in range(64):
            if src != dst:
                bench.start(src, dst, MB)
    times = set(bench.run().values())
    assert len(bench.log) == 4032 and len(times) == 1 and math.isclose(times.pop(), 63.001)
    assert planned == [4032, 0]  # when all start, and when all have ended


# ---------------------------------------------------------------------- fairness and conservation

_FLOWS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 4),
        st.one_of(st.sampled_from([0, 1, MB]), st.integers(0, 3 * MB)),  # ties are the hard cases
        st.integers(0, 4),
    ),
    max_size=12,
).map(lambda flows: [f for f in flows if f[0] != f[1]])

_NETWORK = st.fixed_dictionaries(
    {
        "upload": st.integers(1, 3 * MB),
        "download": st.integers(1, 3 * MB),
        "latency": st.sampled_from([0, 0.01, 0.3]),
        "pairs": st.sampled_from([(), ({"source": 0, "destination": 1, "bandwidth": 100_000},)]),
    }
)


@st.composite
def _sharing_problem(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int]]:
    capacity = draw(st.lists(st.integers(1000, 10**18), min_size=2, max_size=8))
    link = st.integers(0, len(capacity) - 1)
    flows = draw(st.lists(st.lists(link, min_size=1, max_size=3, unique=True), max_size=20))
    return [tuple(links) for links in flows], capacity


@given(_sharing_problem())
def test_rates_are_max_min_fair(problem: tuple[list[tuple[int, ...]], list[int]]) -> None:
    links, capacity = problem
    rates = max_min_rates(links, capacity)
    used = [
        sum(r for r, own in zip(rates, links, strict=True) if link in own)
        for link in range(len(capacity))
    ]
    assert all(load <= full for load, full in zip(used, capacity, strict=True))
    for own, rate in zip(links, rates, strict=True):
        # A bottleneck: a full link (but for rounding) on which nobody has more. So the flow can
        # gain only where one that has no more than it would lose.
        assert any(
            capacity[link] - used[link] < len(links)
            and all(
                other <= rate + len(links) or link not in theirs
                for theirs, other in zip(links, rates, strict=True)
            )
            for link in own
        )


@given(_sharing_problem(), st.randoms(use_true_random=False))
def test_both_ways_to_plan_agree_whatever_the_order(
    problem: tuple[list[tuple[int, ...]], list[int]], random: Any
) -> None:
    links, capacity = problem
    if not links:
        return
    rates = _max_min_rates_scalar(links, capacity)
    assert _max_min_rates_vectorised(links, capacity) == rates
    order = list(range(len(links)))
    random.shuffle(order)
    assert max_min_rates([links[i] for i in order], capacity) == [rates[i] for i in order]


@given(_FLOWS, _NETWORK)
@settings(max_examples=60)
def test_links_are_never_overloaded_and_every_byte_is_carried(
    flows: Sequence[tuple[int, int, int, int]], network: dict[str, Any]
) -> None:
    bench = Bench(5, **network)
    carried: dict[int, float] = {}
    changes: list[tuple[Flow, int, int]] = []
    set_rate, end = bench.network._set_rate, bench.network._end

    def book(flow: Flow, now_ns: int) -> None:
        moved = flow.rate * (now_ns - flow.updated_ns)
        carried[id(flow)] = carried.get(id(flow), 0) + moved

    def watched_rate(flow: Flow, rate: int, now_ns: int) -> None:
        book(flow, now_ns)
        changes.append((flow, rate, now_ns))
        set_rate(flow, rate, now_ns)

    def watched_end(flow: Flow, error: CommError | None) -> None:
        book(flow, bench.loop.time_ns())
        last_rate[id(flow)] = flow.rate
        end(flow, error)

    last_rate: dict[int, int] = {}
    bench.network._set_rate = watched_rate  # type: ignore[method-assign]
    bench.network._end = watched_end  # type: ignore[method-assign]
    plan = bench.network._plan

    def checked_plan() -> None:
        plan()
        capacity = bench.network._capacity
        loads = [0] * len(capacity)
        for flow in bench.network._active:
            for link in flow.links:
                loads[link] += flow.rate
        assert all(load <= full for load, full in zip(loads, capacity, strict=True))

    bench.network._plan = checked_plan  # type: ignore[method-assign]
    started = [bench.flow(src, dst, size) for src, dst, size, _ in flows]
    for flow, (_, _, _, second) in zip(started, flows, strict=True):
        bench.at(second, bench.network.start, flow)
    bench.run()
    assert len(bench.log) == len(flows)
    for flow in started:
        work = flow.num_bytes * 10**15
        # Through in the nanosecond in which the last bit is through.
        assert work <= carried.get(id(flow), 0) <= work + last_rate[id(flow)]
    assert bench.network.bytes_delivered == sum(size for _, _, size, _ in flows)


@given(_FLOWS, _NETWORK, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_order_of_starting_within_an_instant_does_not_matter(
    flows: list[tuple[int, int, int, int]], network: dict[str, Any], random: Any
) -> None:
    def run(order: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, Any]]:
        bench = Bench(5, failure_probability=0.2, corruption_probability=0.2, **network)
        for src, dst, size, second in order:
            bench.at(second, bench.start, src, dst, size)
        bench.loop.run_forever()
        return [(*entry[:3], repr(entry[3])) for entry in bench.log]

    shuffled = list(flows)
    random.shuffle(shuffled)
    assert run(flows) == run(shuffled)


@given(
    _FLOWS,
    _NETWORK,
    st.one_of(st.integers(0, 6 * NS_PER_S), st.integers(0, 60).map(lambda i: i * NS_PER_S // 10)),
    st.booleans(),
)
@settings(max_examples=60)
def test_a_snapshot_at_any_instant_continues_exactly(
    flows: list[tuple[int, int, int, int]],
    network: dict[str, Any],
    saved_ns: int,
    with_outages: bool,
) -> None:
    faults = Faults(
        outages=[{"worker": 1, "start": 1, "duration": 2}] if with_outages else (),
        outage_rate=200.0 * with_outages,
        mean_outage=3,
    )
    make: dict[str, Any] = {"failure_probability": 0.2, "keepalive": 2.5, **network}

    def begin(bench: Bench) -> None:
        for part, (src, dst, size, second) in enumerate(flows):
            bench.at(second, bench.start, src, dst, size, Tag("test", 0, part=part))

    whole = Bench(5, faults, **make)
    begin(whole)
    whole.loop.run_forever()

    cut = Bench(5, faults, **make)
    begin(cut)
    cut.loop.call_at_ns(saved_ns, cut.loop.stop)
    cut.loop.run_forever()
    saved = [(flow, json.loads(json.dumps(flow.snapshot()))) for flow in cut.network.active_flows()]
    resumed = Bench(5, faults, start_ns=saved_ns, **make)
    resumed.log = list(cut.log)
    resumed.network.restore(
        (resumed.flow(flow.src, flow.dst, flow.num_bytes, flow.tag), snapshot)
        for flow, snapshot in saved
    )
    for part, (src, dst, size, second) in enumerate(flows):
        if second * NS_PER_S > saved_ns:
            resumed.at(second, resumed.start, src, dst, size, Tag("test", 0, part=part))
    resumed.loop.run_forever()
    assert _shown(resumed.log) == _shown(whole.log)
    cut.loop.run_forever()  # nor has the snapshot disturbed the run that it was taken from
    assert _shown(cut.log) == _shown(whole.log)


def test_a_flow_that_is_due_in_the_instant_of_the_snapshot_still_ends_in_it() -> None:
    cut = Bench(3)
    cut.at(1, cut.loop.stop)
    due = cut.start(0, 1, MB)
    cut.loop.run_forever()
    assert cut.log == [] and cut.loop.time_ns() == NS_PER_S
    resumed = Bench(3, start_ns=NS_PER_S)
    resumed.network.restore([(resumed.flow(0, 1, MB), due.snapshot())])
    resumed.start(0, 2, MB)
    assert resumed.run() == {(0, 1): 1.0, (0, 2): 2.0}


def test_what_befell_a_flow_that_is_still_arriving_is_in_its_snapshot() -> None:
    cut = Bench(2, latency="1s")
    flow = cut.start(0, 1, MB)
    cut.at(0.5, cut.network.abort, 1, PeerLost("worker 1 is gone"))
    cut.at(0.75, cut.loop.stop)
    cut.loop.run_forever()
    resumed = Bench(2, start_ns=cut.loop.time_ns(), latency="1s")
    resumed.network.restore([(resumed.flow(0, 1, MB), flow.snapshot())])
    resumed.loop.run_forever()
    assert _shown(resumed.log) == [(0, 1, 1_500_000_000, "PeerLost('worker 1 is gone')")]


def _shown(
    log: list[tuple[int, int, int, CommError | None]],
) -> list[tuple[int, int, int, str]]:
    return [(src, dst, ns, repr(error)) for src, dst, ns, error in log]


# ------------------------------------------------------------------------- outages and keepalive


def test_a_short_outage_delays_by_its_length() -> None:
    bench = Bench(3, Faults(outages=[{"worker": 1, "start": 1, "duration": 2}]))
    bench.start(0, 1, 2 * MB)
    bench.start(2, 0, 2 * MB)
    assert bench.run() == {(2, 0): 2.0, (0, 1): 4.0}


def test_what_an_outage_frees_goes_to_the_others() -> None:
    bench = Bench(3, Faults(outages=[{"worker": 1, "start": 0, "duration": 2}]))
    bench.start(0, 1, MB)
    bench.start(0, 2, MB)
    assert bench.run() == {(0, 2): 1.0, (0, 1): 3.0}


def test_a_stall_as_long_as_the_keepalive_fails_the_flow() -> None:
    bench = Bench(
        3,
        Faults(partitions=[{"groups": [[0]], "start": 1, "duration": 60}]),
        latency="10ms",
        keepalive="3.5s",
    )
    bench.start(0, 1, 2 * MB)
    bench.start(1, 2, 3 * MB)
    bench.at(20, bench.start, 2, 0, 0)
    bench.loop.run_forever()
    (_, _, first_ns, fine), (_, _, second_ns, lost), (_, _, third_ns, refused) = bench.log
    assert (first_ns, fine) == (3_010_000_000, None)
    assert second_ns == 4_510_000_000 and third_ns == 23_510_000_000
    assert type(lost) is LinkFailed and type(refused) is LinkFailed
    assert str(lost) == (
        "nothing moved from worker 0 to worker 1 for 3.5 s: the link between them is down"
    )


def test_each_stall_counts_on_its_own() -> None:
    outages = [{"worker": 0, "start": start, "duration": 3} for start in (1, 5, 9)]
    bench = Bench(2, Faults(outages=outages), keepalive="3.1s")
    bench.start(0, 1, 3 * MB)
    assert bench.run() == {(0, 1): 9.0}  # 1 s + 1 s + 1 s of work, with two pauses of 3 s


def test_an_idle_network_lets_the_clock_rest() -> None:
    bench = Bench(3, Faults(outage_rate=100.0))
    bench.start(0, 1, MB)
    bench.loop.run_forever()  # returns, though outages go on for ever
    assert len(bench.log) == 1


# --------------------------------------------------------------------------- abort and cancel


def test_abort_ends_the_flows_of_one_worker_and_frees_its_share() -> None:
    bench = Bench(4, latency="100ms")
    for src, dst in ((0, 1), (2, 1), (1, 3)):
        bench.start(src, dst, MB)
    bench.start(2, 3, 3 * MB)
    bench.at(0.5, bench.network.abort, 0, PeerLost("worker 0 is gone"))
    bench.loop.run_forever()
    gone = [entry for entry in bench.log if entry[3] is not None]
    assert [(src, dst, ns) for src, dst, ns, _ in gone] == [(0, 1, 600_000_000)]
    assert type(gone[0][3]) is PeerLost
    # (2,1) had half of two links; half of worker 2's upload is still (2,3)'s.
    assert ([e[2] for e in bench.log if e[:2] == (2, 1)]) == [2_100_000_000]


def test_abort_reaches_flows_that_are_through_but_have_not_arrived() -> None:
    bench = Bench(2, latency="1s")
    bench.start(0, 1, 0)
    bench.at(0.5, bench.network.abort, 1, PeerLost("worker 1 is gone"))
    bench.loop.run_forever()
    assert [(ns, type(error)) for _, _, ns, error in bench.log] == [(NS_PER_S, PeerLost)]
    assert bench.network.bytes_delivered == 0


@pytest.mark.parametrize("cancel_at", [0.0, 0.5, 1.05])
def test_cancel_says_nothing(cancel_at: float) -> None:
    bench = Bench(3, latency="100ms")
    bench.start(0, 2, MB)
    flow = bench.start(0, 1, MB // 2)
    bench.at(cancel_at, bench.network.cancel, flow)
    expected = {0.0: 1.1, 0.5: 1.35, 1.05: 1.6}[cancel_at]
    assert bench.run() == {(0, 2): expected}
    bench.network.cancel(flow)
    assert bench.network.active_flows() == []


def test_misuse_is_refused() -> None:
    bench = Bench(2)
    started = bench.start(0, 1, 1)
    for flow in (started, bench.flow(1, 1, 1), bench.flow(0, 1, -1)):
        with pytest.raises(InvariantViolated, match="not a new flow of 0 or more bytes"):
            bench.network.start(flow)


# ---------------------------------------------------------------------------------- failure draws


def _collective(bench: Bench, round_index: int, num_workers: int) -> None:
    """A ring all-reduce's transfers, all at once."""
    for phase in range(2 * (num_workers - 1)):
        for worker in range(num_workers):
            bench.start(worker, (worker + 1) % num_workers, 1, Tag("mix", round_index, phase=phase))


@pytest.mark.parametrize(
    ("unit", "num_draws"), [("worker", 8), ("step", 14), ("collective", 1), ("transfer", 112)]
)
def test_a_collective_fails_as_often_as_its_number_of_draws_says(unit: str, num_draws: int) -> None:
    rounds, probability = 250, 0.05
    bench = Bench(8, failure_probability=probability, failure_unit=unit)
    whole = 0
    for round_index in range(rounds):
        bench.log.clear()
        _collective(bench, round_index, 8)
        bench.loop.run_forever()
        assert len(bench.log) == 112
        whole += all(error is None for *_, error in bench.log)
    survival = (1 - probability) ** num_draws
    deviation = math.sqrt(rounds * survival * (1 - survival))
    assert abs(whole - rounds * survival) <= 4 * deviation + 1e-9


def test_a_worker_that_fails_loses_all_its_transfers_of_that_attempt_and_no_others() -> None:
    bench = Bench(8, failure_probability=0.1, failure_unit="worker")
    seen_failures = 0
    for round_index in range(40):
        bench.log.clear()
        _collective(bench, round_index, 8)
        bench.loop.run_forever()
        failed = {(src, dst) for src, dst, _, error in bench.log if error is not None}
        through = {(src, dst) for src, dst, _, error in bench.log if error is None}
        assert not failed & through  # all phases of a link alike
        struck = [w for w in range(8) if all(w not in pair for pair in through)]
        assert failed == {pair for pair in failed | through if set(pair) & set(struck)}
        seen_failures += bool(failed)
    assert 10 < seen_failures < 36  # expected 1 - 0.9^8 = 57 % of 40


def test_another_attempt_another_draw_and_the_same_again_for_the_same() -> None:
    def outcomes(seed: int) -> list[bool]:
        bench = Bench(2, failure_probability=0.5, failure_unit="worker", seed=seed)
        for attempt in range(64):
            bench.start(0, 1, 1, Tag("mix", 3, attempt=attempt))
        bench.loop.run_forever()
        return [error is None for *_, error in bench.log]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)
    assert 4 < sum(outcomes(1)) < 30  # expected a quarter


@pytest.mark.parametrize("unit", ["worker", "step", "transfer", "collective"])
def test_who_is_drawn(unit: str) -> None:
    bench = Bench(
        2, failure_probability=0.999999, failure_unit=unit, corruption_probability=0.999999
    )
    bench.start(0, 1, 1, Tag("payload", 0))
    bench.start(0, 1, 2, Tag("plain", 0), subject_to_failure=False)
    bench.start(0, 1, 3, Tag("control", 0), subject_to_failure=False, control=True)
    bench.loop.run_forever()
    kinds = [type(error) for *_, error in bench.log]
    control = LinkFailed if unit == "worker" else type(None)
    assert kinds == [LinkFailed, type(None), control]


def test_a_failing_flow_uses_the_link_to_its_end() -> None:
    bench = Bench(3, failure_probability=0.999999, latency="10ms")
    bench.start(0, 1, MB)
    bench.start(0, 2, MB, subject_to_failure=False)
    bench.loop.run_forever()
    assert [(dst, ns, type(error)) for _, dst, ns, error in bench.log] == [
        (1, 2_010_000_000, LinkFailed),
        (2, 2_010_000_000, type(None)),
    ]


@pytest.mark.parametrize("bandwidth", ["1bit/s", 0.25, 1.5, 7 / 3])
def test_rates_need_not_be_whole_bytes(bandwidth: str | float) -> None:
    bench = Bench(2, bandwidth=bandwidth)
    bench.start(0, 1, 3)
    assert bench.run() == {(0, 1): pytest.approx(3 / parse_rate(bandwidth), rel=1e-6)}


def test_corruption_is_drawn_per_transfer() -> None:
    bench = Bench(2, corruption_probability=0.25)
    for part in range(400):
        bench.start(0, 1, 1, Tag("mix", 0, part=part))
    bench.loop.run_forever()
    corrupt = sum(type(error) is PayloadCorrupt for *_, error in bench.log)
    assert abs(corrupt - 100) < 4 * math.sqrt(400 * 0.25 * 0.75)


# --------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"bandwidth": "-1Mbit/s"}, "bandwidth: input should be greater than or equal to 0.125"),
        ({"upload": "0.5bit/s"}, "upload: input should be greater than or equal to 0.125"),
        ({"latency": 1e300}, "latency: at most 1e+12 s expected; got 1e+300"),
        ({"bandwidth": math.inf}, "bandwidth: input should be a finite number"),
        ({"bandwidth": "fast"}, "bandwidth: a data rate expected"),
        ({"latency": "-1ms"}, "latency: input should be greater than or equal to 0"),
        ({"keepalive": 0}, "keepalive: input should be greater than 0"),
        ({"failure_probability": 1}, "failure_probability: input should be less than 1"),
        ({"failure_unit": "link"}, "failure_unit: input should be 'worker', 'step', 'transfer'"),
        ({"latencies": 1}, "unknown setting 'latencies'; did you mean 'latency'?"),
        ({"workers": [{"worker": 1}, {"worker": 1}]}, "worker 1 is given more than once"),
        ({"pairs": [{"source": 1, "destination": 1}]}, "worker 1 has no link to itself"),
        (
            {"pairs": [{"source": 0, "destination": 1}, {"source": 1, "destination": 0}]},
            "the path 0 -> 1 is given more than once",
        ),
    ],
)
def test_bad_settings_are_refused(given_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Network(**given_settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_of_workers_outside_the_run_are_refused() -> None:
    for network in (
        Network(workers=[{"worker": 8}]),
        Network(pairs=[{"source": 0, "destination": 8}]),
    ):
        network.validate_for(9)
        with pytest.raises(ConfigError, match=r"worker 8 is not in this run, which has 8 workers"):
            network.validate_for(8)
