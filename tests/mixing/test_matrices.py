"""Mixing matrices conserve the mean, and contract disagreement as fast as the theory says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.mixing.matchings import Matching, random_matching
from gossamer.mixing.matrices import (
    Matrix,
    block_average_matrix,
    contraction,
    expected_contraction_of_random_pairs,
    global_matrix,
    matching_matrix,
)


def perfect_matchings(workers: tuple[int, ...]) -> list[Matching]:
    """All of them, by hand: the first worker meets each other in turn (and nobody, if odd)."""
    if len(workers) < 2:
        return [()]
    first, rest = workers[0], workers[1:]
    found = [
        ((first, other), *tail)
        for other in rest
        for tail in perfect_matchings(tuple(w for w in rest if w != other))
    ]
    return found + (perfect_matchings(rest) if len(workers) % 2 else [])


def assert_doubly_stochastic(w: Matrix) -> None:
    assert np.array_equal(w, w.T)
    assert (w >= 0).all()
    np.testing.assert_allclose(w.sum(axis=0), 1.0, atol=1e-15)


@given(st.integers(1, 9), st.integers(0, 50), st.data())
def test_matrix_does_what_workers_do(num_workers: int, seed: int, data: st.DataObject) -> None:
    members = [3 * k + 1 for k in range(num_workers)]
    matching = random_matching(seed, 0, members)
    failed = data.draw(st.lists(st.sampled_from(matching), unique=True)) if matching else []
    w = matching_matrix(matching, members, [(b, a) for a, b in failed])
    assert_doubly_stochastic(w)
    x = np.random.default_rng(seed).normal(size=(num_workers, 3))
    expected = {worker: x[k] for k, worker in enumerate(members)}
    for a, b in matching:
        if (a, b) not in failed:
            mid = (x[members.index(a)] + x[members.index(b)]) / 2
            expected[a] = expected[b] = mid
    np.testing.assert_allclose(w @ x, [expected[m] for m in members], atol=1e-15)


def test_rows_follow_the_order_of_members() -> None:
    w = matching_matrix(((1, 3),), [3, 1, 2])
    assert w.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("matching", "members", "failed", "message"),
    [
        (((0, 1), (1, 2)), [0, 1, 2], (), "not a matching"),
        (((0, 5),), [0, 1], (), "not a matching"),
        (((0, 0),), [0, 1], (), "not a matching"),
        (((0, 1),), [0, 1, 2], [(1, 2)], "failed pair"),
    ],
)
def test_what_is_no_matching_is_refused(
    matching: Matching, members: list[int], failed: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        matching_matrix(matching, members, failed)


@given(st.integers(1, 8), st.data())
def test_block_average(num_workers: int, data: st.DataObject) -> None:
    survivors = data.draw(st.lists(st.integers(0, num_workers - 1), unique=True))
    w = block_average_matrix(survivors, num_workers)
    assert_doubly_stochastic(w)
    x = np.arange(num_workers, dtype=float) ** 2
    expected = x.copy()
    if survivors:
        expected[survivors] = x[survivors].mean()
    np.testing.assert_allclose(w @ x, expected, atol=1e-12)
    if len(survivors) == num_workers:
        np.testing.assert_allclose(w, global_matrix(num_workers))


@pytest.mark.parametrize("survivors", [[0, 0], [3], [-1]])
def test_survivors_are_different_rows(survivors: list[int]) -> None:
    with pytest.raises(ConfigError, match="different rows below 3"):
        block_average_matrix(survivors, 3)


def test_contraction_of_known_matrices() -> None:
    assert contraction(global_matrix(5)) == pytest.approx(0.0, abs=1e-12)
    assert contraction(np.eye(5)) == pytest.approx(1.0)
    assert contraction(np.eye(1)) == pytest.approx(0.0)
    # a circulant ring, self and two neighbours at 1/3: ((1 + 2 cos(2 pi / M)) / 3)^2
    ring = (np.eye(8) + np.roll(np.eye(8), 1, axis=1) + np.roll(np.eye(8), -1, axis=1)) / 3
    assert contraction(ring) == pytest.approx(((1 + 2 * np.cos(2 * np.pi / 8)) / 3) ** 2)
    # one fixed matching leaves the difference of two pairs as it is
    assert contraction(matching_matrix(((0, 1), (2, 3)), range(4))) == pytest.approx(1.0)
    # one survivor short of everybody leaves that one where it is
    assert contraction(block_average_matrix([0, 1, 2], 4)) == pytest.approx(1.0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 6, 7, 8])
def test_expected_contraction_is_exact(num_workers: int) -> None:
    """Against the enumeration of all matchings, which the formula has never seen."""
    everyone = tuple(range(num_workers))
    matrices = [matching_matrix(m, everyone) for m in perfect_matchings(everyone)]
    assert contraction(matrices) == pytest.approx(
        expected_contraction_of_random_pairs(num_workers), abs=1e-12
    )
    assert contraction(matrices[:1]) == pytest.approx(contraction(matrices[0]))


def test_the_published_value_for_eight() -> None:
    assert expected_contraction_of_random_pairs(8) == pytest.approx(3 / 7)


def test_drawn_matchings_contract_as_expected() -> None:
    """Any X loses the factor on average, so measure the squared disagreement of one X."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 200))
    x -= x.mean(axis=0)
    before = (x**2).sum()
    after = [
        ((matching_matrix(random_matching(1, r, range(8)), range(8)) @ x) ** 2).sum() / before
        for r in range(1500)
    ]
    assert np.mean(after) == pytest.approx(3 / 7, abs=0.005)


def test_independent_matchings_multiply() -> None:
    """E||W2 W1 X||^2 = rho^2 ||X||^2 when mix1 and mix2 are independent, rho when they are one."""
    both, same = [], []
    for r in range(3000):
        one = matching_matrix(random_matching(2, r, range(4), "mix1"), range(4))
        two = matching_matrix(random_matching(2, r, range(4), "mix2"), range(4))
        both.append(two @ one)
        same.append(one @ one)
    rho = expected_contraction_of_random_pairs(4)
    assert contraction(same) == pytest.approx(rho, abs=0.03)
    assert contraction(both) == pytest.approx(rho**2, abs=0.03)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="no matrix"):
        contraction([])
    with pytest.raises(ConfigError, match="at least one worker"):
        expected_contraction_of_random_pairs(0)
