"""A syncer's view of its learners: who has reported, and what they give when asked."""

from __future__ import annotations

import statistics
from collections import deque

import torch

from gossamer.comm import quorum
from gossamer.comm.letters import Letter, LetterContext
from gossamer.comm.quorum import Estimate, Event, Joined, Left, Quorum, Report

NOTHING = torch.zeros(1, dtype=torch.uint8)
"""The payload of letters whose note says everything."""

_STEPS_KEPT = 9  # of which the median is a step's time: one that met a stop does not count


class StepTimes:
    """The recent step time of a learner."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_STEPS_KEPT)

    def add(self, seconds: float) -> None:
        """One more step."""
        self._recent.append(seconds)

    def median_ns(self) -> int:
        """In nanoseconds."""
        return round(statistics.median(self._recent) * 1e9)


def send_report(ctx: LetterContext, step: int, times: StepTimes) -> None:
    """A learner tells every syncer that it has done its step number `step`."""
    for syncer in ctx.syncers:
        ctx.post(syncer, "report", NOTHING, step=step, note=(times.median_ns(),), exact=True)


class Reports:
    """What a syncer knows of learners from their reports.

    Args:
        minimum: K, learners to wait for; as many as there are where they are fewer.
        in_step: a learner has reported for step t once it has done t steps. Otherwise a request is
            made when the one before has closed, and a step of the fastest learner after it at the
            earliest; and a learner has reported that does so while it is open. (Counting steps, a
            slower learner would be behind for ever, and never be in a merge.)
        due_steps: tau, steps from a request to the arrival of its result.
    """

    def __init__(self, ctx: LetterContext, *, minimum: int, in_step: bool, due_steps: int) -> None:
        self._ctx, self._minimum = ctx, minimum
        self._in_step, self._due_steps = in_step, due_steps
        self._connected: tuple[int, ...] = ()
        self._steps: dict[int, int] = {}  # by learner: done, as last reported
        self._step_s: dict[int, float] = {}
        self._counted: dict[int, int] = {}  # by learner: steps done when the request was made
        self._requested_s: float | None = None
        self._sync_s = 0.0
        self._news = 0
        self._events: deque[Event] = deque()

    def estimate(self) -> Estimate:
        """With the slowest learner's step, and a way back as long as the last way there."""
        step_s = max((self._step_s.get(m, 0.0) for m in self._connected), default=0.0)
        return Estimate(step_s, self._sync_s)

    def _look(self) -> None:
        """Turn what has come since the last look into events."""
        ctx, before = self._ctx, self._connected
        self._connected = ctx.connected()
        self._events.extend(Left(m) for m in before if m not in self._connected)
        for learner in self._connected:
            if learner not in before:
                self._counted.pop(learner, None)
                self._steps.pop(learner, None)
                self._events.append(Joined(learner))
            letter = ctx.poll(learner, "report")
            if letter is not None:
                self._steps[learner] = letter.step
                self._step_s[learner] = letter.note[0] / 1e9
                self._events.append(Report(learner))

    def _has_reported(self, learner: int, step: int) -> bool:
        done = self._steps.get(learner, 0)
        return done >= (step if self._in_step else self._counted.get(learner, 0) + 1)

    async def gather(self, step: int, *, grace: float) -> tuple[int, ...]:
        """Wait for the quorum of a global step, and its grace window; who has reported in time.

        Args:
            step: t, counted from 1.
            grace: share of the slack to wait for those beyond the quorum.
        """
        ctx = self._ctx
        if not self._in_step:
            await self._pace()
        self._look()
        self._events.clear()
        self._counted = dict(self._steps)
        self._requested_s = ctx.now()
        request = Quorum(
            requested_s=ctx.now(),
            minimum=self._needed(),
            expected=self._connected,
            due_steps=self._due_steps,
            estimate=self.estimate(),
            safety=grace,
        )
        self._events.extend(Report(m) for m in self._connected if self._has_reported(m, step))

        async def next_event(timeout_s: float | None) -> Event | None:
            until_s = None if timeout_s is None else ctx.now() + timeout_s
            while True:
                while self._events:
                    event = self._events.popleft()
                    request.lower(self._needed(), ctx.now())
                    if not isinstance(event, Report) or self._has_reported(event.contributor, step):
                        return event
                left_s = None if until_s is None else until_s - ctx.now()
                news = await ctx.mail(self._news, left_s)
                if news == self._news:
                    return None
                self._news = news
                self._look()

        learners = await quorum.gather(request, next_event, ctx.now, self.estimate)
        return tuple(learner for learner in learners if learner in self._connected)

    async def _pace(self) -> None:
        """Wait until a step of the fastest learner has passed since the last request."""
        ctx = self._ctx
        step_s = min((self._step_s.get(m, 0.0) for m in self._connected), default=0.0)
        until_s = ctx.now() if self._requested_s is None else self._requested_s + step_s
        while (left_s := until_s - ctx.now()) > 0:
            self._news = await ctx.mail(self._news, left_s)

    def _needed(self) -> int:
        return max(1, min(self._minimum, len(self._connected)))

    async def pull(self, learners: tuple[int, ...], step: int, part: int) -> list[Letter]:
        """Ask learners for a fragment; the answers, by learner, of those who give one in time.

        In time is: before the result is due, or, where nothing has come by then, the first; and
        where learners wait for it, within the deadline.
        """
        ctx, began_s, answers = self._ctx, self._ctx.now(), dict[int, Letter]()
        for learner in learners:
            ctx.post(learner, "pull", NOTHING, step=step, note=(part,), exact=True)
        due_s = ctx.deadline if self._in_step else self._due_steps * self.estimate().step_s
        while True:
            for learner in learners:
                letter = ctx.poll(learner, "fragment")
                if letter is not None and letter.step == step:
                    answers[learner] = letter
            connected = ctx.connected()
            if all(m in answers or m not in connected for m in learners):
                break
            left_s = (due_s if answers else ctx.deadline) - (ctx.now() - began_s)
            if left_s <= 0:
                break
            self._news = await ctx.mail(self._news, left_s)
        self._sync_s = 2 * (ctx.now() - began_s)
        return [answers[learner] for learner in sorted(answers)]
