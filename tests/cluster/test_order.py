"""What a message's arrival proves of others, and waits that news from the coordinator ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from gossamer.cluster.context import ClusterContext, Progress
from gossamer.cluster.limits import Limits
from gossamer.cluster.transport import GrpcTransport
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Round, Tag
from gossamer.comm.members import MemberLog
from gossamer.errors import LinkFailed, OutOfSync, PeerLost
from gossamer.testing.harness import numbers, same_bits

NARROW = Limits(streams_max=1)
EARLY, LATE = Tag("mix1", 0), Tag("mix1", 1)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


@asynccontextmanager
async def two(rate: float | None = None) -> AsyncIterator[tuple[GrpcTransport, GrpcTransport]]:
    ends = [
        GrpcTransport(w, "run", listen="127.0.0.1:0", credentials=None, limits=NARROW, rate=rate)
        for w in range(2)
    ]
    addresses = [await end.start() for end in ends]
    ends[0].set_peer(1, addresses[1])
    ends[1].set_peer(0, addresses[0])
    try:
        yield ends[0], ends[1]
    finally:
        await asyncio.gather(*(end.close(1.0) for end in ends))


def test_a_message_of_a_later_round_does_not_overtake_one_that_waits_for_its_turn() -> None:
    """The later one, small, would go at once; it would prove that the earlier never comes."""

    async def scene() -> None:
        async with two(rate=400_000) as (first, second):
            waiting = asyncio.ensure_future(second.recv(0, EARLY, 20.0))
            other = first.send(1, Tag("other", 0), numbers(25_000))  # a quarter of a second
            early = first.send(1, EARLY, numbers(1_000))
            late = first.send(1, LATE, numbers(10), exact=True)
            assert same_bits(await waiting, numbers(1_000))
            assert same_bits(await second.recv(0, LATE, 20.0), numbers(10))
            for transfer in (other, early, late):
                await transfer.delivered()

    run(scene())


def test_a_message_whose_predecessor_failed_goes_all_the_same() -> None:
    async def scene() -> None:
        async with two() as (first, second):
            second.begin_round(1)
            early = first.send(1, EARLY, numbers(10))
            late = first.send(1, LATE, numbers(10))
            with pytest.raises(LinkFailed):
                await early.delivered()
            await late.delivered()
            with pytest.raises(OutOfSync):
                await second.recv(0, Tag("mix1", 0, phase=1), 20.0)

    run(scene())


def test_settled_is_when_all_has_arrived_or_failed() -> None:
    async def scene() -> None:
        async with two(rate=400_000) as (first, second):
            sent = [first.send(1, Tag("mix1", 0, part=part), numbers(5_000)) for part in range(3)]
            await first.settled()
            assert second.traffic.taken_in == 3
            for transfer in sent:
                await transfer.delivered()

    run(scene())


def make_context(transport: GrpcTransport, log: MemberLog, *, worker: int = 0) -> ClusterContext:
    """A context that only ever sends and receives."""
    unused: Any = None
    return ClusterContext(
        worker=worker, num_workers=3, num_rounds=9, seed=0, deadline_s=20.0, engine=unused,
        replica=unused, transport=transport, members=lambda: log, boundary=unused,
        thread=unused, progress=Progress(),
    )  # fmt: skip


def test_a_worker_that_has_left_a_round_is_not_waited_for_though_it_is_back() -> None:
    """Rounds 0 to 2 were planned with it; it is back in round 3."""

    async def scene() -> None:
        log = MemberLog((0, 1, 2), lead=2)
        log.start(1)
        log.remove(1)
        assert log.add(1) == 3
        async with two() as (first, second):
            ctx = make_context(first, log)
            with pytest.raises(PeerLost):
                await ctx.recv(1, Round(2, log.planned(2)).tag("outer"))
            with pytest.raises(PeerLost):
                await ctx.send(1, Round(2, log.planned(2)).tag("outer"), numbers(5)).delivered()
            tag = Round(3, log.planned(3)).tag("outer")
            await ctx.send(1, tag, numbers(5)).delivered()
            second.send(0, tag, numbers(7))
            assert same_bits(await ctx.recv(1, tag), numbers(7))

    run(scene())


def test_workers_that_began_a_round_with_different_members_agree_at_once() -> None:
    """One was told that a third is gone when it began, the other when it had begun already."""

    async def scene() -> None:
        logs = [MemberLog((0, 1, 2), lead=1) for _ in range(2)]
        begun = Round(1, logs[1].planned(1))
        async with two() as ends:
            contexts = [make_context(ends[w], logs[w], worker=w) for w in range(2)]
            values = [torch.full((6,), float(w)) for w in range(2)]
            late = asyncio.ensure_future(
                all_reduce_until_complete(contexts[1], begun, "outer", values[1])
            )
            await asyncio.sleep(0)
            for log in logs:
                log.start(0)
                log.remove(2)
            ends[1].peer_lost(2)
            ends[1].forsake(contexts[1].is_forsaken, LinkFailed("other members"))
            planned = Round(1, logs[0].planned(1))
            async with asyncio.timeout(contexts[0].deadline / 2):
                agreed = await all_reduce_until_complete(contexts[0], planned, "outer", values[0])
                assert await late == agreed
            assert agreed.members.workers == (0, 1)
            assert all(torch.equal(v, torch.full((6,), 0.5)) for v in values)

    run(scene())


def test_news_of_other_members_ends_waits_of_the_round_and_no_others() -> None:
    async def scene() -> None:
        log = MemberLog((0, 1, 2), lead=1)
        log.start(0)
        async with two() as (first, second):
            ctx = make_context(first, log)
            stale = Round(1, log.planned(1)).tag("outer")
            waits = [
                asyncio.ensure_future(ctx.recv(1, tag))
                for tag in (Round(0, log.planned(0)).tag("outer"), stale, Tag("join", 1))
            ]
            await asyncio.sleep(0)
            log.remove(2)  # from round 1 on, which this worker has planned with it
            first.forsake(ctx.is_forsaken, LinkFailed("other members"))
            with pytest.raises(LinkFailed):
                await waits[1]
            with pytest.raises(PeerLost):
                await ctx.recv(1, stale)
            await second.send(0, Tag("outer", 0), torch.ones(3)).delivered()
            await second.send(0, Tag("join", 1), torch.ones(3)).delivered()
            await asyncio.gather(waits[0], waits[2])

    run(scene())
