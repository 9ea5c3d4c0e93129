"""What workers and people are shown of a run."""

from __future__ import annotations

from gossamer.cluster.membership import Membership
from gossamer.cluster.messages import LogState, Status, View, WorkerStatus
from gossamer.cluster.seats import Seat


def note_of(membership: Membership) -> str:
    """What the run waits for; empty where for nothing."""
    plan, seats = membership.plan, membership.seats
    settling = [seat.worker for seat in seats if seat.settling]
    if settling:
        return f"the coordinator has restarted and waits to hear from {_names(settling)}"
    if membership.phase == "gathering":
        ready = [s for s in seats if s.phase == "waiting" and s.attached]
        if membership.history and ready and not any(seat.checkpoint_rounds for seat in ready):
            return (
                f"the run has a history up to round {membership.log.newest_started}, and none of "
                f"{_names([seat.worker for seat in ready])} has a checkpoint of it: start a worker "
                f"that has one, or start a new run"
            )
        absent = [seat.worker for seat in seats if seat not in ready]
        return f"{len(ready)} of {len(seats)} are here; waiting for {_names(absent)}"
    waiting = [s for s in seats if s.phase == "waiting" and s.attached]
    without = [s.worker - plan.num_workers for s in waiting if s.role == "syncer"]
    if membership.phase == "running" and without:
        return (
            f"syncer {without[0]} has no checkpoint of the run, and nobody else has what it had "
            f"merged: start it where its folder is (--out); until then nothing is merged there"
        )
    queue = [s.worker for s in waiting]
    if membership.phase == "running" and queue:
        return f"{_names(queue)} wait for a donor (at most {plan.joiners_per_donor} joiners each)"
    return ""


def _names(workers: list[int]) -> str:
    shown = ", ".join(str(worker) for worker in workers[:8])
    more = f" and {len(workers) - 8} more" if len(workers) > 8 else ""
    return f"{'worker' if len(workers) == 1 else 'workers'} {shown}{more}"


def view_of(membership: Membership) -> View:
    """What the workers are told."""
    log = membership.log.dump()
    return View(
        run_id=membership.run_id,
        revision=membership.revision,
        phase=membership.phase,
        note=note_of(membership),
        log=LogState.model_validate(log, strict=False),
        peers=tuple(seat.peer() for seat in membership.seats if seat.incarnation),
        entries=tuple(seat.entry for seat in membership.seats if seat.entry is not None),
        losses=tuple(membership.losses),
    )


def status_of(membership: Membership, now_s: float) -> Status:
    """What people are shown."""
    newest = membership.log.newest_started
    members = membership.log.present(max(newest, 0))
    donors: dict[int, list[int]] = {}
    for seat in membership.seats:
        if seat.phase == "joining" and seat.entry is not None and seat.entry.donor is not None:
            donors.setdefault(seat.entry.donor, []).append(seat.worker)
    return Status(
        run_id=membership.run_id,
        phase=membership.phase,
        note=note_of(membership),
        num_workers=membership.plan.num_workers,
        num_rounds=membership.plan.num_rounds,
        round=newest,
        epoch=members.epoch,
        members=members.workers,
        deadline_s=membership.plan.deadline_s,
        workers=tuple(
            _worker_status(seat, tuple(donors.get(seat.worker, ())), now_s)
            for seat in membership.seats
            if seat.incarnation
        ),
    )


def _worker_status(seat: Seat, joiners: tuple[int, ...], now_s: float) -> WorkerStatus:
    joining = seat.phase == "joining" and seat.entry is not None
    return WorkerStatus(
        worker=seat.worker,
        role=seat.role,
        address=seat.address,
        alive=seat.alive,
        phase=seat.phase,
        incarnation=seat.incarnation,
        round=seat.round_started,
        rounds_completed=seat.rounds_completed,
        progress_age_s=max(0.0, now_s - seat.last_progress_s),
        loss=seat.loss,
        utilization=seat.utilization,
        blocked_s=seat.blocked_s,
        bytes_sent=seat.bytes_sent,
        records=seat.records,
        donor=seat.entry.donor if joining and seat.entry is not None else None,
        joiners=joiners,
        why="" if seat.alive else seat.reason,
    )
