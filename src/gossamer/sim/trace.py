"""What happened, as one hash and as the last lines before a failure.

Each worker has its own chain of events, in its own order, so that a run which is resumed from
snapshots taken at different instants continues every chain where it stood.
"""

from __future__ import annotations

import hashlib
from collections import deque

_LINES_KEPT = 40


class Trace:
    """Events of all workers.

    Args:
        num_workers: chains to keep.
        header: what identifies the run (its settings and seed); part of the hash.
    """

    def __init__(self, num_workers: int, header: str) -> None:
        self._header = header
        self._chains = [b""] * num_workers
        self._recent: deque[tuple[int, int, str]] = deque(maxlen=_LINES_KEPT)

    def add(self, now_ns: int, worker: int, event: str) -> None:
        """Append one event of a worker."""
        line = f"{now_ns} {event}"
        self._chains[worker] = hashlib.blake2b(
            self._chains[worker] + line.encode(), digest_size=16
        ).digest()
        self._recent.append((now_ns, worker, event))

    def chain(self, worker: int) -> str:
        """A worker's chain so far, as hex."""
        return self._chains[worker].hex()

    def restore(self, worker: int, chain: str) -> None:
        """Go on from a saved chain."""
        self._chains[worker] = bytes.fromhex(chain)

    def hash(self) -> str:
        """Of everything: 64 hex digits."""
        digest = hashlib.sha256(self._header.encode())
        for chain in self._chains:
            digest.update(len(chain).to_bytes(1, "big") + chain)
        return digest.hexdigest()

    def tail(self) -> str:
        """The latest events in fixed columns, oldest first."""
        return "\n".join(f"{ns / 1e9:>14.6f}s  worker {w:<3d} {e}" for ns, w, e in self._recent)
