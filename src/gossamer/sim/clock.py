"""The virtual clock: an asyncio event loop on which waiting costs nothing.

Time is an integer number of nanoseconds. When nothing is ready the clock jumps to the next timer.
Events happen in the total order (time, serial number): what is scheduled first at an instant runs
first, whether it came from `call_soon` or from a timer. There are no threads, sockets or signals.

Nothing is swallowed: an error that escapes a callback leaves `run_until_complete` at once, and an
error of a task that nobody awaited leaves it at the end.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from pathlib import PurePath
from typing import Any, TypeVar, cast

from gossamer.errors import Deadlock, SimulationError
from gossamer.sim.scheduled import NS_PER_S, ScheduledCall, to_ns

__all__ = ["NS_PER_S", "VirtualLoop", "sleep_until_ns", "to_ns"]

T = TypeVar("T")

_COMPACT_ABOVE = 64  # cancelled timers that may lie in the heap before it is rebuilt
_LISTED_TASKS_MAX = 20  # lines of a Deadlock message
_TEARDOWN_EVENTS_MAX = 100_000  # events that cancelled tasks may still take to end


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop with a virtual clock in integer nanoseconds.

    Args:
        start_ns: what the clock shows at first (a resumed run starts where it was saved).
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._serial = 0
        self._ready: deque[ScheduledCall] = deque()
        self._end_of_instant: deque[ScheduledCall] = deque()
        self._timers: list[tuple[int, int, ScheduledCall]] = []
        self._num_cancelled = 0  # cancelled timers that have not been thrown out yet
        self._tasks: dict[asyncio.Task[Any], None] = {}  # unfinished, in the order of their start
        self._num_tasks = 0
        self._failed: list[asyncio.Future[Any]] = []  # finished with an error, perhaps not awaited
        self._interrupt: BaseException | None = None  # the last one that left the loop
        self._lost: list[BaseException] = []  # reported by futures that were dropped unread
        self._generators: weakref.WeakValueDictionary[int, AsyncGenerator[Any, Any]] = (
            weakref.WeakValueDictionary()
        )
        self._running = self._stopping = self._closed = False

    # ------------------------------------------------------------------------------ the clock

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_ns / NS_PER_S

    def time_ns(self) -> int:
        """Virtual nanoseconds."""
        return self._now_ns

    # -------------------------------------------------------------------------------- scheduling

    def call_soon(  # type: ignore[override]  # typeshed wants TypeVarTuples
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Run `callback(*args)` at this instant, after all that is already scheduled for it."""
        if self._closed:
            raise RuntimeError("the event loop is closed")
        if context is None:
            context = contextvars.copy_context()
        handle = ScheduledCall(self, callback, args, context, -1)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run `callback(*args)` in `delay` seconds."""
        if context is None:
            context = contextvars.copy_context()
        return self._schedule(self._now_ns + to_ns(delay), callback, args, context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run `callback(*args)` when `time()` is `when`."""
        if context is None:
            context = contextvars.copy_context()
        return self._schedule(to_ns(when), callback, args, context)

    def call_at_ns(
        self, when_ns: int, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        """Run `callback(*args)` when `time_ns()` is `when_ns`; cheaper, without a context copy."""
        return self._schedule(when_ns, callback, args, None)

    def call_at_end_of_instant(self, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Run `callback(*args)` once nothing else is left to do before the clock moves on."""
        handle = ScheduledCall(self, callback, args, None, -1)
        self._end_of_instant.append(handle)
        return handle

    def _schedule(
        self,
        when_ns: int,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> ScheduledCall:
        if self._closed:
            raise RuntimeError("the event loop is closed")
        if when_ns <= self._now_ns:  # already due: behind all that is scheduled for this instant
            handle = ScheduledCall(self, callback, args, context, -1)
            self._ready.append(handle)
        else:
            handle = ScheduledCall(self, callback, args, context, when_ns)
            self._serial += 1
            heapq.heappush(self._timers, (when_ns, self._serial, handle))
        return handle

    def _timer_cancelled(self) -> None:
        """Throw cancelled timers out of the heap as soon as they are the majority there."""
        self._num_cancelled += 1
        timers = self._timers
        if self._num_cancelled > _COMPACT_ABOVE and 2 * self._num_cancelled > len(timers):
            kept = [entry for entry in timers if entry[2]._callback is not None]
            self._num_cancelled -= len(timers) - len(kept)
            timers[:] = kept  # in place: the running loop holds this list
            heapq.heapify(timers)

    # -------------------------------------------------------------------------- futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Start `coro` as a task; unnamed ones are numbered in the order of their start."""
        if self._closed:
            raise RuntimeError("the event loop is closed")
        self._num_tasks += 1
        task = asyncio.Task(
            coro, loop=self, name=name or f"task-{self._num_tasks}", context=context
        )
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.pop(task, None)  # type: ignore[call-overload]
        if task._log_traceback:  # it failed, and nobody has read the error so far
            if len(self._failed) >= _COMPACT_ABOVE:
                self._failed = [failed for failed in self._failed if failed._log_traceback]
            self._failed.append(task)

    # -------------------------------------------------------------------------------- running

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until `future` is done and return its result.

        Raises:
            Deadlock: nothing is ready, no timer is left, and `future` is not done.
            BaseException: whatever escaped a callback, or `future` itself, or, where that
                succeeded, the first error of a task that nobody awaited.
        """
        self._check_can_run()
        main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        main.add_done_callback(self._stop_when_done)
        try:
            self._run()
        except BaseException:
            if main is not future and main.done() and not main.cancelled():
                main.exception()  # it is being raised right now: not lost
            raise
        finally:
            main.remove_done_callback(self._stop_when_done)
        if not main.done():
            if self._has_events():
                raise RuntimeError("the event loop was stopped before the future was done")
            raise self._deadlock()
        return self._result(main)

    def run_forever(self) -> None:
        """Run until `stop` is called, or nothing is left to do."""
        self._check_can_run()
        self._run()
        if self._tasks and not self._has_events():
            raise self._deadlock()
        self._raise_lost()

    def stop(self) -> None:
        """Return from `run_forever` after the callback that is running now."""
        self._stopping = True

    def _stop_when_done(self, main: asyncio.Future[Any]) -> None:
        self._stopping = True

    def _has_events(self) -> bool:
        return bool(self._ready or self._end_of_instant or self._timers)

    def _check_can_run(self) -> None:
        if self._closed:
            raise RuntimeError("the event loop is closed")
        if self._running:
            raise RuntimeError("the event loop is already running")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("another event loop is running in this thread")

    def _run(self, max_events: int = sys.maxsize) -> None:
        """Run until stopped, or nothing is left to do, or `max_events` have passed."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generator_started, finalizer=self._generator_dropped)
        asyncio._set_running_loop(self)
        self._running, self._stopping = True, False
        try:
            self._run_events(max_events)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            self._interrupt = interrupt
            raise
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run_events(self, max_events: int) -> None:
        ready = self._ready
        for _ in itertools.repeat(None, max_events):
            if self._stopping or not (ready or self._advance()):
                return
            handle = ready.popleft()
            callback = handle._callback
            if callback is None:
                self._num_cancelled -= handle._when >= 0
                continue
            handle._callback = None
            if handle._context is None:
                callback(*handle._args)
            else:
                handle._context.run(callback, *handle._args)

    def _advance(self) -> bool:
        """Fill the empty ready queue; jump to the next timer where this instant is over."""
        if self._end_of_instant:
            self._ready.append(self._end_of_instant.popleft())
            return True
        timers, pop = self._timers, heapq.heappop
        while timers:
            when_ns, _, handle = pop(timers)
            if handle._callback is None:
                self._num_cancelled -= 1
                continue
            self._now_ns = when_ns
            self._ready.append(handle)
            while timers and timers[0][0] == when_ns:
                self._ready.append(pop(timers)[2])
            return True
        return False

    # ------------------------------------------------------------------------- errors and the end

    def _result(self, main: asyncio.Future[T]) -> T:
        if main.cancelled() or main.exception() is None:
            self._raise_lost()
        else:
            error = main.exception()
            assert error is not None
            for other in self._take_lost():
                error.add_note(f"a task that nobody awaited failed too: {other!r}")
        return main.result()

    def _take_lost(self) -> list[BaseException]:
        """Errors that no one has seen, in the order in which their tasks ended."""
        lost = list(self._lost)
        for future in self._failed:
            if future._log_traceback:
                error = future.exception()  # now it counts as read
                # KeyboardInterrupt and SystemExit have left the loop already when they happened
                if isinstance(error, Exception):
                    lost.append(error)
        self._failed, self._lost = [], []
        return lost

    def _raise_lost(self) -> None:
        lost = self._take_lost()
        if lost:
            for other in lost[1:]:
                lost[0].add_note(f"another task that nobody awaited failed too: {other!r}")
            raise lost[0]

    def _deadlock(self) -> Deadlock:
        """The error, after all tasks were cancelled and have ended."""
        waiting = list(self._tasks)
        lines = [f"  {_where(task)}" for task in waiting[:_LISTED_TASKS_MAX]]
        if len(waiting) > _LISTED_TASKS_MAX:
            lines.append(f"  ... and {len(waiting) - _LISTED_TASKS_MAX} more")
        heading = f"every task waits and no timer is left at {self.time():.9f} s of virtual time:"
        error = Deadlock("\n".join([heading, *lines]))
        lost = self._take_lost()
        error.__cause__ = lost[0] if lost else None
        for other in [*lost[1:], *self._cancel_tasks()]:
            error.add_note(f"another task failed: {other!r}")
        return error

    def _cancel_tasks(self) -> list[BaseException]:
        """Cancel all tasks and let them end; the errors that this brought up."""
        known = self._interrupt
        for _ in range(3):  # a task may start others, or swallow the first cancellation
            if not self._tasks:
                break
            for task in list(self._tasks):
                task.cancel()
            events = 0
            while self._tasks and self._has_events() and events < _TEARDOWN_EVENTS_MAX:
                events += 64
                try:
                    self._run(max_events=64)
                except (KeyboardInterrupt, SystemExit) as interrupt:
                    if interrupt is not known:  # the known one passes on to those who await it
                        raise
        errors = self._take_lost()
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # said here instead
            errors.append(SimulationError(f"cannot be cancelled: {_where(task)}"))
        return errors

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what asyncio reports (an error nobody read) to be raised at the end."""
        error = context.get("exception")
        if not isinstance(error, BaseException):
            error = SimulationError(str(context.get("message")))
        self._lost.append(error)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def close(self) -> None:
        """Cancel all tasks, let them and all async generators end, and close for good.

        Raises the first error that came up while they ended.
        """
        if self._running:
            raise RuntimeError("a running event loop cannot be closed")
        if self._closed:
            return
        errors = self._cancel_tasks()
        if self._generators:
            task = self.create_task(self.shutdown_asyncgens())
            self._run(max_events=_TEARDOWN_EVENTS_MAX)
            task.cancel()
            errors += self._cancel_tasks()
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._end_of_instant.clear()
        self._tasks.clear()
        if errors:
            raise errors[0]

    # ---------------------------------------------------------------- what else asyncio asks for

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._serial += 1
        self._generators[self._serial] = generator

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(_close(generator))

    async def shutdown_asyncgens(self) -> None:
        """Close the async generators that were left half-way, in the order of their start."""
        for generator in list(self._generators.values()):
            await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Accepted for `asyncio.Runner`; this loop has no debug mode to switch."""
        if enabled:
            raise NotImplementedError("the virtual loop has no debug mode")


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()


def _where(task: asyncio.Task[Any]) -> str:
    """The task's name, the coroutines that it is inside of, and the line where it waits."""
    names: list[str] = []
    place, inner = "", cast("Any", task.get_coro())
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is None:
            break
        names.append(getattr(inner, "__qualname__", "?").removesuffix(".<locals>"))
        place = f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return f"{task.get_name()}: {' > '.join(names) or 'ended'} ({place})"


class _Sleep:
    """Awaitable timer that wakes its task directly: one event where a future takes two.

    It speaks the part of the future protocol that `asyncio.Task` uses.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_cancelled", "_handle", "_loop",
                 "_when_ns")  # fmt: skip

    def __init__(self, loop: VirtualLoop, when_ns: int) -> None:
        self._loop = loop
        self._when_ns = when_ns
        self._asyncio_future_blocking = False
        self._cancelled: asyncio.CancelledError | None = None
        self._callback: tuple[Callable[..., object], contextvars.Context | None] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def get_loop(self) -> VirtualLoop:
        return self._loop

    def add_done_callback(
        self, callback: Callable[..., object], *, context: contextvars.Context | None = None
    ) -> None:
        self._callback = (callback, context)
        self._handle = self._loop._schedule(self._when_ns, callback, (self,), context)

    def result(self) -> None:
        if self._cancelled is not None:
            raise self._cancelled

    def cancel(self, msg: object = None) -> bool:
        handle, waiting = self._handle, self._callback
        if handle is None or waiting is None or self._cancelled is not None:
            return False
        if handle._callback is None:  # type: ignore[attr-defined]  # it has fired
            return False
        handle.cancel()
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self._loop.call_soon(waiting[0], self, context=waiting[1])
        return True


async def sleep_until_ns(when_ns: int) -> None:
    """Wait until the virtual clock shows `when_ns`; lets others run where that is past."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("sleep_until_ns works on a VirtualLoop only")
    await _Sleep(loop, when_ns)
