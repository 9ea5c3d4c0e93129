"""The checks of the conformance suite that hurt something: links that are slow or cut, workers that
are killed. See `gossamer.testing.conformance`.
"""

from __future__ import annotations

import asyncio

import torch

from gossamer.comm.context import Tag
from gossamer.errors import LinkFailed, PeerLost, TimedOut
from gossamer.testing.harness import (
    PATIENCE_S,
    Endpoints,
    Harness,
    expect,
    expect_error,
    fate,
    numbers,
    same_bits,
    start,
)

TAG = Tag("mix1", 0)

# --------------------------------------------------------------------------------- slow and stalled


def progress_is_not_timed_out(harness: Harness) -> None:
    """A transfer that moves all the time may take longer than any patience."""

    async def scenario(ends: Endpoints) -> None:
        payload = numbers(25_000)
        begun = ends.now()
        transfer = ends[0].send(1, TAG, payload)
        await ends.under_way(0, 1, TAG)
        received = await ends[1].recv(0, TAG, ends.keepalive_s / 4)
        await transfer.delivered()
        took = ends.now() - begun
        expect(took > 1.5 * ends.keepalive_s, f"slow enough to prove something: {took:.2f} s")
        expect(same_bits(received, payload), "whole and undamaged")

    harness.run(2, scenario, rate=50_000)


def a_stalled_transfer_fails_at_both_ends(harness: Harness) -> None:
    """A link that lets nothing through for the keepalive fails what is on it, and nothing more."""

    async def scenario(ends: Endpoints) -> None:
        transfer = ends[0].send(1, TAG, numbers(50_000))
        waiting = start(fate(ends[1].recv(0, TAG, PATIENCE_S)))
        await ends.under_way(0, 1, TAG)
        begun = ends.now()
        ends.cut(0, 1)
        bystander = ends[2].send(1, TAG, torch.ones(3))
        await ends[1].recv(2, TAG, PATIENCE_S)
        await bystander.delivered()
        await expect_error(transfer.delivered(), LinkFailed, "the sender's end")
        expect(isinstance(await waiting, LinkFailed), "the receiver's end")
        took = ends.now() - begun
        expect(0.5 * ends.keepalive_s < took < 3 * ends.keepalive_s, f"by keepalive: {took:.2f} s")
        ends.restore(0, 1)
        tag = await _deliver(ends, TAG._replace(attempt=1))
        await ends[1].recv(0, tag, PATIENCE_S)

    harness.run(3, scenario, rate=100_000)


def what_is_sent_into_a_cut_link_fails_at_both_ends(harness: Harness) -> None:
    """Who waits for it is told as well, though nothing of it ever comes, and long before it would
    have lost its patience.
    """

    async def scenario(ends: Endpoints) -> None:
        for src, dst in ((0, 1), (1, 0)):  # they know each other
            await ends[src].send(dst, TAG, torch.ones(3)).delivered()
            await ends[dst].recv(src, TAG, PATIENCE_S)
        begun = ends.now()
        ends.cut(0, 1)
        tag = TAG._replace(attempt=1)
        transfer = ends[0].send(1, tag, numbers(25_000))
        waiting = start(fate(ends[1].recv(0, tag, 1000 * ends.keepalive_s)))
        bystander = start(ends[1].recv(2, tag, PATIENCE_S))
        await expect_error(transfer.delivered(), LinkFailed, "the sender's end")
        expect(isinstance(await waiting, LinkFailed), "the receiver's end")
        took = ends.now() - begun
        expect(took < 3 * ends.keepalive_s, f"by keepalive: {took:.2f} s")
        await ends[2].send(1, tag, torch.ones(3)).delivered()
        await bystander
        ends.restore(0, 1)
        tag = await _deliver(ends, tag._replace(attempt=2))
        await ends[1].recv(0, tag, PATIENCE_S)

    harness.run(3, scenario, rate=100_000)


async def _deliver(ends: Endpoints, tag: Tag) -> Tag:
    """Send until it arrives: a connection that has broken takes a moment to come back."""
    for _ in range(5):
        if await fate(ends[0].send(1, tag, torch.ones(3)).delivered()) is None:
            break
        tag = tag._replace(attempt=tag.attempt + 1)
    return tag


def a_short_cut_is_survived(harness: Harness) -> None:
    """A link that comes back within the keepalive has failed nothing."""

    async def scenario(ends: Endpoints) -> None:
        payload = numbers(25_000)
        transfer = ends[0].send(1, TAG, payload)
        await ends.under_way(0, 1, TAG)
        ends.cut(0, 1)
        await asyncio.sleep(ends.keepalive_s / 4)
        ends.restore(0, 1)
        received = await ends[1].recv(0, TAG, PATIENCE_S)
        await transfer.delivered()
        expect(same_bits(received, payload), "whole and undamaged")

    harness.run(2, scenario, rate=100_000)


# ------------------------------------------------------------------------------------ gone and back


def a_lost_peer_fails_everything_at_once(harness: Harness) -> None:
    """What waits for a peer that is gone, and what is on its way to and from it, is `PeerLost`."""

    async def scenario(ends: Endpoints) -> None:
        slow = numbers(100_000)
        to_it = ends[0].send(1, TAG, slow)
        from_it = Tag("mix2", 0)
        ends[1].send(0, from_it, slow)
        waiting = [start(fate(ends[0].recv(1, tag, PATIENCE_S))) for tag in (TAG, from_it)]
        bystander = ends[0].send(2, TAG, slow)
        await ends.under_way(0, 1, TAG)
        await ends.under_way(1, 0, from_it)
        begun = ends.now()
        await ends.kill(1)
        await expect_error(to_it.delivered(), PeerLost, "on its way to it")
        expect(isinstance(await waiting[0], PeerLost), "waited for, nothing on its way")
        expect(isinstance(await waiting[1], PeerLost), "waited for, and on its way")
        later = TAG._replace(part=1)
        await expect_error(ends[0].recv(1, later, PATIENCE_S), PeerLost, "waited for afterwards")
        await expect_error(ends[0].send(1, later, slow).delivered(), PeerLost, "sent afterwards")
        expect(ends.now() - begun < ends.keepalive_s / 2, "at once")
        await ends[2].recv(0, TAG, PATIENCE_S)
        await bystander.delivered()

    harness.run(3, scenario, rate=400_000)


def what_was_delivered_outlives_its_sender(harness: Harness) -> None:
    """A message that had been delivered can still be taken when its sender is gone."""

    async def scenario(ends: Endpoints) -> None:
        await ends[1].send(0, TAG, torch.ones(3)).delivered()
        await ends.kill(1)
        received = await ends[0].recv(1, TAG, PATIENCE_S)
        expect(received.tolist() == [1, 1, 1], "what had been delivered")

    harness.run(2, scenario)


def a_peer_comes_back(harness: Harness) -> None:
    """A worker that returns has an empty mailbox, and is spoken with as before."""

    async def scenario(ends: Endpoints) -> None:
        await ends[0].send(1, TAG, torch.ones(3)).delivered()
        await ends.kill(1)
        await ends.revive(1)
        await expect_error(ends[1].recv(0, TAG, 0.05), TimedOut, "an empty mailbox")
        for attempt in (1, 2):
            tag = TAG._replace(attempt=attempt)
            transfers = [ends[i].send(1 - i, tag, torch.tensor([i])) for i in range(2)]
            for i in range(2):
                received = await ends[i].recv(1 - i, tag, PATIENCE_S)
                expect(received.item() == 1 - i, "there and back")
                await transfers[i].delivered()

    harness.run(2, scenario)
