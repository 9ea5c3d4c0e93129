"""One real worker's `Context`: gRPC for messages, a thread for training, the wall clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gossamer.comm.context import MethodState, Round, Tag, TrainReport, Transfer
from gossamer.comm.donation import STATE_KINDS
from gossamer.comm.ledger import Ledger
from gossamer.comm.letters import Letter, Mail
from gossamer.comm.members import EPOCH_BITS, MemberLog
from gossamer.comm.rounds import Rounds
from gossamer.comm.tasks import TaskGroup
from gossamer.comm.transport import Transport
from gossamer.errors import CommError, PeerLost
from gossamer.seeding import torch_stream
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica

R = TypeVar("R")

NAP_S = 0.25  # a paced step notices so soon that it shall stop


class Trains(Protocol):
    """Whatever does the numerics; see `gossamer.training.engine.Engine`."""

    @property
    def layout(self) -> ParameterLayout:
        """Where each tensor lies in the flat vector."""

    @property
    def units_per_batch(self) -> int:
        """Tokens or samples in a training batch."""

    def scratch(self) -> Tensor:
        """A vector [P] that is not in use until the next training call."""

    def new_replicas(self, num_workers: int) -> tuple[Tensor, list[Replica]]:
        """Equal replicas, and their parameters [M, P]."""

    def train(
        self, replica: Replica, num_steps: int, on_step: Callable[[], None] | None = None
    ) -> TrainReport:
        """Inner steps, in place."""

    def gradient(self, replica: Replica) -> tuple[Tensor, float]:
        """The gradient [P] on the next batch, and the loss."""

    def check_points(self, points: Sequence[Tensor], num_batches: int) -> None:
        """Raise `ConfigError` for arguments that `gradients` cannot take."""

    def gradients(
        self,
        replica: Replica,
        points: Sequence[Tensor],
        num_batches: int,
        on_step: Callable[[], None] | None = None,
    ) -> tuple[list[Tensor], float]:
        """Mean gradients [P] at `points` over the next batches, and the first point's loss."""

    def apply_gradient(self, replica: Replica, gradient: Tensor) -> None:
        """One inner step with a given gradient."""

    def predict(self, parameters: Tensor, buffers: Tensor, counters: Tensor) -> Tensor:
        """Log-probabilities on the probe batch."""


class Carries(Transport, Mail, Protocol):
    """A transport of messages and letters."""


class Stopped(Exception):
    """Raised in the training thread when the process shall end now."""


@dataclass
class Progress:
    """What a worker has done; read by reports and by the summary. Times in seconds."""

    began_s: float | None = None  # when it had a state for the first time
    counter: int = 0  # steps trained, transfers finished, waits begun and ended
    train_s: float = 0.0
    samples: int = 0
    round_started: int = -1
    rounds_completed: int = 0
    waits: int = 0  # for peers, under way
    at_boundary: asyncio.Event = field(default_factory=asyncio.Event)  # cleared by its reader
    loss: float | None = None  # mean training loss of the newest round
    failed_transfers: int = 0
    records: dict[str, list[float]] = field(default_factory=dict)  # name: [count, sum]
    ledger: Ledger = field(default_factory=Ledger)

    def begin(self) -> None:
        """The run has begun for this worker; what came before counts for nothing."""
        if self.began_s is None:
            self.began_s = time.monotonic()

    def elapsed_s(self) -> float:
        return 0.0 if self.began_s is None else time.monotonic() - self.began_s

    def totals(self) -> dict[str, Any]:
        """All that adds up, since the process began."""
        elapsed_s = self.elapsed_s()
        return {
            "samples": self.samples,
            "time_s": elapsed_s,
            "train_time_s": self.train_s,
            "blocked_time_s": max(0.0, elapsed_s - self.train_s),
            "bytes_sent": self.ledger.total(),
            "bytes_by_kind": self.ledger.by_kind(),
            "failed_transfers": self.failed_transfers,
            "records": {n: {"count": c, "mean": t / c} for n, (c, t) in self.records.items()},
        }

    def utilization(self) -> float:
        """Training time over elapsed time."""
        return min(1.0, self.train_s / max(self.elapsed_s(), 1e-9))


class _Unsent:
    """A transfer to a worker that has left the round; it may be back, but only for a later one."""

    def __init__(self, dst: int) -> None:
        self._dst = dst

    async def delivered(self) -> None:
        raise PeerLost(f"worker {self._dst} takes no part in this round")

    def cancel(self) -> None:
        """There is nothing to give up."""


class ClusterContext:
    """The narrow waist of one worker process. See `gossamer.comm.context.Context`.

    Args:
        members: gives the newest membership log.
        boundary: called at every round boundary with this context and the method's state.
        step_time_s: the least time that an inner step shall take, to play a larger model.
        num_syncers: places after the workers' that gather and hand out.
        connected: gives the workers that take part, as far as is known.
    """

    def __init__(
        self,
        *,
        worker: int,
        num_workers: int,
        num_rounds: int,
        seed: int,
        deadline_s: float,
        engine: Trains,
        replica: Replica,
        transport: Carries,
        members: Callable[[], MemberLog],
        boundary: Callable[[ClusterContext, MethodState], Awaitable[None]],
        thread: ThreadPoolExecutor,
        progress: Progress,
        step_time_s: float = 0.0,
        num_syncers: int = 0,
        connected: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self._worker, self._num_workers, self._num_rounds = worker, num_workers, num_rounds
        self._seed, self._deadline_s = seed, deadline_s
        self._engine, self._replica, self._transport = engine, replica, transport
        self._members, self._boundary, self._thread = members, boundary, thread
        self.progress, self._step_time_s = progress, step_time_s
        self._num_syncers, self._connected = num_syncers, connected
        self.round_index = 0
        self.stopping = False
        self._loss_sum, self._loss_steps = 0.0, 0

    @property
    def worker(self) -> int:
        return self._worker

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def deadline(self) -> float:
        return self._deadline_s

    @property
    def replica(self) -> Replica:
        return self._replica

    def scratch(self) -> Tensor:
        return self._engine.scratch()

    def now(self) -> float:
        return time.monotonic()

    def rng(self, name: str) -> torch.Generator:
        return torch_stream(self._seed, "method", name, self._worker, self.round_index)

    def rounds(self, state: MethodState) -> AsyncIterator[Round]:
        return Rounds(self, state)

    def planned_round(self, round_index: int) -> Round:
        """The round with the members that this worker has been told of."""
        return Round(round_index, self._members().planned(round_index))

    def refresh_members(self, round_: Round) -> Round:
        return Round(round_.index, self._members().present(round_.index))

    def send(self, dst: int, tag: Tag, payload: Tensor, *, exact: bool = False) -> Transfer:
        num_bytes = payload.numel() * payload.element_size()
        # Not by round: a run on real machines may have any number of them, and one memory.
        self.progress.ledger.add(0, tag.kind, self._worker, dst, num_bytes)
        self.progress.counter += 1
        if not self._members().takes_part(dst, tag.round_index):
            return _Unsent(dst)
        return self._transport.send(dst, tag, payload, exact=exact)

    async def recv(self, src: int, tag: Tag, *, timeout: float | None = None) -> Tensor:
        wait_s = self._deadline_s if timeout is None else timeout
        self.progress.counter += 1
        self.progress.waits += 1
        try:
            if self.is_forsaken(src, tag):
                raise PeerLost(f"worker {src} takes no part in this round, as is known by now")
            return await self._transport.recv(src, tag, wait_s)
        except CommError:
            self.progress.failed_transfers += 1
            raise
        finally:
            self.progress.counter += 1
            self.progress.waits -= 1

    def is_forsaken(self, src: int, tag: Tag) -> bool:
        """Whether it is known by now that a message will not come, or to other members only.

        Its sender has left the round, or the round has other members than the tag says: where
        rounds are shorter than news from the coordinator takes, a change may come when some have
        begun its first round without it.
        """
        log = self._members()
        if not log.takes_part(src, tag.round_index):
            return True
        planned = log.of_round(tag.round_index).epoch
        return tag.kind not in STATE_KINDS and tag.epoch >> EPOCH_BITS != planned

    @property
    def syncers(self) -> tuple[int, ...]:
        return tuple(range(self._num_workers, self._num_workers + self._num_syncers))

    def connected(self) -> tuple[int, ...]:
        return self._connected()

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
        num_bytes = payload.numel() * payload.element_size() + 8 * len(note)
        self.progress.ledger.add(0, kind, self._worker, dst, num_bytes)
        self.progress.counter += 1
        self._transport.post(dst, kind, payload, step=step, part=part, note=note, exact=exact)

    def poll(self, src: int, kind: str, part: int = 0) -> Letter | None:
        return self._transport.poll(src, kind, part)

    async def mail(self, seen: int, timeout: float | None = None) -> int:
        waits = timeout is not None  # who listens for ever, beside its work, waits for nobody
        self.progress.waits += waits
        try:
            return await self._transport.mail(seen, timeout)
        finally:
            self.progress.waits -= waits

    async def _in_thread(self, work: Callable[[], R]) -> R:
        """Run numerics beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _training(self, work: Callable[[], R]) -> R:
        """Run numerics beside the event loop, and count their time as training."""
        started = time.monotonic()
        try:
            return await self._in_thread(work)
        finally:
            self.progress.train_s += time.monotonic() - started

    def _pacer(self) -> Callable[[], None]:
        """Called in the training thread after each step."""
        due = time.monotonic()

        def step() -> None:
            nonlocal due
            self.progress.counter += 1
            if self.stopping:
                raise Stopped
            due += self._step_time_s
            while (ahead := due - time.monotonic()) > 0:
                time.sleep(min(ahead, NAP_S))
                if self.stopping:
                    raise Stopped

        return step

    async def train(self, num_steps: int) -> TrainReport:
        pacer = self._pacer()
        report = await self._training(
            lambda: self._engine.train(self._replica, num_steps, on_step=pacer)
        )
        self._count(report)
        return report

    async def gradient(self) -> Tensor:
        pacer = self._pacer()

        def work() -> tuple[Tensor, float]:
            gradient, loss = self._engine.gradient(self._replica)
            pacer()
            return gradient, loss

        gradient, loss = await self._training(work)
        self._count(TrainReport(1, loss, self._engine.units_per_batch))
        return gradient

    def apply_gradient(self, gradient: Tensor) -> None:
        self._engine.apply_gradient(self._replica, gradient)

    async def gradients(self, points: Sequence[Tensor], num_batches: int = 1) -> list[Tensor]:
        self._engine.check_points(points, num_batches)
        held = [point.clone() for point in points]  # other tasks go on while the thread works
        pacer = self._pacer()
        gradients, loss = await self._training(
            lambda: self._engine.gradients(self._replica, held, num_batches, on_step=pacer)
        )
        self._count(TrainReport(num_batches, loss, num_batches * self._engine.units_per_batch))
        return gradients

    def _count(self, report: TrainReport) -> None:
        self._loss_sum += report.loss * report.num_steps
        self._loss_steps += report.num_steps
        self.progress.samples += report.num_samples

    async def predict(self) -> Tensor:
        replica = self._replica
        return await self._in_thread(
            lambda: self._engine.predict(replica.parameters, replica.buffers, replica.counters)
        )

    def task_group(self) -> TaskGroup:
        return TaskGroup()

    async def checkpoint(self, state: MethodState) -> None:
        self.round_index = state.rounds_completed
        if self._loss_steps:
            mean = self._loss_sum / self._loss_steps
            self.progress.loss = mean if math.isfinite(mean) else None
            self._loss_sum, self._loss_steps = 0.0, 0
        self.progress.counter += 1
        self.progress.rounds_completed = state.rounds_completed
        self._transport.begin_round(state.rounds_completed)
        await self._boundary(self, state)
        if state.rounds_completed < self._num_rounds:
            self.progress.round_started = state.rounds_completed
        self.progress.at_boundary.set()

    def record(self, name: str, value: float) -> None:
        cell = self.progress.records.setdefault(name, [0.0, 0.0])
        cell[0] += 1
        cell[1] += value
