"""The compute model: exact times, jitter that keeps its mean, slow phases and hangs."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError, InvariantViolated
from gossamer.sim.clock import NS_PER_S, to_ns
from gossamer.sim.compute import BYTES_PER_VALUE, ComputeModel, Timing
from gossamer.sim.faults import FaultPlan, Faults


def model(
    faults: Faults | None = None, num_workers: int = 2, seed: int = 0, **timing: Any
) -> ComputeModel:
    plan = FaultPlan(faults or Faults(), num_workers, seed)
    return ComputeModel(Timing(**timing), plan, num_workers, seed)


def test_undisturbed_steps_take_their_time_exactly_however_many() -> None:
    compute = model(step_time="2.355s")
    assert compute.finish_ns(0, 17, 0, 100) == 17 + 235_500_000_000
    assert compute.finish_ns(1, 0, 5, 10**15) == 2_355_000_000 * 10**15  # at once
    assert compute.finish_ns(0, 17, 0, 0) == 17


def test_speeds_divide_the_step_time() -> None:
    compute = model(step_time=0.3, speeds=[1.0, 2.0, 0.5], num_workers=3)
    assert [compute.finish_ns(w, 0, 0, 10) / NS_PER_S for w in range(3)] == [3.0, 1.5, 6.0]
    assert [compute.finish_ns_of(w, 5, 0.1) - 5 for w in range(3)] == [
        100_000_000, 50_000_000, 200_000_000,
    ]  # fmt: skip


def test_jitter_is_log_normal_with_its_mean_kept() -> None:
    compute, num_steps = model(step_time=1, jitter=0.4), 20_000
    times = [compute.step_ns(0, step) / NS_PER_S for step in range(num_steps)]
    assert abs(statistics.fmean(times) - 1) < 4 * 0.4 / math.sqrt(num_steps)
    assert abs(statistics.stdev(times) - 0.4) < 0.02
    # The logarithm is normal: its median is its mean, -log(1 + jitter^2) / 2.
    assert abs(math.log(statistics.median(times)) + math.log(1.16) / 2) < 0.02
    assert compute.finish_ns(0, 0, 0, 1000) == sum(to_ns(t) for t in times[:1000])


def test_jitter_belongs_to_seed_worker_and_step() -> None:
    def steps(seed: int, worker: int) -> list[int]:
        return [model(seed=seed, jitter=0.1).step_ns(worker, step) for step in range(40)]

    streams = [steps(0, 0), steps(0, 1), steps(1, 0)]
    assert streams[0] == steps(0, 0)
    assert len({tuple(stream) for stream in streams}) == 3
    assert len(set(streams[0])) == 40


def test_stalls_add_their_time_as_often_as_stated() -> None:
    compute = model(step_time=0.1, stall_probability=0.2, stall_time=3)
    times = [compute.step_ns(1, step) for step in range(4000)]
    assert set(times) == {100_000_000, 3_100_000_000}
    stalls = times.count(3_100_000_000)
    assert abs(stalls - 800) < 4 * math.sqrt(4000 * 0.2 * 0.8)


def test_slow_phases_stretch_work_and_hangs_interrupt_it() -> None:
    slow = Faults(slow=[{"worker": 0, "start": 2, "duration": 6, "factor": 3}])
    # 2 s of work, then 2 s of work in the 6 slow seconds, then full speed.
    compute = model(slow, step_time=1)
    assert [compute.finish_ns(0, 0, 0, n) / NS_PER_S for n in (2, 3, 4, 5)] == [2, 5, 8, 9]
    assert compute.finish_ns(1, 0, 0, 5) == 5 * NS_PER_S
    hang = Faults(hangs=[{"worker": 0, "start": 2.5, "duration": 10}])
    compute = model(hang, step_time=1)
    assert [compute.finish_ns(0, 0, 0, n) / NS_PER_S for n in (2, 3, 4)] == [2, 13, 14]
    assert compute.finish_ns(0, 7 * NS_PER_S, 0, 1) == int(13.5 * NS_PER_S)
    assert compute.finish_ns_of(0, 2 * NS_PER_S, 0.5) == int(2.5 * NS_PER_S)
    assert compute.finish_ns_of(0, 2 * NS_PER_S, 0.75) == int(12.75 * NS_PER_S)


def test_a_hang_within_a_slow_phase() -> None:
    faults = Faults(
        slow=[{"worker": 0, "start": 1, "duration": 30, "factor": 4}],
        hangs=[{"worker": 0, "start": 3, "duration": 10}],
    )
    # 1 s at full speed, 0.5 s of work until 3 s, nothing until 13 s, 0.5 s of work until 15 s.
    assert model(faults, step_time=2).finish_ns(0, 0, 0, 1) == 15 * NS_PER_S


_FAULTS: dict[str, Any] = {
    "slow_rate": 40, "mean_slow": 30, "slow_factor": 2.7, "hang_rate": 30, "mean_hang": 20,
}  # fmt: skip


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.integers(0, 600 * NS_PER_S),
    st.sampled_from([{}, {"jitter": 0.3}, {"stall_probability": 0.1, "stall_time": 2}]),
    st.sampled_from([{}, _FAULTS]),
)
@settings(max_examples=60)
def test_the_same_steps_in_several_calls_end_at_the_same_nanosecond(
    parts: list[int], start_ns: int, timing: dict[str, Any], faults: dict[str, Any]
) -> None:
    compute = model(Faults(**faults), seed=2, step_time=0.777, **timing)
    now_ns, step = start_ns, 3
    for num_steps in parts:
        now_ns = compute.finish_ns(0, now_ns, step, num_steps)
        step += num_steps
    assert now_ns == compute.finish_ns(0, start_ns, 3, sum(parts))


@given(st.integers(0, 600 * NS_PER_S), st.integers(1, 200), st.sampled_from([0.0, 0.3]))
@settings(max_examples=60)
def test_work_done_equals_time_weighted_by_speed(
    start_ns: int, num_steps: int, jitter: float
) -> None:
    faults = Faults(**_FAULTS)
    compute = model(faults, seed=4, step_time=0.9, jitter=jitter)
    end_ns = compute.finish_ns(0, start_ns, 0, num_steps)
    work_ns = sum(compute.step_ns(0, step) for step in range(num_steps))
    plan = FaultPlan(faults, 2, seed=4)
    cuts = {start_ns, end_ns}
    for kind in ("slow", "hang"):
        for window in plan.windows(kind, 0, start_ns, end_ns):
            cuts |= {window.start_ns, window.end_ns}
    work, edges = 0.0, sorted(cuts)
    for left, right in itertools.pairwise(edges):
        if plan.frozen_until(0, left) == left:
            work += (right - left) / plan.slow_factor(0, left)
    # Each step may end up to a nanosecond late, since steps end on whole ones.
    assert -1e-3 <= work - work_ns <= num_steps


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"step_time": 0}, "step_time: input should be greater than 0"),
        ({"jitter": -0.1}, "jitter: input should be greater than or equal to 0"),
        ({"stall_probability": 1}, "stall_probability: input should be less than 1"),
        ({"jitter": 1e300}, "jitter: input should be less than or equal to 100"),
        ({"speeds": [1, 0]}, "speeds: each is from 1e-06 to 1e+06; got 0"),
        ({"speeds": [1, 1e-300]}, "speeds: each is from 1e-06 to 1e+06; got 1e-300"),
        ({"step_time": "1e300h"}, "step_time: at most 1e+12 s expected; got '1e300h'"),
        ({"stall_time": 1e13}, "stall_time: at most 1e+12 s"),
        ({"parameters": 0}, "parameters: input should be greater than or equal to 1"),
        ({"step_tim": 1}, "unknown setting 'step_tim'; did you mean 'step_time'?"),
        (
            {"payload_dtype": "fp8"},
            "payload_dtype: input should be 'fp64', 'fp32', 'bf16', 'fp16' or 'int8'; got 'fp8'",
        ),
    ],
)
def test_bad_settings_are_refused(given_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Timing(**given_settings)
    assert message in str(caught.value)


def test_units_and_bytes_per_value() -> None:
    timing = Timing(parameters="1.5B", payload_dtype="bf16", step_time="2.355s")
    assert timing.parameters == 1.5e9 and timing.step_time == 2.355
    assert timing.payload_dtype is not None and BYTES_PER_VALUE[timing.payload_dtype] == 2


def test_one_speed_per_worker_is_needed() -> None:
    Timing(speeds=[1, 2]).validate_for(2)
    with pytest.raises(ConfigError, match=r"^timing.speeds: one per worker .* 3 in all; got 2$"):
        model(num_workers=3, speeds=[1, 2])


def test_misuse_is_refused() -> None:
    with pytest.raises(InvariantViolated, match="-1 steps"):
        model().finish_ns(0, 0, 0, -1)
    with pytest.raises(InvariantViolated, match=r"-0\.5 s"):
        model().finish_ns_of(0, 0, -0.5)
