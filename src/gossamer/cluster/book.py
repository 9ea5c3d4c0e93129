"""What the workers of a run tell at their boundaries, added up for people and for the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Totals:
    """What adds up over processes and sessions. Times in seconds, summed over workers."""

    samples: int = 0
    time_s: float = 0.0
    train_time_s: float = 0.0
    failed_transfers: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    records: dict[str, dict[str, float]] = field(default_factory=dict)  # name: count, mean

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Totals:
        """Those of one process, as it tells them; others of its fields are left."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    @property
    def bytes_sent(self) -> int:
        return sum(self.bytes_by_kind.values())

    def plus(self, other: Totals) -> Totals:
        """The sum of both."""
        kinds = dict(self.bytes_by_kind)
        for kind, num_bytes in other.bytes_by_kind.items():
            kinds[kind] = kinds.get(kind, 0) + num_bytes
        records = dict(self.records)
        for name, cell in other.records.items():
            mine = records.get(name, {"count": 0.0, "mean": 0.0})
            count = mine["count"] + cell["count"]
            total = mine["count"] * mine["mean"] + cell["count"] * cell["mean"]
            records[name] = {"count": count, "mean": total / count}
        return Totals(
            samples=self.samples + other.samples,
            time_s=self.time_s + other.time_s,
            train_time_s=self.train_time_s + other.train_time_s,
            failed_transfers=self.failed_transfers + other.failed_transfers,
            bytes_by_kind=dict(sorted(kinds.items())),
            records=dict(sorted(records.items())),
        )

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Book:
    """The rounds of a run, each complete when all who take part have done it.

    Args:
        num_workers: that the run was planned for.
        earlier: the last "round" event of the session that this one goes on from.
        num_syncers: at the places after the workers'; what they send and record counts too.
    """

    def __init__(
        self,
        num_workers: int,
        earlier: Mapping[str, Any] | None = None,
        *,
        num_syncers: int = 0,
    ) -> None:
        self._num_workers = num_workers
        places = num_workers + num_syncers
        self._former = [Totals() for _ in range(places)]  # of processes that have ended
        self._present = [Totals() for _ in range(places)]
        self._passed: dict[int, int] = {}  # worker: rounds completed
        self._losses: dict[int, dict[int, float]] = {}  # by round, worker
        self._began_s: float | None = None
        self._latest_s = 0.0
        self.rounds_told = 0 if earlier is None else int(earlier["round"])
        self._earlier = Totals() if earlier is None else Totals.of(earlier["totals"])
        self._earlier_s = 0.0 if earlier is None else float(earlier["time_s"])

    def started(self, worker: int) -> None:
        """A new process of this worker begins; what the last one told stays."""
        self._former[worker] = self._former[worker].plus(self._present[worker])
        self._present[worker] = Totals()
        self._passed.pop(worker, None)

    def boundary(self, worker: int, fields: Mapping[str, Any], now_s: float) -> None:
        """A worker has passed a boundary, or has ended."""
        if self._began_s is None:
            self._began_s = now_s
        self._latest_s = now_s
        self._present[worker] = Totals.of(fields)
        completed = int(fields["round"])
        self._passed[worker] = completed
        loss = fields.get("loss")
        if loss is not None and completed > self.rounds_told:
            self._losses.setdefault(completed, {})[worker] = float(loss)

    def told(self, place: int, fields: Mapping[str, Any]) -> None:
        """A syncer's totals."""
        self._present[place] = Totals.of(fields)

    def complete(self, taking_part: Sequence[int], now_s: float) -> list[dict[str, Any]]:
        """The rounds that all of these have done now and had not when last asked, as events."""
        if not taking_part:
            return []
        done = min(self._passed.get(worker, -1) for worker in taking_part)
        return [self._round(index, now_s) for index in range(self.rounds_told + 1, done + 1)]

    def _round(self, index: int, now_s: float) -> dict[str, Any]:
        losses = self._losses.pop(index, {})
        self.rounds_told = index
        totals = self.totals
        return {
            "round": index,
            "time_s": self.time_s(now_s),
            "train_loss": sum(losses.values()) / len(losses) if losses else None,
            "workers": len(losses),
            "utilization": self.utilization,
            "bytes_sent_total": totals.bytes_sent,
            "totals": totals.to_json(),
        }

    def time_s(self, now_s: float) -> float:
        """Since the first worker began, earlier sessions included."""
        return self._earlier_s + (0.0 if self._began_s is None else now_s - self._began_s)

    @property
    def totals(self) -> Totals:
        """Over all workers and sessions."""
        total = self._earlier
        for former, present in zip(self._former, self._present, strict=True):
            total = total.plus(former).plus(present)
        return total

    @property
    def utilization(self) -> float:
        """Training time over the time that the workers were there."""
        totals = self.totals
        return min(1.0, totals.train_time_s / totals.time_s) if totals.time_s > 0 else 0.0

    @property
    def retries(self) -> int:
        """How often a collective was repeated, by the worker that did it most; this session."""
        both = [f.plus(p).records for f, p in zip(self._former, self._present, strict=True)]
        return int(max(records.get("retries", {"count": 0})["count"] for records in both))

    def summary(self) -> dict[str, Any]:
        """The keys of a run's summary that come from here; its time is that of the last event."""
        totals, workers = self.totals, self._num_workers
        return {
            "samples": totals.samples,
            "time_s": self.time_s(self._latest_s),
            "train_time_s": totals.train_time_s / workers,
            "blocked_time_s": max(0.0, totals.time_s - totals.train_time_s) / workers,
            "utilization": self.utilization,
            "bytes_sent": round(totals.bytes_sent / workers),
            "bytes_sent_total": totals.bytes_sent,
            "bytes_by_kind": totals.bytes_by_kind,
            "failed_transfers": totals.failed_transfers,
            "retries": self.retries,
            "records": totals.records,
        }
