"""One worker's meetings of a round, held by a task beside its steps."""

from __future__ import annotations

import asyncio
import math

from torch import Tensor

from gossamer.comm.coding import AS_IS, Coding
from gossamer.comm.collectives import shown
from gossamer.comm.context import Context, Round
from gossamer.comm.neighbours import exchange
from gossamer.mixing.meetings import Meeting, meetings_of_round
from gossamer.mixing.topologies import Topology


class Progress:
    """How far one task of a worker is, for others of it that wait for it."""

    def __init__(self) -> None:
        self.value = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def advance(self) -> None:
        """It is one further."""
        self.value += 1
        waiting, self._waiting = self._waiting, []
        for target, waiter in waiting:
            if target > self.value:
                self._waiting.append((target, waiter))
            elif not waiter.done():
                waiter.set_result(None)

    async def reach(self, value: int) -> None:
        """Wait until it is at `value` or beyond."""
        if self.value >= value:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((value, waiter))
        await waiter


class Meetings:
    """Keeps steps and meetings of one worker in their places in time, each in a task of its own.

        for meeting in meetings.mine:                     for step in range(num_steps):
            await meetings.due(meeting)                       gradient = await ctx.gradient()
            theirs = await meetings.swap(meeting, mine)       await meetings.settled(step)
            ...                                               ...
            meetings.held()                                   meetings.stepped()

    The time between step h and step h + 1, both counted from 1, is [h, h + 1).

    Args:
        kind: what the bytes are for, in the ledger.
        topology: who may meet; a fixed graph.
        rate: meetings of a worker per step, on average.
        num_steps: of the round.
        coding: how vectors are sent.
    """

    def __init__(
        self,
        ctx: Context,
        round_: Round,
        kind: str,
        *,
        topology: Topology,
        rate: float,
        num_steps: int,
        coding: Coding = AS_IS,
    ) -> None:
        self._ctx, self._round, self._kind, self._coding = ctx, round_, kind, coding
        members = round_.members.workers
        meetings = meetings_of_round(
            topology.edges(ctx.seed, round_.index, members),
            seed=ctx.seed,
            round_index=round_.index,
            num_workers=len(members),
            num_steps=num_steps,
            rate=rate,
        )
        self.mine = tuple(m for m in meetings if ctx.worker in (m.first, m.second))
        # A time may be rounded up to the round's end.
        self._after = [min(math.floor(m.time), num_steps - 1) for m in self.mine]
        self._steps, self._held = Progress(), Progress()
        self._present = round_.members

    async def due(self, meeting: Meeting) -> None:
        """Wait until the steps before this meeting's time are done. In the order of `mine`."""
        await self._steps.reach(self._after[self._held.value])

    async def swap(self, meeting: Meeting, values: Tensor) -> Tensor | None:
        """The partner's vector, where both ends have the other's; None where neither shall use it.

        With a codec it is as it looks from here: mine, and the difference that payloads tell of.

        Args:
            values: mine, contiguous; not written to meanwhile.

        Raises `NonFiniteError` where `values` are not finite; nothing was sent.
        """
        mine = shown(self._ctx, values, self._coding, f"{self._kind} vector")
        partner = meeting.partner_of(self._ctx.worker)
        if partner not in self._present:
            self._ctx.record("skipped_meetings", 1.0)
            return None
        tag = self._round.tag(self._kind, step=meeting.serial)
        received = await exchange(self._ctx, tag, mine, [partner])
        if partner not in received:  # who is gone need not be waited for again
            self._present = self._ctx.refresh_members(self._round).members
        return received.get(partner)

    def held(self) -> None:
        """The next of `mine` is over."""
        self._held.advance()

    def stepped(self) -> None:
        """Another step is done."""
        self._steps.advance()

    async def settled(self, step: int) -> None:
        """Wait until all meetings are over whose time is before the end of this step (0-based)."""
        await self._held.reach(sum(after <= step for after in self._after))
