"""How a running worker hands its state to one that joins, over the network like everything else.

The donor sends a header (what follows, counters, a digest), then each tensor. The joiner checks the
header against its own model before it takes anything, and the digest before it uses anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer.comm.collectives import recv_until_delivered, send_until_delivered
from gossamer.comm.context import Context, MethodState, Tag
from gossamer.comm.state import state_scalars, state_tensors, with_tensors
from gossamer.errors import ConfigError, OutOfSync, PayloadCorrupt
from gossamer.training.replica import Replica

STATE_KINDS = ("join", "start")
"""Kinds of messages that hand a state over, which no membership of a round is part of."""

Moments = Literal["donor", "reset", "keep"]
"""Whose inner moments a joiner goes on with: the donor's, none, or those it had itself."""


@dataclass(frozen=True)
class Donation:
    """A donor's state at a round boundary, in tensors of its own."""

    header: dict[str, Any]
    tensors: list[Tensor]


def pack(replica: Replica, state: MethodState, moments: Moments) -> Donation:
    """Copy what a joiner needs: replica, method state, and inner moments where it takes them."""
    named = {
        "parameters": replica.parameters,
        "buffers": replica.buffers,
        "counters": replica.counters,
        **{f"state.{name}": tensor for name, tensor in state_tensors(state).items()},
    }
    if moments == "donor" and replica.optimizer is not None:
        own = replica.optimizer.state_tensors()
        named |= {f"moments.{name}": tensor for name, tensor in own.items()}
    tensors = [tensor.detach().clone() for tensor in named.values()]
    header = {
        "tensors": list(named),
        "shapes": [list(tensor.shape) for tensor in tensors],
        "state": state_scalars(state),
        "steps_completed": replica.steps_completed,
        "learning_rate": replica.learning_rate,
        "digest": digest(tensors),
    }
    return Donation(header, tensors)


async def donate(ctx: Context, joiner: int, tag: Tag, donation: Donation) -> bool:
    """Send a donation; whether the joiner has all of it."""
    text = json.dumps(donation.header).encode()
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if not await send_until_delivered(ctx, joiner, tag, head, exact=True):
        return False
    for part, tensor in enumerate(donation.tensors, start=1):
        small = tensor.numel() < ctx.replica.layout.numel  # stands for nothing larger
        part_tag = tag._replace(part=part)
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

    Args:
        blank: a state of the method's own type; its tensors say what is expected.
        patience_s: how long the donor may take to begin, by default the deadline.

    Raises `PayloadCorrupt` where the donor's model is another or its tensors do not have the digest
    that it announced; the replica is then as it was.
    """
    head = await recv_until_delivered(ctx, donor, tag, timeout=patience_s)
    if head is None:
        return None
    header = json.loads(bytes(head.tolist()).decode())
    received: list[Tensor] = []
    for part in range(1, len(header["tensors"]) + 1):
        tensor = await recv_until_delivered(ctx, donor, tag._replace(part=part))
        if tensor is None:
            return None
        received.append(tensor)
    _check(ctx.replica, blank, header, received, donor)
    named = dict(zip(header["tensors"], received, strict=True))
    _fill(ctx.replica, header, named, moments)
    return with_tensors(type(blank), _below("state.", named), header["state"])


def _below(prefix: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}


def _check(
    replica: Replica,
    blank: MethodState,
    header: dict[str, Any],
    received: Sequence[Tensor],
    donor: int,
) -> None:
    own = {
        "parameters": replica.parameters,
        "buffers": replica.buffers,
        "counters": replica.counters,
        **{f"state.{name}": tensor for name, tensor in state_tensors(blank).items()},
    }
    shapes = dict(zip(header["tensors"], received, strict=True))
    for name, tensor in own.items():
        if name not in shapes or shapes[name].shape != tensor.shape:
            raise PayloadCorrupt(f"worker {donor} has another {name}: not of this model")
    if digest(received) != header["digest"]:
        raise PayloadCorrupt(f"the state of worker {donor} arrived with another digest")


def _fill(
    replica: Replica, header: dict[str, Any], named: dict[str, Tensor], moments: Moments
) -> None:
    replica.parameters.copy_(named["parameters"])
    replica.buffers.copy_(named["buffers"])
    replica.counters.copy_(named["counters"])
    replica.steps_completed = header["steps_completed"]
    replica.learning_rate = header["learning_rate"]
    if replica.optimizer is not None and moments != "keep":
        replica.optimizer.load_state_tensors(_below("moments.", named))


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
    if any(tensor.is_meta for tensor in tensors):
        return None
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()
