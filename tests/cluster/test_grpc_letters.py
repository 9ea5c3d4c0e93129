"""Letters over gRPC, beyond the rules that all worlds share: queues, lives and bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import torch

from gossamer.cluster.limits import Limits
from gossamer.cluster.transport import GrpcTransport
from gossamer.comm.letters import Letter

PATIENCE_S = 20.0
LIMITS = Limits(keepalive=1.0, payload_max=100_000.0, untaken_max=50_000.0)


def transport(worker: int, delay_s: float = 0.0) -> GrpcTransport:
    return GrpcTransport(
        worker, "run", listen="127.0.0.1:0", credentials=None, limits=LIMITS, delay_s=delay_s
    )


@asynccontextmanager
async def pair(delay_s: float = 0.0) -> AsyncIterator[tuple[GrpcTransport, GrpcTransport]]:
    ends = (transport(0, delay_s), transport(1, delay_s))
    addresses = [await end.start() for end in ends]
    ends[0].set_peer(1, addresses[1])
    ends[1].set_peer(0, addresses[0])
    try:
        yield ends
    finally:
        await asyncio.gather(*(end.close(0.0) for end in ends))


async def taken(end: GrpcTransport, src: int, part: int = 0) -> Letter:
    seen = 0
    async with asyncio.timeout(PATIENCE_S):
        while (letter := end.poll(src, "a", part)) is None:
            seen = await end.mail(seen)
    return letter


def played(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_letters_that_are_more_frequent_than_the_way_is_long_arrive() -> None:
    async def scenario() -> None:
        async with pair(delay_s=0.1) as (here, there):
            waiting = asyncio.create_task(taken(there, 0))
            step = 0
            while not waiting.done():
                step += 1
                here.post(1, "a", torch.ones(1), step=step, exact=True)
                await asyncio.sleep(0.02)
            assert 1 <= (await waiting).step <= step

    played(scenario)


def test_where_nobody_listens_one_letter_waits() -> None:
    async def scenario() -> None:
        async with pair() as (here, there):
            await there.close(0.0)
            for step in range(30):
                here.post(1, "a", torch.ones(1000), step=step)
                here.post(1, "b", torch.ones(1), step=step, exact=True)
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert here.letters.on_their_way() <= 2

    played(scenario)


def test_a_new_life_counts_from_the_beginning_before_anybody_tells_of_it() -> None:
    async def scenario() -> None:
        async with pair() as (here, there):
            here.post(1, "a", torch.ones(1), step=7)
            await taken(there, 0)
            again = transport(0)
            await again.start()
            again.set_peer(1, here._peer(1).address or "")
            again.post(1, "a", torch.ones(1), step=1)
            assert (await taken(there, 0)).step == 1
            here.post(1, "a", torch.ones(1), step=8)  # of the life that is over
            again.post(1, "a", torch.ones(1), step=2)
            assert (await taken(there, 0)).step == 2
            while not there.traffic.refused.get("life"):
                await asyncio.sleep(0.01)
            assert there.poll(0, "a") is None
            await again.close(0.0)

    played(scenario)


def test_who_takes_part_anew_in_the_same_process_counts_from_the_beginning() -> None:
    async def scenario() -> None:
        async with pair() as (here, there):
            here.post(1, "a", torch.ones(1), step=7)
            await taken(there, 0)
            here.post(1, "a", torch.ones(1), step=8, part=1)
            while not there.mailbox.untaken_bytes(0):
                await asyncio.sleep(0.01)
            there.mailbox.begin()
            assert there.mailbox.untaken_bytes(0) == 0
            here.post(1, "a", torch.ones(1), step=3)
            assert (await taken(there, 0)).step == 3
            there.peer_lost(0)
            there.peer_back(0)
            here.post(1, "a", torch.ones(1), step=1)
            assert (await taken(there, 0)).step == 1

    played(scenario)


def test_what_lies_untaken_is_bounded() -> None:
    """50 kB of a sender's letters, whatever their kinds; a newer one may take an older's place."""

    async def scenario() -> None:
        async with pair() as (here, there):
            for part in range(20):
                here.post(1, "a", torch.ones(2500), step=1, part=part)
            while there.traffic.taken_in + there.traffic.refused.get("crowded", 0) < 20:
                await asyncio.sleep(0.01)
            assert there.mailbox.untaken_bytes(0) <= 50_000
            assert there.traffic.taken_in >= 4
            arrived = [part for part in range(20) if there.poll(0, "a", part) is not None]
            assert len(arrived) == there.traffic.taken_in
            here.post(1, "a", torch.ones(2500), step=2, part=19)
            assert (await taken(there, 0, 19)).step == 2

    played(scenario)
