"""How vectors are written on their way: as they are, or by a codec.

Averages that all members adopt (`comm.collectives`) use what a payload decodes to, at its sender
too, so that all hold the same bits. Mixes of which each worker keeps its own result (pairs,
neighbours, meetings) move by differences of decoded values: what one end of an edge adds the other
takes away, so the sum stays what it was, and what a codec cannot hold stays with its worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.codec import PLAIN, codec_of
from gossamer.codec.base import as_bytes, from_bytes
from gossamer.errors import EncodingError, PayloadCorrupt

_Piece = tuple[int, str]  # values, and the codec that they are written by


@dataclass(frozen=True, slots=True)
class Coding:
    """How one vector goes over the network; the same on all workers that it goes between.

    Args:
        codec: a codec's name, or "none": the vector goes as it is, and nothing below is used.
        parts: quantities of equal length that it holds, one behind the other. No block of a codec
            spans two of them, as one scale would not fit both.
        exact_tail: values at its end that go as they are.
        since: what all members hold, bit for bit [n]; differences to it are encoded. For averages
            of parameters, which a codec with few bits would else put on a coarse grid.
        residual: error feedback: what this worker's payloads have lost so far [n], zero at first.
            It is averaged with the values, and written to when an average is adopted. Over any
            number of averages, M times what was adopted and all residuals sum to what was given.
    """

    codec: str = PLAIN
    parts: int = 1
    exact_tail: int = 0
    since: Tensor | None = None
    residual: Tensor | None = None

    def of(self, values: Tensor) -> Written:
        """`values` [n] under this coding; a view of them."""
        if self.codec == PLAIN:
            return Written(values, values, None, None, ())
        source = values if self.since is None else values - self.since
        if self.residual is not None:
            source = source + self.residual
        length = (values.numel() - self.exact_tail) // self.parts
        pieces = [(length, self.codec)] * self.parts
        if self.exact_tail:
            pieces.append((self.exact_tail, PLAIN))
        return Written(values, source, self.since, self.residual, tuple(pieces))


AS_IS = Coding()
"""Nothing is encoded."""


def start_of(codec: str, *agreed: Tensor) -> Tensor | None:
    """Copies of vectors that all members hold, one behind the other, for `Coding.since`.

    None where nothing is encoded, and no memory is needed.
    """
    if codec == PLAIN:
        return None
    return torch.cat(agreed)


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a vector, and how it is written.

    Args:
        values: [n], overwritten by `adopt`.
        source: what is averaged: `values` themselves, or those less `since`, plus `residual`.
        since, residual: see `Coding`.
        pieces: how many values each codec encodes, in order; none: it goes as it is.
    """

    values: Tensor
    source: Tensor
    since: Tensor | None
    residual: Tensor | None
    pieces: tuple[_Piece, ...]

    def split(self, count: int) -> list[Written]:
        """`count` parts, as even as possible; views."""
        views = self.values.tensor_split(count)
        if not self.pieces:
            return [Written(view, view, None, None, ()) for view in views]
        spans = itertools.pairwise(itertools.accumulate((v.numel() for v in views), initial=0))
        return [
            Written(
                self.values[start:end],
                self.source[start:end],
                None if self.since is None else self.since[start:end],
                None if self.residual is None else self.residual[start:end],
                _cut(self.pieces, start, end),
            )
            for start, end in spans
        ]

    def encode(self, values: Tensor) -> Tensor:
        """`values` [n] as they are written here. Raises `EncodingError` where they cannot be."""
        if not self.pieces:
            return values
        parts = _cut_to(values, [size for size, _ in self.pieces])
        pairs = zip(parts, self.pieces, strict=True)
        payloads = [_encoded(part, codec) for part, (_, codec) in pairs]
        return payloads[0] if len(payloads) == 1 else torch.cat(payloads)

    def decode(self, payload: Tensor) -> Tensor:
        """The values [n] of a payload. Raises `PayloadCorrupt` where it is none of n values."""
        if not self.pieces:
            return payload
        sizes = [_num_bytes(piece, self.values) for piece in self.pieces]
        if payload.dtype is not torch.uint8 or tuple(payload.shape) != (sum(sizes),):
            raise PayloadCorrupt(
                f"{sum(sizes)} bytes are {self.values.numel()} values here; got {payload.dtype} "
                f"of shape {tuple(payload.shape)}"
            )
        values = torch.empty_like(self.values)
        outs = _cut_to(values, [size for size, _ in self.pieces])
        parts = zip(_cut_to(payload, sizes), outs, self.pieces, strict=True)
        try:
            for part, out, (_, codec) in parts:
                _decode(part, out, codec)
        except EncodingError as error:
            raise PayloadCorrupt(str(error)) from None
        return values

    def adopt(self, result: Tensor, sent: Tensor) -> None:
        """Write a decoded average of sources to `values`; `sent` is my payload that is in it."""
        if self.residual is not None:
            torch.sub(self.source, self.decode(sent), out=self.residual)
        self._take(result)

    def adopt_own(self, mean: Tensor, result: Tensor, num_workers: int) -> None:
        """The same where I made the average: `mean` [n] of so many, and what it was decoded to."""
        if self.residual is not None:
            torch.sub(mean, result, out=self.residual).mul_(num_workers)
        self._take(result)

    def _take(self, result: Tensor) -> None:
        if self.since is None:
            self.values.copy_(result)
        else:
            torch.add(self.since, result, out=self.values)

    def onto(self, place: Tensor) -> Written:
        """The same with its values in `place` [n], which is written to instead of them."""
        place.copy_(self.values)
        return replace(self, values=place)

    def write_to(self, parts: Sequence[Written]) -> None:
        """Give these parts what has become of the copies that `joined` made of them."""
        sizes = [part.values.numel() for part in parts]
        for part, values in zip(parts, _cut_to(self.values, sizes), strict=True):
            part.values.copy_(values)
        if self.residual is not None:
            for part, residual in zip(parts, _cut_to(self.residual, sizes), strict=True):
                assert part.residual is not None
                part.residual.copy_(residual)


def joined(parts: Sequence[Written]) -> Written:
    """Parts one behind the other, in copies."""
    values = torch.cat([part.values for part in parts])
    if not parts[0].pieces:
        return Written(values, values, None, None, ())
    since = [part.since for part in parts if part.since is not None]
    residual = [part.residual for part in parts if part.residual is not None]
    return Written(
        values,
        torch.cat([part.source for part in parts]),
        torch.cat(since) if since else None,
        torch.cat(residual) if residual else None,
        tuple(piece for part in parts for piece in part.pieces),
    )


class Shown:
    """What a worker shows of its values to those with whom it mixes, and how theirs look to it.

    Args:
        values: [n]; kept, and not written to while in use.
        payload: what to send.
        decoded: the values as all see them.

    Raises `EncodingError` where the values cannot be encoded.
    """

    def __init__(self, values: Tensor, coding: Coding) -> None:
        self._written = coding.of(values)
        self.payload = self._written.encode(values)
        self.decoded = self._written.decode(self.payload)

    def decode(self, payload: Tensor) -> Tensor:
        """A peer's values [n] as all see them. Raises `PayloadCorrupt`."""
        return self._written.decode(payload)

    def kept(self) -> Tensor | None:
        """What the payload could not hold [n]; None where nothing is encoded."""
        return self._written.values - self.decoded if self._written.pieces else None

    def of_peer(self, payload: Tensor) -> Tensor:
        """A peer's values as they look from here: mine, and the difference that payloads tell of.

        The payload itself where it is not encoded. The difference is the same at both ends, with
        the other sign, and none where the values are equal. Raises `PayloadCorrupt`.
        """
        theirs = self.decode(payload)
        if self._written.pieces and not theirs.is_meta:
            theirs.sub_(self.decoded).add_(self._written.values)
        return theirs


def _cut_to(vector: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of these lengths, in order."""
    return vector.tensor_split(list(itertools.accumulate(sizes))[:-1])


def _cut(pieces: Sequence[_Piece], start: int, end: int) -> tuple[_Piece, ...]:
    """What of `pieces` lies in [start, end); an empty one where nothing does."""
    cut, begin = [], 0
    for size, codec in pieces:
        inside = min(begin + size, end) - max(begin, start)
        if inside > 0:
            cut.append((inside, codec))
        begin += size
    return tuple(cut) or ((0, pieces[0][1]),)


def _num_bytes(piece: _Piece, like: Tensor) -> int:
    size, codec = piece
    return size * like.element_size() if codec == PLAIN else codec_of(codec).num_bytes(size)


def _encoded(values: Tensor, codec: str) -> Tensor:
    if codec != PLAIN:
        return codec_of(codec).encode(values)
    return as_bytes(values.contiguous()).clone()


def _decode(payload: Tensor, out: Tensor, codec: str) -> None:
    if codec != PLAIN:
        codec_of(codec).decode(payload, out)
    elif not out.is_meta:
        out.copy_(from_bytes(payload, out.dtype))
