"""How a running worker hands its state to one that joins, over the network like everything else.

The donor sends a header (what follows, counters, a digest), then each tensor. The joiner checks the
header against its own model before it takes anything, and the digest before it goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer.comm.context import Context, MethodState, Tag
from gossamer.comm.delivery import recv_until_delivered, send_until_delivered
from gossamer.comm.state import shared_tensors, state_scalars, state_tensors, with_tensors
from gossamer.errors import ConfigError, OutOfSync, PayloadCorrupt
from gossamer.training.replica import Replica

STATE_KINDS = ("join", "start")
"""Kinds of messages that hand a state over, which no membership of a round is part of."""

Moments = Literal["donor", "reset", "keep"]
"""Whose inner moments a joiner goes on with: the donor's, none, or those it had itself."""


@dataclass(frozen=True)
class Donation:
    """A donor's state at a round boundary: a header, and what makes each tensor when it is due."""

    header: dict[str, Any]
    parts: Sequence[Callable[[], Tensor]]


def donated(replica: Replica, state: MethodState, moments: Moments) -> dict[str, Tensor]:
    """What a joiner needs, in order: replica, method state, and moments where it takes them.

    Not copies.
    """
    named = _owned(replica, state)
    if moments == "donor" and replica.optimizer is not None:
        own = replica.optimizer.state_tensors()
        named |= {f"moments.{name}": tensor for name, tensor in own.items()}
    return named


def header_of(replica: Replica, state: MethodState, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a joiner is told before the tensors come."""
    return {
        "tensors": list(named),
        "shapes": [list(tensor.shape) for tensor in named.values()],
        "state": state_scalars(state),
        "steps_completed": replica.steps_completed,
        "learning_rate": replica.learning_rate,
        "digest": digest(list(named.values())),
    }


def pack(replica: Replica, state: MethodState, moments: Moments) -> Donation:
    """The state of this moment, in copies."""
    named = donated(replica, state, moments)
    copies = [tensor.detach().clone() for tensor in named.values()]
    parts = [lambda copy=copy: copy for copy in copies]
    return Donation(header_of(replica, state, named), parts)


async def donate(ctx: Context, joiner: int, tag: Tag, donation: Donation) -> bool:
    """Send a donation; whether the joiner has all of it."""
    text = json.dumps(donation.header).encode()
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if not await send_until_delivered(ctx, joiner, tag, head, exact=True):
        return False
    for number, part in enumerate(donation.parts, start=1):
        tensor = part()
        small = tensor.numel() < ctx.replica.layout.numel  # stands for nothing larger
        part_tag = tag._replace(part=number)
        if not await send_until_delivered(ctx, joiner, part_tag, tensor, exact=small):
            return False
    return True


async def accept(
    ctx: Context,
    donor: int,
    tag: Tag,
    blank: MethodState,
    moments: Moments,
    *,
    patience_s: float | None = None,
) -> MethodState | None:
    """Take a donation into `ctx.replica`; the state to go on from, or None where it did not come.

    Each tensor goes to its place when it comes, so that one at a time is held besides. After a
    donation that did not come whole the replica must take another.

    Args:
        blank: a state of the method's own type, as it is before the first round; its tensors say
            what is expected, and are used.
        patience_s: how long the donor may take to begin, by default the deadline.

    Raises `PayloadCorrupt` where the donor's model is another, before anything is written, or its
    tensors do not have the digest that it announced.
    """
    head = await recv_until_delivered(ctx, donor, tag, timeout=patience_s)
    if head is None:
        return None
    header = json.loads(bytes(head.tolist()).decode())
    replica, places = ctx.replica, _owned(ctx.replica, blank)
    _check(places, header, donor)
    hasher = _Hasher()
    others: dict[str, Tensor] = {}
    shaped = zip(header["tensors"], header["shapes"], strict=True)
    for number, (name, shape) in enumerate(shaped, start=1):
        tensor = await recv_until_delivered(ctx, donor, tag._replace(part=number))
        if tensor is None:
            return None
        place = places.get(name)
        if list(tensor.shape) != shape or (place is not None and place.dtype != tensor.dtype):
            raise PayloadCorrupt(f"worker {donor} sent another {name} than it had said")
        hasher.add(tensor)
        if place is None:
            others[name] = tensor
        else:
            place.copy_(tensor)
    if hasher.digest() != header["digest"]:
        raise PayloadCorrupt(f"the state of worker {donor} arrived with another digest")
    replica.steps_completed = header["steps_completed"]
    replica.learning_rate = header["learning_rate"]
    if replica.optimizer is not None and moments != "keep":
        replica.optimizer.load_state_tensors(_below("moments.", others), copy=False)
    tensors = state_tensors(blank) | _below("state.", others)
    return with_tensors(type(blank), tensors, header["state"])


def _owned(replica: Replica, state: MethodState) -> dict[str, Tensor]:
    """The tensors that every worker has places for."""
    return {
        "parameters": replica.parameters,
        "buffers": replica.buffers,
        "counters": replica.counters,
        **{f"state.{name}": tensor for name, tensor in shared_tensors(state).items()},
    }


def _below(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}


def _check(places: Mapping[str, Tensor], header: dict[str, Any], donor: int) -> None:
    shapes = dict(zip(header["tensors"], header["shapes"], strict=True))
    for name, place in places.items():
        if shapes.get(name) != list(place.shape):
            raise PayloadCorrupt(f"worker {donor} has another {name}: not of this model")


async def share_start(ctx: Context, workers: Sequence[int]) -> None:
    """Give all `workers` of the first round the first one's parameters and buffers.

    For models that are built by programs which Gossamer does not see. Raises `OutOfSync` where
    nothing comes, and `ConfigError` where the models differ in size.
    """
    replica, first = ctx.replica, workers[0]
    tensors = [t for t in (replica.parameters, replica.buffers, replica.counters) if t.numel()]
    for part, tensor in enumerate(tensors):
        tag = Tag("start", 0, part=part)
        if ctx.worker == first:
            payload = tensor.detach().clone()
            async with ctx.task_group() as tasks:
                for peer in workers[1:]:
                    tasks.start(send_until_delivered(ctx, peer, tag, payload, exact=False))
            continue
        received = await recv_until_delivered(ctx, first, tag)
        if received is None:
            raise OutOfSync(f"the start that all have in common did not come from worker {first}")
        if received.shape != tensor.shape or received.dtype != tensor.dtype:
            raise ConfigError(
                f"worker {first} has a model with {received.numel()} values of {received.dtype} "
                f"where this one has {tensor.numel()} of {tensor.dtype}; all build the same model"
            )
        tensor.copy_(received)


def digest(tensors: Sequence[Tensor]) -> str | None:
    """blake2b over all bits, 32 hex digits; None for tensors without storage."""
    hasher = _Hasher()
    for tensor in tensors:
        hasher.add(tensor)
    return hasher.digest()


class _Hasher:
    """The digest of tensors that come one by one."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=16)
        self._known = True

    def add(self, tensor: Tensor) -> None:
        """The next one."""
        if tensor.is_meta:
            self._known = False
            return
        flat = tensor.detach().contiguous().reshape(-1)
        self._hasher.update(flat.view(torch.uint8).numpy().data)

    def digest(self) -> str | None:
        """Of all so far; None where one was without storage."""
        return self._hasher.hexdigest() if self._known else None
