"""Who takes part in a real run: a state machine without clock, network or disk.

Events go in with the time at which they happened; `view`, `status` and `take_pings` say what
follows from them. The shell around it (`coordinator.py`) stores the state before it answers.

The rules:

- A lease is renewed by progress. A worker that makes none for `deadline_s` is given up, however
  alive its connection is. Waiting for a peer has a deadline of its own in the worker, so a worker
  that says it waits has twice as long.
- A connection that is lost makes a worker suspect. It is dialled: if its machine says that nobody
  listens, it is lost at once; if there is no answer, it is lost if the others can be heard.
- A coordinator that hears nobody suspects itself, and gives nobody up for it.
- The rounds that anybody may have started keep their members (`comm.members`).
- A worker without a state never founds a round in a run that has a history.
- After a restart nothing is decided by round until each live worker is heard of or given up.
"""

from __future__ import annotations

import math
from typing import Any

from gossamer.cluster.messages import (
    LEAD_ROUNDS,
    Entry,
    JoinRequest,
    LeaveRequest,
    Loss,
    ReassignRequest,
    Report,
    RunPhase,
    Start,
    WatchRequest,
)
from gossamer.cluster.plan import Ping, Plan, Refused
from gossamer.cluster.seats import Seat, Suspicion, choose_donor, choose_round
from gossamer.comm.members import MemberLog

KEEPALIVE_S = 3.5  # a connection without an answer for as long is lost
KEPT_LOSSES = 32


class Membership:
    """The state of a run. Every event takes the time in seconds, which never goes back."""

    def __init__(self, plan: Plan, run_id: str, *, history: bool = False, now_s: float) -> None:
        self.plan, self.run_id, self.history = plan, run_id, history
        self.phase: RunPhase = "gathering"
        self.revision = 0
        self.log = MemberLog((), lead=LEAD_ROUNDS)
        total = plan.num_workers + plan.num_syncers
        self.seats = [Seat(w, plan.role_of(w)) for w in range(total)]
        self.losses: list[Loss] = []
        self._gathering_since_s: float | None = None
        self._last_heard_s = now_s
        self._pings: list[Ping] = []
        self._events: list[tuple[str, dict[str, Any]]] = []

    # ------------------------------------------------------------------------------------ events

    def join(self, request: JoinRequest, now_s: float) -> Seat:
        """A process wants in. Raises `Refused`."""
        if request.run_id is not None and request.run_id != self.run_id:
            raise Refused(
                "run",
                f"this state belongs to run {request.run_id}, and the coordinator holds run "
                f"{self.run_id}; join without it, or start the coordinator of that run",
                permanent=True,
            )
        seat = self._seat_for(request, now_s)
        if seat.alive and seat.nonce == request.nonce:
            return seat
        fresh = Seat(seat.worker, seat.role, cause=seat.cause, reason=seat.reason)
        fresh.address, fresh.nonce = request.address, request.nonce
        fresh.incarnation, fresh.phase = seat.incarnation + 1, "waiting"
        fresh.attempts, fresh.last_progress_s = seat.attempts, now_s
        if request.run_id is not None:
            fresh.checkpoint_rounds = request.checkpoint_rounds
        self.seats[seat.worker] = fresh
        self._heard(fresh, now_s)
        self._enter(fresh, "wait")
        self._advance(now_s)
        return fresh

    def attach(self, request: WatchRequest, now_s: float) -> None:
        """A worker follows the run from now on. Raises `Refused` where it was given up."""
        seat = self._living(request)
        seat.attached = seat.ever_attached = True
        self._heard(seat, now_s)
        seat.settling, seat.last_progress_s = False, now_s
        self._completed(seat, request.round_started, request.rounds_completed)
        self._advance(now_s)

    def detach(self, worker: int, incarnation: int, now_s: float) -> None:
        """A worker's connection is lost."""
        seat = self.seats[worker]
        if seat.incarnation == incarnation and seat.attached:
            seat.attached = False
            if seat.alive:
                seat.suspicion = Suspicion(now_s)
                self._ping_suspects(now_s)

    def pinged(self, worker: int, incarnation: int, answer: str, now_s: float) -> None:
        """What became of dialling: "accepted", "refused" (nobody listens) or "silent"."""
        seat = self.seats[worker]
        suspicion = seat.suspicion
        if seat.incarnation != incarnation or suspicion is None or suspicion.since_s is None:
            return
        seat.suspicion = Suspicion(now_s + KEEPALIVE_S)
        others = [s.last_report_s for s in self.seats if s is not seat and s.incarnation]
        others_s = max(others, default=-math.inf)
        # Accepted: it lives, or hangs, or is about to end: dialled again until it is attached.
        if answer == "refused":
            self._lose(seat, "crash", f"nobody listens at {seat.address} any more")
        elif answer == "silent" and (
            others_s >= suspicion.since_s - KEEPALIVE_S and now_s - others_s <= KEEPALIVE_S
        ):
            self._lose(seat, "silent", f"{seat.address} is out of reach")
        self._advance(now_s)

    def report(self, report: Report, now_s: float) -> None:
        """A worker says what it has done. Raises `Refused` where it was given up."""
        seat = self._living(report)
        self._heard(seat, now_s)
        if report.progress > seat.progress:
            seat.progress, seat.last_progress_s = report.progress, now_s
        seat.waiting_for_peer = report.waiting
        seat.loss, seat.utilization = report.loss, report.utilization
        seat.blocked_s, seat.bytes_sent = report.blocked_s, report.bytes_sent
        seat.records = dict(report.records)
        self._completed(seat, report.round_started, report.rounds_completed)
        self._advance(now_s)

    def reassign(self, request: ReassignRequest, now_s: float) -> None:
        """A state does not get from its donor to the joiner: another donor, another round."""
        self._living(request)
        seat = self.seats[request.joiner] if request.joiner < len(self.seats) else None
        entry = None if seat is None else seat.entry
        if seat is None or entry is None or entry.start != "donor":
            return
        if seat.phase != "joining" or entry.attempt != request.attempt:
            return  # it has been settled otherwise
        if request.worker not in (seat.worker, entry.donor):
            raise Refused(
                "identity",
                f"worker {request.worker} is no part of worker {seat.worker}'s joining",
                permanent=True,
            )
        seat.refused_donor = entry.donor
        self._send_back(seat)
        self._advance(now_s)

    def leave(self, request: LeaveRequest, now_s: float) -> None:
        """A worker goes: "finished", or by its own decision."""
        seat = self._living(request)
        if not seat.alive:
            return
        if request.cause == "finished":
            seat.phase, seat.suspicion, seat.settling = "finished", None, False
            self.revision += 1
        else:
            self._lose(seat, request.cause, request.reason)
        self._advance(now_s)

    def check_alive(self, request: WatchRequest) -> None:
        """Raises `Refused` where this worker was given up."""
        self._living(request)

    def tick(self, now_s: float) -> None:
        """Time passes: leases run out, suspects are dialled, a late start begins."""
        self._ping_suspects(now_s)
        if now_s - self._last_heard_s <= self.plan.deadline_s / 2:
            for seat in self.seats:
                reason = self._overdue(seat, now_s)
                if reason is not None:
                    self._lose(seat, "hang", reason)
        self._advance(now_s)

    def take_pings(self) -> list[Ping]:
        """Whom to dial now."""
        pings, self._pings = self._pings, []
        return pings

    def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        """What has happened since last asked, for the log: (kind, fields)."""
        events, self._events = self._events, []
        return events

    # -------------------------------------------------------------------------------------- parts

    def _seat_for(self, request: JoinRequest, now_s: float) -> Seat:
        """The place that a process can have; its former holder is given up where it is silent."""
        plan = self.plan
        if request.worker is None:
            mine = [s for s in self.seats if s.role == request.role]
            same = [s for s in mine if s.alive and s.nonce == request.nonce]
            free = same or [s for s in mine if not s.alive]
            if not free:
                raise Refused(
                    "full",
                    f"all {len(mine)} places for a {request.role} are taken",
                    permanent=not mine,
                )
            return min(free, key=lambda seat: (seat.phase == "finished", seat.worker))
        if request.worker >= len(self.seats) or self.seats[request.worker].role != request.role:
            raise Refused(
                "identity",
                f"there is no {request.role} {request.worker}: the run was planned for "
                f"{plan.num_workers} workers (from 0) and {plan.num_syncers} syncers after them",
                permanent=True,
            )
        seat = self.seats[request.worker]
        if seat.alive and seat.nonce != request.nonce:
            patience_s = plan.deadline_s if seat.attached else KEEPALIVE_S
            here = seat.attached or seat.settling or not seat.ever_attached
            if here and now_s - seat.last_report_s <= patience_s:
                raise Refused(
                    "occupied",
                    f"{seat.role} {seat.worker} takes part already, from {seat.address}; stop that "
                    f"process, or join with another index",
                    permanent=False,
                )
            self._lose(seat, "replaced", f"a new process at {request.address} took over")
        return seat

    def _living(self, request: WatchRequest | Report | ReassignRequest | LeaveRequest) -> Seat:
        """The seat of a process that was not given up."""
        worker = request.worker
        if request.run_id != self.run_id:
            raise Refused(
                "run", f"the coordinator holds run {self.run_id}, not {request.run_id}",
                permanent=True,
            )  # fmt: skip
        if worker >= len(self.seats):
            raise Refused("identity", f"there is no worker {worker}", permanent=True)
        seat = self.seats[worker]
        if seat.incarnation != request.incarnation or seat.phase == "lost":
            why = seat.reason or "a new process has taken its place"
            raise Refused("expelled", f"worker {worker} was given up: {why}", permanent=True)
        return seat

    def _heard(self, seat: Seat, now_s: float) -> None:
        """A sign of life. After a time without any from anybody, all leases begin anew."""
        if now_s - self._last_heard_s > self.plan.deadline_s / 2:
            for other in self.seats:
                other.last_report_s = other.last_progress_s = now_s
        self._last_heard_s = seat.last_report_s = now_s
        # Nothing would tell of the end of one that is not attached.
        seat.suspicion = None if seat.attached else Suspicion(now_s + KEEPALIVE_S)

    def _overdue(self, seat: Seat, now_s: float) -> str | None:
        """Why a worker's lease has run out, if it has."""
        deadline_s = self.plan.deadline_s
        if not seat.alive:
            return None
        if now_s - seat.last_report_s > deadline_s:
            return f"nothing heard for {deadline_s:g} s"
        allowed_s = 2 * deadline_s if seat.waiting_for_peer else deadline_s
        if seat.phase == "running" and now_s - seat.last_progress_s > allowed_s:
            return f"no progress for {allowed_s:g} s"
        return None

    def _ping_suspects(self, now_s: float) -> None:
        for seat in self.seats:
            suspicion = seat.suspicion
            if not seat.alive or suspicion is None or suspicion.since_s is not None:
                continue
            if suspicion.ping_at_s <= now_s:
                seat.suspicion = Suspicion(suspicion.ping_at_s, now_s)
                self._pings.append(Ping(seat.worker, seat.incarnation, seat.address))

    def _completed(self, seat: Seat, round_started: int, rounds_completed: int) -> None:
        """A worker has come so far."""
        if round_started >= self.plan.num_rounds or rounds_completed > self.plan.num_rounds:
            raise Refused(
                "malformed",
                f"{rounds_completed} rounds completed and round {round_started} started, of "
                f"{self.plan.num_rounds}",
                permanent=True,
            )
        seat.round_started = max(seat.round_started, round_started)
        seat.rounds_completed = max(seat.rounds_completed, rounds_completed)
        if self.phase == "running" and seat.role == "worker" and seat.phase in (
            "joining", "running", "finished",
        ):  # fmt: skip
            self.log.start(seat.round_started)
            self.history = self.history or rounds_completed > 0
        entry = seat.entry
        if seat.phase == "joining" and entry is not None and round_started >= entry.round:
            seat.phase, seat.refused_donor = "running", None
            self._events.append(("joined", entry.model_dump(mode="json")))
            self.revision += 1

    def _enter(
        self, seat: Seat, start: Start, round_index: int = 0, donor: int | None = None
    ) -> None:
        """Decide how a worker gets its state."""
        seat.attempts += start == "donor"
        seat.entry = Entry(
            worker=seat.worker,
            incarnation=seat.incarnation,
            start=start,
            round=round_index,
            donor=donor,
            attempt=seat.attempts,
        )
        self._events.append(("entry", seat.entry.model_dump(mode="json")))
        self.revision += 1

    def _send_back(self, seat: Seat) -> None:
        """A joiner needs another donor."""
        self.log.give_up(seat.worker)
        seat.phase = "waiting"
        self._enter(seat, "wait")

    def _lose(self, seat: Seat, cause: str, reason: str) -> None:
        """Take a worker out; those that it was the donor of need another."""
        seat.phase, seat.cause, seat.reason = "lost", cause, reason
        seat.attached, seat.settling, seat.suspicion, seat.entry = False, False, None, None
        self.log.give_up(seat.worker)
        loss = Loss(
            worker=seat.worker,
            incarnation=seat.incarnation,
            cause=cause,
            reason=reason,
            round=self.log.newest_started,
        )
        self.losses = [*self.losses, loss][-KEPT_LOSSES:]
        self._events.append(("lost", loss.model_dump(mode="json")))
        for other in self.seats:
            entry = other.entry
            if other.phase == "joining" and entry is not None and entry.donor == seat.worker:
                self._send_back(other)
        self.revision += 1

    # ----------------------------------------------------------------------------------- progress

    def _advance(self, now_s: float) -> None:
        """Decide whatever can be decided now."""
        if self.phase == "ended":
            self._turn_away()
            return
        if any(seat.settling for seat in self.seats):
            return
        if self.phase == "running":
            self._end_or_gather()
        if self.phase == "gathering":
            self._found(now_s)
        if self.phase == "running":
            self._drop_the_gone()
            self._serve_joiners()

    def _end_or_gather(self) -> None:
        """What is to be done when nobody runs."""
        workers = self.seats[: self.plan.num_workers]
        if any(seat.phase == "running" for seat in workers):
            return
        for seat in self.seats:
            if seat.phase == "joining":
                self._send_back(seat)
        self.revision += 1
        if any(seat.phase == "finished" for seat in workers):
            self.phase = "ended"
            self._turn_away()
        else:
            self.phase, self._gathering_since_s = "gathering", None

    def _turn_away(self) -> None:
        """The run has ended without those who still waited."""
        for seat in self.seats:
            if seat.phase == "waiting":
                seat.phase = "finished"
                self._enter(seat, "over")

    def _gathered(self, now_s: float) -> list[Seat]:
        """Those who can begin, where they are enough; nobody otherwise."""
        plan = self.plan
        ready = [seat for seat in self.seats if seat.phase == "waiting" and seat.attached]
        workers = [seat for seat in ready if seat.role == "worker"]
        if not workers:
            self._gathering_since_s = None
            return []
        if self._gathering_since_s is None:
            self._gathering_since_s = now_s
        late = now_s - self._gathering_since_s >= plan.start_timeout_s
        enough = plan.num_workers if plan.min_workers is None else plan.min_workers
        complete = len(workers) >= (enough if late else plan.num_workers)
        # A syncer that runs already goes on with what it has.
        syncers = [s for s in self.seats if s.role == "syncer" and s.phase == "running"]
        complete = complete and len(ready) - len(workers) + len(syncers) == plan.num_syncers
        return ready if complete else []

    def _found(self, now_s: float) -> None:
        """Begin, or go on from checkpoints, when enough are there."""
        ready = self._gathered(now_s)
        workers = [seat for seat in ready if seat.role == "worker"]
        if not workers:
            return
        round_index = choose_round(seat.checkpoint_rounds for seat in workers)
        if round_index is None and self.history:
            return  # nobody has a state: `note` says so
        start: Start = "seed"
        founders = ready
        if round_index is not None:
            start, self.history = "checkpoint", self.history or round_index > 0
            founders = [seat for seat in workers if round_index in seat.checkpoint_rounds]
        members = tuple(seat.worker for seat in founders if seat.role == "worker")
        round_index = round_index or 0
        if start == "seed" and self.log.newest_started < 0 and not self.log.of_round(0).workers:
            self.log = MemberLog(members, lead=LEAD_ROUNDS)
        else:
            self.log.restart(round_index, members)
        self.phase = "running"
        for seat in founders:
            seat.phase, seat.round_started = "running", round_index - 1
            seat.last_progress_s = seat.last_report_s = now_s
            self._enter(seat, start, round_index)
        if round_index >= self.plan.num_rounds:
            self.phase = "ended"  # the founders have the last state, and say so
            self._turn_away()

    def _drop_the_gone(self) -> None:
        """Plan the rounds to come without those who are away."""
        for worker in self.log.of_round(self.log.next_change).workers:
            if self.seats[worker].phase in ("waiting", "lost"):
                self.log.remove(worker)
                self.revision += 1
        workers = self.seats[: self.plan.num_workers]
        rounds = [s.round_started for s in workers if s.phase == "running"]
        self.log.forget(max(0, min(rounds, default=0) - 1))

    def _serve_joiners(self) -> None:
        """Give each joiner a donor, as long as there are any."""
        for seat in self.seats:
            if seat.phase != "waiting" or not seat.attached:
                continue
            if seat.role == "syncer":  # nobody else has what it has merged; without it, it waits
                if seat.checkpoint_rounds:
                    seat.phase = "running"
                    self._enter(seat, "checkpoint", max(seat.checkpoint_rounds))
                continue
            if self.log.next_change >= self.plan.num_rounds:
                seat.phase = "finished"
                self._enter(seat, "over")
                continue
            newest, limit = self.log.newest_started, self.plan.joiners_per_donor
            donor = choose_donor(self.seats, seat, newest, limit)
            if donor is None:
                continue
            activation = self.log.add(seat.worker)
            seat.phase = "joining"
            self._enter(seat, "donor", activation, donor)

    # -------------------------------------------------------------------------------------- store

    def dump(self) -> dict[str, Any]:
        """All that must survive, as JSON: no times, as another process has another clock."""
        return {
            "run_id": self.run_id,
            "history": self.history,
            "phase": self.phase,
            "revision": self.revision,
            "log": self.log.dump(),
            "seats": [seat.dump() for seat in self.seats],
            "losses": [loss.model_dump(mode="json") for loss in self.losses],
        }

    @classmethod
    def load(cls, plan: Plan, saved: dict[str, Any], *, now_s: float) -> Membership:
        """Go on after a restart; whoever was alive is waited for."""
        self = cls(plan, saved["run_id"], history=saved["history"], now_s=now_s)
        self.phase, self.revision = saved["phase"], saved["revision"] + 1
        self.log = MemberLog.load(saved["log"], lead=LEAD_ROUNDS)
        self.seats = [Seat.load(seat, now_s) for seat in saved["seats"]]
        self.losses = [Loss(**loss) for loss in saved["losses"]]
        for seat in self.seats:
            if seat.alive:
                seat.suspicion = Suspicion(now_s + KEEPALIVE_S)
        return self
