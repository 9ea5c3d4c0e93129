"""What a codec is: a flat vector as bytes, and back, with a size that the length alone decides.

Codecs are pure and keep nothing. The same values give the same bytes, and the same bytes give the
same values, so whoever decodes a payload holds what everybody else holds who decodes it; who made
it decodes its own payload too, instead of using what went in.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gossamer.errors import EncodingError

LARGEST = 2.0**126
"""The largest magnitude that codecs with a scale take: their sums and products stay finite."""

SMALLEST = 2.0**-126
"""Below this, numbers lose digits; what a codec may lose there is added to its error bound."""


class Codec(Protocol):
    """A payload encoding. All vectors are flat and floating-point; payloads are uint8."""

    @property
    def name(self) -> str:
        """As recipes write it, such as "int4" or "topk:0.01"; `codec_of` reads it."""

    def num_bytes(self, numel: int) -> int:
        """Bytes of a payload of `numel` values."""

    def encode(self, values: Tensor) -> Tensor:
        """`values` [n] as a uint8 payload [num_bytes(n)], of its own; `values` are kept.

        On tensors without storage, a payload without storage. Raises `EncodingError` where a value
        is not finite, or larger than the encoding can hold.
        """

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of a payload to `out` [n].

        Raises `EncodingError` where the payload has another size than one of n values has.
        """

    def error_bound(self, values: Tensor) -> Tensor:
        """For each of `values` [n], the most by which what is decoded may differ from it."""


def check_encodable(values: Tensor, codec: Codec, largest: float) -> None:
    """Raise `EncodingError` unless `values` are a flat vector of finite numbers up to `largest`."""
    if values.ndim != 1 or not values.is_floating_point():
        raise EncodingError(
            f"{codec.name}: a flat vector of floats is encoded; got {values.dtype} of shape "
            f"{tuple(values.shape)}"
        )
    if values.is_meta or values.numel() == 0:
        return
    low, high = values.aminmax()  # NaN where one is
    extreme = float(torch.maximum(-low, high))
    if not extreme <= largest:
        what = "not finite" if extreme - extreme != 0 else f"of magnitude {extreme:g}"
        raise EncodingError(f"{codec.name}: holds numbers up to {largest:g}; one is {what}")


def check_payload(payload: Tensor, numel: int, codec: Codec) -> None:
    """Raise `EncodingError` unless `payload` has the shape of one of `numel` values."""
    wanted = codec.num_bytes(numel)
    if payload.dtype is not torch.uint8 or tuple(payload.shape) != (wanted,):
        raise EncodingError(
            f"{codec.name}: {wanted} bytes are {numel} values; got {payload.dtype} of shape "
            f"{tuple(payload.shape)}"
        )


def as_bytes(values: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [bytes]; a view."""
    return values.reshape(-1).view(torch.uint8)


def from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `as_bytes` gave, in a tensor of their own.

    A copy, because a part of a payload need not begin where a number of `dtype` may.
    """
    return payload.clone().view(dtype)
