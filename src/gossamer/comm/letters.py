"""Letters: what is sent without anybody waiting for it, and of which only the newest counts.

A letter is known by (sender, kind, part) and has a step number. Of each the receiver keeps the
newest that has come and not been taken; a newer one takes an older one back that is still on its
way, so that a thin line never carries what nobody needs. Letters belong to no round: none is
refused as late, and none says that its sender has gone on. A letter that is lost is lost silently;
whoever relies on letters sends again.

For whom messages and collectives are, see `gossamer.comm.context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from gossamer.comm.context import Context
from gossamer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Letter:
    """What has come.

    Args:
        src: who sent it.
        step: larger ones are newer.
        note: small numbers that say what the payload is; they are there without numerics too.
        payload: the receiver's own.
    """

    src: int
    step: int
    note: tuple[int, ...]
    payload: Tensor


@runtime_checkable
class LetterContext(Context, Protocol):
    """A context of a world that has letters, and syncers beside its workers."""

    @property
    def syncers(self) -> tuple[int, ...]:
        """Indices of the syncers, after those of the workers."""

    def connected(self) -> tuple[int, ...]:
        """Workers that are there now, as far as is known; sorted."""

    def post(
        self,
        dst: int,
        kind: str,
        payload: Tensor,
        *,
        step: int,
        part: int = 0,
        note: tuple[int, ...] = (),
        exact: bool = False,
    ) -> None:
        """Send a letter; `payload` and `exact` as in `Context.send`."""

    def poll(self, src: int, kind: str, part: int = 0) -> Letter | None:
        """Take the newest letter, if one has come; does not wait."""

    async def mail(self, seen: int, timeout: float | None = None) -> int:
        """Wait, at most `timeout` seconds, until there is news after `seen`; how much there is.

        News are letters, and workers that come or go. The first call passes 0.
        """


def with_letters(ctx: Context) -> LetterContext:
    """`ctx` as a context with letters; `ConfigError` where its world has none."""
    if not isinstance(ctx, LetterContext):
        raise ConfigError('methods with a syncer run in the simulated world: run.world = "sim"')
    return ctx
