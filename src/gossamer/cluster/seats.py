"""What the coordinator knows of each worker, and the two choices that it makes between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gossamer.cluster.messages import Entry, Peer, Phase, Role

ALIVE = ("waiting", "joining", "running")
KEPT_CHECKPOINTS = 2  # older ones of a worker are no reason to throw away the work of the others


@dataclass(frozen=True)
class Suspicion:
    """A worker whose connection is lost: it is dialled until that says something."""

    ping_at_s: float  # when to dial next
    since_s: float | None = None  # when the dial under way began


@dataclass
class Seat:
    """One worker's place in the run. What is in `DURABLE` survives the coordinator."""

    worker: int
    role: Role
    address: str = ""
    incarnation: int = 0
    nonce: str = ""
    phase: Phase = "lost"
    checkpoint_rounds: tuple[int, ...] = ()
    round_started: int = -1
    rounds_completed: int = 0
    cause: str = ""
    reason: str = ""
    entry: Entry | None = None
    attempts: int = 0  # donors asked so far, those of earlier incarnations included
    refused_donor: int | None = None  # the donor that failed this joiner last

    attached: bool = False  # its watch stream is open
    ever_attached: bool = False
    settling: bool = False  # the coordinator has restarted and not heard from it yet
    suspicion: Suspicion | None = None
    progress: int = -1
    last_progress_s: float = 0.0
    last_report_s: float = 0.0
    waiting_for_peer: bool = False
    loss: float | None = None
    utilization: float = 0.0
    blocked_s: float = 0.0
    bytes_sent: int = 0
    records: dict[str, float] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether there is a process, as far as anybody knows."""
        return self.phase in ALIVE

    def peer(self) -> Peer:
        """As the others see it."""
        return Peer(
            worker=self.worker,
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            phase=self.phase,
        )

    def dump(self) -> dict[str, Any]:
        """What survives the coordinator, as JSON."""
        values = {name: value for name, value in asdict(self).items() if name in DURABLE}
        entry = None if self.entry is None else self.entry.model_dump(mode="json")
        return {**values, "checkpoint_rounds": list(self.checkpoint_rounds), "entry": entry}

    @classmethod
    def load(cls, saved: dict[str, Any], now_s: float) -> Seat:
        """The seat after a restart: a live one has a full lease again, and is not yet heard of."""
        entry = saved["entry"]
        values = {
            **saved,
            "checkpoint_rounds": tuple(saved["checkpoint_rounds"]),
            "entry": None if entry is None else Entry(**entry),
        }
        seat = cls(**values, last_progress_s=now_s, last_report_s=now_s)
        seat.settling = seat.alive
        return seat


DURABLE = (
    *("worker", "role", "address", "incarnation", "nonce", "phase", "cause", "reason"),
    *("checkpoint_rounds", "round_started", "rounds_completed"),
    *("attempts", "refused_donor", "ever_attached"),
)


def choose_donor(
    seats: Iterable[Seat], joiner: Seat, newest_started: int, per_donor: int
) -> int | None:
    """The donor with the fewest joiners, then the one furthest on, then the lowest index.

    A donor runs, is in reach, and is in the newest round or the one before: the state that it
    gives is the one after the round before the joiner's first, whoever gives it. None where all
    have as many joiners as they may.
    """
    seats = list(seats)
    load = dict.fromkeys((seat.worker for seat in seats), 0)
    for seat in seats:
        if seat.phase == "joining" and seat.entry is not None and seat.entry.donor is not None:
            load[seat.entry.donor] += 1
    ranked = sorted(
        (seat.worker == joiner.refused_donor, load[seat.worker], -seat.round_started, seat.worker)
        for seat in seats
        if seat.phase == "running"
        and seat.role == joiner.role
        and seat.attached
        and seat.suspicion is None
        and seat.round_started >= newest_started - 1
        and load[seat.worker] < per_donor
    )
    return ranked[0][3] if ranked else None


def choose_round(checkpoints: Iterable[tuple[int, ...]]) -> int | None:
    """The round to go on from: what most workers have, and the newest of these."""
    holders: dict[int, int] = {}
    for rounds in checkpoints:
        for completed in sorted(rounds)[-KEPT_CHECKPOINTS:]:
            holders[completed] = holders.get(completed, 0) + 1
    if not holders:
        return None
    return max(holders, key=lambda completed: (holders[completed], completed))
