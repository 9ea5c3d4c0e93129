"""A model's buffers as two flat vectors: floats, and integers (counters, flags)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError

_ADVICE = "a buffer that workers agree on keeps its shape and type (others: `persistent=False`)"


@dataclass(frozen=True, eq=False)
class BufferLayout:
    """The persistent buffers of a model, in its own order; empty ones take no room.

    Complex ones are pairs of floats, and bool ones are integers. Buffers that are not in the state
    dict (caches such as rotary tables) belong to the module and are left alone: all replicas see
    the same ones, so nothing that training changes may be kept in them.

    Args:
        floats, integers: the module's own tensors by name.
    """

    floats: dict[str, Tensor]
    integers: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> BufferLayout:
        persistent = set(model.state_dict())
        floats: dict[str, Tensor] = {}
        integers: dict[str, Tensor] = {}
        for name, buffer in model.named_buffers():
            if name in persistent:
                is_float = buffer.is_floating_point() or buffer.is_complex()
                (floats if is_float else integers)[name] = buffer
        return cls(floats, integers)

    @property
    def num_floats(self) -> int:
        return sum(_real(buffer).numel() for buffer in self.floats.values())

    @property
    def num_integers(self) -> int:
        return sum(buffer.numel() for buffer in self.integers.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of the vector of floats: fp32, or fp64 where a buffer is."""
        wide = any(_real(buffer).dtype is torch.float64 for buffer in self.floats.values())
        return torch.float64 if wide else torch.float32

    def store(self, model: nn.Module, floats: Tensor, integers: Tensor) -> None:
        """Copy the model's buffers into the flat vectors.

        Raises `ConfigError` where the model has replaced a buffer by one of another shape or type.
        """
        for name, own, piece in self._pieces(floats, integers):
            piece.copy_(_real(_current(model, name, own)))

    def load(self, model: nn.Module, floats: Tensor, integers: Tensor) -> None:
        """Copy the flat vectors into the model's buffers."""
        for name, own, piece in self._pieces(floats, integers):
            module, leaf = _place(model, name)
            if getattr(module, leaf, None) is not own:
                # What the model has put there may be somebody else's, such as a batch: it gets its
                # own tensor back, instead of having that one overwritten.
                setattr(module, leaf, own)
            _real(own).copy_(piece)

    def _pieces(self, floats: Tensor, integers: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Each buffer's name, the module's own tensor, and its place in a flat vector."""
        for buffers, flat in ((self.floats, floats), (self.integers, integers)):
            start = 0
            for name, own in buffers.items():
                shape = _real(own).shape
                stop = start + shape.numel()
                yield name, own, flat[start:stop].view(shape)
                start = stop


def _real(buffer: Tensor) -> Tensor:
    """The buffer without its graph; a complex one as pairs of floats, [..., 2]."""
    buffer = buffer.detach()
    return torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a buffer, and what it is called there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _current(model: nn.Module, name: str, own: Tensor) -> Tensor:
    """What the model has as its buffer `name` now."""
    module, leaf = _place(model, name)
    current: object = getattr(module, leaf, None)
    if not isinstance(current, Tensor):
        raise ConfigError(f"the model has removed its buffer {name!r}; {_ADVICE}")
    if current.shape != own.shape or current.dtype is not own.dtype:
        raise ConfigError(
            f"the model has replaced its buffer {name!r}, {own.dtype} of shape {list(own.shape)}, "
            f"by {current.dtype} of shape {list(current.shape)}; {_ADVICE}"
        )
    return current
