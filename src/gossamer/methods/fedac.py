"""FedAC: accelerated local SGD, in which the workers average both of its sequences.

Source:     H. Yuan, T. Ma, "Federated Accelerated Stochastic Gradient Descent", NeurIPS 2020,
            arXiv:2006.08950, with the parameters of its FedAc-I, as transcribed on a public formula
            page.

Update      md   = x/beta + (1 - 1/beta) ag                      K times on each worker
            g    = grad f(md; z)
            x   <- (1 - 1/alpha) x + md/alpha - gamma g
            ag  <- md - eta g
            x_i, ag_i <- mean_j x_j, mean_j ag_j                  all-reduce, blocking

Symbols     paper    here                  unit / shape     default  where the default comes from
            K        inner_steps           inner steps      100      not published for this use
            eta      train.learning_rate   -                -        the recipe's; at most 1/L
            mu       strong_convexity      curvature        0.01     ours: to be tuned
            gamma    -                     -                -        max(sqrt(eta/(mu K)), eta)
            alpha    -                     -                -        1/(gamma mu)
            beta     -                     -                -        alpha + 1
            x        state.iterate         fp32 [P]         -        -
            ag       replica.parameters    fp32 [P]         -        what it returns

Departures  On problems that are not strongly convex mu is a setting like any other. Larger mu than
            the learning rate allows (gamma mu > 1) are refused when the run starts. FedAc-II is
            left out. A learning rate with a schedule changes the couplings with it. No clipping,
            weight decay or inner optimizer.

Reduces to  local_sgd, with optimizer = "sgd", when mu = 1/eta: gamma is then eta, and alpha is 1

Cost        1 gradient a batch
            sent per worker and round: 2 (M-1)/M times 2 P values, blocking; a byte per peer for the
            vote; extra memory: P (x), and 3 P while gradients or vectors are on their way

Fails       as DiLoCo: the whole all-reduce is repeated until it succeeds, and a worker that is gone
            is left out. A loss, gradient or vector that is not finite ends its worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding, start_of
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState
from gossamer.errors import ConfigError
from gossamer.methods.base import Method, Sends, state_of
from gossamer.training.replica import Replica
from gossamer.training.settings import Training


@dataclass(kw_only=True)
class FedACState(MethodState):
    """The main sequence x [P]; the aggregated one is the replica's parameters."""

    iterate: Tensor


class FedAC(Method):
    """Federated accelerated SGD, FedAc-I (arXiv:2006.08950)."""

    name: ClassVar[str] = "fedac"
    State: ClassVar[type[MethodState]] = FedACState

    strong_convexity: float = Field(
        0.01, gt=0, description="mu, of the objective or as a setting; at most 1/learning rate"
    )

    @property
    def makes_own_steps(self) -> bool:
        return True

    def validate_training(self, training: Training) -> None:
        if training.learning_rate * self.strong_convexity > 1:
            raise ConfigError(
                f"method.strong_convexity: at most 1/learning rate = "
                f"{1 / training.learning_rate:g} is possible; got {self.strong_convexity:g}"
            )

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    def init(self, replica: Replica) -> FedACState:
        return FedACState(
            iterate=replica.parameters.clone(), residual=self.new_residual(replica, 2)
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(FedACState, state)
        average = ctx.replica.parameters
        async for round_ in ctx.rounds(state):
            start = start_of(self.codec, state.iterate, average)
            for _ in range(self.inner_steps):
                await self._step(ctx, state)
            points = torch.cat([state.iterate, average])
            coding = Coding(self.codec, parts=2, since=start, residual=state.residual)
            agreed = await all_reduce_until_complete(ctx, round_, "points", points, coding=coding)
            iterate, mean = points.chunk(2)
            state.iterate.copy_(iterate)
            average.copy_(mean)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)

    async def _step(self, ctx: Context, state: FedACState) -> None:
        _, _, beta = self.couplings(ctx.replica.learning_rate)
        average = ctx.replica.parameters
        middle = torch.lerp(average, state.iterate, 1 / beta)
        (gradient,) = await ctx.gradients([middle])
        eta = ctx.replica.learning_rate
        gamma, alpha, _ = self.couplings(eta)
        state.iterate.lerp_(middle, 1 / alpha).sub_(gradient, alpha=gamma)
        torch.sub(middle, gradient, alpha=eta, out=average)

    def couplings(self, eta: float) -> tuple[float, float, float]:
        """gamma, alpha and beta of FedAc-I."""
        gamma = max(math.sqrt(eta / (self.strong_convexity * self.inner_steps)), eta)
        alpha = 1 / (gamma * self.strong_convexity)
        return gamma, alpha, alpha + 1
