"""Letters: what is sent without anybody waiting for it, and of which only the newest counts.

Rules that every world keeps (`gossamer.testing` has the checks):

- A letter is known by (sender, kind, part) and has a step number. Of each the receiver keeps the
  newest that has come and not been taken. It is taken once; what is as old or older never comes
  after it.
- A newer one takes an older one back whose bytes have not all left, so that a thin line never
  carries what nobody needs. One that has left arrives: letters that are sent faster than the way is
  long are not all lost.
- Letters belong to no round: none is refused as late, none says that its sender has gone on, and
  nobody waits for one to be delivered.
- A letter that is lost is lost silently, as is one with NaN or infinity that is not `exact`;
  whoever relies on letters sends again.
- Who comes back has an empty mailbox, and its letters count from the beginning.

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


class Mail(Protocol):
    """One place's end of the letter service."""

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


@runtime_checkable
class LetterContext(Context, Mail, Protocol):
    """A context of a world that has letters, and syncers beside its workers."""

    @property
    def syncers(self) -> tuple[int, ...]:
        """Indices of the syncers, after those of the workers."""

    def connected(self) -> tuple[int, ...]:
        """Workers that are there now, as far as is known; sorted."""


def with_letters(ctx: Context) -> LetterContext:
    """`ctx` as a context with letters; `ConfigError` where its world has none."""
    if not isinstance(ctx, LetterContext):
        raise ConfigError("methods with a syncer need a world that has letters")
    return ctx
