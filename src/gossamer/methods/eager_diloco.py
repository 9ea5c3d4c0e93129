"""Eager DiLoCo: the average is one round late, and each worker's part of it is replaced by its new.

Source:     S. Kale, A. Douillard, Y. Donchev, "Eager Updates for Overlapped Communication and
            Computation in DiLoCo", 2025, arXiv:2502.12996. The paper was not at hand: the rule is
            the one that summaries give.

Update      handle  = start mean_j Delta_j(t-1)              overlapped with the inner steps
            theta_i <- InnerOpt(theta_i)                     H times
            Delta_i = anchor_i - theta_i                     Delta_i(t)
            mean    = wait(handle)                           blocks only if slower than training
            D_i     = mean + (Delta_i(t) - Delta_i(t-1)) / M
            v_i     <- mu v_i + D_i
            theta_i <- anchor_i - lr (D_i + mu v_i);  anchor_i = theta_i

Symbols     paper    here                  unit / shape     default  where the default comes from
            H        inner_steps           inner steps      100      not published for this use
            anchor   state.anchor          fp32 [P]         -        workers' differ by one share
            Delta(t) state.latest          fp32 [P]         0        start minus end: subtracted
            v        state.momentum        fp32 [P]         0        workers' differ likewise
            M        state.group           workers          0        of the round of Delta(t)
            lr       outer_learning_rate   -                0.7      not published; DiLoCo's
            mu       outer_momentum        -                0.9      not published; DiLoCo's

Departures  The first round has no average to wait for: D_i = Delta_i / M (reconstructed; as if all
            outer gradients before it were 0). Where the number of workers changes, what a worker
            takes back of its own is exactly what it added: Delta_i(t-1) over the M of round t-1.

Reduces to  diloco  when M = 1
            diloco  with heavy delay, Delta(t-1) in place of Delta(t), as M grows

Cost        sent per worker and round: 2 (M-1)/M P values, overlapped with all H steps; a byte per
            peer for the vote
            extra memory: 3 P (anchor, momentum, Delta), and 2 P in a round (mean, the new Delta)

Fails       as DiLoCo: the all-reduce is repeated until it succeeds, here behind training. The
            workers differ by shares of 1 / M of their latest outer gradients, filtered by the outer
            optimizer, which do not add up from round to round, whatever the members are. Who
            returns has a donor's state, and adds the donor's outer gradient to one more average. A
            non-finite outer gradient ends the worker that made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import all_reduce_until_complete, check_finite
from gossamer.comm.context import Context, MethodState, Round
from gossamer.methods.base import Method, Sends, outer_learning_rate, outer_momentum, state_of
from gossamer.outer.nesterov import nesterov_step_
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class EagerDiLoCoState(MethodState):
    """One worker's point [P] and outer momentum [P], and its outer gradient not averaged yet [P].

    Args:
        group: workers among which `latest` was counted as one; 0 before the first round.
    """

    anchor: Tensor
    momentum: Tensor
    latest: Tensor
    group: int = 0


class EagerDiLoCo(Method):
    """DiLoCo with eager updates (arXiv:2502.12996)."""

    name: ClassVar[str] = "eager_diloco"
    State: ClassVar[type[MethodState]] = EagerDiLoCoState

    outer_learning_rate: float = outer_learning_rate()
    outer_momentum: float = outer_momentum()

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> EagerDiLoCoState:
        start = replica.parameters
        return EagerDiLoCoState(
            anchor=start.clone(),
            momentum=start.new_zeros(start.shape),
            latest=start.new_zeros(start.shape),
            residual=self.new_residual(replica),
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(EagerDiLoCoState, state)
        replica = ctx.replica
        mean, delta = torch.empty_like(state.anchor), torch.empty_like(state.anchor)
        async for round_ in ctx.rounds(state):
            mean.copy_(state.latest)
            async with ctx.task_group() as tasks:
                averaging = tasks.start(self._average(ctx, round_, state, mean))
                await ctx.train(self.inner_steps)
            agreed = averaging.result()
            torch.sub(state.anchor, replica.parameters, out=delta)
            check_finite(ctx, delta, "outer gradient")
            if state.group:
                mean.sub_(state.latest, alpha=1 / state.group)
            state.group = len(agreed.members.workers)
            mean.add_(delta, alpha=1 / state.group)
            state.latest, delta = delta, state.latest
            nesterov_step_(
                state.anchor,
                state.momentum,
                mean,
                learning_rate=self.outer_learning_rate,
                momentum=self.outer_momentum,
            )
            replica.parameters.copy_(state.anchor)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)

    async def _average(
        self, ctx: Context, round_: Round, state: EagerDiLoCoState, latest: Tensor
    ) -> Round:
        """The mean of all latest outer gradients, in place; there is none in the first round."""
        if not state.group:
            return round_
        coding = Coding(self.codec, residual=state.residual)
        return await all_reduce_until_complete(ctx, round_, "outer", latest, coding=coding)
