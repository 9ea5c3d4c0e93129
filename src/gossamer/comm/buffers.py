"""Agreement on a model's buffers, such as the running statistics of batch normalisation.

Float buffers are averaged with the parameters and never reach an outer optimizer; integer ones
(counters) take the maximum. Models without buffers send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gossamer.comm.collectives import average_survivors
from gossamer.comm.context import Context, Round
from gossamer.errors import CommError
from gossamer.mixing.matchings import partner_of, random_matching


async def synchronise_buffers(ctx: Context, round_: Round, group: Sequence[int]) -> None:
    """Average float buffers and take the maximum of integer ones over `group`, in place.

    Args:
        group: sorted workers, this one included; a failed link leaves buffers as they are.
    """
    if len(group) < 2:
        return
    replica = ctx.replica
    if replica.buffers.numel():
        await average_survivors(ctx, round_, "buffers", replica.buffers, group=group, exact=True)
    if replica.counters.numel():
        tag = round_.tag("counters")
        mine = replica.counters.clone()
        peers = [worker for worker in group if worker != ctx.worker]
        for peer in peers:
            ctx.send(peer, tag, mine, exact=True)
        for peer in peers:
            try:
                theirs = await ctx.recv(peer, tag)
            except CommError:
                continue
            torch.maximum(replica.counters, theirs, out=replica.counters)


async def synchronise_buffers_in_pairs(ctx: Context, round_: Round) -> None:
    """Agree on buffers with one random peer: for methods in which no larger group meets."""
    replica = ctx.replica
    if replica.buffers.numel() or replica.counters.numel():
        pairs = random_matching(ctx.seed, round_.index, round_.members.workers, "buffers")
        partner = partner_of(ctx.worker, pairs)
        if partner is not None:
            await synchronise_buffers(ctx, round_, tuple(sorted((ctx.worker, partner))))
