"""Factored Gossip DiLoCo: the outer synchronisation split into a hidden and a small blocking mix.

Source:     C. Koneputugodage et al., "Factored Gossip DiLoCo: Reducing Blocking Communication in
            DiLoCo", ICML 2026, arXiv:2606.22768. The paper itself was not at hand: the loop is
            reconstructed from its summaries (inner steps start at z, Mix1 of z gives the base x
            of the next outer step), and reproduces its published utilisation and consensus bound.

Update      handle = start Mix1(z_i)                     overlapped with the inner steps
            y      = z_i;  y <- InnerOpt(y)              H times, from z_i and not from x_i
            Delta  = z_i - y
            x      = wait(handle)                        blocks only if slower than training
            Delta  = Mix2(Delta)                         blocking
            v      <- mu v + Delta                       local to the worker
            z_i    <- x - lr (Delta + mu v)

Symbols     paper    here                  unit / shape     default  where the default comes from
            H        inner_steps           inner steps      100      the paper's headline setting
            z        state.point           fp32 [P]         -        -
            x        base                  fp32 [P]         -        -
            Delta    delta                 fp32 [P]         -        start minus end: subtracted
            v        state.momentum        fp32 [P]         0        -
            lr       outer_learning_rate   -                0.7      not published; DiLoCo's
            mu       outer_momentum        -                0.9      not published; DiLoCo's
            -        mix1_weight           -                1        1: all the way (the paper)
            -        mix2_subset           tensor names     all      paper: 43 % of its 1.5B Llama
            -        js_threshold          JS distance      none     not published

Departures  Matchings of Mix1 and Mix2 are independent by default, as the paper's consensus bound
            assumes; `matchings = "shared"` pairs the same workers in both. The trigger on the
            Jensen-Shannon distance is reconstructed: the group that is about to mix (the pair, or
            everybody) compares its predictions on a fixed probe batch, and mixes only above the
            threshold. Buffers are averaged at the outer step, not in Mix1. `mix1_weight` below 1 is
            a lazy Mix1, as NoLoCo's; the paper has none.

Reduces to  diloco     when mix2 = "global", whatever Mix1 is
            local_sgd  when mix1 = mix2 = "global", lr = 1 and mu = 0
            noloco     with alpha = 0, when mix1 = mix2 = "pair", matchings = "shared", mu = 0

Cost        sent per worker and round, in P values: Mix1 global 2 (M-1)/M overlapped, pair 1
            overlapped; Mix2 the same, blocking, times the subset's share; mix_momentum doubles
            Mix1; a trigger adds one probe's predictions per peer of the group
            extra memory: 2 P (z, v), P for x while training, and P for a partner's vector in Mix2
            (Delta lies where the gradient was)

Fails       a failed pair keeps its own values; a global mix averages the survivors and those whose
            links failed keep their own (both matrices stay doubly stochastic, so the mean is
            conserved). Nobody repeats anything. A non-finite outer gradient ends its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.coding import Coding
from gossamer.comm.collectives import average_survivors, check_finite
from gossamer.comm.context import Context, MethodState, Round
from gossamer.comm.pairs import average_, average_pair, partners_values
from gossamer.comm.predictions import group_js_distance
from gossamer.methods.base import Method, Sends, outer_learning_rate, outer_momentum, state_of
from gossamer.mixing.matchings import partner_of, random_matching
from gossamer.outer.nesterov import nesterov_step_
from gossamer.training.layout import ParameterLayout, gather, scatter
from gossamer.training.replica import Replica

Mix = Literal["none", "pair", "global"]


@dataclass(kw_only=True)
class FactoredGossipState(MethodState):
    """z [P], the parameters after the last outer step, and the local outer momentum v [P]."""

    point: Tensor
    momentum: Tensor


class FactoredGossip(Method):
    """Factored Gossip DiLoCo (arXiv:2606.22768)."""

    name: ClassVar[str] = "factored_gossip"
    State: ClassVar[type[MethodState]] = FactoredGossipState

    mix1: Mix = Field("global", description="non-blocking mix of the parameters")
    mix2: Mix = Field("pair", description="blocking mix of the outer gradients")
    mix2_subset: tuple[str, ...] | None = Field(
        None, description="name globs of the tensors that Mix2 mixes; default: all"
    )
    matchings: Literal["independent", "shared"] = Field(
        "independent", description="whether Mix1 and Mix2 pair the same workers"
    )
    mix1_weight: float = Field(
        1.0, gt=0, le=1, description="how far Mix1 goes: x = (1 - weight) z + weight Mix1(z)"
    )
    mix_momentum: bool = Field(
        False, description="Mix1 also mixes the outer momentum (the paper's ablation GlobalM1S)"
    )
    js_threshold: float | None = Field(
        None, ge=0, le=1, description="run Mix2 only where the JS distance is above this"
    )
    outer_learning_rate: float = outer_learning_rate()
    outer_momentum: float = outer_momentum()

    @model_validator(mode="after")
    def _no_setting_is_ignored(self) -> FactoredGossip:
        if self.mix2 == "none" and self.mix2_subset is not None:
            raise ValueError('mix2_subset needs mix2 = "pair" or "global", got mix2 = "none"')
        if self.mix2 == "none" and self.js_threshold is not None:
            raise ValueError('js_threshold needs mix2 = "pair" or "global", got mix2 = "none"')
        if self.mix1 == "none" and self.mix1_weight != 1:
            raise ValueError('mix1_weight needs mix1 = "pair" or "global", got mix1 = "none"')
        if self.mix1 == "none" and self.mix_momentum:
            raise ValueError('mix_momentum needs mix1 = "pair" or "global", got mix1 = "none"')
        if self.matchings == "shared" and (self.mix1, self.mix2) != ("pair", "pair"):
            raise ValueError('matchings = "shared" needs mix1 = mix2 = "pair"')
        if self.mix2_subset is not None and not self.mix2_subset:
            raise ValueError('mix2_subset is empty; use mix2 = "none" to mix nothing')
        return self

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        if self.mix2_subset is not None:
            layout.select(self.mix2_subset)

    def needs_numerics(self) -> str | None:
        if self.js_threshold is None:
            return None
        return "method.js_threshold decides from predictions"

    @property
    def overlaps(self) -> bool:
        return self.mix1 != "none"

    @property
    def sends(self) -> Sends:
        return Sends(points=self.mix1 != "none", averages="global" in (self.mix1, self.mix2))

    def init(self, replica: Replica) -> FactoredGossipState:
        start = replica.parameters
        return FactoredGossipState(
            point=start.clone(),
            momentum=start.new_zeros(start.shape),
            residual=self.new_residual(replica, 2),  # of z and Delta
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(FactoredGossipState, state)
        replica = ctx.replica
        async for round_ in ctx.rounds(state):
            async with ctx.task_group() as tasks:
                mix1 = tasks.start(self._mix1(ctx, round_, state))
                await ctx.train(self.inner_steps)
            delta = torch.sub(state.point, replica.parameters, out=ctx.scratch())
            check_finite(ctx, delta, "outer gradient")
            state.point = mix1.result()  # x; nothing needs z any longer, nor its memory
            await self._mix2(ctx, round_, delta, _half(state, 1))
            nesterov_step_(
                state.point,
                state.momentum,
                delta,
                learning_rate=self.outer_learning_rate,
                momentum=self.outer_momentum,
            )
            replica.parameters.copy_(state.point)
            await synchronise_buffers(ctx, round_, self._buffer_group(ctx, round_))

    async def _mix1(self, ctx: Context, round_: Round, state: FactoredGossipState) -> Tensor:
        """x = Mix1(z), in memory of its own where it differs; z stays while training goes on."""
        base = await self._mixed(ctx, round_, state)
        if self.mix1_weight != 1:  # a lazy mix: part of the way
            base = torch.lerp(state.point, base, self.mix1_weight)
        if self.mix_momentum:
            await self._mix(ctx, round_, "mix1_momentum", self.mix1, state.momentum)
        return base

    async def _mixed(self, ctx: Context, round_: Round, state: FactoredGossipState) -> Tensor:
        """Mix1(z) all the way; z itself where there is nobody to mix with."""
        point, coding = state.point, Coding(self.codec, residual=_half(state, 0))
        if self.mix1 == "global":
            base = torch.empty_like(point)
            await average_survivors(ctx, round_, "mix1", point, out=base, coding=coding)
            return base
        partner = self._partner(ctx, round_, "mix1") if self.mix1 == "pair" else None
        if partner is None:
            return point
        theirs = await partners_values(ctx, round_, "mix1", point, partner, coding=coding)
        if theirs is None:
            return point
        average_(theirs, point)
        return theirs

    async def _mix2(
        self, ctx: Context, round_: Round, delta: Tensor, residual: Tensor | None
    ) -> None:
        """Delta <- Mix2(Delta), on the subset, where the trigger allows it."""
        if self.mix2 == "none" or not await self._triggered(ctx, round_):
            return
        if self.mix2_subset is None:
            await self._mix(ctx, round_, "mix2", self.mix2, delta, residual=residual)
            return
        slices = ctx.replica.layout.select(self.mix2_subset)
        subset = gather(delta, slices)
        owed = None if residual is None else gather(residual, slices)
        await self._mix(ctx, round_, "mix2", self.mix2, subset, residual=owed)
        scatter(delta, slices, subset)
        if residual is not None and owed is not None:
            scatter(residual, slices, owed)

    async def _mix(
        self,
        ctx: Context,
        round_: Round,
        kind: str,
        mix: Mix,
        values: Tensor,
        *,
        residual: Tensor | None = None,
    ) -> None:
        """Mix `values` in place with the members that `mix` names."""
        coding = Coding(self.codec, residual=residual)
        if mix == "global":
            await average_survivors(ctx, round_, kind, values, coding=coding)
        elif mix == "pair":
            partner = self._partner(ctx, round_, kind)
            await average_pair(ctx, round_, kind, values, partner, coding=coding)

    def _partner(self, ctx: Context, round_: Round, kind: str) -> int | None:
        """My peer in this round's random matching: a pure function of seed, round and members."""
        stream = "mix2" if kind == "mix2" and self.matchings == "independent" else "mix1"
        matching = random_matching(ctx.seed, round_.index, round_.members.workers, stream)
        return partner_of(ctx.worker, matching)

    async def _triggered(self, ctx: Context, round_: Round) -> bool:
        """Whether the workers about to mix disagree enough for Mix2 to be worth its price."""
        if self.js_threshold is None:
            return True
        if self.mix2 == "global":
            group = round_.members.workers
        else:
            partner = self._partner(ctx, round_, "mix2")
            group = tuple(sorted({ctx.worker, partner})) if partner is not None else (ctx.worker,)
        distance = await group_js_distance(ctx, round_, group)
        ctx.record("trigger_js_distance", distance)
        ctx.record("mix2_runs", float(distance > self.js_threshold))
        return distance > self.js_threshold

    def _buffer_group(self, ctx: Context, round_: Round) -> tuple[int, ...]:
        """With whom to average buffers: as Mix2 does, or as Mix1 where there is no Mix2."""
        mix, kind = (self.mix2, "mix2") if self.mix2 != "none" else (self.mix1, "mix1")
        if mix == "global":
            return round_.members.workers
        partner = self._partner(ctx, round_, kind) if mix == "pair" else None
        return (ctx.worker,) if partner is None else tuple(sorted((ctx.worker, partner)))


def _half(state: FactoredGossipState, index: int) -> Tensor | None:
    """The residual of z (0) or of Delta (1)."""
    return None if state.residual is None else state.residual.chunk(2)[index]
