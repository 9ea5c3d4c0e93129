"""A model's buffers as two flat vectors: floats, and integers (counters, flags)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class BufferLayout:
    """The persistent buffers of a model, in its own order; empty ones take no room.

    Buffers that are not in the state dict (caches such as rotary tables) belong to the module and
    are left alone.
    """

    floats: tuple[str, ...]
    integers: tuple[str, ...]
    num_floats: int
    num_integers: int

    @classmethod
    def of(cls, model: nn.Module) -> BufferLayout:
        persistent = set(model.state_dict())
        floats: list[str] = []
        integers: list[str] = []
        sizes = [0, 0]
        for name, buffer in model.named_buffers():
            if name not in persistent:
                continue
            is_integer = not buffer.is_floating_point()
            (integers if is_integer else floats).append(name)
            sizes[is_integer] += buffer.numel()
        return cls(tuple(floats), tuple(integers), sizes[0], sizes[1])

    def store(self, model: nn.Module, floats: Tensor, integers: Tensor) -> None:
        """Copy the model's buffers into the flat vectors."""
        self._copy(model, self.floats, floats, into_model=False)
        self._copy(model, self.integers, integers, into_model=False)

    def load(self, model: nn.Module, floats: Tensor, integers: Tensor) -> None:
        """Copy the flat vectors into the model's buffers."""
        self._copy(model, self.floats, floats, into_model=True)
        self._copy(model, self.integers, integers, into_model=True)

    @staticmethod
    def _copy(model: nn.Module, names: tuple[str, ...], flat: Tensor, *, into_model: bool) -> None:
        start = 0
        with torch.no_grad():
            for name in names:
                buffer = model.get_buffer(name)
                piece = flat[start : start + buffer.numel()].view(buffer.shape)
                if into_model:
                    buffer.copy_(piece)
                else:
                    piece.copy_(buffer)
                start += buffer.numel()
