"""Local Momentum: heavy-ball SGD on each worker, then average the parameters, or the momenta too.

Source:     H. Yu, R. Jin, S. Yang, "On the Linear Speedup Analysis of Communication Efficient
            Momentum SGD for Distributed Non-Convex Optimization", ICML 2019, arXiv:1905.03817.

Update      v_i <- mu v_i + grad f(x_i; z);   x_i <- x_i - eta v_i           K times
            x_i <- mean_j x_j   (and v_i <- mean_j v_j)                      all-reduce, blocking

Symbols     paper    here                  unit / shape     default  where the default comes from
            K        inner_steps           inner steps      100      not published for this use
            eta      train.learning_rate   -                -        the recipe's
            mu       momentum              -                0.9      Local MixVR's experiments
            x        replica.parameters    fp32 [P]         -        -
            v        state.momentum        fp32 [P]         0        -

Departures  average_momentum = false is ours: the momenta then stay with their workers, as the inner
            optimizer's do in local_sgd. No clipping or weight decay.

Reduces to  local_sgd, with optimizer = "sgd": when mu = 0, and with its momentum = mu when
            average_momentum = false

Cost        1 gradient a batch
            sent per worker and round: 2 (M-1)/M times 2 P values (P without the momenta), blocking;
            a byte per peer for the vote
            extra memory: P (v), and 2 P while gradients or vectors are on their way

Fails       as DiLoCo: the whole all-reduce is repeated until it succeeds, and a worker that is gone
            is left out. A loss, gradient or vector that is not finite ends its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding, start_of
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState, Round
from gossamer.methods.base import Method, Sends, state_of
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class LocalMomentumState(MethodState):
    """The heavy ball's velocity v [P]."""

    momentum: Tensor


class LocalMomentum(Method):
    """Local SGD with momentum (arXiv:1905.03817)."""

    name: ClassVar[str] = "local_momentum"
    State: ClassVar[type[MethodState]] = LocalMomentumState

    momentum: float = Field(0.9, ge=0, lt=1, description="of the heavy ball (MixVR's paper: 0.9)")
    average_momentum: bool = Field(True, description="the momenta are averaged with the parameters")

    @property
    def makes_own_steps(self) -> bool:
        return True

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> LocalMomentumState:
        return LocalMomentumState(
            momentum=replica.parameters.new_zeros(replica.parameters.shape),
            residual=self.new_residual(replica, 1 + self.average_momentum),
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(LocalMomentumState, state)
        x = ctx.replica.parameters
        async for round_ in ctx.rounds(state):
            agreed_before = [x, state.momentum] if self.average_momentum else [x]
            start = start_of(self.codec, *agreed_before)
            for _ in range(self.inner_steps):
                (gradient,) = await ctx.gradients([x])
                state.momentum.mul_(self.momentum).add_(gradient)
                x.sub_(state.momentum, alpha=ctx.replica.learning_rate)
            coding = Coding(
                self.codec, parts=len(agreed_before), since=start, residual=state.residual
            )
            agreed = await self._average(ctx, round_, state, coding)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)

    async def _average(
        self, ctx: Context, round_: Round, state: LocalMomentumState, coding: Coding
    ) -> Round:
        x = ctx.replica.parameters
        if not self.average_momentum:
            mean = x.clone()
            agreed = await all_reduce_until_complete(ctx, round_, "average", mean, coding=coding)
            x.copy_(mean)
            return agreed
        vectors = torch.cat([x, state.momentum])
        agreed = await all_reduce_until_complete(ctx, round_, "average", vectors, coding=coding)
        mean, momentum = vectors.chunk(2)
        x.copy_(mean)
        state.momentum.copy_(momentum)
        return agreed
