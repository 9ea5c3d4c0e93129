"""One suite of checks that every transport passes: the rules of `gossamer.comm.transport`.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_transport_keeps_the_rules(check):
        check(MyHarness())

A harness starts endpoints, runs a coroutine on them, and can hurt them. Checks wait for events;
where a rule speaks of time they use `keepalive_s` of the harness, in the transport's own time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.comm.context import Tag, Transfer
from gossamer.errors import LinkFailed, OutOfSync, PayloadCorrupt, TimedOut
from gossamer.testing.conformance_faults import (
    a_lost_peer_fails_everything_at_once,
    a_peer_comes_back,
    a_short_cut_is_survived,
    a_stalled_transfer_fails_at_both_ends,
    progress_is_not_timed_out,
    what_is_sent_into_a_cut_link_fails_at_both_ends,
    what_was_delivered_outlives_its_sender,
)
from gossamer.testing.harness import (
    PATIENCE_S,
    Endpoints,
    Harness,
    expect,
    expect_error,
    fate,
    numbers,
    payloads,
    same_bits,
    start,
)

TAG = Tag("mix1", 0)

# --------------------------------------------------------------- once, whole, undamaged, untouched


def messages_arrive_whole(harness: Harness) -> None:
    """Every dtype and shape arrives bit for bit, sent before or after the receiver waits."""

    async def scenario(ends: Endpoints) -> None:
        for part, payload in enumerate(payloads()):
            for attempt, late in enumerate((True, False)):
                tag = TAG._replace(part=part, attempt=attempt)
                if late:
                    transfer = ends[0].send(1, tag, payload)
                    await transfer.delivered()
                    received = await ends[1].recv(0, tag, PATIENCE_S)
                else:
                    waiting = start(ends[1].recv(0, tag, PATIENCE_S))
                    await asyncio.sleep(0)
                    await ends[0].send(1, tag, payload).delivered()
                    received = await waiting
                expect(same_bits(received, payload), f"whole and undamaged: {payload.dtype}")

    harness.run(2, scenario)


def large_payloads_arrive_whole(harness: Harness) -> None:
    """Payloads of many pieces, of lengths around the pieces' sizes, both ways at once."""

    async def scenario(ends: Endpoints) -> None:
        for part, size in enumerate((1 << 18, (1 << 18) + 1, (1 << 19) - 1, 700_001)):
            tag = TAG._replace(part=part)
            values = [numbers(size, seed) for seed in range(2)]
            transfers = [ends[i].send(1 - i, tag, values[i]) for i in range(2)]
            for i in range(2):
                received = await ends[i].recv(1 - i, tag, PATIENCE_S)
                expect(same_bits(received, values[1 - i]), f"{size} elements, whole and undamaged")
            for transfer in transfers:
                await transfer.delivered()

    harness.run(2, scenario)


def known_by_sender_and_tag(harness: Harness) -> None:
    """Messages are told apart by sender and by every field of the tag, in any order."""

    async def scenario(ends: Endpoints) -> None:
        tags = [TAG, *_VARIANTS]
        for src in (1, 2):
            for index, tag in enumerate(tags):
                ends[src].send(0, tag, torch.tensor([src, index]), exact=True)
        for index, tag in reversed(list(enumerate(tags))):
            for src in (2, 1):
                received = await ends[0].recv(src, tag, PATIENCE_S)
                expect(received.tolist() == [src, index], f"{tag} of worker {src}")

    harness.run(3, scenario)


# What belongs to a later step or round comes last, and is asked for first: otherwise the receiver
# would have been left behind.
_VARIANTS = (
    TAG._replace(phase=1),
    TAG._replace(part=1),
    TAG._replace(attempt=1),
    TAG._replace(epoch=1),
    Tag("mix2", 0),
    TAG._replace(step=1),
    Tag("mix1", 1),
)


def delivered_once(harness: Harness) -> None:
    """What was taken is not there a second time."""

    async def scenario(ends: Endpoints) -> None:
        await ends[0].send(1, TAG, torch.ones(3)).delivered()
        await ends[1].recv(0, TAG, PATIENCE_S)
        await expect_error(ends[1].recv(0, TAG, 0.05), TimedOut, "delivered once")

    harness.run(2, scenario)


def the_receiver_owns_what_it_gets(harness: Harness) -> None:
    """After delivery the sender may write to its payload, the receiver to what it got."""

    async def scenario(ends: Endpoints) -> None:
        payload = numbers(1000)
        kept = payload.clone()
        await ends[0].send(1, TAG, payload).delivered()
        payload.zero_()
        received = await ends[1].recv(0, TAG, PATIENCE_S)
        expect(same_bits(received, kept), "delivered is delivered, whatever the sender does then")
        received.fill_(5)
        expect(not bool(payload.any()), "the receiver's tensor is its own")

    harness.run(2, scenario)


def send_returns_at_once(harness: Harness) -> None:
    """`send` waits for nobody, and many messages between all pairs get through."""

    async def scenario(ends: Endpoints) -> None:
        pairs = [(src, dst) for src in range(3) for dst in range(3) if src != dst]
        sent: list[tuple[int, int, Tag, Tensor, Transfer]] = []
        for src, dst in pairs:
            for part in range(8):
                tag, payload = TAG._replace(part=part), numbers(500, seed=src * 8 + part)
                sent.append((src, dst, tag, payload, ends[src].send(dst, tag, payload)))
        for src, dst, tag, payload, transfer in sent:
            expect(
                same_bits(await ends[dst].recv(src, tag, PATIENCE_S), payload), "each in its place"
            )
            await transfer.delivered()

    harness.run(3, scenario)


def untaken_messages_block_nobody(harness: Harness) -> None:
    """However much lies untaken, what somebody waits for gets through; nothing is lost."""

    async def scenario(ends: Endpoints) -> None:
        tags = [TAG._replace(part=part) for part in range(12)]
        values = [numbers(50_000, seed) for seed in range(12)]
        transfers = [ends[0].send(1, tag, value) for tag, value in zip(tags, values, strict=True)]
        for index in (11, 5, 0):
            received = await ends[1].recv(0, tags[index], PATIENCE_S)
            expect(same_bits(received, values[index]), "the awaited one passes the others")
        control = ends[0].send(1, Tag("vote", 0), torch.ones(1), exact=True)
        await ends[1].recv(0, Tag("vote", 0), PATIENCE_S)
        await control.delivered()
        for index in range(12):
            if index not in (11, 5, 0):
                received = await ends[1].recv(0, tags[index], PATIENCE_S)
                expect(same_bits(received, values[index]), "and they come after it")
            await transfers[index].delivered()

    harness.run(2, scenario)


# -------------------------------------------------------------------------- accepted, refused, late


def delivered_means_accepted(harness: Harness) -> None:
    """A receiver that timed out on a message refuses it, and the sender is told."""

    async def scenario(ends: Endpoints) -> None:
        await expect_error(ends[1].recv(0, TAG, 0.05), TimedOut, "nothing came")
        await expect_error(
            ends[0].send(1, TAG, torch.ones(3)).delivered(), LinkFailed, "refused: given up"
        )
        other = TAG._replace(part=1)
        await ends[0].send(1, other, torch.ones(3)).delivered()
        await ends[1].recv(0, other, PATIENCE_S)

    harness.run(2, scenario)


def earlier_rounds_are_refused(harness: Harness) -> None:
    """A new round forgets earlier messages and refuses those that still come; not later ones."""

    async def scenario(ends: Endpoints) -> None:
        await ends[0].send(1, Tag("mix1", 0), torch.ones(3)).delivered()
        await ends[0].send(1, Tag("outer", 2), torch.ones(3)).delivered()
        ends[1].begin_round(1)
        await expect_error(
            ends[0].send(1, Tag("mix2", 0), torch.ones(3)).delivered(), LinkFailed, "too late"
        )
        await expect_error(ends[1].recv(0, Tag("mix1", 0), 0.05), TimedOut, "forgotten")
        await ends[0].send(1, Tag("mix1", 1), torch.ones(3)).delivered()
        await ends[1].recv(0, Tag("mix1", 1), PATIENCE_S)
        await ends[1].recv(0, Tag("outer", 2), PATIENCE_S)
        ends[0].begin_round(5)  # my round says nothing about what I send
        await ends[0].send(1, Tag("mix2", 1), torch.ones(3)).delivered()

    harness.run(2, scenario)


def a_round_that_begins_ends_what_is_under_way(harness: Harness) -> None:
    """A message of an earlier round that is on its way fails at both ends."""

    async def scenario(ends: Endpoints) -> None:
        transfer = ends[0].send(1, TAG, numbers(25_000))
        waiting = start(fate(ends[1].recv(0, TAG, PATIENCE_S)))
        await ends.under_way(0, 1, TAG)
        ends[1].begin_round(1)
        await expect_error(transfer.delivered(), LinkFailed, "the sender is told")
        expect(isinstance(await waiting, LinkFailed), "and so is who waits for it")

    harness.run(2, scenario, rate=100_000)


def a_receiver_that_leaves_loses_nothing(harness: Harness) -> None:
    """A task that is cancelled while it waits takes nothing with it."""

    async def scenario(ends: Endpoints) -> None:
        waiting = start(ends[1].recv(0, TAG, PATIENCE_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await ends[0].send(1, TAG, torch.ones(3)).delivered()
        await ends[1].recv(0, TAG, PATIENCE_S)
        tag = TAG._replace(part=1)
        transfer = ends[0].send(1, tag, torch.ones(3))
        impatient = start(transfer.delivered())
        await asyncio.sleep(0)
        impatient.cancel()
        await ends[1].recv(0, tag, PATIENCE_S)

    harness.run(2, scenario)


def who_was_left_behind_is_told(harness: Harness) -> None:
    """A message that its sender will never send is not waited for: it has gone on."""

    async def scenario(ends: Endpoints) -> None:
        waiting = start(fate(ends[1].recv(0, TAG, PATIENCE_S)))
        other = start(ends[1].recv(0, Tag("mix2", 0), PATIENCE_S))
        await asyncio.sleep(0)
        await ends[0].send(1, TAG._replace(step=1), torch.ones(3)).delivered()
        expect(isinstance(await waiting, OutOfSync), "while it waits")
        await ends[0].send(1, Tag("mix1", 1), torch.ones(3)).delivered()
        later = ends[1].recv(0, TAG._replace(step=2), PATIENCE_S)
        await expect_error(later, OutOfSync, "when it begins to wait")
        await ends[0].send(1, Tag("mix2", 0), torch.ones(3)).delivered()
        await other  # other kinds have an order of their own
        await ends[1].recv(0, TAG._replace(step=1), PATIENCE_S)
        await ends[1].recv(0, Tag("mix1", 1), PATIENCE_S)

    harness.run(2, scenario)


# --------------------------------------------------------------------------------------- cancelled


def cancel_on_the_way(harness: Harness) -> None:
    """What is cancelled on its way is never taken; the payload is the sender's at once."""

    async def scenario(ends: Endpoints) -> None:
        payload = numbers(25_000)
        transfer = ends[0].send(1, TAG, payload)
        waiting = start(fate(ends[1].recv(0, TAG, PATIENCE_S)))
        await ends.under_way(0, 1, TAG)
        transfer.cancel()
        payload.fill_(float("nan"))  # would be refused if it were still read, and is not
        expect(isinstance(await waiting, LinkFailed), "the receiver is told")
        await expect_error(transfer.delivered(), LinkFailed, "and who asks for its fate")
        transfer.cancel()

    harness.run(2, scenario, rate=100_000)


def cancel_before_it_left(harness: Harness) -> None:
    """What is cancelled in the instant of sending is never taken."""

    async def scenario(ends: Endpoints) -> None:
        transfer = ends[0].send(1, TAG, torch.ones(3))
        transfer.cancel()
        await expect_error(transfer.delivered(), LinkFailed, "given up")
        await expect_error(
            ends[1].recv(0, TAG, 0.05), (LinkFailed, TimedOut), "nothing comes of it"
        )

    harness.run(2, scenario)


def cancel_in_the_mailbox(harness: Harness) -> None:
    """What lies in the receiver's mailbox is withdrawn; what it has taken is not."""

    async def scenario(ends: Endpoints) -> None:
        transfer = ends[0].send(1, TAG, torch.ones(3))
        await transfer.delivered()
        transfer.cancel()
        await expect_error(transfer.delivered(), LinkFailed, "withdrawn")
        await expect_error(ends[1].recv(0, TAG, 0.05), LinkFailed, "never taken afterwards")
        tag = TAG._replace(part=1)
        transfer = ends[0].send(1, tag, torch.ones(3))
        await ends[1].recv(0, tag, PATIENCE_S)
        await transfer.delivered()
        transfer.cancel()
        expect(await fate(transfer.delivered()) is None, "what was taken stays delivered")

    harness.run(2, scenario)


# --------------------------------------------------------------------------------------- not finite


def payloads_must_be_finite(harness: Harness) -> None:
    """NaN and infinity are refused at both ends, unless the payload is exact or has none."""

    async def scenario(ends: Endpoints) -> None:
        part = 0
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for value in (float("nan"), float("inf"), float("-inf")):
                part += 1
                tag, payload = TAG._replace(part=part), torch.ones(1000, dtype=dtype)
                payload[part * 37 % 1000] = value
                transfer = ends[0].send(1, tag, payload)
                rule = f"{value} in {dtype}"
                await expect_error(ends[1].recv(0, tag, PATIENCE_S), PayloadCorrupt, rule)
                await expect_error(transfer.delivered(), PayloadCorrupt, rule)
                tag = tag._replace(attempt=1)
                exact = ends[0].send(1, tag, payload, exact=True)
                expect(same_bits(await ends[1].recv(0, tag, PATIENCE_S), payload), "exact: as is")
                await exact.delivered()
        # A sum that overflows is not a value that is infinite.
        large = torch.full((1000,), torch.finfo(torch.float32).max)
        await ends[0].send(1, Tag("mix2", 0), large).delivered()

    harness.run(2, scenario)


CHECKS: tuple[Callable[[Harness], None], ...] = (
    messages_arrive_whole,
    large_payloads_arrive_whole,
    known_by_sender_and_tag,
    delivered_once,
    the_receiver_owns_what_it_gets,
    send_returns_at_once,
    untaken_messages_block_nobody,
    delivered_means_accepted,
    earlier_rounds_are_refused,
    a_round_that_begins_ends_what_is_under_way,
    a_receiver_that_leaves_loses_nothing,
    who_was_left_behind_is_told,
    cancel_on_the_way,
    cancel_before_it_left,
    cancel_in_the_mailbox,
    progress_is_not_timed_out,
    a_stalled_transfer_fails_at_both_ends,
    what_is_sent_into_a_cut_link_fails_at_both_ends,
    a_short_cut_is_survived,
    a_lost_peer_fails_everything_at_once,
    what_was_delivered_outlives_its_sender,
    a_peer_comes_back,
    payloads_must_be_finite,
)
"""All of them; a transport conforms when none raises."""
