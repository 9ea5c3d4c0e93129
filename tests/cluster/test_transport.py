"""What gRPC's transport adds to the rules: broken connections, lives, control first, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from gossamer.cluster.inbox import Inbox
from gossamer.cluster.limits import Limits
from gossamer.cluster.transport import GrpcTransport, is_loopback
from gossamer.cluster.wire import Header
from gossamer.comm.context import Tag
from gossamer.errors import (
    ConfigError,
    InvariantViolated,
    LinkFailed,
    OutOfSync,
    PeerLost,
    TimedOut,
)
from gossamer.testing.harness import fate, numbers, same_bits
from gossamer.testing.loopback import CuttableLink

LIMITS = Limits(keepalive=1.0)
TAG = Tag("mix1", 0)
VALUES = numbers(50_000)  # 200 kB


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


def make(worker: int, rate: float | None = None, listen: str = "127.0.0.1:0") -> GrpcTransport:
    return GrpcTransport(worker, "run", listen=listen, credentials=None, limits=LIMITS, rate=rate)


@asynccontextmanager
async def two(rate: float | None = None) -> AsyncIterator[tuple[GrpcTransport, GrpcTransport]]:
    first, second = make(0, rate), make(1, rate)
    addresses = [await first.start(), await second.start()]
    first.set_peer(1, addresses[1])
    second.set_peer(0, addresses[0])
    try:
        yield first, second
    finally:
        await asyncio.gather(first.close(1.0), second.close(1.0))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_connection_that_breaks_goes_on_where_it_was() -> None:
    """As often as it breaks, what the receiver has is not sent again."""

    async def scene() -> None:
        first, second = make(0, 400_000), make(1)
        await first.start()
        link = CuttableLink(await second.start())
        first.set_peer(1, await link.open())
        transfer = first.send(1, TAG, VALUES)
        waiting = asyncio.ensure_future(second.recv(0, TAG, 10.0))
        for share in (0.25, 0.5, 0.75):
            await until(lambda share=share: second.traffic.bytes_received > share * 200_000)
            link.reset()
            await asyncio.sleep(0)
            link.lead_to(link.target)
        assert same_bits(await waiting, VALUES)
        await transfer.delivered()
        assert first.traffic.retries >= 3
        assert second.traffic.bytes_received < 1.2 * 200_000
        assert second.traffic.taken_in == first.traffic.delivered == 1
        await asyncio.gather(first.close(0.5), second.close(0.5))
        await link.close()

    run(scene())


def test_a_peer_that_listens_a_little_later_is_reached() -> None:
    async def scene() -> None:
        first, second = make(0), make(1)
        await first.start()
        transfer = first.send(1, TAG, VALUES)  # no address yet
        await asyncio.sleep(0)
        placeholder = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = placeholder.sockets[0].getsockname()[1]
        first.set_peer(1, f"127.0.0.1:{port}")  # nobody who speaks there yet
        placeholder.close()
        await placeholder.wait_closed()
        second = make(1, listen=f"127.0.0.1:{port}")
        await second.start()
        assert same_bits(await second.recv(0, TAG, 5.0), VALUES)
        await transfer.delivered()
        await asyncio.gather(first.close(0.5), second.close(0.5))

    run(scene())


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_peer_that_is_not_there_fails_after_the_keepalive(address: str | None) -> None:
    async def scene() -> None:
        first = make(0)
        await first.start()
        if address:
            first.set_peer(1, address)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(LinkFailed, match="address is known" if address is None else "refused"):
            await first.send(1, TAG, VALUES).delivered()
        assert 0.9 < loop.time() - begun < 2.5
        await first.close(0.0)

    run(scene())


def test_a_new_life_gets_nothing_that_was_meant_for_the_old_one() -> None:
    """The receiver starts again on the same address while a message to it is on its way."""

    async def scene() -> None:
        first, old, new = make(0, 400_000), make(1), make(1)
        await first.start()
        link = CuttableLink(await old.start())
        first.set_peer(1, await link.open())
        transfer = first.send(1, TAG, VALUES)
        await until(lambda: old.traffic.bytes_received > 50_000)
        link.reset()
        link.lead_to(await new.start())
        with pytest.raises(LinkFailed, match="has started again"):
            await transfer.delivered()
        with pytest.raises(TimedOut):
            await new.recv(0, TAG, 0.01)
        retry = TAG._replace(attempt=1)
        assert isinstance(await fate(first.send(1, retry, VALUES).delivered()), LinkFailed)
        first.peer_back(1)  # now that we know of it
        retry = TAG._replace(attempt=2)
        await first.send(1, retry, VALUES).delivered()
        assert same_bits(await new.recv(0, retry, 5.0), VALUES)
        await asyncio.gather(first.close(0.5), old.close(0.0), new.close(0.5))
        await link.close()

    run(scene())


def test_a_sender_that_starts_again_may_use_its_tags_again() -> None:
    async def scene() -> None:
        old, new, second = make(0), make(0), make(1)
        address = await second.start()
        for sender, value in ((old, 1.0), (new, 2.0)):
            await sender.start()
            sender.set_peer(1, address)
            await sender.send(1, TAG, torch.tensor(value)).delivered()
        assert (await second.recv(0, TAG, 5.0)).item() == 2.0
        await asyncio.gather(*(end.close(0.0) for end in (old, new, second)))

    run(scene())


def test_who_is_taken_for_gone_is_heard_again_when_it_is_back() -> None:
    """It may send a moment before the others have heard of its return; never while it is gone."""

    async def scene() -> None:
        async with two() as (first, second):
            second.peer_lost(0)
            refused = first.send(1, TAG, VALUES)
            assert isinstance(await fate(refused.delivered()), LinkFailed)
            later = TAG._replace(attempt=1)
            transfer = first.send(1, later, VALUES)
            await until(lambda: second.traffic.refused["gone"] >= 2)
            assert not second.knows_of(0, later)
            second.peer_back(0)
            assert same_bits(await second.recv(0, later, 5.0), VALUES)
            await transfer.delivered()

    run(scene())


def test_what_comes_from_a_lost_peer_is_thrown_away_at_once() -> None:
    """Also where nobody waits for it yet; who asks for it later is told."""

    async def scene() -> None:
        async with two(rate=100_000) as (first, second):
            first.send(1, TAG, VALUES)
            await until(lambda: second.knows_of(0, TAG))
            assert second.untaken_bytes(0) == 200_000
            second.peer_lost(0)
            assert second.untaken_bytes(0) == 0
            second.peer_back(0)
            assert isinstance(await fate(second.recv(0, TAG, 5.0)), PeerLost)

    run(scene())


def header_of(tag: Tag) -> Header:
    """Of 8 bytes from worker 0 to worker 1."""
    return Header(
        run_id="run", sender=0, receiver=1, tag=tag, dtype=torch.float32, shape=(2,),
        exact=False, message_id=bytes(16), sender_life=bytes(16),
    )  # fmt: skip


def test_room_is_given_on_as_soon_as_there_is_some() -> None:
    async def scene() -> None:
        inbox = Inbox(1, Limits(payload_max=8, untaken_max=8))
        tags = [TAG._replace(part=part) for part in range(3)]
        entries = [inbox.offer(header_of(tag)) for tag in tags]
        assert await inbox.admit(entries[0], 0.0)
        inbox.complete(entries[0])
        assert not await inbox.admit(entries[1], 0.0)
        held = [asyncio.ensure_future(inbox.admit(entry, 50.0)) for entry in entries[1:]]
        await asyncio.sleep(0)
        await inbox.recv(0, tags[0], 0.0)
        assert await asyncio.wait_for(held[0], 5.0)  # in the order of their coming
        awaited = asyncio.ensure_future(inbox.recv(0, tags[2], 50.0))
        assert await asyncio.wait_for(held[1], 5.0)  # somebody waits for it
        inbox.complete(entries[2])
        await awaited
        assert inbox.untaken_bytes(0) == 8

    run(scene())


def test_a_message_that_comes_as_its_receiver_leaves_is_kept() -> None:
    """Cancelled after the message was handed to it, before it ran."""

    async def scene() -> None:
        inbox = Inbox(1, LIMITS)
        header = header_of(TAG)
        waiting = asyncio.ensure_future(inbox.recv(0, TAG, 5.0))
        await asyncio.sleep(0)
        entry = inbox.offer(header)
        assert await inbox.admit(entry, 1.0)
        inbox.complete(entry)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert (await inbox.recv(0, TAG, 0.01)).shape == (2,)
        assert inbox.untaken_bytes(0) == 0

    run(scene())


def test_control_messages_do_not_wait_behind_payload() -> None:
    """On a line that is full for two seconds each way, votes pass in a fraction of one."""

    async def scene() -> None:
        async with two(rate=200_000) as (first, second):
            loop = asyncio.get_running_loop()
            transfers = [
                sender.send(dst, Tag("mix1", 0, part=part), numbers(25_000))
                for sender, dst in ((first, 1), (second, 0))
                for part in range(4)
            ]
            await until(lambda: second.traffic.bytes_received > 30_000)
            for part in range(10):
                begun = loop.time()
                vote = Tag("vote", 0, part=part)
                there = first.send(1, vote, torch.ones(1), exact=True)
                back = second.send(0, vote, torch.ones(1), exact=True)
                await second.recv(0, vote, 5.0)
                await first.recv(1, vote, 5.0)
                await asyncio.gather(there.delivered(), back.delivered())
                assert loop.time() - begun < 0.5
            assert not any(transfer.is_done for transfer in transfers)

    run(scene())


def test_a_peer_that_has_finished_sends_nothing_more() -> None:
    async def scene() -> None:
        async with two() as (first, second):
            await first.send(1, TAG, VALUES).delivered()
            waiting = asyncio.ensure_future(fate(second.recv(0, Tag("mix2", 0), 10.0)))
            await asyncio.sleep(0)
            second.peer_finished(0)
            assert isinstance(await waiting, OutOfSync)
            assert same_bits(await second.recv(0, TAG, 5.0), VALUES)

    run(scene())


def test_closing_lets_what_is_on_its_way_arrive() -> None:
    async def scene() -> None:
        first, second = make(0, 400_000), make(1)
        await first.start()
        first.set_peer(1, await second.start())
        transfer = first.send(1, TAG, VALUES)
        await asyncio.sleep(0)
        await first.close(5.0)
        await transfer.delivered()
        assert same_bits(await second.recv(0, TAG, 0.01), VALUES)
        with pytest.raises(InvariantViolated, match="closed"):
            first.send(1, TAG, VALUES)
        await second.close(0.0)

    run(scene())


def test_closing_at_once_fails_everything() -> None:
    async def scene() -> None:
        async with two(rate=100_000) as (first, second):
            transfer = first.send(1, TAG, VALUES)
            waiting = asyncio.ensure_future(fate(first.recv(1, TAG, 60.0)))
            theirs = asyncio.ensure_future(fate(second.recv(0, TAG, 60.0)))
            await until(lambda: second.knows_of(0, TAG))
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await first.close(0.0)
            assert isinstance(await fate(transfer.delivered()), LinkFailed)
            assert isinstance(await waiting, LinkFailed)
            assert isinstance(await theirs, LinkFailed)
            assert loop.time() - begun < 3.0

    run(scene())


def test_misuse_is_told() -> None:
    async def scene() -> None:
        async with two() as (first, second):
            with pytest.raises(InvariantViolated, match="to itself"):
                first.send(0, TAG, VALUES)
            with pytest.raises(InvariantViolated, match="started once"):
                await first.start()
            waiting = asyncio.ensure_future(second.recv(0, TAG, 5.0))
            await asyncio.sleep(0)
            with pytest.raises(InvariantViolated, match="two tasks wait"):
                await second.recv(0, TAG, 5.0)
            await first.send(1, TAG, VALUES).delivered()
            await waiting

    run(scene())


def test_what_goes_over_the_wire_is_counted() -> None:
    async def scene() -> None:
        async with two() as (first, second):
            transfer = first.send(1, TAG, VALUES)
            await second.recv(0, TAG, 5.0)
            await transfer.delivered()
            assert 200_000 < first.traffic.bytes_sent < 201_000
            assert second.traffic.bytes_received == first.traffic.bytes_sent
            assert first.traffic.bytes_received == second.traffic.bytes_sent < 200

    run(scene())


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example.org", False)],
)  # fmt: skip
def test_loopback_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("wrong", [{"keepalive": 0}, {"streams_max": 0}, {"payload_maximum": 1}])
def test_limits_make_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Limits(**wrong)


def test_the_share_of_a_peer_is_four_payloads_or_64_mib() -> None:
    assert Limits.for_payload(1000).untaken_bytes == 64 * 2**20
    assert Limits.for_payload(10**9).untaken_bytes == 4e9
    assert Limits(untaken_max="1MB").untaken_bytes == 1e6
