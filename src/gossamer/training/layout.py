"""Where each tensor lies in a replica's flat vector."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Slot:
    """One trainable tensor: name (its first, where tied), shape, offset in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    decay: bool  # weight decay applies (matrices), or not (vectors, scalars)
    aliases: tuple[str, ...] = ()  # its further names, where tied

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class ParameterLayout:
    """Name, shape and offset of each trainable tensor in the flat vector.

    Tied weights appear once, frozen ones not at all. Tensors with weight decay come first and those
    without follow, each in the model's own order, so that an optimizer group is one slice.
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """The layout of a model's trainable parameters.

        Raises `ConfigError` for a model with nothing to train, with complex weights, or with lazy
        ones, whose shapes are not known yet.
        """
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        names: dict[nn.Parameter, list[str]] = {parameter: [] for _, parameter in named}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in names:
                names[parameter].append(name)
        if not named:
            raise ConfigError("the model has no trainable parameters; nothing can be trained")
        slots: list[Slot] = []
        offset = 0
        for name, parameter in named:
            _check_parameter(name, parameter)
        for decay in (True, False):
            for name, parameter in named:
                if (parameter.ndim >= 2) is not decay:
                    continue
                shape, aliases = tuple(parameter.shape), tuple(names[parameter][1:])
                slot = Slot(name, shape, offset, parameter.dtype, decay, aliases)
                slots.append(slot)
                offset = slot.end
        if offset == 0:
            raise ConfigError(
                "the model's trainable parameters are all empty; nothing can be trained"
            )
        return cls(tuple(slots))

    @cached_property
    def numel(self) -> int:
        """P, the number of trainable parameters."""
        return self.slots[-1].end

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the flat vector: fp32, or fp64 where a tensor of the model is."""
        wide = any(slot.dtype is torch.float64 for slot in self.slots)
        return torch.float64 if wide else torch.float32

    @cached_property
    def num_decayed(self) -> int:
        """The flat vector's first elements, those with weight decay."""
        return max((slot.end for slot in self.slots if slot.decay), default=0)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each tensor by name, as a view of `flat` [P]."""
        return {s.name: flat[s.offset : s.end].view(s.shape) for s in self.slots}

    def select(self, patterns: Sequence[str]) -> tuple[slice, ...]:
        """The slices of the flat vector whose names match any of the globs, neighbours merged.

        A pattern also matches everything below a module: "layers.0" selects "layers.0.w.weight".
        A tied tensor has all of its names. Raises `ConfigError` for a pattern that matches nothing.
        """
        chosen: set[str] = set()
        for pattern in patterns:
            hits = [s.name for s in self.slots if _matches(s, pattern)]
            if not hits:
                hint = nearest(pattern, _modules(self.names))
                raise ConfigError(f"subset pattern {pattern!r} matches no tensor; {hint}")
            chosen.update(hits)
        return merge(slice(s.offset, s.end) for s in self.slots if s.name in chosen)

    def fingerprint(self) -> list[tuple[str, list[int], str]]:
        """What two replicas must agree on before they exchange anything."""
        return [(s.name, list(s.shape), str(s.dtype)) for s in self.slots]


def _modules(names: Iterable[str]) -> list[str]:
    """What a pattern most likely means: tensors and modules down to the second level."""
    paths = [name.split(".") for name in names]
    return sorted({".".join(path[:depth]) for path in paths for depth in (1, 2)})


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ConfigError(
            f"parameter {name!r} has no shape yet: run one batch through the model in the task's "
            f"`build`, or use a module that is not lazy"
        )
    if not parameter.is_floating_point():
        raise ConfigError(f"parameter {name!r} is {parameter.dtype}; floats expected")


def _matches(slot: Slot, pattern: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, glob)
        for name in (slot.name, *slot.aliases)
        for glob in (pattern, pattern + ".*")
    )


def merge(slices: Iterable[slice]) -> tuple[slice, ...]:
    """Neighbouring slices joined; input in ascending order."""
    merged: list[slice] = []
    for piece in slices:
        if merged and merged[-1].stop == piece.start:
            merged[-1] = slice(merged[-1].start, piece.stop)
        elif piece.stop > piece.start:
            merged.append(piece)
    return tuple(merged)


def gather(flat: Tensor, slices: Sequence[slice]) -> Tensor:
    """The selected elements of `flat`, contiguous, in a tensor of their own."""
    if flat.is_meta:  # nothing to copy, and torch works out shapes at length
        return flat.new_empty(sum(s.stop - s.start for s in slices))
    return torch.cat([flat[s] for s in slices]) if slices else flat.new_empty(0)


def scatter(flat: Tensor, slices: Sequence[slice], values: Tensor) -> None:
    """Write `values`, as `gather` gave them, back to their places in `flat`."""
    if flat.is_meta:
        return
    start = 0
    for piece in slices:
        stop = start + piece.stop - piece.start
        flat[piece].copy_(values[start:stop])
        start = stop
