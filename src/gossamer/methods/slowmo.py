"""SlowMo: local or gossip steps, an exact average, and slow momentum on what they achieved.

Source:     J. Wang, V. Tantia, N. Ballas, M. Rabbat, "SlowMo: Improving Communication-Efficient
            Distributed SGD with Slow Momentum", ICLR 2020, arXiv:1910.00643, Algorithm 1.

Update      inner:  x_i <- InnerOpt(x_i)                       H times; with base = "gossip" each
                                                               step is followed by a mix
            outer:  x_H = mean_i x_i                           all-reduce, blocking
                    u   <- beta u + (x_0 - x_H) / lr           u starts at 0
                    x   <- x_0 - alpha lr u

Symbols     paper    here                  unit / shape     default  where the default comes from
            tau      inner_steps           inner steps      100      the paper has 12 and 48
            x_0      start                 fp32 [P]         -        equal on all workers
            u        state.momentum        fp32 [P]         0        equal on all workers
            alpha    alpha                 -                1        the paper: slow learning rate
            beta     beta                  -                0.5      the paper: 0.4 to 0.8
            gamma    replica.learning_rate -                -        lr: of the round's last step

Departures  The paper's fast learning rate is constant in a round; under a schedule lr is that of
            the round's last step. Inner moments stay local and are kept (the paper's "maintain").
            The gossip base is D-SGD, adapt-then-combine.

Reduces to  local_sgd       when alpha = 1 and beta = 0
            diloco          with heavy ball in place of Nesterov and a constant lr: lr_out = alpha,
                            mu = beta. DiLoCo's Nesterov iterates are SlowMo's, each moved on by
                            - alpha beta lr u, wherever Delta does not depend on the point
            noloco          with one group of all: beta = alpha here, alpha = beta here
            data_parallel   with momentum beta, when H = 1, alpha = 1 and the inner optimizer is SGD

Cost        sent per worker and round: 2 (M-1)/M P values, blocking; a byte per peer for the vote;
            with base = "gossip" also H P values to each neighbour, blocking
            extra memory: 2 P (x_0, u), and P while the average is on its way

Fails       as DiLoCo: the all-reduce is repeated until it succeeds. A failed edge of a gossip step
            leaves its weight on both ends' diagonal. A non-finite vector ends its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState, Round
from gossamer.comm.neighbours import mix_neighbours
from gossamer.methods.base import Method, Sends, state_of
from gossamer.mixing.graphs import Weights
from gossamer.mixing.topologies import (
    TopologySetting,
    mixing_graph,
    parse_topology,
    topology_field,
)
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica

_GOSSIP = "one_peer_exponential"


@dataclass(kw_only=True)
class SlowMoState(MethodState):
    """The slow momentum u [P]; equal on all workers."""

    momentum: Tensor


class SlowMo(Method):
    """SlowMo (arXiv:1910.00643)."""

    name: ClassVar[str] = "slowmo"
    State: ClassVar[type[MethodState]] = SlowMoState

    alpha: float = Field(1.0, gt=0, description="slow learning rate (paper: 1)")
    beta: float = Field(0.5, ge=0, lt=1, description="slow momentum (paper: 0.4 to 0.8)")
    base: Literal["local", "gossip"] = Field(
        "local", description="whether inner steps are local, or each is followed by a mix"
    )
    topology: TopologySetting = topology_field(_GOSSIP)
    weights: Weights = Field("metropolis", description='how edges are weighted, base = "gossip"')

    @model_validator(mode="after")
    def _no_setting_is_ignored(self) -> SlowMo:
        given = (self.topology, self.weights) != (parse_topology(_GOSSIP), "metropolis")
        if self.base == "local" and given:
            raise ValueError('topology, weights: used with base = "gossip" only; leave them out')
        return self

    @property
    def sends(self) -> Sends:
        return Sends(averages=True, points=self.base == "gossip")

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        if self.base == "gossip" and num_workers > 1:
            self.topology.validate_for(num_workers)

    def init(self, replica: Replica) -> SlowMoState:
        return SlowMoState(
            momentum=replica.parameters.new_zeros(replica.parameters.shape),
            residual=self.new_residual(replica),
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(SlowMoState, state)
        replica = ctx.replica
        async for round_ in ctx.rounds(state):
            start = replica.parameters.clone()
            if self.base == "local":
                await ctx.train(self.inner_steps)
            else:
                await self._gossip(ctx, round_)
            mean = replica.parameters.clone()
            coding = Coding(self.codec, since=start, residual=state.residual)
            agreed = await all_reduce_until_complete(ctx, round_, "average", mean, coding=coding)
            learning_rate = replica.learning_rate
            state.momentum.mul_(self.beta)
            if learning_rate > 0:  # a schedule may end at 0, where nothing has moved
                state.momentum.add_(start - mean, alpha=1 / learning_rate)
            start.sub_(state.momentum, alpha=self.alpha * learning_rate)
            replica.parameters.copy_(start)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)

    async def _gossip(self, ctx: Context, round_: Round) -> None:
        """H steps, each followed by a mix with the neighbours."""
        for step in range(self.inner_steps):
            await ctx.train(1)
            graph = mixing_graph(
                self.topology,
                self.weights,
                seed=ctx.seed,
                round_index=round_.index * self.inner_steps + step,
                members=round_.members.workers,
            )
            neighbours = graph.neighbours(ctx.worker)
            await mix_neighbours(
                ctx, round_, "mix", ctx.replica.parameters, neighbours,
                step=step, coding=Coding(self.codec),
            )  # fmt: skip
