"""Local SGD (federated averaging): H inner steps alone, then average the parameters.

Source:     S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019,
            arXiv:1805.09767; B. McMahan et al., AISTATS 2017 (FedAvg), arXiv:1602.05629.

Update      theta_i <- InnerOpt(theta_i)          H times
            theta_i <- mean_j theta_j             all-reduce, blocking

Symbols     paper    here                  unit / shape     default  where the default comes from
            H        inner_steps           inner steps      100      not published for this use
            theta_i  replica.parameters    fp32 [P]         -        -

Departures  The inner optimizer is the recipe's (AdamW as well as SGD); its moments stay local.

Reduces to  minibatch SGD with M times the batch, when H = 1 and the inner optimizer is SGD

Cost        sent per worker and round: 2 (M-1)/M P values, blocking; a byte per peer for the vote
            extra memory: P while the parameters are on their way

Fails       as DiLoCo: the whole all-reduce is repeated until it succeeds.
"""

from __future__ import annotations

from typing import ClassVar

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding, start_of
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState
from gossamer.methods.base import Method, Sends
from gossamer.training.replica import Replica


class LocalSGD(Method):
    """Local SGD / FedAvg (arXiv:1805.09767)."""

    name: ClassVar[str] = "local_sgd"
    State: ClassVar[type[MethodState]] = MethodState

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> MethodState:
        return MethodState(residual=self.new_residual(replica))

    async def run(self, ctx: Context, state: MethodState) -> None:
        replica = ctx.replica
        async for round_ in ctx.rounds(state):
            start = start_of(self.codec, replica.parameters)
            await ctx.train(self.inner_steps)
            mean = replica.parameters.clone()
            coding = Coding(self.codec, since=start, residual=state.residual)
            agreed = await all_reduce_until_complete(ctx, round_, "average", mean, coding=coding)
            replica.parameters.copy_(mean)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)
