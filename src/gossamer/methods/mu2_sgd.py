"""mu^2-SGD: anytime averaging and STORM together, each worker on its own.

Source:     T. Dahan, K. Levy, "mu^2-SGD: Stable Stochastic Optimization via a Double Momentum
            Mechanism", 2023, arXiv:2304.04172, as transcribed on a public formula page. The local
            steps of Local MixVR.

Update      t counts the steps of the whole run from 1; z is a fresh batch
            d  <- grad f(x; z) + (1 - beta_t) (d - grad f(x'; z))       x' is the previous x
            x' = x
            w  <- w - eta_t d
            x  <- gamma_t w + (1 - gamma_t) x

Symbols     paper    here                  unit / shape     default  where the default comes from
            -        inner_steps           steps a round    100      reporting only, see below
            eta      train.learning_rate   -                -        the recipe's
            alpha_1  first_weight          -                1        see Schedules
            beta     1 - momentum          -                0.1      Local MixVR's experiments
            gamma    gamma                 -                0.95     Local MixVR's experiments
            w        state.iterate         fp32 [P]         -        -
            x        replica.parameters    fp32 [P]         -        where gradients are taken
            x'       state.previous        fp32 [P]         -        -
            d        state.estimator       fp32 [P]         -        the first one is d = g

Schedules   "theory"    weights a_t = t - 1 + first_weight: beta_t = 1/a_t, eta_t = a_t eta, and x
                        the a-weighted mean of all w so far (gamma_t = 2/(t + 2) where first_weight
                        is 1). The paper has a_t = t + 1; whether its t starts at 0 (first_weight =
                        1) or at 1 (first_weight = 2) the transcription does not settle.
            "constant"  beta, gamma and eta as they are, as in the experiments of Local MixVR.
                        Whether their gamma weighs w (gamma_weighs = "iterate", the default) or the
                        old average is not settled.

Departures  The workers never communicate: it is what Local MixVR does between averages, and of use
            with one worker. No projection, clipping, weight decay or inner optimizer: of [train]
            the learning rate and its schedule are used.

Reduces to  storm, when schedule = "constant" and gamma = 1
            plain SGD (local_sgd with one worker), when momentum = 0 as well

Cost        2 gradients a batch (1 for the first); nothing is sent
            extra memory: 3 P (w, x', d), and 2 P while gradients are taken

Fails       with the worker itself: a crashed one takes a donor's state when it returns. A loss or
            gradient that is not finite ends its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from gossamer.comm.context import Context, MethodState
from gossamer.methods.base import Method, state_of
from gossamer.outer.double_momentum import (
    Momenta,
    anytime_,
    plain_momentum_,
    storm_,
    theory_momenta,
)
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class DoubleMomentumState(MethodState):
    """w [P], the previous x [P] and the estimator d [P]; x itself is the replica's parameters."""

    iterate: Tensor
    previous: Tensor
    estimator: Tensor


class Mu2SGD(Method):
    """mu^2-SGD (arXiv:2304.04172)."""

    name: ClassVar[str] = "mu2_sgd"
    State: ClassVar[type[MethodState]] = DoubleMomentumState

    schedule: Literal["theory", "constant"] = Field(
        "constant", description="of beta, gamma and the step: 1/t, 2/(t + 2) and t eta, or constant"
    )
    momentum: float = Field(
        0.9, ge=0, lt=1, description="1 - beta, with the constant schedule (MixVR's paper: 0.9)"
    )
    gamma: float = Field(
        0.95, gt=0, le=1, description="of the average, with the constant schedule (MixVR's paper)"
    )
    gamma_weighs: Literal["iterate", "average"] = Field(
        "iterate", description="what gamma weighs: x = gamma w + (1 - gamma) x, or the other way"
    )
    first_weight: int = Field(
        1, ge=1, description="weight of the first step, with the theory's schedule"
    )

    @model_validator(mode="after")
    def _no_setting_is_ignored(self) -> Mu2SGD:
        readers = {
            "momentum": "constant",
            "gamma": "constant",
            "gamma_weighs": "constant",
            "first_weight": "theory",
        }
        for name, schedule in readers.items():
            default = type(self).model_fields[name].default
            if self.schedule != schedule and getattr(self, name) != default:
                raise ValueError(f'{name}: needs schedule = "{schedule}", got "{self.schedule}"')
        if self.gamma_weighs == "average" and self.gamma == 1:
            raise ValueError('gamma = 1 with gamma_weighs = "average" would never move x')
        return self

    @property
    def makes_own_steps(self) -> bool:
        return True

    def init(self, replica: Replica) -> DoubleMomentumState:
        start = replica.parameters
        return DoubleMomentumState(
            iterate=start.clone(),
            previous=start.clone(),
            estimator=start.new_zeros(start.shape),
            residual=self.new_residual(replica, 3),  # of Local MixVR: w, x and d
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(DoubleMomentumState, state)
        async for round_ in ctx.rounds(state):
            first = round_.index * self.inner_steps + 1
            for t in range(first, first + self.inner_steps):
                await self.estimate(ctx, state, t)
                self.step(ctx.replica, state, t)

    def momenta(self, t: int) -> Momenta:
        """beta, gamma and the weight of step `t`, which counts from 1."""
        if self.schedule == "theory":
            return theory_momenta(t, self.first_weight)
        gamma = self.gamma if self.gamma_weighs == "iterate" else 1 - self.gamma
        return Momenta(1 - self.momentum, gamma, 1.0)

    async def estimate(
        self,
        ctx: Context,
        state: DoubleMomentumState,
        t: int,
        *,
        num_batches: int = 1,
        corrected: bool = True,
    ) -> None:
        """d <- g(x) + (1 - beta) (d - g(x')), both on the same batches; the first one is g(x)."""
        x, beta = ctx.replica.parameters, self.momenta(t).beta
        if t == 1:
            (gradient,) = await ctx.gradients([x], num_batches)
            state.estimator.copy_(gradient)
        elif corrected:
            gradient, old_gradient = await ctx.gradients([x, state.previous], num_batches)
            storm_(state.estimator, gradient, old_gradient, beta=beta)
        else:
            (gradient,) = await ctx.gradients([x], num_batches)
            plain_momentum_(state.estimator, gradient, beta=beta)

    def step(self, replica: Replica, state: DoubleMomentumState, t: int) -> None:
        """w <- w - eta_t d, and x <- gamma_t w + (1 - gamma_t) x."""
        momenta = self.momenta(t)
        state.previous.copy_(replica.parameters)
        state.iterate.sub_(state.estimator, alpha=momenta.weight * replica.learning_rate)
        anytime_(replica.parameters, state.iterate, gamma=momenta.gamma)
