"""The membership's rules, over all short and many long sequences of events. No time passes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.cluster.membership import KEEPALIVE_S, Membership
from gossamer.cluster.messages import (
    JoinRequest,
    LeaveRequest,
    ReassignRequest,
    Report,
    WatchRequest,
)
from gossamer.cluster.overview import note_of, status_of, view_of
from gossamer.cluster.plan import Plan, Refused
from gossamer.cluster.seats import Seat, choose_donor, choose_round
from gossamer.comm.members import MemberLog

RUN = "0" * 32
DEADLINE_S = 8.0


class Rig:
    """A membership and the processes around it, which do what they are told by name.

    After each event `check` looks whether all rules still hold.
    """

    def __init__(self, num_workers: int, **given: Any) -> None:
        plan = {"num_rounds": 1000, "deadline_s": DEADLINE_S, **given}
        self.plan = Plan(num_workers=num_workers, **plan)
        self.now = 50.0
        self.members = Membership(self.plan, RUN, now_s=self.now)
        self.nonces = itertools.count()
        self.incarnation = [0] * num_workers  # of the newest process at each index
        self.running = [False] * num_workers  # there is a process, and it reports
        self.round = [-1] * num_workers
        self.progress = [0] * num_workers
        self.listening = [False] * num_workers
        self.told: dict[tuple[int, int], tuple[int, ...]] = {}
        self.fixed: dict[int, tuple[int, ...]] = {}
        self.had_history = False
        self.donors: dict[int, int] = {}

    # ----------------------------------------------------------------------------------- processes

    def request(self, worker: int | None, checkpoints: tuple[int, ...] = ()) -> JoinRequest:
        return JoinRequest(
            worker=worker,
            role="worker",
            address=f"10.0.0.{worker or 0}:1",
            nonce=f"{next(self.nonces):032x}",
            run_id=RUN if checkpoints else None,
            checkpoint_rounds=checkpoints,
            configuration="{}",
            fingerprint="0" * 32,
        )

    def join(self, worker: int | None, checkpoints: tuple[int, ...] = ()) -> Seat | None:
        try:
            seat = self.members.join(self.request(worker, checkpoints), self.now)
        except Refused:
            return None
        worker = seat.worker
        self.incarnation[worker] = seat.incarnation
        self.running[worker] = self.listening[worker] = True
        self.round[worker], self.progress[worker] = -1, 0
        return seat

    def attach(self, worker: int) -> bool:
        request = WatchRequest(
            worker=worker,
            run_id=RUN,
            incarnation=self.incarnation[worker],
            round_started=self.round[worker],
            rounds_completed=max(self.round[worker], 0),
        )
        try:
            self.members.attach(request, self.now)
        except Refused:
            return False
        return True

    def enter(self, worker: int | None, checkpoints: tuple[int, ...] = ()) -> None:
        seat = self.join(worker, checkpoints)
        if seat is not None:
            self.attach(seat.worker)

    def report(self, worker: int, *, advance: int = 1, waiting: bool = False) -> bool:
        self.progress[worker] += advance
        request = Report(
            worker=worker,
            run_id=RUN,
            incarnation=self.incarnation[worker],
            round_started=self.round[worker],
            rounds_completed=max(self.round[worker], 0),
            progress=self.progress[worker],
            waiting=waiting,
        )
        try:
            self.members.report(request, self.now)
        except Refused:
            self.running[worker] = False
            return False
        return True

    def step(self, worker: int) -> None:
        """Begin the next round, if this worker may: from its start, or from its donor's state."""
        seat = self.members.seats[worker]
        if not self.running[worker] or seat.incarnation != self.incarnation[worker]:
            return
        if seat.entry is None or seat.entry.start in ("wait", "over"):
            return
        if seat.phase not in ("running", "joining"):
            return
        self.round[worker] = max(self.round[worker] + 1, seat.entry.round)
        self.report(worker)

    def kill(self, worker: int) -> None:
        if self.running[worker]:
            self.running[worker] = self.listening[worker] = False
            self.members.detach(worker, self.incarnation[worker], self.now)
            self.answer_pings()

    def hang(self, worker: int) -> None:
        """Its connection stays and its socket listens."""
        self.running[worker] = False

    def cut(self, worker: int) -> None:
        """Its connection breaks, and comes back."""
        if self.running[worker]:
            self.members.detach(worker, self.incarnation[worker], self.now)
            self.answer_pings()
            self.attach(worker)

    def answer_pings(self) -> None:
        for ping in self.members.take_pings():
            answer = "accepted" if self.listening[ping.worker] else "refused"
            self.members.pinged(ping.worker, ping.incarnation, answer, self.now)

    def reassign(self, worker: int) -> None:
        entry = self.members.seats[worker].entry
        if entry is None or not self.running[worker]:
            return
        request = ReassignRequest(
            worker=worker,
            run_id=RUN,
            incarnation=self.incarnation[worker],
            joiner=worker,
            attempt=entry.attempt,
            reason="the link is down",
        )
        self.members.reassign(request, self.now)

    def leave(self, worker: int, cause: Any = "stopped") -> None:
        if not self.running[worker]:
            return
        request = LeaveRequest(
            worker=worker, run_id=RUN, incarnation=self.incarnation[worker], cause=cause, reason=""
        )
        self.members.leave(request, self.now)
        self.running[worker] = False

    def wait(self, seconds: float) -> None:
        """Time passes; those that run report, with progress."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for worker, running in enumerate(self.running):
                if running:
                    self.report(worker)
            self.members.tick(self.now)
            self.answer_pings()

    def restart(self) -> None:
        """The coordinator is killed and started again."""
        saved = json.loads(json.dumps(self.members.dump()))
        self.members = Membership.load(self.plan, saved, now_s=self.now)
        for worker, running in enumerate(self.running):
            if running:
                self.attach(worker)

    # --------------------------------------------------------------------------------------- rules

    def check(self) -> None:
        members, log = self.members, self.members.log
        for kind, fields in members.take_events():
            if kind == "entry" and fields["start"] in ("seed", "checkpoint"):
                assert fields["start"] == "checkpoint" or not self.had_history
                self.fixed.clear()  # begun, or begun anew
        self.had_history = members.history
        self.check_rounds(log)
        self.check_entries()
        for worker, seat in enumerate(members.seats):
            assert seat.incarnation == self.incarnation[worker]
            if seat.phase == "running" and seat.role == "worker":
                assert not log.is_gone(worker)

    def check_rounds(self, log: MemberLog) -> None:
        """Equal tags mean equal members, and what has begun stays as it was."""
        newest = log.newest_started
        for index in range(max(0, newest), newest + 4):
            for view in (log.planned(index), log.present(index)):
                assert self.told.setdefault((index, view.epoch), view.workers) == view.workers
        for index in (newest, newest + 1):
            if index >= 0 and self.members.phase == "running":
                workers = log.of_round(index).workers
                assert self.fixed.setdefault(index, workers) == workers

    def check_entries(self) -> None:
        members = self.members
        load: dict[int, int] = {}
        for seat in members.seats:
            entry = seat.entry
            if seat.phase != "joining":
                self.donors.pop(seat.worker, None)
                continue
            assert entry is not None and entry.start == "donor" and entry.donor is not None
            assert entry.incarnation == seat.incarnation
            donor = members.seats[entry.donor]
            assert donor is not seat and donor.phase in ("running", "finished")
            load[entry.donor] = load.get(entry.donor, 0) + 1
            if self.donors.get(seat.worker) != entry.attempt:  # a new decision
                self.donors[seat.worker] = entry.attempt
                assert donor.round_started >= members.log.newest_started - 1
                assert entry.round >= members.log.newest_started + 2
                assert seat.worker in members.log.of_round(entry.round).workers
                assert seat.worker not in members.log.present(entry.round - 1).workers
        assert all(joiners <= members.plan.joiners_per_donor for joiners in load.values())


EVENTS = ("enter", "step", "kill", "hang", "cut", "reassign", "leave")


def act(rig: Rig, event: str, worker: int) -> None:
    if event == "wait":
        rig.wait(DEADLINE_S + 1)
    elif event == "restart":
        rig.restart()
    elif event == "checkpoint":
        rig.enter(worker, (max(rig.members.log.newest_started, 0),))
    else:
        getattr(rig, event)(worker)
    rig.check()


def test_all_short_sequences_of_events_on_two_workers() -> None:
    """From a run that has just begun, every sequence of four events."""
    alphabet = [*itertools.product(("enter", "step", "kill", "hang"), (0, 1)), ("wait", 0)]
    alphabet += [("cut", 1), ("checkpoint", 1), ("restart", 0)]
    for sequence in itertools.product(alphabet, repeat=3):
        rig = Rig(2)
        rig.enter(0)
        rig.enter(1)
        rig.check()
        for event, worker in (*sequence, ("step", 0), ("wait", 0), ("enter", 0)):
            act(rig, event, worker)


@settings(max_examples=150, deadline=None)
@given(
    num_workers=st.integers(1, 5),
    events=st.lists(
        st.tuples(
            st.sampled_from((*EVENTS, "step", "step", "enter", "checkpoint", "wait", "restart")),
            st.integers(0, 4),
        ),
        max_size=50,
    ),
)
def test_long_sequences_of_events(num_workers: int, events: list[tuple[str, int]]) -> None:
    rig = Rig(num_workers)
    for worker in range(num_workers):
        rig.enter(worker)
    for event, worker in events:
        act(rig, event, worker % num_workers)
    view_of(rig.members)
    status_of(rig.members, rig.now)


def begun(num_workers: int, **given: Any) -> Rig:
    """A run in round 5."""
    rig = Rig(num_workers, **given)
    for worker in range(num_workers):
        rig.enter(worker)
    for _ in range(6):
        for worker in range(num_workers):
            rig.step(worker)
    assert rig.members.log.newest_started == 5
    return rig


def phases(rig: Rig) -> list[str]:
    return [seat.phase for seat in rig.members.seats]


def test_a_run_begins_when_all_are_there_and_in_reach() -> None:
    rig = Rig(3)
    rig.enter(0)
    rig.enter(None)
    rig.join(2)
    assert rig.members.phase == "gathering"
    assert note_of(rig.members) == "2 of 3 are here; waiting for worker 2"
    rig.attach(2)
    assert rig.members.phase == "running"
    assert rig.members.log.planned(0).workers == (0, 1, 2)
    assert rig.members.log.planned(0).epoch == 0  # as in a simulated run


def test_a_single_worker_is_a_cluster() -> None:
    rig = Rig(1)
    rig.enter(None)
    assert phases(rig) == ["running"]
    rig.step(0)
    rig.kill(0)
    rig.enter(0, (1,))
    assert (phases(rig), rig.members.seats[0].entry.start) == (["running"], "checkpoint")


def test_fewer_may_begin_after_a_while() -> None:
    rig = Rig(4, min_workers=2, start_timeout_s=30.0)
    rig.enter(3)
    rig.wait(40.0)
    assert rig.members.phase == "gathering"  # two are too few for one
    rig.enter(1)
    assert rig.members.phase == "running"
    assert rig.members.log.planned(0).workers == (1, 3)
    rig.enter(0)
    assert rig.members.seats[0].entry.start == "donor"
    assert rig.members.log.planned(1).workers == (0, 1, 3)


def test_a_hung_worker_with_a_live_connection_is_out_after_the_deadline() -> None:
    for advance in (0, 1):
        rig = begun(3)
        for _ in range(int(DEADLINE_S)):
            rig.now += 1.0
            rig.report(0)
            rig.report(1, advance=advance)
            rig.members.tick(rig.now)
        assert phases(rig) == ["running"] * 3
        rig.now += 0.5
        rig.report(0)
        rig.members.tick(rig.now)
        # Worker 1 reports without progress, or with; worker 2 does not report.
        assert phases(rig) == ["running", "running" if advance else "lost", "lost"]
        assert not rig.report(2)


def test_waiting_for_a_peer_is_not_hanging_but_has_an_end() -> None:
    rig = begun(2)
    for second in range(int(2 * DEADLINE_S) + 1):
        assert phases(rig) == ["running", "running"], second
        rig.now += 1.0
        rig.report(0)
        rig.report(1, advance=0, waiting=True)
        rig.members.tick(rig.now)
    assert phases(rig) == ["running", "lost"]


def test_one_that_hears_nobody_gives_nobody_up() -> None:
    rig = begun(3)
    rig.now += 100.0
    rig.members.tick(rig.now)
    assert phases(rig) == ["running"] * 3
    rig.report(0)  # the first that is heard again: the others have a whole lease from now
    rig.members.tick(rig.now)
    assert phases(rig) == ["running"] * 3


@pytest.mark.parametrize(
    ("answer", "others", "lost"),
    [
        ("refused", False, True),  # its machine says that the process is gone
        ("accepted", True, False),  # hung, or on its way back
        ("silent", True, True),
        ("silent", False, False),  # it may be our own line
    ],
)
def test_a_lost_connection_is_looked_into(answer: str, others: bool, lost: bool) -> None:
    rig = begun(3)
    rig.now += 3.0
    if others:
        rig.report(0)
    rig.members.detach(1, 1, rig.now)
    (ping,) = rig.members.take_pings()
    assert (ping.worker, rig.members.take_pings()) == (1, [])
    rig.now += KEEPALIVE_S
    if others:
        rig.report(0)
    rig.members.pinged(1, 1, answer, rig.now)
    assert phases(rig) == ["running", "lost" if lost else "running", "running"]
    if answer == "silent" and not others:
        rig.now += KEEPALIVE_S
        rig.members.tick(rig.now)
        assert len(rig.members.take_pings()) == 1  # and again
        rig.attach(1)
        rig.members.pinged(1, 1, "refused", rig.now)  # an old answer is no news
        assert phases(rig) == ["running"] * 3


def test_one_that_ends_while_its_connection_is_lost_is_dialled_until_that_is_known() -> None:
    """Nothing else would tell of it before its lease runs out."""
    rig = begun(3)
    rig.members.detach(1, 1, rig.now)
    for answer in ("accepted", "accepted", "refused"):
        (ping,) = rig.members.take_pings()
        rig.members.pinged(ping.worker, ping.incarnation, answer, rig.now)
        rig.members.tick(rig.now)
        assert rig.members.take_pings() == []
        assert phases(rig)[1] == ("lost" if answer == "refused" else "running")
        rig.now += KEEPALIVE_S
        rig.members.tick(rig.now)
    assert rig.members.losses[-1].cause == "crash"


def test_one_that_reports_without_a_connection_is_dialled_when_its_reports_stop() -> None:
    rig = begun(3)
    rig.members.detach(1, 1, rig.now)
    rig.members.take_pings()
    for _ in range(5):
        rig.now += KEEPALIVE_S / 2
        rig.report(1)
        rig.members.tick(rig.now)
        rig.members.pinged(1, 1, "silent", rig.now)  # an old answer: it has been heard since
        assert (phases(rig)[1], rig.members.take_pings()) == ("running", [])
    rig.now += KEEPALIVE_S
    rig.members.tick(rig.now)
    assert [ping.worker for ping in rig.members.take_pings()] == [1]
    rig.attach(1)
    rig.now += 2 * KEEPALIVE_S
    rig.members.tick(rig.now)
    assert (phases(rig)[1], rig.members.take_pings()) == ("running", [])


def test_a_returning_worker_takes_part_later_than_any_started_round() -> None:
    rig = begun(3)
    rig.kill(1)
    assert rig.members.log.planned(6).workers == (0, 1, 2)  # perhaps begun, not yet reported
    assert rig.members.log.present(6).workers == (0, 2)
    assert rig.members.log.planned(7).workers == (0, 2)
    rig.step(0)
    rig.enter(1)
    entry = rig.members.seats[1].entry
    assert (entry.start, entry.round, entry.incarnation) == ("donor", 8, 2)
    assert rig.members.log.planned(7).workers == (0, 2)
    assert rig.members.log.planned(8).workers == (0, 1, 2)
    rig.step(1)
    assert phases(rig) == ["running"] * 3


def test_eight_joiners_at_once_are_spread_over_the_donors() -> None:
    rig = begun(16)
    for worker in range(8, 16):
        rig.kill(worker)
    for worker in range(8, 16):
        rig.enter(worker)
    donors = [seat.entry.donor for seat in rig.members.seats[8:]]
    assert donors == list(range(8))  # equals are told apart by index


def test_a_donor_serves_so_many_and_the_rest_wait() -> None:
    rig = begun(6)
    for worker in range(1, 6):
        rig.kill(worker)
    for worker in range(1, 6):
        rig.enter(worker)
    assert phases(rig) == ["running", "joining", "joining", "waiting", "waiting", "waiting"]
    assert note_of(rig.members).startswith("workers 3, 4, 5 wait for a donor")
    rig.step(0)
    rig.step(0)
    rig.step(1)  # has its state, and is a donor itself from now on
    assert [seat.entry.donor for seat in rig.members.seats[2:]] == [0, 1, 0, 1]


def test_a_joiner_whose_donor_dies_gets_another_and_a_later_round() -> None:
    rig = begun(4)
    rig.kill(3)
    rig.enter(3)
    first = rig.members.seats[3].entry
    rig.step(1)
    rig.step(2)
    rig.kill(first.donor)
    second = rig.members.seats[3].entry
    assert (first.donor, second.donor) == (0, 1)
    assert (second.attempt, second.round) == (first.attempt + 1, first.round + 1)
    rig.reassign(3)
    third = rig.members.seats[3].entry
    assert (third.donor, third.attempt) == (2, second.attempt + 1)  # not the one that failed
    assert 3 not in rig.members.log.present(7)
    assert 3 in rig.members.log.present(8)


@pytest.mark.parametrize("lagging", [0, 1, 2])
def test_a_donor_is_in_the_newest_rounds(lagging: int) -> None:
    rig = begun(3)
    for _ in range(lagging):
        rig.step(1)
    rig.kill(2)
    rig.enter(2)
    assert rig.members.seats[2].entry.donor == (0 if lagging < 1 else 1)
    rig = begun(3)
    for _ in range(lagging):
        rig.step(1)
    rig.kill(1)  # only the lagging one is left
    rig.step(0) if lagging == 2 else None
    rig.enter(1)
    entry = rig.members.seats[1].entry
    assert (entry.start == "donor") == (lagging < 2 or rig.round[0] >= 6)


def test_choosing_a_donor_over_all_small_cases() -> None:
    joiner = Seat(9, "worker", phase="waiting")
    kinds = list(itertools.product(("running", "joining", "waiting", "lost"), (5, 4, 3), (0, 1)))
    for pair in itertools.product(kinds, repeat=2):
        seats = [
            Seat(w, "worker", phase=phase, round_started=round_started, attached=bool(attached))
            for w, (phase, round_started, attached) in enumerate(pair)
        ]
        able = [
            s for s in seats if s.phase == "running" and s.attached and s.round_started >= 4
        ]  # fmt: skip
        expected = max(able, key=lambda s: (s.round_started, -s.worker)).worker if able else None
        assert choose_donor([*seats, joiner], joiner, 5, 1) == expected


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([], None),
        ([(), ()], None),
        ([(8, 12), (8, 12), ()], 12),
        ([(8, 12), (4, 8)], 8),  # what all have
        ([(8, 12), (8, 12), (4, 8)], 8),
        ([(8, 12), (8, 12), (1, 2)], 12),  # one was away for long
        ([(1, 2), (8, 12)], 12),  # the newest is no loss to anybody
        ([(0, 4, 8, 12, 16, 20), (0, 4)], 20),
    ],
)
def test_the_round_to_go_on_from(checkpoints: list[tuple[int, ...]], expected: int | None) -> None:
    assert choose_round(checkpoints) == expected
    assert choose_round(reversed(checkpoints)) == expected


def test_a_run_with_a_history_is_never_founded_anew() -> None:
    rig = begun(3)
    for worker in range(3):
        rig.kill(worker)
    rig.restart()
    for worker in range(3):
        rig.enter(worker)
    rig.wait(100.0)
    assert rig.members.phase == "gathering"
    assert note_of(rig.members).startswith("the run has a history up to round 5, and none of")
    epoch = rig.members.log.planned(4).epoch
    rig.leave(2)
    rig.enter(2, (2, 4))
    assert phases(rig) == ["joining", "joining", "running"]
    assert [seat.entry.start for seat in rig.members.seats] == ["donor", "donor", "checkpoint"]
    assert rig.members.log.planned(4).workers == (2,)
    assert rig.members.log.planned(4).epoch > epoch
    assert rig.members.log.planned(5).workers == (0, 1, 2)


def test_a_run_without_a_history_begins_again() -> None:
    rig = Rig(2)
    rig.enter(0)
    rig.enter(1)
    rig.step(0)
    epoch = rig.members.log.planned(0).epoch
    rig.kill(0)
    rig.kill(1)
    rig.enter(1)
    rig.enter(0)
    assert [seat.entry.start for seat in rig.members.seats] == ["seed", "seed"]
    assert rig.members.log.planned(0).workers == (0, 1)
    assert rig.members.log.planned(0).epoch > epoch


def test_a_run_that_is_continued_in_a_new_store_has_a_history() -> None:
    rig = Rig(1)
    rig.members = Membership(rig.plan, RUN, history=True, now_s=rig.now)
    rig.enter(0)
    assert phases(rig) == ["waiting"]
    rig.leave(0)
    rig.enter(0, (7,))
    assert rig.members.seats[0].entry.round == 7


def test_nothing_is_decided_until_all_are_heard_of_again() -> None:
    rig = begun(4)
    rig.kill(3)
    rig.hang(2)
    rig.listening[2] = False
    rig.members = Membership.load(rig.plan, rig.members.dump(), now_s=rig.now)
    rig.round[0] = rig.round[1] = 9  # they went on meanwhile
    rig.attach(0)
    rig.enter(3)
    assert phases(rig)[3] == "waiting"
    assert "waits to hear from workers 1, 2" in note_of(rig.members)
    rig.attach(1)
    rig.wait(KEEPALIVE_S + 1)
    assert phases(rig) == ["running", "running", "lost", "joining"]
    assert rig.members.seats[3].entry.round == 11
    assert rig.members.log.planned(10).workers == (0, 1, 2)


def test_the_run_ends_with_its_last_round() -> None:
    rig = begun(3, num_rounds=7)
    rig.kill(2)
    rig.enter(2)
    assert rig.members.seats[2].entry.start == "over"  # rounds 5 and 6 are left
    rig.leave(0, "finished")
    assert (rig.members.phase, phases(rig)) == ("running", ["finished", "running", "finished"])
    rig.leave(1, "finished")
    assert rig.members.phase == "ended"
    rig.enter(1)
    assert rig.members.seats[1].entry.start == "over"
    with pytest.raises(Refused, match="round 7 started, of 7"):
        rig.round[1] = 7
        rig.members.report(
            Report(worker=1, run_id=RUN, incarnation=2, round_started=7, rounds_completed=7,
                   progress=1),
            rig.now,
        )  # fmt: skip


def test_a_syncer_has_its_place_and_is_no_member() -> None:
    rig = Rig(2, num_syncers=1)
    rig.incarnation.append(0)
    rig.running.append(False)
    rig.round.append(-1)
    rig.progress.append(0)
    rig.listening.append(False)
    rig.enter(0)
    rig.enter(1)
    assert rig.members.phase == "gathering"
    with pytest.raises(Refused, match="there is no syncer 1"):
        _join_as_syncer(rig, 1)
    _join_as_syncer(rig, None)
    rig.incarnation[2] = 1
    rig.attach(2)
    assert phases(rig) == ["running"] * 3
    assert rig.members.log.planned(0).workers == (0, 1)
    rig.members.detach(2, 1, rig.now)
    rig.members.take_pings()
    rig.members.pinged(2, 1, "refused", rig.now)
    assert phases(rig) == ["running", "running", "lost"]
    assert rig.members.log.planned(9).workers == (0, 1)


def _join_as_syncer(
    rig: Rig, worker: int | None, checkpoints: tuple[int, ...] = (), nonce: str = "f"
) -> None:
    request = JoinRequest(
        worker=worker, role="syncer", address="10.0.0.9:1", nonce=nonce * 32,
        run_id=RUN if checkpoints else None,
        checkpoint_rounds=checkpoints, configuration="{}", fingerprint="0" * 32,
    )  # fmt: skip
    assert rig.members.join(request, rig.now).worker == 2


def _rig_with_syncer() -> Rig:
    """Two workers and a syncer, running; the syncer is lost then."""
    rig = Rig(2, num_syncers=1)
    for values, value in (
        (rig.incarnation, 1), (rig.running, False), (rig.round, -1), (rig.progress, 0),
        (rig.listening, False),
    ):  # fmt: skip
        values.append(value)  # type: ignore[attr-defined]
    rig.enter(0)
    rig.enter(1)
    _join_as_syncer(rig, None)
    rig.attach(2)
    rig.members.detach(2, 1, rig.now)
    rig.members.take_pings()
    rig.members.pinged(2, 1, "refused", rig.now)
    rig.incarnation[2] = 2
    return rig


@pytest.mark.parametrize("newest", [0, 998])
def test_a_syncer_that_is_back_goes_on_with_its_own_state_however_late(newest: int) -> None:
    rig = _rig_with_syncer()
    for worker in (0, 1):
        rig.round[worker] = newest
        rig.report(worker)
    _join_as_syncer(rig, 2, checkpoints=(40, 41), nonce="e")
    rig.attach(2)
    entry = rig.members.seats[2].entry
    assert entry is not None
    assert (entry.start, entry.round, rig.members.seats[2].phase) == ("checkpoint", 41, "running")


def test_a_syncer_which_is_in_no_round_keeps_nothing_of_the_log() -> None:
    rig = _rig_with_syncer()
    _join_as_syncer(rig, 2, checkpoints=(1,), nonce="e")
    rig.attach(2)
    rig.leave(1)
    rig.round[0] = 500
    rig.report(0)
    assert len(rig.members.log.dump()["versions"]) == 1


def test_a_syncer_without_its_state_waits_and_takes_nobodys() -> None:
    rig = _rig_with_syncer()
    _join_as_syncer(rig, 2, nonce="e")
    rig.attach(2)
    assert phases(rig) == ["running", "running", "waiting"]
    assert "has no checkpoint of the run" in note_of(rig.members)


def test_workers_that_begin_again_find_a_syncer_that_runs_on() -> None:
    rig = Rig(2, num_syncers=1)
    rig.members.seats[2].phase = "running"
    rig.enter(0)
    rig.enter(1)
    assert phases(rig) == ["running"] * 3


def test_asking_again_is_not_joining_again() -> None:
    """A reply is lost, and the client repeats its request."""
    rig = Rig(2)
    request = JoinRequest(
        worker=None, role="worker", address="10.0.0.1:1", nonce="a" * 32, run_id=None,
        checkpoint_rounds=(), configuration="{}", fingerprint="0" * 32,
    )  # fmt: skip
    first = rig.members.join(request, rig.now)
    assert rig.members.join(request, rig.now + 1) is first
    assert (first.worker, first.incarnation) == (0, 1)


def test_the_state_of_another_run_is_refused() -> None:
    rig = Rig(1)
    rig.members.run_id = "1" * 32
    with pytest.raises(Refused, match="belongs to run 0000") as caught:
        rig.members.join(rig.request(0, (3,)), rig.now)
    assert caught.value.permanent


def test_those_who_wait_must_be_heard_too() -> None:
    rig = Rig(3)
    rig.enter(0)
    rig.enter(1)
    rig.hang(1)
    rig.wait(DEADLINE_S + 1)
    assert phases(rig) == ["waiting", "lost", "lost"]
    assert rig.members.seats[1].reason == "nothing heard for 8 s"


def test_a_joiner_gets_a_donor_when_it_can_be_told() -> None:
    rig = begun(2)
    rig.kill(1)
    rig.join(1)
    rig.step(0)
    assert phases(rig) == ["running", "waiting"]
    rig.attach(1)
    assert (phases(rig)[1], rig.members.seats[1].entry.round) == ("joining", 8)


def test_a_loss_while_others_are_not_heard_of_is_known_at_once_and_planned_later() -> None:
    rig = begun(3)
    rig.members = Membership.load(rig.plan, rig.members.dump(), now_s=rig.now)
    rig.round[0] = rig.round[1] = 8
    rig.attach(0)
    rig.attach(1)
    rig.leave(1)
    assert rig.members.log.present(8).workers == (0, 2)
    assert rig.members.log.planned(99).workers == (0, 1, 2)
    rig.attach(2)
    assert rig.members.log.planned(9).workers == (0, 1, 2)
    assert rig.members.log.planned(10).workers == (0, 2)


def test_a_process_whose_place_is_taken_is_out() -> None:
    rig = begun(2)
    rig.members.detach(1, 1, rig.now)
    stale = rig.members.take_pings()
    rig.enter(1)  # at once, as the former connection is lost
    assert (rig.members.seats[1].incarnation, phases(rig)) == (2, ["running", "joining"])
    rig.members.detach(1, 2, rig.now)
    rig.members.take_pings()
    rig.members.pinged(1, stale[0].incarnation, "refused", rig.now)  # news of the former one
    assert phases(rig) == ["running", "joining"]
    rig.incarnation[1] = 1
    assert not rig.report(1)
    assert not rig.attach(1)


def test_no_two_attempts_to_join_are_the_same() -> None:
    """They tell the messages of one from those of another, in whichever life."""
    rig = begun(3)
    attempts = []
    for _ in range(3):
        rig.kill(2)
        rig.enter(2)
        attempts.append(rig.members.seats[2].entry.attempt)
    rig.reassign(2)
    attempts.append(rig.members.seats[2].entry.attempt)
    assert attempts == [1, 2, 3, 4]
