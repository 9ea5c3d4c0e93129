"""A method's state as named tensors and plain values: for checkpoints and for joiners."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

from torch import Tensor

from gossamer.comm.context import MethodState

S = TypeVar("S", bound=MethodState)

_OWN = "residual"  # of each worker alone: no donor gives it


def state_tensors(state: MethodState) -> dict[str, Tensor]:
    """The fields that are tensors, in order; not copies."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


def shared_tensors(state: MethodState) -> dict[str, Tensor]:
    """Those that a donor hands to a joiner."""
    return {name: tensor for name, tensor in state_tensors(state).items() if name != _OWN}


def state_scalars(state: MethodState) -> dict[str, Any]:
    """The fields that are plain values; copies, as the worker goes on before they are written."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != _OWN}
    plain = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
    return copy.deepcopy(plain)


def with_tensors(kind: type[S], tensors: dict[str, Tensor], scalars: dict[str, Any]) -> S:
    """A state of `kind` from what the two functions above gave."""
    fields: dict[str, Any] = {**tensors, **scalars}
    return kind(**fields)
