"""Mixing with neighbours: the matrix, agreement of both ends on each edge, and what is charged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.comm.context import Context, Round
from gossamer.comm.neighbours import add_differences_, exchange, mix_buffers, mix_neighbours
from gossamer.errors import DataRace
from gossamer.mixing.graphs import MixingGraph, Weights
from gossamer.mixing.topologies import TOPOLOGIES, mixing_graph, parse_topology
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults, Hang, Outage, Partition
from gossamer.sim.network import Network
from gossamer.testing import Outcome, run_workers

NAMED = sorted(set(TOPOLOGIES) - {"edges"})
SIZE = 7


def inputs(num_workers: int) -> Tensor:
    """[M, P], standard normal, fp64."""
    generator = torch.Generator().manual_seed(num_workers)
    return torch.randn(num_workers, SIZE, generator=generator, dtype=torch.float64)


def graph_of(name: str, num_workers: int, weights: Weights = "metropolis") -> MixingGraph:
    topology = parse_topology(name)
    return mixing_graph(topology, weights, seed=0, round_index=0, members=range(num_workers))


def mix(graph: MixingGraph, scale: float = 1.0, **world: Any) -> Outcome[Any]:
    """Each worker's (vector, peers that were mixed with) after one mix."""
    values = inputs(len(graph.members))

    async def work(ctx: Context, round_: Round) -> tuple[Tensor, tuple[int, ...]]:
        mine = values[ctx.worker].clone()
        held = await mix_neighbours(ctx, round_, "mix", mine, graph.neighbours(ctx.worker, scale))
        return mine, held

    return run_workers(len(values), work, **world)


def stacked(outcome: Outcome[Any]) -> np.ndarray:
    return np.stack([result[0].numpy() for result in outcome.results.values()])


@pytest.mark.parametrize("num_workers", [1, 2, 5, 8])
@pytest.mark.parametrize("name", NAMED)
def test_workers_apply_the_rows_of_the_matrix(name: str, num_workers: int) -> None:
    graph = graph_of(name, num_workers)
    for scale in (1.0, 0.3):
        mixed = stacked(mix(graph, scale))
        expected = graph.matrix(scale) @ inputs(num_workers).numpy()
        np.testing.assert_allclose(mixed, expected, rtol=0, atol=1e-15)


def test_equal_vectors_stay_the_same_bits() -> None:
    graph = graph_of("exponential", 6)

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = inputs(1)[0].float()
        await mix_neighbours(ctx, round_, "mix", mine, graph.neighbours(ctx.worker, 0.77))
        return mine

    outcome = run_workers(6, work)
    assert all(torch.equal(row, inputs(1)[0].float()) for row in outcome.results.values())


def test_each_neighbour_is_sent_the_vector_once() -> None:
    graph = graph_of("star", 5)
    entries = mix(graph).ledger.entries()
    assert {(e.sender, e.receiver) for e in entries} == {
        pair for i, j, _ in graph.edges for pair in ((i, j), (j, i))
    }
    assert all((e.kind, e.num_bytes, e.num_messages) == ("mix", 8 * SIZE, 1) for e in entries)


def held_edges(outcome: Outcome[Any]) -> set[tuple[int, int]]:
    return {(worker, peer) for worker, (_, held) in outcome.results.items() for peer in held}


LINK_FAULTS = st.builds(
    Faults,
    outages=st.lists(
        st.builds(
            Outage,
            worker=st.integers(0, 4),
            start=st.floats(0, 2),
            duration=st.floats(0.001, 3),
        ),
        max_size=3,
    ),
    partitions=st.lists(
        st.builds(
            Partition,
            groups=st.sampled_from([((0, 1),), ((0,), (1, 2)), ((4, 2), (1,))]),
            start=st.floats(0, 2),
            duration=st.floats(0.001, 3),
        ),
        max_size=2,
    ),
    hangs=st.lists(
        st.builds(
            Hang, worker=st.integers(0, 4), start=st.floats(0, 2), duration=st.floats(0.001, 2)
        ),
        max_size=2,
    ),
)


@settings(max_examples=80, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    faults=LINK_FAULTS,
    name=st.sampled_from(NAMED),
    failure_probability=st.sampled_from([0.0, 0.4]),
    corruption_probability=st.sampled_from([0.0, 0.3]),
    unit=st.sampled_from(["worker", "step", "transfer", "collective"]),
    seed=st.integers(0, 1000),
)
def test_under_any_faults_of_links_both_ends_agree_and_the_mean_stays(
    *,
    faults: Faults,
    name: str,
    failure_probability: float,
    corruption_probability: float,
    unit: Any,
    seed: int,
) -> None:
    """What was applied is W without the failed edges, whose weight is on both diagonals."""
    graph = graph_of(name, 5)
    network = Network(
        bandwidth=100.0, latency="10ms", keepalive=0.5, deadline=5.0,
        failure_probability=failure_probability, failure_unit=unit,
        corruption_probability=corruption_probability,
    )  # fmt: skip
    outcome = mix(graph, faults=faults, network=network, seed=seed)
    held = held_edges(outcome)
    assert held == {(b, a) for a, b in held}
    failed = [(i, j) for i, j, _ in graph.edges if (i, j) not in held]
    expected = graph.matrix(failed=failed) @ inputs(5).numpy()
    np.testing.assert_allclose(stacked(outcome), expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(stacked(outcome).mean(0), inputs(5).numpy().mean(0), atol=1e-14)
    assert outcome.recorded("failed_exchanges") == 2 * len(failed)


def test_a_failed_edge_does_not_fail_the_others() -> None:
    network = Network(bandwidth=1e6, keepalive=0.5, deadline=5.0)
    faults = Faults(partitions=[Partition(groups=((1,), (0, 2, 3)), start=0, duration=60)])
    outcome = mix(graph_of("ring", 4), network=network, faults=faults)
    assert held_edges(outcome) == {(0, 3), (3, 0), (2, 3), (3, 2)}
    assert 0.5 < outcome.time_s < 0.6


def test_nobody_waits_longer_than_the_deadline_and_edges_do_not_wait_for_one_another() -> None:
    """Worker 1 is frozen: its neighbours are free after one deadline, the others at once."""
    faults = Faults(hangs=[Hang(worker=1, start=0, duration=100)])
    done: dict[int, float] = {}
    graph = graph_of("ring", 5)

    async def work(ctx: Context, round_: Round) -> None:
        if ctx.worker == 1:
            await ctx.train(1)  # for as long as it is frozen
        await mix_neighbours(ctx, round_, "mix", torch.zeros(3), graph.neighbours(ctx.worker))
        done[ctx.worker] = ctx.now()

    run_workers(5, work, faults=faults, network=Network(deadline=5.0))
    assert done[0] == done[2] == pytest.approx(5, abs=0.01)
    assert done[3] == done[4] == pytest.approx(0, abs=0.01)
    assert done[1] > 100


def test_who_is_rounds_behind_is_refused_at_once_and_catches_up() -> None:
    """Worker 1 is 10 s late; in its old rounds it waits for nobody."""
    begun: dict[int, list[float]] = {0: [], 1: []}

    async def work(ctx: Context, round_: Round) -> bool:
        begun[ctx.worker].append(ctx.now())
        if ctx.worker == 1 and round_.index == 0:
            await ctx.train(1)
        mine = torch.full((2,), float(ctx.worker))
        peer = 1 - ctx.worker
        return bool(await mix_neighbours(ctx, round_, "mix", mine, [(peer, 0.5)]))

    faults = Faults(hangs=[Hang(worker=1, start=0, duration=10)])
    outcome = run_workers(
        2, work, faults=faults, num_rounds=9, network=Network(deadline=3.0, latency="10ms")
    )
    assert begun[0][3] == pytest.approx(9, abs=0.01)  # three rounds without the other
    late = begun[1][1:4]
    assert max(late) - min(late) < 0.2  # refused three times
    assert outcome.results == {0: True, 1: True}  # together again


@pytest.mark.parametrize(("upload", "seconds"), [("1MB/s", {0, 5}), ("400B/s", {5, 10})])
def test_one_direction_that_fails_ends_the_wait_for_the_other(
    upload: str, seconds: set[int]
) -> None:
    """Worker 1 begins to send after 5 s; worker 0 has sent after 0 s or 10 s. Some get lost.

    Worker 0 is free as soon as it knows of the first loss.
    """
    network = Network(
        bandwidth="1MB/s", failure_probability=0.5, failure_unit="transfer",
        workers=[{"worker": 0, "upload": upload}],
    )  # fmt: skip
    freed = set()

    async def work(ctx: Context, round_: Round) -> bool:
        if ctx.worker == 1:
            await ctx.train(50)
        received = await exchange(ctx, round_.tag("x"), torch.zeros(1000), [1 - ctx.worker])
        if ctx.worker == 0 and not received:
            freed.add(int(ctx.now()))
        return bool(received)

    for seed in range(12):
        outcome = run_workers(2, work, network=network, seed=seed)
        assert outcome.results[0] == outcome.results[1]
    assert freed == seconds


def test_writing_to_a_payload_under_way_is_seen_and_after_the_mix_it_is_free() -> None:
    async def careless(ctx: Context, round_: Round) -> None:
        mine = torch.zeros(1000)
        async with ctx.task_group() as tasks:
            tasks.start(exchange(ctx, round_.tag("x"), mine, [1 - ctx.worker]))
            await ctx.train(1)
            mine.add_(1)

    with pytest.raises(DataRace, match="wrote to a payload"):
        run_workers(2, careless, network=Network(bandwidth="4kB/s"))

    async def careful(ctx: Context, round_: Round) -> None:
        mine = torch.zeros(1000)
        await exchange(ctx, round_.tag("x"), mine, [1 - ctx.worker])
        mine.add_(1)

    # the link fails at random moments: what is given up is withdrawn before the caller writes
    for seed in range(20):
        network = Network(bandwidth="4kB/s", failure_probability=0.5, failure_unit="transfer")
        run_workers(2, careful, network=network, seed=seed)


def test_values_that_are_not_finite_end_their_worker_before_anything_is_sent() -> None:
    async def work(ctx: Context, round_: Round) -> tuple[int, ...]:
        mine = torch.full((3,), float("nan") if ctx.worker == 1 else 1.0)
        return await mix_neighbours(
            ctx, round_, "mix", mine, graph_of("ring", 3).neighbours(ctx.worker)
        )

    outcome = run_workers(3, work)
    assert outcome.results == {0: (2,), 2: (0,)}
    assert [lost["worker"] for lost in outcome.lost] == [1]
    assert outcome.ledger.total(sender=1) == 0


def test_differences_are_added_in_place_and_without_storage_nothing_happens() -> None:
    x = torch.tensor([1.0, 2.0])
    add_differences_(x, {3: torch.tensor([3.0, 2.0])}, [(3, 0.25), (4, 0.5)])
    assert x.tolist() == [1.5, 2.0]
    meta = torch.empty(2, device="meta")
    add_differences_(meta, {3: meta}, [(3, 0.5)])


class Buffered:
    """A model of one weight, two float buffers and two integers."""

    def build(self) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("floats", torch.zeros(2))
        model.register_buffer("integers", torch.zeros(2, dtype=torch.int64))
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    def train_batch(self, worker: int, step: int) -> Tensor:
        return torch.ones(1, 1)

    def eval_batches(self) -> list[Tensor]:
        return [torch.ones(1, 1)]


def test_buffers_are_mixed_and_counters_take_the_largest_of_the_neighbourhood() -> None:
    graph = graph_of("ring", 5)

    async def work(ctx: Context, round_: Round) -> tuple[list[float], list[int]]:
        ctx.replica.buffers.copy_(torch.tensor([3.0 * ctx.worker, 1.0]))
        ctx.replica.counters.copy_(torch.tensor([ctx.worker, -ctx.worker]))
        await mix_buffers(ctx, round_, graph.neighbours(ctx.worker))
        return ctx.replica.buffers.tolist(), ctx.replica.counters.tolist()

    # the model stands for a larger one, but buffers are charged as they are
    outcome = run_workers(5, work, task=Buffered(), timing=Timing(parameters=1e6))
    assert {w: r[0] for w, r in outcome.results.items()} == {
        0: [5.0, 1.0], 1: [3.0, 1.0], 2: [6.0, 1.0], 3: [9.0, 1.0], 4: [7.0, 1.0]
    }  # fmt: skip
    assert {w: r[1] for w, r in outcome.results.items()} == {
        0: [4, 0], 1: [2, 0], 2: [3, -1], 3: [4, -2], 4: [4, 0]
    }  # fmt: skip
    assert outcome.ledger.by_kind() == {"buffers": 10 * 8, "counters": 10 * 16}

    async def nothing(ctx: Context, round_: Round) -> None:
        await mix_buffers(ctx, round_, graph.neighbours(ctx.worker))

    assert run_workers(5, nothing).ledger.entries() == []
