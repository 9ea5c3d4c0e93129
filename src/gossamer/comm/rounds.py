"""Iterating over a method's rounds, the same way in every world."""

from __future__ import annotations

from typing import Protocol

from gossamer.comm.context import MethodState, Round


class PlansRounds(Protocol):
    """What a context gives to be iterated over."""

    @property
    def num_rounds(self) -> int:
        """Rounds that the run will do."""

    async def checkpoint(self, state: MethodState) -> None:
        """The boundary before round `state.rounds_completed`."""

    def planned_round(self, round_index: int) -> Round:
        """The round with the members that were decided for it."""


class Rounds:
    """`async for round_ in Rounds(ctx, state)`; see `Context.rounds`.

    Not a generator, so that a method that is cancelled leaves nothing behind.
    """

    def __init__(self, ctx: PlansRounds, state: MethodState) -> None:
        self._ctx, self._state = ctx, state
        self._inside = False

    def __aiter__(self) -> Rounds:
        return self

    async def __anext__(self) -> Round:
        if self._inside:
            self._state.rounds_completed += 1
        self._inside = True
        await self._ctx.checkpoint(self._state)
        if self._state.rounds_completed >= self._ctx.num_rounds:
            raise StopAsyncIteration
        return self._ctx.planned_round(self._state.rounds_completed)
