"""The decoder against an independent numpy version, its symmetries and its published size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gossamer.errors import ConfigError
from gossamer.training.llama import SHAPES, Llama, LlamaShape, RMSNorm, rotate, rotation

SMALL = LlamaShape(
    vocab_size=11, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_length=32
)

Array = NDArray[np.float64]


def build(shape: LlamaShape = SMALL, seed: int = 0) -> Llama:
    """A model in fp64, with weights large enough that every part of it matters."""
    torch.manual_seed(seed)
    model = Llama(shape).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(batch: int, length: int, seed: int = 0, vocabulary: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def reference(model: Llama, ids: list[int]) -> Array:
    """Logits [T, V] by loops over positions and heads, straight from the papers' formulas."""
    shape = model.shape
    w = {name: p.detach().numpy() for name, p in model.named_parameters()}
    width, group = shape.head_dim, shape.num_heads // shape.num_kv_heads

    def norm(x: Array, weight: Array) -> Array:
        return x / math.sqrt(float(np.mean(x * x)) + shape.norm_eps) * weight

    def turn(x: Array, position: int) -> Array:
        half = width // 2
        z = x[:half] + 1j * x[half:]
        z = z * np.exp(1j * position * shape.rope_theta ** (-2 * np.arange(half) / width))
        return np.concatenate((z.real, z.imag))

    xs = [w["embedding.weight"][i] for i in ids]
    for layer in range(shape.num_layers):
        p = f"layers.{layer}."
        normed = [norm(x, w[p + "attention_norm.weight"]) for x in xs]
        q, k, v = (
            [(w[f"{p}attention.{part}.weight"] @ x).reshape(-1, width) for x in normed]
            for part in ("query", "key", "value")
        )
        for t in range(len(xs) - 1, -1, -1):
            heads = []
            for n in range(shape.num_heads):
                query = turn(q[t][n], t)
                scores = np.array([query @ turn(k[s][n // group], s) for s in range(t + 1)])
                weights = np.exp(scores / math.sqrt(width))
                weights /= weights.sum()
                heads.append(sum(weights[s] * v[s][n // group] for s in range(t + 1)))
            xs[t] = xs[t] + w[p + "attention.output.weight"] @ np.concatenate(heads)
        for t, x in enumerate(xs):
            y = norm(x, w[p + "feed_forward_norm.weight"])
            gate = w[p + "feed_forward.gate.weight"] @ y
            up = w[p + "feed_forward.up.weight"] @ y
            xs[t] = x + w[p + "feed_forward.down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return np.stack([w["head.weight"] @ norm(x, w["norm.weight"]) for x in xs])


def test_forward_equals_the_formulas() -> None:
    model, ids = build(), tokens(2, 9)
    with torch.no_grad():
        logits = model(ids)
    for row in range(2):
        np.testing.assert_allclose(logits[row], reference(model, ids[row].tolist()), atol=1e-10)


def test_size_of_the_published_model() -> None:
    with torch.device("meta"):
        model = Llama(SHAPES["llama-1.5b"])
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    subset = ("embedding.", "head.", "layers.0.", "layers.1.")
    chosen = sum(size for name, size in sizes.items() if name.startswith(subset))
    assert sum(sizes.values()) == 1_498_482_688
    assert chosen == 646_979_584
    assert round(100 * chosen / sum(sizes.values()), 2) == 43.18


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("llama-nano", 50e3, 150e3),
        ("llama-tiny", 300e3, 500e3),
        ("llama-small", 0.8e6, 1.5e6),
        ("llama-15m", 14e6, 16e6),
        ("llama-110m", 105e6, 115e6),
    ],
)
def test_size_of_the_byte_models(name: str, least: float, most: float) -> None:
    with torch.device("meta"):
        model = Llama(SHAPES[name])
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most
    assert SHAPES[name].vocab_size == 256


def test_meta_forward_has_the_shape_of_the_logits() -> None:
    with torch.device("meta"):
        model = Llama(SHAPES["llama-1.5b"])
    logits = model(torch.zeros(3, 7, dtype=torch.int64, device="meta"))
    assert logits.shape == (3, 7, 128_256)
    assert logits.device.type == "meta"


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values() -> None:
    grouped = build()
    full = Llama(replace(SMALL, num_kv_heads=SMALL.num_heads)).double()
    weights = dict(grouped.state_dict())
    for name, weight in weights.items():
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            per_head = weight.view(SMALL.num_kv_heads, SMALL.head_dim, SMALL.dim)
            weights[name] = per_head.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    ids = tokens(2, 12)
    torch.testing.assert_close(full(ids), grouped(ids), atol=1e-12, rtol=1e-12)


def test_rotated_products_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    table = rotation(20, 8, 10_000.0)
    queries = rotate(query.expand(1, 20, 1, 8), table)[0, :, 0]
    keys = rotate(key.expand(1, 20, 1, 8), table)[0, :, 0]
    products = queries @ keys.T  # [20, 20]
    for distance in range(-19, 20):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-12, rtol=0)
    assert products[0].std() > 0.1  # and they do depend on it
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(20))


def test_rms_norm_equals_numpy() -> None:
    norm = RMSNorm(6, 1e-3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, 6, generator=generator)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6, generator=generator))
    expected = x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(
        norm(x).detach(), expected * norm.weight.detach().numpy(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("changed", [1, 5, 11])
def test_a_later_token_never_changes_earlier_logits(changed: int) -> None:
    model, ids = build(), tokens(1, 12)
    other = ids.clone()
    other[0, changed] = (other[0, changed] + 1) % 11
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.allclose(before[:, changed:], after[:, changed:])


def test_logits_of_a_prefix_are_a_prefix_of_the_logits() -> None:
    model, ids = build(), tokens(2, 12)
    torch.testing.assert_close(model(ids)[:, :5], model(ids[:, :5]))


def test_tied_weights_are_one_tensor_and_stay_one() -> None:
    model = Llama(replace(SMALL, tie_embeddings=True))
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    model.load_state_dict(Llama(replace(SMALL, tie_embeddings=True)).state_dict())
    assert model.head.weight is model.embedding.weight
    untied = Llama(SMALL)
    assert untied.head.weight.data_ptr() != untied.embedding.weight.data_ptr()


def test_names_are_those_that_subsets_are_chosen_by() -> None:
    block = {f"layers.0.{part}.weight" for part in ("attention_norm", "feed_forward_norm")} | {
        f"layers.0.attention.{part}.weight" for part in ("query", "key", "value", "output")
    }
    block |= {f"layers.0.feed_forward.{part}.weight" for part in ("gate", "up", "down")}
    expected = block | {name.replace(".0.", ".1.") for name in block}
    expected |= {"embedding.weight", "norm.weight", "head.weight"}
    model = build()
    model(tokens(1, 4))  # the rotary table exists now, and must not show
    assert set(model.state_dict()) == expected
    assert not list(model.buffers())


def test_rotary_table_follows_the_dtype_and_survives_inference_mode() -> None:
    model, ids = Llama(SMALL), tokens(1, 6)
    with torch.inference_mode():
        first = model(ids)
    model(ids).sum().backward()  # fails if the table were an inference tensor
    assert first.dtype == torch.float32
    assert model.double()(ids).dtype == torch.float64
    assert model.bfloat16()(ids).dtype == torch.bfloat16


def test_initial_spread_of_the_weights() -> None:
    torch.manual_seed(0)
    shape = LlamaShape(dim=128, num_layers=8, num_heads=4, num_kv_heads=4, ffn_dim=256)
    model = Llama(shape)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        writes = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        expected = 0.02 / 4 if writes else 0.02  # sqrt(2 x 8 layers) = 4
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_same_generator_same_weights() -> None:
    first, second, third = build(seed=1), build(seed=1), build(seed=2)
    ids = tokens(1, 5)
    assert torch.equal(first(ids), second(ids))
    assert not torch.equal(first(ids), third(ids))


def test_gradients_reach_every_parameter() -> None:
    model, ids = build(), tokens(4, 16)
    model(ids).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"num_layers": -1}, "num_layers must be at least 1, got -1"),
        ({"dim": 20}, r"dim must be a multiple of 2 x num_heads .* got dim 20 with 4 heads"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change)


def test_too_many_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="33 positions given to a model of at most 32"):
        Llama(SMALL)(tokens(1, 33))
