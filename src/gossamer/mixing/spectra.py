"""How fast a topology mixes: eigenvalues, spectral gap, chi, and the squared contraction rho.

Closed forms where they are known; the tests hold them against numpy. Everything is fp64, and about
W = I - alpha Lambda with the weights of a rule (`gossamer.mixing.graphs`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from gossamer.errors import ConfigError
from gossamer.mixing.graphs import MixingGraph, Weights
from gossamer.mixing.matrices import Matrix, contraction
from gossamer.mixing.topologies import (
    Complete,
    Exponential,
    Hypercube,
    OnePeerExponential,
    RandomPairs,
    RandomRing,
    Ring,
    Star,
    Topology,
    Torus,
    hops,
    mixing_graph,
    torus_shape,
)

ZERO = 1e-9  # eigenvalues of a Laplacian below this, times the largest, are zero


@dataclass(frozen=True, slots=True)
class MixingFigures:
    """What a topology does in a round.

    Args:
        num_workers: M.
        num_edges: in one round; the mean over the rounds where they take turns.
        degree_min: fewest peers of a worker in a round.
        degree_max: most peers of a worker in a round.
        eigenvalue_2: l_2, the smallest non-trivial eigenvalue of the expected Lambda.
        eigenvalue_max: l_M, its largest.
        chi: l_M / l_2; infinite where the graph is not connected.
        spectral_gap: 1 - the largest modulus of the expected W's non-trivial eigenvalues.
        rho: squared contraction of a round; its geometric mean where rounds take turns.
        rho_is_closed_form: whether rho comes from a formula or from the matrices.
    """

    num_workers: int
    num_edges: float
    degree_min: int
    degree_max: int
    eigenvalue_2: float
    eigenvalue_max: float
    chi: float
    spectral_gap: float
    rho: float
    rho_is_closed_form: bool


def graphs_of_period(
    topology: Topology, weights: Weights, num_workers: int
) -> tuple[MixingGraph, ...]:
    """The graphs that follow on one another; for random ones, one draw."""
    rounds = topology.period(num_workers) or 1
    return tuple(
        mixing_graph(topology, weights, seed=0, round_index=r, members=range(num_workers))
        for r in range(rounds)
    )


def expected_laplacian(topology: Topology, weights: Weights, num_workers: int) -> Matrix:
    """Mean of Lambda over the rounds [M, M].

    All labellings of a random matching or ring are equally likely, so that its mean is a multiple
    of I - J with the trace of any draw.
    """
    graphs = graphs_of_period(topology, weights, num_workers)
    mean: Matrix = np.mean([graph.laplacian() for graph in graphs], axis=0)
    if topology.changes != "at random" or num_workers == 1:
        return mean
    identity = np.eye(num_workers)
    scale = float(np.trace(mean)) / (num_workers - 1)
    return scale * (identity - 1.0 / num_workers)


def nontrivial_eigenvalues(laplacian: Matrix) -> np.ndarray:
    """All eigenvalues of a Laplacian but the zero of the vector of ones, ascending [M - 1]."""
    return np.linalg.eigvalsh(laplacian)[1:]


def ends_of_spectrum(laplacian: Matrix) -> tuple[float, float]:
    """(l_2, l_M) of a Laplacian; the first is 0 where the graph is not connected.

    Raises `ConfigError` for a single worker, which has nobody to mix with.
    """
    eigenvalues = nontrivial_eigenvalues(laplacian)
    if len(eigenvalues) == 0:
        raise ConfigError("one worker alone has no spectrum")
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    return (smallest if smallest > ZERO * max(largest, 1.0) else 0.0), largest


def exchangeable_moments(graph: MixingGraph, alpha: float) -> tuple[float, float]:
    """(mean, mean square) of W's non-trivial eigenvalues, for a graph with random labels.

    With W's labels equally likely in any order, E[W] = m1 (I - J) + J and
    E[W^2] = m2 (I - J) + J: these are m1 and m2, and m2 is rho.
    """
    values = 1.0 - alpha * nontrivial_eigenvalues(graph.laplacian())
    return float(values.mean()), float((values**2).mean())


def computed_contraction(
    topology: Topology, weights: Weights, num_workers: int, alpha: float = 1.0
) -> float:
    """rho from the matrices, for every topology."""
    if num_workers == 1:
        return 0.0
    graphs = graphs_of_period(topology, weights, num_workers)
    if topology.changes == "at random":
        return exchangeable_moments(graphs[0], alpha)[1]
    product = np.eye(num_workers)
    for graph in graphs:
        product = graph.matrix(alpha) @ product
    rho = contraction(product) ** (1.0 / len(graphs))
    return rho if rho > 1e-12 else 0.0


def closed_contraction(
    topology: Topology, weights: Weights, num_workers: int, alpha: float = 1.0
) -> float | None:
    """rho from a formula, or None where there is none."""
    if num_workers == 1:
        return 0.0
    scale = closed_weight(topology, weights, num_workers)
    if scale is None:
        return None
    a = alpha * scale
    if isinstance(topology, OnePeerExponential):  # commuting pair mixes, worst for a single bit
        return float(abs(1 - 2 * a) ** (2 / len(hops(num_workers))))
    if isinstance(topology, RandomPairs):
        pairs = num_workers // 2
        return 1 - (1 - (1 - 2 * a) ** 2) * pairs / (num_workers - 1)
    eigenvalues = closed_eigenvalues(topology, num_workers)
    if eigenvalues is None:
        return None
    squares = (1 - a * eigenvalues[1:]) ** 2
    return float(squares.mean() if isinstance(topology, RandomRing) else squares.max())


def closed_weight(topology: Topology, weights: Weights, num_workers: int) -> float | None:
    """The one lambda_ij that all edges have, by formula; None where they differ."""
    count = num_workers
    power_of_two = count & (count - 1) == 0
    degree: int | None = None
    if isinstance(topology, Complete | Star):
        degree = count - 1
    elif isinstance(topology, Ring | RandomRing):
        degree = min(2, count - 1)
    elif isinstance(topology, Torus):
        degree = sum(min(2, side - 1) for side in torus_shape(count))
    elif isinstance(topology, Hypercube) and power_of_two:
        degree = count.bit_length() - 1
    elif isinstance(topology, Exponential):
        degree = len(_offsets(count))
    elif isinstance(topology, RandomPairs) or (
        isinstance(topology, OnePeerExponential) and power_of_two
    ):
        degree = 1
    if degree is None:
        return None
    return 1.0 if weights == "laplacian" else 1.0 / (1 + degree)


def closed_eigenvalues(topology: Topology, num_workers: int) -> np.ndarray | None:
    """Eigenvalues of the Laplacian with unit weights, ascending, by formula; None without one."""
    count = num_workers
    found: list[float] | None = None
    if isinstance(topology, Complete):
        found = [0.0] + [float(count)] * (count - 1)
    elif isinstance(topology, Star):
        found = [0.0, *[1.0] * (count - 2), *[float(count)] * (count > 1)]
    elif isinstance(topology, Ring | RandomRing):
        found = _cycle(count)
    elif isinstance(topology, Torus):
        rows, columns = torus_shape(count)
        found = [a + b for a in _cycle(rows) for b in _cycle(columns)]
    elif isinstance(topology, Hypercube) and count & (count - 1) == 0:
        bits = count.bit_length() - 1
        found = [2.0 * k for k in range(bits + 1) for _ in range(math.comb(bits, k))]
    elif isinstance(topology, Exponential):
        found = [
            sum(1 - math.cos(2 * math.pi * k * offset / count) for offset in _offsets(count))
            for k in range(count)
        ]
    return None if found is None else np.sort(np.array(found))


def _cycle(count: int) -> list[float]:
    """Eigenvalues of a ring; two nodes have one edge, not two."""
    if count <= 2:
        return [0.0, 2.0][:count]
    return [2 - 2 * math.cos(2 * math.pi * k / count) for k in range(count)]


def _offsets(count: int) -> list[int]:
    """How far the neighbours in the exponential graph are, both ways."""
    return sorted({offset % count for hop in hops(count) for offset in (hop, -hop)})


def mixing_figures(
    topology: Topology, weights: Weights, num_workers: int, alpha: float = 1.0
) -> MixingFigures:
    """Everything about a topology that does not depend on a momentum.

    Raises `ConfigError` for fewer than two workers.
    """
    if num_workers < 2:
        raise ConfigError(f"at least two workers are needed to mix; got {num_workers}")
    topology.validate_for(num_workers)
    graphs = graphs_of_period(topology, weights, num_workers)
    degrees = [degree for graph in graphs for degree in _degrees(graph)]
    laplacian = expected_laplacian(topology, weights, num_workers)
    smallest, largest = ends_of_spectrum(laplacian)
    moduli = np.abs(1.0 - alpha * nontrivial_eigenvalues(laplacian))
    closed = closed_contraction(topology, weights, num_workers, alpha)
    return MixingFigures(
        num_workers=num_workers,
        num_edges=sum(len(graph.edges) for graph in graphs) / len(graphs),
        degree_min=min(degrees),
        degree_max=max(degrees),
        eigenvalue_2=smallest,
        eigenvalue_max=largest,
        chi=largest / smallest if smallest else math.inf,
        spectral_gap=float(1.0 - moduli.max()),
        rho=computed_contraction(topology, weights, num_workers, alpha)
        if closed is None
        else closed,
        rho_is_closed_form=closed is not None,
    )


def _degrees(graph: MixingGraph) -> list[int]:
    counts = Counter(worker for i, j, _ in graph.edges for worker in (i, j))
    return [counts[worker] for worker in graph.members]
