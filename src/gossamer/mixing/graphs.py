"""Who mixes with whom, and with which weight: one round's graph, as every worker derives it.

A weighted graph gives the Laplacian `Lambda` and the mixing matrix `W = I - alpha Lambda`. Weights
are symmetric, so that W is symmetric with unit row sums, and conserves the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from gossamer.errors import ConfigError, nearest
from gossamer.mixing.matrices import Matrix

Edge = tuple[int, int]
"""Two different workers; (i, j) with i < j where the edge has no direction."""

Weights = Literal["metropolis", "uniform", "laplacian"]
"""The weight of edge (i, j): 1 / (1 + max(d_i, d_j)), or 1 / (1 + max d), or 1; d is the degree.

The first two give a doubly stochastic W at alpha = 1 on every graph, and the same one where all
degrees are equal: pair averages on a matching, a third each on a ring, J on the complete graph.
"laplacian" needs an alpha that fits the graph.
"""


def parse_weights(text: str) -> Weights:
    """A rule of weights by its name. Raises `ConfigError` for another."""
    for rule in get_args(Weights):
        if rule == text:
            known: Weights = rule
            return known
    raise ConfigError(f"unknown weights {text!r}; {nearest(text, get_args(Weights))}")


@dataclass(frozen=True, slots=True)
class MixingGraph:
    """One round's symmetric weights.

    Args:
        members: the workers, sorted; row k of a matrix is the k-th of them.
        edges: (i, j, lambda_ij) with i < j, sorted; lambda_ij > 0.
    """

    members: tuple[int, ...]
    edges: tuple[tuple[int, int, float], ...]

    def neighbours(self, worker: int, scale: float = 1.0) -> tuple[tuple[int, float], ...]:
        """(peer, scale * lambda_ij) of all peers of a worker, sorted by peer.

        Args:
            scale: alpha; with it the weights are the entries of W beside the diagonal.
        """
        return tuple((peer, scale * weight) for peer, weight in _rows(self).get(worker, ()))

    def laplacian(self, failed: Iterable[Edge] = ()) -> Matrix:
        """Lambda [M, M], fp64: minus the weights beside the diagonal, zero row sums on it.

        Args:
            failed: edges, in either order, that did not hold; their weight goes to both diagonals.

        Raises `ConfigError` where a failed edge is not one of the graph's.
        """
        row = {worker: k for k, worker in enumerate(self.members)}
        lost = {frozenset(edge) for edge in failed}
        if not lost <= {frozenset((i, j)) for i, j, _ in self.edges}:
            raise ConfigError("a failed edge is not one of the graph's edges")
        laplacian = np.zeros((len(row), len(row)))
        for i, j, weight in self.edges:
            if frozenset((i, j)) not in lost:
                a, b = row[i], row[j]
                laplacian[a, b] -= weight
                laplacian[b, a] -= weight
                laplacian[a, a] += weight
                laplacian[b, b] += weight
        return laplacian

    def matrix(self, scale: float = 1.0, failed: Iterable[Edge] = ()) -> Matrix:
        """W = I - scale * Lambda [M, M], fp64, without the failed edges."""
        return np.eye(len(self.members)) - scale * self.laplacian(failed)


@functools.lru_cache(maxsize=256)
def _rows(graph: MixingGraph) -> Mapping[int, tuple[tuple[int, float], ...]]:
    found: dict[int, list[tuple[int, float]]] = {worker: [] for worker in graph.members}
    for i, j, weight in graph.edges:
        found[i].append((j, weight))
        found[j].append((i, weight))
    return {worker: tuple(sorted(peers)) for worker, peers in found.items()}


def weighted_graph(
    members: Sequence[int], edges: Sequence[Edge], weights: Weights = "metropolis"
) -> MixingGraph:
    """The graph with these undirected edges and the weights of a rule; see `Weights`.

    Args:
        members: workers that take part, each once; in any order.
        edges: pairs of members; a pair that occurs twice, in either order, is one edge.

    Raises `ConfigError` for an edge from a worker to itself or to one that is no member.
    """
    ordered = tuple(sorted(members))
    present = frozenset(ordered)
    if len(present) != len(ordered):
        raise ConfigError(f"members of a graph must differ; got {tuple(members)}")
    for i, j in edges:
        if i == j or i not in present or j not in present:
            raise ConfigError(f"({i}, {j}) is no edge between two of the workers {ordered}")
    unique = sorted({(min(edge), max(edge)) for edge in edges})
    degree = dict.fromkeys(ordered, 0)
    for edge in unique:
        for worker in edge:
            degree[worker] += 1
    largest = max(degree.values(), default=0)

    def weight(i: int, j: int) -> float:
        if weights == "laplacian":
            return 1.0
        return 1.0 / (1 + (largest if weights == "uniform" else max(degree[i], degree[j])))

    return MixingGraph(ordered, tuple((i, j, weight(i, j)) for i, j in unique))
