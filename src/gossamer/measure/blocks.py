"""Cutting any model into blocks: the embedding, each layer, the final norm, the head.

Only the tensors' names are looked at, so this works for every `torch.nn.Module`.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gossamer.errors import ConfigError
from gossamer.training.layout import ParameterLayout, Slot, merge


@dataclass(frozen=True, slots=True)
class Block:
    """Some tensors of a model that are mixed, or not, together."""

    name: str
    patterns: tuple[str, ...]  # globs; `layout.select(patterns)` gives `slices`
    slices: tuple[slice, ...]  # of the flat vector, ascending
    numel: int
    share: float  # of the model's parameters, in (0, 1]


def blocks_of(
    layout: ParameterLayout,
    *,
    depth: int = 1,
    granularity: Literal["block", "tensor"] = "block",
) -> tuple[Block, ...]:
    """The blocks of a model: disjoint, together all of it, in the order of their first tensors.

    A tensor's block is its path up to the first number (`layers.3.attention.wq.weight` is in
    `layers.3`). Without a number it is the first part of its path (`embedding`, `head`), or more
    where that part also holds numbered blocks or the whole model (`model.norm` beside
    `model.layers.3`), so that no block lies inside another.

    Args:
        layout: of the model's flat vector.
        depth: how many numbers of a path to go down to; 2 cuts `layers.3.experts.0`.
        granularity: "tensor" makes each tensor a block of its own.

    Raises `ConfigError` for a depth below 1 or another granularity.
    """
    if depth < 1:
        raise ConfigError(f"the depth of blocks must be at least 1; got {depth}")
    if granularity not in ("block", "tensor"):
        raise ConfigError(f"granularity must be 'block' or 'tensor'; got {granularity!r}")
    paths = [tuple(name.split(".")) for name in layout.names]
    heads = paths if granularity == "tensor" else _heads(paths, depth)
    grouped: dict[tuple[str, ...], list[Slot]] = {}
    for head, slot in zip(heads, layout.slots, strict=True):
        grouped.setdefault(head, []).append(slot)
    return tuple(_block(".".join(head), slots, layout) for head, slots in grouped.items())


def _block(name: str, slots: Sequence[Slot], layout: ParameterLayout) -> Block:
    numel = sum(slot.numel for slot in slots)
    slices = merge(slice(slot.offset, slot.end) for slot in slots)
    return Block(name, (glob.escape(name),), slices, numel, numel / layout.numel)


def _heads(paths: Sequence[tuple[str, ...]], depth: int) -> list[tuple[str, ...]]:
    """The block of each path. None is a proper prefix of another.

    For the first cuts end in a number, or are one part long; every proper prefix of a numbered cut
    is a container; and a cut that is a container is lengthened until it is none.
    """
    cuts: list[int] = []
    containers = _prefixes(_common_module(paths))
    for path in paths:
        numbers = [k + 1 for k, part in enumerate(path) if part.isdecimal()][:depth]
        cuts.append(numbers[-1] if numbers else 1)
        if numbers:
            containers |= _prefixes(path[: numbers[-1] - 1])
    heads = []
    for path, cut in zip(paths, cuts, strict=True):
        length = cut
        while path[:length] in containers and length < len(path):
            length += 1
        heads.append(path[:length])
    return heads


def _common_module(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest module path that all tensors share: a wrapper, which tells no blocks apart."""
    common = paths[0][:-1]
    for path in paths:
        while path[:-1][: len(common)] != common:
            common = common[:-1]
    return common


def _prefixes(path: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The path itself and all that it begins with, but the empty one."""
    return {path[:k] for k in range(1, len(path) + 1)}
