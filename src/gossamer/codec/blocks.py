"""Few bits a value, and a scale for each block: integers, and a 4-bit float.

A payload is all scales, then all codes; within a byte the first value has the lowest bits. Each
block is scaled by its largest magnitude, so that one outlier costs precision in its block only.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codec.base import (
    LARGEST,
    SMALLEST,
    as_bytes,
    check_encodable,
    check_payload,
    from_bytes,
)

_SLACK = 1 + 2.0**-18  # of error bounds: what rounding in fp32 adds


@dataclass(frozen=True)
class BlockCodec:
    """Codes of `bits` a value, with one scale for each `block` values.

    Args:
        name: as recipes write it.
        bits: 1, 2, 4 or 8.
        block: values that share a scale; a multiple of 8.
        scale_dtype: of the scales.
    """

    name: str
    bits: int
    block: int
    scale_dtype: torch.dtype

    @abstractmethod
    def scales_of(self, largest: Tensor) -> Tensor:
        """The scale, fp32, of blocks with these largest magnitudes; representable as it is kept."""

    @abstractmethod
    def codes_of(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Codes, uint8 below 2^bits, of `rows` [blocks, block] with `scales` [blocks, 1]."""

    @abstractmethod
    def levels(self) -> Tensor:
        """The value of each code at scale 1, fp32 [2^bits]."""

    def num_bytes(self, numel: int) -> int:
        """`bits` a value, rounded up to a byte at the end, and a scale a block."""
        num_blocks = -(-numel // self.block)
        return num_blocks * self.scale_dtype.itemsize + -(-numel * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        check_encodable(values, self, LARGEST)
        numel = values.numel()
        if values.is_meta or numel == 0:
            return values.new_empty(self.num_bytes(numel), dtype=torch.uint8)
        rows = self._rows(values)
        scales = self.scales_of(rows.abs().amax(dim=1, keepdim=True))
        codes = _packed(self.codes_of(rows, scales).reshape(-1), self.bits)
        kept = codes[: -(-numel * self.bits // 8)]
        return torch.cat([as_bytes(scales.to(self.scale_dtype)), kept])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """See `Codec`."""
        numel = out.numel()
        check_payload(payload, numel, self)
        if out.is_meta or numel == 0:
            return
        num_blocks = -(-numel // self.block)
        split = num_blocks * self.scale_dtype.itemsize
        scales = from_bytes(payload[:split], self.scale_dtype).float()
        codes = _unpacked(payload[split:], self.bits)[:numel]
        decoded = self.levels()[codes.int()]
        whole = numel - numel % self.block
        decoded[:whole].view(-1, self.block).mul_(scales[: whole // self.block, None])
        decoded[whole:].mul_(scales[-1])
        out.copy_(decoded)

    def error_bound(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        rows = self._rows(values)
        bound = self._bound(rows, self.scales_of(rows.abs().amax(dim=1, keepdim=True)))
        return bound.reshape(-1)[: values.numel()].mul(_SLACK).add(SMALLEST).to(values.dtype)

    @abstractmethod
    def _bound(self, rows: Tensor, scales: Tensor) -> Tensor:
        """The error bound by value, shape of `rows`, in exact arithmetic."""

    def _rows(self, values: Tensor) -> Tensor:
        """`values` as fp32 [blocks, block], the last row filled up with zeros."""
        missing = -values.numel() % self.block
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return padded.to(torch.float32).view(-1, self.block)


class IntegerCodec(BlockCodec):
    """Evenly spaced levels: -k .. k with 2k + 1 = 255 or 15; without a zero for 2 bits and 1 bit.

    A scale is the block's largest magnitude over the largest level, rounded up to bf16. Two bits
    are the levels -1, -1/3, 1/3, 1 of the largest magnitude, one bit is its sign: the papers that
    find these to fail do not publish how they encode them.
    """

    @property
    def _has_zero(self) -> bool:
        return self.bits > 2

    @property
    def _top(self) -> int:
        """The largest level, in units of the scale."""
        return (1 << (self.bits - 1)) - 1 if self._has_zero else (1 << self.bits) - 1

    def scales_of(self, largest: Tensor) -> Tensor:
        wanted = largest / self._top
        scales = wanted.to(torch.bfloat16)
        short = (scales.float() < wanted).to(torch.int16)  # the next bf16 up has the next bits
        return (scales.view(torch.int16) + short).view(torch.bfloat16).float()

    def codes_of(self, rows: Tensor, scales: Tensor) -> Tensor:
        units = torch.where(scales > 0, rows / scales, 0.0)
        if self._has_zero:  # two's complement, in the lowest bits
            nearest = units.round_().clamp_(-self._top, self._top).to(torch.int16)
            return (nearest & ((1 << self.bits) - 1)).to(torch.uint8)
        # Levels are odd: code c stands for 2 c - top. Zero has the code below it.
        codes = units.add_(self._top).mul_(0.5).add_(0.5).ceil_().sub_(1.0)
        return codes.clamp_(0, self._top).to(torch.uint8)

    def levels(self) -> Tensor:
        codes = torch.arange(1 << self.bits)
        if not self._has_zero:
            return (2 * codes - self._top).float()
        return torch.where(codes <= self._top, codes, codes - (1 << self.bits)).float()

    def _bound(self, rows: Tensor, scales: Tensor) -> Tensor:
        step = 0.5 if self._has_zero else 1.0
        return (scales * step).expand_as(rows)


class E3M0Codec(BlockCodec):
    """The 4-bit float E3M0: a sign and 7 powers of two, 2^-6 .. 1 of the block's largest magnitude.

    Level 0 is zero and level L is 2^(L - 7); each value takes the nearest. Scales are fp32: 4.125
    bits a value with blocks of 256.

    Source: Streaming DiLoCo (arXiv:2501.18512) names the format; blocks and levels are
    reconstructed from a public implementation.
    """

    def scales_of(self, largest: Tensor) -> Tensor:
        return largest

    def codes_of(self, rows: Tensor, scales: Tensor) -> Tensor:
        units = torch.where(scales > 0, rows / scales, 0.0)
        positive = self.levels()[:8]
        middles = (positive[:-1] + positive[1:]) / 2
        codes = torch.bucketize(units.abs(), middles, out_int32=True)
        return (codes | (torch.signbit(units).int() << 3)).to(torch.uint8)

    def levels(self) -> Tensor:
        positive = torch.cat([torch.zeros(1), torch.exp2(torch.arange(-6.0, 1.0))])
        return torch.cat([positive, -positive])

    def _bound(self, rows: Tensor, scales: Tensor) -> Tensor:
        return torch.maximum(rows.abs() / 3, scales * 2.0**-7)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [n], n a multiple of 8, as bytes."""
    if bits == 8:
        return codes
    groups = codes.view(-1, 8 // bits)
    packed = groups[:, 0].clone()
    for place in range(1, 8 // bits):
        packed |= groups[:, place] << (place * bits)
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """What `_packed` was given."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    places = [(packed >> (place * bits)) & mask for place in range(8 // bits)]
    return torch.stack(places, dim=1).reshape(-1)
