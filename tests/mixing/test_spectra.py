"""Closed forms of rho, chi and the gap against numpy, and random mixers against draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gossamer.errors import ConfigError
from gossamer.mixing.graphs import Weights
from gossamer.mixing.matchings import Matching
from gossamer.mixing.matrices import contraction, expected_contraction_of_random_pairs
from gossamer.mixing.spectra import (
    closed_contraction,
    closed_eigenvalues,
    computed_contraction,
    ends_of_spectrum,
    expected_laplacian,
    mixing_figures,
)
from gossamer.mixing.topologies import (
    TOPOLOGIES,
    EdgeList,
    RandomRing,
    Topology,
    mixing_graph,
    parse_topology,
)

CLOSED = ["complete", "ring", "torus", "hypercube", "exponential", "star", "random_ring"]
SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 12, 16]


def graph(topology: Topology, weights: Weights, count: int, round_index: int = 0):
    return mixing_graph(
        topology, weights, seed=1, round_index=round_index, members=range(count)
    )  # fmt: skip


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", CLOSED)
def test_eigenvalues_against_numpy(name: str, count: int) -> None:
    topology = parse_topology(name)
    closed = closed_eigenvalues(topology, count)
    if closed is None:
        assert name == "hypercube" and count & (count - 1)
        return
    computed = np.linalg.eigvalsh(graph(topology, "laplacian", count).laplacian())
    np.testing.assert_allclose(closed, computed, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize("weights", ["metropolis", "uniform", "laplacian"])
@pytest.mark.parametrize("name", [*CLOSED, "one_peer_exponential", "random_pairs"])
def test_closed_contractions_against_numpy(name: str, weights: Weights, alpha: float) -> None:
    topology = parse_topology(name)
    found = 0
    for count in SIZES:
        closed = closed_contraction(topology, weights, count, alpha)
        if closed is not None:
            found += 1
            computed = computed_contraction(topology, weights, count, alpha)
            assert closed == pytest.approx(computed, abs=1e-9), count
    assert found >= 4


@pytest.mark.parametrize("name", sorted(set(TOPOLOGIES) - {"edges", "random_pairs", "random_ring"}))
def test_rho_is_the_squared_singular_value(name: str) -> None:
    """By numpy's own svd, over a turn where rounds take turns."""
    topology = parse_topology(name)
    turn = topology.period(8) or 1
    product = np.eye(8)
    for r in range(turn):
        product = graph(topology, "metropolis", 8, r).matrix() @ product
    second = np.linalg.svd(product)[1][1]
    figures = mixing_figures(topology, "metropolis", 8)
    assert figures.rho == pytest.approx(second ** (2 / turn), abs=1e-9)
    mean = np.mean([graph(topology, "metropolis", 8, r).laplacian() for r in range(turn)], axis=0)
    eigenvalues = np.linalg.eigvalsh(mean)
    assert figures.chi == pytest.approx(eigenvalues[-1] / eigenvalues[1])
    assert figures.spectral_gap == pytest.approx(1 - np.abs(1 - eigenvalues[1:]).max())


def all_matchings(workers: tuple[int, ...]) -> list[Matching]:
    if len(workers) < 2:
        return [()]
    first, rest = workers[0], workers[1:]
    found = [
        ((first, other), *tail)
        for other in rest
        for tail in all_matchings(tuple(w for w in rest if w != other))
    ]
    return found + (all_matchings(rest) if len(workers) % 2 else [])


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_random_pairs_against_all_matchings(count: int, alpha: float) -> None:
    matrices, laplacians = [], []
    for matching in all_matchings(tuple(range(count))):
        laplacian = np.zeros((count, count))
        for a, b in matching:
            laplacian[np.ix_((a, b), (a, b))] += np.array([[0.5, -0.5], [-0.5, 0.5]])
        laplacians.append(laplacian)
        matrices.append(np.eye(count) - alpha * laplacian)
    pairs = parse_topology("random_pairs")
    rho = mixing_figures(pairs, "metropolis", count, alpha).rho
    assert rho == pytest.approx(contraction(matrices), abs=1e-12)
    if alpha == 1:
        assert rho == pytest.approx(expected_contraction_of_random_pairs(count), abs=1e-12)
    np.testing.assert_allclose(
        expected_laplacian(pairs, "metropolis", count), np.mean(laplacians, axis=0), atol=1e-12
    )


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_random_rings_against_all_permutations(count: int) -> None:
    matrices = []
    for order in itertools.permutations(range(count)):
        w = np.eye(count) / 3
        for k in range(count):
            w[order[k - 1], order[k]] = w[order[k], order[k - 1]] = 1 / 3
        matrices.append(w)
    figures = mixing_figures(RandomRing(), "metropolis", count)
    assert figures.rho == pytest.approx(contraction(matrices), abs=1e-12)
    gap = 1 - np.abs(np.linalg.eigvalsh(np.mean(matrices, axis=0))[:-1]).max()
    assert figures.spectral_gap == pytest.approx(gap)


def test_published_and_well_known_values() -> None:
    def figures(name: str, count: int):
        return mixing_figures(parse_topology(name), "metropolis", count)

    assert figures("random_pairs", 8).rho == pytest.approx(3 / 7)
    ring = figures("ring", 8)
    assert ring.rho == pytest.approx(((1 + 2 * math.cos(math.pi / 4)) / 3) ** 2)
    assert figures("complete", 9).rho == 0 and figures("one_peer_exponential", 16).rho == 0
    assert figures("ring", 32).chi == pytest.approx(104.1, abs=0.05)
    # hypercube of dimension d with weights 1 / (d + 1): l = 2 / (d + 1) ... 2 d / (d + 1)
    cube = figures("hypercube", 16)
    assert (cube.chi, cube.spectral_gap) == (pytest.approx(4), pytest.approx(2 / 5))
    assert cube.rho == pytest.approx((3 / 5) ** 2)
    star = figures("star", 10)
    assert star.chi == pytest.approx(10) and (star.degree_min, star.degree_max) == (1, 9)
    assert not figures("erdos_renyi", 8).rho_is_closed_form and star.rho_is_closed_form


def test_a_graph_in_parts_never_agrees() -> None:
    parts = EdgeList(pairs=((0, 1), (2, 3)))
    laplacian = expected_laplacian(parts, "metropolis", 4)
    assert ends_of_spectrum(laplacian) == (0.0, pytest.approx(1.0))
    assert computed_contraction(parts, "metropolis", 4) == pytest.approx(1)
    with pytest.raises(ConfigError, match="not connected"):
        mixing_figures(parts, "metropolis", 4)
    with pytest.raises(ConfigError, match="at least two workers"):
        mixing_figures(parse_topology("ring"), "metropolis", 1)
