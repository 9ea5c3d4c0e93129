"""How a worker that comes back gets a state: from a donor, at the boundary it will start from.

The donor is a member that runs, never one that is itself still joining; several joiners are spread
over several donors. The state travels over the network like everything else and is charged.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gossamer.comm.context import MethodState, Tag
from gossamer.comm.donation import Moments, accept, donate, pack
from gossamer.sim.context import SimContext

if TYPE_CHECKING:
    from gossamer.sim.world import World


@dataclass(eq=False)
class Join:
    """One joiner on its way in."""

    worker: int
    donor: int
    activation: int  # the first round it takes part in
    served: asyncio.Future[bool]  # True: the donor sends; False: it is gone, or has passed already


class Joins:
    """All joiners of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: dict[int, Join] = {}
        self._transfers: list[asyncio.Task[bool]] = []
        self.attempts = [0] * world.num_workers

    async def join(self, worker: int) -> tuple[SimContext, MethodState] | None:
        """Take a donor's state; None where the run ends before this worker could take part."""
        world = self._world
        while True:
            join = self._ask(worker)
            if join is None:
                return None
            entry = await self._receive(join) if await join.served else None
            self._pending.pop(worker, None)
            if entry is not None:
                return entry
            # The donor is gone or its link is; nobody shall wait for us in the meantime.
            world.members.remove(worker)
            world.post.kill(worker)
            world.post.revive(worker)
            world.cuts.member_gone()

    def _ask(self, worker: int) -> Join | None:
        """Choose a donor and the round to start from."""
        world = self._world
        donor = self._choose_donor()
        if donor is None or world.members.newest_started + 1 >= world.num_rounds:
            return None
        join = Join(worker, donor, world.members.add(worker), world.loop.create_future())
        self._pending[worker] = join
        self.attempts[worker] += 1
        return join

    def _choose_donor(self) -> int | None:
        """The running worker with the fewest joiners, the lowest index among equals."""
        running = [w for w, life in enumerate(self._world.lives) if life.phase == "running"]
        load = [sum(j.donor == w for j in self._pending.values()) for w in running]
        return min(zip(load, running, strict=True))[1] if running else None

    def donor_gone(self, worker: int) -> None:
        """Joiners that waited for this donor look for another."""
        for join in list(self._pending.values()):
            if join.donor == worker and not join.served.done():
                join.served.set_result(False)

    def serve(self, ctx: SimContext, state: MethodState) -> None:
        """A worker at a boundary hands its state to the joiners that it is the donor of."""
        for join in list(self._pending.values()):
            due = join.donor == ctx.worker and join.activation <= state.rounds_completed
            if not due or join.served.done():
                continue
            if join.activation < state.rounds_completed:
                join.served.set_result(False)  # passed it before the joiner asked: ask again
                continue
            join.served.set_result(True)
            donation = pack(ctx.replica, state, self._moments)
            tag = self._tag(join)
            transfer = self._world.loop.create_task(
                donate(ctx, join.worker, tag, donation), name="donor"
            )
            transfer.add_done_callback(_raise_error)
            self._transfers.append(transfer)

    @property
    def _moments(self) -> Moments:
        """Whose inner moments a joiner goes on with."""
        if self._world.method.moments_are_shared:
            return "donor"
        return self._world.settings.faults.rejoin_moments

    def _tag(self, join: Join) -> Tag:
        return Tag("join", join.activation, step=self.attempts[join.worker])

    async def _receive(self, join: Join) -> tuple[SimContext, MethodState] | None:
        """Take the donor's state; None where it does not come."""
        world, worker = self._world, join.worker
        ctx = world.new_context(worker)
        blank = world.method.init(ctx.replica)
        state = await accept(ctx, join.donor, self._tag(join), blank, self._moments)
        if state is None:
            return None
        world.entered(worker, ctx)
        fields = {"worker": worker, "donor": join.donor, "round": join.activation}
        world.emit("joined", {**fields, "time_s": world.loop.time()})
        return ctx, state

    def close(self) -> None:
        """The run is over."""
        for task in self._transfers:
            task.cancel()


def _raise_error(task: asyncio.Task[bool]) -> None:
    """A donor's background work that fails is a fault of ours: end the run with it."""
    if not task.cancelled():
        task.result()
