"""STORM: SGD along a variance-reduced estimate of the gradient, each worker on its own.

Source:     A. Cutkosky, F. Orabona, "Momentum-Based Variance Reduction in Non-Convex SGD", NeurIPS
            2019, arXiv:1905.10018.

Update      z is a fresh batch; the first d is g
            d  <- grad f(x; z) + (1 - beta) (d - grad f(x'; z))       x' is the previous x
            x' = x
            x  <- x - eta d

Symbols     paper    here                  unit / shape     default  where the default comes from
            -        inner_steps           steps a round    100      reporting only, see below
            eta      train.learning_rate   -                -        the recipe's
            a        beta = 1 - momentum   -                0.1      as in mu2_sgd
            x        replica.parameters    fp32 [P]         -        -
            x'       state.previous        fp32 [P]         -        -
            d        state.estimator       fp32 [P]         -        -

Departures  beta and eta are constants (eta with the recipe's schedule), in place of the paper's
            sequences, which adapt to the gradients seen. The workers never communicate: it is a
            part of Local MixVR. No clipping, weight decay or inner optimizer.

Reduces to  plain SGD (local_sgd with one worker), when momentum = 0

Cost        2 gradients a batch (1 for the first); nothing is sent
            extra memory: 2 P (x', d), and 2 P while gradients are taken

Fails       with the worker itself: a crashed one takes a donor's state when it returns. A loss or
            gradient that is not finite ends its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gossamer.comm.context import Context, MethodState
from gossamer.methods.base import Method, state_of
from gossamer.outer.double_momentum import storm_
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class StormState(MethodState):
    """The previous point [P] and the estimator [P], of the gradient there."""

    previous: Tensor
    estimator: Tensor


class Storm(Method):
    """STORM (arXiv:1905.10018)."""

    name: ClassVar[str] = "storm"
    State: ClassVar[type[MethodState]] = StormState

    momentum: float = Field(0.9, ge=0, lt=1, description="1 - beta, the past's share (as mu2_sgd)")

    @property
    def makes_own_steps(self) -> bool:
        return True

    def init(self, replica: Replica) -> StormState:
        start = replica.parameters
        return StormState(previous=start.clone(), estimator=start.new_zeros(start.shape))

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(StormState, state)
        x = ctx.replica.parameters
        async for round_ in ctx.rounds(state):
            for step in range(self.inner_steps):
                if round_.index == step == 0:
                    (gradient,) = await ctx.gradients([x])
                    state.estimator.copy_(gradient)
                else:
                    gradient, old_gradient = await ctx.gradients([x, state.previous])
                    storm_(state.estimator, gradient, old_gradient, beta=1 - self.momentum)
                state.previous.copy_(x)
                x.sub_(state.estimator, alpha=ctx.replica.learning_rate)
