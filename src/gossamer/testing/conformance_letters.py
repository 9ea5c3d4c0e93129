"""The rules of `gossamer.comm.letters`, as checks that every world's letter service passes.

@pytest.mark.parametrize("check", LETTER_CHECKS, ids=lambda check: check.__name__)
def test_my_letters_keep_the_rules(check):
    check(MyHarness())
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from gossamer.comm.letters import Letter, Mail
from gossamer.testing.harness import (
    PATIENCE_S,
    LetterEnds,
    LetterHarness,
    expect,
    numbers,
    payloads,
    same_bits,
    start,
)

LINE = 200_000.0
"""Bytes a second of a thin line; a message of half a second is worth being taken back."""


async def _next(ends: Mail, src: int, kind: str, part: int = 0) -> Letter:
    """Wait for a letter."""
    seen = 0
    async with asyncio.timeout(PATIENCE_S):
        while True:
            letter = ends.poll(src, kind, part)
            if letter is not None:
                return letter
            seen = await ends.mail(seen)


async def _reach(ends: Mail, src: int, kind: str, step: int) -> list[int]:
    """Take letters until one of this step has come; the steps of all."""
    steps: list[int] = []
    while not steps or steps[-1] < step:
        steps.append((await _next(ends, src, kind)).step)
    return steps


def letters_arrive_whole(harness: LetterHarness) -> None:
    """Every dtype, shape and note arrives bit for bit, and is told apart by kind and part."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        values = [*payloads(), numbers(100_001)]
        for part, payload in enumerate(values):
            note = (part, -(2**62), 2**62)[: part % 4]
            here.post(1, "a", payload, step=part + 3, part=part, note=note)
            here.post(1, "b", payload.new_ones(1), step=1, part=part, exact=True)
        for part, payload in enumerate(values):
            letter = await _next(there, 0, "a", part)
            expect(same_bits(letter.payload, payload), f"whole and undamaged: {payload.dtype}")
            wanted = (part, -(2**62), 2**62)[: part % 4]
            expect((letter.src, letter.step) == (0, part + 3), "from whom, and how new")
            expect(letter.note == wanted, f"its note; got {letter.note}")
            expect((await _next(there, 0, "b", part)).note == (), "of another kind, without a note")
        expect(there.poll(0, "a", 0) is None, "taken once")

    harness.run_letters(2, scenario)


def the_newest_is_kept(harness: LetterHarness) -> None:
    """What nobody has taken gives way to a newer one; old ones never come after it."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        for step in (1, 5):
            here.post(1, "a", torch.full((9,), float(step)), step=step, note=(step,))
            here.post(1, "mark", torch.ones(1), step=step)
            await _next(there, 0, "mark")
            news = 0
            while (letter := there.poll(0, "a")) is None:
                news = await there.mail(news)
            expect(letter.step == step, "the newest")
        for step in (5, 4):
            here.post(1, "a", torch.ones(9), step=step)
            await asyncio.sleep(ends.keepalive_s / 4)
        here.post(1, "a", torch.ones(9), step=6)
        expect(await _reach(there, 0, "a", 6) == [6], "neither an older one nor the same again")

    harness.run_letters(2, scenario)


def an_older_one_is_taken_back(harness: LetterHarness) -> None:
    """A thin line carries the newest, not all: 20 letters of a second each come within a few."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        for step in range(1, 21):
            here.post(1, "a", torch.full((int(LINE) // 4,), float(step)), step=step)
            await asyncio.sleep(0.01)
        letter = await _next(there, 0, "a")
        # The first may have begun before there was a newer one.
        expect(letter.step == 20, f"only the newest goes over the line, not {letter.step}")
        expect(bool((letter.payload == 20.0).all()), "and is its own")

    harness.run_letters(2, scenario, rate=LINE)


def frequent_letters_arrive(harness: LetterHarness) -> None:
    """Letters that are sent faster than the way is long arrive, though newer ones follow."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        stopped = asyncio.Event()

        async def send() -> None:
            step = 0
            while not stopped.is_set():
                step += 1
                here.post(1, "a", torch.ones(1), step=step, exact=True)
                await asyncio.sleep(0.0005)

        sender = start(send())
        steps = await _reach(there, 0, "a", 20)
        stopped.set()
        await sender
        expect(steps == sorted(set(steps)), "newer ones only")

    harness.run_letters(2, scenario)


def waiting_ends_with_news_or_in_time(harness: LetterHarness) -> None:
    """`mail` counts news, and returns at once where there is some that was not seen."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        seen = await there.mail(0, 0.0)
        expect(await there.mail(seen, 0.05) == seen, "no news in time")
        waiting = start(there.mail(seen))
        await asyncio.sleep(0)
        here.post(1, "a", torch.ones(1), step=1)
        async with asyncio.timeout(PATIENCE_S):
            news = await waiting
        expect(news > seen, "a letter is news")
        expect(await there.mail(seen) == news, "that is not seen yet")
        expect(await there.mail(news, 0.05) == news, "and is, then")

    harness.run_letters(2, scenario)


def the_receiver_owns_its_letters(harness: LetterHarness) -> None:
    """What came is the receiver's own."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        payload = numbers(1000)
        here.post(1, "a", payload, step=1)
        letter = await _next(there, 0, "a")
        kept = payload.clone()
        letter.payload.zero_()
        expect(same_bits(payload, kept), "the sender's is untouched")

    harness.run_letters(2, scenario)


def a_loss_is_silent(harness: LetterHarness) -> None:
    """What is sent into a cut link is lost or late, and nobody is told; the next arrives."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        here.post(1, "a", torch.ones(9), step=1)
        await _next(there, 0, "a")
        ends.cut(0, 1)
        here.post(1, "a", torch.ones(25_000), step=2)
        await asyncio.sleep(2 * ends.keepalive_s)
        expect(there.poll(0, "a") is None, "nothing comes through")
        ends.restore(0, 1)
        here.post(1, "a", torch.ones(9), step=3)
        expect((await _reach(there, 0, "a", 3))[-1] == 3, "the next one arrives")

    harness.run_letters(2, scenario, rate=LINE)


def values_must_be_finite(harness: LetterHarness) -> None:
    """NaN and infinity do not arrive, unless the letter is exact; the next one does."""

    async def scenario(ends: LetterEnds) -> None:
        here, there = ends.letters(0), ends.letters(1)
        bad = torch.tensor([1.0, float("nan"), float("inf")])
        here.post(1, "a", bad, step=1)
        await asyncio.sleep(ends.keepalive_s / 4)
        here.post(1, "a", torch.ones(3), step=2)
        expect(await _reach(there, 0, "a", 2) == [2], "what is not finite does not arrive")
        here.post(1, "b", bad, step=1, exact=True)
        expect(same_bits((await _next(there, 0, "b")).payload, bad), "exact: as is")

    harness.run_letters(2, scenario)


def who_is_back_starts_anew(harness: LetterHarness) -> None:
    """A process that comes back has an empty mailbox, and counts from the beginning."""

    async def scenario(ends: LetterEnds) -> None:
        here = ends.letters(0)
        here.post(1, "a", torch.ones(9), step=7)
        here.post(1, "b", torch.ones(9), step=7)
        await _next(ends.letters(1), 0, "a")
        ends.letters(1).post(0, "a", torch.ones(9), step=7)
        await _next(here, 1, "a")
        seen = await here.mail(0, 0.0)
        await ends.kill(1)
        async with asyncio.timeout(PATIENCE_S):
            seen = await here.mail(seen)  # who goes is news
        here.post(1, "a", torch.ones(9), step=8)  # to nobody
        await ends.revive(1)
        there = ends.letters(1)
        expect(there.poll(0, "b") is None, "its mailbox is empty")
        expect(await here.mail(seen, PATIENCE_S) > seen, "who comes is news")
        there.post(0, "a", torch.full((9,), 2.0), step=1)
        letter = await _next(here, 1, "a")
        expect(letter.step == 1 and float(letter.payload[0]) == 2.0, "it counts from the beginning")
        here.post(1, "a", torch.ones(9), step=9)
        expect((await _reach(there, 0, "a", 9))[-1] == 9, "and gets what is sent now")

    harness.run_letters(2, scenario)


LETTER_CHECKS: tuple[Callable[[LetterHarness], None], ...] = (
    letters_arrive_whole,
    the_newest_is_kept,
    an_older_one_is_taken_back,
    frequent_letters_arrive,
    waiting_ends_with_news_or_in_time,
    the_receiver_owns_its_letters,
    a_loss_is_silent,
    values_must_be_finite,
    who_is_back_starts_anew,
)
"""All of them; a letter service conforms when none raises."""
