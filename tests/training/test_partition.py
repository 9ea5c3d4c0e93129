"""Splits over workers: each sample exactly once, and shares of the stated distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.seeding import stream
from gossamer.training.partition import (
    _log_gamma_variate,
    permutation,
    split_dirichlet,
    split_iid,
)


@given(count=st.integers(1, 500), workers=st.integers(1, 20), seed=st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_iid_shares_are_equal_and_hold_every_sample_once(
    count: int, workers: int, seed: int
) -> None:
    if count < workers:
        with pytest.raises(ConfigError, match="too few for"):
            split_iid(count, workers, seed)
        return
    shards = split_iid(count, workers, seed)
    assert sorted(np.concatenate(shards).tolist()) == list(range(count))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    again = split_iid(count, workers, seed)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))


@given(
    count=st.integers(40, 400),
    classes=st.integers(1, 12),
    workers=st.integers(1, 6),
    concentration=st.sampled_from([1e-3, 0.05, 0.5, 1.0, 20.0]),
    seed=st.integers(0, 2**62),
)
@settings(max_examples=60, deadline=None)
def test_dirichlet_shares_hold_every_sample_once(
    count: int, classes: int, workers: int, concentration: float, seed: int
) -> None:
    labels = stream(seed, "labels").integers(0, classes, count)
    shards = split_dirichlet(labels, workers, concentration, seed, samples_min=0)
    assert sorted(np.concatenate(shards).tolist()) == list(range(count))
    again = split_dirichlet(labels, workers, concentration, seed, samples_min=0)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))


def shares(concentration: float, workers: int = 4, classes: int = 400) -> np.ndarray:
    """The share of each class at each worker, [classes, workers]."""
    labels = np.repeat(np.arange(classes), 1000)
    shards = split_dirichlet(labels, workers, concentration, 7)
    return np.stack([np.bincount(labels[s], minlength=classes) for s in shards], axis=1) / 1000


@pytest.mark.parametrize("concentration", [0.1, 1.0, 5.0])
def test_class_shares_have_the_moments_of_the_dirichlet_distribution(concentration: float) -> None:
    """Mean 1/M, variance (1/M)(1 - 1/M) / (M a + 1), covariance -(1/M)^2 / (M a + 1)."""
    found = shares(concentration)
    mean, total = 1 / 4, 4 * concentration + 1
    np.testing.assert_allclose(found.mean(0), mean, atol=5 * (mean * 0.75 / total / 400) ** 0.5)
    covariance = np.cov(found.T)
    expected = np.full((4, 4), -(mean**2) / total) + np.eye(4) * mean / total
    np.testing.assert_allclose(covariance, expected, atol=0.25 * mean / total)


def test_class_shares_do_not_depend_on_one_another() -> None:
    found = shares(0.5)
    correlation = np.corrcoef(found[:200].flatten(), found[200:].flatten())[0, 1]
    assert abs(correlation) < 5 / 800**0.5


@pytest.mark.parametrize("shape", [0.02, 0.5, 1.0, 3.0, 50.0])
def test_gamma_variates_have_their_logarithms_moments(shape: float) -> None:
    """E log G is the digamma function and its variance the trigamma function of the shape."""
    source = stream(11, "gamma")
    logs = np.array([_log_gamma_variate(shape, source) for _ in range(8000)])
    step = 1e-4
    digamma = (math.lgamma(shape + step) - math.lgamma(shape - step)) / (2 * step)
    middle = math.lgamma(shape)
    trigamma = (math.lgamma(shape + step) - 2 * middle + math.lgamma(shape - step)) / step**2
    assert logs.mean() == pytest.approx(digamma, abs=5 * (trigamma / 8000) ** 0.5)
    assert logs.var() == pytest.approx(trigamma, rel=0.12)


def test_workers_take_their_images_from_all_over_a_class() -> None:
    """Files may be sorted within a class: a worker's part is no stretch of it."""
    for shard in split_dirichlet(np.zeros(1000, dtype=np.int64), 2, 100.0, 3):
        assert shard.min() < 20 and shard.max() > 980


def test_a_small_concentration_leaves_few_classes_and_a_large_one_all() -> None:
    assert (shares(0.01).max(1) > 0.99).mean() > 0.8
    assert np.abs(shares(1000.0) - 0.25).max() < 0.05


def test_every_worker_gets_the_least_that_it_needs() -> None:
    labels = np.repeat(np.arange(10), 20)
    for seed in range(20):
        shards = split_dirichlet(labels, 5, 0.1, seed, samples_min=16)
        assert min(len(shard) for shard in shards) >= 16


@pytest.mark.parametrize(
    ("concentration", "samples_min", "message"),
    [
        (0.0, 1, "concentration must be above 0"),
        (float("nan"), 1, "concentration must be above 0"),
        (math.inf, 1, "concentration must be above 0 and finite"),
        (1.0, 11, "20 samples are too few for 2 workers of 11 or more"),
        (1e-4, 10, "leaves some of 2 workers with fewer than 10 samples, 100 times"),
    ],
)
def test_impossible_splits_are_refused(
    concentration: float, samples_min: int, message: str
) -> None:
    labels = np.zeros(20, dtype=np.int64)
    with pytest.raises(ConfigError, match=message):
        split_dirichlet(labels, 2, concentration, 0, samples_min=samples_min)


@given(count=st.integers(0, 300), key=st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_a_permutation_is_one(count: int, key: int) -> None:
    assert sorted(permutation(count, key).tolist()) == list(range(count))


def test_permutations_are_uniform() -> None:
    """Each of 4 elements comes first, second, ... equally often."""
    orders = np.array([permutation(4, "p", draw) for draw in range(4000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=4) for place in range(4)])
    assert np.abs(counts - 1000).max() < 5 * (4000 * 3 / 16) ** 0.5
