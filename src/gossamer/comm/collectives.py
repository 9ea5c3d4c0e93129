"""Collectives over `send` and `recv`, with one fixed order of reduction.

Two averages over a group, which give the same bits when nothing fails:

- `all_reduce_mean` is all or nothing: a broken link is noticed when the attempt ends, by a vote,
  and then nobody uses the result. That is what an all-reduce library gives.
- `average_survivors` leaves out those whose links failed, who keep their own values: the matrix
  stays symmetric and doubly stochastic, and the mean is conserved.

Both cut the values into one chunk per worker, which its owner gathers, averages and hands back:
2 (M-1)/M of the values sent per worker, as a ring would, in two latencies instead of 2 (M-1).
Long vectors go in segments, one behind the other: while a segment is averaged and handed back, the
next ones are on their way, so that the links never rest and little memory is needed.

With a codec (`comm.coding`) a worker encodes what it sends to an owner, and the owner the mean; all
take what that decodes to, the owner as well, so that all hold the same bits.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.comm.coding import AS_IS, Coding, Shown, Written, joined
from gossamer.comm.context import Context, Round, Tag, Transfer
from gossamer.comm.delivery import recv_until_delivered, send_until_delivered
from gossamer.errors import (
    CollectiveFailed,
    CommError,
    EncodingError,
    NonFiniteError,
    OutOfSync,
    PayloadCorrupt,
    TimedOut,
)

ATTEMPTS_MAX = 1000  # of one all-reduce; far beyond any link that is worth using
SEGMENTS_MAX = 8  # a link that fails is noticed after the first, and the rest does without it
SEGMENT_MESSAGES_MAX = 64  # segments times workers: each worker sends so many pieces, twice
SEGMENT_VALUES_MIN = 1024  # no segment is shorter
_AHEAD = 2  # segments that are under way before the present one, and behind it
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


def shown(ctx: Context, values: Tensor, coding: Coding, what: str) -> Shown:
    """What a worker shows of `values` when it mixes them; see `comm.coding`.

    Raises `NonFiniteError` where they are not finite, or more than the codec can hold.
    """
    check_finite(ctx, values, what)
    try:
        return Shown(values, coding)
    except EncodingError as error:
        raise non_finite(ctx, f"{what} ({error})") from error


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite; on tensors without storage, yes."""
    if values.is_meta or values.numel() == 0 or not values.is_floating_point():
        return True
    # The sum is finite unless a value is not, or the sum overflows: only then look at each.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


async def all_reduce_until_complete(
    ctx: Context,
    round_: Round,
    kind: str,
    values: Tensor,
    *,
    step: int = 0,
    coding: Coding = AS_IS,
) -> Round:
    """Average `values` over the members in place, repeating the whole all-reduce until it holds.

    Args:
        round_: the round; its members take part.
        kind: what the bytes are for, in the ledger.
        values: contiguous, same shape on all members; overwritten with the mean.
        step: position in the round, where a round has several.
        coding: how they are sent.

    Returns:
        The round with the members of the attempt that succeeded (workers that are gone left out).

    Raises:
        NonFiniteError: this worker's own values are not finite, and nothing was sent; or they are
            more than the codec can hold.
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
            await all_reduce_mean(ctx, tag, round_.members.workers, values, coding)
        except CollectiveFailed:
            ctx.record("retries", 1.0)
            epoch, round_ = round_.members.epoch, ctx.refresh_members(round_)
            # Counted anew with other members: some may have begun with them, and all shall meet.
            attempt = attempt + 1 if round_.members.epoch == epoch else 0
        else:
            return round_
    raise CollectiveFailed(f"{kind} all-reduce of round {round_.index}: {ATTEMPTS_MAX} attempts")


async def all_reduce_mean(
    ctx: Context, tag: Tag, workers: Sequence[int], values: Tensor, coding: Coding = AS_IS
) -> None:
    """All-reduce: `values` becomes the mean over `workers`, or `CollectiveFailed`.

    In place; after a failure `values` is unchanged. It runs to its end even where a link has
    failed, as the others cannot know, and a vote then tells everybody. A peer that let the deadline
    pass is not waited for again: the attempt takes one deadline at most, and what arrives.
    """
    members = tuple(workers)
    if len(members) == 1:
        return
    late: set[int] = set()  # membership tests only
    peers = [worker for worker in members if worker != ctx.worker]
    results_tag = tag._replace(phase=1)
    pipeline = _Pipeline(ctx, tag, members, coding.of(values), exact=False)
    means: list[_Mean] = []
    transfers: list[Transfer] = []
    intact = True
    for index in range(len(pipeline)):
        flight = pipeline.advance(index, members)
        received = await _receive_contributions(ctx, flight, members, late=late)
        intact &= len(received) == len(members)
        means.append(_mean_of_chunk(ctx, flight, received))
        part = results_tag._replace(segment=index)
        transfers += [ctx.send(peer, part, means[index].payload) for peer in peers]
    results: list[dict[int, Tensor]] = []
    for index, flight in enumerate(pipeline.flights):
        part = results_tag._replace(segment=index)
        results.append(await _receive_all(ctx, part, peers, late=late, chunks=flight.chunks))
        intact &= len(results[index]) == len(peers)
    if not await _vote(ctx, tag._replace(phase=2), members, intact, late):
        for flight in pipeline.flights:
            flight.give_up(peers)
        for transfer in transfers:
            transfer.cancel()
        raise CollectiveFailed(f"{tag.kind} all-reduce, attempt {tag.attempt}")
    for flight, mean, result in zip(pipeline.flights, means, results, strict=True):
        flight.chunks[ctx.worker].adopt_own(mean.exact, mean.decoded, len(members))
        for peer in peers:
            flight.chunks[peer].adopt(result[peer], flight.payloads[peer])


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


def _segments(vector: Written, num_workers: int) -> list[Written]:
    """The segments of a flat vector, as views."""
    most = vector.values.numel() // SEGMENT_VALUES_MIN
    return vector.split(max(1, min(SEGMENTS_MAX, SEGMENT_MESSAGES_MAX // num_workers, most)))


@dataclass(frozen=True, slots=True)
class _Flight:
    """One segment's contributions, which have left: who takes part, and whose chunk is which."""

    tag: Tag
    workers: tuple[int, ...]
    chunks: dict[int, Written]  # views of the values, by owner
    payloads: dict[int, Tensor]  # mine, by owner
    transfers: dict[int, Transfer]  # mine, by owner

    def onto(self, segment: Tensor) -> _Flight:
        """The same, to be averaged in `segment`, which takes the values."""
        places = segment.tensor_split(len(self.workers))
        return replace(self, chunks={
            worker: chunk.onto(place)
            for (worker, chunk), place in zip(self.chunks.items(), places, strict=True)
        })  # fmt: skip

    def give_up(self, peers: Sequence[int]) -> None:
        """What these have not taken they need not take: its memory is about to be written to."""
        for peer in peers:
            if peer in self.transfers:
                self.transfers[peer].cancel()


class _Pipeline:
    """The segments of one average, whose contributions leave before they are waited for."""

    def __init__(
        self, ctx: Context, tag: Tag, workers: tuple[int, ...], vector: Written, *, exact: bool
    ) -> None:
        self._ctx, self._tag, self._exact = ctx, tag, exact
        self.segments = _segments(vector, len(workers))
        self.flights: list[_Flight] = []

    def __len__(self) -> int:
        return len(self.segments)

    def cut_alike(self, other: Tensor) -> list[Tensor]:
        """The segments of a vector of the same length."""
        return list(other.tensor_split(len(self)))

    def advance(self, index: int, workers: tuple[int, ...]) -> _Flight:
        """The contributions of segment `index`; those up to `_AHEAD` behind it leave as well."""
        for ahead in range(len(self.flights), min(index + _AHEAD + 1, len(self))):
            tag = self._tag._replace(segment=ahead)
            segment = self.segments[ahead]
            self.flights.append(_send_contributions(self._ctx, tag, workers, segment, self._exact))
        return self.flights[index]


def _send_contributions(
    ctx: Context, tag: Tag, workers: tuple[int, ...], vector: Written, exact: bool
) -> _Flight:
    """Send every owner its chunk of mine.

    The tag names the group: workers whose views of it differ cut differently, and must not meet.
    """
    tag = tag._replace(part=_group_digest(workers))
    chunks = dict(zip(workers, vector.split(len(workers)), strict=True))
    rank = workers.index(ctx.worker)
    payloads: dict[int, Tensor] = {}
    transfers: dict[int, Transfer] = {}
    for distance in range(1, len(workers)):
        owner = workers[(rank + distance) % len(workers)]
        payloads[owner] = _encoded(ctx, tag.kind, chunks[owner], chunks[owner].source)
        transfers[owner] = ctx.send(owner, tag, payloads[owner], exact=exact)
    return _Flight(tag, workers, chunks, payloads, transfers)


def _encoded(ctx: Context, kind: str, chunk: Written, values: Tensor) -> Tensor:
    """The payload of a chunk's values. `NonFiniteError` where the codec has no number for one."""
    try:
        return chunk.encode(values)
    except EncodingError as error:
        raise non_finite(ctx, f"{kind} vector ({error})") from error


@dataclass(frozen=True, slots=True)
class _Mean:
    """The mean of my chunk: as computed, as sent, and as everybody takes it."""

    exact: Tensor
    payload: Tensor
    decoded: Tensor


def _mean_of_chunk(ctx: Context, flight: _Flight, contributions: Mapping[int, Tensor]) -> _Mean:
    """Of those contributions that there are, in the order of the workers."""
    chunk = flight.chunks[ctx.worker]
    mean = mean_of([contributions[w] for w in flight.workers if w in contributions])
    payload = _encoded(ctx, flight.tag.kind, chunk, mean)
    return _Mean(mean, payload, chunk.decode(payload))


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


async def average_survivors(
    ctx: Context,
    round_: Round,
    kind: str,
    values: Tensor,
    *,
    group: Sequence[int] | None = None,
    exact: bool = False,
    out: Tensor | None = None,
    coding: Coding = AS_IS,
) -> tuple[int, ...]:
    """Average `values` in place over those of `group` whose links hold; the others keep their own.

    Args:
        values: flat, contiguous; same length on all workers of the group.
        group: sorted workers, by default the round's members.
        exact: charge the payload's own bytes (see `Context.send`).
        out: like `values`; takes the average in their place, and they stay as they are.
        coding: how they are sent.

    Returns:
        The survivors as this worker knows them; (worker,) alone where its own links failed.
    """
    check_finite(ctx, values, f"{kind} vector")
    workers = tuple(group if group is not None else round_.members.workers)
    if len(workers) == 1 or ctx.worker not in workers:
        if out is not None:
            out.copy_(values)
        return (ctx.worker,)
    pipeline = _Pipeline(ctx, round_.tag(kind), workers, coding.of(values), exact=exact)
    own = [] if out is None else pipeline.cut_alike(out)
    async with ctx.task_group() as tasks:
        finishing: list[asyncio.Task[None]] = []
        for index in range(len(pipeline)):
            flight = pipeline.advance(index, workers)
            contributions, survivors = await _agree(ctx, flight, workers)
            fallen = [worker for worker in workers if worker not in survivors]
            for later in pipeline.flights[index + 1 :]:
                later.give_up(workers if len(survivors) == 1 else fallen)
            workers = survivors
            if len(workers) == 1:
                break
            if own:
                flight = flight.onto(own.pop(0))
            if len(finishing) >= _AHEAD:
                await finishing[-_AHEAD]
            finishing.append(tasks.start(_finish(ctx, flight, workers, contributions, exact)))
    for segment, left in zip(own[::-1], pipeline.segments[::-1], strict=False):
        segment.copy_(left.values)  # left out: they keep their own
    return workers


async def _agree(
    ctx: Context, flight: _Flight, allowed: tuple[int, ...]
) -> tuple[dict[int, Tensor], tuple[int, ...]]:
    """A segment's contributions, and those of `allowed` whose links held; me alone where mine did
    not.
    """
    contributions = await _receive_contributions(ctx, flight, allowed)
    report_tag = flight.tag._replace(phase=flight.tag.phase + 1)
    survivors = await _agree_on_survivors(ctx, report_tag, flight.workers, allowed, contributions)
    alone = ctx.worker not in survivors or len(survivors) == 1
    # the values are about to be written to, here or by the caller
    flight.give_up([w for w in flight.workers if alone or w not in survivors])
    if alone:
        ctx.record("left_out", 1.0)
        return contributions, (ctx.worker,)
    return contributions, survivors


async def _finish(
    ctx: Context,
    flight: _Flight,
    survivors: tuple[int, ...],
    contributions: dict[int, Tensor],
    exact: bool,
) -> None:
    """Average a segment over the survivors.

    Chunks whose owner fell out are averaged again by the rest. That costs no more than what was
    saved by leaving a worker out.
    """
    tag = flight.tag
    result_tag = tag._replace(phase=tag.phase + 2, part=_group_digest(survivors))
    heard = {worker: contributions[worker] for worker in survivors}
    await _share_results(ctx, result_tag, flight, heard, exact)
    orphans = [flight.chunks[worker] for worker in flight.workers if worker not in survivors]
    if orphans:
        pending = joined(orphans)
        next_tag = tag._replace(phase=tag.phase + 3)
        again = _send_contributions(ctx, next_tag, survivors, pending, exact)
        contributions, rest = await _agree(ctx, again, survivors)
        if len(rest) > 1:
            await _finish(ctx, again, rest, contributions, exact)
        pending.write_to(orphans)


async def _receive_contributions(
    ctx: Context, flight: _Flight, allowed: tuple[int, ...], *, late: set[int] | None = None
) -> dict[int, Tensor]:
    """What arrived of my chunk from those of `allowed`, by sender, mine included."""
    peers = [w for w in flight.transfers if w in allowed]
    mine = flight.chunks[ctx.worker]
    chunks = dict.fromkeys(peers, mine)
    received = await _receive_all(
        ctx, flight.tag, peers, flight.transfers, late=late, chunks=chunks
    )
    return {ctx.worker: mine.source, **received}


async def _receive_all(
    ctx: Context,
    tag: Tag,
    peers: Sequence[int],
    transfers: Mapping[int, Transfer] | None = None,
    *,
    late: set[int] | None = None,
    chunks: Mapping[int, Written] | None = None,
    together: bool = False,
) -> dict[int, Tensor]:
    """What comes from `peers`; those whose message is lost or late are left out.

    All share one deadline, which is not spent once for each late peer.

    Args:
        transfers: my own to these peers, given up where nothing comes in return.
        late: peers that have let a deadline pass before; added to.
        chunks: what each one's payload is written as; left out: as it is.
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
            payload = await ctx.recv(peer, tag, timeout=timeout)
            received[peer] = payload if chunks is None else chunks[peer].decode(payload)
        except CommError as error:
            if together and isinstance(error, OutOfSync):
                raise
            if isinstance(error, TimedOut):
                late.add(peer)
            if transfers is not None:
                transfers[peer].cancel()
    return received


async def _agree_on_survivors(
    ctx: Context,
    tag: Tag,
    workers: tuple[int, ...],
    allowed: tuple[int, ...],
    contributions: dict[int, Tensor],
) -> tuple[int, ...]:
    """Those whom everybody heard: each reports whose contribution came; all have to agree."""
    mine = torch.tensor([worker in contributions for worker in workers], dtype=torch.uint8)
    peers = [worker for worker in workers if worker != ctx.worker and worker in allowed]
    for peer in peers:
        ctx.send(peer, tag, mine, exact=True)
    reports = {ctx.worker: mine, **await _receive_all(ctx, tag, peers)}
    agreed = torch.stack(list(reports.values())).amin(dim=0).tolist()
    return tuple(w for w, heard in zip(workers, agreed, strict=True) if heard and w in reports)


async def _share_results(
    ctx: Context, tag: Tag, flight: _Flight, contributions: Mapping[int, Tensor], exact: bool
) -> None:
    """Average my chunk over those that contributed, hand it to them, and take theirs."""
    peers = [worker for worker in contributions if worker != ctx.worker]
    mean = _mean_of_chunk(ctx, flight, contributions)
    async with ctx.task_group() as tasks:
        for peer in peers:
            tasks.start(send_until_delivered(ctx, peer, tag, mean.payload, exact))
        for peer in peers:
            result = await recv_until_delivered(ctx, peer, tag)
            if result is None:
                continue
            try:
                decoded = flight.chunks[peer].decode(result)
            except PayloadCorrupt:
                ctx.record("results_lost", 1.0)
            else:
                flight.chunks[peer].adopt(decoded, flight.payloads[peer])
    flight.chunks[ctx.worker].adopt_own(mean.exact, mean.decoded, len(contributions))


def _group_digest(workers: tuple[int, ...]) -> int:
    """A number that differs between groups, so that views that differ can never mix."""
    text = ",".join(map(str, workers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
