"""Where each token of a Decoupled DiLoCo run has gone, kept beside the method by other means.

The method counts tokens in three places that do not see each other: learners between two updates,
syncers in merges, and the notes on letters between them. `AccountedDiLoCo` is the method itself,
with a list of all merges and of all lives of learners. `Accounts.check` holds what the run has
recorded against them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from pydantic import PrivateAttr
from torch import Tensor

from gossamer.comm.context import Context, MethodState
from gossamer.comm.letters import Letter, LetterContext, with_letters
from gossamer.errors import check
from gossamer.methods.base import state_of
from gossamer.methods.decoupled_diloco import DecoupledDiLoCo, LearnerState, SyncerState
from gossamer.mixing.fragments import Fragment
from gossamer.sim.simulate import SimulationResult


@dataclass(frozen=True)
class MergedShare:
    """One learner's part of one merge of a fragment.

    Args:
        base: version of the fragment that the learner had received; `version` is the merge's.
        life: which life of the learner it was, counted from 0.
    """

    at_s: float
    fragment: int
    learner: int
    life: int
    base: int
    version: int
    tokens: int


@dataclass(frozen=True)
class Life:
    """A learner from its entry to its end, with its counters [fragments] as they were then."""

    learner: int
    life: int
    has_finished: bool
    versions: tuple[int, ...]
    tokens: tuple[int, ...]


Answer = tuple[int, int, tuple[int, ...]]  # learner, global step that was asked for, note


@dataclass
class Accounts:
    """What has happened in one run; merges with nobody in them are not listed."""

    shares: list[MergedShare] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    entries: Counter[int] = field(default_factory=Counter)  # by learner
    answers: dict[Answer, int] = field(default_factory=dict)  # which life gave it: a letter may
    # be merged when its learner has crashed and is back

    def check(self, result: SimulationResult) -> None:
        """Raise `InvariantViolated` unless every token is accounted for, and merged at most once.

        For each fragment, the tokens of all training are: merged, discarded on receipt, pending
        where a learner has finished, or lost with a learner. Those of a merge that its learner had
        not heard of are counted by both sides, and are known from the versions.
        """
        bases = Counter((s.fragment, s.learner, s.life, s.base) for s in self.shares)
        twice = [key for key, count in bases.items() if count > 1]
        check(not twice, f"merged twice, as (fragment, learner, life, version): {twice}")
        recorded = {
            name: _total(result, f"{name}_tokens")
            for name in ("merged", "discarded", "pending", "lost")
        }
        for name, own in (
            ("merged", sum(s.tokens for s in self.shares)),
            ("pending", self._left(has_finished=True)),
            ("lost", self._left(has_finished=False)),
        ):
            check(recorded[name] == own, f"{name} tokens: {recorded[name]} recorded, {own} counted")
        both = self.unheard_tokens()
        num_fragments = len(self.lives[0].tokens)
        trained = int(result.summary["samples"]) * num_fragments
        check(
            sum(recorded.values()) - both == trained,
            f"{trained} tokens were trained; {recorded} and {both} of them in two places",
        )

    def _left(self, *, has_finished: bool) -> int:
        return sum(sum(life.tokens) for life in self.lives if life.has_finished == has_finished)

    def unheard_tokens(self) -> int:
        """Of merges whose learner had not received the result when its life ended."""
        ends = {(life.learner, life.life): life.versions for life in self.lives}
        return sum(
            share.tokens
            for share in self.shares
            if share.version > ends[share.learner, share.life][share.fragment]
        )


def _total(result: SimulationResult, name: str) -> int:
    cell = result.summary["records"].get(name, {"count": 0, "mean": 0.0})
    return round(float(cell["count"] * cell["mean"]))


def _note_answers(ctx: LetterContext, accounts: Accounts, life: int) -> None:
    """Let a learner's context, which is one life's, note which answers it has sent."""
    post = ctx.post

    def noting(
        dst: int,
        kind: str,
        payload: Tensor,
        *,
        step: int,
        part: int = 0,
        note: tuple[int, ...] = (),
        exact: bool = False,
    ) -> None:
        if kind == "fragment":
            accounts.answers[ctx.worker, step, note] = life
        post(dst, kind, payload, step=step, part=part, note=note, exact=exact)

    ctx.post = noting  # type: ignore[method-assign]


class AccountedDiLoCo(DecoupledDiLoCo):
    """Decoupled DiLoCo that keeps accounts; for one run."""

    _accounts: Accounts = PrivateAttr(default_factory=Accounts)

    @property
    def accounts(self) -> Accounts:
        """Of the run that was made with this object."""
        return self._accounts

    async def run(self, ctx: Context, state: MethodState) -> None:
        """As the method's, and the learner's end is noted, whatever it is."""
        accounts, learner, own = self._accounts, ctx.worker, state_of(LearnerState, state)
        life = accounts.entries[learner]
        accounts.entries[learner] += 1
        has_finished = False
        _note_answers(with_letters(ctx), accounts, life)
        try:
            await super().run(ctx, state)
            has_finished = True
        finally:
            versions, tokens = tuple(own.versions.tolist()), tuple(own.tokens.tolist())
            accounts.lives.append(Life(learner, life, has_finished, versions, tokens))

    def _commit(
        self, ctx: LetterContext, state: SyncerState, part: Fragment, answers: list[Letter]
    ) -> None:
        p, before = part.index, int(state.versions[part.index])
        merged = state.merged_in[p].clone()
        super()._commit(ctx, state, part, answers)
        after = int(state.versions[p])
        check(
            bool(torch.isfinite(state.point).all()), "a merge has made values that are not finite"
        )
        for answer in answers:
            learner, (base, _, tokens) = answer.src, answer.note
            if int(state.merged_in[p, learner]) != int(merged[learner]):
                check(after > before, f"fragment {p}: version {before} became {after}")
                life = self._accounts.answers[learner, answer.step, answer.note]
                self._accounts.shares.append(
                    MergedShare(ctx.now(), p, learner, life, base, after, tokens)
                )
