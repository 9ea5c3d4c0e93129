"""Codecs: exact sizes, error bounds, determinism, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossamer.codec import CODECS, Codec, codec_of, encode_with_feedback
from gossamer.errors import ConfigError, EncodingError

NAMES = ["fp32", "bf16", "fp16", "int8", "int4", "int2", "int1", "e3m0", "topk:0.1", "topk:1",
         "int4:8", "int8:256", "e3m0:16"]  # fmt: skip
PACKED = [name for name in NAMES if name.startswith(("int", "e3m0"))]

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-60000.0,
                    max_value=60000.0)  # fmt: skip
vectors = st.lists(numbers, max_size=70).map(lambda xs: torch.tensor(xs, dtype=torch.float32))


def roundtrip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, math.nan)
    codec.decode(codec.encode(values), out)
    return out


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(values=vectors)
@example(values=torch.tensor([0.0, -0.0, 1e-45, -1e-45]))
@example(values=torch.tensor([1e-38, 5e-39, -3e-40]))
@example(values=torch.full((17,), -2.5))
def test_the_stated_error_bound_and_size_hold(name: str, values: torch.Tensor) -> None:
    codec = codec_of(name)
    before = values.clone()
    payload = codec.encode(values)
    assert payload.dtype is torch.uint8 and payload.shape == (codec.num_bytes(values.numel()),)
    decoded = roundtrip(codec, values)
    assert bool(torch.isfinite(decoded).all())
    error = (decoded.double() - values.double()).abs()
    assert bool((error <= codec.error_bound(values).double()).all())
    assert torch.equal(values, before)
    # Decoding gives the same to everybody: another encoding of it, or another copy, as well.
    assert torch.equal(codec.encode(values), payload)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "int1", "e3m0", "topk:0.2"])
@settings(max_examples=30, deadline=None)
@given(scale=st.sampled_from([2.0**126, 2.0**100, 2.0**-100, 2.0**-126]), seed=st.integers(0, 99))
def test_the_bound_holds_at_the_ends_of_the_range(name: str, scale: float, seed: int) -> None:
    unit = torch.rand(50, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    values, codec = unit * scale, codec_of(name)
    error = (roundtrip(codec, values).double() - values.double()).abs()
    assert bool((error <= codec.error_bound(values).double()).all())


@pytest.mark.parametrize(
    ("name", "numel", "num_bytes"),
    [
        ("fp32", 1000, 4000),
        ("bf16", 1000, 2000),
        ("fp16", 1000, 2000),
        ("int8", 2048, 2048 + 2 * 2),
        ("int4", 2048, 1024 + 2 * 2),
        ("int4", 2049, 1025 + 3 * 2),
        ("int2", 1024, 256 + 2),
        ("int1", 1025, 129 + 2 * 2),
        ("e3m0", 512, 256 + 2 * 4),
        ("topk:0.01", 1000, 10 * 8),
        ("topk:0.01", 1001, 11 * 8),
        ("topk:0.01", 3, 8),
        ("int4", 5_040_000_000, 2_520_000_000 + 4_921_875 * 2),
        ("topk:0.001", 5_040_000_000, 5_040_000 * 12),
    ],
)
def test_sizes_are_a_function_of_the_length(name: str, numel: int, num_bytes: int) -> None:
    assert codec_of(name).num_bytes(numel) == num_bytes
    on_meta = torch.empty(numel, device="meta")
    payload = codec_of(name).encode(on_meta)
    assert payload.is_meta and payload.numel() == num_bytes
    codec_of(name).decode(payload, on_meta)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_vector_is_an_empty_payload(name: str) -> None:
    codec = codec_of(name)
    assert codec.encode(torch.empty(0)).numel() == codec.num_bytes(0) == 0
    codec.decode(torch.empty(0, dtype=torch.uint8), torch.empty(0))
    assert codec.error_bound(torch.empty(0)).numel() == 0


def test_fp32_is_exact_and_the_halves_are_torchs() -> None:
    values = gaussian(999) * 1e-3
    assert torch.equal(roundtrip(codec_of("fp32"), values), values)
    assert torch.equal(roundtrip(codec_of("bf16"), values), values.bfloat16().float())
    assert torch.equal(roundtrip(codec_of("fp16"), values), values.half().float())


def reference_integers(values: np.ndarray, bits: int, block: int) -> np.ndarray:
    """A textbook loop in fp64 with the scale rounded up to bf16."""
    decoded = np.zeros_like(values)
    for start in range(0, len(values), block):
        part = values[start : start + block]
        levels = (
            np.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1))
            if bits > 2
            else np.arange(-(2**bits) + 1, 2**bits, 2)
        )
        wanted = torch.tensor(np.abs(part).max() / levels.max(), dtype=torch.float32)
        scale = wanted.bfloat16()
        if scale.float() < wanted:
            scale = torch.nextafter(scale, torch.tensor(math.inf, dtype=torch.bfloat16))
        grid = levels * float(scale)
        decoded[start : start + block] = [grid[np.abs(grid - x).argmin()] for x in part]
    return decoded


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_integers_take_the_nearest_level(bits: int) -> None:
    values = gaussian(700, seed=bits)
    expected = reference_integers(values.double().numpy(), bits, 256)
    decoded = roundtrip(codec_of(f"int{bits}:256"), values)
    np.testing.assert_allclose(decoded.double().numpy(), expected, rtol=1e-6, atol=1e-9)


def test_e3m0_takes_the_nearest_power_of_two() -> None:
    values = gaussian(700)
    decoded = roundtrip(codec_of("e3m0"), values).double().numpy()
    for start in range(0, 700, 256):
        part = values[start : start + 256].double().numpy()
        levels = np.array([0.0, *(2.0**k for k in range(-6, 1))])
        grid = np.concatenate([levels, -levels]) * np.abs(part).max()
        expected = [grid[np.abs(grid - x).argmin()] for x in part]
        np.testing.assert_allclose(decoded[start : start + 256], expected, rtol=1e-6)
    assert codec_of("e3m0").num_bytes(1 << 20) * 8 / (1 << 20) == 4.125


def test_equal_levels_and_zero_survive_exactly() -> None:
    """What is on the grid is decoded as it was: zeros, and powers of two for E3M0."""
    powers = torch.tensor([0.0, *(2.0**k for k in range(-6, 1)), -1.0, -0.25])
    assert torch.equal(roundtrip(codec_of("e3m0"), powers), powers)
    grid = torch.arange(-7.0, 8.0) * 0.5
    assert torch.equal(roundtrip(codec_of("int4"), grid), grid)
    for name in PACKED:
        assert torch.equal(roundtrip(codec_of(name), torch.zeros(9)), torch.zeros(9))


@settings(max_examples=60, deadline=None)
@given(values=vectors, share=st.sampled_from([0.05, 0.3, 1.0]))
def test_topk_keeps_the_largest_and_of_equals_the_first(values: torch.Tensor, share: float) -> None:
    decoded = roundtrip(codec_of(f"topk:{share}"), values)
    count = min(len(values), max(1, math.ceil(share * len(values))))
    order = sorted(range(len(values)), key=lambda i: (-abs(float(values[i])), i))[:count]
    expected = torch.zeros_like(values)
    expected[order] = values[order]
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("name", ["topk:0.1", "int4", "int1", "e3m0", "bf16"])
def test_error_feedback_loses_nothing_for_good(name: str) -> None:
    codec, residual = codec_of(name), torch.zeros(200, dtype=torch.float64)
    given_sum = torch.zeros(200, dtype=torch.float64)
    decoded_sum = torch.zeros(200, dtype=torch.float64)
    for step in range(30):
        values = gaussian(200, seed=step).double()
        given_sum += values
        out = torch.empty_like(values)
        codec.decode(encode_with_feedback(codec, values, residual), out)
        decoded_sum += out
    torch.testing.assert_close(decoded_sum + residual, given_sum, rtol=1e-10, atol=1e-10)


def test_a_refused_vector_leaves_the_residual_alone() -> None:
    residual = torch.ones(3)
    with pytest.raises(EncodingError):
        encode_with_feedback(codec_of("int4"), torch.tensor([1.0, math.nan, 0.0]), residual)
    assert torch.equal(residual, torch.ones(3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    for place in (0, 9, 18):
        values = gaussian(19)
        values[place] = bad
        with pytest.raises(EncodingError, match="not finite"):
            codec_of(name).encode(values)


def test_values_beyond_the_format_are_refused_and_not_clamped() -> None:
    for name, value in (("fp16", 65520.0), ("bf16", 3.4e38), ("int4", 2.0**126 * 1.01)):
        with pytest.raises(EncodingError, match="holds numbers up to"):
            codec_of(name).encode(torch.tensor([1.0, -value]))


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_size_is_refused(name: str) -> None:
    codec = codec_of(name)
    payload = codec.encode(gaussian(40))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload.to(torch.int8)):
        with pytest.raises(EncodingError, match="are 40 values"):
            codec.decode(wrong, torch.empty(40))
    with pytest.raises(EncodingError, match="flat vector"):
        codec.encode(gaussian(4).view(2, 2))


def test_places_from_a_hostile_payload_are_checked() -> None:
    codec = codec_of("topk:0.5")
    for places in ([3, 1], [1, 1], [-1, 2], [0, 4]):
        head = torch.tensor(places, dtype=torch.int32).view(torch.uint8)
        payload = torch.cat([head, torch.ones(2).view(torch.uint8)])
        with pytest.raises(EncodingError, match="not ascending"):
            codec.decode(payload, torch.empty(4))


def test_a_payload_at_an_odd_place_in_memory_is_read() -> None:
    for name in NAMES:
        codec, values = codec_of(name), gaussian(40)
        payload = codec.encode(values)
        shifted = torch.cat([payload.new_zeros(1), payload])[1:]
        out = torch.empty(40)
        codec.decode(shifted, out)
        assert torch.equal(out, roundtrip(codec, values))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("int5", "did you mean"),
        ("topk", "topk:0.01"),
        ("topk:0", "above 0"),
        ("topk:nan", "above 0"),
        ("topk:2", "up to 1"),
        ("bf16:3", "no argument"),
        ("int4:12", "multiple of 8"),
        ("int4:", "multiple of 8"),
        ("e3m0:-8", "multiple of 8"),
    ],
)
def test_names_that_mean_nothing_are_refused(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        codec_of(text)


def test_names_are_read_back() -> None:
    assert {codec_of(name).name for name in NAMES} == set(NAMES)
    assert all(name == "topk" or codec_of(name).name == name for name in CODECS)


def test_fp64_vectors_are_decoded_in_fp64() -> None:
    for name in NAMES:
        values, codec = gaussian(30).double() / 3, codec_of(name)
        decoded = roundtrip(codec, values)
        assert decoded.dtype is torch.float64
        assert bool(((decoded - values).abs() <= codec.error_bound(values)).all())
