"""Disagreement of a group in what its models predict, measured between the workers themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gossamer.comm.collectives import average_survivors, non_finite
from gossamer.comm.context import Context, Round
from gossamer.errors import CommError
from gossamer.measure.divergence import js_distance


async def group_js_distance(ctx: Context, round_: Round, group: Sequence[int]) -> float:
    """Mean pairwise Jensen-Shannon distance of the group's predictions on the probe batch.

    Every worker sends its log-probabilities to the others of `group`, and the distance that each
    computed is then averaged, so that all decide alike even where some were not heard. Both are
    charged to the ledger, and the forward pass to the worker's time.

    Returns:
        The distance in [0, 1]; 0 in a group of one.
    """
    if len(group) < 2:
        return 0.0
    tag = round_.tag("predictions")
    mine = await ctx.predict()
    if bool(torch.isnan(mine).any()):  # infinitely unlikely classes are fine, NaN is divergence
        raise non_finite(ctx, "prediction")
    peers = [worker for worker in group if worker != ctx.worker]
    for peer in peers:
        ctx.send(peer, tag, mine, exact=True)
    distances = []
    for peer in peers:
        try:
            theirs = await ctx.recv(peer, tag)
        except CommError:
            continue
        ordered = [mine, theirs] if ctx.worker < peer else [theirs, mine]
        distances.append(js_distance(ordered))
    # Who hears nobody has nobody to mix with either: there is nothing to trigger.
    own = sum(distances) / len(distances) if distances else 0.0
    agreed = torch.tensor([own], dtype=torch.float64)
    await average_survivors(ctx, round_, "trigger", agreed, group=group, exact=True)
    return float(agreed.item())
