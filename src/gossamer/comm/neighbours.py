"""Mixing with weighted neighbours: one row of a symmetric doubly stochastic matrix, by messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.comm.coding import AS_IS, Coding, Shown
from gossamer.comm.collectives import shown
from gossamer.comm.context import Context, Round, Tag, Transfer
from gossamer.errors import CommError


async def exchange(
    ctx: Context, tag: Tag, payload: Tensor | Shown, peers: Sequence[int], *, exact: bool = False
) -> dict[int, Tensor]:
    """Send `payload` to each peer and take theirs, full duplex: what came of the edges that held.

    Edges do not wait for one another, and none for longer than the deadline. The payload is the
    caller's again on return.

    Args:
        tag: equal on both ends.
        payload: contiguous, same shape on all workers; or what is shown of values, for those of
            the peers as they look from here.
        peers: sorted workers, without this one; each has this one among its own.
        exact: charge the payload's own bytes (see `Context.send`).

    Returns:
        The payloads of the peers whose edge held, in the order of `peers`.
    """
    received: dict[int, Tensor] = {}
    if len(peers) == 1:  # the usual case, which needs no tasks around it
        theirs = await swap(ctx, tag, payload, peers[0], exact=exact)
        return {} if theirs is None else {peers[0]: theirs}
    async with ctx.task_group() as tasks:
        swaps = {p: tasks.start(swap(ctx, tag, payload, p, exact=exact)) for p in peers}
        for peer, edge in swaps.items():
            theirs = await edge
            if theirs is not None:
                received[peer] = theirs
    return received


async def swap(
    ctx: Context, tag: Tag, payload: Tensor | Shown, peer: int, *, exact: bool = False
) -> Tensor | None:
    """Send `payload` to a peer and take its own, full duplex; None where the edge did not hold.

    It holds where the peer's payload has arrived here and ours was accepted there, so both ends
    agree. As soon as one direction has failed the other is given up.
    """
    mine = payload if isinstance(payload, Shown) else None
    sent = payload.payload if isinstance(payload, Shown) else payload
    transfer = ctx.send(peer, tag, sent, exact=exact)
    async with ctx.task_group() as tasks:
        receiving = tasks.start(_received(ctx, peer, tag, mine))
        accepting = tasks.start(_accepted(transfer, receiving))
        await asyncio.wait([receiving])
        theirs = None if receiving.cancelled() else receiving.result()
        if theirs is None:
            transfer.cancel()
        return theirs if await accepting else None


async def _received(ctx: Context, peer: int, tag: Tag, mine: Shown | None) -> Tensor | None:
    """The peer's payload, or None where it did not come within the deadline."""
    try:
        theirs = await ctx.recv(peer, tag)
        return theirs if mine is None else mine.of_peer(theirs)
    except CommError:
        return None


async def _accepted(transfer: Transfer, receiving: asyncio.Task[Tensor | None]) -> bool:
    """Whether the receiver has accepted a transfer.

    Where it has not, nobody waits for the other direction any longer. So who is rounds behind,
    whose messages are refused, does not wait for what its peers sent long ago.
    """
    try:
        await transfer.delivered()
    except CommError:
        receiving.cancel()
        return False
    return True


def add_differences_(
    values: Tensor, received: Mapping[int, Tensor], weights: Sequence[tuple[int, float]]
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
    exact: bool = False,
    coding: Coding = AS_IS,
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
        exact: see `exchange`.
        coding: how they are sent; with a codec `W_ij (Q(x_j) - Q(x_i))` is added.

    Returns:
        The peers that were mixed with.

    Raises `NonFiniteError` where this worker's own values are not finite; nothing was sent.
    """
    mine = shown(ctx, values, coding, f"{kind} vector")
    peers = [peer for peer, _ in neighbours]
    tag = round_.tag(kind, step=step)
    received = await exchange(ctx, tag, mine, peers, exact=exact)
    add_differences_(values, received, neighbours)
    if len(received) < len(peers):
        ctx.record("failed_exchanges", float(len(peers) - len(received)))
    return tuple(received)


async def mix_buffers(
    ctx: Context, round_: Round, neighbours: Sequence[tuple[int, float]], *, step: int = 0
) -> None:
    """Mix float buffers with neighbours, and take the maximum of integer ones, in place.

    Models without buffers send nothing.

    Args:
        neighbours: as in `mix_neighbours`, with weights that leave the own one at 0 or more, so
            that variances stay so.
    """
    replica = ctx.replica
    if replica.buffers.numel():
        await mix_neighbours(
            ctx, round_, "buffers", replica.buffers, neighbours, step=step, exact=True
        )
    if replica.counters.numel():
        tag = round_.tag("counters", step=step)
        peers = [peer for peer, _ in neighbours]
        received = await exchange(ctx, tag, replica.counters, peers, exact=True)
        for theirs in received.values():
            torch.maximum(replica.counters, theirs, out=replica.counters)
