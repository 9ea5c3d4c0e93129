"""Round boundaries of all workers together: reports, measurements, checkpoints.

Workers pass the boundary before round r at different instants. Cut r is that set of passings; it is
complete when every member of round r has passed (or is gone). Nothing waits for it: what a worker
overwrites before the cut is complete is copied first, so looking never changes a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.comm.context import MethodState
from gossamer.measure.replicas import measure_replicas
from gossamer.sim.checkpoint import CheckpointWriter
from gossamer.sim.context import SimContext

if TYPE_CHECKING:
    from gossamer.sim.world import World

Vectors = tuple[Tensor, Tensor, Tensor]  # parameters, buffers, counters


@dataclass(eq=False)
class Cut:
    """One boundary on its way to completion."""

    round_index: int
    measured: bool
    writer: CheckpointWriter | None
    passed_ns: dict[int, int] = field(default_factory=dict)
    copies: dict[int, Vectors] = field(default_factory=dict)


class Cuts:
    """All boundaries of a run that are open now."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[int, Cut] = {}
        self._losses: dict[int, list[float]] = {}  # by round
        self._records: dict[int, dict[str, list[float]]] = {}
        self._inner: dict[int, dict[int, Tensor]] = {}  # by round, worker: end of the inner phase

    def pass_boundary(self, ctx: SimContext, state: MethodState) -> None:
        """A worker is at the boundary before round `state.rounds_completed`."""
        index = state.rounds_completed
        loss = ctx.take_loss()
        if loss is not None:
            self._losses.setdefault(index - 1, []).append(loss)
        cut = self._open.get(index)
        if cut is None:
            cut = self._open[index] = self._new(index)
        now = self._world.loop.time_ns()
        cut.passed_ns[ctx.worker] = now
        if cut.writer is not None:
            cut.writer.add_worker(self._world, ctx, state)
        self._complete_if_all_passed(cut)

    def _new(self, index: int) -> Cut:
        world = self._world
        measured = world.engine.real and world.measure.due(index, world.num_rounds)
        writer = None
        if index > 0 and world.wants_checkpoint(index):
            writer = CheckpointWriter.begin(world, index)
        return Cut(index, measured, writer)

    def disturb(self) -> None:
        """Somebody dies, returns or is given up: the boundaries that are open are not saved."""
        for cut in self._open.values():
            if cut.writer is not None:
                cut.writer.abandon(self._world)
                cut.writer = None

    def member_gone(self) -> None:
        """Somebody who is gone will pass no more."""
        for cut in list(self._open.values()):
            self._complete_if_all_passed(cut)

    def _complete_if_all_passed(self, cut: Cut) -> None:
        members = self._world.members
        for worker in members.of_round(cut.round_index).workers:
            if worker not in cut.passed_ns and members.takes_part(worker, cut.round_index):
                return
        if not cut.passed_ns or self._open.pop(cut.round_index, None) is None:
            return
        self._report(cut)
        if cut.measured:
            self._measure(cut)
        if cut.writer is not None:
            cut.writer.commit(self._world)
        self._world.cut_complete(cut.round_index, written=cut.writer is not None)

    def _report(self, cut: Cut) -> None:
        index = cut.round_index
        if index == 0:
            return
        losses = self._losses.pop(index - 1, [])
        records = self._records.pop(index - 1, {})
        fields: dict[str, Any] = {
            "round": index,
            "time_s": max(cut.passed_ns.values()) / 1e9,
            "train_loss": sum(losses) / len(losses) if losses and losses[0] == losses[0] else None,
            "workers": len(cut.passed_ns),
            "utilization": self._world.utilization(),
            "bytes_sent_total": self._world.ledger.total(),
        }
        fields |= {name: sum(values) / len(values) for name, values in sorted(records.items())}
        self._world.emit("round", fields)

    def _measure(self, cut: Cut) -> None:
        vectors = [self._vectors(cut, worker) for worker in sorted(cut.passed_ns)]
        inner = self._inner.pop(cut.round_index - 1, {})
        fields: dict[str, Any] = {
            "round": cut.round_index,
            "time_s": max(cut.passed_ns.values()) / 1e9,
            **measure_replicas(
                self._world.engine, vectors, each_worker=self._world.measure.workers
            ),
        }
        if len(inner) > 1:
            stacked = torch.stack([inner[worker] for worker in sorted(inner)])
            fields["consensus_l2_inner"] = self._world.l2(stacked)
        self._world.emit("measure", fields)

    def _vectors(self, cut: Cut, worker: int) -> Vectors:
        replica = self._world.replicas[worker]
        live = (replica.parameters, replica.buffers, replica.counters)
        return cut.copies.get(worker, live)

    def before_write(self, worker: int) -> None:
        """A worker is about to overwrite its replica: keep what an open cut will look at."""
        for cut in self._open.values():
            if cut.measured and worker in cut.passed_ns and worker not in cut.copies:
                replica = self._world.replicas[worker]
                cut.copies[worker] = (
                    replica.parameters.clone(),
                    replica.buffers.clone(),
                    replica.counters.clone(),
                )

    def after_train(self, ctx: SimContext) -> None:
        """The end of a worker's inner phase, where disagreement is largest."""
        if self._world.measure.inner_consensus and self._world.engine.real:
            round_ = self._inner.setdefault(ctx.round_index, {})
            round_[ctx.worker] = ctx.replica.parameters.clone()
            for stale in [index for index in self._inner if index < ctx.round_index - 2]:
                del self._inner[stale]

    def record(self, round_index: int, name: str, value: float) -> None:
        """A metric of some worker in a round."""
        self._records.setdefault(round_index, {}).setdefault(name, []).append(value)
