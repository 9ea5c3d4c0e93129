"""A2CiD2: asynchronous gossip with a second copy that flows into the first, for acceleration.

Source:     A. Nabli, E. Belilovsky, E. Oyallon, "A2CiD2: Accelerating Asynchronous Communication in
            Decentralized Deep Learning", NeurIPS 2023, arXiv:2306.08289, Algorithm 1.

Update      between events, for a span of time s:
                    (x, xt) <- exp(s eta [[-1, 1], [1, -1]]) (x, xt)
            step:   g = grad f_i(x);   x <- InnerOpt(x, g);   xt moves as x does
            meeting with j:
                    m  = x_i - x_j;   x_i <- x_i - alpha m;   xt_i <- xt_i - alpha_tilde m

Symbols     paper    here                  unit / shape     default  where the default comes from
            -        inner_steps           steps in a round 100      reporting only, see below
            x        copies.point          fp32 [P]         -        -
            xt       state.companion       fp32 [P]         x        starts as x
            alpha    -                     -                1/2      the paper
            alpha~   alpha_tilde           -                auto     sqrt(chi1 / chi2) / 2
            eta      eta                   1 / step         auto     1 / (2 sqrt(chi1 chi2))
            chi1     -                     steps            -        1 / least eigenvalue of Lambda
            chi2     -                     steps            -        half the largest resistance
            E        topology              -                complete -
            -        meetings_per_step     -                1        the paper's experiments

Departures  As in `ad_psgd`: meetings are one stream that all workers derive. Time is counted in
            inner steps, and read off the stream and the worker's own steps, not off a clock: step h
            is applied at time h, and a meeting held late counts as held when it is. Workers
            whose steps take unequal time so have unequal clocks. With AdamW and its like, xt takes
            the change that the optimizer makes to x.

Reduces to  ad_psgd    when eta = 0 and alpha_tilde = 1/2; with the paper's constants where any two
                       may meet, as chi1 = chi2 there
            one worker's plain training loop, when M = 1

Cost        sent per worker and round, on average: H meetings_per_step P values, overlapped
            extra memory: 2 P (x, xt), 2 P during a step, and P for each meeting under way

Fails       a meeting whose exchange fails, or whose peer is gone or later than the deadline, is
            left out by both sides: the mean of x and that of xt stay as they are. A non-finite
            vector ends the worker that made it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers_in_pairs
from gossamer.comm.coding import Coding
from gossamer.comm.context import Context, MethodState, Round
from gossamer.comm.meetings import Meetings
from gossamer.methods.base import Method, Sends, state_of
from gossamer.mixing.meetings import check_topology_of_meetings, chi_of_meetings
from gossamer.mixing.topologies import TopologySetting, topology_field
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class A2CiD2State(MethodState):
    """The second copy xt [P]; the first is the replica's parameters."""

    companion: Tensor


@dataclass
class Copies:
    """x and xt [P], and the time to which they have flowed, in steps of the round."""

    point: Tensor
    companion: Tensor
    eta: float
    time: float = 0.0

    def flow_to(self, time: float) -> None:
        """The exact flow: x + xt stays, and x - xt shrinks by exp(-2 eta s)."""
        share = -math.expm1(-2 * self.eta * max(0.0, time - self.time)) / 2
        self.time = max(self.time, time)
        if share > 0:
            flow = (self.companion - self.point).mul_(share)
            self.point.add_(flow)
            self.companion.sub_(flow)


class A2CiD2(Method):
    """A2CiD2 (arXiv:2306.08289)."""

    name: ClassVar[str] = "a2cid2"
    State: ClassVar[type[MethodState]] = A2CiD2State

    topology: TopologySetting = topology_field("complete")
    meetings_per_step: float = Field(
        1.0, gt=0, description="pair averages of a worker per inner step, on average"
    )
    eta: float | Literal["auto"] = Field(
        "auto", description="rate at which the copies mix, per step; auto: the paper's"
    )
    alpha_tilde: float | Literal["auto"] = Field(
        "auto", description="how far a meeting moves the second copy; auto: the paper's"
    )
    wait_for_meetings: bool = Field(
        False, description="let a step wait for the meetings of its time; then links change nothing"
    )

    @field_validator("eta", "alpha_tilde")
    @classmethod
    def _not_negative(cls, value: float | Literal["auto"]) -> float | Literal["auto"]:
        if value != "auto" and not 0 <= value < math.inf:
            raise ValueError(f'"auto" or a number from 0 on expected; got {value!r}')
        return value

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        check_topology_of_meetings(self.topology, num_workers)

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def sends(self) -> Sends:
        return Sends(points=True)

    def init(self, replica: Replica) -> A2CiD2State:
        return A2CiD2State(companion=replica.parameters.clone())

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(A2CiD2State, state)
        replica = ctx.replica
        async for round_ in ctx.rounds(state):
            eta, alpha_tilde = self._constants(ctx, round_)
            copies = Copies(replica.parameters.clone(), state.companion, eta)
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
                tasks.start(self._meet(meetings, copies, alpha_tilde))
                for step in range(self.inner_steps):
                    gradient = await ctx.gradient()
                    if self.wait_for_meetings:
                        gradient = gradient.clone()
                        await meetings.settled(step)
                    copies.flow_to(step + 1)
                    replica.parameters.copy_(copies.point)
                    ctx.apply_gradient(gradient)
                    copies.companion.add_(replica.parameters - copies.point)
                    copies.point.copy_(replica.parameters)
                    meetings.stepped()
            replica.parameters.copy_(copies.point)
            await synchronise_buffers_in_pairs(ctx, round_)

    async def _meet(self, meetings: Meetings, copies: Copies, alpha_tilde: float) -> None:
        """My meetings of a round."""
        for meeting in meetings.mine:
            await meetings.due(meeting)
            copies.flow_to(meeting.time)
            mine = copies.point.clone()
            theirs = await meetings.swap(meeting, mine)
            if theirs is not None:
                difference = mine.sub_(theirs)
                copies.point.sub_(difference, alpha=0.5)
                copies.companion.sub_(difference, alpha=alpha_tilde)
            meetings.held()

    def _constants(self, ctx: Context, round_: Round) -> tuple[float, float]:
        """(eta, alpha_tilde), from the graph of those who take part."""
        members = round_.members.workers
        edges = self.topology.edges(ctx.seed, round_.index, members)
        if not edges:  # nobody to meet
            return 0.0, 0.5
        chi1, chi2 = chi_of_meetings(edges, len(members), self.meetings_per_step)
        eta = 1 / (2 * math.sqrt(chi1 * chi2)) if self.eta == "auto" else self.eta
        rate = math.sqrt(chi1 / chi2) / 2 if self.alpha_tilde == "auto" else self.alpha_tilde
        return eta, rate
