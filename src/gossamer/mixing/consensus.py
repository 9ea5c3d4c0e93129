"""Gossip with momentum: how fast disagreement goes, and whether it goes at all.

With no gradients, GASLoC's two readings of the momentum term are linear recursions on the workers'
disagreement (M. Cagnasso et al., arXiv:2606.11081; the second reading is reconstructed):

    A   u+ = W u + gamma (u - u_prev)           heavy ball: momentum on un-mixed iterates
    B   m+ = W (m + gamma (m - m_prev))         Nesterov: momentum on mixed iterates

Rates here are mean squares per round: E||disagreement||^2 goes as rate^rounds; below 1 is stable.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from gossamer.errors import ConfigError
from gossamer.mixing.graphs import Weights
from gossamer.mixing.matrices import Matrix, global_matrix
from gossamer.mixing.spectra import (
    ZERO,
    exchangeable_moments,
    graphs_of_period,
    nontrivial_eigenvalues,
)
from gossamer.mixing.topologies import Topology

Form = Literal["A", "B"]


class Choice(NamedTuple):
    """A step size of mixing and a momentum."""

    alpha: float
    gamma: float


def consensus_rate(
    topology: Topology,
    weights: Weights,
    num_workers: int,
    *,
    alpha: float,
    gamma: float,
    form: Form,
) -> float:
    """The mean-square consensus rate per round, exactly: the second-moment operator's radius.

    - One graph for ever: the largest squared root of the modes' characteristic equations.
    - Graphs in turn: the squared radius of the product over a period, per round.
    - Random matchings or rings: the second moments are a linear map, which commutes with all
      relabellings and keeps covariances positive. So its radius has an eigenvector that no
      relabelling changes, (p, q, s) times I - J for the blocks of E[(x, x_prev)(x, x_prev)^T],
      and the map on these is 3 by 3.

    Zero for one worker.
    """
    if num_workers == 1:
        return 0.0
    graphs = graphs_of_period(topology, weights, num_workers)
    if topology.changes == "at random":
        m1, m2 = exchangeable_moments(graphs[0], alpha)
        return _radius(_moment_map(m1, m2, gamma, form))
    if len(graphs) == 1:
        eigenvalues = nontrivial_eigenvalues(graphs[0].laplacian())
        return max(mode_modulus(alpha * float(x), gamma, form) for x in eigenvalues) ** 2
    product = np.eye(2 * num_workers)
    for graph in graphs:
        product = _companion(graph.matrix(alpha), gamma, form) @ product
    return float(_radius(product) ** (2 / len(graphs)))


def mode_modulus(step: float, gamma: float, form: Form) -> float:
    """Modulus per round of the mode with `step` = alpha * l.

    Form A's roots solve x^2 - (1 + gamma - step) x + gamma = 0, and are stable for
    0 < step < 2 (1 + gamma); form B's solve x^2 - w (1 + gamma) x + w gamma = 0, w = 1 - step.
    """
    w = 1 - step
    trace, determinant = (w + gamma, gamma) if form == "A" else (w * (1 + gamma), w * gamma)
    under_root = trace**2 - 4 * determinant
    if under_root <= 0:
        return math.sqrt(determinant)
    return (abs(trace) + math.sqrt(under_root)) / 2


def _companion(w: Matrix, gamma: float, form: Form) -> Matrix:
    """The map of (x, x_prev) to (x+, x) on the disagreement [2 M, 2 M]."""
    count = len(w)
    centred = np.eye(count) - global_matrix(count)
    current = w + gamma * np.eye(count) if form == "A" else (1 + gamma) * w
    previous = -gamma * (np.eye(count) if form == "A" else w)
    return np.block([[centred @ current, centred @ previous], [centred, np.zeros((count, count))]])


def _moment_map(m1: float, m2: float, gamma: float, form: Form) -> Matrix:
    """The map of (p, q, s) = (E|x|^2, E<x, x_prev>, E|x_prev|^2) over a round [3, 3]."""
    g = gamma
    if form == "A":
        first = [m2 + 2 * g * m1 + g * g, -2 * g * (m1 + g), g * g]
        second = [m1 + g, -g, 0.0]
    else:
        first = [m2 * (1 + g) ** 2, -2 * g * (1 + g) * m2, m2 * g * g]
        second = [m1 * (1 + g), -m1 * g, 0.0]
    return np.array([first, second, [1.0, 0.0, 0.0]])


def _radius(matrix: Matrix) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def optimal_choice(
    laplacian: Matrix,
    *,
    form: Form,
    alpha: float | None = None,
    gamma: float | None = None,
) -> Choice:
    """The alpha and gamma with the fastest consensus on one fixed graph.

    With l = l_2, L = l_M of the Laplacian and chi = L / l:

        A   alpha = 4 / (sqrt L + sqrt l)^2, gamma = ((sqrt chi - 1) / (sqrt chi + 1))^2, and the
            modulus is (sqrt chi - 1) / (sqrt chi + 1) instead of (chi - 1) / (chi + 1). For a given
            gamma the best alpha is 2 (1 + gamma) / (l + L); for a given alpha the best gamma is
            max((1 - sqrt(alpha l))^2, (1 - sqrt(alpha L))^2).
        B   alpha = 4 / (3 L + l), gamma = (s - 2) / (s + 2) with s = sqrt(3 chi + 1), and the
            modulus is 1 - 2 / s (Lessard et al., 2016, arXiv:1408.3595). With gamma = 0 it is
            form A.

    Args:
        alpha: keep this one and choose gamma for it.
        gamma: keep this one and choose alpha for it.

    Parts of a graph that is not connected each agree within themselves at that pace; without any
    edge alpha is 1 and gamma 0.

    Raises `ConfigError` where form B leaves only one to choose.
    """
    eigenvalues = nontrivial_eigenvalues(laplacian)
    positive = eigenvalues[eigenvalues > ZERO * max(1.0, eigenvalues.max(initial=0.0))]
    if len(positive) == 0:
        return Choice(1.0 if alpha is None else alpha, gamma or 0.0)
    low, high = float(positive[0]), float(positive[-1])
    if form == "A" or gamma == 0:
        if alpha is not None and gamma is None:
            roots = (1 - math.sqrt(alpha * low)) ** 2, (1 - math.sqrt(alpha * high)) ** 2
            return Choice(alpha, max(roots))
        if gamma is None:
            root = math.sqrt(high / low)
            gamma = ((root - 1) / (root + 1)) ** 2
        return Choice(alpha or 2 * (1 + gamma) / (low + high), gamma)
    if alpha is not None or gamma is not None:
        raise ConfigError('form = "B" has an optimal pair only: set both alpha and gamma to "auto"')
    s = math.sqrt(3 * high / low + 1)
    return Choice(4 / (3 * high + low), (s - 2) / (s + 2))


def stable_choice(
    topology: Topology,
    weights: Weights,
    num_workers: int,
    *,
    alpha: float,
    gamma: float,
    form: Form,
) -> Choice | None:
    """A choice near the given one whose disagreement shrinks by 5 % or more in a round.

    The same alpha with the largest smaller gamma out of 0, 0.1, ...; else half the alpha, and so
    on. None where there is none, as on a graph that is not connected.
    """
    for halvings in range(8):
        lazier = alpha / 2**halvings
        for tenths in reversed(range(10)):
            lower = tenths / 10
            if lower > gamma:
                continue
            rate = consensus_rate(
                topology, weights, num_workers, alpha=lazier, gamma=lower, form=form
            )
            if rate < 0.95:
                return Choice(lazier, lower)
    return None
