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
    """Children started with `start` make progress while the parent trains; all are joined."""

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
        if error is not None:
            for child in self._children:
                child.cancel()
        first: BaseException | None = None
        for child in self._children:
            try:
                await child
            except asyncio.CancelledError:
                if error is None and not child.cancelled():
                    raise  # the parent itself is being cancelled
            except BaseException as child_error:
                if error is None and first is None:
                    first = child_error
                    for other in self._children:
                        other.cancel()
        if first is not None:
            raise first
