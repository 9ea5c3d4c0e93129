"""Collectives over `send` and `recv`, with one fixed order of reduction.

Two averages over a group, which give the same bits when nothing fails:

- `all_reduce_mean` is all or nothing: a broken link is noticed when the attempt ends, by a vote,
  and then nobody uses the result. That is what an all-reduce library gives.
- `average_survivors` leaves out those whose links failed, who keep their own values: the matrix
  stays symmetric and doubly stochastic, and the mean is conserved.

Both cut the values into one chunk per worker, which its owner gathers, averages and hands back:
2 (M-1)/M of the values sent per worker, as a ring would, in two latencies instead of 2 (M-1).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.comm.context import Context, Round, Tag, Transfer
from gossamer.errors import (
    CollectiveFailed,
    CommError,
    LinkFailed,
    NonFiniteError,
    OutOfSync,
    TimedOut,
)

ATTEMPTS_MAX = 1000  # of one all-reduce; far beyond any link that is worth using
RESENDS_MAX = 20  # of one averaged chunk
SEGMENTS = 8  # a link that fails is noticed after the first, and the rest does without it
SEGMENT_VALUES_MIN = 1024  # shorter vectors are one segment
_PHASES_PER_SEGMENT = 1000
_LAST_LOOK = 0.01  # deadlines: the least time that is given to a message


def check_finite(ctx: Context, values: Tensor, what: str) -> None:
    """Raise `NonFiniteError` where `values`, this worker's own, hold NaN or infinity."""
    if not is_finite(values):
        raise non_finite(ctx, what)


def non_finite(ctx: Context, what: str) -> NonFiniteError:
    """The error for a quantity of this worker that is not finite."""
    replica = ctx.replica
    return NonFiniteError(
        what,
        worker=ctx.worker,
        step=replica.steps_completed,
        learning_rate=replica.learning_rate,
    )


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite; on tensors without storage, yes."""
    if values.is_meta or values.numel() == 0 or not values.is_floating_point():
        return True
    # The sum is finite unless a value is not, or the sum overflows: only then look at each.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


async def all_reduce_until_complete(
    ctx: Context, round_: Round, kind: str, values: Tensor, *, step: int = 0
) -> Round:
    """Average `values` over the members in place, repeating the whole all-reduce until it holds.

    Args:
        round_: the round; its members take part.
        kind: what the bytes are for, in the ledger.
        values: contiguous, same shape on all members; overwritten with the mean.
        step: position in the round, where a round has several.

    Returns:
        The round with the members of the attempt that succeeded (workers that are gone left out).

    Raises:
        NonFiniteError: this worker's own values are not finite; nothing was sent.
        OutOfSync: this worker is no longer a member, or another has gone on without it.
        CollectiveFailed: `ATTEMPTS_MAX` attempts failed.
    """
    check_finite(ctx, values, f"{kind} vector")
    attempt = 0
    for _ in range(ATTEMPTS_MAX):
        if ctx.worker not in round_.members:
            raise OutOfSync(f"worker {ctx.worker} is no longer a member in round {round_.index}")
        try:
            tag = round_.tag(kind, step=step, attempt=attempt)
            await all_reduce_mean(ctx, tag, round_.members.workers, values)
        except CollectiveFailed:
            ctx.record("retries", 1.0)
            epoch, round_ = round_.members.epoch, ctx.refresh_members(round_)
            # Counted anew with other members: some may have begun with them, and all shall meet.
            attempt = attempt + 1 if round_.members.epoch == epoch else 0
        else:
            return round_
    raise CollectiveFailed(f"{kind} all-reduce of round {round_.index}: {ATTEMPTS_MAX} attempts")


async def all_reduce_mean(ctx: Context, tag: Tag, workers: Sequence[int], values: Tensor) -> None:
    """All-reduce: `values` becomes the mean over `workers`, or `CollectiveFailed`.

    In place; after a failure `values` is unchanged. It runs to its end even where a link has
    failed, as the others cannot know, and a vote then tells everybody. A peer that let the deadline
    pass is not waited for again: the attempt takes one deadline at most, and what arrives.
    """
    members = tuple(workers)
    if len(members) == 1:
        return
    chunks = list(values.tensor_split(len(members)))
    late: set[int] = set()  # membership tests only
    received, transfers = await _exchange_contributions(
        ctx, tag, members, chunks, exact=False, late=late
    )
    mean = mean_of([received[worker] for worker in members if worker in received])
    peers = [worker for worker in members if worker != ctx.worker]
    result_tag = tag._replace(phase=1)
    sent = [ctx.send(peer, result_tag, mean) for peer in peers]
    results = {ctx.worker: mean, **await _receive_all(ctx, result_tag, peers, late=late)}
    intact = len(received) == len(results) == len(members)
    if not await _vote(ctx, tag._replace(phase=2), members, intact, late):
        for transfer in (*transfers.values(), *sent):
            transfer.cancel()
        raise CollectiveFailed(f"{tag.kind} all-reduce, attempt {tag.attempt}")
    for worker, chunk in zip(members, chunks, strict=True):
        chunk.copy_(results[worker])


def mean_of(values: Sequence[Tensor]) -> Tensor:
    """The mean of equal-shaped tensors, in a tensor of its own.

    Taken as the first plus the mean difference to it: equal inputs give exactly that value, however
    many they are, and inputs that are close lose nothing.
    """
    first = values[0]
    if len(values) == 1:
        return first.clone()
    if first.is_meta:  # nothing to compute, and torch works out shapes at length
        return torch.empty_like(first)
    total = values[1] - first
    for other in values[2:]:
        total.add_(other - first)
    return total.div_(len(values)).add_(first)


def _segments(values: Tensor) -> list[Tensor]:
    """The segments of a flat vector, as views."""
    count = SEGMENTS if values.numel() >= SEGMENTS * SEGMENT_VALUES_MIN else 1
    return list(values.tensor_split(count))


def _bounds(views: Sequence[Tensor]) -> list[int]:
    """Where to cut the concatenation of `views` to have them again."""
    return list(itertools.accumulate(view.numel() for view in views))[:-1]


async def _vote(ctx: Context, tag: Tag, workers: Sequence[int], yes: bool, late: set[int]) -> bool:
    """Whether all of `workers` say yes and are heard saying it.

    Raises `OutOfSync` where one of them has gone on: it had heard all votes of an earlier attempt,
    and this worker had not.
    """
    ballot = torch.tensor([yes], dtype=torch.uint8)
    peers = [w for w in workers if w != ctx.worker]
    for peer in peers:
        ctx.send(peer, tag, ballot, exact=True)
    heard = await _receive_all(ctx, tag, peers, late=late, together=True)
    return yes and len(heard) == len(peers) and all(bool(vote.item()) for vote in heard.values())


async def average_pair(
    ctx: Context, round_: Round, kind: str, values: Tensor, partner: int | None
) -> bool:
    """Average `values` with `partner`'s in place; on any failure both keep their own.

    One full-duplex exchange. Commits only where the peer's payload has arrived here and ours was
    accepted there. Returns whether the values were mixed; True where there is no partner.
    """
    if partner is None:
        return True
    check_finite(ctx, values, f"{kind} vector")
    tag = round_.tag(kind)
    transfer = ctx.send(partner, tag, values)
    try:
        theirs = await ctx.recv(partner, tag)
        await transfer.delivered()
    except CommError:
        transfer.cancel()
        ctx.record("failed_exchanges", 1.0)
        return False
    torch.add(values, theirs, out=values).div_(2)
    return True


async def average_survivors(
    ctx: Context,
    round_: Round,
    kind: str,
    values: Tensor,
    *,
    group: Sequence[int] | None = None,
    exact: bool = False,
) -> tuple[int, ...]:
    """Average `values` in place over those of `group` whose links hold; the others keep their own.

    Args:
        values: flat, contiguous; same length on all workers of the group.
        group: sorted workers, by default the round's members.
        exact: charge the payload's own bytes (see `Context.send`).

    Returns:
        The survivors as this worker knows them; (worker,) alone where its own links failed.
    """
    check_finite(ctx, values, f"{kind} vector")
    workers = tuple(group if group is not None else round_.members.workers)
    for index, segment in enumerate(_segments(values)):
        tag = round_.tag(kind)._replace(phase=index * _PHASES_PER_SEGMENT)
        workers = await _average_level(ctx, tag, workers, segment, exact)
    return workers


async def _average_level(
    ctx: Context, tag: Tag, workers: tuple[int, ...], values: Tensor, exact: bool
) -> tuple[int, ...]:
    """One pass over `workers`; chunks whose owner fell out are averaged again by the rest.

    The second pass costs no more than what the first saved by leaving a worker out.
    """
    if len(workers) == 1 or ctx.worker not in workers:
        return (ctx.worker,)
    chunks = list(values.tensor_split(len(workers)))
    contributions, transfers = await _exchange_contributions(ctx, tag, workers, chunks, exact)
    report_tag = tag._replace(phase=tag.phase + 1)
    survivors = await _agree_on_survivors(ctx, report_tag, workers, contributions)
    for peer, transfer in transfers.items():
        if peer not in survivors or ctx.worker not in survivors:
            transfer.cancel()  # `values` is about to be written to, here or by the caller
    if ctx.worker not in survivors or len(survivors) == 1:
        ctx.record("left_out", 1.0)
        return (ctx.worker,)
    part = _group_digest(survivors)
    results_tag = tag._replace(phase=tag.phase + 2, part=part)
    owned = dict(zip(workers, chunks, strict=True))
    await _share_results(
        ctx, results_tag, survivors, chunks=owned, contributions=contributions, exact=exact
    )
    orphans = [chunks[rank] for rank, worker in enumerate(workers) if worker not in survivors]
    if orphans:
        pending = torch.cat(orphans)
        next_tag = tag._replace(phase=tag.phase + 3, part=part)
        await _average_level(ctx, next_tag, survivors, pending, exact)
        for chunk, mixed in zip(orphans, pending.tensor_split(_bounds(orphans)), strict=True):
            chunk.copy_(mixed)
    return survivors


async def _exchange_contributions(
    ctx: Context,
    tag: Tag,
    workers: tuple[int, ...],
    chunks: list[Tensor],
    exact: bool,
    *,
    late: set[int] | None = None,
) -> tuple[dict[int, Tensor], dict[int, Transfer]]:
    """Send every owner its chunk of mine; what arrived of my chunk, by sender, mine included."""
    rank = workers.index(ctx.worker)
    transfers: dict[int, Transfer] = {}
    for distance in range(1, len(workers)):
        owner = (rank + distance) % len(workers)
        transfers[workers[owner]] = ctx.send(workers[owner], tag, chunks[owner], exact=exact)
    received = await _receive_all(ctx, tag, list(transfers), transfers, late=late)
    return {ctx.worker: chunks[rank], **received}, transfers


async def _receive_all(
    ctx: Context,
    tag: Tag,
    peers: Sequence[int],
    transfers: Mapping[int, Transfer] | None = None,
    *,
    late: set[int] | None = None,
    together: bool = False,
) -> dict[int, Tensor]:
    """What comes from `peers`; those whose message is lost or late are left out.

    All share one deadline, which is not spent once for each late peer.

    Args:
        transfers: my own to these peers, given up where nothing comes in return.
        late: peers that have let a deadline pass before; added to.
        together: raise `OutOfSync` where a peer has gone on without this worker, in place of
            leaving it out.
    """
    received: dict[int, Tensor] = {}
    late = set() if late is None else late
    until = ctx.now() + ctx.deadline
    for peer in peers:
        left = 0.0 if peer in late else until - ctx.now()
        timeout = max(left, ctx.deadline * _LAST_LOOK)
        try:
            received[peer] = await ctx.recv(peer, tag, timeout=timeout)
        except CommError as error:
            if together and isinstance(error, OutOfSync):
                raise
            if isinstance(error, TimedOut):
                late.add(peer)
            if transfers is not None:
                transfers[peer].cancel()
    return received


async def _agree_on_survivors(
    ctx: Context, tag: Tag, workers: tuple[int, ...], contributions: dict[int, Tensor]
) -> tuple[int, ...]:
    """Those whom everybody heard: each reports whose contribution came; all have to agree."""
    mine = torch.tensor([worker in contributions for worker in workers], dtype=torch.uint8)
    peers = [worker for worker in workers if worker != ctx.worker]
    for peer in peers:
        ctx.send(peer, tag, mine, exact=True)
    reports = {ctx.worker: mine, **await _receive_all(ctx, tag, peers)}
    agreed = torch.stack(list(reports.values())).amin(dim=0).tolist()
    return tuple(w for w, heard in zip(workers, agreed, strict=True) if heard and w in reports)


async def _share_results(
    ctx: Context,
    tag: Tag,
    survivors: tuple[int, ...],
    *,
    chunks: dict[int, Tensor],
    contributions: dict[int, Tensor],
    exact: bool,
) -> None:
    """Average my chunk, hand it to the survivors, and take theirs into `chunks` (by owner)."""
    peers = [worker for worker in survivors if worker != ctx.worker]
    mean = mean_of([contributions[worker] for worker in survivors])
    async with ctx.task_group() as tasks:
        for peer in peers:
            tasks.start(send_until_delivered(ctx, peer, tag, mean, exact))
        for peer in peers:
            result = await recv_until_delivered(ctx, peer, tag)
            if result is not None:
                chunks[peer].copy_(result)
    chunks[ctx.worker].copy_(mean)


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


def _group_digest(workers: tuple[int, ...]) -> int:
    """A number that differs between groups, so that views that differ can never mix."""
    text = ",".join(map(str, workers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
