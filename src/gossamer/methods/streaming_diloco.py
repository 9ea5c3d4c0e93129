"""Streaming DiLoCo: one fragment of the model at a time, averaged behind a few inner steps.

Source:     A. Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a
            Distributed Free Lunch", 2025, arXiv:2501.18512. The paper was not at hand: rule and
            defaults are those that summaries give.

Update      each step:      theta_i <- InnerOpt(theta_i)
            t = t_p - tau:  Delta_p = anchor_p - theta_i,p;  handle = start mean_i Delta_p
            t = t_p:        Delta_p = wait(handle)      blocks only if slower than tau steps
                            v_p     <- mu v_p + Delta_p
                            anchor_p <- anchor_p - lr (Delta_p + mu v_p)
                            theta_i,p <- a theta_i,p + (1 - a) anchor_p

Symbols     paper    here                  unit / shape     default  where the default comes from
            P        fragments             -                -        the paper: of 3 layers each
            H        inner_steps           inner steps      100      the paper
            t_p      Schedule.offset       step in a round  -        evenly spread; p = 0 at H
            tau      due_steps             inner steps      2        not published here
            a        blend                 -                0.5      the paper's alpha
            anchor   state.anchor          fp32 [P]         -        Theta; equal on all workers
            v        state.momentum        fp32 [P]         0        equal on all workers
            lr       outer_learning_rate   -                0.4      the paper
            mu       outer_momentum        -                0.9      the paper

Departures  t_p is the step of a fragment's arrival, and it leaves tau steps earlier: so nothing is
            on its way at the end of a round, and what is saved or handed to a joiner is whole. Then
            tau is at most H / P, and one fragment is on its way at a time.

Reduces to  diloco            when P = 1, tau = 0 and a = 0
            decoupled_diloco  when its K = M, merge = "average", tau = 0 and a = 0, at equal speeds

Cost        sent per worker and round: 2 (M-1)/M P values in as many parts as there are fragments,
            each overlapped with tau steps; a byte per peer and fragment for the vote
            extra memory: 2 P (anchor, momentum), and a fragment while it is on its way

Fails       as DiLoCo, fragment by fragment: the all-reduce is repeated until it succeeds, behind
            training as long as that lasts. A non-finite outer gradient ends its worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState
from gossamer.errors import ConfigError
from gossamer.methods.base import Method, Sends, outer_learning_rate, outer_momentum, state_of
from gossamer.mixing.fragments import Fragment, Scheme, fragments_of, most_fragments
from gossamer.mixing.schedule import Schedule
from gossamer.outer.nesterov import nesterov_step_on_
from gossamer.training.layout import ParameterLayout, gather, scatter
from gossamer.training.replica import Replica

PAPER_LAYERS = 3  # of a fragment


@dataclass(kw_only=True)
class StreamingDiLoCoState(MethodState):
    """What was agreed of each fragment last [P], and its outer momentum [P]; equal everywhere."""

    anchor: Tensor
    momentum: Tensor


class StreamingDiLoCo(Method):
    """Streaming DiLoCo (arXiv:2501.18512)."""

    name: ClassVar[str] = "streaming_diloco"
    State: ClassVar[type[MethodState]] = StreamingDiLoCoState

    outer_learning_rate: float = outer_learning_rate(0.4)
    outer_momentum: float = outer_momentum()
    fragments: int | None = Field(
        None, ge=1, description="P; left out: three layers each, as far as tau allows"
    )
    fragmentation: Scheme = Field("strided", description="how tensors are put into fragments")
    due_steps: int = Field(
        2, ge=0, description="tau, steps behind which a fragment is averaged; at most H / P"
    )
    blend: float = Field(
        0.5, ge=0, lt=1, description="share of a worker's own that it keeps (paper: 0.5)"
    )

    @property
    def overlaps(self) -> bool:
        return self.due_steps > 0

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        count = len(self.cut(layout))
        Schedule(count, self.inner_steps)
        most = self.inner_steps // count
        if self.due_steps > most:
            raise ConfigError(
                f"method.due_steps: at most {most}, the {self.inner_steps} inner steps over "
                f"{count} fragments; got {self.due_steps}; lower it, or method.fragments"
            )

    def cut(self, layout: ParameterLayout) -> tuple[Fragment, ...]:
        """The model's fragments."""
        layers = most_fragments(layout, scheme="strided")
        fitting = self.inner_steps // max(1, self.due_steps)
        count = self.fragments or max(1, min(layers // PAPER_LAYERS, fitting))
        return fragments_of(layout, count, scheme=self.fragmentation)

    def arrivals(self, layout: ParameterLayout) -> Iterator[tuple[int, Fragment]]:
        """(t_p, fragment) of a round, in the order of t_p = 1 .. H."""
        fragments = self.cut(layout)
        schedule = Schedule(len(fragments), self.inner_steps)
        for step in range(1, self.inner_steps + 1):
            p = schedule.due(step)
            if p is not None:
                yield step, fragments[p]

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> StreamingDiLoCoState:
        start = replica.parameters
        return StreamingDiLoCoState(
            anchor=start.clone(),
            momentum=start.new_zeros(start.shape),
            residual=self.new_residual(replica),
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(StreamingDiLoCoState, state)
        replica, tau = ctx.replica, self.due_steps
        arrivals = tuple(self.arrivals(replica.layout))
        async for round_ in ctx.rounds(state):
            agreed, step = round_, 0
            for turn, (arrival, part) in enumerate(arrivals):
                if round_.index == 0 and arrival <= tau:  # it would have left before any step
                    await ctx.train(arrival - step)
                    step = arrival
                    continue
                if arrival - tau > step:
                    await ctx.train(arrival - tau - step)
                delta = gather(state.anchor, part.slices)
                delta.sub_(gather(replica.parameters, part.slices))
                owed = None if state.residual is None else gather(state.residual, part.slices)
                coding = Coding(self.codec, residual=owed)
                async with ctx.task_group() as tasks:
                    averaging = tasks.start(
                        all_reduce_until_complete(
                            ctx, agreed, "outer", delta, step=turn, coding=coding
                        )
                    )
                    if tau:
                        await ctx.train(tau)
                if state.residual is not None and owed is not None:
                    scatter(state.residual, part.slices, owed)
                agreed, step = averaging.result(), arrival
                nesterov_step_on_(
                    state.anchor,
                    state.momentum,
                    part.slices,
                    delta,
                    learning_rate=self.outer_learning_rate,
                    momentum=self.outer_momentum,
                )
                self._receive(replica, state, part)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)

    def _receive(self, replica: Replica, state: StreamingDiLoCoState, part: Fragment) -> None:
        """theta_p <- a theta_p + (1 - a) anchor_p."""
        values = gather(state.anchor, part.slices)
        if self.blend:
            values.lerp_(gather(replica.parameters, part.slices), self.blend)
        scatter(replica.parameters, part.slices, values)
