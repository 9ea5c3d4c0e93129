"""AD-PSGD and A2CiD2 against an atomic replay of their meetings, and what meetings conserve."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gossamer.comm.context import Context, Round
from gossamer.comm.meetings import Meetings
from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods import ADPSGD, A2CiD2, Method
from gossamer.mixing.meetings import chi_of_meetings, meetings_of_round
from gossamer.mixing.topologies import parse_topology
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Hang, Outage
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.testing.workers import run_workers
from gossamer.training.problems import PureNoise, Quadratic, TinyMLP
from gossamer.training.settings import Training

LR = 0.1
SGD = Training(optimizer="sgd", learning_rate=LR, schedule="constant", clip_norm=0, weight_decay=0)
WORKERS, STEPS, ROUNDS = 6, 5, 4
BOWL = Quadratic(12, WORKERS, noise=0.5, heterogeneity=1.0, condition=4.0, dtype=torch.float64)
NOISE = PureNoise(12, dtype=torch.float64)
SEED = 5
FAST = Network(bandwidth=1e9)
# A transfer of the model takes about two steps.
SLOW = Network(bandwidth="1MB/s", latency="50ms")
SLOW_TIMING = Timing(step_time=1.0, parameters=0.5e6, payload_dtype="fp32", jitter=0.3)


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("task", BOWL)
    given_.setdefault("training", SGD)
    given_.setdefault("workers", WORKERS)
    given_.setdefault("rounds", ROUNDS)
    given_.setdefault("network", FAST)
    given_.setdefault("measure", Measure(every=0))
    return simulate(method=method, **given_)


def replay(topology: str, rate: float, *, eta: float, alpha_tilde: float) -> np.ndarray:
    """Events one after the other, each atomic: x and xt [M, P], gradients at what was read."""
    x = np.zeros((WORKERS, BOWL.num_parameters))
    companion, clock = x.copy(), np.zeros(WORKERS)
    edges = parse_topology(topology).edges(0, 0, range(WORKERS))

    def flow(worker: int, time: float) -> None:
        decay = math.exp(-2 * eta * (time - clock[worker]))
        mean = (x[worker] + companion[worker]) / 2
        half = decay * (x[worker] - companion[worker]) / 2
        x[worker], companion[worker], clock[worker] = mean + half, mean - half, time

    for r in range(ROUNDS):
        meetings = list(
            meetings_of_round(
                edges, seed=0, round_index=r, num_workers=WORKERS, num_steps=STEPS, rate=rate
            )
        )
        clock[:] = 0
        for h in range(STEPS):
            read = x.copy()
            for m in [m for m in meetings if h <= m.time < h + 1]:
                i, j = m.first, m.second
                flow(i, m.time)
                flow(j, m.time)
                difference = x[i] - x[j]
                x[i] -= difference / 2
                x[j] += difference / 2
                companion[i] -= alpha_tilde * difference
                companion[j] += alpha_tilde * difference
            for w in range(WORKERS):
                flow(w, h + 1)
                centre, noise = (t.numpy() for t in BOWL.train_batch(w, r * STEPS + h))
                step = LR * (BOWL.curvature.numpy() * (read[w] - centre) + noise)
                x[w] -= step
                companion[w] -= step
    return x


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("topology", ["complete", "ring"])
@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_ad_psgd_is_an_atomic_replay(topology: str, rate: float, waits: bool) -> None:
    method = ADPSGD(
        inner_steps=STEPS, topology=topology, meetings_per_step=rate, wait_for_meetings=waits
    )
    expected = replay(topology, rate, eta=0, alpha_tilde=0.5)
    np.testing.assert_allclose(run(method).parameters.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("topology", ["star", "ring"])
def test_a2cid2_is_an_atomic_replay(topology: str, waits: bool) -> None:
    method = A2CiD2(inner_steps=STEPS, topology=topology, wait_for_meetings=waits)
    edges = parse_topology(topology).edges(0, 0, range(WORKERS))
    chi1, chi2 = chi_of_meetings(edges, WORKERS, 1.0)
    expected = replay(
        topology, 1.0, eta=1 / (2 * math.sqrt(chi1 * chi2)), alpha_tilde=math.sqrt(chi1 / chi2) / 2
    )
    result = run(method).parameters.numpy()
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)
    plain = run(ADPSGD(inner_steps=STEPS, topology=topology)).parameters.numpy()
    assert np.abs(plain - expected).max() > 1e-3


@pytest.mark.parametrize("method", [ADPSGD, A2CiD2])
def test_who_waits_for_meetings_has_the_same_result_on_any_links(method: type[Method]) -> None:
    waiting = method(inner_steps=STEPS, wait_for_meetings=True)
    fast = run(waiting)
    slow = run(waiting, network=SLOW, timing=SLOW_TIMING)
    assert torch.equal(fast.parameters, slow.parameters)
    assert slow.summary["utilization"] < 0.7
    free = method(inner_steps=STEPS)
    assert torch.equal(run(free).parameters, fast.parameters)  # fast links: nothing to wait for
    unhindered = run(free, network=SLOW, timing=SLOW_TIMING)
    assert not torch.equal(unhindered.parameters, fast.parameters)


@pytest.mark.parametrize("method", [ADPSGD, A2CiD2])
def test_steps_never_wait_for_the_network_but_at_a_rounds_end(
    method: type[Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: dict[int, list[float]] = {worker: [] for worker in range(WORKERS)}
    stepped = Meetings.stepped

    def noting(self: Meetings) -> None:
        moments[self._ctx.worker].append(self._ctx.now())
        stepped(self)

    monkeypatch.setattr(Meetings, "stepped", noting)
    timing = SLOW_TIMING.model_copy(update={"jitter": 0.0})
    end = run(method(inner_steps=10), network=SLOW, timing=timing, rounds=1).summary["time_s"]
    assert all(each == [float(step) for step in range(1, 11)] for each in moments.values())
    assert end > 15  # the meetings took longer than the steps


@pytest.mark.parametrize("task", [BOWL, TinyMLP(dtype=torch.float64)])
@pytest.mark.parametrize("network", [FAST, SLOW])
def test_a2cid2_without_flow_is_ad_psgd(task: Any, network: Network) -> None:
    training = SGD if task is BOWL else Training(learning_rate=0.02, clip_norm=0)
    common: dict[str, Any] = {
        "task": task, "training": training, "network": network, "timing": SLOW_TIMING
    }  # fmt: skip
    one = run(A2CiD2(inner_steps=STEPS, eta=0.0, alpha_tilde=0.5), **common)
    other = run(ADPSGD(inner_steps=STEPS), **common)
    assert torch.equal(one.parameters, other.parameters)
    # Where any two may meet, chi1 = chi2, and the published constants let the copies stay equal.
    same = run(A2CiD2(inner_steps=STEPS), **common)
    assert torch.allclose(same.parameters, other.parameters, rtol=0, atol=1e-12)


def expected_mean(workers: int, steps: int) -> torch.Tensor:
    total = sum(NOISE.train_batch(w, s) for w in range(workers) for s in range(steps))
    return -LR * total / workers


spans = st.floats(1, 20)
worker_index = st.integers(0, 4)


@given(
    kind=st.sampled_from([ADPSGD, A2CiD2]),
    seed=st.integers(0, 1000),
    failures=st.floats(0, 0.5),
    faults=st.builds(
        Faults,
        outages=st.lists(
            st.builds(Outage, worker=worker_index, start=spans, duration=spans), max_size=2
        ),
        hangs=st.lists(
            st.builds(Hang, worker=worker_index, start=spans, duration=spans), max_size=1
        ),
    ),
)
@settings(deadline=None, derandomize=True, max_examples=25, phases=[Phase.generate])
def test_the_mean_is_conserved_under_failures_outages_and_hangs(
    kind: type[Method], seed: int, failures: float, faults: Faults
) -> None:
    network = SLOW.model_copy(update={"failure_probability": failures, "deadline": 60.0})
    result = run(
        kind(inner_steps=STEPS), task=NOISE, workers=5, seed=seed, network=network,
        timing=SLOW_TIMING, faults=faults,
    )  # fmt: skip
    expected = expected_mean(5, ROUNDS * STEPS)
    assert torch.allclose(result.parameters.mean(0), expected, rtol=0, atol=1e-13)


def test_a_meeting_keeps_the_steps_that_are_taken_while_it_is_on_its_way() -> None:
    """Both ends: the average of what they held when it began, plus the steps since."""

    async def work(ctx: Context, round_: Round) -> torch.Tensor:
        point = torch.full((4,), float(10 * (1 + ctx.worker)), dtype=torch.float64)
        meetings = Meetings(
            ctx, round_, "meetings", topology=parse_topology("complete"), rate=0.05, num_steps=20
        )

        async def hold() -> None:
            for meeting in meetings.mine:
                await meetings.due(meeting)
                mine = point.clone()
                theirs = await meetings.swap(meeting, mine)
                assert theirs is not None
                point.sub_(mine.sub_(theirs), alpha=0.5)
                meetings.held()

        async with ctx.task_group() as tasks:
            tasks.start(hold())
            for _ in range(20):
                await ctx.train(1)
                point += 1.0 + ctx.worker  # a "step"
                meetings.stepped()
        return point

    outcome = run_workers(2, work, network=SLOW, timing=SLOW_TIMING, seed=SEED)
    edges = parse_topology("complete").edges(0, 0, (0, 1))
    meetings = meetings_of_round(
        edges, seed=SEED, round_index=0, num_workers=2, num_steps=20, rate=0.05
    )
    assert len(meetings) == 1
    before = math.floor(meetings[0].time)
    average = (10 + before + 20 + 2 * before) / 2
    assert outcome.results[0].tolist() == [average + (20 - before)] * 4
    assert outcome.results[1].tolist() == [average + 2 * (20 - before)] * 4


def test_a_peer_that_is_gone_costs_one_deadline_and_then_nothing() -> None:
    faults = Faults(hangs=[Hang(worker=2, start=1.5, duration=10_000)])
    network = FAST.model_copy(update={"deadline": 100.0})
    method = ADPSGD(inner_steps=20, meetings_per_step=2.0)
    result = run(method, rounds=2, workers=5, faults=faults, network=network,
                 timing=Timing(step_time=1.0))  # fmt: skip
    assert result.workers == (0, 1, 3, 4)
    assert result.summary["records"]["skipped_meetings"]["count"] > 4
    # Others meet those who wait for it, and wait in turn; but nobody waits for it twice.
    assert result.summary["time_s"] < 40 + 3 * 100
    crash = run(method, rounds=2, workers=5, network=network, timing=Timing(step_time=1.0),
                faults=Faults(crashes=[CrashAt(worker=2, start=1.5)]))  # fmt: skip
    assert crash.workers == (0, 1, 3, 4)
    assert crash.summary["time_s"] < 41


def test_topologies_that_change_and_negative_constants_are_refused() -> None:
    for kind in (ADPSGD, A2CiD2):
        with pytest.raises(ConfigError, match="fixed graph"):
            run(kind(topology="one_peer_exponential"))
    with pytest.raises(ConfigError, match="number from 0 on expected"):
        A2CiD2(eta=-1.0)


@pytest.mark.parametrize("method", [ADPSGD, A2CiD2])
def test_the_bytes_are_one_vector_a_meeting_and_side(method: type[Method]) -> None:
    result = run(method(inner_steps=STEPS, meetings_per_step=1.5))
    edges = parse_topology("complete").edges(0, 0, range(WORKERS))
    count = sum(
        len(
            meetings_of_round(
                edges, seed=0, round_index=r, num_workers=WORKERS, num_steps=STEPS, rate=1.5
            )
        )
        for r in range(ROUNDS)
    )
    assert result.ledger.by_kind() == {"meetings": 2 * count * 12 * 8}


def test_the_flow_accelerates_agreement_on_a_ring() -> None:
    """Pure gossip from a common kick: A2CiD2's copies agree sooner than plain pair averages."""

    class Kick(PureNoise):
        def train_batch(self, worker: int, step: int) -> torch.Tensor:
            batch = super().train_batch(worker, step)
            return batch if step == 0 else torch.zeros_like(batch)

    left = {}
    for kind in (ADPSGD, A2CiD2):
        method = kind(inner_steps=40, topology="ring")
        ends = [
            run(method, task=Kick(40, dtype=torch.float64), workers=16, rounds=1, seed=seed)
            for seed in range(2)
        ]
        left[kind] = sum(float((e.parameters - e.parameters.mean(0)).square().sum()) for e in ends)
    assert left[A2CiD2] < 0.3 * left[ADPSGD]
