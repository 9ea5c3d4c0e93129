"""Values rounded one by one to a floating-point format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codec.base import as_bytes, check_encodable, check_payload, from_bytes

_UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_TINY = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


@dataclass(frozen=True)
class FloatCodec:
    """fp32, bf16 or fp16, to nearest, ties to even. fp32 values in fp32 come back bit for bit.

    Source: IEEE 754, and its upper half, bfloat16.
    """

    name: str
    dtype: torch.dtype

    def num_bytes(self, numel: int) -> int:
        """Two or four a value."""
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        check_encodable(values, self, torch.finfo(self.dtype).max)
        if values.is_meta:
            return values.new_empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        return as_bytes(values.to(self.dtype, copy=True).contiguous())

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """See `Codec`."""
        check_payload(payload, out.numel(), self)
        if not out.is_meta:
            out.copy_(from_bytes(payload, self.dtype))

    def error_bound(self, values: Tensor) -> Tensor:
        """Half a unit in the last place: 2^-24, 2^-8 or 2^-11 of the value; 0 for fp32 of fp32."""
        if values.dtype is self.dtype:
            return torch.zeros_like(values)
        return (values.abs() * _UNIT_ROUNDOFF[self.dtype]).clamp_min(_TINY[self.dtype])
