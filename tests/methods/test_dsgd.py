"""D-SGD and LD-SGD against matrices, what they reduce to, and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gossamer.measure.settings import Measure
from gossamer.methods import DSGD, DataParallel, GASLoC, LocalSGD, Method
from gossamer.mixing.topologies import mixing_graph, parse_topology
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults, Outage
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import PureNoise, Quadratic, TinyMLP
from gossamer.training.settings import Training

LR = 0.1
SGD = Training(optimizer="sgd", learning_rate=LR, schedule="constant", clip_norm=0, weight_decay=0)
ADAMW = Training(learning_rate=0.02, clip_norm=0)
BOWL = Quadratic(12, 9, noise=0.5, heterogeneity=1.0, condition=4.0, dtype=torch.float64)
MLP = TinyMLP(dtype=torch.float64)
ORDERS: list[Any] = ["combine_then_adapt", "adapt_then_combine"]


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("task", BOWL)
    given_.setdefault("training", SGD)
    given_.setdefault("workers", 8)
    given_.setdefault("rounds", 4)
    return simulate(method=method, measure=Measure(every=0), **given_)


def by_matrices(method: DSGD, *, workers: int, steps: int) -> np.ndarray:
    """The rules with stacked rows, W [M, M] and closed-form gradients."""
    x = np.zeros((workers, BOWL.num_parameters))
    curvature = BOWL.curvature.numpy()
    cycle = ["local"] * method.local_steps + ["gossip"] * method.gossip_steps
    mixes = 0
    for t in range(steps):
        batches = [BOWL.train_batch(w, t) for w in range(workers)]
        centres, noise = (np.stack([b[k].numpy() for b in batches]) for k in (0, 1))
        gradient = curvature * (x - centres) + noise
        w = np.eye(workers)
        if cycle[t % len(cycle)] == "gossip":
            graph = mixing_graph(
                method.topology, method.weights, seed=0, round_index=mixes, members=range(workers)
            )
            w, mixes = graph.matrix(), mixes + 1
        if method.order == "combine_then_adapt":
            x = w @ x - LR * gradient
        else:
            x = w @ (x - LR * gradient)
    return x


TOPOLOGIES = ["ring", "star", "exponential", "one_peer_exponential", "random_pairs", "random_ring"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("local_steps", "gossip_steps"), [(0, 1), (3, 1), (2, 2)])
def test_dsgd_is_its_matrices(
    topology: str, order: Any, local_steps: int, gossip_steps: int
) -> None:
    method = DSGD(
        inner_steps=5, topology=topology, order=order,
        local_steps=local_steps, gossip_steps=gossip_steps,
    )  # fmt: skip
    result = run(method, workers=9).parameters.numpy()
    expected = by_matrices(method, workers=9, steps=20)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)
    assert np.abs(expected - expected.mean(0)).max() > 1e-3


def test_mixes_are_counted_over_the_run_so_that_a_cycle_of_graphs_is_gone_through() -> None:
    method = DSGD(local_steps=2, gossip_steps=1)
    assert [method.mix_of_step(step) for step in range(9)] == [
        None, None, 0, None, None, 1, None, None, 2
    ]  # fmt: skip
    method = DSGD(local_steps=1, gossip_steps=2)
    assert [method.mix_of_step(step) for step in range(7)] == [None, 0, 1, None, 2, 3, None]


def test_rounds_do_not_change_what_is_done() -> None:
    one = run(DSGD(inner_steps=4, local_steps=2, topology="random_pairs"), rounds=6)
    other = run(DSGD(inner_steps=12, local_steps=2, topology="random_pairs"), rounds=2)
    assert torch.equal(one.parameters, other.parameters)


def test_adapt_then_combine_on_the_complete_graph_is_data_parallel() -> None:
    method = DSGD(inner_steps=5, topology="complete", order="adapt_then_combine")
    one = run(method, task=MLP, rounds=3).parameters
    other = run(DataParallel(inner_steps=5), task=MLP, rounds=3).parameters
    assert torch.allclose(one, other, rtol=0, atol=1e-13)


def test_a_round_that_ends_with_its_only_mix_of_all_is_local_sgd() -> None:
    method = DSGD(inner_steps=5, local_steps=4, topology="complete", order="adapt_then_combine")
    one = run(method, task=MLP, training=ADAMW).parameters
    other = run(LocalSGD(inner_steps=5), task=MLP, training=ADAMW).parameters
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", ["ring", "random_pairs"])
def test_i10_gasloc_with_one_step_and_no_momentum_is_adapt_then_combine(topology: str) -> None:
    method = DSGD(inner_steps=1, topology=topology, order="adapt_then_combine")
    gasloc = GASLoC(inner_steps=1, topology=topology, eta=1.0, gamma=0.0)
    one = run(method, task=MLP, training=ADAMW, rounds=20).parameters
    other = run(gasloc, task=MLP, training=ADAMW, rounds=20).parameters
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_combine_then_adapt_hides_the_mix_and_adapt_then_combine_does_not() -> None:
    timing = Timing(step_time=1.0, parameters=0.5e6, payload_dtype="fp32")
    network = Network(bandwidth="4MB/s")  # half a second to one peer
    took = {
        order: run(
            DSGD(inner_steps=10, topology="random_pairs", order=order), rounds=1, timing=timing,
            network=network,
        ).summary["time_s"]
        for order in ORDERS
    }  # fmt: skip
    assert took["combine_then_adapt"] == pytest.approx(10.0)
    assert took["adapt_then_combine"] == pytest.approx(15.0)


NOISE = PureNoise(12, dtype=torch.float64)


@given(
    order=st.sampled_from(ORDERS),
    topology=st.sampled_from(TOPOLOGIES),
    seed=st.integers(0, 1000),
    failures=st.floats(0, 0.5),
    outages=st.lists(
        st.builds(Outage, worker=st.integers(0, 4), start=st.floats(1, 15),
                  duration=st.floats(1, 10)),
        max_size=2,
    ),
)  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=20, phases=[Phase.generate])
def test_the_mean_is_conserved_whatever_fails(
    order: Any, topology: str, seed: int, failures: float, outages: list[Outage]
) -> None:
    result = run(
        DSGD(inner_steps=5, topology=topology, order=order), task=NOISE, workers=5, seed=seed,
        network=Network(failure_probability=failures, bandwidth="1MB/s", deadline="60s"),
        timing=Timing(step_time=1.0, parameters=1e5, payload_dtype="fp32"),
        faults=Faults(outages=outages),
    )  # fmt: skip
    total = sum(NOISE.train_batch(w, s) for w in range(5) for s in range(20))
    assert torch.allclose(result.parameters.mean(0), -LR * total / 5, rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", ORDERS)
def test_the_bytes_are_one_vector_to_each_neighbour_and_gossip_step(order: Any) -> None:
    ring = run(DSGD(inner_steps=6, order=order), rounds=2)
    assert ring.ledger.by_kind() == {"mix": 8 * 2 * 12 * 12 * 8}
    scheduled = DSGD(inner_steps=6, order=order, local_steps=2, topology="random_pairs")
    assert run(scheduled, rounds=2).ledger.by_kind() == {"mix": 8 * 4 * 12 * 8}
    edges = parse_topology("star").edges(0, 0, range(8))
    star = run(DSGD(inner_steps=1, topology="star", order=order), rounds=1)
    assert star.ledger.by_kind() == {"mix": 2 * len(edges) * 12 * 8}
