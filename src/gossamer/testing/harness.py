"""What the conformance suite needs of a transport's surroundings, and what its checks share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.comm.context import Tag
from gossamer.comm.letters import Mail
from gossamer.comm.transport import Transport
from gossamer.errors import CommError

PATIENCE_S = 20.0
"""For what happens at once unless the machine is very busy."""


class Endpoints(Protocol):
    """Some workers' transports, and the means to hurt them."""

    keepalive_s: float

    def __getitem__(self, worker: int) -> Transport:
        """The worker's transport; after `revive` the new one."""

    def now(self) -> float:
        """Seconds of the time in which the transports live."""

    async def under_way(self, src: int, dst: int, tag: Tag) -> None:
        """Wait until the receiver's side has begun to receive the message."""

    async def kill(self, worker: int) -> None:
        """End the worker's process without a word, and let the others know that it is gone."""

    async def revive(self, worker: int) -> None:
        """Start the worker's process again, and let the others know."""

    def cut(self, first: int, second: int) -> None:
        """Let nothing through between the two, without a word to either."""

    def restore(self, first: int, second: int) -> None:
        """Let everything through again."""


Scenario = Callable[[Endpoints], Coroutine[Any, Any, None]]


class Harness(Protocol):
    """Runs scenarios on one kind of transport."""

    def run(self, num_workers: int, scenario: Scenario, *, rate: float | None = None) -> None:
        """Start endpoints that know each other, run the scenario, end everything.

        `rate`: bytes per second of each worker's line, each way; None: fast.
        """


class LetterEnds(Protocol):
    """Some places' ends of the letter service, and the means to hurt them; see `Endpoints`."""

    keepalive_s: float

    def letters(self, worker: int) -> Mail:
        """The place's end; after `revive` the new one."""

    async def kill(self, worker: int) -> None:
        """End the place's process without a word, and let the others know that it is gone."""

    async def revive(self, worker: int) -> None:
        """Start the place's process again, and let the others know."""

    def cut(self, first: int, second: int) -> None:
        """Let nothing through between the two, without a word to either."""

    def restore(self, first: int, second: int) -> None:
        """Let everything through again."""


LetterScenario = Callable[[LetterEnds], Coroutine[Any, Any, None]]


class LetterHarness(Protocol):
    """Runs scenarios on one kind of letter service."""

    def run_letters(
        self, num_places: int, scenario: LetterScenario, *, rate: float | None = None
    ) -> None:
        """As `Harness.run`."""


class ConformanceError(AssertionError):
    """A transport breaks a rule."""


def expect(condition: bool, rule: str) -> None:
    """Raise `ConformanceError` unless `condition` holds."""
    if not condition:
        raise ConformanceError(rule)


async def fate(work: Coroutine[Any, Any, Any]) -> CommError | None:
    """What `work` raised of a transport's errors; None where it ended well."""
    try:
        await work
    except CommError as error:
        return error
    return None


async def expect_error(
    work: Coroutine[Any, Any, Any], kinds: type[CommError] | tuple[type[CommError], ...], rule: str
) -> None:
    """Raise `ConformanceError` unless `work` raises one of `kinds`, subclasses included."""
    error = await fate(work)
    expect(isinstance(error, kinds), f"{rule}; got {error!r}")


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8),
        second.contiguous().reshape(-1).view(torch.uint8),
    )


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that does `work` meanwhile."""
    return asyncio.get_running_loop().create_task(work)


def numbers(num_elements: int, seed: int = 0) -> Tensor:
    """Normal random numbers, the same for the same seed."""
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


def payloads() -> list[Tensor]:
    """One of each kind: dtypes, no dimension, no element, several dimensions, odd bytes."""
    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    ints = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    values = [numbers(37).to(dtype) for dtype in floats]
    values += [torch.arange(1, 12, dtype=dtype) for dtype in ints]
    values += [torch.tensor([True, False, True]), torch.tensor(2.5), torch.tensor(7)]
    values += [torch.empty(0), torch.empty(3, 0, 2), numbers(24).reshape(2, 3, 4)]
    values += [torch.tensor([0.0, -0.0, 1e-42]), torch.tensor([1 + 2j, -3j])]
    return values
