"""What a running worker does for those that join: it hands them its state, or says that it cannot.

The coordinator names a donor and a round. News may be late: a donor that has passed that boundary
already says so at once, because the round may wait for the joiner, and the joiner for its donor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from gossamer.cluster.messages import Entry, View
from gossamer.comm.context import Context, MethodState, Tag
from gossamer.comm.donation import Donation, Moments, donate, pack
from gossamer.errors import OutOfSync


def join_tag(entry: Entry) -> Tag:
    """The stem of the tags of one donation."""
    return Tag("join", entry.round, step=entry.attempt)


class Donor:
    """One worker as donor.

    Args:
        worker: its index.
        moments: whose inner moments a joiner takes.
        reassign: asks the coordinator for another donor, with an entry and the reason.
    """

    def __init__(
        self, worker: int, moments: Moments, reassign: Callable[[Entry, str], Awaitable[None]]
    ) -> None:
        self._worker, self._moments, self._reassign = worker, moments, reassign
        self._passed = -1  # the newest boundary at which joiners were served
        self._served: set[Entry] = set()  # membership tests only
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """The worker enters the run, perhaps again and at an earlier round."""
        self._passed = -1

    def at_boundary(self, ctx: Context, state: MethodState, view: View) -> None:
        """Hand the state of this boundary, copied, to those who are to have it."""
        for entry in self._asked(view):
            if entry.round == state.rounds_completed:
                donation = pack(ctx.replica, state, self._moments)
                self._start(entry, self._give(ctx, entry, donation))
        self._passed = state.rounds_completed
        self.at_news(view)

    def at_news(self, view: View) -> None:
        """Decline what a newer view asks too late."""
        for entry in self._asked(view):
            if entry.round <= self._passed:
                reason = f"worker {self._worker} had passed round {entry.round} already"
                self._start(entry, self._decline(entry, reason))
        self._served &= set(view.entries)

    async def finish(self) -> None:
        """Wait for what is on its way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Give up what is on its way."""
        for task in self._tasks:
            task.cancel()

    def _asked(self, view: View) -> list[Entry]:
        mine = [e for e in view.entries if e.start == "donor" and e.donor == self._worker]
        return [entry for entry in mine if entry not in self._served]

    def _start(self, entry: Entry, work: Coroutine[Any, Any, None]) -> None:
        """In the background: the coordinator or the joiner may be away."""
        self._served.add(entry)
        task = asyncio.create_task(work, name=f"donor of worker {entry.worker}")
        self._tasks = [t for t in self._tasks if not t.done()] + [task]

    async def _give(self, ctx: Context, entry: Entry, donation: Donation) -> None:
        if not await donate(ctx, entry.worker, join_tag(entry), donation):
            await self._decline(entry, f"worker {self._worker} cannot reach the joiner")

    async def _decline(self, entry: Entry, reason: str) -> None:
        with suppress(OutOfSync):
            await self._reassign(entry, reason)
