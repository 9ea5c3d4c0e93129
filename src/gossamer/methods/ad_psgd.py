"""AD-PSGD: each worker steps at its own pace while pairs of workers average beside it.

Source:     X. Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML
            2018, arXiv:1710.06952, Algorithm 1.

Update      steps of worker i, one after the other, never waiting for the network:
                    xh  = x_i;   g = grad f_i(xh)                x_i may change meanwhile
                    x_i <- InnerOpt(x_i, g)
            meetings of worker i, one after the other, beside the steps:
                    x_i, x_j <- (x_i + x_j) / 2                  atomically

Symbols     paper    here                  unit / shape     default  where the default comes from
            -        inner_steps           steps in a round 100      reporting only, see below
            x_i      point                 fp32 [P]         -        -
            xh       replica.parameters    fp32 [P]         -        while a step is under way
            E        topology              -                complete a peer drawn from all others
            -        meetings_per_step     -                1        see below

Departures  Who meets when is not decided at run time, when a worker has a gradient: all workers
            derive one stream of meetings, at random times (a Poisson process), each on a random
            edge. `meetings_per_step` is how many a worker takes part in per step, on average; in
            the paper each worker begins one per step, which makes 2. A meeting begins when both
            have done the steps that come before its time, so a fast worker's meetings wait for a
            slow one's steps; its own steps do not, until the round ends. The stream's order is
            total, so that nothing can wait in a circle, on any graph. A meeting adds
            (x_j - x_i) / 2 of the moment when both began it, and keeps the steps taken until it
            arrives: the same as an average at that moment. With `wait_for_meetings` a step's
            gradient is applied only when the meetings of its time are over: then the result does
            not depend on the links, which block. The inner optimizer is the recipe's (AdamW as
            well as SGD). Buffers are averaged in random pairs, at the round's end.

Reduces to  a2cid2 with eta = 0 and alpha_tilde = 1/2
            one worker's plain training loop, when M = 1

Cost        sent per worker and round, on average: H meetings_per_step P values, overlapped
            extra memory: P (x), P for the gradient, and P for each meeting under way

Fails       a meeting whose exchange fails, or whose peer is gone or later than the deadline, is
            left out by both sides. A non-finite vector ends the worker that made it.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers_in_pairs
from gossamer.comm.coding import Coding
from gossamer.comm.context import Context, MethodState
from gossamer.comm.meetings import Meetings
from gossamer.methods.base import Method, Sends
from gossamer.mixing.meetings import check_topology_of_meetings
from gossamer.mixing.topologies import TopologySetting, topology_field
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica


class ADPSGD(Method):
    """AD-PSGD (arXiv:1710.06952)."""

    name: ClassVar[str] = "ad_psgd"
    State: ClassVar[type[MethodState]] = MethodState

    topology: TopologySetting = topology_field("complete")
    meetings_per_step: float = Field(
        1.0, gt=0, description="pair averages of a worker per inner step, on average"
    )
    wait_for_meetings: bool = Field(
        False, description="let a step wait for the meetings of its time; then links change nothing"
    )

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        check_topology_of_meetings(self.topology, num_workers)

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def sends(self) -> Sends:
        return Sends(points=True)

    def init(self, replica: Replica) -> MethodState:
        return MethodState()

    async def run(self, ctx: Context, state: MethodState) -> None:
        replica = ctx.replica
        async for round_ in ctx.rounds(state):
            point = replica.parameters.clone()
            meetings = Meetings(
                ctx,
                round_,
                "meetings",
                topology=self.topology,
                rate=self.meetings_per_step,
                num_steps=self.inner_steps,
                coding=Coding(self.codec),
            )
            async with ctx.task_group() as tasks:
                tasks.start(self._average(meetings, point))
                for step in range(self.inner_steps):
                    gradient = await ctx.gradient()
                    if self.wait_for_meetings:
                        gradient = gradient.clone()
                        await meetings.settled(step)
                    replica.parameters.copy_(point)
                    ctx.apply_gradient(gradient)
                    point.copy_(replica.parameters)
                    meetings.stepped()
            replica.parameters.copy_(point)
            await synchronise_buffers_in_pairs(ctx, round_)

    async def _average(self, meetings: Meetings, point: Tensor) -> None:
        """My meetings of a round: each moves `point` half of the way to the peer's."""
        for meeting in meetings.mine:
            await meetings.due(meeting)
            mine = point.clone()
            theirs = await meetings.swap(meeting, mine)
            if theirs is not None:
                point.sub_(mine.sub_(theirs), alpha=0.5)
            meetings.held()
