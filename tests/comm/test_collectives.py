"""Collectives in the simulated world: exact sums, equal bits, conserved means, charged bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.comm.collectives import (
    SEGMENT_MESSAGES_MAX,
    SEGMENT_VALUES_MIN,
    SEGMENTS_MAX,
    all_reduce_mean,
    all_reduce_until_complete,
    average_survivors,
)
from gossamer.comm.context import Context, Round
from gossamer.comm.pairs import average_pair
from gossamer.errors import CollectiveFailed, DataRace
from gossamer.mixing.matchings import partner_of, random_matching
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults
from gossamer.sim.network import Network
from gossamer.testing import run_workers

UNITS = ("worker", "step", "transfer", "collective")
SIZES = ("0", "1", "M-1", "M", "M+1", "1000", "9000", "100003")


def inputs(num_workers: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[M, P], standard normal."""
    generator = torch.Generator().manual_seed(1000 * num_workers + size)
    return torch.randn(num_workers, size, generator=generator, dtype=dtype)


def run_all_reduce(values_MP: Tensor) -> Tensor:
    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = values_MP[ctx.worker].clone()
        await all_reduce_mean(ctx, round_.tag("sum"), round_.members.workers, mine)
        return mine

    return torch.stack(list(run_workers(len(values_MP), work).results.values()))


def run_survivors(values_MP: Tensor) -> Tensor:
    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = values_MP[ctx.worker].clone()
        assert await average_survivors(ctx, round_, "sum", mine) == round_.members.workers
        return mine

    return torch.stack(list(run_workers(len(values_MP), work).results.values()))


BOTH = pytest.mark.parametrize("average", [run_all_reduce, run_survivors])


# ------------------------------------------------------------------------------- when nothing fails


@pytest.mark.parametrize("size_name", SIZES)
def test_both_averages_are_the_mean_with_the_same_bits_everywhere(size_name: str) -> None:
    """Every M from 1 to 9. A sum of M terms has a rounding error below M eps of the terms."""
    for num_workers in range(1, 10) if size_name != "100003" else (1, 4, 9):
        offsets = {"M-1": num_workers - 1, "M": num_workers, "M+1": num_workers + 1}
        size = offsets.get(size_name) if size_name in offsets else int(size_name)
        values = inputs(num_workers, size)
        ring, direct = run_all_reduce(values), run_survivors(values)
        assert torch.equal(ring, direct)
        assert torch.equal(ring, ring[:1].expand_as(ring))
        scale = values.abs().sum(0)
        assert bool(((ring[0] - values.mean(0)).abs() <= 1e-15 * scale).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_averages_have_the_same_bits_in_narrow_types(dtype: torch.dtype) -> None:
    values = inputs(5, 9001, dtype)
    ring = run_all_reduce(values)
    assert ring.dtype is dtype
    assert torch.equal(ring, run_survivors(values))
    assert torch.equal(ring, ring[:1].expand_as(ring))


@BOTH
@settings(max_examples=25, deadline=None)
@given(num_workers=st.integers(1, 9), size=st.one_of(st.integers(0, 40), st.integers(8180, 8300)))
def test_every_element_of_every_worker_is_counted_exactly_once(
    average: Any, num_workers: int, size: int
) -> None:
    """Worker m gives 2^m M in every place: the mean says in binary who was counted how often."""
    powers = torch.tensor([2.0**m * num_workers for m in range(num_workers)], dtype=torch.float64)
    means = average(powers[:, None].expand(num_workers, size).contiguous())
    assert bool((means == 2**num_workers - 1).all())


@BOTH
def test_every_element_stays_in_its_place(average: Any) -> None:
    """Worker m gives position + m / 8, whose mean is exact for M = 8 in fp64."""
    for size in (5, 1000, 10_007):
        places = torch.arange(size, dtype=torch.float64)
        values = torch.stack([places + worker / 8 for worker in range(8)])
        assert torch.equal(average(values), (places + 3.5 / 8).expand(8, size))


def test_the_mean_does_not_depend_on_who_has_which_values_but_for_rounding() -> None:
    values = inputs(6, 500)
    order = [3, 1, 5, 0, 4, 2]
    difference = run_all_reduce(values[order]) - run_all_reduce(values)
    assert float(difference.abs().max()) < 1e-15


def test_the_mean_is_reduced_in_the_order_of_the_workers_from_the_first_one() -> None:
    """x_0 + ((x_1 - x_0) + (x_2 - x_0) + ...) / M: fixed, so that worlds agree."""
    values = inputs(5, 5, torch.float32)
    total = values[1] - values[0]
    for worker in range(2, 5):
        total += values[worker] - values[0]
    expected = total / 5 + values[0]
    assert torch.equal(run_all_reduce(values)[0], expected)
    assert torch.equal(run_survivors(values)[0], expected)


@BOTH
def test_the_mean_of_equal_vectors_is_that_vector_to_the_bit(average: Any) -> None:
    for num_workers in (3, 7):
        same = inputs(1, 50, torch.float32).expand(num_workers, 50).contiguous()
        assert torch.equal(average(same), same)


def test_a_group_that_is_not_everybody_averages_itself_only() -> None:
    values = inputs(5, 17)

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = values[ctx.worker].clone()
        group = (0, 2, 3) if ctx.worker in (0, 2, 3) else (1, 4)
        assert await average_survivors(ctx, round_, "sum", mine, group=group) == group
        return mine

    results = run_workers(5, work).results
    assert torch.allclose(results[2], values[[0, 2, 3]].mean(0), rtol=1e-15, atol=1e-15)
    assert torch.allclose(results[4], values[[1, 4]].mean(0), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 1000, 9001])
def test_bytes_are_those_of_a_ring(num_workers: int, size: int) -> None:
    """2 (M-1)/M P values a worker (a chunk's rounding apart), and a byte per peer for the vote.

    The average of survivors costs the same, and M bytes per peer and segment for its report.
    """
    values = inputs(num_workers, size, torch.float32)

    async def work(ctx: Context, round_: Round) -> None:
        mine = values[ctx.worker].clone()
        await all_reduce_mean(ctx, round_.tag("all"), round_.members.workers, mine)
        await average_survivors(ctx, round_, "survivors", mine)

    ledger = run_workers(num_workers, work).ledger
    pairs = num_workers * (num_workers - 1)
    levels = min(SEGMENTS_MAX, SEGMENT_MESSAGES_MAX // num_workers, size // SEGMENT_VALUES_MIN) or 1
    reports = levels * pairs * num_workers
    share = 2 * (num_workers - 1) / num_workers * size * 4
    for kind, control, pieces in (("all", pairs, levels), ("survivors", reports, levels)):
        assert ledger.total(kind=kind) == num_workers * share + control
        for worker in range(num_workers):
            sent = ledger.total(kind=kind, sender=worker) - control / num_workers
            assert abs(sent - share) < num_workers * pieces * 4


def test_an_all_reduce_takes_the_time_of_its_bytes_and_three_latencies() -> None:
    """(M-1)/M P values out of each worker, as many back, and the vote of M-1 bytes."""
    num_workers, size, rate, latency = 4, 1000, 4000.0, 0.25

    async def work(ctx: Context, round_: Round) -> None:
        mine = torch.zeros(size)
        await all_reduce_mean(ctx, round_.tag("sum"), round_.members.workers, mine)

    sent_bytes = 2 * (num_workers - 1) / num_workers * size * 4 + (num_workers - 1)
    outcome = run_workers(num_workers, work, network=Network(bandwidth=rate, latency=latency))
    assert outcome.time_s == pytest.approx(sent_bytes / rate + 3 * latency, abs=1e-6)


# ------------------------------------------------------------------------------------------- pairs


@given(st.integers(1, 50), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_pair_average_is_symmetric_and_conserves_the_sum_exactly(size: int, seed: int) -> None:
    """On small integers nothing is rounded, so that the sum is conserved to the bit."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1000, 1000, (5, size), generator=generator).double()
    matching = random_matching(seed, 0, (0, 1, 2, 3, 4), "mix")

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = values[ctx.worker].clone()
        partner = partner_of(ctx.worker, matching)
        assert await average_pair(ctx, round_, "mix", mine, partner)
        return mine

    results = run_workers(5, work).results
    assert torch.equal(torch.stack(list(results.values())).sum(0), values.sum(0))
    alone = [w for w in range(5) if partner_of(w, matching) is None]
    assert len(alone) == 1 and torch.equal(results[alone[0]], values[alone[0]])
    for one, other in matching:
        assert torch.equal(results[one], results[other])
        assert torch.equal(results[one], (values[one] + values[other]) / 2)


def test_a_pair_sends_each_vector_once() -> None:
    async def work(ctx: Context, round_: Round) -> None:
        await average_pair(ctx, round_, "mix", torch.zeros(100), 1 - ctx.worker)

    ledger = run_workers(2, work).ledger
    assert [(e.sender, e.num_bytes, e.num_messages) for e in ledger.entries()] == [
        (0, 400, 1),
        (1, 400, 1),
    ]


# ---------------------------------------------------------------------------------------- failures


def failing(unit: str, probability: float) -> Network:
    return Network(
        failure_probability=probability, failure_unit=unit, latency="10ms", bandwidth="1MB/s"
    )  # type: ignore[arg-type]


PLANS = {
    "num_workers": st.integers(2, 6),
    "probability": st.sampled_from([0.02, 0.1, 0.3]),
    "seed": st.integers(0, 10_000),
    "size": st.sampled_from([3, 50, 9000]),
}


@pytest.mark.parametrize("unit", UNITS)
@given(**PLANS)
@settings(max_examples=20, deadline=None)
def test_an_average_of_survivors_conserves_the_sum_whatever_is_lost(
    unit: str, num_workers: int, probability: float, seed: int, size: int
) -> None:
    """Doubly stochastic: also nobody leaves the range of the inputs, and equals stay equal."""
    values = inputs(num_workers, size)

    async def work(ctx: Context, round_: Round) -> tuple[tuple[int, ...], Tensor]:
        mine = values[ctx.worker].clone()
        return await average_survivors(ctx, round_, "mix", mine), mine

    async def beside(ctx: Context, round_: Round) -> tuple[tuple[int, ...], Tensor]:
        mine, out = values[ctx.worker].clone(), torch.full((size,), torch.nan, dtype=values.dtype)
        survivors = await average_survivors(ctx, round_, "mix", mine, out=out)
        assert torch.equal(mine, values[ctx.worker])
        return survivors, out

    outcome = run_workers(num_workers, work, network=failing(unit, probability), seed=seed)
    other = run_workers(num_workers, beside, network=failing(unit, probability), seed=seed)
    for worker, (survivors, mine) in outcome.results.items():
        assert other.results[worker][0] == survivors
        assert torch.equal(other.results[worker][1], mine)
    mixed = torch.stack([mine for _, mine in outcome.results.values()])
    assert outcome.recorded("results_lost") == 0
    assert torch.allclose(mixed.sum(0), values.sum(0), rtol=0, atol=1e-13 * num_workers)
    assert bool((mixed.amax(0) <= values.amax(0) + 1e-15).all())
    assert bool((mixed.amin(0) >= values.amin(0) - 1e-15).all())
    for worker, (survivors, mine) in outcome.results.items():
        assert worker in survivors
        for other in survivors:  # all survivors agree on who they are
            assert outcome.results[other][0] == survivors
        if size < 8192 and survivors == (worker,):
            assert torch.equal(mine, values[worker])


@pytest.mark.parametrize("unit", UNITS)
@given(**PLANS)
@settings(max_examples=15, deadline=None)
def test_a_pair_that_loses_a_message_keeps_its_own_on_both_sides(
    unit: str, num_workers: int, probability: float, seed: int, size: int
) -> None:
    values = inputs(num_workers, size)
    matching = random_matching(seed, 0, tuple(range(num_workers)), "mix")

    async def work(ctx: Context, round_: Round) -> tuple[bool, Tensor]:
        mine = values[ctx.worker].clone()
        partner = partner_of(ctx.worker, matching)
        return await average_pair(ctx, round_, "mix", mine, partner), mine

    outcome = run_workers(num_workers, work, network=failing(unit, probability), seed=seed)
    for one, other in matching:
        (mixed, mine), (mixed_too, theirs) = outcome.results[one], outcome.results[other]
        assert mixed == mixed_too
        expected = [(values[one] + values[other]) / 2] * 2 if mixed else values[[one, other]]
        assert torch.equal(mine, expected[0]) and torch.equal(theirs, expected[1])


@pytest.mark.parametrize("unit", UNITS)
@given(**PLANS)
@settings(max_examples=20, deadline=None)
def test_an_all_reduce_is_all_or_nothing(
    unit: str, num_workers: int, probability: float, seed: int, size: int
) -> None:
    values = inputs(num_workers, size)

    async def work(ctx: Context, round_: Round) -> tuple[bool, Tensor]:
        mine = values[ctx.worker].clone()
        try:
            await all_reduce_mean(ctx, round_.tag("sum"), round_.members.workers, mine)
        except CollectiveFailed:
            return False, mine
        return True, mine

    outcome = run_workers(num_workers, work, network=failing(unit, probability), seed=seed)
    done = [done for done, _ in outcome.results.values()]
    assert all(done) or not any(done)
    results = torch.stack([mine for _, mine in outcome.results.values()])
    assert torch.equal(results, run_all_reduce(values) if all(done) else values)


@pytest.mark.parametrize("unit", UNITS)
def test_a_repeated_all_reduce_ends_with_the_same_bits_as_one_that_never_failed(unit: str) -> None:
    values = inputs(4, 100)

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = values[ctx.worker].clone()
        await all_reduce_until_complete(ctx, round_, "sum", mine)
        return mine

    retries = []
    for seed in range(6):
        outcome = run_workers(4, work, network=failing(unit, 0.15), seed=seed)
        assert torch.equal(torch.stack(list(outcome.results.values())), run_all_reduce(values))
        retries.append(outcome.recorded("retries"))
    assert max(retries) > 0 and all(count % 4 == 0 for count in retries)  # all repeat together


def test_survivors_do_without_a_worker_whose_link_is_down_and_it_keeps_its_own() -> None:
    values = inputs(4, 9000)
    network = Network(bandwidth="1MB/s", latency="10ms")
    faults = Faults(outages=({"worker": 2, "start": 0.0, "duration": 1000.0},))

    async def work(ctx: Context, round_: Round) -> tuple[tuple[int, ...], Tensor]:
        mine = values[ctx.worker].clone()
        return await average_survivors(ctx, round_, "mix", mine), mine

    results = run_workers(4, work, network=network, faults=faults).results
    assert [survivors for survivors, _ in results.values()] == [
        (0, 1, 3), (0, 1, 3), (2,), (0, 1, 3),
    ]  # fmt: skip
    assert torch.equal(results[2][1], values[2])
    for worker in (0, 1, 3):
        mine = results[worker][1]
        assert torch.allclose(mine, values[[0, 1, 3]].mean(0), rtol=0, atol=1e-15)
        assert torch.equal(mine, results[0][1])


def test_who_is_not_heard_reporting_is_left_out_though_its_contribution_came() -> None:
    """Worker 2's link fails after its contribution has left and before its report does."""
    values = inputs(4, 100)
    faults = Faults(outages=({"worker": 2, "start": 0.5, "duration": 1000.0},))

    async def work(ctx: Context, round_: Round) -> tuple[tuple[int, ...], Tensor]:
        mine = values[ctx.worker].clone()
        return await average_survivors(ctx, round_, "mix", mine), mine

    outcome = run_workers(4, work, network=Network(latency=1.0), faults=faults)
    assert [survivors for survivors, _ in outcome.results.values()] == [
        (0, 1, 3), (0, 1, 3), (2,), (0, 1, 3),
    ]  # fmt: skip
    mixed = torch.stack([mine for _, mine in outcome.results.values()])
    assert torch.allclose(mixed.sum(0), values.sum(0), rtol=0, atol=1e-14)


def test_a_vote_that_is_not_heard_is_a_no() -> None:
    """Worker 2's link fails when all sums have left and the votes have not."""
    values = inputs(3, 100)
    faults = Faults(outages=({"worker": 2, "start": 1.5, "duration": 1000.0},))

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = values[ctx.worker].clone()
        with pytest.raises(CollectiveFailed):
            await all_reduce_mean(ctx, round_.tag("sum"), round_.members.workers, mine)
        return mine

    outcome = run_workers(3, work, network=Network(latency=1.0), faults=faults)
    assert torch.equal(torch.stack(list(outcome.results.values())), values)


@pytest.mark.parametrize("average", ["all_reduce", "survivors", "pair"])
def test_values_that_are_not_finite_end_their_worker_before_anything_is_sent(average: str) -> None:
    values = inputs(2, 10)
    values[1, 3] = float("nan")

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = values[ctx.worker].clone()
        if average == "pair":
            await average_pair(ctx, round_, "mix", mine, 1 - ctx.worker)
        elif average == "survivors":
            await average_survivors(ctx, round_, "mix", mine)
        else:
            await all_reduce_until_complete(ctx, round_, "mix", mine)
        return mine

    outcome = run_workers(2, work)
    assert [(lost["worker"], lost["cause"]) for lost in outcome.lost] == [(1, "non_finite")]
    assert "mix vector of worker 1 is not finite" in outcome.lost[0]["reason"]
    assert outcome.ledger.total(sender=1) == 0
    assert torch.equal(outcome.results[0], values[0])


def test_a_worker_that_comes_too_late_is_left_out_and_owns_its_vector_again() -> None:
    """The others go on without it; it may write at once, though its chunks are still on their way.

    Chunks of 8 kB take 16 s at 1 kB/s where two leave at once, the deadline is 20 s, and worker 2
    comes after 100 s.
    """
    values = inputs(3, 3000)

    async def work(ctx: Context, round_: Round) -> tuple[tuple[int, ...], Tensor]:
        mine = values[ctx.worker].clone()
        if ctx.worker == 2:
            await ctx.train(200)
        survivors = await average_survivors(ctx, round_, "mix", mine)
        kept = mine.clone()
        mine.zero_()
        await ctx.train(200)
        return survivors, kept

    network = Network(bandwidth=1000.0, deadline=20.0, latency="10ms")
    outcome = run_workers(3, work, network=network, timing=Timing(step_time=0.5))
    assert [survivors for survivors, _ in outcome.results.values()] == [(0, 1), (0, 1), (2,)]
    mixed = torch.stack([kept for _, kept in outcome.results.values()])
    assert torch.equal(mixed[2], values[2])
    assert torch.allclose(mixed[:2], values[:2].mean(0).expand(2, -1), rtol=0, atol=1e-15)


@pytest.mark.parametrize("num_late", [1, 2, 3])
def test_one_deadline_is_spent_on_all_who_are_late_not_one_on_each(num_late: int) -> None:
    """One for their contributions and one for their reports, from when the last in time came."""
    values = inputs(6, 12)

    async def work(ctx: Context, round_: Round) -> tuple[tuple[int, ...], float]:
        if ctx.worker >= 6 - num_late:
            await asyncio.sleep(1000)
        elif ctx.worker == 0:
            await asyncio.sleep(5)
        survivors = await average_survivors(ctx, round_, "mix", values[ctx.worker].clone())
        return survivors, ctx.now()

    outcome = run_workers(6, work, network=Network(deadline=10.0, latency="10ms"))
    in_time = tuple(range(6 - num_late))
    for worker in in_time:
        survivors, done_s = outcome.results[worker]
        assert survivors == in_time
        assert done_s < 5 + 2 * 10 + 1
    assert outcome.recorded("results_lost") == 0


# --------------------------------------------------------------------------------------- ownership


@pytest.mark.parametrize("size", [4, 4096])
def test_writing_to_a_payload_on_its_way_is_a_data_race(size: int) -> None:
    async def work(ctx: Context, round_: Round) -> None:
        mine = torch.zeros(size)
        if ctx.worker == 0:
            transfer = ctx.send(1, round_.tag("x"), mine)
            mine[size // 2] = 1.0
            await transfer.delivered()
        else:
            await ctx.recv(0, round_.tag("x"))

    with pytest.raises(DataRace, match=r"worker 0 wrote to a payload on its way to worker 1"):
        run_workers(2, work)


def test_writing_after_delivery_is_none_and_what_was_received_is_the_receivers_own() -> None:
    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = torch.full((4,), float(ctx.worker))
        peer = 1 - ctx.worker
        transfer = ctx.send(peer, round_.tag("x"), mine)
        theirs = await ctx.recv(peer, round_.tag("x"))
        await transfer.delivered()
        mine.fill_(-1.0)
        theirs.add_(10.0)
        await ctx.train(1)
        assert bool((mine == -1.0).all())
        return theirs

    results = run_workers(2, work).results
    assert results[0].tolist() == [11.0] * 4 and results[1].tolist() == [10.0] * 4


def test_a_method_that_trains_on_a_vector_while_it_is_mixed_is_found_out() -> None:
    async def work(ctx: Context, round_: Round) -> None:
        async with ctx.task_group() as tasks:
            tasks.start(average_survivors(ctx, round_, "mix1", ctx.replica.parameters))
            await ctx.train(1)

    network = Network(bandwidth=1.0)  # so slow that the step falls into the transfer
    with pytest.raises(DataRace):
        run_workers(2, work, network=network)


def test_scratch_memory_is_the_workers_own_and_keeps_what_is_in_it_while_it_waits() -> None:
    async def work(ctx: Context, round_: Round) -> tuple[Tensor, Tensor]:
        await ctx.train(1)  # all on one engine, which has one gradient
        mine = torch.sub(ctx.replica.parameters, ctx.worker, out=ctx.scratch())
        await average_pair(ctx, round_, "mix", torch.zeros(8), 1 - ctx.worker)
        assert ctx.scratch() is mine
        return mine, ctx.replica.parameters - ctx.worker

    for mine, expected in run_workers(2, work).results.values():
        assert torch.equal(mine, expected)
