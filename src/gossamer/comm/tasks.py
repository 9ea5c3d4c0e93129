"""Structured overlap: child tasks that are always joined before their parent goes on.

`asyncio.TaskGroup` wraps errors in groups and cancels in the order of a set; this one raises the
first error itself and cancels in the order of starting, so that a run is the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class TaskGroup:
    """Children started with `start` make progress while the parent trains; all are joined.

    An error of a child is raised where the child is awaited, at the latest when the group ends. It,
    an error of the body, and a cancellation of the parent cancel all children; the first of them
    is what leaves the group, and has a note of each child that then failed otherwise.
    """

    def __init__(self) -> None:
        self._children: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> TaskGroup:
        return self

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `coroutine` beside the parent; await the returned task for its result."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._children.append(task)
        return task

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        first = error
        if first is not None:
            self._cancel()
        while running := [child for child in self._children if not child.done()]:
            try:
                # Unlike awaiting a child, this leaves it alone when the parent is cancelled, so
                # that the two cancellations cannot be taken for one another.
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as cancelled:
                first = cancelled
                self._cancel()
                continue
            if first is None and (first := self._first_error()) is not None:
                self._cancel()
        first = first or self._first_error()
        if first is None:
            return
        self._note_others(first)
        if first is not error:
            raise first

    def _cancel(self) -> None:
        for child in self._children:
            child.cancel()

    def _errors(self) -> list[BaseException]:
        """Of the children that are done, in the order of starting."""
        done = [child for child in self._children if child.done() and not child.cancelled()]
        return [error for error in (child.exception() for child in done) if error is not None]

    def _first_error(self) -> BaseException | None:
        return next(iter(self._errors()), None)

    def _note_others(self, first: BaseException) -> None:
        for other in self._errors():
            if other is not first:
                first.add_note(f"then a child task failed as well: {other!r}")
