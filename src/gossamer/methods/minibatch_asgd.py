"""Minibatch accelerated SGD: one accelerated step a round, along all workers' mean gradient.

Source:     G. Lan, "An Optimal Method for Stochastic Composite Optimization", Mathematical
            Programming 2012 (AC-SA), unconstrained; and the practical form, Nesterov momentum.

Update      G <- mean_i mean over K batches of grad f(point; z)         all-reduce, blocking
            "ac_sa"     t = 1 for the first round;  a = 2/(t + 1)
                        md <- (1 - a) ag + a x          the point of G
                        x  <- x - eta t/2 G
                        ag <- (1 - a) ag + a x
            "nesterov"  v  <- mu v + G                  the point of G is x
                        x  <- x - eta (G + mu v)

Symbols     paper    here                  unit / shape     default  where the default comes from
            K        inner_steps           batches          100      not published for this use
            lambda   train.learning_rate   -                -        the recipe's (eta above)
            mu       momentum              -                0.9      Local MixVR's experiments
            ag       replica.parameters    fp32 [P]         -        of "ac_sa": what it returns
            x        state.iterate         fp32 [P]         -        of "ac_sa"; replica.parameters
                                                                     of "nesterov"
            v        state.iterate         fp32 [P]         0        of "nesterov"

Departures  The form of "nesterov" is PyTorch's. No clipping, weight decay or inner optimizer. A
            learning rate with a schedule is that of the round's last batch.

Reduces to  minibatch_sgd, when form = "nesterov" and mu = 0

Cost        1 gradient a batch
            sent per worker and round: 2 (M-1)/M P values, blocking; a byte per peer for the vote
            extra memory: P (x or v), and 2 P while the gradient is taken and on its way

Fails       as DiLoCo: the whole all-reduce is repeated until it succeeds, and a worker that is gone
            is left out. A loss or gradient that is not finite ends its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState, Round
from gossamer.methods.base import Method, Sends, state_of
from gossamer.outer.nesterov import nesterov_step_
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class MinibatchASGDState(MethodState):
    """AC-SA's x [P], or Nesterov's velocity v [P]; equal on all workers."""

    iterate: Tensor


class MinibatchASGD(Method):
    """Minibatch accelerated SGD: AC-SA, or Nesterov momentum."""

    name: ClassVar[str] = "minibatch_asgd"
    State: ClassVar[type[MethodState]] = MinibatchASGDState

    form: Literal["nesterov", "ac_sa"] = Field(
        "nesterov", description="constant Nesterov momentum, or the theory's AC-SA"
    )
    momentum: float = Field(
        0.9, ge=0, lt=1, description='with form = "nesterov" (MixVR\'s paper: 0.9)'
    )

    @model_validator(mode="after")
    def _no_setting_is_ignored(self) -> MinibatchASGD:
        if self.form == "ac_sa" and self.momentum != type(self).model_fields["momentum"].default:
            raise ValueError('momentum: needs form = "nesterov"; "ac_sa" has its own')
        return self

    @property
    def makes_own_steps(self) -> bool:
        return True

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> MinibatchASGDState:
        start = replica.parameters
        is_point = self.form == "ac_sa"
        return MinibatchASGDState(
            iterate=start.clone() if is_point else start.new_zeros(start.shape),
            residual=self.new_residual(replica),
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(MinibatchASGDState, state)
        step = self._ac_sa if self.form == "ac_sa" else self._nesterov
        async for round_ in ctx.rounds(state):
            agreed = await step(ctx, round_, state)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)

    async def _ac_sa(self, ctx: Context, round_: Round, state: MinibatchASGDState) -> Round:
        t = round_.index + 1
        share = 2 / (t + 1)
        average = ctx.replica.parameters
        middle = torch.lerp(average, state.iterate, share)
        gradient, agreed = await self._mean_gradient(ctx, round_, state, middle)
        state.iterate.sub_(gradient, alpha=ctx.replica.learning_rate * t / 2)
        average.lerp_(state.iterate, share)
        return agreed

    async def _nesterov(self, ctx: Context, round_: Round, state: MinibatchASGDState) -> Round:
        x = ctx.replica.parameters
        gradient, agreed = await self._mean_gradient(ctx, round_, state, x)
        nesterov_step_(
            x,
            state.iterate,
            gradient,
            learning_rate=ctx.replica.learning_rate,
            momentum=self.momentum,
        )
        return agreed

    async def _mean_gradient(
        self, ctx: Context, round_: Round, state: MinibatchASGDState, point: Tensor
    ) -> tuple[Tensor, Round]:
        (gradient,) = await ctx.gradients([point], self.inner_steps)
        coding = Coding(self.codec, residual=state.residual)
        agreed = await all_reduce_until_complete(ctx, round_, "gradient", gradient, coding=coding)
        return gradient, agreed
