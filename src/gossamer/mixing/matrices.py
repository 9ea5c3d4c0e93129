"""Mixing matrices W, exactly as workers apply them, and how fast they contract disagreement.

Rows and columns follow the order of `members`. With X [M, P] the workers' vectors as rows, mixing
is `W @ X`. All matrices here are fp64, symmetric and doubly stochastic, so the mean is conserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError
from gossamer.mixing.matchings import Matching

Matrix = NDArray[np.float64]


def global_matrix(num_workers: int) -> Matrix:
    """J [M, M]: the exact average of all."""
    return np.full((num_workers, num_workers), 1.0 / num_workers)


def matching_matrix(
    matching: Matching, members: Sequence[int], failed: Iterable[tuple[int, int]] = ()
) -> Matrix:
    """W [M, M] of pair averages; whoever is alone, or in a failed pair, keeps its own value.

    Args:
        matching: disjoint pairs of members.
        members: worker of each row.
        failed: pairs of `matching`, in either order, whose exchange was lost.

    Raises `ConfigError` for a pair outside `members`, overlapping pairs, or a failed pair that is
    not one of the matching's.
    """
    row = {worker: k for k, worker in enumerate(members)}
    met = [worker for pair in matching for worker in pair]
    if len(set(met)) != len(met) or not set(met) <= row.keys():
        raise ConfigError(f"{matching} is not a matching of the members {tuple(members)}")
    lost = {frozenset(pair) for pair in failed}
    if not lost <= {frozenset(pair) for pair in matching}:
        raise ConfigError("a failed pair is not one of the matching's pairs")
    w = np.eye(len(row))
    for a, b in matching:
        if frozenset((a, b)) not in lost:
            w[np.ix_((row[a], row[b]), (row[a], row[b]))] = 0.5
    return w


def block_average_matrix(survivors: Sequence[int], num_workers: int) -> Matrix:
    """W [M, M] of a global average that only `survivors` took part in; others keep their own.

    Args:
        survivors: rows that are averaged; none or one of them gives the identity.
        num_workers: M.
    """
    chosen = sorted(set(survivors))
    if len(chosen) != len(survivors) or (chosen and not 0 <= chosen[0] <= chosen[-1] < num_workers):
        raise ConfigError(
            f"survivors must be different rows below {num_workers}; got {tuple(survivors)}"
        )
    w = np.eye(num_workers)
    if chosen:
        w[np.ix_(chosen, chosen)] = 1.0 / len(chosen)
    return w


def contraction(matrices: Matrix | Sequence[Matrix]) -> float:
    """rho, the least number with E||(W - J) X||^2 <= rho ||(I - J) X||^2 for every X [M, P].

    For one W this is the squared second-largest singular value; for several, taken as equally
    likely draws of a random W, the largest eigenvalue of mean(W^T W) - J (the same X for all).
    0 agrees at once, 1 does not help; a single worker gives 0.
    """
    draws = matrices if isinstance(matrices, Sequence) else [matrices]
    if not draws:
        raise ConfigError("the contraction of no matrix is not defined")
    second: Matrix = np.mean([w.T @ w for w in draws], axis=0)
    excess: Matrix = second - global_matrix(len(second))
    return max(0.0, float(np.linalg.eigvalsh(excess)[-1]))


def expected_contraction_of_random_pairs(num_workers: int) -> float:
    """rho of one uniformly random perfect matching: (M - 2) / (2 (M - 1)) for even M.

    For odd M, where one worker is left alone, it is 1/2: two given workers meet with probability
    1/M instead of 1/(M - 1), and rho = 1 - (M/2) P(meet). One worker gives 0.
    """
    if num_workers < 1:
        raise ConfigError(f"at least one worker is needed; got {num_workers}")
    if num_workers == 1:
        return 0.0
    if num_workers % 2:
        return 0.5
    return (num_workers - 2) / (2 * (num_workers - 1))
