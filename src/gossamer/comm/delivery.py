"""Messages that are sent again while the link loses them."""

from __future__ import annotations

from torch import Tensor

from gossamer.comm.context import Context, Tag
from gossamer.errors import CommError, LinkFailed

RESENDS_MAX = 20  # of one payload


async def send_until_delivered(
    ctx: Context, dst: int, tag: Tag, payload: Tensor, exact: bool
) -> bool:
    """Send again while the link loses it, and say whether it arrived; no more where the peer is
    gone.
    """
    for attempt in range(RESENDS_MAX):
        transfer = ctx.send(dst, tag._replace(attempt=tag.attempt + attempt), payload, exact=exact)
        try:
            await transfer.delivered()
        except LinkFailed:
            continue
        except CommError:
            return False
        return True
    ctx.record("results_lost", 1.0)
    return False


async def recv_until_delivered(
    ctx: Context, src: int, tag: Tag, *, timeout: float | None = None
) -> Tensor | None:
    """The other end of `send_until_delivered`; None where nothing came at all."""
    for attempt in range(RESENDS_MAX):
        try:
            resent = tag._replace(attempt=tag.attempt + attempt)
            return await ctx.recv(src, resent, timeout=timeout)
        except LinkFailed:
            continue
        except CommError:
            break
    ctx.record("results_lost", 1.0)
    return None
