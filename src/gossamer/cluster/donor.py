"""What a running worker does for those that join: it hands them its state, or says that it cannot.

The coordinator names a donor and a round. News may be late: a donor that has passed that boundary
already says so at once, because the round may wait for the joiner, and the joiner for its donor.

A state is as large as all that the worker holds, and it takes a while to send it. So it lies on
disk meanwhile, where the worker has a folder, and one tensor of it at a time is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.cluster.messages import Entry, View
from gossamer.cluster.tensor_file import Aside
from gossamer.comm.context import Context, MethodState, Tag
from gossamer.comm.donation import Donation, Moments, donate, donated, header_of, pack
from gossamer.errors import OutOfSync
from gossamer.training.replica import Replica


def join_tag(entry: Entry) -> Tag:
    """The stem of the tags of one donation."""
    return Tag("join", entry.round, step=entry.attempt)


class Donor:
    """One worker as donor.

    Args:
        worker: its index.
        moments: whose inner moments a joiner takes.
        reassign: asks the coordinator for another donor, with an entry and the reason.
        thread: copies states, beside the event loop.
        folder: for states on their way; None: they stay in memory.
    """

    def __init__(
        self,
        worker: int,
        moments: Moments,
        reassign: Callable[[Entry, str], Awaitable[None]],
        *,
        thread: Executor,
        folder: Path | None,
    ) -> None:
        self._worker, self._moments, self._reassign = worker, moments, reassign
        self._thread, self._folder = thread, folder
        self._passed = -1  # the newest boundary at which joiners were served
        self._served: set[Entry] = set()  # membership tests only
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """The worker enters the run, perhaps again and at an earlier round."""
        self._passed = -1

    async def at_boundary(
        self, ctx: Context, state: MethodState, newest: Callable[[], View]
    ) -> None:
        """Hand the state of this boundary, copied, to those who are to have it.

        Args:
            newest: gives the newest view; more may ask while the state is copied.
        """
        donation: Donation | None = None
        while due := [e for e in self._asked(newest()) if e.round == state.rounds_completed]:
            if donation is None:
                loop = asyncio.get_running_loop()
                work = partial(self._pack, ctx.replica, state)
                donation = await loop.run_in_executor(self._thread, work)
                continue  # with those who have asked meanwhile
            for entry in due:
                self._start(entry, self._give(ctx, entry, donation))
        self._passed = state.rounds_completed
        self.at_news(newest())

    def _pack(self, replica: Replica, state: MethodState) -> Donation:
        """A copy of the state, on disk where there is room for it."""
        if self._folder is None:
            return pack(replica, state, self._moments)
        named = donated(replica, state, self._moments)
        try:
            aside = Aside(self._folder, list(named.values()))
        except OSError:  # full, which the next checkpoint will say; a joiner need not wait for it
            return pack(replica, state, self._moments)
        parts = [partial(aside.read, index) for index in range(len(named))]
        return Donation(header_of(replica, state, named), parts)

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
        try:
            given = await donate(ctx, entry.worker, join_tag(entry), donation)
            reason = "cannot reach the joiner"
        except OSError as error:  # of what was put aside
            given, reason = False, f"has lost the state: {error}"
        if not given:
            await self._decline(entry, f"worker {self._worker} {reason}")

    async def _decline(self, entry: Entry, reason: str) -> None:
        with suppress(OutOfSync):
            await self._reassign(entry, reason)
