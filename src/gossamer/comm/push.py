"""Push-sum: shares of a mass are pushed along directed edges, and none of it is ever lost."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossamer.comm.coding import AS_IS, Coding
from gossamer.comm.collectives import shown
from gossamer.comm.context import Context, Round
from gossamer.errors import CommError

_LAST_LOOK = 0.01  # deadlines: the least time that is given to a message


async def push_shares(
    ctx: Context,
    round_: Round,
    kind: str,
    mass: Tensor,
    arcs: Sequence[tuple[int, int]],
    *,
    step: int = 0,
    coding: Coding = AS_IS,
) -> None:
    """Keep an equal share of `mass`, push one along each of my outgoing arcs, add what comes in.

    In place. A share that its receiver has not accepted is taken back, so the total over the
    workers stays what it was, whatever fails. (Only what a worker held when it crashed is gone.)

    Args:
        kind: what the bytes are for, in the ledger.
        mass: flat, contiguous; same length on all workers.
        arcs: (from, to), all of this step, the same on all workers.
        step: position in the round, where a round has several.
        coding: how shares are sent. What a codec cannot hold of a share its sender keeps.

    Raises `NonFiniteError` where `mass` is not finite, or more than the codec can hold; nothing was
    sent.
    """
    receivers = [b for a, b in arcs if a == ctx.worker]
    senders = [a for a, b in arcs if b == ctx.worker]
    tag = round_.tag(kind, step=step)
    share = shown(ctx, mass.mul_(1 / (1 + len(receivers))).clone(), coding, f"{kind} vector")
    if (kept := share.kept()) is not None:
        mass.add_(kept, alpha=len(receivers))
    transfers = [ctx.send(peer, tag, share.payload) for peer in receivers]
    until = ctx.now() + ctx.deadline
    for peer in senders:
        timeout = max(until - ctx.now(), ctx.deadline * _LAST_LOOK)
        try:
            mass.add_(share.decode(await ctx.recv(peer, tag, timeout=timeout)))
        except CommError:
            ctx.record("shares_missed", 1.0)
    for transfer in transfers:
        try:
            await transfer.delivered()
        except CommError:
            transfer.cancel()
            mass.add_(share.decoded)
            ctx.record("shares_taken_back", 1.0)
