"""Merge rules: what is promised of weights, weighted averages and Radial-Directional Averaging."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.comm.collectives import mean_of
from gossamer.errors import ConfigError
from gossamer.mixing.merge import (
    merge_fragment,
    radial_directional_average,
    token_weight,
    weighted_average,
)

RULES = [weighted_average, radial_directional_average]


def random_vectors(count: int, numel: int = 50, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(count)]


def norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def are_close(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> bool:
    return norm(left.double() - right.double()) <= tolerance * norm(right.double())


cases = st.tuples(st.integers(1, 9), st.integers(0, 10_000)).map(
    lambda drawn: (
        random_vectors(drawn[0], seed=drawn[1]),
        np.random.default_rng(drawn[1]).uniform(0.1, 9.0, drawn[0]).tolist(),
    )
)


@given(tokens=st.integers(1, 10**12), steps=st.integers(1, 10**6))
def test_the_weight_is_quantity_times_quality(tokens: int, steps: int) -> None:
    weight = token_weight(tokens, steps)
    assert weight == pytest.approx(tokens**2 / steps)
    assert token_weight(2 * tokens, steps) == pytest.approx(4 * weight)
    # As many tokens a step, in twice as many steps: twice the weight.
    assert token_weight(2 * tokens, 2 * steps) == pytest.approx(2 * weight)


def test_nobody_who_did_nothing_has_weight() -> None:
    assert token_weight(0, 0) == token_weight(5, 0) == token_weight(0, 3) == 0.0
    for tokens, steps in ((-1, 2), (3, -1)):
        with pytest.raises(ConfigError):
            token_weight(tokens, steps)


@given(case=cases)
def test_the_weighted_average_is_numpys(case: tuple[list[Tensor], list[float]]) -> None:
    vectors, weights = case
    expected = np.average(np.stack([v.numpy() for v in vectors]), axis=0, weights=weights)
    np.testing.assert_allclose(weighted_average(vectors, weights).numpy(), expected, rtol=1e-12,
                               atol=1e-12)  # fmt: skip


@given(case=cases)
def test_equal_weights_give_the_bits_of_the_plain_mean(
    case: tuple[list[Tensor], list[float]],
) -> None:
    vectors, weights = case
    same = [weights[0]] * len(vectors)
    assert torch.equal(weighted_average(vectors, same), mean_of(vectors))
    equal = [vectors[0]] * len(vectors)
    assert torch.equal(weighted_average(equal, weights), vectors[0])


@given(case=cases)
def test_rda_follows_its_formula(case: tuple[list[Tensor], list[float]]) -> None:
    vectors, weights = case
    rows, w = np.stack([v.numpy() for v in vectors]), np.array(weights)
    norms = np.linalg.norm(rows, axis=1)
    direction = np.average(rows / norms[:, None], axis=0, weights=w)
    expected = np.average(norms, weights=w) * direction / np.linalg.norm(direction)
    result = radial_directional_average(vectors, weights)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-10, atol=1e-10)
    assert norm(result) == pytest.approx(np.average(norms, weights=w))


@given(case=cases, factor=st.floats(1e-6, 1e6))
def test_rules_are_homogeneous_and_weights_free_of_scale(
    case: tuple[list[Tensor], list[float]], factor: float
) -> None:
    vectors, weights = case
    for rule in RULES:
        merged = rule(vectors, weights)
        assert are_close(rule([v * factor for v in vectors], weights), merged * factor)
        assert are_close(rule(vectors, [w * factor for w in weights]), merged)


@pytest.mark.parametrize("rule", RULES)
def test_one_contributor_is_merged_to_its_own_bits(rule: object) -> None:
    (vector,) = random_vectors(1)
    merged = rule([vector], [0.3])  # type: ignore[operator]
    assert torch.equal(merged, vector) and merged.data_ptr() != vector.data_ptr()


@pytest.mark.parametrize(("num_learners", "averaged"), [(2, 2.12), (8, 1.06), (16, 0.75)])
def test_norms_of_orthogonal_gradients(num_learners: int, averaged: float) -> None:
    """Averages shrink with the root of M; RDA keeps the norm."""
    vectors = [v * (3 / norm(v)) for v in random_vectors(num_learners, numel=200_000)]
    weights = [1.0] * num_learners
    assert norm(weighted_average(vectors, weights)) == pytest.approx(averaged, abs=0.01)
    assert norm(radial_directional_average(vectors, weights)) == pytest.approx(3.0, abs=5e-4)


@given(seed=st.integers(0, 1000), count=st.integers(2, 16), radius=st.floats(1e-3, 1e3))
def test_equal_norms_give_that_norm(seed: int, count: int, radius: float) -> None:
    vectors = [v * (radius / norm(v)) for v in random_vectors(count, seed=seed)]
    weights = np.random.default_rng(seed).uniform(0.5, 2, count).tolist()
    assert norm(radial_directional_average(vectors, weights)) == pytest.approx(radius)


def test_zeros_and_cancelling_directions() -> None:
    zero = torch.zeros(4)
    assert torch.equal(radial_directional_average([zero, zero], [1.0, 2.0]), zero)
    up = torch.tensor([0.0, 1.0, 0.0, 0.0])
    # phi(0) is 0: the direction is the other's, the length the mean of both.
    torch.testing.assert_close(radial_directional_average([zero, up], [1.0, 1.0]), up / 2)
    # Opposite directions of unequal length leave the weighted average.
    torch.testing.assert_close(radial_directional_average([up, -3 * up], [1.0, 1.0]), -up)


@given(seed=st.integers(0, 300), large=st.sampled_from([1e-30, 1e30]))
def test_fp32_extremes_neither_overflow_nor_vanish(seed: int, large: float) -> None:
    vectors = [(v.float() * large) for v in random_vectors(4, seed=seed)]
    merged = radial_directional_average(vectors, [1.0] * 4)
    expected = radial_directional_average([v.double() for v in vectors], [1.0] * 4)
    assert are_close(merged, expected, 1e-5)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [1.0], []]
)
@pytest.mark.parametrize("rule", RULES)
def test_weights_that_mean_nothing_are_refused(rule: object, weights: list[float]) -> None:
    with pytest.raises(ConfigError):
        rule(random_vectors(2), weights)  # type: ignore[operator]


@given(case=cases)
def test_a_weight_of_zero_is_as_if_not_there(case: tuple[list[Tensor], list[float]]) -> None:
    vectors, weights = case
    assume(len(vectors) > 1)
    for rule in RULES:
        torch.testing.assert_close(
            rule(vectors, [*weights[:-1], 0.0]), rule(vectors[:-1], weights[:-1])
        )


def test_a_fragment_is_merged_tensor_by_tensor() -> None:
    vectors, weights = random_vectors(3, numel=30), [1.0, 2.0, 4.0]
    pieces = [slice(0, 12), slice(12, 13), slice(13, 30)]
    merged = merge_fragment(vectors, weights, pieces, [True, False, False])
    rules = [weighted_average, radial_directional_average, radial_directional_average]
    for piece, rule in zip(pieces, rules, strict=True):
        assert torch.equal(merged[piece], rule([v[piece] for v in vectors], weights))


def test_tensors_without_storage_have_shapes() -> None:
    vectors = [torch.empty(9, device="meta")] * 3
    merged = merge_fragment(vectors, [1.0] * 3, [slice(0, 9)], [False])
    assert merged.is_meta and merged.shape == (9,)
