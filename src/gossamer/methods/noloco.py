"""NoLoCo: outer momentum on the mean of a random pair, with a pull towards the pair's mean inside.

Source:     J. Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for
            Large Models", 2025, arXiv:2506.10911, outer step as in its released optimizer (known
            from notes on that code; the paper was not at hand).

Update      inner:  theta_i <- InnerOpt(theta_i)                              H times
            outer:  D       = mean_j (theta_j - phi_j)                    over my group, blocking
                    c       = phi_i - mean_j phi_j
                    delta_i <- alpha delta_i + beta D - gamma c           heavy ball
                    phi_i   <- phi_i + delta_i;   theta_i <- phi_i

Symbols     paper    here                  unit / shape     default  where the default comes from
            H        inner_steps           inner steps      100      the released code uses 50
            phi      state.point           fp32 [P]         -        slow weights
            delta    state.momentum        fp32 [P]         0        -
            D        progress              fp32 [P]         -        end minus start: added
            n        group_size            workers          2        the released code
            alpha    alpha                 -                0.5      the released code
            beta     beta                  -                0.7      the released code
            gamma    gamma                 -                0.7      the released code

Departures  A gamma for which the pure gossip part (D = 0) grows in mean square is refused. It
            shrinks for 0 < gamma < 2 (1 - alpha^2) / (1 + alpha (1 - 2 k)), where k = (M - G) /
            (M - 1) for G random groups (reconstructed; 2 (1 - alpha^2) for n = 2 and many workers).
            The range quoted from the paper is another, sqrt(h) alpha < gamma < sqrt(h (2 +
            alpha^2)) with h = n / (2 (n - 1)): its lower end is not needed for this, and its upper
            end is not enough for n = 2 and alpha > 1/2. With M not a multiple of n the last group
            is smaller. The paper's random pipeline routing is left out.

Reduces to  FG-DiLoCo  when alpha = 0 and n = 2: mix1 = mix2 = "pair", mix1_weight = gamma,
                       matchings = "shared", lr = beta, mu = 0
            diloco     when n = M and gamma = any (all phi are equal), but with heavy ball in place
                       of Nesterov: lr = beta, mu = alpha

Cost        sent per worker and round: 2 P values to one peer, blocking; in groups of n,
            2 (n - 1)/n times as much, and a byte per peer for the vote
            extra memory: 2 P (phi, delta), and 2 P while the pair's vectors are on their way

Fails       a pair that fails goes on alone: each has its own D, and c = 0. Both vectors are one
            message, so that they are mixed both or not at all. In groups of more than two the
            survivors average. A non-finite vector ends the worker that made it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import average_survivors
from gossamer.comm.context import Context, MethodState, Round
from gossamer.comm.pairs import average_pair
from gossamer.errors import ConfigError
from gossamer.methods.base import Method, Sends, state_of
from gossamer.mixing.groups import group_of, pull_of_random_groups, random_groups
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica


@dataclass(kw_only=True)
class NoLoCoState(MethodState):
    """The slow weights phi [P], and the outer momentum delta [P]."""

    point: Tensor
    momentum: Tensor


class NoLoCo(Method):
    """NoLoCo (arXiv:2506.10911)."""

    name: ClassVar[str] = "noloco"
    State: ClassVar[type[MethodState]] = NoLoCoState

    alpha: float = Field(0.5, ge=0, lt=1, description="outer momentum (released code: 0.5)")
    beta: float = Field(0.7, gt=0, description="outer learning rate (released code: 0.7)")
    gamma: float = Field(
        0.7, ge=0, description="pull towards the group's mean (released code: 0.7)"
    )
    group_size: int = Field(2, ge=2, description="n, workers that meet (released code: 2)")
    allow_unstable: bool = Field(
        False, description="accept a gamma for which the workers drift apart"
    )

    def largest_gamma(self, num_workers: int) -> float:
        """The pull at which disagreement stops shrinking in mean square, without gradients."""
        seen = pull_of_random_groups(num_workers, self.group_size)
        return 2 * (1 - self.alpha**2) / (1 + self.alpha * (1 - 2 * seen))

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        if self.allow_unstable or num_workers < 2:
            return
        largest = self.largest_gamma(num_workers)
        if not 0 < self.gamma < largest:
            half = self.group_size / (2 * (self.group_size - 1))
            low, high = math.sqrt(half) * self.alpha, math.sqrt(half * (2 + self.alpha**2))
            raise ConfigError(
                f"method.gamma = {self.gamma:g} lets the workers drift apart: with alpha = "
                f"{self.alpha:g}, groups of {self.group_size} and {num_workers} workers it must be "
                f"above 0 and below {largest:.4g} (the range quoted from the paper is {low:.3g} to "
                f"{high:.3g}); lower alpha or gamma, or set method.allow_unstable = true"
            )

    @property
    def sends(self) -> Sends:
        return Sends(points=True)

    def init(self, replica: Replica) -> NoLoCoState:
        start = replica.parameters
        return NoLoCoState(point=start.clone(), momentum=start.new_zeros(start.shape))

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(NoLoCoState, state)
        replica = ctx.replica
        async for round_ in ctx.rounds(state):
            await ctx.train(self.inner_steps)
            group = self._group(ctx, round_)
            both = torch.cat([replica.parameters - state.point, state.point])
            await self._average(ctx, round_, group, both)
            progress, mean_point = both.chunk(2)
            state.momentum.mul_(self.alpha).add_(progress, alpha=self.beta)
            state.momentum.sub_(state.point - mean_point, alpha=self.gamma)
            state.point.add_(state.momentum)
            replica.parameters.copy_(state.point)
            await synchronise_buffers(ctx, round_, group)

    def _group(self, ctx: Context, round_: Round) -> tuple[int, ...]:
        """With whom I meet: a pure function of seed, round and members."""
        members = round_.members.workers
        groups = random_groups(ctx.seed, round_.index, members, self.group_size, "mix1")
        return group_of(ctx.worker, groups)

    async def _average(
        self, ctx: Context, round_: Round, group: tuple[int, ...], values: Tensor
    ) -> None:
        """Average `values` in place over the group, or over those of it whose links hold."""
        coding = Coding(self.codec, parts=2)
        if self.group_size == 2:
            partner = next((worker for worker in group if worker != ctx.worker), None)
            await average_pair(ctx, round_, "outer", values, partner, coding=coding)
        else:
            await average_survivors(ctx, round_, "outer", values, group=group, coding=coding)
