"""GASLoC: local steps, mixing with a few peers, and outer momentum that also speeds up the gossip.

Source:     M. Cagnasso, E. Belilovsky, E. Oyallon, "Unifying Local Communications and Local Updates
            for LLM Pretraining", 2026, arXiv:2606.11081. The paper itself was not at hand: the
            update is a transcription; form B, the weights and H_i are reconstructed.

Update      inner:  theta_{t,h+1} = InnerStep(theta_{t,h})                    H_i times
            g_t     = theta_{t,H_i} - theta_t
            u_t     = theta_t + eta g_t                     sent to the round's neighbours, blocking
            form A: theta_{t+1} = u_t - alpha Lambda_t u_t + gamma (u_t - u_{t-1})
            form B: theta_{t+1} = m_t + gamma (m_t - m_{t-1}),  m_t = u_t - alpha Lambda_t u_t

Symbols     paper    here                  unit / shape     default  where the default comes from
            H        inner_steps           inner steps      100      not published
            H_i      local_steps           inner steps      H        rule reconstructed, see below
            g        -                     fp32 [P]         -        end minus start: added
            u, m     state.previous        fp32 [P]         theta_0  reconstructed: Nesterov's start
            Lambda   topology, weights     [M, M]           -        W = I - alpha Lambda
            eta      eta                   -                0.7      not published; DiLoCo's
            alpha    alpha                 -                1        1/2 a pair, 1/3 a random ring
            gamma    gamma                 -                0.5      not published; see Departures

Departures  The transcribed formula is form A (the default). It has the claimed acceleration on
            sparse graphs, but does not equal DiLoCo on the complete graph; form B does. With random
            pairs DiLoCo's momentum of 0.9 makes the workers drift apart, so the default is smaller,
            and a choice that is unstable in mean square is refused. "auto" is the paper's optimal
            alpha and gamma of a fixed graph (form A); form B has its own. H_i is H, or follows
            measured speed: "by_speed" lets all train for the same time, "by_time" lets all end
            their exchange at the same time, and workers whose links are too slow for that mix in
            some rounds only. Batches and the learning rate's schedule go by rounds: who does fewer
            steps skips the others' batches.

Reduces to  diloco          form B, complete graph: lr = eta, mu = gamma; with M = 1 both forms
            dsgd            gamma = 0, eta = 1, H = 1, inner SGD: adapt-then-combine
            local_sgd       gamma = 0, eta = 1, complete graph
            FG-DiLoCo       gamma = 0: lr = eta, mu = 0, the same W for both mixes
            gossip          g = 0: heavy ball (A) or Nesterov (B) on a fixed graph

Cost        sent per worker and round: P values to each neighbour, blocking; 32 M bytes of news
            extra memory: P (u_{t-1}), and 2 P during a round, P more per neighbour while mixing

Fails       a failed edge leaves its weight on both ends' diagonal, so the mean is conserved, and
            nobody repeats anything. Who waits is freed at the deadline. A group of workers that is
            cut off goes on by itself, and `reached` tells how many it still hears of.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from gossamer.comm.coding import Coding, Shown
from gossamer.comm.collectives import shown
from gossamer.comm.context import Context, MethodState, Round
from gossamer.comm.neighbours import add_differences_, mix_buffers, mix_neighbours, swap
from gossamer.comm.news import News, rounds_to_rest, steps_by_speed, steps_by_time
from gossamer.errors import ConfigError
from gossamer.methods.base import Method, Sends, state_of
from gossamer.mixing.consensus import Choice, Form, consensus_rate, optimal_choice, stable_choice
from gossamer.mixing.graphs import MixingGraph, Weights
from gossamer.mixing.topologies import TopologySetting, mixing_graph, topology_field
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica

Neighbours = Sequence[tuple[int, float]]  # (peer, W_ij), sorted by peer


@dataclass(kw_only=True)
class GASLoCState(MethodState):
    """u_{t-1} (form A) or m_{t-1} (form B) [P]; what is known of all workers' speeds.

    Args:
        news: see `gossamer.comm.news.News`.
    """

    previous: Tensor
    news: list[float] = field(default_factory=list)


class GASLoC(Method):
    """GASLoC (arXiv:2606.11081)."""

    name: ClassVar[str] = "gasloc"
    State: ClassVar[type[MethodState]] = GASLoCState

    topology: TopologySetting = topology_field("random_pairs")
    weights: Weights = Field("metropolis", description="how edges are weighted")
    form: Form = Field("A", description="momentum on un-mixed (A) or mixed (B) iterates")
    eta: float = Field(0.7, gt=0, description="outer step on the inner progress")
    alpha: float | Literal["auto"] = Field(
        1.0, description='step of mixing, W = I - alpha Lambda; "auto": the best of a fixed graph'
    )
    gamma: float | Literal["auto"] = Field(
        0.5, description='outer momentum; "auto": the best of a fixed graph'
    )
    local_steps: Literal["equal", "by_speed", "by_time"] = Field(
        "equal", description="a worker's steps in a round: H, or fewer where it or its link is slow"
    )
    allow_unstable: bool = Field(
        False, description="accept a choice for which the workers drift apart"
    )

    @model_validator(mode="after")
    def _check_choice(self) -> GASLoC:
        if isinstance(self.alpha, float) and self.alpha <= 0:
            raise ValueError(f"alpha: a number above 0 expected, got {self.alpha:g}")
        if isinstance(self.gamma, float) and not 0 <= self.gamma < 1:
            raise ValueError(f"gamma: a number from 0 to below 1 expected, got {self.gamma:g}")
        if self._chooses and self.topology.changes != "never":
            raise ValueError(
                f'alpha and gamma: "auto" needs a fixed graph, and {self.topology.name} changes '
                f"{self.topology.changes}; give numbers"
            )
        one_only = self._chooses and (self.alpha, self.gamma) != ("auto", "auto")
        if self.form == "B" and one_only and self.gamma != 0:
            raise ValueError('alpha and gamma: form = "B" takes "auto" for both or for none')
        return self

    @property
    def _chooses(self) -> bool:
        return "auto" in (self.alpha, self.gamma)

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        self.topology.validate_for(num_workers)
        if self.allow_unstable:
            return
        graph = self.graph(seed=0, round_index=0, members=tuple(range(num_workers)))
        alpha, gamma = self.choice(graph)
        rate = consensus_rate(
            self.topology, self.weights, num_workers, alpha=alpha, gamma=gamma, form=self.form
        )
        if rate < 1:
            return
        stable = stable_choice(
            self.topology, self.weights, num_workers, alpha=alpha, gamma=gamma, form=self.form
        )
        advice = "no smaller gamma or alpha helps"
        if stable is not None:
            slower = consensus_rate(
                self.topology, self.weights, num_workers, **stable._asdict(), form=self.form
            )
            advice = (
                f"alpha = {stable.alpha:g} with gamma = {stable.gamma:g} is stable ({slower:.3g})"
            )
        raise ConfigError(
            f"method.gamma = {gamma:g} with alpha = {alpha:g}, form {self.form}, lets the workers "
            f"drift apart: on {self.topology.name} with {num_workers} workers their squared "
            f"disagreement changes by a factor of {rate:.3g} in a round; {advice}; or set "
            f"method.allow_unstable = true"
        )

    @property
    def sends(self) -> Sends:
        return Sends(points=True)

    def init(self, replica: Replica) -> GASLoCState:
        return GASLoCState(previous=replica.parameters.clone())

    async def run(self, ctx: Context, state: MethodState) -> None:
        state = state_of(GASLoCState, state)
        replica = ctx.replica
        async for round_ in ctx.rounds(state):
            graph = self.graph(
                seed=ctx.seed, round_index=round_.index, members=round_.members.workers
            )
            alpha, gamma = self.choice(graph)
            neighbours = graph.neighbours(ctx.worker, alpha)
            point = replica.parameters.clone()
            await self._train(ctx, round_, state, [peer for peer, _ in neighbours])
            point.lerp_(replica.parameters, self.eta)  # u = theta + eta g
            mixed = point.clone()
            await self._mix(ctx, round_, state, mixed, neighbours)
            before, latest = state.previous, point if self.form == "A" else mixed
            replica.parameters.copy_(mixed.add(latest - before, alpha=gamma))
            state.previous = latest
            if replica.buffers.numel() or replica.counters.numel():
                await mix_buffers(ctx, round_, self._buffer_weights(ctx, round_))

    async def _train(
        self, ctx: Context, round_: Round, state: GASLoCState, peers: Sequence[int]
    ) -> None:
        """The inner phase; notes how long a step took."""
        news = News(state.news, ctx.num_workers)
        members = round_.members.workers
        rows = news.known(members, since=round_.index - len(members))
        steps = self.inner_steps
        if self.local_steps == "by_speed":
            steps = steps_by_speed(steps, ctx.worker, rows)
        elif self.local_steps == "by_time":
            steps = steps_by_time(steps, ctx.worker, rows, peers, round_.index)
        begun = ctx.now()
        await ctx.train(steps)
        step_s = (ctx.now() - begun) / steps
        ctx.replica.steps_completed += self.inner_steps - steps  # the schedule goes by rounds
        if self.local_steps != "equal":
            ctx.record("local_steps", steps)
        mine = news.row(ctx.worker)
        if ctx.worker in rows:
            step_s = (step_s + mine.step_s) / 2
        news.note(ctx.worker, mine._replace(round_index=round_.index, step_s=step_s))

    async def _mix(
        self, ctx: Context, round_: Round, state: GASLoCState, values: Tensor,
        neighbours: Neighbours,
    ) -> None:  # fmt: skip
        """Mix `values` with the neighbours in place, and exchange news with them."""
        present = ctx.refresh_members(round_).members
        neighbours = [(peer, weight) for peer, weight in neighbours if peer in present]
        news = News(state.news, ctx.num_workers)
        if self.local_steps == "by_time":
            await self._mix_when_ready(ctx, round_, news, values, neighbours)
        else:
            peers = [peer for peer, _ in neighbours]
            news.send(ctx, round_, "news", peers)
            coding = Coding(self.codec)
            held = await mix_neighbours(ctx, round_, "mix", values, neighbours, coding=coding)
            await news.take(ctx, round_, "news", held)
        ctx.record("reached", news.num_reached(round_.members.workers, round_.index))

    async def _mix_when_ready(
        self, ctx: Context, round_: Round, news: News, values: Tensor, neighbours: Neighbours
    ) -> None:
        """Each edge begins when both ends have trained, so that its time tells of the links.

        Workers with slow links rest in most rounds; see `rounds_to_rest`.
        """
        view = shown(ctx, values, Coding(self.codec), "mix vector")
        received: dict[int, Tensor] = {}
        async with ctx.task_group() as tasks:
            edges = {
                peer: tasks.start(self._meet(ctx, round_, news, view, peer))
                for peer, _ in neighbours
            }
            for peer, edge in edges.items():
                theirs = await edge
                if theirs is not None:
                    received[peer] = theirs
        add_differences_(values, received, neighbours)
        members = round_.members.workers
        rows = news.known(members, since=round_.index - len(members))
        pause = rounds_to_rest(self.inner_steps, ctx.worker, rows, tuple(received))
        if pause:
            mine = news.row(ctx.worker)
            news.note(ctx.worker, mine._replace(next_mix=round_.index + 1 + pause))

    async def _meet(
        self, ctx: Context, round_: Round, news: News, view: Shown, peer: int
    ) -> Tensor | None:
        """The vector of a peer; None where one of us rests in this round, or the edge failed."""
        if not await news.swap(ctx, round_, "news", peer):
            ctx.record("failed_exchanges", 1.0)
            return None
        if any(news.row(worker).next_mix > round_.index for worker in (ctx.worker, peer)):
            ctx.record("rests", 1.0)
            return None
        begun = ctx.now()
        theirs = await swap(ctx, round_.tag("mix"), view, peer)
        if theirs is None:
            ctx.record("failed_exchanges", 1.0)
        else:
            news.note_exchange(ctx.worker, peer, ctx.now() - begun)
        return theirs

    def graph(self, *, seed: int, round_index: int, members: tuple[int, ...]) -> MixingGraph:
        """The round's weighted graph, before alpha: a pure function of its arguments."""
        return mixing_graph(
            self.topology, self.weights, seed=seed, round_index=round_index, members=members
        )

    def choice(self, graph: MixingGraph) -> Choice:
        """alpha and gamma on a graph: those given, or the best."""
        given_alpha = None if self.alpha == "auto" else self.alpha
        given_gamma = None if self.gamma == "auto" else self.gamma
        if given_alpha is not None and given_gamma is not None:
            return Choice(given_alpha, given_gamma)
        return _best_choice(graph, self.form, given_alpha, given_gamma)

    def _buffer_weights(self, ctx: Context, round_: Round) -> tuple[tuple[int, float], ...]:
        """Weights that keep variances positive, whatever alpha is."""
        graph = mixing_graph(
            self.topology, "metropolis",
            seed=ctx.seed, round_index=round_.index, members=round_.members.workers,
        )  # fmt: skip
        return graph.neighbours(ctx.worker)


@functools.lru_cache(maxsize=64)
def _best_choice(
    graph: MixingGraph, form: Form, alpha: float | None, gamma: float | None
) -> Choice:
    return optimal_choice(graph.laplacian(), form=form, alpha=alpha, gamma=gamma)
