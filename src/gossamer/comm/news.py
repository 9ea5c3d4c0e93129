"""How fast each worker is, and who can be reached, as workers pass it on from peer to peer.

Every worker keeps one row for each: the newest round that it has heard of, and what that worker
measured then. It hands all rows to those that it mixes with. So a number spreads as fast as gossip
does, nobody collects anything, and rows that grow old tell of a worker that is cut off.

From the rows follow the local steps of a worker, so that none waits long for a slow one, and how
often a worker with a slow link mixes at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.comm.context import Context, Round
from gossamer.comm.neighbours import swap
from gossamer.errors import CommError

NOTHING = -1.0  # the round of a row that nothing is known for
LENGTHENING = 0.25  # of rounds, on average, by all that a worker with a slow link costs the others
_ROUNDING = 1e-6  # of an inner step: a ratio of measured times may lie just below a whole number


class Row(NamedTuple):
    """What is known of one worker.

    Args:
        round_index: in which it measured this; `NOTHING` where nothing is known.
        step_s: seconds of an inner step, averaged over its last rounds.
        exchange_s: seconds in which its link exchanges vectors; 0 where not known.
        next_mix: the first round in which it mixes again.
    """

    round_index: float
    step_s: float
    exchange_s: float = 0.0
    next_mix: float = 0.0


_WIDTH = len(Row._fields)


class News:
    """The rows of all workers, over a list of plain numbers that a method's state holds.

    Args:
        numbers: four for each worker; empty at first.
        num_workers: M.
    """

    def __init__(self, numbers: list[float], num_workers: int) -> None:
        if not numbers:
            numbers += [*Row(NOTHING, 0.0)] * num_workers
        self._numbers = numbers

    def row(self, worker: int) -> Row:
        """What is known of a worker."""
        return Row(*self._numbers[_WIDTH * worker : _WIDTH * (worker + 1)])

    def note(self, worker: int, row: Row) -> None:
        """Replace what is known of a worker."""
        self._numbers[_WIDTH * worker : _WIDTH * (worker + 1)] = row

    def known(self, members: Iterable[int], since: float) -> dict[int, Row]:
        """The rows of `members` that are of round `since` or later."""
        oldest = max(since, 0.0)
        return {w: self.row(w) for w in members if self._numbers[_WIDTH * w] >= oldest}

    def num_reached(self, members: Sequence[int], round_index: int) -> int:
        """How many members something was heard of in the last M rounds, of M members.

        That is longer than news takes on any graph that is connected over time, so fewer than all
        means that some are cut off (or have just come).
        """
        oldest = round_index - len(members)
        return sum(self._numbers[_WIDTH * worker] >= oldest for worker in members)

    def send(self, ctx: Context, round_: Round, kind: str, peers: Sequence[int]) -> None:
        """Send all rows to `peers`: 32 M bytes to each, whatever the model's size."""
        mine = self._payload()
        for peer in peers:
            ctx.send(peer, round_.tag(kind), mine, exact=True)

    async def take(self, ctx: Context, round_: Round, kind: str, peers: Sequence[int]) -> None:
        """Take over what `peers` know better; what is lost is made up for in later rounds."""
        for peer in peers:
            try:
                self._merge(await ctx.recv(peer, round_.tag(kind)))
            except CommError:
                continue

    async def swap(self, ctx: Context, round_: Round, kind: str, peer: int) -> bool:
        """Exchange rows with a peer; whether it is there, and both ends know it."""
        theirs = await swap(ctx, round_.tag(kind), self._payload(), peer, exact=True)
        if theirs is None:
            return False
        self._merge(theirs)
        return True

    def note_exchange(self, worker: int, peer: int, seconds: float) -> None:
        """Worker and peer have exchanged their vectors in so many seconds.

        Both links can do that, so a larger number than this is replaced. A smaller one is raised
        half-way where the peer's link is known to be faster: then it was this worker's.
        """
        mine, theirs = self.row(worker), self.row(peer)
        if mine.exchange_s == 0 or seconds < mine.exchange_s:
            self.note(worker, mine._replace(exchange_s=seconds))
        elif 0 < theirs.exchange_s < seconds:
            self.note(worker, mine._replace(exchange_s=(mine.exchange_s + seconds) / 2))

    def _payload(self) -> Tensor:
        return torch.tensor(self._numbers, dtype=torch.float64)

    def _merge(self, theirs: Tensor) -> None:
        """Take over the rows that are newer."""
        numbers = theirs.tolist()
        for k in range(0, len(numbers), _WIDTH):
            if numbers[k] > self._numbers[k]:
                self._numbers[k : k + _WIDTH] = numbers[k : k + _WIDTH]


def steps_by_speed(most: int, worker: int, rows: Mapping[int, Row]) -> int:
    """H_i = max(1, floor(H * speed_i / max_j speed_j)): all train for about the same time.

    Args:
        most: H, which the fastest does.
        rows: of all workers that count; where one's own is missing it is H.
    """
    if worker not in rows:
        return most
    fastest = min(row.step_s for row in rows.values())
    return _whole(most * fastest / rows[worker].step_s, most)


def steps_by_time(
    most: int, worker: int, rows: Mapping[int, Row], peers: Iterable[int], round_index: int
) -> int:
    """So many steps that this worker and its peers end their exchange with everybody else.

    Who meets peers whose links (or its own) need c trains for T - c, where T is `round_aim`: H_i =
    floor((T - c) / s_i), at least 1 and at most H. Those who do not mix in this round do not count.
    With equal links this is `steps_by_speed`.
    """
    if worker not in rows:
        return most
    meeting = [rows[w] for w in (worker, *peers) if w in rows]
    rests = any(row.next_mix > round_index for row in meeting[:1])
    links = [row.exchange_s for row in meeting if row.next_mix <= round_index]
    link = 0.0 if rests else max(links)
    return _whole((round_aim(most, rows) - link) / rows[worker].step_s, most)


def rounds_to_rest(most: int, worker: int, rows: Mapping[int, Row], peers: Iterable[int]) -> int:
    """For how many rounds a worker does not mix after one in which it has.

    One whose exchange does not fit into T = `round_aim`, beside a single step, holds up its peer by
    the rest, and soon all others. With pauses this lengthens rounds by `LENGTHENING` at most.

    Args:
        peers: with whom it has mixed; only if one of them is known to have a faster link is its
            own the slow one.
    """
    if worker not in rows or not any(
        0 < rows[peer].exchange_s < rows[worker].exchange_s for peer in peers if peer in rows
    ):
        return 0
    aim = round_aim(most, rows)
    too_long = rows[worker].step_s + rows[worker].exchange_s - aim
    return max(0, math.ceil(too_long / (LENGTHENING * aim)) - 1)


def round_aim(most: int, rows: Mapping[int, Row]) -> float:
    """T, the seconds that a round should take: the least of H s_j + c_j over all workers j.

    s_j are its seconds per step and c_j those of an exchange over its link. Of workers whose c_j is
    not known yet nothing can be said, unless it is known of none.
    """
    measured = [row for row in rows.values() if row.exchange_s > 0] or list(rows.values())
    return min(most * row.step_s + row.exchange_s for row in measured)


def _whole(steps: float, most: int) -> int:
    return min(most, max(1, math.floor(steps + _ROUNDING)))
