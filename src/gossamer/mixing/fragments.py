"""Cutting a model into fragments that are synchronised at different steps.

Which tensors are agreed on together is a matter of mixing, as a subset of tensors is; it lies here
because it needs nothing of a model beside its layout. Every tensor is in exactly one fragment, and
none is cut, so that rules which treat a tensor as a whole can be applied to a fragment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from gossamer.errors import ConfigError
from gossamer.measure.blocks import blocks_of
from gossamer.training.layout import ParameterLayout, Slot, merge

Scheme = Literal["balanced", "layer", "strided"]


@dataclass(frozen=True)
class Fragment:
    """Some tensors of the flat vector, in its order.

    Args:
        index: 0-based.
        names: of its tensors.
        slices: of the flat vector [P]; `gather` and `scatter` read and write them.
        tensors: where each tensor lies in the fragment's own vector [numel].
    """

    index: int
    names: tuple[str, ...]
    slices: tuple[slice, ...]
    tensors: tuple[slice, ...]

    @property
    def numel(self) -> int:
        """Values in the fragment."""
        return self.tensors[-1].stop if self.tensors else 0

    def matches(self, patterns: Sequence[str]) -> list[bool]:
        """For each tensor, whether its name matches any of the globs."""
        return [any(fnmatchcase(name, glob) for glob in patterns) for name in self.names]


def fragments_of(
    layout: ParameterLayout, count: int, *, scheme: Scheme = "balanced", own: Sequence[str] = ()
) -> tuple[Fragment, ...]:
    """A partition of a model's tensors into `count` fragments, none of them empty.

    Args:
        layout: of the flat vector.
        count: P.
        scheme: "balanced" packs tensor by tensor, the largest first into the lightest fragment so
            far, equal ones by name: the heaviest fragment is at most 4/3 - 1/(3P) of the best
            possible (R. Graham, 1969). "layer" gives each fragment neighbouring layers; "strided"
            layer l to fragment l mod P.
        own: globs of tensors that are the first fragment, alone; none: they are as all others.

    Raises `ConfigError` where there are fewer tensors or layers than fragments.
    """
    if count < 1:
        raise ConfigError(f"fragments: at least 1 is needed; got {count}")
    apart = _selected(layout, own)
    rest = [slot for slot in layout.slots if slot not in apart]
    groups = [apart] if apart else []
    left = count - len(groups)
    if left == 0 and not rest:
        return (_fragment(0, apart),)
    units = [[slot] for slot in rest] if scheme == "balanced" else _layers(layout, rest)
    if left < 1 or len(units) < left:
        what = "tensors" if scheme == "balanced" else "layers"
        most = len(units) + len(groups)
        raise ConfigError(
            f"fragments: {count} do not fit; the model has {len(units)} {what}"
            f"{' beside those apart' if groups else ''}, so from {len(groups) + 1} to {most}"
        )
    if scheme == "balanced":
        groups += _packed(rest, left)
    else:
        split: list[list[Slot]] = [[] for _ in range(left)]
        for place, unit in enumerate(units):
            where = place % left if scheme == "strided" else place * left // len(units)
            split[where] += unit
        groups += split
    return tuple(_fragment(index, group) for index, group in enumerate(groups))


def most_fragments(
    layout: ParameterLayout, *, scheme: Scheme = "balanced", own: Sequence[str] = ()
) -> int:
    """The largest `count` that `fragments_of` takes."""
    apart = _selected(layout, own)
    rest = [slot for slot in layout.slots if slot not in apart]
    units = len(rest) if scheme == "balanced" else len(_layers(layout, rest))
    return units + bool(apart)


def _selected(layout: ParameterLayout, patterns: Sequence[str]) -> list[Slot]:
    if not patterns:
        return []
    chosen = layout.select(patterns)
    return [s for s in layout.slots if any(c.start <= s.offset and s.end <= c.stop for c in chosen)]


def _layers(layout: ParameterLayout, slots: Sequence[Slot]) -> list[list[Slot]]:
    """The blocks of the model (embedding, each layer, norm, head), as far as `slots` has them."""
    blocks = []
    for block in blocks_of(layout):
        mine = [
            s for s in slots if any(b.start <= s.offset and s.end <= b.stop for b in block.slices)
        ]
        if mine:
            blocks.append(mine)
    return blocks


def _packed(slots: Sequence[Slot], count: int) -> list[list[Slot]]:
    """Longest processing time first."""
    groups: list[list[Slot]] = [[] for _ in range(count)]
    loads = [0] * count
    for slot in sorted(slots, key=lambda s: (-s.numel, s.name)):
        # Empty tensors must not leave a fragment without any: the emptier of equal ones first.
        lightest = min(range(count), key=lambda g: (loads[g], len(groups[g]), g))
        groups[lightest].append(slot)
        loads[lightest] += slot.numel
    return groups


def _fragment(index: int, slots: Sequence[Slot]) -> Fragment:
    ordered = sorted(slots, key=lambda s: s.offset)
    starts = [0]
    for slot in ordered:
        starts.append(starts[-1] + slot.numel)
    return Fragment(
        index=index,
        names=tuple(slot.name for slot in ordered),
        slices=merge(slice(slot.offset, slot.end) for slot in ordered),
        tensors=tuple(slice(a, b) for a, b in itertools.pairwise(starts)),
    )
