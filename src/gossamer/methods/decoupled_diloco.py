"""Decoupled DiLoCo: learners that never wait, and a syncer that merges what it gets in time.

Source:     "Decoupled DiLoCo", 2026, arXiv:2604.21428. The paper itself was not at hand: both loops
            are reconstructed from descriptions of its Algorithms 1 and 2 by implementers.

Update      learner, each step:   theta <- InnerOpt(theta);  report t, tokens to the syncer
                                  where Theta_p is due:  theta_p <- a theta_p + (1 - a) Theta_p
            syncer, step t with t mod H = t_p:
                                  wait for K reports, then for a grace window; pull from those M_t
                                  Delta_p = Merge({anchor_p - theta_m,p}, {c_tokens^2 / c_steps})
                                  v_p     <- mu v_p + Delta_p
                                  Theta_p <- Theta_p - lr (Delta_p + mu v_p);  broadcast Theta_p

Symbols     paper    here                  unit / shape     default  where the default comes from
            P        fragments             -                24       the paper; at most H, tensors
            H        inner_steps           steps            100      the paper: 24
            tau      due_steps             steps            2        the paper
            K        quorum                learners         1        the paper, with grace
            gamma    grace                 share of slack   0.9      not published; below 1
            a        blend                 -                0        the paper: plain overwrite
            lr, mu   outer_learning_rate   -                0.7 0.9  not published; DiLoCo's
            c        steps, tokens         [P]              -        since theta_p last received

Departures  Where K = M learners wait for the update when it is due (`waits`): the synchronous
            comparison, whose utilisation the paper gives below 100 %. With smaller K, "reported for
            step t" means a report that is newer than the last one counted, as a slower learner
            would else be behind for ever. A learner sends its difference to the version that it
            last received. Merging is per tensor. Updates are applied tau steps after the pull.
            Where fewer than K learners are there, K is their number. Buffers are each learner's.

Reduces to  diloco     when K = M, P = 1, tau = 0 and merge = "average", at equal speeds

Cost        sent per learner and cycle: its P values, encoded, and 9 bytes a report to each syncer;
            by the syncers to each learner and cycle: P values, encoded, and 9 bytes a pull
            extra memory: learner 2 P (anchor, host copy), syncer 2 P (Theta, v)

Fails       a lost, late or stopped learner is absent from a merge; all others are merged as before.
            A lost update is repaired by the fragment's next one, and the learner is left out until
            it has it, so that no token is merged twice. When the syncer dies learners train on; it
            returns with its last checkpoint, made before each broadcast. A learner that diverges
            sends nothing more. One that returns has a donor's state, and counts from zero; what
            its death cost is recorded (`lost_tokens`), but where nothing is left to do so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from gossamer.codec import PLAIN, check_codec, decoded, encoded
from gossamer.comm.collectives import check_finite
from gossamer.comm.context import Context, MethodState
from gossamer.comm.letters import Letter, LetterContext, with_letters
from gossamer.comm.reports import Reports, StepTimes, send_report
from gossamer.errors import ConfigError
from gossamer.methods.base import Method, Sends, outer_learning_rate, outer_momentum, state_of
from gossamer.mixing.fragments import Fragment, Scheme, fragments_of, most_fragments
from gossamer.mixing.merge import merge_fragment, token_weight
from gossamer.mixing.schedule import Schedule
from gossamer.outer.nesterov import nesterov_step_on_
from gossamer.training.layout import ParameterLayout, gather, scatter
from gossamer.training.replica import Replica

PAPER_FRAGMENTS = 24


@dataclass(kw_only=True)
class LearnerState(MethodState):
    """What a learner last received [P], and counters of each fragment, int64 [fragments].

    Args:
        steps, tokens: done since the fragment was received.
        versions: of the fragment as received: the global step of its last merge.
        pulled: own step after which it was read for a merge whose update is not here yet; else -1.
        step: own steps so far.
        owner: whose counters these are; another worker's after a donation.
    """

    anchor: Tensor
    steps: Tensor
    tokens: Tensor
    versions: Tensor
    pulled: Tensor
    step: int = 0
    owner: int = -1


@dataclass(kw_only=True)
class SyncerState(MethodState):
    """Theta [P], its momentum [P]; versions [fragments]: steps of the last merges; steps done.

    `merged_in` (its version) and `merged_tokens` [fragments, M] are of the last merge that a
    learner was in.
    """

    point: Tensor
    momentum: Tensor
    versions: Tensor
    merged_in: Tensor
    merged_tokens: Tensor
    step: int = 0


class DecoupledDiLoCo(Method):
    """Decoupled DiLoCo (arXiv:2604.21428)."""

    name: ClassVar[str] = "decoupled_diloco"
    State: ClassVar[type[MethodState]] = LearnerState

    outer_learning_rate: float = outer_learning_rate()
    outer_momentum: float = outer_momentum()
    fragments: int | None = Field(
        None, ge=1, description="P; left out: 24, or as many as there are steps or tensors"
    )
    fragmentation: Scheme = Field("balanced", description="how tensors are put into fragments")
    due_steps: int = Field(2, ge=0, description="tau, steps from a pull to its update (paper: 2)")
    quorum: int = Field(1, ge=1, description="K, learners that a merge waits for (paper: 1)")
    grace: float = Field(
        0.9, ge=0, lt=1, description="share of the slack that is waited for more (not published)"
    )
    waits: bool | None = Field(
        None, description="whether learners wait for updates; left out: where K is all of them"
    )
    blend: float = Field(0.0, ge=0, lt=1, description="share of a learner's own that it keeps")
    merge: Literal["rda", "average"] = Field("rda", description="the rule for most tensors")
    averaged: tuple[str, ...] = Field(
        ("embedding*", "*.embedding*", "*embed_tokens*"),
        description="globs of tensors that are averaged plainly (paper: embeddings)",
    )
    codec: str = Field(PLAIN, description="encoding of what learners send (paper: bf16, int4)")
    codec_down: str = Field(PLAIN, description="encoding of what syncers send")
    syncers: int = Field(1, ge=1, description="shards of the syncer, each with its fragments")

    @property
    def sends(self) -> Sends:
        return Sends()

    @property
    def num_syncers(self) -> int:
        return self.syncers

    @property
    def overlaps(self) -> bool:
        return True

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        count = len(self.cut(layout))
        Schedule(count, self.inner_steps)
        for name, value, most, what in (
            ("quorum", self.quorum, num_workers, "the workers"),
            ("syncers", self.syncers, count, "the fragments"),
            ("due_steps", self.due_steps, self.inner_steps - 1, "a cycle's steps but one"),
        ):
            if value > most:
                raise ConfigError(f"method.{name}: at most {most}, {what}; got {value}")
        check_codec(self.codec)
        check_codec(self.codec_down)

    def cut(self, layout: ParameterLayout) -> tuple[Fragment, ...]:
        """The model's fragments."""
        most = most_fragments(layout, scheme=self.fragmentation)
        count = self.fragments or min(PAPER_FRAGMENTS, self.inner_steps, most)
        return fragments_of(layout, count, scheme=self.fragmentation)

    def _in_step(self, ctx: Context) -> bool:
        return self.quorum == ctx.num_workers if self.waits is None else self.waits

    def init(self, replica: Replica) -> LearnerState:
        zeros = torch.zeros(len(self.cut(replica.layout)), dtype=torch.int64)
        return LearnerState(
            anchor=replica.parameters.clone(),
            steps=zeros.clone(),
            tokens=zeros.clone(),
            versions=zeros.clone(),
            pulled=zeros - 1,
        )

    async def run(self, ctx: Context, state: MethodState) -> None:
        learner = _Learner(self, with_letters(ctx), state_of(LearnerState, state))
        kept = "lost"  # what becomes of tokens that no merge has had
        try:
            async for _ in ctx.rounds(learner.state):
                async with ctx.task_group() as tasks:
                    host = tasks.start(learner.serve())
                    for _ in range(self.inner_steps):
                        await learner.step()
                    host.cancel()
            kept = "pending"
        finally:
            ctx.record(f"{kept}_tokens", float(learner.state.tokens.sum()))

    def init_syncer(self, replica: Replica, num_workers: int) -> SyncerState:
        start, count = replica.parameters, len(self.cut(replica.layout))
        return SyncerState(
            point=start.clone(),
            momentum=start.new_zeros(start.shape),
            versions=torch.zeros(count, dtype=torch.int64),
            merged_in=torch.zeros(count, num_workers, dtype=torch.int64),
            merged_tokens=torch.zeros(count, num_workers, dtype=torch.int64),
        )

    async def run_syncer(self, ctx: Context, state: MethodState) -> None:
        ctx, state = with_letters(ctx), state_of(SyncerState, state)
        fragments = self.cut(ctx.replica.layout)
        schedule = Schedule(len(fragments), self.inner_steps)
        reports = Reports(ctx, minimum=self.quorum, in_step=self._in_step(ctx),
                          due_steps=self.due_steps)  # fmt: skip
        while True:
            step = state.step + 1
            due = schedule.due(step)
            if due is None or ctx.syncers[due % self.syncers] != ctx.worker:
                await reports.gather(step, grace=0.0)
                state.step = step
                continue
            learners = await reports.gather(step, grace=self.grace)
            answers = await reports.pull(learners, step, due)
            state.step = step
            self._commit(ctx, state, fragments[due], answers)
            await ctx.checkpoint(state)  # before anybody is told: what is merged stays merged
            self._broadcast(ctx, state, fragments[due])

    def _commit(
        self, ctx: LetterContext, state: SyncerState, part: Fragment, answers: list[Letter]
    ) -> None:
        """Merge what learners have given, and take one outer step on the fragment."""
        p, deltas, weights = part.index, list[Tensor](), list[float]()
        for answer in answers:
            version, steps, tokens = answer.note
            weight = token_weight(tokens, steps)
            # Who has not received the merge that it was last in would be counted twice.
            if weight > 0 and version >= int(state.merged_in[p, answer.src]):
                deltas.append(
                    decoded(answer.payload, self.codec, numel=part.numel, like=state.point)
                )
                weights.append(weight)
                state.merged_in[p, answer.src] = state.step
                state.merged_tokens[p, answer.src] = tokens
                ctx.record("merged_tokens", float(tokens))
                ctx.record("merged_steps", float(steps))
        ctx.record("merged_learners", float(len(deltas)))
        if not deltas:
            return
        is_plain = part.matches(("*",) if self.merge == "average" else self.averaged)
        delta = merge_fragment(deltas, weights, part.tensors, is_plain)
        nesterov_step_on_(
            state.point, state.momentum, part.slices, delta,
            learning_rate=self.outer_learning_rate, momentum=self.outer_momentum,
        )  # fmt: skip
        state.versions[p] = state.step

    def _broadcast(self, ctx: LetterContext, state: SyncerState, part: Fragment) -> None:
        p = part.index
        payload = encoded(gather(state.point, part.slices), self.codec_down)
        for learner in ctx.connected():
            last = (state.versions[p], state.merged_in[p, learner], state.merged_tokens[p, learner])
            note = tuple(int(number) for number in last)
            ctx.post(learner, "update", payload, step=state.step, part=p, note=note)


class _Learner:
    """One learner's steps, and its host's answers."""

    def __init__(self, method: DecoupledDiLoCo, ctx: LetterContext, state: LearnerState) -> None:
        self.method, self.ctx, self.state = method, ctx, state
        self.fragments = method.cut(ctx.replica.layout)
        self.host = ctx.replica.parameters.clone()  # as it was after the last whole step
        self.times = StepTimes()
        self.schedule = Schedule(len(self.fragments), method.inner_steps)
        self.heard = [0] * len(self.fragments)  # the global step of each fragment's newest update
        self.asked: dict[int, int] = {}  # by fragment: the global step of the first pull
        if state.owner != ctx.worker:  # a donor's: what it has done is for itself to report
            state.owner = ctx.worker
            state.steps.zero_()
            state.tokens.zero_()
            state.pulled.fill_(-1)

    async def step(self) -> None:
        """Train, report, and take the updates that are due."""
        ctx, state = self.ctx, self.state
        began_s = ctx.now()
        report = await ctx.train(1)
        self.times.add(ctx.now() - began_s)
        state.step += 1
        state.steps += 1
        state.tokens += report.num_samples
        self.host.copy_(ctx.replica.parameters)
        send_report(ctx, state.step, self.times)
        self._receive()
        if self.method._in_step(ctx):
            await self._await_due()

    async def serve(self) -> None:
        """Answer pulls from the host's copy of the parameters, while training goes on."""
        ctx, state, seen = self.ctx, self.state, 0
        while True:
            for syncer in ctx.syncers:
                pull = ctx.poll(syncer, "pull")
                if pull is not None:
                    part = self.fragments[pull.note[0]]
                    p = part.index
                    delta = gather(state.anchor, part.slices)
                    if not delta.is_meta:
                        delta -= gather(self.host, part.slices)
                    check_finite(ctx, delta, "outer gradient")
                    counters = (state.versions[p], state.steps[p], state.tokens[p])
                    note = tuple(int(counter) for counter in counters)
                    payload = encoded(delta, self.method.codec)
                    ctx.post(syncer, "fragment", payload, step=pull.step, note=note)
                    state.pulled[p] = state.step
                    self.asked.setdefault(p, pull.step)
            seen = await ctx.mail(seen)

    def _receive(self) -> None:
        """Take the updates that have come and are due, at the end of a step."""
        ctx, state, parameters = self.ctx, self.state, self.ctx.replica.parameters
        for part, pulled in zip(self.fragments, state.pulled.tolist(), strict=True):
            p = part.index
            if self._is_early(p, pulled):
                continue
            update = ctx.poll(ctx.syncers[p % len(ctx.syncers)], "update", p)
            if update is None:
                continue
            self.heard[p], (version, merged_in, merged_tokens) = update.step, update.note
            state.pulled[p] = -1
            if version <= int(state.versions[p]):
                continue
            values = decoded(
                update.payload, self.method.codec_down, numel=part.numel, like=parameters
            )
            scatter(state.anchor, part.slices, values)
            if self.method.blend:
                values = values.lerp(gather(parameters, part.slices), self.method.blend)
            scatter(parameters, part.slices, values)
            scatter(self.host, part.slices, values)
            # What was merged before the first pull was another life's of this learner.
            is_mine = merged_in >= self.asked.get(p, version + 1)
            merged = merged_tokens if is_mine and merged_in > int(state.versions[p]) else 0
            ctx.record("discarded_tokens", float(int(state.tokens[p]) - merged))
            state.versions[p] = version
            state.steps[p] = state.tokens[p] = 0

    def _is_early(self, p: int, pulled: int) -> bool:
        """Whether fragment p's update is to be applied later: tau steps after it was read."""
        method, step = self.method, self.state.step
        if method._in_step(self.ctx):
            return self.schedule.steps_since(p, step) < method.due_steps
        return pulled >= 0 and step < pulled + method.due_steps

    async def _await_due(self) -> None:
        """Wait, within the deadline, for the update of what was due tau steps ago."""
        ctx, method, seen = self.ctx, self.method, 0
        step, until_s = self.state.step - method.due_steps, ctx.now() + ctx.deadline
        p = self.schedule.due(step)
        while p is not None and self.heard[p] < step and ctx.now() < until_s:
            seen = await ctx.mail(seen, until_s - ctx.now())
            self._receive()
