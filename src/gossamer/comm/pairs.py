"""Averages of two workers."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.comm.coding import AS_IS, Coding
from gossamer.comm.collectives import shown
from gossamer.comm.context import Context, Round
from gossamer.errors import CommError


async def average_pair(
    ctx: Context,
    round_: Round,
    kind: str,
    values: Tensor,
    partner: int | None,
    *,
    coding: Coding = AS_IS,
) -> bool:
    """Average `values` with `partner`'s in place; on any failure both keep their own.

    One full-duplex exchange. Commits only where the peer's payload has arrived here and ours was
    accepted there. Returns whether the values were mixed; True where there is no partner.

    With a codec each moves half of the way that the payloads tell of: `x + (Q(y) - Q(x)) / 2`. Then
    the sum is conserved (to rounding), and the two differ by what the codec could not hold.
    """
    if partner is None:
        return True
    theirs = await partners_values(ctx, round_, kind, values, partner, coding=coding)
    if theirs is None:
        return False
    average_(values, theirs)
    return True


async def partners_values(
    ctx: Context,
    round_: Round,
    kind: str,
    values: Tensor,
    partner: int,
    *,
    coding: Coding = AS_IS,
) -> Tensor | None:
    """The first half of `average_pair`: `partner`'s values, or None where the exchange failed.

    For a mix that is hidden behind training: `average_` then follows when nobody reads `values`
    any longer, and they need no copy. With a codec they are as they look from here: my own and the
    difference that the payloads tell of.
    """
    mine = shown(ctx, values, coding, f"{kind} vector")
    tag = round_.tag(kind)
    transfer = ctx.send(partner, tag, mine.payload)
    try:
        theirs = mine.of_peer(await ctx.recv(partner, tag))
        await transfer.delivered()
    except CommError:
        transfer.cancel()
        ctx.record("failed_exchanges", 1.0)
        return None
    return theirs


def average_(values: Tensor, theirs: Tensor) -> None:
    """`(x + y) / 2` into `values`, the same bits on both ends."""
    torch.add(values, theirs, out=values).div_(2)
