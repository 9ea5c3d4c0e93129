"""Frames: what is packed comes back, and nothing malformed gets past the parser."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.cluster import wire
from gossamer.cluster.wire import DTYPES, Header, Reason, Refused, Reply
from gossamer.comm.context import Tag
from gossamer.errors import LinkFailed
from gossamer.testing.harness import payloads, same_bits

HEADER = Header(
    run_id="run",
    sender=0,
    receiver=1,
    tag=Tag("mix1", 3, 1, 2, 4, 5, 6, 7),
    dtype=torch.float32,
    shape=(2, 3),
    exact=False,
    message_id=b"m" * 16,
    sender_life=b"s" * 16,
)

texts = st.text(min_size=1, max_size=16)  # at most 64 bytes of UTF-8
numbers = st.integers(0, 2**63 - 1)
headers = st.builds(
    Header,
    run_id=texts,
    sender=st.integers(0, 2**32 - 1),
    receiver=st.integers(0, 2**32 - 1),
    tag=st.builds(Tag, texts, *[numbers] * 7),
    dtype=st.sampled_from(list(DTYPES.values())),
    shape=st.lists(st.integers(0, 64), max_size=7).map(tuple),
    exact=st.booleans(),
    message_id=st.binary(min_size=16, max_size=16),
    sender_life=st.binary(min_size=16, max_size=16),
    receiver_life=st.binary(min_size=16, max_size=16),
    retry=st.booleans(),
    note=st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=16).map(tuple),
)


def sealed(body: bytes) -> bytes:
    """A header whose checksum is right, whatever it says."""
    return body + struct.pack(">I", zlib.crc32(body))


def body_of(header: Header) -> bytes:
    return wire.pack_header(header)[:-4]


def reason_of(frame: bytes) -> Reason:
    with pytest.raises(Refused) as caught:
        wire.parse_header(frame)
    return caught.value.reason


@given(headers)
def test_a_header_comes_back(header: Header) -> None:
    frame = wire.pack_header(header)
    assert len(frame) <= wire.HEADER_BYTES_MAX
    assert wire.parse_header(frame) == header
    assert header.num_bytes == math.prod(header.shape) * header.dtype.itemsize


@given(headers, st.data())
def test_a_damaged_header_is_refused(header: Header, data: st.DataObject) -> None:
    frame = bytearray(wire.pack_header(header))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    assert reason_of(bytes(frame)) in (Reason.MALFORMED, Reason.PROTOCOL)


@given(headers, st.data())
def test_a_header_that_ends_early_is_refused(header: Header, data: st.DataObject) -> None:
    frame = wire.pack_header(header)
    short = frame[: data.draw(st.integers(0, len(frame) - 1))]
    assert reason_of(short) in (Reason.MALFORMED, Reason.PROTOCOL)
    body = body_of(header)  # also where the checksum is right
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    assert reason_of(sealed(cut)) in (Reason.MALFORMED, Reason.PROTOCOL, Reason.SIZE)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_header_are_refused(noise: bytes) -> None:
    assert reason_of(noise) is Reason.PROTOCOL
    start = body_of(HEADER)[:6]
    assert reason_of(sealed(start + noise)) in (Reason.MALFORMED, Reason.SIZE)


@settings(max_examples=200)
@given(st.data())
def test_a_header_of_wrong_fields_parses_or_is_refused(data: st.DataObject) -> None:
    """Whatever the fields are, there is no other error, and what parses says the right size."""
    body = bytearray(body_of(HEADER))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(6, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = wire.parse_header(sealed(bytes(body)))
    except Refused:
        return
    assert wire.pack_header(header) == sealed(bytes(body))


def changed(offset: int, layout: str, value: int) -> bytes:
    """The header with one field replaced; offsets are from the start of the fixed fields."""
    body = bytearray(body_of(HEADER))
    struct.pack_into(layout, body, 6 + offset, value)
    return sealed(bytes(body))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (changed(-6, ">I", 0x47455420), Reason.PROTOCOL),  # "GET "
        (changed(-2, ">H", 3), Reason.PROTOCOL),  # another version
        (changed(0, ">B", 8), Reason.MALFORMED),  # an unknown flag
        (changed(0, ">B", 4), Reason.MALFORMED),  # a letter without a note
        (changed(1, ">B", 0), Reason.MALFORMED),  # unknown dtypes
        (changed(1, ">B", 200), Reason.MALFORMED),
        (changed(1, ">B", 2), Reason.SIZE),  # fp64 of the same length
        (changed(2, ">B", 65), Reason.MALFORMED),  # more dimensions than a tensor can have
        (changed(2, ">B", 1), Reason.MALFORMED),  # fewer than there are
        (changed(11, ">q", -1), Reason.MALFORMED),  # round -1
        (changed(67, ">Q", 23), Reason.SIZE),  # lying lengths
        (changed(67, ">Q", 2**64 - 1), Reason.SIZE),
        (changed(123, ">Q", 2**63), Reason.SIZE),  # absurd shapes
        (changed(123, ">Q", 2**47), Reason.SIZE),
        (sealed(body_of(HEADER) + b"x"), Reason.MALFORMED),
        (sealed(body_of(HEADER) + bytes(4096)), Reason.MALFORMED),
        (sealed(body_of(HEADER)[:-4]), Reason.MALFORMED),  # no codec
        (sealed(body_of(HEADER)[:-4] + b"\x00"), Reason.MALFORMED),  # an empty one
        (sealed(body_of(HEADER)[:-3] + b"zip"), Reason.MALFORMED),  # an unknown one
        (sealed(body_of(HEADER)[:-3] + b"\xff\xfe\xfd"), Reason.MALFORMED),  # not UTF-8
    ],
)
def test_each_malformed_field_is_refused(frame: bytes, reason: Reason) -> None:
    assert reason_of(frame) is reason


def test_an_empty_tensor_cannot_have_an_absurd_shape() -> None:
    body = body_of(replace(HEADER, shape=(0, 1)))
    absurd = body.replace(struct.pack(">2Q", 0, 1), struct.pack(">2Q", 0, 2**62))
    assert reason_of(sealed(absurd)) is Reason.SIZE


def test_another_version_is_told_which() -> None:
    with pytest.raises(Refused, match="protocol version 3 here meets 2 there"):
        wire.parse_header(changed(-2, ">H", 3))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"run_id": ""}, "1 to 64 bytes"),
        ({"run_id": "x" * 65}, "1 to 64 bytes"),
        ({"tag": Tag("k" * 65, 0)}, "1 to 64 bytes"),
        ({"tag": Tag("mix1", -1)}, "0 or more"),
        ({"tag": Tag("mix1", 2**63)}, "cannot be sent"),
        ({"sender": 2**32}, "cannot be sent"),
        ({"dtype": torch.qint8}, "cannot be sent"),
    ],
)
def test_what_does_not_fit_is_not_packed(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        wire.pack_header(replace(HEADER, **wrong))  # type: ignore[arg-type]


def test_dtype_numbers_never_change() -> None:
    assert [DTYPES[n] for n in (1, 2, 3, 4, 9, 10)] == [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool,
    ]  # fmt: skip
    assert len(set(DTYPES.values())) == len(DTYPES)


# --------------------------------------------------------------------------------------- payload


def fp8() -> list[torch.Tensor]:
    values = torch.tensor([1.5, -0.25, 0.0, 3.0])
    return [values.to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]


@pytest.mark.parametrize(
    "payload", [*payloads(), *fp8()], ids=lambda p: f"{p.dtype}{list(p.shape)}"
)
@pytest.mark.parametrize("chunk_bytes", [1, 3, 8, 1000])
def test_chunks_make_up_the_payload(payload: torch.Tensor, chunk_bytes: int) -> None:
    raw = wire.raw_bytes(payload)
    assert raw.numel() == payload.numel() * payload.dtype.itemsize
    if payload.numel():
        assert raw.data_ptr() == payload.data_ptr()  # no copy
    received = torch.empty(payload.shape, dtype=payload.dtype)
    target = wire.raw_bytes(received).numpy()
    for start in range(0, raw.numel(), chunk_bytes):
        chunk = wire.chunk_of(raw, start, min(start + chunk_bytes, raw.numel()))
        target[start : start + len(chunk)] = list(chunk)
    assert same_bits(received, payload)


def test_a_view_that_is_not_contiguous_is_sent_as_its_values() -> None:
    matrix = torch.arange(6.0).reshape(2, 3).T
    raw = wire.raw_bytes(matrix)
    assert raw.numpy().tobytes() == matrix.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2,
     torch.complex64],
)  # fmt: skip
@given(place=st.integers(0, 99), piece=st.integers(1, 130), kind=st.sampled_from(["nan", "inf"]))
def test_a_value_that_is_not_finite_is_found_wherever_chunks_end(
    dtype: torch.dtype, place: int, piece: int, kind: str
) -> None:
    values = torch.ones(100)
    good = values.to(dtype, copy=True)
    values[place] = float(kind)
    bad = values.to(dtype)
    for payload, finite in ((good, True), (bad, False)):
        raw = wire.raw_bytes(payload)
        verdicts = [
            wire.is_finite_chunk(raw, start, min(start + piece, raw.numel()), dtype)
            for start in range(0, raw.numel(), piece)
        ]
        assert all(verdicts) is finite


def test_integers_and_large_sums_are_finite() -> None:
    ints = wire.raw_bytes(torch.full((4,), -1, dtype=torch.int32))
    assert wire.is_finite_chunk(ints, 0, 16, torch.int32)
    large = wire.raw_bytes(torch.full((64,), torch.finfo(torch.float32).max))
    assert wire.is_finite_chunk(large, 0, 256, torch.float32)


def test_the_trailer_knows_its_checksum() -> None:
    wire.check_trailer(wire.pack_trailer(7), 7)
    for frame, reason in (
        (wire.pack_trailer(8), Reason.CHECKSUM),
        (b"GEND", Reason.SIZE),
        (b"", Reason.SIZE),
        (bytes(8), Reason.SIZE),
    ):
        with pytest.raises(Refused) as caught:
            wire.check_trailer(frame, 7)
        assert caught.value.reason is reason


# --------------------------------------------------------------------------------------- replies


@given(
    st.one_of(
        st.builds(
            Reply,
            kind=st.just("go"),
            num_bytes=st.integers(0, 2**64 - 1),
            life=st.binary(min_size=16, max_size=16),
        ),
        st.builds(Reply, kind=st.just("progress"), num_bytes=st.integers(0, 2**64 - 1)),
        st.just(Reply("accepted")),
        st.builds(
            Reply,
            kind=st.just("refused"),
            reason=st.sampled_from(list(Reason)),
            text=st.text(max_size=100),
        ),
    )
)
def test_a_reply_comes_back(reply: Reply) -> None:
    assert wire.parse_reply(wire.pack_reply(reply)) == reply


@given(st.text(min_size=300, max_size=2000))
def test_long_reasons_are_cut(text: str) -> None:
    back = wire.parse_reply(wire.pack_reply(Reply("refused", reason=Reason.RUN, text=text)))
    assert text.startswith(back.text)
    assert len(back.text.encode()) <= wire.REASON_BYTES_MAX


@given(st.binary(max_size=700))
def test_a_reply_that_makes_no_sense_is_refused_or_read(frame: bytes) -> None:
    try:
        wire.parse_reply(frame)
    except Refused as refused:
        assert refused.reason is Reason.MALFORMED


def test_refusals_are_failed_links_for_the_method() -> None:
    assert issubclass(Refused, LinkFailed)
