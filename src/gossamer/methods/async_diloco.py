"""Asynchronous DiLoCo: a server takes each outer gradient when it comes, and waits for no one.

Source:     B. Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024,
            arXiv:2401.09135: delayed Nesterov and dynamic local updates. The paper was not at hand:
            both rules are those that summaries give.

Update      worker:  theta   <- InnerOpt(theta)                 H_i times, from the server's model
                     Delta_i = anchor - theta, to the server;   theta = anchor = what it answers
            server:  Theta   <- Theta - lr Delta_i / n          on each arrival
                     A       <- A + Delta_i
                     v       <- mu v + A / n                    on every n-th arrival
                     Theta   <- Theta - lr mu v;  A <- 0
            H_i = max(1, floor(H speed_i / max_j speed_j))      dynamic local updates

Symbols     paper    here                  unit / shape     default  where the default comes from
            H        inner_steps           inner steps      100      not published for this use
            H_i      state.steps           inner steps      H        H in a worker's first round
            anchor   state.anchor          fp32 [P]         -        what the worker received last
            Theta    point                 fp32 [P]         -        the server's
            A, v     pending, momentum     fp32 [P]         0        the server's
            n        delay                 arrivals         M        the paper
            lr, mu   outer_learning_rate   -                0.7 0.9  re-tuned there; DiLoCo's
            -        local_steps           -              by_speed   the paper's DyLU

Departures  c = 0 of the paper's delayed Nesterov: a momentum is used once, in full. Speeds are
            measured while training, and the server tells each worker its H_i with the model. The
            paper's learning rate schedule goes by the server's steps, here by a worker's rounds.
            Outer gradients are not weighted by H_i. Buffers are each worker's.

Reduces to  diloco  when M = 1 and n = 1
            one Nesterov step on the mean of n outer gradients, whoever they are from, in n arrivals

Cost        sent per worker and round: its P values; by the server: P values.
            Blocks from a worker's last step until the answer is there; on no other worker, but all
            share the server's link
            extra memory: worker P (anchor), and P (Delta); server 3 P (Theta, v, A), and P

Fails       a worker that has no answer within the deadline trains on; its next outer gradient has
            both rounds in it, unless the server had merged the first: then that one is refused and
            the worker goes on from the server's model. So each counts at most once. When the server
            dies, it returns with its last checkpoint, made before each answer. A worker that
            returns asks for the server's model first. One that diverges sends nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from gossamer.codec import decoded, encoded
from gossamer.comm.collectives import check_finite
from gossamer.comm.context import Context, MethodState
from gossamer.comm.letters import Letter, LetterContext, with_letters
from gossamer.comm.news import Row, steps_by_speed
from gossamer.comm.reports import NOTHING
from gossamer.methods.base import Method, Sends, outer_learning_rate, outer_momentum, state_of
from gossamer.outer.delayed_nesterov import delayed_nesterov_step_
from gossamer.training.replica import Replica

UNKNOWN = -1  # no number of outer gradients: until the server has said one, it refuses them


@dataclass(kw_only=True)
class AsyncWorkerState(MethodState):
    """The server's model [P] as this worker received it last, and what it said.

    Args:
        version: of the model: arrivals that are in it.
        taken: of this worker's outer gradients, how many are in it.
        asked: letters of this worker to which an answer is due, so far.
        samples: trained on since it received the model.
        steps: H_i for the next round; 0 before the server has said it.
        owner: whose state this is; another worker's after a donation.
    """

    anchor: Tensor
    version: int = 0
    taken: int = 0
    asked: int = 0
    samples: int = 0
    steps: int = 0
    owner: int = -1


@dataclass(kw_only=True)
class AsyncServerState(MethodState):
    """Theta, v and A [P]; of each worker [M]: outer gradients taken, nanoseconds of a step.

    Args:
        arrivals: outer gradients taken from all workers.
        answers: letters sent to workers.
    """

    point: Tensor
    momentum: Tensor
    pending: Tensor
    taken: Tensor
    step_ns: Tensor
    arrivals: int = 0
    answers: int = 0


class AsyncDiLoCo(Method):
    """Asynchronous DiLoCo with delayed Nesterov momentum (arXiv:2401.09135)."""

    name: ClassVar[str] = "async_diloco"
    State: ClassVar[type[MethodState]] = AsyncWorkerState

    outer_learning_rate: float = outer_learning_rate()
    outer_momentum: float = outer_momentum()
    delay: int | None = Field(
        None, ge=1, description="n, arrivals in one momentum step; left out: the number of workers"
    )
    local_steps: Literal["equal", "by_speed"] = Field(
        "by_speed", description="a worker's steps in a round: H, or fewer where it is slow"
    )

    @property
    def sends(self) -> Sends:
        return Sends()  # outer gradients; the model comes back as it is

    @property
    def num_syncers(self) -> int:
        return 1

    def init(self, replica: Replica) -> AsyncWorkerState:
        return AsyncWorkerState(anchor=replica.parameters.clone())

    async def run(self, ctx: Context, state: MethodState) -> None:
        ctx, state = with_letters(ctx), state_of(AsyncWorkerState, state)
        (server,), replica = ctx.syncers, ctx.replica
        if state.owner not in (-1, ctx.worker):  # a donor's, whose progress is the donor's to send
            state.asked, state.taken, state.samples = state.asked + 1, UNKNOWN, 0
            ctx.post(server, "hello", NOTHING, step=state.asked, exact=True)
            await self._receive(ctx, state)
        state.owner = ctx.worker
        async for _ in ctx.rounds(state):
            steps, began_s = state.steps or self.inner_steps, ctx.now()
            report = await ctx.train(steps)
            step_ns = round((ctx.now() - began_s) / steps * 1e9)
            replica.steps_completed += self.inner_steps - steps  # the schedule goes by rounds
            ctx.record("local_steps", steps)
            state.samples += report.num_samples
            delta = torch.sub(state.anchor, replica.parameters)
            check_finite(ctx, delta, "outer gradient")
            state.asked += 1
            note = (state.taken, state.version, state.samples, step_ns)
            payload = encoded(delta, self.codec)
            ctx.post(server, "delta", payload, step=state.asked, note=note)
            await self._receive(ctx, state)

    async def _receive(self, ctx: LetterContext, state: AsyncWorkerState) -> None:
        """Wait for the answer within the deadline; without one, go on from where I am."""
        (server,), parameters, seen = ctx.syncers, ctx.replica.parameters, 0
        until_s = ctx.now() + ctx.deadline
        answer: Letter | None = None
        while answer is None or answer.note[0] < state.asked:
            left_s = until_s - ctx.now()
            if left_s <= 0:
                ctx.record("unanswered", 1.0)
                return
            seen = await ctx.mail(seen, left_s)
            answer = ctx.poll(server, "model")
        _, state.taken, state.version, state.steps = answer.note
        state.samples = 0
        state.anchor.copy_(answer.payload)
        parameters.copy_(answer.payload)

    def init_syncer(self, replica: Replica, num_workers: int) -> AsyncServerState:
        start, numbers = replica.parameters, torch.zeros(num_workers, dtype=torch.int64)
        return AsyncServerState(
            point=start.clone(),
            momentum=start.new_zeros(start.shape),
            pending=start.new_zeros(start.shape),
            taken=numbers.clone(),
            step_ns=numbers.clone(),
        )

    async def run_syncer(self, ctx: Context, state: MethodState) -> None:
        ctx, state, seen = with_letters(ctx), state_of(AsyncServerState, state), 0
        while True:
            seen = await ctx.mail(seen)
            for worker in range(ctx.num_workers):
                hello = ctx.poll(worker, "hello")
                if hello is not None:
                    self._answer(ctx, state, hello)
                letter = ctx.poll(worker, "delta")
                if letter is not None:
                    self._take(ctx, state, letter)
                    await ctx.checkpoint(state)  # before the answer: what is merged stays merged
                    self._answer(ctx, state, letter)

    def _take(self, ctx: LetterContext, state: AsyncServerState, letter: Letter) -> None:
        """One outer step on a worker's outer gradient, unless part of it is in the model."""
        worker, (taken, version, samples, step_ns) = letter.src, letter.note
        state.step_ns[worker] = step_ns
        if taken != int(state.taken[worker]):  # it has not received the model with its last one
            ctx.record("refused_samples", float(samples))
            return
        ctx.record("merged_samples", float(samples))
        ctx.record("staleness", float(state.arrivals - version))
        state.taken[worker] += 1
        state.arrivals += 1
        delayed_nesterov_step_(
            state.point,
            state.momentum,
            state.pending,
            decoded(letter.payload, self.codec, numel=state.point.numel(), like=state.point),
            learning_rate=self.outer_learning_rate,
            momentum=self.outer_momentum,
            delay=self.delay or ctx.num_workers,
            arrival=state.arrivals,
        )

    def _answer(self, ctx: LetterContext, state: AsyncServerState, letter: Letter) -> None:
        """The model as it is now, to the worker that has asked."""
        worker = letter.src
        state.answers += 1
        steps = self._steps_of(ctx, state, worker)
        note = (letter.step, int(state.taken[worker]), state.arrivals, steps)
        payload = state.point.clone()  # Theta goes on meanwhile
        ctx.post(worker, "model", payload, step=state.answers, note=note)

    def _steps_of(self, ctx: LetterContext, state: AsyncServerState, worker: int) -> int:
        """H_i, by the speeds of the workers that are there or have done all their rounds."""
        if self.local_steps == "equal":
            return self.inner_steps
        connected, taken = ctx.connected(), state.taken.tolist()
        rows = {
            m: Row(0, step_ns / 1e9)
            for m, step_ns in enumerate(state.step_ns.tolist())
            if step_ns and (m in connected or taken[m] == ctx.num_rounds)
        }
        return steps_by_speed(self.inner_steps, worker, rows)
