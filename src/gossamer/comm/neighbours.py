"""Mixing with weighted neighbours: one row of a symmetric doubly stochastic matrix, by messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossamer.comm.collectives import check_finite
from gossamer.comm.context import Context, Round, Tag, Transfer
from gossamer.errors import CommError

_LAST_LOOK = 0.01  # deadlines: the least time that is given to a message


async def exchange(
    ctx: Context, tag: Tag, payload: Tensor, peers: Sequence[int], *, exact: bool = False
) -> dict[int, Tensor]:
    """Send `payload` to each peer and take theirs, full duplex: what came of the edges that held.

    An edge holds where the peer's payload has arrived here and ours was accepted there, so both
    ends agree. All peers share one deadline. `payload` is the caller's again on return.

    Args:
        tag: equal on both ends.
        payload: contiguous, same shape on all workers.
        peers: sorted workers, without this one; each has this one among its own.
        exact: charge the payload's own bytes (see `Context.send`).

    Returns:
        The payloads of the peers whose edge held, in the order of `peers`.
    """
    transfers = {peer: ctx.send(peer, tag, payload, exact=exact) for peer in peers}
    until = ctx.now() + ctx.deadline
    received: dict[int, Tensor] = {}
    for peer, transfer in transfers.items():
        timeout = max(until - ctx.now(), ctx.deadline * _LAST_LOOK)
        try:
            received[peer] = await ctx.recv(peer, tag, timeout=timeout)
        except CommError:
            _give_up(ctx, transfer)
    for peer in list(received):
        try:
            await transfers[peer].delivered()
        except CommError:
            del received[peer]
            _give_up(ctx, transfers[peer])
    return received


def _give_up(ctx: Context, transfer: Transfer) -> None:
    transfer.cancel()
    ctx.record("failed_exchanges", 1.0)


def add_differences_(
    values: Tensor, received: dict[int, Tensor], weights: Sequence[tuple[int, float]]
) -> None:
    """`x <- x + sum_j w_j (x_j - x)` in place, in the order of `weights`.

    What one end of an edge adds the other takes away, up to rounding, and equal vectors stay as
    they are bit for bit. Weights of peers that are not in `received` stay with x.
    """
    if values.is_meta:  # nothing to compute, and torch works out shapes at length
        return
    total: Tensor | None = None
    for peer, weight in weights:
        if peer not in received:
            continue
        difference = received[peer] - values
        total = difference.mul_(weight) if total is None else total.add_(difference, alpha=weight)
    if total is not None:
        values.add_(total)


async def mix_neighbours(
    ctx: Context,
    round_: Round,
    kind: str,
    values: Tensor,
    neighbours: Sequence[tuple[int, float]],
    *,
    step: int = 0,
) -> tuple[int, ...]:
    """`x_i <- x_i + sum_j W_ij (x_j - x_i)` in place over the neighbours whose edge held.

    A failed edge leaves its weight on both ends' diagonal: W stays symmetric and doubly stochastic,
    and the mean is conserved.

    Args:
        kind: what the bytes are for, in the ledger.
        values: this worker's vector; overwritten.
        neighbours: (peer, W_ij), sorted by peer; both ends give the same weight. See
            `MixingGraph.neighbours`.
        step: position in the round, where a round has several.

    Returns:
        The peers that were mixed with.

    Raises `NonFiniteError` where this worker's own values are not finite; nothing was sent.
    """
    check_finite(ctx, values, f"{kind} vector")
    peers = [peer for peer, _ in neighbours]
    received = await exchange(ctx, round_.tag(kind, step=step), values, peers)
    add_differences_(values, received, neighbours)
    return tuple(received)
