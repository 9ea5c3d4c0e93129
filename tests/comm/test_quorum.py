"""The quorum and its grace window: when a request closes, with whom, and never too late."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.comm.quorum import Estimate, Event, Joined, Left, Quorum, Report, gather
from gossamer.errors import ConfigError, InvariantViolated

STEP = Estimate(step_s=1.0, sync_s=0.25)


def quorum(minimum: int = 1, expected: int = 4, due_steps: int = 2, safety: float = 0.9) -> Quorum:
    return Quorum(requested_s=10.0, minimum=minimum, expected=range(expected), due_steps=due_steps,
                  estimate=STEP, safety=safety)  # fmt: skip


def test_it_waits_for_the_minimum_without_limit_and_then_for_the_window() -> None:
    request = quorum(minimum=2)
    assert request.closes_s is None and not request.is_closed(1e9)
    assert request.report(3, 10.2)
    assert request.closes_s is None
    assert request.report(1, 10.5)
    # slack = 2 * 1 - (0.5 + 0.25) = 1.25
    assert request.closes_s == pytest.approx(10.5 + 0.9 * 1.25)
    assert not request.is_closed(11.62) and request.is_closed(11.63)
    assert request.contributors == (1, 3) and request.missing == (0, 2)


def test_a_report_after_closing_is_refused() -> None:
    request = quorum()
    assert request.report(0, 10.0)
    assert not request.report(1, 12.0)
    assert request.contributors == (0,)


def test_a_contributor_counts_once() -> None:
    request = quorum(minimum=2)
    assert request.report(0, 10.1) and not request.report(0, 10.2)
    assert request.closes_s is None


def test_it_closes_early_when_all_have_come() -> None:
    request = quorum(expected=3)
    for contributor, at_s in ((0, 10.1), (2, 10.2), (1, 10.3)):
        assert request.report(contributor, at_s)
    assert request.closes_s == 10.3 and request.is_closed(10.3)


def test_with_all_required_there_is_no_grace() -> None:
    request = quorum(minimum=4)
    for contributor in range(3):
        request.report(contributor, 10.0 + contributor)
    assert request.closes_s is None
    request.report(3, 99.0)
    assert request.closes_s == 99.0


@pytest.mark.parametrize(("due_steps", "safety"), [(0, 0.9), (2, 0.0)])
def test_without_slack_or_safety_the_minimum_closes_it(due_steps: int, safety: float) -> None:
    request = quorum(due_steps=due_steps, safety=safety)
    request.report(2, 10.5)
    assert request.closes_s == 10.5


def test_who_is_gone_is_not_waited_for() -> None:
    request = quorum(expected=3)
    request.report(0, 10.1)
    request.leave(1, 10.2)
    assert request.closes_s is not None and request.closes_s > 11
    request.leave(2, 10.4)
    assert request.closes_s == 10.4


def test_what_a_lost_contributor_gave_stays() -> None:
    request = quorum(minimum=2, expected=3)
    request.report(0, 10.1)
    request.leave(0, 10.2)
    request.report(1, 10.3)
    assert request.contributors == (0, 1)


def test_it_is_unreachable_until_somebody_joins() -> None:
    request = quorum(minimum=2, expected=2)
    request.leave(0, 10.1)
    assert request.is_unreachable
    request.join(7, 10.2)
    assert not request.is_unreachable and request.missing == (1, 7)
    request.report(7, 10.3)
    request.report(1, 10.4)
    assert request.closes_s == 10.4 and request.contributors == (1, 7)


def test_the_window_follows_the_newest_estimate() -> None:
    request = quorum(expected=4)
    request.report(0, 10.0)
    assert request.closes_s == pytest.approx(10 + 0.9 * 1.75)
    request.report(1, 10.5, Estimate(step_s=2.0, sync_s=0.25))  # slower than was thought
    assert request.closes_s == pytest.approx(10 + 0.9 * 3.75)
    request.report(2, 11.0, Estimate(step_s=0.3, sync_s=0.25))  # much faster: over by now
    assert request.closes_s == 11.0 and request.contributors == (0, 1, 2)


@pytest.mark.parametrize(
    ("minimum", "due_steps", "safety"), [(0, 2, 0.9), (1, -1, 0.9), (1, 2, 1.0), (1, 2, -0.1)]
)
def test_settings_that_mean_nothing_are_refused(
    minimum: int, due_steps: int, safety: float
) -> None:
    with pytest.raises(ConfigError):
        quorum(minimum=minimum, due_steps=due_steps, safety=safety)


def test_time_does_not_go_backwards() -> None:
    request = quorum()
    request.report(0, 10.5)
    with pytest.raises(InvariantViolated):
        request.report(1, 10.4)


@dataclass(frozen=True)
class Timed:
    at_s: float
    event: Event
    estimate: Estimate


estimates = st.builds(Estimate, step_s=st.floats(0.01, 5), sync_s=st.floats(0, 5))
events = st.one_of(
    st.builds(Report, st.integers(0, 6)),
    st.builds(Left, st.integers(0, 6)),
    st.builds(Joined, st.integers(0, 6)),
)
histories = st.lists(
    st.builds(Timed, at_s=st.floats(0, 12), event=events, estimate=estimates), max_size=25
).map(lambda timed: sorted(timed, key=lambda each: each.at_s))


@given(
    history=histories, minimum=st.integers(1, 5), due=st.integers(0, 3), safety=st.floats(0, 0.99)
)
def test_grace_is_never_late_and_never_closes_without_the_quorum(
    history: list[Timed], minimum: int, due: int, safety: float
) -> None:
    request = Quorum(requested_s=0.0, minimum=minimum, expected=range(5), due_steps=due,
                     estimate=Estimate(1.0, 0.1), safety=safety)  # fmt: skip
    newest = Estimate(1.0, 0.1)
    counted: list[int] = []
    for timed in history:
        was_closed = request.is_closed(timed.at_s)
        before = request.contributors
        request.take(timed.event, timed.at_s, timed.estimate)
        if was_closed:
            assert request.contributors == before
            continue
        if isinstance(timed.event, Report) and timed.event.contributor not in counted:
            newest = timed.estimate
            counted.append(timed.event.contributor)
        assert request.contributors == tuple(sorted(counted))
        closes_s = request.closes_s
        assert (closes_s is None) == (len(counted) < minimum)
        if closes_s is None:
            continue
        assert request.quorum_s is not None and closes_s >= request.quorum_s
        if closes_s > timed.at_s:  # it is waiting in the window: the result still comes in time
            assert closes_s + newest.sync_s <= due * newest.step_s + 1e-9
    final = request.closes_s
    assert final is None or request.is_closed(final)


def test_the_loop_around_it_waits_only_as_long_as_the_window() -> None:
    """Events come at given instants of a clock that only the loop moves."""
    clock = [0.0]
    coming: list[tuple[float, Event]] = [
        (0.4, Report(0)),
        (0.7, Left(2)),
        (0.9, Report(1)),
        (5.0, Report(3)),
    ]
    waits: list[float | None] = []

    async def next_event(timeout_s: float | None) -> Event | None:
        waits.append(timeout_s)
        at_s, event = coming[0]
        if timeout_s is not None and at_s > clock[0] + timeout_s:
            clock[0] += timeout_s
            return None
        clock[0] = at_s
        coming.pop(0)
        return event

    request = Quorum(requested_s=0.0, minimum=2, expected=range(4), due_steps=2, estimate=STEP)
    contributors = asyncio.run(gather(request, next_event, lambda: clock[0], lambda: STEP))
    assert contributors == (0, 1)
    assert waits == [None, None, None, pytest.approx(0.9 * (2 - 0.9 - 0.25))]
    assert coming == [(5.0, Report(3))]
