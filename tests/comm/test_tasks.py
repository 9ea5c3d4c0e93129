"""The task group: joins, errors and cancellation, in one order only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.comm.tasks import TaskGroup
from gossamer.sim.clock import VirtualLoop


class Boom(Exception):
    pass


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class Log:
    """What children did, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def child(self, name: str, seconds: float, error: Exception | None = None) -> str:
        try:
            await asyncio.sleep(seconds)
            if error is not None:
                self.events.append(f"{name} failed")
                raise error
        except asyncio.CancelledError:
            self.events.append(f"{name} cancelled")
            raise
        self.events.append(f"{name} done")
        return name


def now() -> float:
    return asyncio.get_running_loop().time()


def test_children_overlap_with_the_parent_and_are_joined_before_it_goes_on() -> None:
    log = Log()

    async def main() -> tuple[float, str, str]:
        async with TaskGroup() as tasks:
            slow, quick = tasks.start(log.child("slow", 5)), tasks.start(log.child("quick", 1))
            await asyncio.sleep(3)
        log.events.append("parent goes on")
        return now(), await slow, await quick

    assert run(main()) == (5.0, "slow", "quick")
    assert log.events == ["quick done", "slow done", "parent goes on"]


def test_a_group_without_children_takes_no_time() -> None:
    async def main() -> float:
        async with TaskGroup():
            pass
        return now()

    assert run(main()) == 0.0


def test_children_that_children_start_are_joined_too() -> None:
    log = Log()

    async def main() -> float:
        async with TaskGroup() as tasks:

            async def nest() -> None:
                await asyncio.sleep(1)
                tasks.start(log.child("grandchild", 3))

            tasks.start(nest())
        return now()

    assert run(main()) == 4.0
    assert log.events == ["grandchild done"]


def test_the_first_error_leaves_at_once_and_unwrapped_and_cancels_siblings_in_order() -> None:
    log, boom = Log(), Boom("first in time, last in order")
    ended: list[float] = []

    async def main() -> None:
        try:
            async with TaskGroup() as tasks:
                for name in ("b", "a", "c"):
                    tasks.start(log.child(name, 100))
                tasks.start(log.child("bad", 2, boom))
        finally:
            ended.append(now())

    with pytest.raises(Boom) as caught:
        run(main())
    assert caught.value is boom
    assert log.events == ["bad failed", "b cancelled", "a cancelled", "c cancelled"]
    assert ended == [2.0]


def test_of_two_errors_at_one_instant_the_first_started_counts_and_the_other_is_noted() -> None:
    log = Log()

    async def main() -> None:
        async with TaskGroup() as tasks:
            tasks.start(log.child("one", 1, Boom("one")))
            tasks.start(log.child("two", 1, Boom("two")))

    with pytest.raises(Boom) as caught:
        run(main())
    assert str(caught.value) == "one"
    assert caught.value.__notes__ == ["then a child task failed as well: Boom('two')"]


def test_an_error_of_the_body_cancels_the_children_and_leaves() -> None:
    log, boom = Log(), Boom("body")

    async def main() -> None:
        async with TaskGroup() as tasks:
            tasks.start(log.child("a", 100))
            tasks.start(log.child("b", 100))
            await asyncio.sleep(1)
            raise boom

    with pytest.raises(Boom) as caught:
        run(main())
    assert caught.value is boom and not hasattr(boom, "__notes__")
    assert log.events == ["a cancelled", "b cancelled"]


def test_an_error_that_the_body_met_by_awaiting_the_child_is_not_reported_twice() -> None:
    log = Log()

    async def main() -> None:
        async with TaskGroup() as tasks:
            await tasks.start(log.child("a", 1, Boom("a")))

    with pytest.raises(Boom, match=r"^a$") as caught:
        run(main())
    assert not hasattr(caught.value, "__notes__")


def test_a_child_that_fails_while_it_is_cancelled_is_noted_on_the_first_error() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            raise Boom("clean-up")

    async def main() -> None:
        async with TaskGroup() as tasks:
            tasks.start(stubborn())
            await asyncio.sleep(1)
            raise ValueError("body")

    with pytest.raises(ValueError) as caught:
        run(main())
    assert str(caught.value) == "body"
    assert caught.value.__notes__ == ["then a child task failed as well: Boom('clean-up')"]


@pytest.mark.parametrize("where", ["body", "child awaited in the body", "join"])
def test_cancelling_the_parent_cancels_the_children_and_is_never_lost(where: str) -> None:
    log = Log()

    async def parent() -> None:
        async with TaskGroup() as tasks:
            first = tasks.start(log.child("a", 100))
            tasks.start(log.child("b", 200))
            if where == "body":
                await asyncio.sleep(300)
            elif where == "child awaited in the body":
                await first
        log.events.append("parent goes on")

    async def main() -> float:
        task = asyncio.get_running_loop().create_task(parent())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return now()

    assert run(main()) == 1.0
    assert log.events == ["a cancelled", "b cancelled"]


def test_a_parent_that_is_cancelled_waits_for_children_that_take_their_time_to_end() -> None:
    log = Log()

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(5)
            log.events.append("ended")

    async def parent() -> None:
        async with TaskGroup() as tasks:
            tasks.start(slow_to_end())

    async def main() -> float:
        task = asyncio.get_running_loop().create_task(parent())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return now()

    assert run(main()) == 6.0
    assert log.events == ["ended"]


def test_a_child_that_the_parent_cancels_on_purpose_is_no_error() -> None:
    log = Log()

    async def main() -> float:
        async with TaskGroup() as tasks:
            child = tasks.start(log.child("a", 100))
            tasks.start(log.child("b", 3))
            await asyncio.sleep(1)
            child.cancel()
        return now()

    assert run(main()) == 3.0
    assert log.events == ["a cancelled", "b done"]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=6),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_whatever_fails_nothing_is_left_running(
    children: list[tuple[int, bool]], cancelled_at: int | None
) -> None:
    """Each child ends; the group ends with the first child that fails, or when it is cancelled."""
    log = Log()

    async def parent() -> None:
        async with TaskGroup() as tasks:
            for index, (seconds, fails) in enumerate(children):
                tasks.start(log.child(str(index), seconds, Boom(str(index)) if fails else None))

    async def main() -> tuple[float, str]:
        task = asyncio.get_running_loop().create_task(parent())
        if cancelled_at is not None:
            asyncio.get_running_loop().call_later(cancelled_at - 0.5, task.cancel)
        await asyncio.wait([task])
        if task.cancelled():
            return now(), "cancelled"
        return now(), "fine" if task.exception() is None else str(task.exception())

    failures = [(seconds, index) for index, (seconds, fails) in enumerate(children) if fails]
    last = max((seconds for seconds, _ in children), default=0)
    end, ending = (min(failures)[0], str(min(failures)[1])) if failures else (last, "fine")
    if cancelled_at is not None and cancelled_at - 0.5 < end:
        end, ending = cancelled_at - 0.5, "cancelled"
    assert run(main()) == (end, ending)
    ended = [name for name, _ in (event.split() for event in log.events)]
    if cancelled_at is None:  # otherwise some may not even have started
        assert sorted(ended) == sorted(str(index) for index in range(len(children)))
