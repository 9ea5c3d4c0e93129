"""The narrow waist between a method and the world that it runs in.

A method sees one worker's `Context` and nothing else. The simulated world and the cluster world
each implement it; no method, collective, mixer or outer optimizer knows which one it has.

Ownership: from `send` until it is delivered a payload belongs to the transfer, and the sender does
not write to it. What a receiver gets is its own. The simulator checks both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gossamer.comm.tasks import TaskGroup
    from gossamer.training.replica import Replica


@dataclass(frozen=True, slots=True)
class Membership:
    """Who takes part in a round. A later epoch replaces an earlier one."""

    epoch: int
    workers: tuple[int, ...]  # sorted worker indices

    def __contains__(self, worker: int) -> bool:
        return worker in self.workers


class Tag(NamedTuple):
    """What a message is; sender and receiver must use equal tags.

    Args:
        kind: what the bytes are for ("mix1", "mix2", "outer", "gradient"); the ledger groups by it.
        round_index: the round that the message belongs to, 0-based.
        step: position inside the round where a method communicates more than once (0-based).
        phase: position inside a collective.
        part: chunk or slice inside a phase.
        attempt: 0 for the first try of a collective, counting up on retries.
        epoch: membership epoch, so that differing views can never mix wrongly.
        segment: piece of a vector that is sent in several; its pieces meet the same fate where a
            fault plan draws one for their transfer.
    """

    kind: str
    round_index: int
    step: int = 0
    phase: int = 0
    part: int = 0
    attempt: int = 0
    epoch: int = 0
    segment: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a method: its index (0-based) and who takes part in it."""

    index: int
    members: Membership

    def tag(self, kind: str, *, step: int = 0, attempt: int = 0) -> Tag:
        """The stem of the tags of one collective in this round."""
        return Tag(kind, self.index, step=step, attempt=attempt, epoch=self.members.epoch)


@dataclass(kw_only=True)
class MethodState:
    """All that a method must keep to go on after a restart, besides the replica itself.

    Subclasses add tensor fields (fp32, flat, shape [P] unless said otherwise), ints and floats.
    A donor hands these to a joiner, a checkpoint holds them.

    Args:
        residual: what this worker's encoded payloads have lost so far, where a method has error
            feedback (see `comm.coding`). The worker's own: a joiner's starts at zero.
    """

    rounds_completed: int = field(default=0)
    residual: Tensor | None = field(default=None)


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What `Context.train` did: inner steps, mean training loss (NaN without numerics), samples."""

    num_steps: int
    loss: float
    num_samples: int


class Transfer(Protocol):
    """A message on its way."""

    async def delivered(self) -> None:
        """Wait until the receiver has the whole payload and has accepted it.

        Raises `LinkFailed`, `PayloadCorrupt` or `PeerLost` where it does not get there.
        """

    def cancel(self) -> None:
        """Give the transfer up; the payload is the sender's again at once."""


class Context(Protocol):
    """One worker's view of the world."""

    @property
    def worker(self) -> int:
        """My index, 0 .. num_workers - 1; it stays mine when I crash and return."""

    @property
    def num_workers(self) -> int:
        """Number of workers that the run was planned for (those away included)."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds that the run will do."""

    @property
    def seed(self) -> int:
        """The run's seed, the same on every worker."""

    @property
    def deadline(self) -> float:
        """Seconds after which an awaited message counts as lost (the one user-facing deadline)."""

    @property
    def replica(self) -> Replica:
        """This worker's copy of the model: flat parameters [P], buffers, inner optimizer."""

    def scratch(self) -> Tensor:
        """Memory for a vector [P] of the parameters' type, with anything in it.

        The same at every call, and the method's until the worker trains next or takes a gradient:
        a process that trains one replica lends the memory of its gradient, so that an outer
        gradient takes none of its own.
        """

    def now(self) -> float:
        """Seconds; the only clock there is."""

    def rng(self, name: str) -> torch.Generator:
        """A fresh stream derived from run seed, worker, round and name, never from call order."""

    def rounds(self, state: MethodState) -> AsyncIterator[Round]:
        """The rounds still to do. Each boundary is where a run is saved, measured and joined.

        Counts `state.rounds_completed` up after each pass of the loop body.
        """

    def refresh_members(self, round_: Round) -> Round:
        """The same round with the newest view of who is alive; for retries after a loss."""

    def send(self, dst: int, tag: Tag, payload: Tensor, *, exact: bool = False) -> Transfer:
        """Start a transfer; does not wait.

        Args:
            dst: receiving worker.
            tag: equal to the receiver's.
            payload: contiguous tensor of any dtype; not written to until delivered.
            exact: charge the payload's own bytes even where the recipe's `timing` makes a small
                model stand for a large one (control messages, predictions, buffers).
        """

    async def recv(self, src: int, tag: Tag, *, timeout: float | None = None) -> Tensor:
        """One message. `timeout` in seconds, default `deadline`.

        Raises `LinkFailed`, `PayloadCorrupt`, `PeerLost`, `TimedOut`, or `OutOfSync` where the
        sender has gone on to a later round or step and will never send it.
        """

    async def train(self, num_steps: int) -> TrainReport:
        """Do inner steps on `replica`. Other tasks of this worker make progress meanwhile.

        Raises `NonFiniteError` where the loss or a parameter stops being finite.
        """

    async def gradient(self) -> Tensor:
        """The gradient on the next training batch, flat [P]; valid until the next training call.

        Takes the time of one inner step, as `apply_gradient` is charged nothing.
        """

    def apply_gradient(self, gradient: Tensor) -> None:
        """One inner-optimizer step on `replica` with `gradient` [P]; counts as an inner step."""

    async def gradients(self, points: Sequence[Tensor], num_batches: int = 1) -> list[Tensor]:
        """Mean gradient at each of `points` over the next training batches, each loaded once.

        For methods that take their gradients where they like and make their steps themselves:
        `replica.parameters` is neither read nor written, so another task may mix it meanwhile.
        Counts as `num_batches` inner steps (place in the data, samples) and takes the time of
        `num_batches` x `len(points)` of them. `replica.learning_rate` is then the recipe's for the
        last of them. The loss that is reported is the first point's.

        Args:
            points: one or more vectors [P], read at the call; what is written to them while the
                gradients are computed has no effect.
            num_batches: at least 1; the gradients are means over so many batches.

        Every point sees the same samples, the same random numbers (dropout) and the model's buffers
        as they were before the batch. Batch normalisation uses the batch's own statistics at every
        point, and its running ones take in the first point's forward pass only.

        Returns:
            Fresh tensors [P], in the order of `points`.

        Raises:
            NonFiniteError: a loss or a gradient is not finite.
            ConfigError: a point is no [P]; or the training loop is the user's own (`gm.join`).
        """

    async def predict(self) -> Tensor:
        """Log-probabilities of my model on the run's fixed probe batch, fp32 [positions, classes].

        Charged as a forward pass.
        """

    def task_group(self) -> TaskGroup:
        """`async with ctx.task_group() as tasks: handle = tasks.start(coroutine)`; all joined."""

    async def checkpoint(self, state: MethodState) -> None:
        """Publish `state`: for checkpoints, donors and measurements. `rounds` calls it."""

    def record(self, name: str, value: float) -> None:
        """A metric of this worker in this round."""
