"""What workers say to each other, as bytes: a checked header, raw chunks, a checksum, and replies.

A message is one stream of frames from the sender:

    header      this module's fixed fields, at most 4 KiB, with a checksum of its own
    chunks      the tensor's memory, each at most 1 MiB, together exactly `num_bytes`; an empty one
                says that the sender lives and sends other messages before
    trailer     a CRC-32 of all chunks (on this side of TLS, which authenticates the bytes already,
                it guards against mistakes and memory, and is five times as fast as BLAKE2)

and of frames from the receiver: `go` with the offset to send from, `progress`, and at the end one
of `accepted` and `refused`. Nothing is unpickled, and nothing is allocated before every field of
the header has been checked. Numbers are big-endian.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from gossamer.comm.context import Tag
from gossamer.errors import LinkFailed

PROTOCOL_VERSION = 2
HEADER_BYTES_MAX = 4096
CHUNK_BYTES_MAX = 1 << 20
REASON_BYTES_MAX = 512
DIMENSIONS_MAX = 64  # as torch has it
NOTE_NUMBERS_MAX = 16
ID_BYTES = 16  # of a message, and of one life of a worker
_ELEMENTS_MAX = 1 << 48
NO_LIFE = bytes(ID_BYTES)
CODECS = ("raw",)

_MAGIC = b"GSSM"
_START = struct.Struct(">4sH")  # magic, version: the same in every version of the protocol
_FIXED = struct.Struct(">BBBIIqqqqqqqQ16s16s16s")
_CHECKSUM = struct.Struct(">I")
_TRAILER_MAGIC = b"GEND"
_EXACT, _RETRY, _LETTER = 1, 2, 4

DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.float64, 3: torch.float16, 4: torch.bfloat16,
    5: torch.uint8, 6: torch.int8, 7: torch.int16, 8: torch.int32, 9: torch.int64,
    10: torch.bool, 11: torch.complex64, 12: torch.complex128,
    13: torch.float8_e4m3fn, 14: torch.float8_e5m2,
    15: torch.uint16, 16: torch.uint32, 17: torch.uint64,
}  # fmt: skip
"""Numbers that stand for dtypes on the wire; a number once given is never given again."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Reason(Enum):
    """Why a message was not taken. The value is its number on the wire."""

    PROTOCOL = 1  # not this protocol, or another version
    MALFORMED = 2  # a field that makes no sense
    SIZE = 3  # lying length, absurd shape, more than may be sent
    RUN = 4  # of another run
    IDENTITY = 5  # the sender is not who its certificate says, or the receiver is not me
    REPLAY = 6  # was sent before
    TRUNCATED = 7  # the stream ended early
    SLOW = 8  # no header in time, or nothing moved
    CHECKSUM = 9  # arrived damaged
    NOT_FINITE = 10  # NaN or infinity
    LATE = 11  # given up here, or of an earlier round
    WITHDRAWN = 12  # the sender gave it up
    GONE = 13  # the receiver takes the sender for gone
    LIFE = 14  # meant for an earlier life of the receiver
    CROWDED = 15  # too many messages from this sender at once
    CLOSING = 16  # the receiver is shutting down


ORDINARY = frozenset({Reason.LATE, Reason.WITHDRAWN, Reason.GONE, Reason.LIFE, Reason.CLOSING})
"""Reasons that honest workers meet in a run where somebody fails: counted, not warned of."""


class Refused(LinkFailed):
    """A message or a frame that is not taken, and why."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Header:
    """All that is known of a message before its payload.

    Args:
        run_id: of the run; text of at most 64 bytes.
        sender, receiver: worker indices.
        tag: the message's tag.
        dtype, shape: of the payload.
        exact: whether the payload may hold any bit pattern.
        message_id: 16 random bytes; the same when the transport tries again.
        sender_life, receiver_life: 16 random bytes for each start of a worker's process; the
            receiver's is `NO_LIFE` until it has said it.
        retry: the transport tries again because the connection broke.
        codec: how the payload is written.
        note: of a letter (`gossamer.comm.letters`), at most 16 numbers of 64 bits; None: a message.
    """

    run_id: str
    sender: int
    receiver: int
    tag: Tag
    dtype: torch.dtype
    shape: tuple[int, ...]
    exact: bool
    message_id: bytes
    sender_life: bytes
    receiver_life: bytes = NO_LIFE
    retry: bool = False
    codec: str = "raw"
    note: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack_header(header: Header) -> bytes:
    """The header frame. Raises `ValueError` where a field does not fit its place."""
    if header.dtype not in _CODES:
        raise ValueError(f"tensors of {header.dtype} cannot be sent")
    if min(header.tag[1:]) < 0:
        raise ValueError(f"the numbers of a tag are 0 or more, got {header.tag}")
    texts = [text.encode() for text in (header.run_id, header.tag.kind, header.codec)]
    if any(not 0 < len(text) <= 64 for text in texts):
        raise ValueError(f"run id, kind and codec need 1 to 64 bytes each, got {texts}")
    if len(header.note or ()) > NOTE_NUMBERS_MAX:
        raise ValueError(f"a note has at most {NOTE_NUMBERS_MAX} numbers, got {header.note}")
    flags = (_EXACT if header.exact else 0) | (_RETRY if header.retry else 0)
    flags |= 0 if header.note is None else _LETTER
    try:
        body = _START.pack(_MAGIC, PROTOCOL_VERSION) + _FIXED.pack(
            flags,
            _CODES[header.dtype],
            len(header.shape),
            header.sender,
            header.receiver,
            *header.tag[1:],
            header.num_bytes,
            header.message_id,
            header.sender_life,
            header.receiver_life,
        )
        body += struct.pack(f">{len(header.shape)}Q", *header.shape)
        if header.note is not None:
            body += struct.pack(f">B{len(header.note)}q", len(header.note), *header.note)
    except struct.error as error:
        raise ValueError(f"{header.tag} cannot be sent: {error}") from None
    for text in texts:
        body += bytes([len(text)]) + text
    return body + _CHECKSUM.pack(zlib.crc32(body))


def parse_header(frame: bytes) -> Header:
    """The header in `frame`, every field checked. Raises `Refused`; allocates next to nothing."""
    if len(frame) > HEADER_BYTES_MAX:
        raise Refused(Reason.MALFORMED, f"a header of {len(frame)} bytes")
    if len(frame) < _START.size:
        raise Refused(Reason.PROTOCOL, "not a message of this protocol")
    magic, version = _START.unpack_from(frame)
    if magic != _MAGIC:
        raise Refused(Reason.PROTOCOL, "not a message of this protocol")
    if version != PROTOCOL_VERSION:
        raise Refused(
            Reason.PROTOCOL,
            f"protocol version {version} here meets {PROTOCOL_VERSION} there; "
            f"install the same version of gossamer on all machines",
        )
    if len(frame) < _START.size + _FIXED.size + _CHECKSUM.size:
        raise Refused(Reason.MALFORMED, "the header ends early")
    body, (checksum,) = frame[: -_CHECKSUM.size], _CHECKSUM.unpack(frame[-_CHECKSUM.size :])
    if zlib.crc32(body) != checksum:
        raise Refused(Reason.MALFORMED, "the header's checksum differs")
    flags, code, num_dims, sender, receiver, *rest = _FIXED.unpack_from(body, _START.size)
    numbers, (num_bytes, message_id, sender_life, receiver_life) = rest[:7], rest[7:]
    if flags & ~(_EXACT | _RETRY | _LETTER) or code not in DTYPES or num_dims > DIMENSIONS_MAX:
        raise Refused(Reason.MALFORMED, f"{flags=}, dtype {code}, {num_dims} dimensions")
    if min(numbers) < 0:
        raise Refused(Reason.MALFORMED, f"a tag with negative numbers: {numbers}")
    place = _START.size + _FIXED.size
    shape, place = _parse_shape(body, place, num_dims)
    note: tuple[int, ...] | None = None
    if flags & _LETTER:
        note, place = _parse_note(body, place)
    (run_id, kind, codec), place = _parse_texts(body, place)
    if place != len(body):
        raise Refused(Reason.MALFORMED, f"{len(body) - place} bytes behind the header's end")
    if codec not in CODECS:
        raise Refused(Reason.MALFORMED, f"codec {codec!r} is not known; known: {CODECS}")
    header = Header(
        run_id=run_id,
        sender=sender,
        receiver=receiver,
        tag=Tag(kind, *numbers),
        dtype=DTYPES[code],
        shape=shape,
        exact=bool(flags & _EXACT),
        message_id=message_id,
        sender_life=sender_life,
        receiver_life=receiver_life,
        retry=bool(flags & _RETRY),
        codec=codec,
        note=note,
    )
    if header.num_bytes != num_bytes:
        raise Refused(
            Reason.SIZE, f"{num_bytes} bytes cannot be {header.dtype} of shape {_short(shape)}"
        )
    return header


def _parse_shape(body: bytes, place: int, num_dims: int) -> tuple[tuple[int, ...], int]:
    end = place + 8 * num_dims
    if end > len(body):
        raise Refused(Reason.MALFORMED, "the header ends in its shape")
    shape = struct.unpack_from(f">{num_dims}Q", body, place)
    # Strides are products of sizes too, so an empty tensor can have an absurd shape as well.
    if math.prod(max(size, 1) for size in shape) > _ELEMENTS_MAX:
        raise Refused(Reason.SIZE, f"absurd shape {_short(shape)}")
    return shape, end


def _parse_note(body: bytes, place: int) -> tuple[tuple[int, ...], int]:
    count = body[place] if place < len(body) else NOTE_NUMBERS_MAX + 1
    end = place + 1 + 8 * count
    if count > NOTE_NUMBERS_MAX or end > len(body):
        raise Refused(Reason.MALFORMED, "the header ends in a note, or a note is too long")
    return struct.unpack_from(f">{count}q", body, place + 1), end


def _parse_texts(body: bytes, place: int) -> tuple[list[str], int]:
    texts = []
    for _ in range(3):
        length = body[place] if place < len(body) else 0
        raw = body[place + 1 : place + 1 + length]
        place += 1 + length
        if not 0 < len(raw) == length <= 64:
            raise Refused(Reason.MALFORMED, "the header ends in a text, or a text is empty")
        try:
            texts.append(raw.decode())
        except UnicodeDecodeError:
            raise Refused(Reason.MALFORMED, "a text that is not UTF-8") from None
    return texts, place


def _short(shape: tuple[int, ...]) -> str:
    return str(shape) if len(shape) <= 8 else f"({shape[0]}, ..., {len(shape)} dimensions)"


# ------------------------------------------------------------------------------ payload and trailer


def raw_bytes(payload: Tensor) -> Tensor:
    """The payload's memory as flat uint8, without a copy where it is contiguous."""
    return payload.detach().contiguous().reshape(-1).view(torch.uint8)


def chunk_of(raw: Tensor, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of `raw_bytes`; the only copy that the sender makes."""
    return raw[start:end].cpu().numpy().tobytes()


def is_finite_chunk(raw: Tensor, start: int, end: int, dtype: torch.dtype) -> bool:
    """Whether no element that ends in bytes `start` to `end` of `raw` is NaN or infinite."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    size = dtype.itemsize
    values = raw[start - start % size : end - end % size].view(dtype)
    if dtype.is_complex:
        values = torch.view_as_real(values)
    elif size == 1:
        values = values.to(torch.float32)
    if values.numel() == 0:
        return True
    # The sum is finite unless a value is not, or the sum overflows: only then look at each.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def pack_trailer(checksum: int) -> bytes:
    """The last frame of a message."""
    return _TRAILER_MAGIC + _CHECKSUM.pack(checksum)


def check_trailer(frame: bytes, checksum: int) -> None:
    """Raise `Refused` unless `frame` is the trailer of chunks with this CRC-32."""
    if len(frame) != len(_TRAILER_MAGIC) + _CHECKSUM.size or frame[:4] != _TRAILER_MAGIC:
        raise Refused(Reason.SIZE, "more bytes than the header said")
    if frame != pack_trailer(checksum):
        raise Refused(Reason.CHECKSUM, "the payload's checksum differs")


# ---------------------------------------------------------------------------------------- replies


@dataclass(frozen=True, slots=True)
class Reply:
    """What a receiver says about a message.

    Args:
        kind: "go", "progress", "accepted" or "refused".
        num_bytes: what of the payload it holds ("go": send from there; "progress").
        life: the receiver's, with "go".
        reason, text: with "refused".
    """

    kind: str
    num_bytes: int = 0
    life: bytes = NO_LIFE
    reason: Reason = Reason.PROTOCOL
    text: str = ""


def pack_reply(reply: Reply) -> bytes:
    """The frame of a reply."""
    if reply.kind == "go":
        return b"G" + struct.pack(">Q16s", reply.num_bytes, reply.life)
    if reply.kind == "progress":
        return b"P" + struct.pack(">Q", reply.num_bytes)
    if reply.kind == "accepted":
        return b"A"
    text = reply.text.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
    return b"R" + bytes([reply.reason.value]) + text.encode()


def parse_reply(frame: bytes) -> Reply:
    """The reply in `frame`. Raises `Refused` for anything else."""
    kind, rest = frame[:1], frame[1:]
    if kind == b"G" and len(rest) == 8 + ID_BYTES:
        num_bytes, life = struct.unpack(">Q16s", rest)
        return Reply("go", num_bytes, life)
    if kind == b"P" and len(rest) == 8:
        return Reply("progress", struct.unpack(">Q", rest)[0])
    if kind == b"A" and not rest:
        return Reply("accepted")
    if kind == b"R" and 0 < len(rest) <= 1 + REASON_BYTES_MAX:
        known = {reason.value: reason for reason in Reason}
        text = rest[1:].decode(errors="replace")
        return Reply("refused", reason=known.get(rest[0], Reason.PROTOCOL), text=text)
    raise Refused(Reason.MALFORMED, "the reply makes no sense")
