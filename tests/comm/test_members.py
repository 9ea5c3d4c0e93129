"""Membership by round: what has begun stays, and equal epochs mean equal members."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gossamer.comm.members import MemberLog


def test_a_change_leaves_as_many_rounds_alone_as_it_should() -> None:
    for lead in (1, 2):
        log = MemberLog((0, 1, 2), lead=lead)
        log.start(3)
        log.remove(1)
        assert log.planned(2 + lead).workers == (0, 1, 2)
        assert log.planned(3 + lead).workers == (0, 2)
        assert log.present(3).workers == (0, 2)  # at once
        log.start(4)
        assert log.add(1) == 4 + lead
        assert log.planned(3 + lead).workers == (0, 2)
        assert log.present(3).workers == (0, 2)  # it does not come back to what it has missed
        assert log.present(4 + lead).workers == (0, 1, 2)


def test_given_up_is_not_yet_removed() -> None:
    log = MemberLog((0, 1))
    log.give_up(0)
    assert log.planned(5).workers == (0, 1)
    assert log.present(5).workers == (1,)
    assert log.is_gone(0)
    log.remove(0)
    assert log.planned(0).workers == (1,)


def test_beginning_anew_has_another_epoch_and_forgets_nobody_who_was_lost() -> None:
    log = MemberLog((0, 1, 2))
    log.start(9)
    log.restart(6, (0, 2))
    assert log.newest_started == 5
    assert log.planned(5).workers == (0, 1, 2)
    assert log.planned(6).workers == log.present(8).workers == (0, 2)
    assert log.planned(6).epoch > log.planned(5).epoch
    assert log.is_gone(1) and not log.is_gone(0)
    assert log.add(1) == 6
    assert log.present(6).workers == (0, 1, 2)


events = st.lists(
    st.tuples(st.sampled_from(("start", "remove", "add", "give_up")), st.integers(0, 3)),
    max_size=40,
)


@given(events, st.sampled_from((1, 2)))
def test_what_has_begun_stays_and_equal_epochs_mean_equal_members(
    sequence: list[tuple[str, int]], lead: int
) -> None:
    log, short = (MemberLog((0, 1, 2, 3), lead=lead) for _ in range(2))
    away: set[int] = set()
    fixed: dict[int, tuple[int, ...]] = {}
    told: dict[tuple[int, int], tuple[int, ...]] = {}
    for event, worker in sequence:
        if event == "start":
            log.start(log.newest_started + 1)
            short.start(short.newest_started + 1)
        elif (event == "add") == (worker in away):
            getattr(log, event)(worker)
            getattr(short, event)(worker)
            (away.discard if event == "add" else away.add)(worker)
        for index in range(log.newest_started + lead):
            workers = log.planned(index).workers
            assert fixed.setdefault(index, workers) == workers
        for index in range(log.newest_started + 5):
            for view in (log.planned(index), log.present(index)):
                assert told.setdefault((index, view.epoch), view.workers) == view.workers
        short.forget(max(0, short.newest_started))
        saved = json.loads(json.dumps(short.dump()))
        short = MemberLog.load(saved, lead=lead)
        for index in range(max(0, log.newest_started), log.newest_started + 5):
            assert short.planned(index) == log.planned(index)
            assert short.present(index) == log.present(index)
