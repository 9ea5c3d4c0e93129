"""GASLoC where links fail, workers are slow, leave and return, or the network falls apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gossamer.errors import RunFailed
from gossamer.measure.settings import Measure
from gossamer.methods import GASLoC, Method
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Hang, Outage, Partition, SlowPhase
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import PureNoise, TinyMLP, Vector
from gossamer.training.settings import Training

LR = 0.1
SGD = Training(optimizer="sgd", learning_rate=LR, schedule="constant", clip_norm=0, weight_decay=0)
# A step takes a second, and the model as long to be sent as a round of four to be trained.
TIMING = Timing(step_time=1.0, parameters=1e6, payload_dtype="fp32")
NETWORK = Network(bandwidth="1MB/s", latency="50ms", deadline="30s")
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("task", PureNoise(40, dtype=torch.float64))
    given_.setdefault("training", SGD)
    given_.setdefault("timing", TIMING)
    given_.setdefault("network", NETWORK)
    given_.setdefault("measure", Measure(every=0))
    given_.setdefault("workers", 8)
    given_.setdefault("rounds", 8)
    return simulate(method=method, **given_)


def events(result: SimulationResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in result.history if event["kind"] == kind]


def per_round(result: SimulationResult, name: str) -> list[float]:
    return [event[name] for event in events(result, "round")]


# ------------------------------------------------------------------------------- links that fail


def mean_without_gossip(rounds: int, inner_steps: int, *, eta: float, gamma: float) -> np.ndarray:
    """The workers' mean under any doubly stochastic mixers: noise does not see the weights."""
    task = PureNoise(40, dtype=torch.float64)
    mean = before = np.zeros(40)
    for r in range(rounds):
        steps = range(r * inner_steps, (r + 1) * inner_steps)
        noise = sum(task.train_batch(w, s).numpy() for w in range(8) for s in steps)
        u = mean - eta * LR * noise / 8
        mean, before = u + gamma * (u - before), u
    return mean


MOMENTS, SPANS = st.floats(0, 60), st.floats(0.5, 40)
WORKERS = st.integers(0, 7)
LINK_FAULTS = st.builds(
    Faults,
    outages=st.lists(st.builds(Outage, worker=WORKERS, start=MOMENTS, duration=SPANS), max_size=3),
    partitions=st.lists(
        st.builds(
            Partition,
            groups=st.sampled_from([HALVES, ((0,),), ((1, 5), (2, 3))]),
            start=MOMENTS,
            duration=SPANS,
        ),
        max_size=2,
    ),
    slow=st.lists(
        st.builds(SlowPhase, worker=WORKERS, start=MOMENTS, duration=SPANS, factor=st.just(4)),
        max_size=1,
    ),
    hangs=st.lists(
        st.builds(Hang, worker=WORKERS, start=MOMENTS, duration=st.floats(0.5, 10)), max_size=2
    ),
)


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    faults=LINK_FAULTS,
    topology=st.sampled_from(["random_pairs", "random_ring", "ring", "star", "complete"]),
    form=st.sampled_from(["A", "B"]),
    failures=st.sampled_from([(0.0, 0.0), (0.3, 0.0), (0.2, 0.2)]),
    unit=st.sampled_from(["worker", "transfer", "collective"]),
)
def test_the_mean_is_conserved_under_any_plan_of_link_faults(
    *, faults: Faults, topology: str, form: Any, failures: tuple[float, float], unit: Any
) -> None:
    network = NETWORK.model_copy(
        update={
            "failure_probability": failures[0], "failure_unit": unit,
            "corruption_probability": failures[1], "deadline": 150.0,
        }
    )  # fmt: skip
    method = GASLoC(inner_steps=4, topology=topology, form=form, eta=0.8, gamma=0.4)
    result = run(method, faults=faults, network=network, rounds=6)
    assert result.workers == tuple(range(8)) and not result.summary["lost"]
    expected = mean_without_gossip(6, 4, eta=0.8, gamma=0.4)
    np.testing.assert_allclose(result.parameters.numpy().mean(0), expected, rtol=0, atol=1e-13)


def test_a_worker_waits_for_its_own_rounds_neighbours_only() -> None:
    """One of 8 takes 40 s in place of 10: in the first round one other waits, and six do not."""
    timing = Timing(step_time=1.0, speeds=[1, 1, 1, 0.25, 1, 1, 1, 1])
    pairs = run(GASLoC(inner_steps=10), rounds=1, timing=timing).summary
    ring = run(GASLoC(inner_steps=10, topology="random_ring"), rounds=1, timing=timing).summary
    assert pairs["blocked_time_s"] == pytest.approx(30 / 8, abs=0.1)
    assert ring["blocked_time_s"] == pytest.approx(2 * 30 / 8, abs=0.1)


def test_a_worker_that_hangs_blocks_nobody_for_longer_than_the_deadline() -> None:
    """It is given up after one deadline, and the rest go on without it at their own pace."""
    faults = Faults(hangs=[Hang(worker=5, start=6.0, duration=300)])
    result = run(GASLoC(inner_steps=4), faults=faults, rounds=30)
    times = np.diff([0.0, *per_round(result, "time_s")])
    # 4 s of training, 4 s of the exchange; once the deadline of 30 s for whoever met it
    assert times.max() < 4 + 4 + 30 + 1
    assert sorted(times)[-2] < 4 + 4 + 1 + 5  # who was held up is a little behind for a while
    assert [lost["worker"] for lost in result.summary["lost"]] == [5]
    assert min(per_round(result, "workers")) == 7


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    crashes=st.lists(
        st.builds(
            CrashAt,
            worker=WORKERS,
            start=st.floats(0.5, 60),
            return_after=st.one_of(st.none(), st.floats(0.5, 40)),
        ),
        max_size=4,
    ),
    hangs=st.lists(st.builds(Hang, worker=WORKERS, start=MOMENTS, duration=SPANS), max_size=2),
    topology=st.sampled_from(["random_pairs", "ring", "hypercube"]),
    seed=st.integers(0, 1000),
)
def test_every_fault_plan_ends_in_a_result_or_a_typed_error(
    crashes: list[CrashAt], hangs: list[Hang], topology: str, seed: int
) -> None:
    method = GASLoC(inner_steps=4, topology=topology, local_steps="by_time")
    try:
        result = run(method, faults=Faults(crashes=crashes, hangs=hangs), seed=seed)
    except RunFailed:
        return
    assert torch.isfinite(result.parameters).all()
    assert result.summary["time_s"] < 1000


# ---------------------------------------------------------------------------- leaving and returning


class Remembers:
    """A constant pull, the same for all workers, that remembers who asked for which batch when."""

    def __init__(self, active_until: int = 10**9) -> None:
        self.asked: list[tuple[int, int]] = []
        self._active_until = active_until

    def build(self) -> Vector:
        return Vector(3, torch.float64)

    def train_batch(self, worker: int, step: int) -> torch.Tensor:
        self.asked.append((worker, step))
        size = 1.0 if step < self._active_until else 0.0
        return torch.full((3,), size, dtype=torch.float64)

    def eval_batches(self) -> list[torch.Tensor]:
        return [torch.zeros(3, dtype=torch.float64)]

    def loss(self, model: Vector, batch: torch.Tensor) -> torch.Tensor:
        return (batch * model()).sum()


@pytest.mark.parametrize("form", ["A", "B"])
def test_a_worker_that_returns_has_a_peers_parameters_and_momentum_and_trains_nothing_before(
    form: Any,
) -> None:
    """All workers are alike, so whoever has its donor's whole state stays bit-equal to it."""
    task = Remembers()
    faults = Faults(crashes=[CrashAt(worker=1, start=21.0, return_after=10.0)])
    method = GASLoC(inner_steps=4, form=form, gamma=0.7)
    result = run(method, task=task, faults=faults, workers=4, rounds=12)
    (joined,) = events(result, "joined")
    assert joined["worker"] == 1
    assert all(torch.equal(row, result.parameters[0]) for row in result.parameters)
    steps = [step for worker, step in task.asked if worker == 1]
    missed = set(range(12 * 4)) - set(steps)
    assert steps == sorted(steps) and missed
    # the first batch after the gap is that of the round it joined at
    assert max(missed) + 1 == 4 * joined["round"]
    assert per_round(result, "workers")[joined["round"]] == 4
    calm = run(method, task=Remembers(), workers=4, rounds=12)
    assert torch.equal(calm.parameters, result.parameters)


def test_who_leaves_and_returns_changes_the_matchings() -> None:
    """With 3 of 4 workers one is alone in each round: two vectors are sent instead of four."""
    faults = Faults(crashes=[CrashAt(worker=2, start=21.0, return_after=40.0)])
    result = run(GASLoC(inner_steps=4), faults=faults, workers=4, rounds=16)
    sent = np.zeros(16)
    for entry in result.ledger.entries():
        if entry.kind == "mix":
            sent[entry.round_index] += entry.num_messages
    workers = per_round(result, "workers")
    full = [sent[r] for r in range(16) if workers[r] == 4 and r + 1 < 16 and workers[r - 1] == 4]
    assert set(full) <= {4, 3}  # in the round of its death it may have sent nothing
    alone = [sent[r] for r in range(16) if workers[r] == 3]
    assert len(alone) >= 4 and set(alone[1:]) == {2}
    assert per_round(result, "reached")[-1] == 4


# ------------------------------------------------------------------------------------- partitions


class TwoCamps:
    """Half of the workers are pulled one way and half the other, for a while; then nobody is."""

    def __init__(self, until: int) -> None:
        self._until = until

    def build(self) -> Vector:
        return Vector(1, torch.float64)

    def train_batch(self, worker: int, step: int) -> torch.Tensor:
        pull = 1.0 if worker < 4 else -1.0
        return torch.tensor([pull if step < self._until else 0.0], dtype=torch.float64)

    def eval_batches(self) -> list[torch.Tensor]:
        return [torch.zeros(1, dtype=torch.float64)]

    def loss(self, model: Vector, batch: torch.Tensor) -> torch.Tensor:
        return (batch * model()).sum()


@pytest.mark.parametrize("slow_half", [1.0, 0.5])
def test_both_halves_go_on_by_themselves_report_it_and_mix_when_they_meet(
    slow_half: float,
) -> None:
    """Also where one half is rounds behind the other when they meet."""
    method = GASLoC(inner_steps=4)
    timing = TIMING.model_copy(update={"speeds": (1.0,) * 4 + (slow_half,) * 4})
    faults = Faults(partitions=[Partition(groups=HALVES, start=40, duration=300)])
    result = run(
        method, task=TwoCamps(until=4 * 20), timing=timing, faults=faults, rounds=90,
        measure=Measure(every=1),
    )  # fmt: skip
    assert not result.summary["lost"]
    apart = [e for e in events(result, "round") if 150 < e["time_s"] < 340]
    assert len(apart) > 10
    assert all(e["reached"] <= 4 for e in apart[8:])
    # in most rounds somebody's peer is on the other side
    assert sum("failed_exchanges" in e for e in apart) > 0.6 * len(apart)
    # nobody waits long for who cannot be reached: 4 or 8 s of training, 4 s of one exchange
    gaps = np.diff([e["time_s"] for e in apart])
    assert gaps.mean() < 4 / slow_half + 4 + 3.5 + 0.5
    last = events(result, "round")[-1]
    assert last["reached"] == 8 and "failed_exchanges" not in last
    far = [e["consensus_l2"] for e in events(result, "measure") if 300 < e["time_s"] < 340]
    assert min(far) > 1.0
    assert result.summary["consensus_l2"] < 1e-4 * min(far)


# --------------------------------------------------------------------------- slow workers and links


def test_a_slow_worker_does_fewer_steps_and_the_others_do_not_wait_for_it() -> None:
    timing = Timing(step_time=1.0, speeds=[1, 1, 1, 0.25])
    both = {
        rule: run(
            GASLoC(inner_steps=20, local_steps=rule), task=TinyMLP(), workers=4, rounds=12,
            timing=timing, numerics="none", network=Network(bandwidth="1GB/s"),
        )
        for rule in ("equal", "by_speed")
    }  # fmt: skip
    # nobody knows the slow one's speed in the first round; 20 / 4 = 5 steps afterwards
    assert both["by_speed"].summary["time_s"] == pytest.approx(80 + 11 * 20, abs=1.0)
    assert both["equal"].summary["time_s"] == pytest.approx(12 * 80, abs=1.0)
    steps = per_round(both["by_speed"], "local_steps")
    assert steps == [20] + [(3 * 20 + 5) / 4] * 11
    per_batch = both["equal"].summary["samples"] / (4 * 12 * 20)
    assert both["by_speed"].summary["samples"] == per_batch * sum(4 * mean for mean in steps)
    assert both["by_speed"].summary["utilization"] > 0.75 > both["equal"].summary["utilization"]


def test_speed_is_estimated_anew_while_running() -> None:
    faults = Faults(slow=[SlowPhase(worker=2, start=100, duration=400, factor=4)])
    result = run(
        GASLoC(inner_steps=16, local_steps="by_speed"), workers=4, rounds=60, faults=faults,
        timing=Timing(step_time=1.0), task=TinyMLP(), numerics="none",
    )  # fmt: skip
    steps = per_round(result, "local_steps")
    times = per_round(result, "time_s")
    during = [s for s, t in zip(steps, times, strict=True) if 250 < t < 500]
    after = [s for s, t in zip(steps, times, strict=True) if t > 650]
    assert steps[:5] == [16] * 5
    assert during and set(during) == {(3 * 16 + 4) / 4}
    # averaging over rounds comes near the full speed and rounds down
    assert after and min(after) >= (3 * 16 + 15) / 4


def test_batches_and_the_learning_rate_go_by_rounds() -> None:
    task = Remembers()
    run(
        GASLoC(inner_steps=8, local_steps="by_speed"), task=task, workers=2, rounds=4,
        timing=Timing(step_time=1.0, speeds=[1, 0.5]),
    )  # fmt: skip
    slow = [step for worker, step in task.asked if worker == 1]
    assert slow == [*range(8), *range(8, 12), *range(16, 20), *range(24, 28)]
    assert [step for worker, step in task.asked if worker == 0] == list(range(32))


def mean_round_s(rule: str, bandwidth: str, rounds: int = 40) -> tuple[float, SimulationResult]:
    """50 s of training, 4 s of an exchange, except over worker 6's link."""
    network = Network(bandwidth="1MB/s", workers=[{"worker": 6, "bandwidth": bandwidth}])
    result = run(
        GASLoC(inner_steps=50, local_steps=rule), network=network, rounds=rounds, task=TinyMLP(),
        numerics="none",
    )  # fmt: skip
    times = per_round(result, "time_s")
    return (times[-1] - times[9]) / (rounds - 10), result


def test_by_time_equal_links_change_nothing() -> None:
    seconds, result = mean_round_s("by_time", "1MB/s", rounds=15)
    assert seconds == pytest.approx(54, abs=0.01)
    assert per_round(result, "local_steps") == [50] * 15


def test_by_time_a_slow_link_holds_nobody_up() -> None:
    """Over the slow link an exchange takes 40 s; rounds take 54 s, and not 90 s."""
    # More than 90 s, as those who are ahead send to worker 6 before it has what it waits for.
    assert 90 <= mean_round_s("equal", "0.1MB/s")[0] == mean_round_s("by_speed", "0.1MB/s")[0] < 100
    seconds, result = mean_round_s("by_time", "0.1MB/s")
    assert seconds == pytest.approx(54, abs=1.0)
    # who meets worker 6, and itself, train for 54 - 40 = 14 s
    assert per_round(result, "local_steps")[-1] == pytest.approx((6 * 50 + 2 * 14) / 8, abs=0.3)
    assert "rests" not in result.summary["records"]


def test_by_time_a_worker_whose_link_is_slower_than_a_round_mixes_in_some_rounds_only() -> None:
    """400 s over its link: once in 26 rounds, which lengthens each by a quarter on average."""
    assert mean_round_s("equal", "0.01MB/s")[0] > 400
    seconds, result = mean_round_s("by_time", "0.01MB/s", rounds=62)
    assert 54 < seconds < 54 * 1.25 + 1
    sent = [0] * 62
    for entry in result.ledger.entries():
        if entry.kind == "mix" and entry.sender == 6:
            sent[entry.round_index] += entry.num_messages
    mixing = [r for r, count in enumerate(sent) if count]
    assert np.diff(mixing).tolist()[-1] == 1 + np.ceil((1 + 400 - 54) / (0.25 * 54) - 1)
    assert result.summary["records"]["rests"]["count"] == 2 * (62 - len(mixing))
    assert per_round(result, "reached")[-1] == 8  # it is heard of all the time
    assert per_round(result, "local_steps")[40] == 50


def test_a_worker_whose_values_stop_being_finite_is_lost_alone() -> None:
    class Poisoned(TwoCamps):
        def train_batch(self, worker: int, step: int) -> torch.Tensor:
            batch = super().train_batch(worker, step)
            return batch * float("nan") if (worker, step) == (3, 9) else batch

    result = run(GASLoC(inner_steps=4), task=Poisoned(until=30))
    assert [lost["worker"] for lost in result.summary["lost"]] == [3]
    assert len(result.workers) == 7 and torch.isfinite(result.parameters).all()
