"""How fast each worker is, and who can be reached, as workers pass it on from peer to peer.

Every worker keeps one row for each: the newest round that it has heard of, and what that worker
measured then. It hands all rows to those that it mixes with. So a number spreads as fast as gossip
does, nobody collects anything, and rows that grow old tell of a worker that is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from gossamer.comm.context import Context, Round
from gossamer.errors import CommError

NOTHING = -1.0  # the round of a row that nothing is known for
_ROUNDING = 1e-6  # of an inner step: a ratio of measured times may lie just below a whole number


class Row(NamedTuple):
    """What is known of one worker.

    Args:
        round_index: in which it measured this; `NOTHING` where nothing is known.
        step_s: seconds of an inner step, averaged over its last rounds.
        exchange_s: seconds that its link needs at least to hand a peer its vector.
    """

    round_index: float
    step_s: float
    exchange_s: float


class News:
    """The rows of all workers, over a list of plain numbers that a method's state holds.

    Args:
        numbers: three for each worker; empty at first.
        num_workers: M.
    """

    def __init__(self, numbers: list[float], num_workers: int) -> None:
        if not numbers:
            numbers += [NOTHING, 0.0, 0.0] * num_workers
        self._numbers = numbers

    def row(self, worker: int) -> Row:
        """What is known of a worker."""
        return Row(*self._numbers[3 * worker : 3 * worker + 3])

    def note(self, worker: int, row: Row) -> None:
        """Take a row over where it is newer."""
        if row.round_index > self.row(worker).round_index:
            self._numbers[3 * worker : 3 * worker + 3] = row

    def known(self, members: Iterable[int], since: float) -> dict[int, Row]:
        """The rows of `members` that are of round `since` or later."""
        oldest = max(since, 0.0)
        return {w: self.row(w) for w in members if self._numbers[3 * w] >= oldest}

    def num_reached(self, members: Sequence[int], round_index: int) -> int:
        """How many members something was heard of in the last M rounds, of M members.

        That is longer than news takes on any graph that is connected over time, so fewer than all
        means that some are cut off (or have just come).
        """
        oldest = round_index - len(members)
        return sum(self._numbers[3 * worker] >= oldest for worker in members)

    def send(self, ctx: Context, round_: Round, kind: str, peers: Sequence[int]) -> None:
        """Send all rows to `peers`: 24 M bytes to each, whatever the model's size."""
        mine = torch.tensor(self._numbers, dtype=torch.float64)
        for peer in peers:
            ctx.send(peer, round_.tag(kind), mine, exact=True)

    async def take(self, ctx: Context, round_: Round, kind: str, peers: Sequence[int]) -> None:
        """Take over what `peers` know better; what is lost is made up for in later rounds."""
        for peer in peers:
            try:
                numbers = (await ctx.recv(peer, round_.tag(kind))).tolist()
            except CommError:
                continue
            for k in range(0, len(numbers), 3):
                if numbers[k] > self._numbers[k]:
                    self._numbers[k : k + 3] = numbers[k : k + 3]


def steps_by_speed(most: int, worker: int, rows: dict[int, Row]) -> int:
    """H_i = max(1, floor(H * speed_i / max_j speed_j)): all train for about the same time.

    Args:
        most: H, which the fastest does.
        rows: of all workers that count; where one's own is missing it is H.
    """
    if worker not in rows:
        return most
    fastest = min(row.step_s for row in rows.values())
    return _whole(most * fastest / rows[worker].step_s, most)


def steps_by_time(most: int, worker: int, rows: dict[int, Row], peers: Iterable[int]) -> int:
    """So many steps that this worker and its peers end their exchange with everybody else.

    A round of worker j alone takes H s_j + c_j, with s_j its seconds per step and c_j those of an
    exchange over its link; the shortest of these is everybody's aim T. Who meets peers whose links
    (or its own) need c trains for T - c: H_i = floor((T - c) / s_i), at least 1 and at most H. With
    equal links this is `steps_by_speed`.
    """
    if worker not in rows:
        return most
    aim = min(most * row.step_s + row.exchange_s for row in rows.values())
    link = max(rows[other].exchange_s for other in (worker, *peers) if other in rows)
    return _whole((aim - link) / rows[worker].step_s, most)


def _whole(steps: float, most: int) -> int:
    return min(most, max(1, math.floor(steps + _ROUNDING)))
