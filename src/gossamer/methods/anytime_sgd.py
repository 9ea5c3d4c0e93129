"""Anytime-SGD: gradients at the weighted mean of the iterates, each worker on its own.

Source:     A. Cutkosky, "Anytime Online-to-Batch, Optimism and Acceleration", ICML 2019,
            arXiv:1903.00974.

Update      t counts the steps of the whole run from 1; z is a fresh batch
            w <- w - eta a_t grad f(x; z)
            x <- the a-weighted mean of all w so far, this one with weight a_(t+1)

Symbols     paper    here                  unit / shape     default  where the default comes from
            -        inner_steps           steps a round    100      reporting only, see below
            eta      train.learning_rate   -                -        the recipe's
            a_t      weights               -                t        SLowcal-SGD and mu^2-SGD
            w        state.iterate         fp32 [P]         -        -
            x        replica.parameters    fp32 [P]         -        where gradients are taken

Departures  With linear weights a step is t eta long, so that eta has to be smaller than elsewhere,
            by the number of steps. The workers never communicate: it is what SLowcal-SGD does
            between averages. No clipping, weight decay or inner optimizer.

Reduces to  slowcal_sgd, which it is with M = 1

Cost        1 gradient a batch; nothing is sent
            extra memory: P (w), and 2 P while gradients are taken

Fails       with the worker itself: a crashed one takes a donor's state when it returns. A loss or
            gradient that is not finite ends its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from gossamer.comm.context import Context, MethodState
from gossamer.methods.base import Method, state_of
from gossamer.outer.double_momentum import anytime_, theory_momenta
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class AnytimeState(MethodState):
    """The iterate w [P]; the average x is the replica's parameters."""

    iterate: Tensor


class AnytimeSGD(Method):
    """Anytime-SGD (arXiv:1903.00974)."""

    name: ClassVar[str] = "anytime_sgd"
    State: ClassVar[type[MethodState]] = AnytimeState

    weights: Literal["linear", "uniform"] = Field(
        "linear", description="of the iterates in their mean, and of the steps: t, or all 1"
    )

    @property
    def makes_own_steps(self) -> bool:
        return True

    def init(self, replica: Replica) -> AnytimeState:
        return AnytimeState(
            iterate=replica.parameters.clone(),
            residual=self.new_residual(replica, 2),  # of SLowcal-SGD
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(AnytimeState, state)
        async for round_ in ctx.rounds(state):
            await self.local_steps(ctx, state, round_.index * self.inner_steps + 1)

    async def local_steps(self, ctx: Context, state: AnytimeState, first: int) -> None:
        """The steps of one round, of which the first is step `first` of the run."""
        x = ctx.replica.parameters
        for t in range(first, first + self.inner_steps):
            (gradient,) = await ctx.gradients([x])
            if self.weights == "linear":
                _, gamma, weight = theory_momenta(t)
            else:
                gamma, weight = 1 / (t + 1), 1.0
            state.iterate.sub_(gradient, alpha=weight * ctx.replica.learning_rate)
            anytime_(x, state.iterate, gamma=gamma)
