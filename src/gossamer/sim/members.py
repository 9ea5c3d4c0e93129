"""Who takes part in which round, as the simulated coordinator knows it.

A change holds from a later round on: what a started round has been told stays as it was, so that
all workers of a round see the same members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gossamer.comm.context import Membership


class MemberLog:
    """Membership by round. Rounds are fixed when the first worker starts them."""

    def __init__(self, workers: tuple[int, ...]) -> None:
        self._versions: list[tuple[int, Membership]] = [(0, Membership(0, workers))]
        self.newest_started = -1
        self._gone: set[int] = set()  # membership tests only, never iterated
        self._since: dict[int, int] = {}  # first round of a worker that came back

    def of_round(self, round_index: int) -> Membership:
        """The members of a round, as it was or will be started."""
        for start, membership in reversed(self._versions):
            if start <= round_index:
                return membership
        raise AssertionError("the first version starts at round 0")

    def start(self, round_index: int) -> None:
        """A worker starts this round."""
        self.newest_started = max(self.newest_started, round_index)

    def planned(self, round_index: int) -> Membership:
        """The members of a round as all workers were told at its start."""
        membership = self.of_round(round_index)
        return Membership(membership.epoch << 16, membership.workers)

    def present(self, round_index: int) -> Membership:
        """The members of a round that are still there; the epoch counts those that left."""
        planned = self.of_round(round_index)
        workers = tuple(w for w in planned.workers if self.takes_part(w, round_index))
        epoch = (planned.epoch << 16) + len(planned.workers) - len(workers)
        return Membership(epoch, workers)

    def remove(self, worker: int) -> None:
        """A worker is gone; rounds that have not started are without it."""
        self._gone.add(worker)
        self._change(lambda workers: [w for w in workers if w != worker], self.newest_started + 1)

    def add(self, worker: int) -> int:
        """A worker returns; the first round that it takes part in."""
        activation = self.newest_started + 1
        self._gone.discard(worker)
        self._since[worker] = activation
        self._change(lambda workers: sorted({*workers, worker}), activation)
        return activation

    def _change(self, change: Callable[[tuple[int, ...]], Iterable[int]], start: int) -> None:
        later = [v for v in self._versions if v[0] > start]
        base = self.of_round(start)
        epoch = max(m.epoch for _, m in self._versions) + 1
        kept = [v for v in self._versions if v[0] < start]
        changed = [(start, Membership(epoch, tuple(change(base.workers))))]
        for begin, membership in later:
            epoch += 1
            changed.append((begin, Membership(epoch, tuple(change(membership.workers)))))
        self._versions = kept + changed

    def is_gone(self, worker: int) -> bool:
        """Whether a worker is away, or was given up."""
        return worker in self._gone

    def takes_part(self, worker: int, round_index: int) -> bool:
        """Whether a member of a round, as planned, is still in it (not gone, nor come back later)."""
        return worker not in self._gone and self._since.get(worker, 0) <= round_index

    def dump(self) -> dict[str, object]:
        """As JSON."""
        return {
            "versions": [[s, m.epoch, list(m.workers)] for s, m in self._versions],
            "newest_started": self.newest_started,
            "gone": sorted(self._gone),
            "since": sorted(self._since.items()),
        }

    @classmethod
    def load(cls, saved: dict[str, object]) -> MemberLog:
        log = cls(())
        versions = saved["versions"]
        assert isinstance(versions, list)
        log._versions = [(s, Membership(e, tuple(w))) for s, e, w in versions]
        newest, gone, since = saved["newest_started"], saved["gone"], saved["since"]
        assert isinstance(newest, int) and isinstance(gone, list) and isinstance(since, list)
        log.newest_started, log._gone, log._since = newest, set(gone), dict(since)
        return log
