"""Failing chips: the stops of a worker follow their closed form, and compute waits for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.sim.chaos import Chaos, Stops, elastic, job_goodput, restart
from gossamer.sim.compute import ComputeModel, Timing
from gossamer.sim.faults import FaultPlan, Faults, Hang

S = 1_000_000_000


@pytest.mark.parametrize("chips", [150e3, 600e3, 2.4e6])
@pytest.mark.parametrize("kind", [elastic, restart])
def test_the_process_has_the_goodput_of_its_closed_form(kind: object, chips: float) -> None:
    chaos: Chaos = kind(chips)  # type: ignore[operator]
    measured = job_goodput(chaos, seed=3, duration_s=1e6)
    assert measured == pytest.approx(chaos.expected_goodput(1), abs=0.008)


def test_an_m_th_of_the_chips_fails_as_often_as_a_small_job() -> None:
    assert elastic(1.2e6).expected_goodput(8) == pytest.approx(elastic(150e3).expected_goodput(1))


def test_rates_are_the_published_ones() -> None:
    """MTBF of 150k .. 2.4M chips at one failure per chip and year: 210 s .. 13 s."""
    for chips, mtbf_s in ((150e3, 210), (300e3, 105), (600e3, 53), (1.2e6, 26), (2.4e6, 13)):
        assert 1 / elastic(chips).rate(1) == pytest.approx(mtbf_s, rel=0.02)


chaoses = st.builds(
    Chaos,
    chips=st.floats(3e5, 5e6),
    notice=st.sampled_from([0.0, 6.0]),
    shrink=st.floats(0.5, 90),
    grow=st.sampled_from([0.0, 13.0]),
    chips_return=st.sampled_from([0.0, 60.0, 900.0]),
)


@settings(max_examples=40, deadline=None)
@given(chaos=chaoses, asked=st.lists(st.integers(0, 2000), min_size=1, max_size=6))
def test_stops_do_not_depend_on_what_was_asked_before(chaos: Chaos, asked: list[int]) -> None:
    eager = Stops(chaos, 2, seed=5, worker=1)
    everything = eager.overlapping(0, 3000 * S)
    starts, ends = [a for a, _ in everything], [b for _, b in everything]
    assert all(a < b for a, b in everything)
    assert all(b < a for b, a in zip(ends, starts[1:], strict=False))
    lazy = Stops(chaos, 2, seed=5, worker=1)
    for at_s in asked:
        at_ns = at_s * S
        covering = [stop for stop in everything if stop[0] <= at_ns < stop[1]]
        assert lazy.until(at_ns) == (covering[0][1] if covering else at_ns)
        change = min(ns for ns in [*starts, *ends] if ns > at_ns)
        assert lazy.next_change(at_ns) == change
    whole = sum(min(b, 3000 * S) - max(a, 0) for a, b in everything)
    assert lazy.stopped_ns(0, 3000 * S) == whole


def test_workers_and_seeds_have_streams_of_their_own() -> None:
    chaos = elastic(1.2e6)
    laid_out = [
        Stops(chaos, 8, seed, worker).overlapping(0, 1000 * S)
        for seed, worker in ((0, 0), (0, 1), (1, 0))
    ]
    assert laid_out[0] != laid_out[1] and laid_out[0] != laid_out[2]
    assert laid_out[0] == Stops(chaos, 8, 0, 0).overlapping(0, 1000 * S)


def test_steps_wait_for_the_stops() -> None:
    faults = Faults(chaos=elastic(2.4e6), hangs=(Hang(worker=0, start=100, duration=50),))
    plan = FaultPlan(faults, 1, seed=0)
    compute = ComputeModel(Timing(step_time=0.5), plan, 1, seed=0)
    end = compute.finish_ns(0, 0, 0, 400)
    # 200 s of work, and nothing during stops and the hang.
    assert end - plan.stopped_ns(0, 0, end) == 200 * S
    # One by one they end at the same instant.
    now = 0
    for step in range(400):
        now = compute.finish_ns(0, now, step, 1)
    assert now == end
    assert plan.stopped_ns(0, 0, 1000 * S) <= 1000 * S
    assert "chips: " in plan.describe()[-1]


def test_a_plan_without_chaos_is_never_stopped_but_by_hangs() -> None:
    plan = FaultPlan(Faults(hangs=(Hang(worker=0, start=2, duration=3),)), 2, seed=0)
    assert plan.stopped_until(0, 3 * S) == plan.frozen_until(0, 3 * S) == 5 * S
    assert plan.stopped_ns(0, 0, 10 * S) == 3 * S and plan.stopped_ns(1, 0, 10 * S) == 0
