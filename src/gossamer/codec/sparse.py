"""The largest values alone, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codec.base import LARGEST, as_bytes, check_encodable, check_payload, from_bytes
from gossamer.errors import EncodingError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class TopKCodec:
    """The `share` of values that are largest in magnitude, exactly; the others are decoded as 0.

    Places come first, ascending, in four bytes (eight where the vector is longer than 2^31 - 1),
    then fp32 values. Of equal magnitudes the first places are kept. What is left out is meant to be
    sent later: see `encode_with_feedback`.

    Source: S. Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599.
    """

    name: str
    share: float

    def num_kept(self, numel: int) -> int:
        """At least one of a vector that is not empty."""
        return min(numel, max(1, math.ceil(self.share * numel)))

    def num_bytes(self, numel: int) -> int:
        """8 a value that is kept."""
        return self.num_kept(numel) * (self._place_dtype(numel).itemsize + 4)

    @staticmethod
    def _place_dtype(numel: int) -> torch.dtype:
        return torch.int32 if numel <= _INT32_MAX else torch.int64

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        check_encodable(values, self, LARGEST)
        numel = values.numel()
        if values.is_meta or numel == 0:
            return values.new_empty(self.num_bytes(numel), dtype=torch.uint8)
        places = self._places(values.abs())
        kept = values[places].to(torch.float32)
        return torch.cat([as_bytes(places.to(self._place_dtype(numel))), as_bytes(kept)])

    def _places(self, magnitudes: Tensor) -> Tensor:
        threshold = self._threshold(magnitudes)
        is_kept = magnitudes > threshold
        ties = torch.nonzero(magnitudes == threshold).reshape(-1)
        num_missing = self.num_kept(magnitudes.numel()) - int(is_kept.sum())
        is_kept[ties[:num_missing]] = True
        return torch.nonzero(is_kept).reshape(-1)

    def _threshold(self, magnitudes: Tensor) -> Tensor:
        """The smallest magnitude that is kept."""
        numel = magnitudes.numel()
        return magnitudes.kthvalue(numel - self.num_kept(numel) + 1).values

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """See `Codec`. Places that are not ascending, or beyond the end, are an `EncodingError`."""
        check_payload(payload, out.numel(), self)
        if out.is_meta or out.numel() == 0:
            return
        dtype = self._place_dtype(out.numel())
        split = self.num_kept(out.numel()) * dtype.itemsize
        places = from_bytes(payload[:split], dtype).long()
        inside = int(places[0]) >= 0 and int(places[-1]) < out.numel()
        if not inside or not bool((places.diff() > 0).all()):
            raise EncodingError(f"{self.name}: places in the payload are not ascending")
        out.zero_()
        out[places] = from_bytes(payload[split:], torch.float32).to(out.dtype)

    def error_bound(self, values: Tensor) -> Tensor:
        """0 for what is kept (in fp32), the value itself for what is not."""
        if values.numel() == 0:
            return torch.zeros_like(values)
        magnitudes = values.abs()
        is_kept = torch.zeros_like(values, dtype=torch.bool)
        is_kept[self._places(magnitudes)] = True
        rounded = torch.zeros_like(values)
        if values.dtype is torch.float64:
            rounded = (magnitudes * 2.0**-24).clamp_min(2.0**-150)
        return torch.where(is_kept, rounded, magnitudes)
