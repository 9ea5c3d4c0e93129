"""Stochastic gradient push: push-sum gossip on directed graphs, where nobody waits for an answer.

Source:     M. Assran, N. Loizou, N. Ballas, M. Rabbat, "Stochastic Gradient Push for Distributed
            Deep Learning", ICML 2019, arXiv:1811.10792, Algorithm 1; the push-sum of D. Kempe, A.
            Dobra, J. Gehrke, FOCS 2003.

Update      every step, from x = theta_0 and q = 1:
                    z_i = x_i / q_i
                    x_i <- x_i + (InnerOpt(z_i) - z_i)             with SGD: - lr grad f_i(z_i)
                    (x_i, q_i) <- sum_j P_ij (x_j, q_j)            columns of P sum to 1

Symbols     paper    here                  unit / shape     default  where the default comes from
            -        inner_steps           steps in a round 100      reporting only
            x, w     state.mass            fp32 [P + 1]     -        x, and q (the paper's w) last
            z        replica.parameters    fp32 [P]         -        what is trained and measured
            P        topology              [M, M]           one-peer exponential: the paper's

Departures  Shares are equal: 1 / (1 + outgoing arcs), 1/2 with one peer. The inner optimizer is the
            recipe's (AdamW as well as SGD): x takes the change that it makes to z. Shares are
            waited for in the same step (the paper's OSGP, which overlaps them, is left out).
            Buffers are averaged in random pairs, at the round's end.

Reduces to  dsgd, adapt-then-combine, on graphs in which all have equally many neighbours, both ways
            one worker's plain training loop, when M = 1

Cost        sent per worker and round: H (P + 1) values for each outgoing arc, blocking
            extra memory: P (x), and P for the share while it is on its way

Fails       a share that its receiver has not accepted is taken back by its sender, so the sums of x
            and q over the workers stay as they are; z stays a proper average, with more weight on
            whoever could not push. What a worker holds when it crashes is gone, and one that
            returns begins with a copy of its donor's: z is then an average of what there is. A
            non-finite mass ends the worker that made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers_in_pairs
from gossamer.comm.coding import Coding
from gossamer.comm.context import Context, MethodState
from gossamer.comm.push import push_shares
from gossamer.methods.base import Method, Sends, state_of
from gossamer.mixing.topologies import TopologySetting, topology_field
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class SGPState(MethodState):
    """The numerator x and, last, the push-sum weight q: [P + 1]."""

    mass: Tensor


class SGP(Method):
    """Stochastic gradient push (arXiv:1811.10792)."""

    name: ClassVar[str] = "sgp"
    State: ClassVar[type[MethodState]] = SGPState

    topology: TopologySetting = topology_field("one_peer_exponential")

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        if num_workers > 1:
            self.topology.validate_for(num_workers)

    @property
    def sends(self) -> Sends:
        return Sends(points=True)

    def init(self, replica: Replica) -> SGPState:
        start = replica.parameters
        return SGPState(mass=torch.cat([start, start.new_ones(1)]))

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(SGPState, state)
        replica = ctx.replica
        coding = Coding(self.codec, exact_tail=1)  # the weight goes as it is
        numerator, weight = state.mass[:-1], state.mass[-1:]
        async for round_ in ctx.rounds(state):
            for step in range(self.inner_steps):
                before = replica.parameters.clone()
                await ctx.train(1)
                numerator.add_(replica.parameters - before)
                arcs = self.topology.arcs(
                    ctx.seed,
                    round_.index * self.inner_steps + step,
                    round_.members.workers,
                )
                await push_shares(ctx, round_, "push", state.mass, arcs, step=step, coding=coding)
                torch.div(numerator, weight, out=replica.parameters)
            await synchronise_buffers_in_pairs(ctx, round_)
