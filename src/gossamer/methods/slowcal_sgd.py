"""SLowcal-SGD: local steps of Anytime-SGD, whose query points drift slowly, then average both.

Source:     K. Levy, T. Dahan, "SLowcal-SGD: Slow Query Points Improve Local-SGD for Stochastic
            Convex Optimization", NeurIPS 2024, arXiv:2304.04169. The paper itself was not at hand.

Update      Anytime-SGD on w_i and x_i                  K steps, as in anytime_sgd
            w_i, x_i <- mean_j w_j, mean_j x_j          all-reduce, blocking

Symbols     paper    here                  unit / shape     default  where the default comes from
            K        inner_steps           inner steps      100      not published for this use
            eta      train.learning_rate   -                -        the recipe's
            alpha_t  weights               -                t        the paper's t + 1, from t = 0
            w        state.iterate         fp32 [P]         -        -
            x        replica.parameters    fp32 [P]         -        where gradients are taken

Departures  With linear weights a step is t eta long over the T = R K steps of the run, so that eta
            has to be smaller than for Local SGD. No clipping, weight decay or inner optimizer.

Reduces to  anytime_sgd  when M = 1
            minibatch_sgd  when K = 1 and R = 1 (later x is the average of its points)

Cost        1 gradient a batch
            sent per worker and round: 2 (M-1)/M times 2 P values, blocking; a byte per peer for the
            vote; extra memory: P (w), and 2 P while gradients or vectors are on their way

Fails       as DiLoCo: the whole all-reduce is repeated until it succeeds, and a worker that is gone
            is left out. A loss, gradient or vector that is not finite ends its worker.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding, start_of
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState
from gossamer.methods.anytime_sgd import AnytimeSGD, AnytimeState
from gossamer.methods.base import Sends, state_of


class SlowcalSGD(AnytimeSGD):
    """SLowcal-SGD (arXiv:2304.04169)."""

    name: ClassVar[str] = "slowcal_sgd"

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(AnytimeState, state)
        x = ctx.replica.parameters
        async for round_ in ctx.rounds(state):
            start = start_of(self.codec, state.iterate, x)
            await self.local_steps(ctx, state, round_.index * self.inner_steps + 1)
            points = torch.cat([state.iterate, x])
            coding = Coding(self.codec, parts=2, since=start, residual=state.residual)
            agreed = await all_reduce_until_complete(ctx, round_, "points", points, coding=coding)
            iterate, average = points.chunk(2)
            state.iterate.copy_(iterate)
            x.copy_(average)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)
