"""The simulated world: M workers on one virtual clock, their lives, and who takes part.

A worker's life: enter (fresh, resumed, or with a donor's state), run the method, and finish, crash,
or find itself out of step. Those who come back take a donor's state before they train anything.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.context import MethodState
from gossamer.comm.ledger import Ledger
from gossamer.comm.members import MemberLog
from gossamer.errors import (
    Interrupted,
    NonFiniteError,
    OutOfSync,
    RunFailed,
)
from gossamer.measure.consensus import l2_consensus
from gossamer.measure.settings import Measure
from gossamer.methods.base import Method
from gossamer.sim.checkpoint import Saved, SavedWorker
from gossamer.sim.clock import VirtualLoop, sleep_until_ns, to_ns
from gossamer.sim.compute import ComputeModel, Timing
from gossamer.sim.context import SimContext, WorkerStats
from gossamer.sim.cuts import Cuts
from gossamer.sim.faults import Crash, FaultPlan, Faults
from gossamer.sim.joining import Joins
from gossamer.sim.letters import Letters
from gossamer.sim.listener import Listener, StopFlag
from gossamer.sim.lives import Absence, Life
from gossamer.sim.network import Network, SimNetwork
from gossamer.sim.post import Post
from gossamer.sim.syncers import Syncers
from gossamer.sim.trace import Trace
from gossamer.training.engine import Engine

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
DEADLINE_FLOOR_S = 60.0


@dataclass(frozen=True)
class WorldSettings:
    """All that decides what happens in a simulated run."""

    method: Method
    num_workers: int
    num_rounds: int
    seed: int
    network: Network
    timing: Timing
    faults: Faults
    measure: Measure
    checkpoint_every: int | None = None
    checkpoint_dir: Path | None = None


class World:
    """Everything of one simulated run."""

    def __init__(
        self,
        settings: WorldSettings,
        engine: Engine,
        *,
        header: str,
        listener: Listener,
        stop: StopFlag,
        saved: Saved | None = None,
    ) -> None:
        self.settings, self.engine, self.listener, self._stop = settings, engine, listener, stop
        self.method, self.measure, self.timing = settings.method, settings.measure, settings.timing
        self.num_workers, self.num_rounds = settings.num_workers, settings.num_rounds
        self.seed = settings.seed
        # Abstract to the type checker alone: sockets and signals have no place in virtual time.
        self.loop = VirtualLoop(saved.time_ns if saved else 0)  # type: ignore[abstract]
        places = self.num_workers + self.method.num_syncers
        self.plan = FaultPlan(settings.faults, places, self.seed, num_training=self.num_workers)
        self.network = SimNetwork(self.loop, settings.network, places, self.plan, self.seed)
        self.compute = ComputeModel(settings.timing, self.plan, self.num_workers, self.seed)
        self.post = Post(self.loop, self.network, places, self.network.latency_ns)
        self.letters = Letters(self.loop, self.network, places, self.post.is_alive)
        rows, self.replicas = engine.new_replicas(places)
        self.rows = rows[: self.num_workers]
        self.syncers = Syncers(self, self.method.num_syncers)
        self.members = saved.members if saved else MemberLog(tuple(range(self.num_workers)))
        self.header = header
        self.ledger, self.trace = Ledger(), Trace(places, header)
        self.cuts, self.joins = Cuts(self), Joins(self)
        self.lives = [Life() for _ in range(self.num_workers)]
        self.stats = [WorkerStats() for _ in range(self.num_workers)]
        self.contexts: list[SimContext | None] = [None] * self.num_workers
        self.history: list[dict[str, Any]] = list(saved.history) if saved else []
        self.lost: list[dict[str, Any]] = []
        self.deadline_s = settings.network.deadline or self._derived_deadline()
        self._bytes_per_value = DTYPE_BYTES.get(settings.timing.payload_dtype or "")
        self._scale = (settings.timing.parameters or engine.layout.numel) / engine.layout.numel
        self._saved = saved
        self._stop_round: int | None = None
        self._over: asyncio.Future[None] = self.loop.create_future()

    # ------------------------------------------------------------------------------ for contexts

    def charged_bytes(self, payload: Tensor, exact: bool) -> int:
        """What a payload weighs on the wire: its own bytes, or those of what it stands for."""
        if exact:
            return payload.numel() * payload.element_size()
        is_encoded = payload.dtype is torch.uint8  # bytes of a codec are bytes
        width = 1 if is_encoded else self._bytes_per_value or payload.element_size()
        return round(payload.numel() * self._scale) * width

    def _derived_deadline(self) -> float:
        """Patience: three times a round on the slowest worker and link, and a minute."""
        timing, network = self.timing, self.settings.network
        slowest = min(timing.speeds or (1.0,))
        width = DTYPE_BYTES.get(timing.payload_dtype or "fp32", 4)
        model_bytes = int((timing.parameters or self.engine.layout.numel) * width)
        transfer_s = 0.0
        if self.num_workers > 1:
            pairs = [(a, (a + 1) % self.num_workers) for a in range(self.num_workers)]
            pairs += [pair for link in network.pairs for pair in link.directions()]
            transfer_s = max(self.network.estimate_ns(a, b, model_bytes) for a, b in pairs) / 1e9
        return 3 * (self.method.inner_steps * timing.step_time / slowest + 2 * transfer_s) + (
            DEADLINE_FLOOR_S
        )

    def at_boundary(self, ctx: SimContext, state: MethodState) -> None:
        """A worker has reached the boundary before round `state.rounds_completed`."""
        index, worker = state.rounds_completed, ctx.worker
        if self.members.is_gone(worker):
            raise OutOfSync(f"worker {worker} was given up by the others before round {index}")
        if index > self.members.newest_started:
            self.expire_leases()
        if self._stop.requested and self._stop_round is None:
            self._stop_round = max(index, self.members.newest_started + 1)
        if index < self.num_rounds:
            self.members.start(index)
        self.joins.serve(ctx, state)
        self.cuts.pass_boundary(ctx, state)

    def wants_checkpoint(self, index: int) -> bool:
        """Whether the boundary before round `index` is one to save."""
        if self.settings.checkpoint_dir is None or not self.engine.real or self.syncers.places:
            return False
        every = self.settings.checkpoint_every
        return index == self._stop_round or bool(every and index % every == 0)

    def cut_complete(self, index: int, *, written: bool) -> None:
        """All workers have passed the boundary before round `index`."""
        if self._stop_round is not None and index >= self._stop_round and not self._over.done():
            if self.wants_checkpoint(index) and not written and index < self.num_rounds:
                self._stop_round = index + 1  # a boundary that cannot be saved exactly
                return
            saved = " and saved" if written else ""
            self._over.set_exception(
                Interrupted(f"stopped{saved} after round {index} of {self.num_rounds}")
            )

    def before_write(self, worker: int) -> None:
        self.cuts.before_write(worker)

    def after_train(self, ctx: SimContext) -> None:
        self.cuts.after_train(ctx)

    def record(self, round_index: int, name: str, value: float) -> None:
        self.cuts.record(round_index, name, value)

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Report an event; measurements and rounds are the run's history."""
        if kind in ("round", "measure", "joined", "lost"):
            self.history.append({"kind": kind, **fields})
        self.listener.on_event(kind, fields)

    def l2(self, parameters: Tensor) -> float:
        return l2_consensus(parameters)

    def utilization(self) -> float:
        """Training time over elapsed time, mean over workers, up to now."""
        now = self.loop.time_ns()
        shares = []
        for stats in self.stats:
            alive = stats.alive_ns
            if stats.alive_since_ns is not None:
                alive += (stats.finished_ns or now) - stats.alive_since_ns
            if alive:
                shares.append(stats.train_ns / alive)
        return sum(shares) / len(shares) if shares else 0.0

    # -------------------------------------------------------------------------------- membership

    def expire_leases(self) -> None:
        """Give up members that have made no progress within the deadline (a lease by progress).

        Waiting for a peer has a deadline of its own, so who waits has twice as long.
        """
        now = self.loop.time_ns()
        for worker in self.members.present(self.members.newest_started + 1).workers:
            ctx = self.contexts[worker]
            if ctx is None or self.lives[worker].phase != "running":
                continue
            seen = ctx.last_progress_ns
            if ctx.training:
                frozen = self.plan.windows("hang", worker, seen, now + 1)
                covers_now = bool(frozen) and frozen[-1].end_ns > now
                seen = max(seen, frozen[-1].start_ns) if covers_now else now
            if now - seen > to_ns(self.deadline_s) * (2 if ctx.waits else 1):
                self.cuts.disturb()
                self.lives[worker].phase = "expelled"
                reason = "no progress within the deadline"
                self.lost.append(
                    {"worker": worker, "time_s": now / 1e9, "cause": "hang", "reason": reason}
                )
                self._leave(worker, "hang", reason)

    def _leave(self, worker: int, kind: str, reason: str) -> None:
        """Take a worker out of the membership and tell those who may wait for it."""
        self.members.remove(worker)
        self.emit(
            "lost",
            {"worker": worker, "time_s": self.loop.time(), "cause": kind, "reason": reason},
        )
        self.joins.donor_gone(worker)
        self.cuts.member_gone()

    # -------------------------------------------------------------------------------------- lives

    def run(self) -> None:
        """Run to the end. Raises what ended the run where that is not the last round."""
        start_steps = sum(r.steps_completed for r in self.replicas)
        total = self.num_workers * self.num_rounds * self.method.inner_steps
        try:
            if self._saved is not None:
                self._restore(self._saved)
                start_steps = sum(r.steps_completed for r in self.replicas)
            self.listener.on_start(total, start_steps)
            self.loop.run_until_complete(self._main())
        finally:
            self.loop.close()

    async def _main(self) -> None:
        tasks = [
            self.loop.create_task(self._live(worker), name=f"worker-{worker}")
            for worker in range(self.num_workers)
        ]
        tasks += self.syncers.start()
        for task in tasks:
            task.add_done_callback(self._life_over)
        try:
            await self._over
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                await asyncio.wait([task])
            self.joins.close()

    def _life_over(self, task: asyncio.Task[None]) -> None:
        """An error that ends a life, ours or the user's own task's, ends the run as it is."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)

    async def _live(self, worker: int) -> None:
        """A worker's whole life."""
        life = self.lives[worker]
        entry = await self._first_entry(worker)
        while entry is not None:
            ctx, state = entry
            ending = await self._run_method(ctx, state)
            if ending is None:
                break
            entry = await self._return(worker, ending)
        if life.phase == "running":
            life.phase = "ended"
            self.letters.tell_all()
        self._end_if_all_done()

    async def _first_entry(self, worker: int) -> tuple[SimContext, MethodState] | None:
        saved = self._saved
        if saved is None:
            ctx = self._enter(worker)
            return ctx, self.method.init(self.replicas[worker])
        mine = saved.workers[worker]
        if mine.state is None:
            assert mine.absence is not None
            return await self._return(worker, mine.absence)
        await sleep_until_ns(mine.time_ns)
        ctx = self._enter(worker)
        ctx.skip_boundary = True
        ctx.round_index = saved.round_index
        self.post.begin_round(worker, saved.round_index)
        return ctx, mine.state

    def new_context(self, worker: int) -> SimContext:
        return SimContext(self, worker, self.replicas[worker], self.stats[worker])

    def entered(self, worker: int, ctx: SimContext) -> None:
        """The worker takes part from now on."""
        stats = self.stats[worker]
        if stats.alive_since_ns is None:
            stats.alive_since_ns = self.loop.time_ns()
        self.contexts[worker] = ctx
        self.lives[worker].phase = "running"
        self.letters.back(worker)

    def syncer_down(self, place: int, crash: Crash) -> None:
        """A syncer's process is gone; workers go on."""
        self.post.kill(place)
        self.letters.gone(place)
        fields = {"time_s": self.loop.time(), "cause": "crash", "reason": "the syncer crashed"}
        self.emit("lost", {"worker": place, **fields})

    def syncer_back(self, place: int) -> None:
        """A syncer is back, with the state of its last checkpoint."""
        self.post.revive(place)
        self.letters.back(place)

    def _enter(self, worker: int) -> SimContext:
        ctx = self.new_context(worker)
        self.entered(worker, ctx)
        return ctx

    async def _run_method(self, ctx: SimContext, state: MethodState) -> Absence | None:
        """Until the last round (None), or until the worker is away."""
        worker = ctx.worker
        crash = self.plan.next_crash(worker, self.loop.time_ns())
        crashed: list[Crash] = []
        task = self.loop.create_task(self.method.run(ctx, state), name=f"method-{worker}")
        timer: asyncio.Handle | None = None
        if crash is not None:
            timer = self.loop.call_at_ns(crash.at_ns, _crash, task, crashed, crash)
        try:
            await task
        except asyncio.CancelledError:
            if not crashed:
                raise
            return self._die(worker, "crash", "crashed", crashed[0].return_ns)
        except OutOfSync as error:
            return self._die(worker, "out_of_sync", str(error), self.loop.time_ns())
        except NonFiniteError as error:
            return self._die(worker, "non_finite", str(error), None)
        finally:
            if timer is not None:
                timer.cancel()
        if state.rounds_completed < self.num_rounds:
            raise RunFailed(
                f"{type(self.method).__name__}.run returned after {state.rounds_completed} of "
                f"{self.num_rounds} rounds; it has to go through `ctx.rounds(state)` to the end"
            )
        self.stats[worker].finished_ns = self.loop.time_ns()
        self.post.finish(worker)
        return None

    def _die(self, worker: int, kind: str, reason: str, return_ns: int | None) -> Absence:
        """The worker's process ends now."""
        now = self.loop.time_ns()
        stats = self.stats[worker]
        if stats.alive_since_ns is not None:
            stats.alive_ns += now - stats.alive_since_ns
            stats.alive_since_ns = None
        absence = Absence(return_ns, reason)
        self.cuts.disturb()
        self.lives[worker].phase, self.lives[worker].absence = "down", absence
        self.contexts[worker] = None
        self.post.kill(worker)
        self.letters.gone(worker)
        if kind != "out_of_sync":
            self.lost.append(
                {"worker": worker, "time_s": now / 1e9, "cause": kind, "reason": reason}
            )
        if not self.members.is_gone(worker):
            self._leave(worker, kind, reason)
        if return_ns is None:
            self._fail_if_nobody_is_left(reason)
        return absence

    def _fail_if_nobody_is_left(self, reason: str) -> None:
        if any(life.phase in ("running", "ended", "expelled") for life in self.lives):
            return
        if not self._over.done():
            self._over.set_exception(
                RunFailed(f"all workers are lost at {self.loop.time():.1f} s: {reason}")
            )

    async def _return(self, worker: int, absence: Absence) -> tuple[SimContext, MethodState] | None:
        """Wait until the worker is back, and take a donor's state; None where it stays away."""
        life = self.lives[worker]
        life.phase, life.absence = "down", absence
        if absence.return_ns is None:
            return None
        self._end_if_all_done()
        await sleep_until_ns(absence.return_ns)
        self.cuts.disturb()
        life.phase, life.absence = "joining", None
        self.post.revive(worker)
        entry = await self.joins.join(worker)
        if entry is None:
            life.phase = "down"
        return entry

    def _end_if_all_done(self) -> None:
        """The run is over when nobody runs any more and somebody has finished."""
        phases = [life.phase for life in self.lives]
        if any(phase in ("running", "joining", "expelled") for phase in phases):
            return
        if "ended" in phases and not self._over.done():
            self._over.set_result(None)
        elif "ended" not in phases and all(
            life.absence is None or life.absence.return_ns is None for life in self.lives
        ):
            self._fail_if_nobody_is_left("nobody has a state for those that return")

    # ------------------------------------------------------------------------------------ resume

    def _restore(self, saved: Saved) -> None:
        """Put everything back as it was at the saved boundary."""
        for worker, mine in saved.workers.items():
            self._restore_worker(worker, mine)
            if mine.absence is not None:
                self.lives[worker] = Life("down", mine.absence)
                self.post.kill(worker)
        self.lost = list(saved.lost)
        self.ledger.load(saved.ledger)
        self.joins.attempts = list(saved.join_attempts)
        saved.restore_network(self)

    def _restore_worker(self, worker: int, mine: SavedWorker) -> None:
        replica = self.replicas[worker]
        replica.parameters.copy_(mine.parameters)
        replica.buffers.copy_(mine.buffers)
        replica.counters.copy_(mine.counters)
        assert replica.optimizer is not None
        replica.optimizer.load_state_tensors(mine.moments)
        replica.steps_completed = mine.steps_completed
        replica.samples_completed = mine.samples_completed
        replica.learning_rate = mine.learning_rate
        self.stats[worker] = mine.stats
        self.trace.restore(worker, mine.chain)


def _crash(task: asyncio.Task[None], crashed: list[Crash], crash: Crash) -> None:
    crashed.append(crash)
    task.cancel()
