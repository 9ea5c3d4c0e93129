"""Jensen-Shannon measures against numpy in fp64, closed forms, and the axioms of a distance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.measure import divergence
from gossamer.measure.divergence import js_distance, js_distance_matrix, js_divergence_mway
from gossamer.measure.probes import log_probabilities


def kl_bits(p: np.ndarray, q: np.ndarray) -> float:
    return math.fsum(a * math.log2(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def reference_pair(p: np.ndarray, q: np.ndarray) -> float:
    """Mean over tokens of sqrt(JSD), straight from the definition by relative entropies."""
    distances = []
    for a, b in zip(p, q, strict=True):
        middle = (a + b) / 2
        jsd = kl_bits(a, middle) / 2 + kl_bits(b, middle) / 2
        distances.append(math.sqrt(max(jsd, 0.0)))
    return float(np.mean(distances))


def random_log_probs(num_workers: int, tokens: int, classes: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_workers, tokens, classes, generator=generator) * 3
    return list(torch.log_softmax(logits, dim=-1))


def as_log(*distributions: Sequence[float]) -> list[Tensor]:
    """One worker for each distribution, one token each."""
    return [torch.tensor([d], dtype=torch.float64).log().float() for d in distributions]


SEEDS = st.integers(0, 2**30)


@given(st.integers(2, 5), st.integers(1, 6), st.integers(2, 9), SEEDS)
def test_equals_the_definition(num_workers: int, tokens: int, classes: int, seed: int) -> None:
    log_probs = random_log_probs(num_workers, tokens, classes, seed)
    p = [lp.double().exp().numpy() for lp in log_probs]
    pairs = list(itertools.combinations(range(num_workers), 2))
    expected = np.mean([reference_pair(p[i], p[j]) for i, j in pairs])
    assert js_distance(log_probs) == pytest.approx(expected, abs=1e-6)
    matrix = js_distance_matrix(log_probs)
    assert torch.equal(matrix, matrix.T)
    assert not matrix.diagonal().any()
    for i, j in pairs:
        assert float(matrix[i, j]) == pytest.approx(reference_pair(p[i], p[j]), abs=1e-6)


def test_disjoint_distributions_are_at_distance_one() -> None:
    """Their log-probabilities hold -inf, and 0 log 0 is 0."""
    log_probs = as_log([0.5, 0.5, 0, 0], [0, 0, 0.25, 0.75])
    assert js_distance(log_probs) == pytest.approx(1.0, abs=1e-7)
    assert js_divergence_mway(log_probs) == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_equal_predictions_are_at_distance_zero(num_workers: int) -> None:
    """Exactly zero: the square root would make 1e-7 of rounding into 3e-4 of disagreement."""
    log_probs = random_log_probs(1, 50, 300, 0) * num_workers
    assert js_distance(log_probs) == 0.0
    assert js_divergence_mway(log_probs) == pytest.approx(0.0, abs=1e-14)


def test_two_bernoullis_by_hand() -> None:
    """p = (1/2, 1/2), q = (1, 0): m = (3/4, 1/4) and JSD = H(m) - (1 + 0)/2."""
    jsd = 0.75 * math.log2(4 / 3) + 0.25 * 2 - 0.5
    assert jsd == pytest.approx(0.311278, abs=1e-6)
    log_probs = as_log([0.5, 0.5], [1.0, 0.0])
    assert js_distance(log_probs) == pytest.approx(math.sqrt(jsd), abs=1e-7)
    assert js_divergence_mway(log_probs) == pytest.approx(jsd, abs=1e-7)


def test_root_comes_before_the_mean_over_tokens() -> None:
    """One token at distance 1 and three at 0: mean of roots 1/4, root of the mean 1/2."""
    a, b = torch.zeros(4, 2), torch.zeros(4, 2)
    a[:, 1] = b[:, 1] = -math.inf
    b[0] = torch.tensor([-math.inf, 0.0])
    assert js_distance([a, b]) == pytest.approx(0.25)
    assert js_divergence_mway([a, b]) == pytest.approx(0.25)


@given(SEEDS)
def test_symmetric_bounded_and_a_metric(seed: int) -> None:
    log_probs = random_log_probs(3, 1, 4, seed)
    d = js_distance_matrix(log_probs)
    assert bool(((d >= 0) & (d <= 1)).all())
    assert float(d[0, 2]) <= float(d[0, 1] + d[1, 2]) + 1e-9
    assert js_distance(log_probs[::-1]) == pytest.approx(js_distance(log_probs), rel=1e-12)


@given(st.integers(2, 6), SEEDS)
def test_mway_is_bounded_and_jsd_for_two(num_workers: int, seed: int) -> None:
    log_probs = random_log_probs(num_workers, 1, 5, seed)
    value = js_divergence_mway(log_probs)
    assert 0 <= value <= math.log2(num_workers)
    p = torch.stack(log_probs).double().exp().numpy()
    mean = p.mean(axis=0)
    expected = np.mean([kl_bits(q[0], mean[0]) for q in p])
    assert value == pytest.approx(expected, abs=1e-6)
    assert js_divergence_mway(log_probs[:2]) == pytest.approx(
        js_distance(log_probs[:2]) ** 2, rel=1e-9, abs=1e-12
    )


def test_mway_upper_bound_is_reached_by_disjoint_workers() -> None:
    eye = torch.eye(4).log()
    assert js_divergence_mway([eye[k : k + 1] for k in range(4)]) == pytest.approx(2.0)
    assert js_distance([eye[k : k + 1] for k in range(4)]) == pytest.approx(1.0)


def test_near_equal_predictions_are_resolved() -> None:
    """For small e, (1/2 + e, 1/2 - e) against (1/2, 1/2) is at sqrt(e^2 / (2 ln 2))."""
    e = 1e-4
    distance = js_distance(as_log([0.5 + e, 0.5 - e], [0.5, 0.5]))
    assert distance == pytest.approx(e / math.sqrt(2 * math.log(2)), rel=1e-2)


def test_rounding_below_zero_does_not_reach_the_root() -> None:
    """So close together, about one divergence in four comes out as -1e-16."""
    near = random_log_probs(1, 500, 30, 1)[0].double()
    noise = torch.randn(500, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    distance = js_distance([near, near + 1e-10 * noise])
    assert 0 <= distance < 1e-6


def test_bounds_hold_although_fp32_rows_do_not_sum_to_one() -> None:
    a = torch.full((1, 1000), -math.inf)
    b = a.clone()
    a[:, :500] = b[:, 500:] = -math.log(500)
    assert abs(float(a.double().exp().sum()) - 1) > 1e-9
    assert js_divergence_mway([a, b]) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("chunk_elements", [1, 40, 10**6])
def test_any_chunk_size_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int
) -> None:
    log_probs = random_log_probs(3, 11, 7, 4)
    expected = (js_distance(log_probs), js_divergence_mway(log_probs))
    monkeypatch.setattr(divergence, "_CHUNK_ELEMENTS", chunk_elements)
    assert (js_distance(log_probs), js_divergence_mway(log_probs)) == pytest.approx(expected)


def test_one_worker_agrees_with_itself() -> None:
    log_probs = random_log_probs(1, 3, 4, 0)
    assert js_distance(log_probs) == 0.0
    assert js_divergence_mway(log_probs) == pytest.approx(0.0, abs=1e-14)


def test_nan_is_not_hidden() -> None:
    log_probs = random_log_probs(3, 4, 5, 0)
    log_probs[1][2, 3] = math.nan
    assert math.isnan(js_distance(log_probs))
    assert math.isnan(js_divergence_mway(log_probs))


@pytest.mark.parametrize(
    "shapes", [[], [(3,), (3,)], [(2, 3), (2, 4)], [(2, 3), (1, 3)], [(0, 3), (0, 3)]]
)
def test_incomparable_predictions_are_refused(shapes: list[tuple[int, ...]]) -> None:
    for measure in (js_distance, js_distance_matrix, js_divergence_mway):
        with pytest.raises(ConfigError, match="all of one shape"):
            measure([torch.zeros(shape) for shape in shapes])


def test_inputs_are_only_read() -> None:
    log_probs = random_log_probs(3, 4, 5, 0)
    wide = [lp.double() for lp in log_probs]  # no conversion makes a copy here
    before = [lp.clone() for lp in wide]
    js_distance(wide)
    js_divergence_mway(wide)
    assert all(torch.equal(a, b) for a, b in zip(wide, before, strict=True))


def test_log_probabilities_of_any_leading_shape_in_fp32() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    out = log_probabilities(logits.bfloat16())
    assert out.shape == (6, 5)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.exp().sum(dim=-1), torch.ones(6))
    torch.testing.assert_close(log_probabilities(out), out)  # idempotent
    with pytest.raises(ConfigError, match="two classes or more"):
        log_probabilities(torch.zeros(4, 1))
