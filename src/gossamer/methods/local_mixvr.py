"""Local MixVR: variance-reduced local steps, a minibatch before each average, drift corrected.

Source:     T. Dahan, B. Hamoud, R. Reshef, M. Jaggi, K. Levy, "Local MixVR: Breaking the
            Communication-Sample Dependence in Distributed Learning", arXiv:2606.01128. The paper
            itself was not at hand: the loop is assembled from a summary, a formula page and a
            reader's notes. They differ in two places, see Departures.

Update      t counts the steps of the whole run from 1; a round is K_loc steps and a synchronisation
            step    z = one batch                                     (all z below are fresh)
                    d <- grad f(x; z) + (1 - beta_t) (d - grad f(x'; z))     x' is the previous x
                    x' = x;   w <- w - eta_t d;   x <- gamma_t w + (1 - gamma_t) x
            sync    w, x <- mean_i w_i, mean_i x_i          all-reduce, blocking; x' stays my own
                    z = K_avg batches, one minibatch
                    d <- grad f(x; z) + (1 - beta_t) (d - grad f(x'; z))     corrects the drift
                    d <- mean_i d_i                                    all-reduce, blocking
                    x', w and x as in a step

Symbols     paper    here                  unit / shape     default  where the default comes from
            K        inner_steps           batches          100      not published for this use
            alpha    alpha                 share of K       0.1      the paper's grid is 0.05, 0.1,
                                                                     0.25, 0.5 and 0.75
            K_avg    minibatch             batches          -        ceil(alpha K)
            K_loc    local_steps           steps            -        K - K_avg
            eta      train.learning_rate   -                -        the paper's grid is 0.01, 0.05
                                                                     and 0.1 (constant schedule)
            beta     1 - momentum          -                0.1      the paper's experiments
            gamma    gamma                 -                0.95     the paper's experiments
            w        state.iterate         fp32 [P]         -        -
            x        replica.parameters    fp32 [P]         -        where gradients are taken
            x'       state.previous        fp32 [P]         -        -
            d        state.estimator       fp32 [P]         -        the first one is d = g

Schedules   "theory"    beta_t = 1/t, gamma_t = 2/(t + 2), eta_t = t eta. The step grows to T eta,
                        T = R (K_loc + 1) steps: the theory wants eta <= 1/(8 L T).
            "constant"  beta, gamma and eta as they are: the paper's experiments. Whether their 0.95
                        weighs w or the old average is not settled; by the formula above it is w
                        (gamma_weighs = "iterate", the default), else "average".

Parts       Each can be switched off, to see what it does. anytime_averaging off: x = w.
            variance_reduction off: local steps keep plain momentum, d <- beta g + (1 - beta) d,
            with one gradient; drift_correction off: the synchronisation does. The minibatch is off
            where alpha <= 1/K, as K_avg is then 1. (Which switches there are is our choice.)

Departures  The coefficient of g is 1, as in the paper's Algorithm 1; its text once has beta. The
            correction is at the own previous point; one summary has the current local point, for
            which the noise-free identity below fails. No clipping, weight decay or inner optimizer:
            of [train] the learning rate and its schedule are used.

Reduces to  mu2_sgd, when M = 1 and alpha <= 1/K: the synchronisation is then an ordinary step

Identity    Without noise, d = mean_i grad F_i(x) after each synchronisation, exactly, whatever beta
            is; for objectives that differ between workers at the first one, for equal ones always.

Cost        2 gradients a batch (K batches are read, and 2 K gradients computed)
            sent per worker and round: 2 (M-1)/M times 3 P values in two blocking phases, 2 P (w and
            x; P where they are one) and P (d); a byte per peer and phase for the vote. Where K_loc
            is 0, w and x agree already and are not sent.
            extra memory: 3 P (w, x', d); 3 P while gradients are taken; 2 P while w and x are on
            their way

Fails       as DiLoCo: each all-reduce is repeated until it succeeds, and a worker that is gone is
            left out of the next attempt. A loss, gradient or vector that is not finite ends its
            worker before anything is sent.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding, start_of
from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, MethodState, Round
from gossamer.methods.base import Sends, state_of
from gossamer.methods.mu2_sgd import DoubleMomentumState, Mu2SGD
from gossamer.outer.double_momentum import Momenta


class LocalMixVR(Mu2SGD):
    """Local MixVR (arXiv:2606.01128)."""

    name: ClassVar[str] = "local_mixvr"

    alpha: float = Field(
        0.1, gt=0, lt=1, description="share of a round's batches in the minibatch (paper: a grid)"
    )
    anytime_averaging: bool = Field(True, description="gradients at the average x; off: at w")
    variance_reduction: bool = Field(
        True, description="STORM in the local steps; off: plain momentum"
    )
    drift_correction: bool = Field(
        True, description="STORM across the synchronisation; off: plain momentum"
    )

    @model_validator(mode="after")
    def _averaging_is_used(self) -> LocalMixVR:
        if self.anytime_averaging:
            return self
        for name in ("gamma", "gamma_weighs"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} would be ignored, as anytime_averaging is off")
        return self

    @property
    def minibatch(self) -> int:
        """K_avg = ceil(alpha K), exactly: 0.07 x 100 is 7, whatever floating point makes of it."""
        return math.ceil(Fraction(str(self.alpha)) * self.inner_steps)

    @property
    def local_steps(self) -> int:
        """K_loc = floor((1 - alpha) K)."""
        return self.inner_steps - self.minibatch

    @property
    def sends(self) -> Sends:
        return Sends(averages=True)

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(DoubleMomentumState, state)
        async for round_ in ctx.rounds(state):
            start = self._agreed_points(ctx, state)
            sync = (round_.index + 1) * (self.local_steps + 1)  # the round's last step
            for t in range(sync - self.local_steps, sync):
                await self.estimate(ctx, state, t, corrected=self.variance_reduction)
                self.step(ctx.replica, state, t)
            agreed = round_
            if self.local_steps:
                agreed = await self._average_points(ctx, round_, state, start)
            await self.estimate(
                ctx, state, sync, num_batches=self.minibatch, corrected=self.drift_correction
            )
            agreed = await all_reduce_until_complete(
                ctx, agreed, "estimator", state.estimator,
                coding=Coding(self.codec, residual=self._owed(state, 2, 3)),
            )  # fmt: skip
            self.step(ctx.replica, state, sync)
            await synchronise_buffers(ctx, agreed, agreed.members.workers)

    def momenta(self, t: int) -> Momenta:
        momenta = super().momenta(t)
        return momenta if self.anytime_averaging else momenta._replace(gamma=1.0)

    def _agreed_points(self, ctx: Context, state: DoubleMomentumState) -> Tensor | None:
        """w and x before the round, equal on all members, where a codec needs them."""
        if not self.anytime_averaging:
            return start_of(self.codec, state.iterate)
        return start_of(self.codec, state.iterate, ctx.replica.parameters)

    @staticmethod
    def _owed(state: DoubleMomentumState, first: int, end: int) -> Tensor | None:
        """The residuals of vectors `first` to `end` of w, x and d."""
        if state.residual is None:
            return None
        numel = state.iterate.numel()
        return state.residual[first * numel : end * numel]

    async def _average_points(
        self, ctx: Context, round_: Round, state: DoubleMomentumState, start: Tensor | None
    ) -> Round:
        """w and x become their means over the members; the previous x stays each worker's own."""
        x = ctx.replica.parameters
        parts = 2 if self.anytime_averaging else 1
        coding = Coding(self.codec, parts=parts, since=start, residual=self._owed(state, 0, parts))
        if not self.anytime_averaging:  # x is w
            agreed = await all_reduce_until_complete(
                ctx, round_, "points", state.iterate, coding=coding
            )
            x.copy_(state.iterate)
            return agreed
        points = torch.cat([state.iterate, x])
        agreed = await all_reduce_until_complete(ctx, round_, "points", points, coding=coding)
        iterate, average = points.chunk(2)
        state.iterate.copy_(iterate)
        x.copy_(average)
        return agreed
