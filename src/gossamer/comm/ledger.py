"""Every payload byte that was sent, by round, kind, sender and receiver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    """What one sender sent to one receiver for one purpose in one round."""

    round_index: int
    kind: str
    sender: int
    receiver: int
    num_bytes: int
    num_messages: int


@dataclass
class Ledger:
    """Counts bytes when a transfer starts, failed and repeated ones included.

    `control` bytes (votes, reports) are counted under the kind of the collective they serve.
    """

    _cells: dict[tuple[int, str, int, int], list[int]] = field(default_factory=dict)

    def add(self, round_index: int, kind: str, sender: int, receiver: int, num_bytes: int) -> None:
        """Count one message."""
        key = (round_index, kind, sender, receiver)
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = [num_bytes, 1]
        else:
            cell[0] += num_bytes
            cell[1] += 1

    def load(self, entries: Iterable[Entry]) -> None:
        """Take over entries, of a checkpoint for example."""
        for entry in entries:
            key = (entry.round_index, entry.kind, entry.sender, entry.receiver)
            cell = self._cells.setdefault(key, [0, 0])
            cell[0] += entry.num_bytes
            cell[1] += entry.num_messages

    def entries(self) -> list[Entry]:
        """All cells, sorted."""
        return [Entry(*key, *cell) for key, cell in sorted(self._cells.items())]

    def of_sender(self, sender: int) -> list[Entry]:
        """What one worker has sent."""
        return [entry for entry in self.entries() if entry.sender == sender]

    def total(
        self,
        *,
        round_index: int | None = None,
        kind: str | None = None,
        sender: int | None = None,
        receiver: int | None = None,
    ) -> int:
        """Bytes of all entries that match what is given."""
        return sum(
            cell[0]
            for key, cell in self._cells.items()
            if (round_index is None or key[0] == round_index)
            and (kind is None or key[1] == kind)
            and (sender is None or key[2] == sender)
            and (receiver is None or key[3] == receiver)
        )

    def by_kind(self) -> dict[str, int]:
        """Bytes by kind, sorted by name."""
        totals: dict[str, int] = {}
        for key, cell in self._cells.items():
            totals[key[1]] = totals.get(key[1], 0) + cell[0]
        return dict(sorted(totals.items()))
