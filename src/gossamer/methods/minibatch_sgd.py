"""Minibatch SGD: one step a round, along the mean gradient of all batches of all workers.

Source:     the standard baseline; O. Dekel et al., "Optimal Distributed Online Prediction Using
            Mini-Batches", JMLR 2012, arXiv:1012.1367.

Update      G <- mean_i mean over K batches of grad f(x; z)        all-reduce, blocking
            x <- x - eta G                                         once a round

Symbols     paper    here                  unit / shape     default  where the default comes from
            K        inner_steps           batches          100      not published for this use
            eta      train.learning_rate   -                -        the recipe's
            x        replica.parameters    fp32 [P]         -        -

Departures  No clipping, weight decay or inner optimizer. A learning rate with a schedule is that of
            the round's last batch.

Reduces to  local_sgd, with optimizer = "sgd", when K = 1
            plain SGD on K times the batch, when M = 1

Cost        1 gradient a batch
            sent per worker and round: 2 (M-1)/M P values, blocking; a byte per peer for the vote
            extra memory: 2 P while the gradient is taken and on its way

Fails       as DiLoCo: the whole all-reduce is repeated until it succeeds, and a worker that is gone
            is left out. A loss or gradient that is not finite ends its worker.
"""

from __future__ import annotations

from typing import ClassVar

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState
from gossamer.methods.base import Method, Sends
from gossamer.training.replica import Replica


class MinibatchSGD(Method):
    """Minibatch SGD (arXiv:1012.1367)."""

    name: ClassVar[str] = "minibatch_sgd"
    State: ClassVar[type[MethodState]] = MethodState

    @property
    def makes_own_steps(self) -> bool:
        return True

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> MethodState:
        return MethodState(residual=self.new_residual(replica))

    async def run(self, ctx: Context, state: MethodState) -> None:
        x = ctx.replica.parameters
        coding = Coding(self.codec, residual=state.residual)
        async for round_ in ctx.rounds(state):
            (gradient,) = await ctx.gradients([x], self.inner_steps)
            agreed = await all_reduce_until_complete(
                ctx, round_, "gradient", gradient, coding=coding
            )
            x.sub_(gradient, alpha=ctx.replica.learning_rate)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)
