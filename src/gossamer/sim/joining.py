"""How a worker that comes back gets a state: from a donor, at the boundary it will start from.

The donor is a member that runs, never one that is itself still joining; several joiners are spread
over several donors. The state travels over the network like everything else and is charged.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.comm.collectives import recv_until_delivered, send_until_delivered
from gossamer.comm.context import MethodState, Tag
from gossamer.comm.state import state_scalars, state_tensors, with_tensors
from gossamer.sim.context import SimContext

if TYPE_CHECKING:
    from gossamer.sim.world import World


@dataclass(eq=False)
class Join:
    """One joiner on its way in."""

    worker: int
    donor: int
    activation: int  # the first round it takes part in
    served: asyncio.Future[dict[str, Any] | None]  # the donor's scalars; None: the donor is gone


class Joins:
    """All joiners of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: dict[int, Join] = {}
        self._transfers: list[asyncio.Task[None]] = []
        self.attempts = [0] * world.num_workers

    async def join(self, worker: int) -> tuple[SimContext, MethodState] | None:
        """Take a donor's state; None where the run ends before this worker could take part."""
        world = self._world
        while True:
            join = self._ask(worker)
            if join is None:
                return None
            scalars = await join.served
            entry = None if scalars is None else await self._receive(join, scalars)
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
                join.served.set_result(None)

    def serve(self, ctx: SimContext, state: MethodState) -> None:
        """A worker at a boundary hands its state to the joiners that it is the donor of."""
        for join in list(self._pending.values()):
            due = join.donor == ctx.worker and join.activation <= state.rounds_completed
            if not due or join.served.done():
                continue
            if join.activation < state.rounds_completed:
                join.served.set_result(None)  # passed it before the joiner asked: ask again
                continue
            tensors = [tensor.clone() for tensor in self._tensors(ctx, state)]
            replica = ctx.replica
            join.served.set_result(
                {
                    "state": state_scalars(state),
                    "steps_completed": replica.steps_completed,
                    "learning_rate": replica.learning_rate,
                }
            )
            transfer = self._world.loop.create_task(self._send(ctx, join, tensors), name="donor")
            transfer.add_done_callback(_raise_error)
            self._transfers.append(transfer)

    @property
    def _policy(self) -> str:
        """Whose inner moments a joiner goes on with."""
        if self._world.method.moments_are_shared:
            return "donor"
        return self._world.settings.faults.rejoin_moments

    def _tag(self, join: Join, part: int) -> Tag:
        return Tag("join", join.activation, step=self.attempts[join.worker], part=part)

    def _tensors(self, ctx: SimContext, state: MethodState) -> list[Tensor]:
        replica = ctx.replica
        tensors = [replica.parameters, replica.buffers, replica.counters.to(replica.buffers.dtype)]
        tensors += state_tensors(state).values()
        if self._policy == "donor" and replica.optimizer is not None:
            tensors += replica.optimizer.state_tensors().values()
        return tensors

    async def _send(self, ctx: SimContext, join: Join, tensors: list[Tensor]) -> None:
        for part, tensor in enumerate(tensors):
            small = tensor.numel() < ctx.replica.layout.numel  # stands for nothing larger
            tag = self._tag(join, part)
            await send_until_delivered(ctx, join.worker, tag, tensor, exact=small)

    async def _receive(
        self, join: Join, scalars: dict[str, Any]
    ) -> tuple[SimContext, MethodState] | None:
        """Take the donor's tensors, in the order of `_tensors`; None where one is missing."""
        world, worker = self._world, join.worker
        replica = world.replicas[worker]
        ctx = world.new_context(worker)
        blank = world.method.init(replica)
        names = list(state_tensors(blank))
        donor = world.replicas[join.donor]
        moments: list[str] = []
        if self._policy == "donor" and donor.optimizer is not None:
            moments = list(donor.optimizer.state_tensors())
        received: list[Tensor] = []
        for part in range(3 + len(names) + len(moments)):
            tensor = await recv_until_delivered(ctx, join.donor, self._tag(join, part))
            if tensor is None:
                return None
            received.append(tensor)
        replica.parameters.copy_(received[0])
        replica.buffers.copy_(received[1])
        replica.counters.copy_(received[2])
        replica.steps_completed = scalars["steps_completed"]
        replica.learning_rate = scalars["learning_rate"]
        if replica.optimizer is not None and self._policy != "keep":
            values = received[3 + len(names) :]
            replica.optimizer.load_state_tensors(dict(zip(moments, values, strict=True)))
        tensors = dict(zip(names, received[3 : 3 + len(names)], strict=True))
        state = with_tensors(type(blank), tensors, scalars["state"])
        world.entered(worker, ctx)
        world.emit(
            "joined",
            {
                "worker": worker,
                "donor": join.donor,
                "round": join.activation,
                "time_s": world.loop.time(),
            },
        )
        return ctx, state

    def close(self) -> None:
        """The run is over."""
        for task in self._transfers:
            task.cancel()


def _raise_error(task: asyncio.Task[None]) -> None:
    """A donor's background work that fails is a fault of ours: end the run with it."""
    if not task.cancelled():
        task.result()
