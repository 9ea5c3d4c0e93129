"""The fault plan: schedules, rates, overlaps, and answers that no earlier question changes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.sim.clock import NS_PER_S, to_ns
from gossamer.sim.faults import Crash, FaultPlan, Faults, Window, happens

HOUR_NS = 3600 * NS_PER_S


def s(seconds: float) -> int:
    return to_ns(seconds)


def test_scheduled_windows_are_clipped_merged_and_in_order() -> None:
    faults = Faults(
        hangs=[
            {"worker": 1, "start": 20, "duration": 5},
            {"worker": 1, "start": 3, "duration": 4},
            {"worker": 1, "start": 5, "duration": 1},
            {"worker": 1, "start": 7, "duration": 2},
            {"worker": 0, "start": 0, "duration": 100},
        ]
    )
    plan = FaultPlan(faults, 2, seed=0)
    assert plan.windows("hang", 1, 0, s(60)) == [Window(s(3), s(9)), Window(s(20), s(25))]
    assert plan.windows("hang", 1, s(4), s(21)) == [Window(s(4), s(9)), Window(s(20), s(21))]
    assert plan.windows("hang", 1, s(9), s(20)) == []
    assert plan.windows("outage", 1, 0, s(60)) == plan.windows("slow", 1, 0, s(60)) == []
    assert [plan.frozen_until(1, s(t)) for t in (2, 3, 6.5, 9, 22)] == [
        s(2), s(9), s(9), s(9), s(25),
    ]  # fmt: skip


def test_where_slow_phases_overlap_the_slowest_counts() -> None:
    faults = Faults(
        slow=[
            {"worker": 0, "start": 0, "duration": 10, "factor": 2},
            {"worker": 0, "start": 4, "duration": 2, "factor": 5},
            {"worker": 0, "start": 10, "duration": 1, "factor": 2},
        ]
    )
    plan = FaultPlan(faults, 1, seed=0)
    assert plan.windows("slow", 0, 0, s(60)) == [
        Window(0, s(4), 2), Window(s(4), s(6), 5), Window(s(6), s(11), 2),
    ]  # fmt: skip
    assert [plan.slow_factor(0, s(t)) for t in (0, 5, 8, 11)] == [2, 5, 2, 1]
    assert plan.next_compute_change(0, s(4)) == s(6)
    assert plan.next_compute_change(0, s(11)) is None


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 4)), max_size=8),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_windows_agree_with_looking_at_every_instant(
    phases: list[tuple[int, int, int]], start: int, length: int
) -> None:
    faults = Faults(
        slow=[
            {"worker": 0, "start": f"{at} ns", "duration": f"{for_} ns", "factor": factor}
            for at, for_, factor in phases
        ]
    )
    plan = FaultPlan(faults, 1, seed=0)

    def factor_at(ns: int) -> int:
        return max((f for at, for_, f in phases if at <= ns < at + for_), default=0)

    windows = plan.windows("slow", 0, start, start + length)
    covered = {ns: w.factor for w in windows for ns in range(w.start_ns, w.end_ns)}
    assert sum(w.end_ns - w.start_ns for w in windows) == len(covered)  # disjoint
    assert covered == {
        ns: factor_at(ns) for ns in range(start, start + length) if factor_at(ns) > 0
    }
    for ns in range(start, start + length):
        assert plan.slow_factor(0, ns) == max(1, factor_at(ns))
        changes = [b for at, for_, _ in phases for b in (at, at + for_) if b > ns]
        assert plan.next_compute_change(0, ns) == min(changes, default=None)


# ---------------------------------------------------------------------------------------- links


def test_an_outage_takes_down_both_directions() -> None:
    plan = FaultPlan(Faults(outages=[{"worker": 1, "start": 1, "duration": 2}]), 3, seed=0)
    assert plan.has_link_faults
    for pair in ((0, 1), (1, 0), (2, 1)):
        assert [plan.link_up(*pair, s(t)) for t in (0.5, 1, 2.5, 3)] == [True, False, False, True]
    assert plan.link_up(0, 2, s(2))
    assert [plan.next_link_change(s(t)) for t in (0, 1, 2, 3)] == [s(1), s(3), s(3), None]
    assert [plan.next_link_change(s(t)) for t in (2, 0)] == [s(3), s(1)]  # and back in time


def test_a_partition_separates_groups_and_those_not_named_form_one() -> None:
    faults = Faults(partitions=[{"groups": [[0, 1], [2]], "start": 5, "duration": 5}])
    plan = FaultPlan(faults, 5, seed=0)
    group = [0, 0, 1, 2, 2]
    for src in range(5):
        for dst in range(5):
            assert plan.link_up(src, dst, s(7)) == (group[src] == group[dst])
            assert plan.link_up(src, dst, s(4.9)) and plan.link_up(src, dst, s(10))
    assert [plan.next_link_change(s(t)) for t in (0, 5, 10)] == [s(5), s(10), None]


def test_without_link_faults_links_are_always_up() -> None:
    plan = FaultPlan(Faults(hang_rate=10, slow_rate=10, crash_rate=10), 2, seed=0)
    assert not plan.has_link_faults
    assert plan.link_up(0, 1, s(1e6)) and plan.next_link_change(0) is None


# -------------------------------------------------------------------------------------- crashes


def test_scheduled_crashes_come_in_order_and_once() -> None:
    faults = Faults(
        crashes=[
            {"worker": 0, "start": 50},
            {"worker": 0, "start": 10, "return_after": "30s"},
            {"worker": 1, "start": 20, "return_after": "1s"},
        ]
    )
    plan = FaultPlan(faults, 3, seed=0)
    assert plan.next_crash(0, 0) == Crash(s(10), s(40))
    assert plan.next_crash(0, s(10)) == Crash(s(50), None)
    assert plan.next_crash(0, s(50)) is None
    assert plan.next_crash(1, s(5)) == Crash(s(20), s(21))
    assert plan.next_crash(2, 0) is None


# ---------------------------------------------------------------------------------- rates and seeds

RATES: dict[str, Any] = {
    "outage_rate": 6.0, "hang_rate": 12.0, "slow_rate": 3.0, "crash_rate": 1.0,
    "mean_outage": "5min", "mean_hang": "10min", "slow_factor": 3.0,
    "hangs": ({"worker": 0, "start": "1h", "duration": "1h"},),
}  # fmt: skip

_QUESTION = st.tuples(
    st.sampled_from(["outage", "hang", "slow", "crash", "frozen", "link", "change", "compute"]),
    st.integers(0, 2),
    st.integers(0, 20 * HOUR_NS),
    st.integers(0, 5 * HOUR_NS),
)


def _ask(plan: FaultPlan, question: tuple[str, int, int, int]) -> object:
    what, worker, at_ns, length_ns = question
    match what:
        case "outage" | "hang" | "slow":
            return plan.windows(what, worker, at_ns, at_ns + length_ns)
        case "crash":
            return plan.next_crash(worker, at_ns)
        case "frozen":
            return plan.frozen_until(worker, at_ns)
        case "link":
            return plan.link_up(worker, (worker + 1) % 3, at_ns)
        case "change":
            return plan.next_link_change(at_ns)
        case _:
            return plan.next_compute_change(worker, at_ns)


@given(st.lists(_QUESTION, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_answers_do_not_depend_on_earlier_questions(
    questions: list[tuple[str, int, int, int]], random: Any
) -> None:
    faults = Faults(**RATES)
    plan = FaultPlan(faults, 3, seed=5)
    shuffled = list(questions)
    random.shuffle(shuffled)
    answers = {question: _ask(plan, question) for question in shuffled}
    for question in questions:
        assert _ask(FaultPlan(faults, 3, seed=5), question) == answers[question]


def test_another_seed_worker_or_kind_is_another_stream() -> None:
    faults = Faults(outage_rate=10, hang_rate=10, mean_outage=1, mean_hang=1)
    plan, other = FaultPlan(faults, 2, seed=0), FaultPlan(faults, 2, seed=1)
    streams = [
        tuple(w.start_ns for w in p.windows(kind, worker, 0, 24 * HOUR_NS))
        for p in (plan, other)
        for kind in ("outage", "hang")
        for worker in (0, 1)
    ]
    assert len(set(streams)) == 8
    # A worker's faults stay the same when others join the run.
    assert FaultPlan(faults, 5, seed=0).windows("hang", 1, 0, HOUR_NS) == plan.windows(
        "hang", 1, 0, HOUR_NS
    )


def test_rates_and_durations_have_the_stated_means() -> None:
    hours, rate, mean_s = 2000, 2.0, 40.0
    plan = FaultPlan(Faults(crash_rate=rate, mean_downtime=mean_s), 1, seed=3)
    crashes, at_ns = [], 0
    while (crash := plan.next_crash(0, at_ns)) is not None and crash.at_ns < hours * HOUR_NS:
        crashes.append(crash)
        at_ns = crash.at_ns
    expected = hours * rate
    assert abs(len(crashes) - expected) < 4 * math.sqrt(expected)  # Poisson
    away = [(crash.return_ns or 0) - crash.at_ns for crash in crashes]
    mean_error = mean_s / math.sqrt(len(away))  # exponential: deviation equals the mean
    assert abs(sum(away) / len(away) / NS_PER_S - mean_s) < 4 * mean_error
    # Memoryless gaps: a share exp(-1) is longer than the mean.
    gaps = [b.at_ns - a.at_ns for a, b in itertools.pairwise(crashes)]
    longer = sum(gap > HOUR_NS / rate for gap in gaps) / len(gaps)
    assert abs(longer - math.exp(-1)) < 0.03


def test_a_draw_happens_as_often_as_stated_and_never_at_zero() -> None:
    hits = sum(happens(0.3, 1, "test", index) for index in range(2000))
    assert abs(hits - 600) < 4 * math.sqrt(2000 * 0.3 * 0.7)
    assert not any(happens(0.0, 1, "test", index) for index in range(100))


# --------------------------------------------------------------------------- words and mistakes


def test_the_plan_describes_itself_in_order_of_time() -> None:
    faults = Faults(
        outages=[{"worker": 2, "start": 90, "duration": 3}],
        partitions=[{"groups": [[0, 1]], "start": 5, "duration": 9}],
        slow=[{"worker": 0, "start": 1, "duration": 60, "factor": 2.5}],
        hangs=[{"worker": 1, "start": 2, "duration": 4}],
        crashes=[
            {"worker": 3, "start": 3},
            {"worker": 3, "start": 4, "return_after": "2min"},
        ],
        crash_rate=0.5,
    )
    assert FaultPlan(faults, 4, seed=7).describe() == [
        "at 1 s: worker 0: 2.5 times slower for 1.0 min",
        "at 2 s: worker 1: hangs for 4 s",
        "at 3 s: worker 3: crashes, for good",
        "at 4 s: worker 3: crashes, returns after 2.0 min",
        "at 5 s: partition 0,1 | others for 9 s",
        "at 1.5 min: worker 2: link down for 3 s",
        "crashes: 0.5 per worker and hour, mean 10.0 min (seed 7)",
    ]
    assert FaultPlan(Faults(), 4, seed=7).describe() == []


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"hang_rate": -1}, "hang_rate: input should be greater than or equal to 0"),
        ({"crash_rate": 1e7}, "crash_rate: input should be less than or equal to 1000000"),
        (
            {"hang_rate": 1e4},
            "hang_rate: 10000 an hour of 30 s each make 83.3 at a time on every worker, and at "
            "most 5 are allowed; lower it or mean_hang",
        ),
        ({"outage_rate": 60, "mean_outage": "10min"}, "outage_rate: 60 an hour of 600 s each"),
        ({"slow_rate": 1e6}, "slow_rate: 1e+06 an hour of 60 s each"),
        ({"mean_hang": 0}, "mean_hang: input should be greater than 0"),
        ({"slow_factor": 0.5}, "slow_factor: input should be greater than or equal to 1"),
        ({"outage": []}, "unknown setting 'outage'; did you mean 'outages'?"),
        ({"hangs": [{"worker": 0, "start": 1}]}, "hangs.0.duration: field required"),
        ({"crashes": [{"worker": 0, "start": 0}]}, "crashes.0.start: input should be greater"),
        ({"hangs": [{"worker": -1, "start": 1, "duration": 1}]}, "hangs.0.worker: input should"),
        (
            {"partitions": [{"groups": [[0, 1], [1]], "start": 1, "duration": 1}]},
            "worker 1 is named more than once",
        ),
        ({"rejoin_moments": "copy"}, "rejoin_moments: input should be 'donor', 'reset' or 'keep'"),
    ],
)
def test_bad_settings_are_refused(given_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Faults(**given_settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "given_settings",
    [
        {"outages": [{"worker": 4, "start": 1, "duration": 1}]},
        {"hangs": [{"worker": 4, "start": 1, "duration": 1}]},
        {"slow": [{"worker": 4, "start": 1, "duration": 1, "factor": 2}]},
        {"crashes": [{"worker": 4, "start": 1}]},
        {"partitions": [{"groups": [[4]], "start": 1, "duration": 1}]},
    ],
)
def test_faults_of_workers_outside_the_run_are_refused(given_settings: dict[str, Any]) -> None:
    faults = Faults(**given_settings)
    FaultPlan(faults, 5, seed=0)
    with pytest.raises(ConfigError, match=r"worker 4 is not in this run, which has 4 workers"):
        FaultPlan(faults, 4, seed=0)
