"""One simulated worker's `Context`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.comm.context import MethodState, Round, Tag, TrainReport
from gossamer.comm.letters import Letter
from gossamer.comm.rounds import Rounds
from gossamer.comm.tasks import TaskGroup
from gossamer.errors import CommError, NonFiniteError
from gossamer.seeding import torch_stream
from gossamer.sim.clock import sleep_until_ns
from gossamer.sim.post import Message
from gossamer.training.replica import Replica

if TYPE_CHECKING:
    from gossamer.sim.world import World

FORWARD_SHARE = 1 / 3  # of an inner step: a backward pass costs about two forward ones


@dataclass(slots=True)
class WorkerStats:
    """What a worker has done so far; times in nanoseconds of virtual time."""

    alive_since_ns: int | None = None
    alive_ns: int = 0  # of earlier lives
    train_ns: int = 0
    finished_ns: int | None = None
    failed_transfers: int = 0
    samples: int = 0
    records: dict[str, list[float]] = field(default_factory=dict)  # name: [count, sum]


class SimContext:
    """The narrow waist of one simulated worker. See `gossamer.comm.context.Context`."""

    def __init__(self, world: World, worker: int, replica: Replica, stats: WorkerStats) -> None:
        self._world, self._worker, self._replica = world, worker, replica
        self.stats = stats
        self.round_index = 0
        self.skip_boundary = False  # a resumed worker has its boundary behind it
        self.last_progress_ns = world.loop.time_ns()
        self.training = False
        self.waits = 0  # for peers, under way
        self._loss_sum, self._loss_steps = 0.0, 0
        self._scratch: Tensor | None = None

    @property
    def worker(self) -> int:
        return self._worker

    @property
    def num_workers(self) -> int:
        return self._world.num_workers

    @property
    def num_rounds(self) -> int:
        return self._world.num_rounds

    @property
    def seed(self) -> int:
        return self._world.seed

    @property
    def deadline(self) -> float:
        return self._world.deadline_s

    @property
    def replica(self) -> Replica:
        return self._replica

    def scratch(self) -> Tensor:
        if self._scratch is None:  # the engine's gradient is every worker's
            self._scratch = torch.empty_like(self._replica.parameters)
        return self._scratch

    def now(self) -> float:
        return self._world.loop.time()

    def rng(self, name: str) -> torch.Generator:
        return torch_stream(self.seed, "method", name, self._worker, self.round_index)

    def rounds(self, state: MethodState) -> AsyncIterator[Round]:
        return Rounds(self, state)

    def planned_round(self, round_index: int) -> Round:
        """The round with the members that were decided when it started."""
        return Round(round_index, self._world.members.planned(round_index))

    def refresh_members(self, round_: Round) -> Round:
        self._world.expire_leases()
        return Round(round_.index, self._world.members.present(round_.index))

    def send(self, dst: int, tag: Tag, payload: Tensor, *, exact: bool = False) -> Message:
        num_bytes = self._world.charged_bytes(payload, exact)
        self._world.ledger.add(tag.round_index, tag.kind, self._worker, dst, num_bytes)
        if tag.kind != "join":  # a donor's background work, which is in no order with its own
            self._trace("send", dst, tag, num_bytes)
        return self._world.post.send(
            self._worker, dst, tag, payload, num_bytes=num_bytes, exact=exact
        )

    async def recv(self, src: int, tag: Tag, *, timeout: float | None = None) -> Tensor:
        wait_s = self.deadline if timeout is None else timeout
        self.waits += 1
        try:
            payload = await self._world.post.recv(self._worker, src, tag, wait_s)
        except CommError as error:
            await self._resume()
            self.stats.failed_transfers += 1
            if tag.kind != "join":
                self._trace("lost", src, tag, type(error).__name__)
            raise
        finally:
            self.waits -= 1
        await self._resume()
        if tag.kind != "join":
            self._trace("recv", src, tag, "")
        return payload

    @property
    def syncers(self) -> tuple[int, ...]:
        return self._world.syncers.places

    def connected(self) -> tuple[int, ...]:
        return tuple(w for w, life in enumerate(self._world.lives) if life.phase == "running")

    def post(
        self,
        dst: int,
        kind: str,
        payload: Tensor,
        *,
        step: int,
        part: int = 0,
        note: tuple[int, ...] = (),
        exact: bool = False,
    ) -> None:
        num_bytes = self._world.charged_bytes(payload, exact) + 8 * len(note)
        self._world.ledger.add(self.round_index, kind, self._worker, dst, num_bytes)
        self._trace("post", dst, Tag(kind, self.round_index, step=step, part=part), note)
        self._world.letters.send(
            self._worker, dst, kind, payload,
            step=step, part=part, note=note, num_bytes=num_bytes, exact=exact,
        )  # fmt: skip

    def poll(self, src: int, kind: str, part: int = 0) -> Letter | None:
        letter = self._world.letters.poll(self._worker, src, kind, part)
        if letter is not None:
            tag = Tag(kind, self.round_index, step=letter.step, part=part)
            self._trace("poll", src, tag, letter.note)
        return letter

    async def mail(self, seen: int, timeout: float | None = None) -> int:
        news = await self._world.letters.mail(self._worker, seen, timeout)
        await self._resume()
        return news

    async def _resume(self) -> None:
        """Come back from waiting: a frozen process does so only when it thaws."""
        now = self._world.loop.time_ns()
        until = self._world.plan.frozen_until(self._worker, now)
        if until > now:
            await sleep_until_ns(until)
        self.last_progress_ns = self._world.loop.time_ns()

    async def _compute(self, num_steps: int, num_points: int = 1, first: int | None = None) -> None:
        """Let the time of inner steps pass: of each step once for each point that it works at."""
        world, worker = self._world, self._worker
        start = end = world.loop.time_ns()
        first = self._replica.steps_completed if first is None else first
        if num_points == 1:
            end = world.compute.finish_ns(worker, start, first, num_steps)
        else:
            for step in range(first, first + num_steps):
                for _ in range(num_points):
                    end = world.compute.finish_ns(worker, end, step, 1)
        self.training = True
        try:
            await sleep_until_ns(end)
        finally:
            self.training = False
        self.stats.train_ns += end - start - world.plan.stopped_ns(worker, start, end)
        self.last_progress_ns = end

    async def train(self, num_steps: int) -> TrainReport:
        await self._compute(num_steps)
        # The numerics happen when their time has passed: until then the rows hold what they held
        # at the round's start, which is what measurements look at.
        self._world.before_write(self._worker)
        report = self._world.engine.train(self._replica, num_steps)
        self._count(report)
        self._world.after_train(self)
        return report

    async def gradient(self) -> Tensor:
        await self._compute(1)
        self._world.before_write(self._worker)  # a forward pass may write to buffers
        gradient, loss = self._world.engine.gradient(self._replica)
        self._count(TrainReport(1, loss, self._world.engine.units_per_batch))
        return gradient

    def apply_gradient(self, gradient: Tensor) -> None:
        self._world.before_write(self._worker)
        self._world.engine.apply_gradient(self._replica, gradient)

    async def gradients(self, points: Sequence[Tensor], num_batches: int = 1) -> list[Tensor]:
        engine, first = self._world.engine, self._replica.steps_completed
        engine.check_points(points, num_batches)
        self._world.before_write(self._worker)  # now buffers; the method, soon, parameters
        # Here the numerics come first and then their time: the points are those of the call, and
        # need no copy that would keep them while other tasks go on.
        failure: NonFiniteError | None = None
        try:
            gradients, loss = engine.gradients(self._replica, points, num_batches)
        except NonFiniteError as error:
            failure = error
        await self._compute(num_batches, len(points), first)
        if failure is not None:
            raise failure
        self._count(TrainReport(num_batches, loss, num_batches * engine.units_per_batch))
        return gradients

    def _count(self, report: TrainReport) -> None:
        self._loss_sum += report.loss * report.num_steps
        self._loss_steps += report.num_steps
        self.stats.samples += report.num_samples
        self._trace("train", self._replica.steps_completed, "", report.loss.hex())
        self._world.listener.on_steps(report.num_steps)

    def take_loss(self) -> float | None:
        """Mean training loss since last asked."""
        mean = self._loss_sum / self._loss_steps if self._loss_steps else None
        self._loss_sum, self._loss_steps = 0.0, 0
        return mean

    async def predict(self) -> Tensor:
        world = self._world
        start = world.loop.time_ns()
        end = world.compute.finish_ns_of(
            self._worker, start, world.timing.step_time * FORWARD_SHARE
        )
        await sleep_until_ns(end)
        await self._resume()
        replica = self._replica
        return world.engine.predict(replica.parameters, replica.buffers, replica.counters)

    def task_group(self) -> TaskGroup:
        return TaskGroup()

    async def checkpoint(self, state: MethodState) -> None:
        if self._worker >= self.num_workers:
            self._world.syncers.checkpoint(self._worker, state)
            return
        if self.skip_boundary:
            self.skip_boundary = False
            return
        self.round_index = state.rounds_completed
        self._trace("boundary", state.rounds_completed, "", "")
        self._world.post.begin_round(self._worker, state.rounds_completed)
        self._world.at_boundary(self, state)

    def record(self, name: str, value: float) -> None:
        cell = self.stats.records.setdefault(name, [0.0, 0.0])
        cell[0] += 1
        cell[1] += value
        if self._worker < self.num_workers:  # a syncer is in no round
            self._world.record(self.round_index, name, value)

    def _trace(self, event: str, first: object, tag: object, last: object) -> None:
        text = (
            f"{tag.kind} {tag.round_index}.{tag.step}.{tag.phase}.{tag.part}.{tag.attempt}"
            f".{tag.segment}"
            if isinstance(tag, Tag)
            else ""
        )
        self._world.trace.add(
            self._world.loop.time_ns(), self._worker, f"{event:<8} {first} {text} {last}"
        )
