"""Averages whose payloads a codec writes: equal bits, stated errors, exact bytes, nothing lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.codec import codec_of
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import (
    SEGMENT_MESSAGES_MAX,
    SEGMENT_VALUES_MIN,
    SEGMENTS_MAX,
    all_reduce_mean,
    all_reduce_until_complete,
    average_survivors,
)
from gossamer.comm.context import Context, Round
from gossamer.errors import CollectiveFailed
from gossamer.sim.compute import Timing
from gossamer.sim.network import Network
from gossamer.testing import run_workers

CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "int1", "e3m0", "topk:0.1")
WITH_BOUND = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1.01 / 254, "int4": 1.01 / 14, "e3m0": 1 / 3}


def inputs(num_workers: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * num_workers + size)
    return torch.randn(num_workers, size, generator=generator, dtype=dtype)


def averaged(kind: str, values: Tensor, codings: list[Coding], **world: object) -> Tensor:
    """[M, n]: what each worker holds after one average."""

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine, coding = values[ctx.worker].clone(), codings[ctx.worker]
        if kind == "all_reduce":
            await all_reduce_mean(ctx, round_.tag("x"), round_.members.workers, mine, coding)
        else:
            await average_survivors(ctx, round_, "x", mine, coding=coding)
        return mine

    outcome = run_workers(len(values), work, **world)  # type: ignore[arg-type]
    return torch.stack(list(outcome.results.values()))


KINDS = pytest.mark.parametrize("kind", ["all_reduce", "survivors"])


@KINDS
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("num_workers", "size"), [(2, 1), (3, 2), (5, 1000), (4, 9001)])
def test_all_members_hold_the_same_bits(kind: str, codec: str, num_workers: int, size: int) -> None:
    """And the error is that of two payloads, each within the codec's bound for the largest."""
    values = inputs(num_workers, size)
    results = averaged(kind, values, [Coding(codec)] * num_workers)
    assert all(torch.equal(result, results[0]) for result in results)
    if codec in WITH_BOUND:
        largest, share = float(values.abs().max()), WITH_BOUND[codec]
        error = float((results[0].double() - values.double().mean(0)).abs().max())
        assert error <= largest * (share + share * (1 + share)) + 1e-6
        assert size < 1000 or error > 0  # it was encoded
    if codec == "fp32":
        assert torch.equal(results, averaged(kind, values, [Coding()] * num_workers))


@pytest.mark.parametrize("codec", ["int4", "e3m0", "topk:0.01", "fp16"])
@pytest.mark.parametrize(("num_workers", "size"), [(2, 7), (3, 5000), (8, 20_000)])
def test_bytes_are_the_codecs_for_each_chunk(codec: str, num_workers: int, size: int) -> None:
    values = inputs(num_workers, size)

    async def work(ctx: Context, round_: Round) -> None:
        mine = values[ctx.worker].clone()
        members = round_.members.workers
        await all_reduce_mean(ctx, round_.tag("x"), members, mine, Coding(codec))

    ledger = run_workers(num_workers, work).ledger
    levels = min(SEGMENTS_MAX, SEGMENT_MESSAGES_MAX // num_workers, size // SEGMENT_VALUES_MIN) or 1
    segments = torch.arange(size).tensor_split(levels)
    sizes = [[chunk.numel() for chunk in s.tensor_split(num_workers)] for s in segments]
    cost = codec_of(codec).num_bytes
    of_owner = [sum(cost(segment[w]) for segment in sizes) for w in range(num_workers)]
    for sender in range(num_workers):
        for receiver in range(num_workers):
            sent = ledger.total(sender=sender, receiver=receiver)
            vote = 1
            expected = of_owner[receiver] + of_owner[sender] + vote
            assert sent == (expected if sender != receiver else 0)


def test_a_larger_models_bytes_are_the_encoded_ones_times_its_size() -> None:
    """As they are for payloads that are not encoded; `payload_dtype` says nothing of a codec's."""

    async def work(ctx: Context, round_: Round) -> None:
        mine = torch.zeros(4)
        members = round_.members.workers
        await all_reduce_mean(ctx, round_.tag("x"), members, mine, Coding("int8"))

    timing = Timing(parameters=400, payload_dtype="bf16")  # the model has 4
    ledger = run_workers(2, work, timing=timing).ledger
    assert ledger.total(sender=0) == 2 * 100 * (2 + 2) + 1  # two chunks of two values and a scale


@KINDS
def test_no_block_spans_two_quantities(kind: str) -> None:
    """Small values beside large ones keep their own scale, wherever a chunk is cut."""
    sizes = (1e-6, 1e3, 1.0)
    values = torch.cat([inputs(4, 500) * size for size in sizes], dim=1)
    results = averaged(kind, values, [Coding("int8", parts=3)] * 4)
    blurred = averaged(kind, values, [Coding("int8")] * 4)
    exact = values.mean(0)
    for part, size in enumerate(sizes):
        error = (results[0] - exact).chunk(3)[part]
        assert float(error.abs().max()) < 0.05 * size
    assert float((blurred[0] - exact)[:500].abs().max()) > 0.5e-6  # chunks of 375 cross the border


def test_a_tail_goes_exactly_and_differences_go_instead_of_values() -> None:
    values = inputs(4, 41, torch.float64)
    tail = averaged("all_reduce", values, [Coding("int1", exact_tail=1)] * 4)[0]
    exact = averaged("all_reduce", values, [Coding()] * 4)[0]
    assert tail[-1] == exact[-1] and not torch.equal(tail, exact)
    start = 1e4 * inputs(1, 41, torch.float64)[0]
    codings = [Coding("int8", since=start)] * 4
    moved = averaged("all_reduce", start + values, codings)
    assert all(torch.equal(result, moved[0]) for result in moved)
    assert float((moved[0] - (start + values.mean(0))).abs().max()) < 0.03  # of 1e4
    still = averaged("all_reduce", start.expand(4, -1), codings)
    assert torch.equal(still[0], start)  # nobody has moved: not a bit changes


# ----------------------------------------------------------------------------------- error feedback


@KINDS
@pytest.mark.parametrize("codec", ["topk:0.05", "int1", "int8"])
def test_with_error_feedback_nothing_is_lost_for_good(kind: str, codec: str) -> None:
    """M times all that was adopted, and what is still owed, sum to all that was given."""
    num_workers, size = 3, 3000
    residuals = torch.zeros(num_workers, size, dtype=torch.float64)
    codings = [Coding(codec, residual=residual) for residual in residuals]
    given_, adopted = torch.zeros(size).double(), torch.zeros(size).double()
    for turn in range(6):
        values = inputs(num_workers, size, torch.float64) * (turn + 1)
        results = averaged(kind, values, codings)
        assert all(torch.equal(result, results[0]) for result in results)
        given_ += values.sum(0)
        adopted += num_workers * results[0]
    owed = residuals.sum(0)
    assert float((adopted + owed - given_).abs().max()) < 1e-11
    assert float(owed.abs().max()) > 1e-3  # something was


@given(seed=st.integers(0, 10_000), probability=st.sampled_from([0.05, 0.3]))
@settings(max_examples=12, deadline=None)
def test_a_residual_changes_only_when_the_average_holds(seed: int, probability: float) -> None:
    values = inputs(3, 2100)
    before = inputs(3, 2101)[:, :2100]
    residuals = before.clone()

    async def work(ctx: Context, round_: Round) -> tuple[bool, Tensor]:
        mine = values[ctx.worker].clone()
        coding = Coding("int4", residual=residuals[ctx.worker])
        try:
            members = round_.members.workers
            await all_reduce_mean(ctx, round_.tag("x"), members, mine, coding)
        except CollectiveFailed:
            return False, mine
        return True, mine

    network = Network(failure_probability=probability, failure_unit="transfer", latency="10ms")
    outcome = run_workers(3, work, network=network, seed=seed)
    held = [done for done, _ in outcome.results.values()]
    mine = torch.stack([result for _, result in outcome.results.values()])
    again = before.clone()
    undisturbed = averaged(
        "all_reduce", values, [Coding("int4", residual=residual) for residual in again]
    )
    assert all(held) or not any(held)
    assert torch.equal(mine, undisturbed if all(held) else values)
    assert torch.equal(residuals, again if all(held) else before)


@given(seed=st.integers(0, 10_000), num_workers=st.integers(3, 5))
@settings(max_examples=12, deadline=None)
def test_survivors_hold_what_the_others_give_up_of_chunks_too(seed: int, num_workers: int) -> None:
    """Who falls out keeps its own and owes what it owed; the others conserve their sum."""
    values = inputs(num_workers, 3000, torch.float64)
    residuals = torch.zeros_like(values)

    async def work(ctx: Context, round_: Round) -> tuple[tuple[int, ...], Tensor]:
        mine = values[ctx.worker].clone()
        coding = Coding("int4", residual=residuals[ctx.worker])
        return await average_survivors(ctx, round_, "x", mine, coding=coding), mine

    network = Network(failure_probability=0.3, failure_unit="worker", latency="10ms")
    outcome = run_workers(num_workers, work, network=network, seed=seed)
    mixed = torch.stack([mine for _, mine in outcome.results.values()])
    assert outcome.recorded("results_lost") == 0
    assert float(((mixed + residuals).sum(0) - values.sum(0)).abs().max()) < 1e-12


def test_what_a_codec_cannot_hold_ends_its_worker() -> None:
    async def work(ctx: Context, round_: Round) -> Tensor:
        mine = torch.full((3000,), 1e5 if ctx.worker == 1 else 1.0)
        await all_reduce_until_complete(ctx, round_, "x", mine, coding=Coding("fp16"))
        return mine

    outcome = run_workers(3, work)
    assert [lost["worker"] for lost in outcome.lost] == [1]
    assert "65504" in outcome.lost[0]["reason"]
    assert all(torch.equal(outcome.results[w], torch.ones(3000)) for w in (0, 2))
