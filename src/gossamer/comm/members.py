"""Who takes part in which round, as the coordinator of a world knows it.

A change holds from a later round on: what a started round has been told stays as it was, so that
all workers of a round see the same members. Where the news that a round has started takes a while
to arrive, changes leave one more round alone (`lead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gossamer.comm.context import Membership

EPOCH_BITS = 16  # below an epoch, for the number of members that have left a round


class MemberLog:
    """Membership by round. Rounds are fixed when the first worker starts them.

    Args:
        workers: members from round 0 on.
        lead: how many rounds after the newest one that is known to have started a change holds.
    """

    def __init__(self, workers: tuple[int, ...], *, lead: int = 1) -> None:
        self._versions: list[tuple[int, Membership]] = [(0, Membership(0, workers))]
        self.lead = lead
        self.newest_started = -1
        self._gone: set[int] = set()  # membership tests only, never iterated
        self._since: dict[int, int] = {}  # first round of a worker that came back

    @property
    def next_change(self) -> int:
        """The first round that a change made now would hold for."""
        return self.newest_started + self.lead

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
        return Membership(membership.epoch << EPOCH_BITS, membership.workers)

    def present(self, round_index: int) -> Membership:
        """The members of a round that are still there; the epoch counts those that left."""
        planned = self.of_round(round_index)
        workers = tuple(w for w in planned.workers if self.takes_part(w, round_index))
        epoch = (planned.epoch << EPOCH_BITS) + len(planned.workers) - len(workers)
        return Membership(epoch, workers)

    def give_up(self, worker: int) -> None:
        """A worker is gone. Rounds are still planned with it, until `remove`."""
        self._gone.add(worker)

    def remove(self, worker: int) -> None:
        """A worker is gone; rounds that nobody can have started are without it."""
        self.give_up(worker)
        self._change(lambda workers: [w for w in workers if w != worker], self.next_change)

    def add(self, worker: int) -> int:
        """A worker returns; the first round that it takes part in."""
        activation = self.next_change
        self._gone.discard(worker)
        self._since[worker] = activation
        self._change(lambda workers: sorted({*workers, worker}), activation)
        return activation

    def restart(self, round_index: int, workers: tuple[int, ...]) -> None:
        """Everybody was lost: these go on at a round that may have been started before."""
        epoch = max(m.epoch for _, m in self._versions) + 1
        kept = [v for v in self._versions if v[0] < round_index]
        self._gone |= {w for _, membership in self._versions for w in membership.workers}
        self._gone -= {*workers}
        self._versions = [*kept, (round_index, Membership(epoch, workers))]
        self._since = {**self._since, **dict.fromkeys(workers, round_index)}
        self.newest_started = round_index - 1

    def forget(self, round_index: int) -> None:
        """Nobody will ask for rounds before this one."""
        later = [v for v in self._versions if v[0] > round_index]
        self._versions = [(0, self.of_round(round_index)), *later]

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
        """Whether a member of a round, as planned, is still in it (not gone, nor back later)."""
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
    def load(cls, saved: dict[str, object], *, lead: int = 1) -> MemberLog:
        """What `dump` gave."""
        log = cls((), lead=lead)
        versions = saved["versions"]
        assert isinstance(versions, list | tuple)
        log._versions = [(s, Membership(e, tuple(w))) for s, e, w in versions]
        newest, gone, since = saved["newest_started"], saved["gone"], saved["since"]
        assert isinstance(newest, int)
        assert isinstance(gone, list | tuple) and isinstance(since, list | tuple)
        log.newest_started, log._gone, log._since = newest, set(gone), dict(since)
        return log
