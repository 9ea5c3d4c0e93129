"""The virtual loop: time, total order, deadlock, errors that must not be lost, clean ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import Deadlock, SimulationError
from gossamer.sim.clock import NS_PER_S, VirtualLoop, sleep_until_ns


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()
    gc.collect()  # a task or coroutine that was dropped would warn here, which is an error


def test_sleeping_a_year_takes_exactly_a_year_of_virtual_time(loop: VirtualLoop) -> None:
    async def main() -> None:
        await asyncio.sleep(365 * 86400)
        await asyncio.sleep(0.1)

    loop.run_until_complete(main())
    assert loop.time_ns() == 365 * 86400 * NS_PER_S + 100_000_000
    assert loop.time() == 365 * 86400 + 0.1


def test_starts_where_it_is_told() -> None:
    loop = VirtualLoop(start_ns=7)
    fired: list[int] = []
    loop.call_at_ns(3, lambda: fired.append(loop.time_ns()))  # past: at once, never backwards
    loop.call_at_ns(9, lambda: fired.append(loop.time_ns()))
    loop.run_forever()
    assert fired == [7, 9]


def test_time_and_serial_number_order_all_events(loop: VirtualLoop) -> None:
    seen: list[str] = []

    def first() -> None:
        seen.append("first")
        loop.call_soon(seen.append, "soon")
        loop.call_at_ns(10, seen.append, "due now")

    loop.call_at_ns(10, first)
    loop.call_at_ns(10, seen.append, "second")
    loop.call_at_ns(9, seen.append, "earlier")
    loop.call_at_end_of_instant(seen.append, "end of 0")
    loop.call_soon(seen.append, "0")
    loop.run_forever()
    assert seen == ["0", "end of 0", "earlier", "first", "second", "soon", "due now"]


def test_the_end_of_an_instant_comes_after_all_that_the_instant_starts(loop: VirtualLoop) -> None:
    seen: list[str] = []

    async def chain() -> None:
        await asyncio.sleep(1)
        loop.call_at_end_of_instant(lambda: seen.append(f"end at {loop.time_ns()}"))
        for _ in range(5):
            await asyncio.sleep(0)
        seen.append("chain")

    loop.run_until_complete(chain())
    loop.call_at_ns(2 * NS_PER_S, seen.append, "later")
    loop.run_forever()
    assert seen == ["chain", f"end at {NS_PER_S}", "later"]


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=40))
def test_timers_fire_once_in_order_unless_cancelled(plan: list[tuple[int, bool]]) -> None:
    loop = VirtualLoop()
    fired: list[tuple[int, int]] = []
    handles = [
        loop.call_at_ns(when, lambda when=when, i=i: fired.append((when, i)))
        for i, (when, _) in enumerate(plan)
    ]
    for handle, (_, cancelled) in zip(handles, plan, strict=True):
        if cancelled:
            handle.cancel()
            handle.cancel()
    loop.run_forever()
    kept = [(when, i) for i, (when, cancelled) in enumerate(plan) if not cancelled]
    # What is due when the loop starts (time 0) runs in the order of scheduling, like the rest.
    assert fired == sorted(kept)


def test_cancelled_timers_do_not_pile_up(loop: VirtualLoop) -> None:
    fired: list[int] = []
    for i in range(10_000):
        loop.call_at_ns(1_000_000 + i, fired.append, i).cancel()
        if i % 100 == 0:
            loop.call_at_ns(2_000_000 + i, fired.append, i)
    assert len(loop._timers) < 500
    loop.run_forever()
    assert fired == list(range(0, 10_000, 100))
    assert loop._num_cancelled == 0 and not loop._timers


def test_a_timer_cancelled_within_its_own_instant_does_not_fire(loop: VirtualLoop) -> None:
    fired: list[str] = []
    handles: list[asyncio.TimerHandle] = []

    def cancel_second() -> None:
        handles[0].cancel()

    loop.call_at_ns(5, cancel_second)
    handles.append(loop.call_at_ns(5, fired.append, "second"))
    loop.run_forever()
    assert fired == [] and handles[0].cancelled() and loop._num_cancelled == 0


def test_asyncio_timeouts_queues_locks_and_events_work(loop: VirtualLoop) -> None:
    async def main() -> list[float]:
        marks = []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2)
        marks.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await sleep_until_ns(10**15)
        marks.append(loop.time())
        assert await asyncio.wait_for(asyncio.sleep(1, "done"), 2) == "done"
        marks.append(loop.time())
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        lock = asyncio.Lock()

        async def produce() -> None:
            for item in range(3):
                async with lock:
                    await queue.put(item)
                    await asyncio.sleep(1)

        producer = asyncio.create_task(produce())
        assert [await queue.get() for _ in range(3)] == [0, 1, 2]
        await producer
        marks.append(loop.time())
        return marks

    assert loop.run_until_complete(main()) == [2.0, 5.0, 6.0, 9.0]


def test_sleep_until_wakes_at_the_nanosecond_and_lets_others_run(loop: VirtualLoop) -> None:
    seen: list[object] = []

    async def other() -> None:
        seen.append("other")

    async def main() -> None:
        await sleep_until_ns(123_456_789_012_345_679)
        seen.append(loop.time_ns())
        task = asyncio.create_task(other())
        await sleep_until_ns(5)
        seen.append(loop.time_ns())
        await task

    loop.run_until_complete(main())
    assert seen == [123_456_789_012_345_679, "other", 123_456_789_012_345_679]


@pytest.mark.parametrize("message", [None, "enough"])
def test_a_sleeping_task_can_be_cancelled(loop: VirtualLoop, message: str | None) -> None:
    async def main() -> None:
        task = asyncio.create_task(sleep_until_ns(10**12))
        await asyncio.sleep(1)
        task.cancel(message)
        with pytest.raises(asyncio.CancelledError, match=message or "^$"):
            await task
        assert task.cancelled() and loop.time() == 1.0

    loop.run_until_complete(main())
    loop.run_forever()
    assert loop.time() == 1.0  # no timer was left behind


def test_context_variables_belong_to_their_task(loop: VirtualLoop) -> None:
    import contextvars

    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")

    async def child(own: str) -> str:
        name.set(own)
        await sleep_until_ns(10)
        return name.get()

    async def main() -> list[str]:
        tasks = [asyncio.create_task(child(own)) for own in ("a", "b")]
        return [await task for task in tasks] + [name.get()]

    assert loop.run_until_complete(main()) == ["a", "b", "none"]


# ------------------------------------------------------------------------------------- deadlock


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


def test_a_deadlock_names_each_task_and_where_it_waits(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def worker(name: str) -> None:
        try:
            await _wait_for_ever()
        finally:
            ended.append(name)

    async def main() -> None:
        tasks = [loop.create_task(worker(name), name=name) for name in ("left", "right")]
        await asyncio.sleep(2.5)
        await tasks[0]

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(main())
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("no timer is left at 2.500000000 s of virtual time:")
    assert lines[1].startswith("  task-1: ") and "main" in lines[1] and "test_clock" in lines[1]
    assert lines[2].startswith("  left: ") and "worker > _wait_for_ever > Event.wait" in lines[2]
    assert lines[3].startswith("  right: ")
    assert ended == ["left", "right"]  # cancelled and closed, in the order of their start


def test_a_deadlock_of_many_tasks_is_listed_briefly(loop: VirtualLoop) -> None:
    async def main() -> None:
        await asyncio.gather(*[_wait_for_ever() for _ in range(500)])

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(main())
    lines = str(caught.value).splitlines()
    assert len(lines) < 30 and lines[-1] == "  ... and 481 more"


def test_a_deadlock_tells_of_the_failure_behind_it(loop: VirtualLoop) -> None:
    async def failing() -> None:
        raise ValueError("the cause")

    async def main() -> None:
        task = loop.create_task(failing())
        await _wait_for_ever()
        await task

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(main())
    assert str(caught.value.__cause__) == "the cause"


def test_a_task_that_starts_others_while_being_cancelled_is_ended_too(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def second() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            await asyncio.sleep(1)
            ended.append("second")

    async def first() -> None:
        try:
            await _wait_for_ever()
        finally:
            loop.create_task(second())

    with pytest.raises(Deadlock):
        loop.run_until_complete(first())
    assert ended == ["second"]


def test_a_task_that_refuses_to_end_is_reported() -> None:
    loop = VirtualLoop()

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await _wait_for_ever()

    loop.create_task(stubborn(), name="mule")
    loop.run_until_complete(asyncio.sleep(1))
    with pytest.raises(SimulationError, match=r"^cannot be cancelled: mule: .*stubborn"):
        loop.close()
    assert loop.is_closed()


# --------------------------------------------------------------------------------------- errors


def test_an_error_in_a_callback_leaves_the_loop_at_once(loop: VirtualLoop) -> None:
    def fail() -> None:
        raise ValueError("from a callback")

    loop.call_at_ns(5, fail)
    with pytest.raises(ValueError, match="from a callback"):
        loop.run_until_complete(asyncio.sleep(1, loop))
    assert loop.time_ns() == 5


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("with_task", [False, True])
def test_an_interrupt_in_a_callback_or_a_task_passes_through(
    loop: VirtualLoop, interrupt: type[BaseException], with_task: bool
) -> None:
    ended: list[str] = []

    def stop() -> None:
        raise interrupt

    async def stop_inside() -> None:
        await asyncio.sleep(1)
        stop()

    async def main() -> None:
        try:
            if with_task:
                await asyncio.gather(stop_inside(), _wait_for_ever())
            else:
                loop.call_later(1, stop)
                await _wait_for_ever()
        finally:
            ended.append("main")

    with pytest.raises(interrupt):
        loop.run_until_complete(main())
    assert not loop.is_running() and ended == []
    loop.close()  # the tasks still end cleanly, and the interrupt is not raised a second time
    assert ended == ["main"]


def test_an_error_of_a_task_that_nobody_awaits_is_raised_at_the_end(loop: VirtualLoop) -> None:
    async def failing(text: str) -> None:
        raise ValueError(text)

    async def main() -> str:
        for text in ("one", "two"):
            loop.create_task(failing(text))  # dropped on purpose
        await asyncio.sleep(1)
        return "result"

    with pytest.raises(ValueError, match=r"^one\n") as caught:
        loop.run_until_complete(main())
    assert caught.value.__notes__ == [
        "another task that nobody awaited failed too: ValueError('two')"
    ]


def test_an_error_that_was_awaited_is_not_raised_again(loop: VirtualLoop) -> None:
    async def failing() -> None:
        raise ValueError

    async def main() -> str:
        tasks = [loop.create_task(failing()) for _ in range(200)]
        await asyncio.sleep(1)
        for task in tasks:
            with pytest.raises(ValueError):
                await task
        return "fine"

    assert loop.run_until_complete(main()) == "fine"


def test_the_errors_of_main_and_of_a_lost_task_are_both_told(loop: VirtualLoop) -> None:
    async def failing() -> None:
        raise ValueError("lost")

    async def main() -> None:
        task = loop.create_task(failing())
        await asyncio.sleep(1)
        raise RuntimeError(f"main, beside {task.get_name()}")

    with pytest.raises(RuntimeError, match="main, beside task-2") as caught:
        loop.run_until_complete(main())
    assert caught.value.__notes__ == ["a task that nobody awaited failed too: ValueError('lost')"]


def test_an_error_set_on_a_dropped_future_is_raised_at_the_end(loop: VirtualLoop) -> None:
    async def main() -> None:
        loop.create_future().set_exception(ValueError("dropped"))
        gc.collect()

    with pytest.raises(ValueError, match="dropped"):
        loop.run_until_complete(main())


# ---------------------------------------------------------------------------------- life and end


def test_closing_ends_tasks_and_generators_without_a_warning() -> None:
    loop = VirtualLoop()
    ended: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
                await asyncio.sleep(1)
        finally:
            await asyncio.sleep(0)
            ended.append("generator")

    kept = numbers()

    async def main() -> None:
        loop.create_task(_wait_for_ever())
        async for number in kept:
            if number == 2:
                break

    loop.run_until_complete(main())
    loop.create_task(_wait_for_ever())  # never gets its first step
    loop.close()
    assert ended == ["generator"] and loop.is_closed()
    gc.collect()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_at_ns(10**9, print)


def test_a_generator_that_is_dropped_is_closed_by_the_loop(loop: VirtualLoop) -> None:
    ended: list[float] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            ended.append(loop.time())

    async def main() -> None:
        async for _ in numbers():
            break
        gc.collect()
        await asyncio.sleep(5)

    loop.run_until_complete(main())
    assert ended == [1.0]


def test_run_stop_and_run_again(loop: VirtualLoop) -> None:
    seen: list[int] = []
    for when in (1, 2, 3):
        loop.call_at_ns(when, seen.append, when)
    loop.call_at_ns(2, loop.stop)
    loop.run_forever()
    assert seen == [1, 2]
    loop.run_forever()
    assert seen == [1, 2, 3]
    loop.call_soon(loop.stop)
    with pytest.raises(RuntimeError, match="stopped before"):
        loop.run_until_complete(asyncio.sleep(1))


def test_only_one_loop_runs_at_a_time(loop: VirtualLoop) -> None:
    async def main() -> None:
        assert asyncio.get_running_loop() is loop and loop.is_running()
        for other in (loop, VirtualLoop()):
            with pytest.raises(RuntimeError, match="running"):
                other.run_forever()
        with pytest.raises(RuntimeError, match="running"):
            loop.close()

    loop.run_until_complete(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6))
def test_the_same_program_runs_in_the_same_order(plans: list[list[int]]) -> None:
    def trace() -> list[tuple[int, int]]:
        loop = VirtualLoop()
        seen: list[tuple[int, int]] = []

        async def worker(index: int, waits: list[int]) -> None:
            for wait_ns in waits:
                await sleep_until_ns(loop.time_ns() + wait_ns)
                seen.append((loop.time_ns(), index))

        async def main() -> None:
            await asyncio.gather(*[worker(i, waits) for i, waits in enumerate(plans)])

        loop.run_until_complete(main())
        loop.close()
        return seen

    once = trace()
    assert once == trace()
    assert [when for when, _ in once] == sorted(when for when, _ in once)
