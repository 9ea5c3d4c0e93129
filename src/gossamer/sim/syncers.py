"""Syncers of a simulated world: processes beside the workers that train nothing.

They are in no membership, and nobody waits for them at a boundary. One that dies comes back with
the state of its last checkpoint and an empty mailbox. They end when the workers have ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gossamer.comm.context import MethodState
from gossamer.errors import RunFailed
from gossamer.sim.clock import sleep_until_ns
from gossamer.sim.context import SimContext, WorkerStats
from gossamer.sim.faults import Crash

if TYPE_CHECKING:
    from gossamer.sim.world import World


class Syncers:
    """All syncers of a run, at the places after the workers'."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self.places = tuple(range(world.num_workers, world.num_workers + count))
        self.states: dict[int, MethodState] = {}  # as at the last checkpoint
        self.stats = {place: WorkerStats() for place in self.places}

    def start(self) -> list[asyncio.Task[None]]:
        """Begin their lives."""
        loop = self._world.loop
        return [loop.create_task(self._live(p), name=f"syncer-{p}") for p in self.places]

    def checkpoint(self, place: int, state: MethodState) -> None:
        """Keep the state; a syncer changes it only between this call and the last `await`."""
        self.states[place] = state

    async def _live(self, place: int) -> None:
        world = self._world
        self.states[place] = world.method.init_syncer(world.replicas[place], world.num_workers)
        while True:
            crash = await self._run(place)
            world.syncer_down(place, crash)
            if crash.return_ns is None:
                return
            await sleep_until_ns(crash.return_ns)
            world.syncer_back(place)

    async def _run(self, place: int) -> Crash:
        """Until it crashes."""
        world = self._world
        ctx = SimContext(world, place, world.replicas[place], self.stats[place])
        crash = world.plan.next_crash(place, world.loop.time_ns())
        crashed: list[Crash] = []
        work = world.method.run_syncer(ctx, self.states[place])
        task = world.loop.create_task(work, name=f"method-{place}")
        timer: asyncio.Handle | None = None
        if crash is not None:
            timer = world.loop.call_at_ns(crash.at_ns, _crash, task, crashed, crash)
        try:
            await task
        except asyncio.CancelledError:
            if not crashed:
                task.cancel()
                raise
            return crashed[0]
        finally:
            if timer is not None:
                timer.cancel()
        raise RunFailed(f"the syncer of {world.method.name} has ended by itself")


def _crash(task: asyncio.Task[None], crashed: list[Crash], crash: Crash) -> None:
    crashed.append(crash)
    task.cancel()
