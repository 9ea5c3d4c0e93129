"""Letters in the simulator: newest wins, nothing waits, and what is superseded costs no time."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from gossamer.errors import DataRace
from gossamer.sim.clock import VirtualLoop
from gossamer.sim.faults import FaultPlan, Faults
from gossamer.sim.letters import Letters
from gossamer.sim.network import Network, SimNetwork


class Town:
    """Three places on lines of 1000 bytes a second."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()  # type: ignore[abstract]
        plan = FaultPlan(Faults(), 3, 0)
        network = SimNetwork(self.loop, Network(bandwidth=1000.0), 3, plan, 0)
        self.alive = [True] * 3
        self.letters = Letters(self.loop, network, 3, lambda place: self.alive[place])

    def send(self, src: int, dst: int, step: int, payload: torch.Tensor | None = None) -> None:
        values = torch.full((250,), float(step)) if payload is None else payload
        self.letters.send(src, dst, "a", values, step=step, part=0, note=(step,),
                          num_bytes=1000, exact=False)  # fmt: skip

    def poll(self, dst: int, src: int) -> int | None:
        letter = self.letters.poll(dst, src, "a", 0)
        return None if letter is None else letter.step

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(scenario)
        finally:
            self.loop.close()

    async def until(self, at_s: float) -> None:
        news = 0
        while (left_s := at_s - self.loop.time()) > 0:
            news = await self.letters.mail(0, news, left_s)


def test_the_newest_is_kept_and_taken_once() -> None:
    town = Town()

    async def scenario() -> None:
        town.send(1, 0, 1)
        assert town.poll(0, 1) is None
        await town.until(1.5)
        town.send(1, 0, 2)
        await town.until(3)
        assert town.poll(0, 1) == 2
        assert town.poll(0, 1) is None
        town.send(1, 0, 2)  # a duplicate, and an older one
        await town.until(5)
        town.send(1, 0, 1)
        await town.until(7)
        assert town.poll(0, 1) is None

    town.run(scenario())


def test_an_older_one_on_its_way_is_taken_back() -> None:
    town = Town()

    async def scenario() -> None:
        for step in range(1, 50):
            town.send(1, 0, step)
        assert len(town.letters._flying) == 1
        await town.until(1.01)  # the line is free for the last one
        assert town.poll(0, 1) == 49

    town.run(scenario())


def test_waiting_ends_with_news_or_in_time() -> None:
    town = Town()

    async def scenario() -> None:
        town.send(1, 0, 1)
        assert await town.letters.mail(0, 0, 0.5) == 0
        assert town.loop.time() == 0.5
        assert await town.letters.mail(0, 0, None) == 1
        assert town.loop.time() == 1.0
        assert await town.letters.mail(0, 0, None) == 1  # not seen yet
        town.letters.tell_all()
        assert await town.letters.mail(0, 1, None) == 2

    town.run(scenario())


def test_a_receiver_s_copy_is_its_own_and_races_are_found() -> None:
    town = Town()
    payload = torch.ones(250)

    async def scenario() -> None:
        town.send(1, 0, 1, payload)
        await town.until(1.5)
        payload.zero_()
        letter = town.letters.poll(0, 1, "a", 0)
        assert letter is not None and float(letter.payload.sum()) == 250
        town.send(1, 0, 2, payload)
        payload.add_(1)
        await town.until(3)

    with pytest.raises(DataRace):
        town.run(scenario())


def test_the_dead_get_nothing_and_start_anew() -> None:
    town = Town()

    async def scenario() -> None:
        town.send(1, 0, 5)
        await town.until(1.5)
        town.send(1, 0, 6)
        town.alive[0] = False
        town.letters.gone(0)
        town.send(1, 0, 7)
        await town.until(3)
        town.alive[0] = True
        town.letters.back(0)
        assert town.poll(0, 1) is None
        town.send(1, 0, 1)
        await town.until(6)
        assert town.poll(0, 1) == 1
        # A sender that is back counts from the beginning.
        town.letters.gone(1)
        town.letters.back(1)
        town.send(1, 0, 1)
        await town.until(8)
        assert town.poll(0, 1) == 1

    town.run(scenario())


def test_values_that_are_not_finite_do_not_arrive() -> None:
    town = Town()

    async def scenario() -> None:
        town.send(1, 0, 1, torch.tensor([1.0, float("nan")]))
        await town.until(2)
        assert town.poll(0, 1) is None

    town.run(scenario())
