"""Decentralised SGD: a gradient step and a mix with the neighbours, in either order.

Source:     X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS
            2017, arXiv:1705.09056 (combine-then-adapt); J. Chen, A. Sayed, 2012, arXiv:1111.0034
            (adapt-then-combine); X. Li et al., "Communication-Efficient Local Decentralized SGD
            Methods", 2019, arXiv:1910.09126 (the schedule).

Update      a gossip step, in one of two orders:
            combine-then-adapt      x_i <- InnerOpt(sum_j W_ij x_j, grad f_i(x_i))
                                    the mix runs while the gradient is computed
            adapt-then-combine      x_i <- sum_j W_ij InnerOpt(x_j, grad f_j(x_j))
            a local step            x_i <- InnerOpt(x_i, grad f_i(x_i))

Symbols     paper    here                  unit / shape     default  where the default comes from
            -        inner_steps           steps in a round 100      reporting only
            x        replica.parameters    fp32 [P]         -        -
            W        topology, weights     [M, M]           ring     the usual example
            I1       local_steps           steps            0        0: plain D-SGD
            I2       gossip_steps          steps            1        -

Departures  The inner optimizer is the recipe's (AdamW as well as SGD); its moments stay local.
            Local and gossip steps take turns over the whole run, local ones first, whatever the
            rounds are; a topology that changes does so with every mix. Buffers are mixed at the
            round's end, along the edges of the last mix.

Reduces to  gasloc          adapt-then-combine: gamma = 0, eta = 1, H = 1
            local_sgd       adapt-then-combine on the complete graph, where a round ends with its
                            only mix
            data_parallel   adapt-then-combine on the complete graph, inner SGD without momentum

Cost        sent per worker and round: P values to each neighbour for each gossip step;
            combine-then-adapt hides it behind the gradient, adapt-then-combine blocks
            extra memory: P, one more for the gradient in combine-then-adapt, and P per neighbour

Fails       a failed edge leaves its weight on both ends' diagonal, so the mean is conserved. Nobody
            repeats anything. A non-finite vector ends the worker that made it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from gossamer.comm.coding import Coding
from gossamer.comm.context import Context, MethodState, Round
from gossamer.comm.neighbours import mix_buffers, mix_neighbours
from gossamer.methods.base import Method, Sends
from gossamer.mixing.graphs import Weights
from gossamer.mixing.topologies import TopologySetting, mixing_graph, topology_field
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica

Neighbours = tuple[tuple[int, float], ...]


class DSGD(Method):
    """Decentralised SGD (arXiv:1705.09056) and LD-SGD (arXiv:1910.09126)."""

    name: ClassVar[str] = "dsgd"
    State: ClassVar[type[MethodState]] = MethodState

    topology: TopologySetting = topology_field("ring")
    weights: Weights = Field("metropolis", description="how edges are weighted")
    order: Literal["combine_then_adapt", "adapt_then_combine"] = Field(
        "combine_then_adapt", description="whether a mix runs beside the gradient or follows it"
    )
    local_steps: int = Field(0, ge=0, description="steps without a mix, before each gossip_steps")
    gossip_steps: int = Field(1, ge=1, description="steps with a mix, after each local_steps")

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        if num_workers > 1:
            self.topology.validate_for(num_workers)

    @property
    def overlaps(self) -> bool:
        return self.order == "combine_then_adapt"

    @property
    def sends(self) -> Sends:
        return Sends(points=True)

    def init(self, replica: Replica) -> MethodState:
        return MethodState()

    async def run(self, ctx: Context, state: MethodState) -> None:
        async for round_ in ctx.rounds(state):
            first = round_.index * self.inner_steps
            last_mix = None
            waiting = 0  # local steps that are still to do
            for step in range(first, first + self.inner_steps):
                mix = self.mix_of_step(step)
                if mix is None:
                    waiting += 1
                    continue
                last_mix = mix
                neighbours = self._neighbours(ctx, round_, mix)
                if self.order == "adapt_then_combine":
                    await ctx.train(waiting + 1)
                    mixed = ctx.replica.parameters
                    await mix_neighbours(
                        ctx, round_, "mix", mixed, neighbours,
                        step=step - first, coding=Coding(self.codec),
                    )  # fmt: skip
                else:
                    if waiting:
                        await ctx.train(waiting)
                    await self._combine_then_adapt(ctx, round_, neighbours, step - first)
                waiting = 0
            if waiting:
                await ctx.train(waiting)
            if last_mix is not None:
                await mix_buffers(ctx, round_, self._neighbours(ctx, round_, last_mix))

    async def _combine_then_adapt(
        self, ctx: Context, round_: Round, neighbours: Neighbours, step: int
    ) -> None:
        """The mix and the gradient start from the same parameters and run side by side."""
        replica = ctx.replica
        mixed = replica.parameters.clone()
        async with ctx.task_group() as tasks:
            coding = Coding(self.codec)
            mixing = tasks.start(
                mix_neighbours(ctx, round_, "mix", mixed, neighbours, step=step, coding=coding)
            )
            gradient: Tensor = (await ctx.gradient()).clone()
            await mixing
        replica.parameters.copy_(mixed)
        ctx.apply_gradient(gradient)

    def mix_of_step(self, step: int) -> int | None:
        """Which mix of the run a step (0-based) has, counted from 0; None for a local step."""
        cycle, place = divmod(step, self.local_steps + self.gossip_steps)
        if place < self.local_steps:
            return None
        return cycle * self.gossip_steps + place - self.local_steps

    def _neighbours(self, ctx: Context, round_: Round, mix: int) -> Neighbours:
        """(peer, W_ij) of one mix: a pure function of seed, mix and members."""
        graph = mixing_graph(
            self.topology, self.weights,
            seed=ctx.seed, round_index=mix, members=round_.members.workers,
        )  # fmt: skip
        return graph.neighbours(ctx.worker)
