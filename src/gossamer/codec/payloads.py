"""Vectors as the payloads that a method sends: encoded by a codec's name, or as they are."""

from __future__ import annotations

from torch import Tensor

from gossamer.codec.registry import codec_of
from gossamer.codec.sparse import TopKCodec

PLAIN = "none"
"""The name for no codec: payloads are the vectors themselves, in their own dtype."""


def check_codec(name: str) -> None:
    """Raise `ConfigError` unless `name` is `PLAIN` or a codec's."""
    if name != PLAIN:
        codec_of(name)


def is_sparse(name: str) -> bool:
    """Whether values that are left out of a payload are decoded as 0."""
    return name != PLAIN and isinstance(codec_of(name), TopKCodec)


def encoded(values: Tensor, name: str) -> Tensor:
    """The payload of `values`; `values` themselves where there is no codec."""
    return values if name == PLAIN else codec_of(name).encode(values)


def decoded(payload: Tensor, name: str, *, numel: int, like: Tensor) -> Tensor:
    """The `numel` values of a payload, in the dtype and on the device of `like`."""
    if name == PLAIN:
        return payload
    values = like.new_empty(numel)
    codec_of(name).decode(payload, values)
    return values
