"""Whole runs in the simulated world under faults: crashes, hangs, partitions, NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gossamer.errors import GossamerError, NonFiniteError, RunFailed
from gossamer.measure.settings import Measure
from gossamer.methods import (
    DataParallel,
    DiLoCo,
    EagerDiLoCo,
    FactoredGossip,
    LocalSGD,
    Method,
    StreamingDiLoCo,
)
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Hang, Outage, Partition, SlowPhase
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import PureNoise, Quadratic, TinyMLP
from gossamer.training.settings import Training

SGD = Training(optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0)
# One transfer of the model takes about as long as a round of training.
TIMING = Timing(step_time=1.0, parameters=1e6, payload_dtype="fp32")
NETWORK = Network(bandwidth="1MB/s", latency="50ms", deadline="60s")


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("task", PureNoise(40, dtype=torch.float64))
    given_.setdefault("training", SGD)
    given_.setdefault("timing", TIMING)
    given_.setdefault("network", NETWORK)
    given_.setdefault("measure", Measure(every=0))
    given_.setdefault("workers", 4)
    given_.setdefault("rounds", 8)
    return simulate(method=method, **given_)


GOSSIP = FactoredGossip(inner_steps=4, mix1="global", mix2="pair")
METHODS = [
    DataParallel(inner_steps=4),
    LocalSGD(inner_steps=4),
    DiLoCo(inner_steps=4),
    GOSSIP,
    FactoredGossip(inner_steps=4, mix1="pair", mix2="pair"),
    StreamingDiLoCo(inner_steps=4),
    EagerDiLoCo(inner_steps=4),
]


@pytest.mark.parametrize("policy", ["donor", "reset", "keep"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_crashed_worker_returns_with_its_donors_state(method, policy):
    faults = Faults(
        crashes=[CrashAt(worker=2, start=13.0, return_after=9.0)], rejoin_moments=policy
    )
    result = run(method, faults=faults, training=Training(clip_norm=0), rounds=12)
    joined = [event for event in result.history if event["kind"] == "joined"]
    assert [event["worker"] for event in joined] == [2]
    assert result.workers == (0, 1, 2, 3)
    assert [lost["worker"] for lost in result.summary["lost"]] == [2]
    if method.name in ("data_parallel", "local_sgd", "diloco"):
        assert all(torch.equal(result.parameters[0], row) for row in result.parameters)


def test_a_crash_for_good_leaves_the_others_running():
    faults = Faults(crashes=[CrashAt(worker=1, start=10.0)])
    for method in METHODS:
        result = run(method, faults=faults)
        assert result.workers == (0, 2, 3), method
        rounds = [event for event in result.history if event["kind"] == "round"]
        assert rounds[-1]["workers"] == 3


def test_all_crashing_is_a_typed_failure():
    faults = Faults(crashes=[CrashAt(worker=w, start=5.0 + w) for w in range(4)])
    with pytest.raises(RunFailed, match="all workers are lost"):
        run(DiLoCo(inner_steps=4), faults=faults)


def test_a_short_hang_only_delays_and_a_long_one_costs_the_membership():
    short = run(DiLoCo(inner_steps=4), faults=Faults(hangs=[Hang(worker=3, start=1, duration=20)]))
    assert not [e for e in short.history if e["kind"] in ("lost", "joined")]
    calm = run(DiLoCo(inner_steps=4))
    # Late, it has all contributions at once, and its results share its link with its own: 3 s.
    assert 19.9 < short.summary["time_s"] - calm.summary["time_s"] < 23.1
    assert torch.equal(short.parameters, calm.parameters)
    long = run(
        DiLoCo(inner_steps=4),
        faults=Faults(hangs=[Hang(worker=3, start=6, duration=200)]),
        rounds=60,
    )
    events = [e["kind"] for e in long.history if e["kind"] in ("lost", "joined")]
    assert events == ["lost", "joined"]
    assert long.workers == (0, 1, 2, 3)
    assert all(torch.equal(long.parameters[0], row) for row in long.parameters)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_partition_ends_and_both_sides_go_on(method):
    faults = Faults(partitions=[Partition(groups=[[0, 1], [2, 3]], start=9, duration=30)])
    result = run(method, faults=faults, rounds=12)
    assert result.summary["rounds"] == 12
    assert result.workers == (0, 1, 2, 3)
    assert result.summary["failed_transfers"] > 0


class Poisoned:
    """A task whose loss is NaN for one worker from some step on."""

    def __init__(self, worker: int, step: int) -> None:
        self._task = TinyMLP(dtype=torch.float64)
        self._worker, self._step = worker, step
        self.build, self.eval_batches = self._task.build, self._task.eval_batches

    def train_batch(self, worker: int, step: int) -> Any:
        bad = worker == self._worker and step >= self._step
        return self._task.train_batch(worker, step), float("nan") if bad else 1.0

    def loss(self, model: Any, batch: Any) -> Any:
        if isinstance(batch[1], float):
            return self._task.loss(model, batch[0]) * batch[1]
        return self._task.loss(model, batch)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_nan_in_one_worker_never_reaches_another_and_is_reported(method):
    result = run(method, task=Poisoned(worker=1, step=9))
    assert result.workers == (0, 2, 3)
    for worker in result.workers:
        assert torch.isfinite(result.parameters[worker]).all()
    (lost,) = result.summary["lost"]
    assert lost["worker"] == 1 and lost["cause"] == "non_finite"
    assert "training loss of worker 1 is not finite after 9 inner steps" in lost["reason"]


def test_nan_in_the_only_worker_fails_the_run_with_its_cause():
    with pytest.raises(RunFailed, match="training loss of worker 0 is not finite"):
        run(DiLoCo(inner_steps=4), workers=1, task=Poisoned(worker=0, step=2))


def test_a_corrupted_payload_is_never_used():
    result = run(GOSSIP, network=NETWORK.model_copy(update={"corruption_probability": 0.3}))
    assert result.summary["failed_transfers"] > 0
    assert torch.isfinite(result.parameters).all()


def test_a_typed_failure_says_how_to_replay_it():
    with pytest.raises(RunFailed) as caught:
        run(DiLoCo(inner_steps=4), seed=7, faults=Faults(crashes=[CrashAt(worker=0, start=1)]),
            workers=1)  # fmt: skip
    notes = "\n".join(caught.value.__notes__)
    assert "seed 7" in notes and "worker 0: crashes, for good" in notes and "--set seed=7" in notes
    assert isinstance(caught.value, GossamerError) and not isinstance(caught.value, NonFiniteError)


moments = st.floats(min_value=0.5, max_value=90, allow_nan=False)
spans = st.floats(min_value=0.5, max_value=150, allow_nan=False)
victims = st.integers(0, 3)

fault_plans = st.builds(
    Faults,
    outages=st.lists(st.builds(Outage, worker=victims, start=moments, duration=spans), max_size=2),
    partitions=st.lists(
        st.builds(
            Partition,
            groups=st.sampled_from([[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 2], [1]]]),
            start=moments,
            duration=spans,
        ),
        max_size=1,
    ),
    slow=st.lists(
        st.builds(SlowPhase, worker=victims, start=moments, duration=spans, factor=st.just(3.0)),
        max_size=1,
    ),
    hangs=st.lists(st.builds(Hang, worker=victims, start=moments, duration=spans), max_size=2),
    crashes=st.lists(
        st.builds(CrashAt, worker=victims, start=moments, return_after=st.one_of(st.none(), spans)),
        max_size=3,
    ),
    rejoin_moments=st.sampled_from(["donor", "reset", "keep"]),
)
networks = st.builds(
    Network,
    bandwidth=st.just("1MB/s"),
    latency=st.sampled_from([0.0, 0.05]),
    failure_probability=st.sampled_from([0.0, 0.1]),
    failure_unit=st.sampled_from(["worker", "transfer", "step", "collective"]),
    corruption_probability=st.sampled_from([0.0, 0.05]),
    deadline=st.sampled_from(["20s", "60s"]),
)


@settings(deadline=None, max_examples=40, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    faults=fault_plans,
    network=networks,
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 1000),
)
def test_every_fault_plan_ends_in_a_result_or_a_typed_error(faults, network, method, seed):
    try:
        result = run(method, faults=faults, network=network, seed=seed, rounds=6)
    except RunFailed:
        return
    summary = result.summary
    assert result.workers
    # Six rounds take a minute of work. Every wait is bounded by the deadline, however unlucky.
    assert summary["time_s"] < 10_000
    assert torch.isfinite(result.parameters).all()
    assert 0 < summary["utilization"] <= 1


def test_a_link_that_fails_during_the_vote_sends_the_one_left_behind_to_a_donor():
    result = run(
        LocalSGD(inner_steps=2),
        task=Quadratic(num_workers=4, num_parameters=30),
        rounds=3,
        network=Network(
            latency=0.1, deadline=20, bandwidth=400,
            workers=[{"worker": 1, "latency": 0.37}, {"worker": 0, "bandwidth": 150}],
        ),
        timing=Timing(speeds=[1, 1.3, 0.9, 1.1]),
        faults=Faults(partitions=[Partition(groups=[[0]], start=2.0612818605037084, duration=4)]),
    )  # fmt: skip
    causes = [event.get("cause") for event in result.history if event["kind"] == "lost"]
    assert causes == ["out_of_sync"]
    assert result.workers == (0, 1, 2, 3)
    assert all(torch.equal(result.parameters[0], row) for row in result.parameters)


class Broken(TinyMLP):
    def loss(self, model: Any, batch: Any) -> Any:
        raise ValueError("mine")


def test_an_error_of_the_users_own_task_is_raised_as_it_is():
    with pytest.raises(ValueError, match=r"^mine$"):
        run(DiLoCo(inner_steps=4), task=Broken())


def test_a_worker_that_hangs_for_good_is_reported():
    hang = Faults(hangs=[Hang(worker=1, start=0.05, duration=1000)])
    result = run(
        FactoredGossip(inner_steps=1, mix1="none", mix2="none"), workers=2, faults=hang,
        timing=Timing(speeds=[0.01, 1]), network=Network(deadline="5s"),
    )  # fmt: skip
    assert [lost["worker"] for lost in result.summary["lost"]] == [1]
    assert result.workers == (0,)
