"""Averages of two workers."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.comm.collectives import check_finite
from gossamer.comm.context import Context, Round
from gossamer.errors import CommError


async def average_pair(
    ctx: Context, round_: Round, kind: str, values: Tensor, partner: int | None
) -> bool:
    """Average `values` with `partner`'s in place; on any failure both keep their own.

    One full-duplex exchange. Commits only where the peer's payload has arrived here and ours was
    accepted there. Returns whether the values were mixed; True where there is no partner.
    """
    if partner is None:
        return True
    theirs = await partners_values(ctx, round_, kind, values, partner)
    if theirs is None:
        return False
    average_(values, theirs)
    return True


async def partners_values(
    ctx: Context, round_: Round, kind: str, values: Tensor, partner: int
) -> Tensor | None:
    """The first half of `average_pair`: `partner`'s values, or None where the exchange failed.

    For a mix that is hidden behind training: `average_` then follows when nobody reads `values`
    any longer, and they need no copy.
    """
    check_finite(ctx, values, f"{kind} vector")
    tag = round_.tag(kind)
    transfer = ctx.send(partner, tag, values)
    try:
        theirs = await ctx.recv(partner, tag)
        await transfer.delivered()
    except CommError:
        transfer.cancel()
        ctx.record("failed_exchanges", 1.0)
        return None
    return theirs


def average_(values: Tensor, theirs: Tensor) -> None:
    """`(x + y) / 2` into `values`, the same bits on both ends."""
    torch.add(values, theirs, out=values).div_(2)
