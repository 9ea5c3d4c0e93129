"""Mixing with weighted neighbours: one row of a symmetric doubly stochastic matrix, by messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.comm.collectives import check_finite
from gossamer.comm.context import Context, Round, Tag, Transfer
from gossamer.errors import CommError


async def exchange(
    ctx: Context,
    tag: Tag,
    payload: Tensor,
    peers: Sequence[int],
    *,
    exact: bool = False,
    seconds: dict[int, float] | None = None,
) -> dict[int, Tensor]:
    """Send `payload` to each peer and take theirs, full duplex: what came of the edges that held.

    An edge holds where the peer's payload has arrived here and ours was accepted there, so both
    ends agree. Edges do not wait for one another, and none for longer than the deadline. The
    payload is the caller's again on return.

    Args:
        tag: equal on both ends.
        payload: contiguous, same shape on all workers.
        peers: sorted workers, without this one; each has this one among its own.
        exact: charge the payload's own bytes (see `Context.send`).
        seconds: filled with how long ours took to each peer whose edge held, whether or not it
            was ready for it.

    Returns:
        The payloads of the peers whose edge held, in the order of `peers`.
    """
    begun = ctx.now()
    transfers = {peer: ctx.send(peer, tag, payload, exact=exact) for peer in peers}
    received: dict[int, Tensor] = {}
    async with ctx.task_group() as tasks:
        receiving = {peer: tasks.start(_received(ctx, peer, tag)) for peer in peers}
        accepting = {
            peer: tasks.start(_accepted(ctx, transfer, receiving[peer]))
            for peer, transfer in transfers.items()
        }
        for peer, transfer in transfers.items():
            await asyncio.wait([receiving[peer]])
            theirs = None if receiving[peer].cancelled() else receiving[peer].result()
            if theirs is None:
                transfer.cancel()
            accepted_s = await accepting[peer]
            if theirs is not None and accepted_s is not None:
                received[peer] = theirs
                if seconds is not None:
                    seconds[peer] = accepted_s - begun
    return received


async def _received(ctx: Context, peer: int, tag: Tag) -> Tensor | None:
    """The peer's payload, or None where it did not come within the deadline."""
    try:
        return await ctx.recv(peer, tag)
    except CommError:
        return None


async def _accepted(
    ctx: Context, transfer: Transfer, receiving: asyncio.Task[Tensor | None]
) -> float | None:
    """When the receiver had accepted a transfer, in seconds; None where it did not.

    Then nobody waits for the other direction any longer. So who is rounds behind, whose messages
    are refused, does not wait for what its peers sent long ago.
    """
    try:
        await transfer.delivered()
    except CommError:
        receiving.cancel()
        return None
    return ctx.now()


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
    seconds: dict[int, float] | None = None,
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
        exact, seconds: see `exchange`.

    Returns:
        The peers that were mixed with.

    Raises `NonFiniteError` where this worker's own values are not finite; nothing was sent.
    """
    check_finite(ctx, values, f"{kind} vector")
    peers = [peer for peer, _ in neighbours]
    tag = round_.tag(kind, step=step)
    received = await exchange(ctx, tag, values, peers, exact=exact, seconds=seconds)
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
