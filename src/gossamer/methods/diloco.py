"""DiLoCo: H inner steps alone, then one outer Nesterov step on the average outer gradient.

Source:     A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
            Models", 2023, arXiv:2311.08105, Algorithm 1.

Update      inner:  theta_i <- InnerOpt(theta_i)                    H times
            outer:  Delta   = mean_i (theta - theta_i)              all-reduce, blocking
                    v       <- mu v + Delta                         v starts at 0
                    theta   <- theta - lr (Delta + mu v)            PyTorch's SGD(nesterov=True)

Symbols     paper    here                  unit / shape     default  where the default comes from
            H        inner_steps           inner steps      100      the paper uses 500
            theta    state.anchor          fp32 [P]         -        -
            Delta    delta                 fp32 [P]         -        start minus end: subtracted
            v        state.momentum        fp32 [P]         0        -
            lr       outer_learning_rate   -                0.7      the paper
            mu       outer_momentum        -                0.9      the paper

Departures  None in the update. A broken all-reduce is repeated whole.

Reduces to  local_sgd      when lr = 1 and mu = 0
            any FG-DiLoCo  with mix2 = "global": there Mix1 averages equal vectors

Cost        sent per worker and round: 2 (M-1)/M P values, blocking; a byte per peer for the vote
            extra memory: 2 P (anchor, momentum), and P while the outer gradient is on its way (it
            lies where the gradient was, and the others' parts of the mean come beside it)

Fails       a lost, late or damaged message fails the whole all-reduce, which all workers then
            repeat until it succeeds; a worker that is gone is left out of the next attempt. A
            non-finite outer gradient ends the worker that made it, before anything is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState
from gossamer.methods.base import Method, Sends, outer_learning_rate, outer_momentum, state_of
from gossamer.outer.nesterov import nesterov_step_
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class DiLoCoState(MethodState):
    """The last agreed parameters [P] and the outer momentum [P]; equal on all workers."""

    anchor: Tensor
    momentum: Tensor


class DiLoCo(Method):
    """DiLoCo (arXiv:2311.08105)."""

    name: ClassVar[str] = "diloco"
    State: ClassVar[type[MethodState]] = DiLoCoState

    outer_learning_rate: float = outer_learning_rate()
    outer_momentum: float = outer_momentum()

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> DiLoCoState:
        start = replica.parameters
        return DiLoCoState(
            anchor=start.clone(),
            momentum=start.new_zeros(start.shape),
            residual=self.new_residual(replica),
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(DiLoCoState, state)
        replica, coding = ctx.replica, Coding(self.codec, residual=state.residual)
        async for round_ in ctx.rounds(state):
            await ctx.train(self.inner_steps)
            delta = torch.sub(state.anchor, replica.parameters, out=ctx.scratch())
            agreed = await all_reduce_until_complete(ctx, round_, "outer", delta, coding=coding)
            nesterov_step_(
                state.anchor,
                state.momentum,
                delta,
                learning_rate=self.outer_learning_rate,
                momentum=self.outer_momentum,
            )
            replica.parameters.copy_(state.anchor)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)
