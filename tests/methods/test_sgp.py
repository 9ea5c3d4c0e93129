"""SGP against matrices, push-sum's conservation under failures, and what it reduces to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.comm.context import Context, MethodState
from gossamer.measure.settings import Measure
from gossamer.methods import DSGD, SGP
from gossamer.methods.base import state_of
from gossamer.methods.sgp import SGPState
from gossamer.mixing.topologies import parse_topology
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults, Hang, Outage
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import PureNoise, Quadratic, TinyMLP
from gossamer.training.settings import Training

LR = 0.1
SGD = Training(optimizer="sgd", learning_rate=LR, schedule="constant", clip_norm=0, weight_decay=0)
BOWL = Quadratic(12, 8, noise=0.5, heterogeneity=1.0, condition=4.0, dtype=torch.float64)


class Watched(SGP):
    """SGP whose last masses [M, P + 1] can be looked at."""

    async def run(self, ctx: Context, state: MethodState) -> None:
        await super().run(ctx, state)
        MASSES[ctx.worker] = state_of(SGPState, state).mass


MASSES: dict[int, Tensor] = {}


def run(method: Any, **given_: Any) -> SimulationResult:
    given_.setdefault("task", BOWL)
    given_.setdefault("training", SGD)
    given_.setdefault("workers", 8)
    given_.setdefault("rounds", 4)
    MASSES.clear()
    return simulate(method=method, measure=Measure(every=0), **given_)


def by_matrices(topology: str, *, workers: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """z [M, P] and q [M] with stacked rows and column-stochastic P."""
    x, q = np.zeros((workers, BOWL.num_parameters)), np.ones(workers)
    for t in range(steps):
        z = x / q[:, None]
        for w in range(workers):
            centre, noise = (b.numpy() for b in BOWL.train_batch(w, t))
            x[w] -= LR * (BOWL.curvature.numpy() * (z[w] - centre) + noise)
        p = np.eye(workers)
        for sender, receiver in parse_topology(topology).arcs(0, t, range(workers)):
            p[receiver, sender] = 1.0
        p /= p.sum(0)
        x, q = p @ x, p @ q
    return x / q[:, None], q


@pytest.mark.parametrize(
    "topology",
    ["one_peer_exponential", "exponential", "ring", "star", "erdos_renyi", "random_pairs"],
)
@pytest.mark.parametrize("workers", [7, 8])
def test_sgp_is_its_matrices(topology: str, workers: int) -> None:
    result = run(Watched(inner_steps=5, topology=topology), workers=workers)
    z, q = by_matrices(topology, workers=workers, steps=20)
    np.testing.assert_allclose(result.parameters.numpy(), z, rtol=0, atol=1e-13)
    weights = [float(MASSES[w][-1]) for w in range(workers)]
    np.testing.assert_allclose(weights, q, rtol=0, atol=1e-13)
    if topology in ("star", "erdos_renyi"):
        assert q.std() > 0.05  # the weights are needed


spans = st.floats(1, 12)
worker_index = st.integers(0, 4)
NOISE = PureNoise(12, dtype=torch.float64)


@given(
    topology=st.sampled_from(["one_peer_exponential", "exponential", "star", "ring"]),
    seed=st.integers(0, 1000),
    failures=st.floats(0, 0.5),
    unit=st.sampled_from(["worker", "transfer"]),
    faults=st.builds(
        Faults,
        outages=st.lists(
            st.builds(Outage, worker=worker_index, start=spans, duration=spans), max_size=2
        ),
        hangs=st.lists(
            st.builds(Hang, worker=worker_index, start=spans, duration=spans), max_size=2
        ),
    ),
)
@settings(deadline=None, derandomize=True, max_examples=30, phases=[Phase.generate])
def test_the_push_sum_total_is_conserved_whatever_fails(
    topology: str, seed: int, failures: float, unit: Any, faults: Faults
) -> None:
    network = Network(
        failure_probability=failures, failure_unit=unit, bandwidth="1MB/s", latency="50ms",
        deadline="30s",
    )  # fmt: skip
    run(
        Watched(inner_steps=4, topology=topology), task=NOISE, workers=5, seed=seed,
        network=network, faults=faults,
        timing=Timing(step_time=1.0, parameters=1e5, payload_dtype="fp32"),
    )  # fmt: skip
    total = sum(MASSES.values())
    gradients = sum(NOISE.train_batch(w, s) for w in range(5) for s in range(16))
    assert isinstance(total, Tensor)
    assert float(total[-1]) == pytest.approx(5.0, abs=1e-13)
    assert torch.allclose(total[:-1], -LR * gradients, rtol=0, atol=1e-13)


class Kick(PureNoise):
    """Gradients in the first step only."""

    def train_batch(self, worker: int, step: int) -> Tensor:
        batch = super().train_batch(worker, step)
        return batch if step == 0 else torch.zeros_like(batch)


def test_failures_shift_weight_and_leave_the_average_where_it_is() -> None:
    kick = Kick(12, dtype=torch.float64)
    result = run(
        Watched(inner_steps=120), task=kick, rounds=1, network=Network(failure_probability=0.3)
    )
    average = -LR * sum(kick.train_batch(w, 0) for w in range(8)) / 8
    assert isinstance(average, Tensor)
    assert torch.allclose(result.parameters, average.expand(8, -1), rtol=0, atol=1e-9)
    assert result.summary["failed_transfers"] > 20
    assert max(abs(float(mass[-1]) - 1) for mass in MASSES.values()) > 0.01


def test_with_equally_many_neighbours_both_ways_sgp_is_dsgd() -> None:
    task, adamw = TinyMLP(dtype=torch.float64), Training(learning_rate=0.02, clip_norm=0)
    for topology in ("ring", "random_pairs"):
        one = run(SGP(inner_steps=5, topology=topology), task=task, training=adamw)
        dsgd = DSGD(inner_steps=5, topology=topology, order="adapt_then_combine")
        other = run(dsgd, task=task, training=adamw)
        assert torch.allclose(one.parameters, other.parameters, rtol=0, atol=1e-12)


def test_the_bytes_are_a_vector_and_its_weight_to_each_receiver() -> None:
    one_peer = run(SGP(inner_steps=5), rounds=2)
    assert one_peer.ledger.by_kind() == {"push": 8 * 10 * 13 * 8}
    static = run(SGP(inner_steps=5, topology="exponential"), rounds=2)
    assert static.ledger.by_kind() == {"push": 8 * 3 * 10 * 13 * 8}
