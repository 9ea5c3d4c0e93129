"""How many rounds a method needs until its rate is the optimal statistical one.

On convex problems with equal distributions the excess loss of a method after R rounds of K samples
on each of M workers, N = M K R in all, is a term that vanishes like 1 / sqrt(N), which nobody can
beat, and terms that depend on R. R_min is the R from which on the first dominates. Constants
(smoothness, distance, noise) are left out, so these are orders of growth, not counts to rely on.

    method            the other term          R_min
    minibatch_sgd     1 / R                   N^(1/2)
    minibatch_asgd    1 / R^2                 N^(1/4)
    local_sgd         1 / (K^(1/3) R^(2/3))   M N^(1/2)
    slowcal_sgd       1 / (K^(1/4) R)         (M N)^(1/3)
    local_mixvr       1 / (K^(1/2) R)         M

Source: T. Dahan et al., arXiv:2606.01128, Table 1, by way of a summary; the entry of slowcal_sgd is
ours, from its rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Growth:
    """How the rounds that a method needs grow.

    Args:
        formula: R_min in N and M.
        rounds: the same as a function of (N, M).
        vectors: how many vectors of the model's size a round averages over the workers.
    """

    formula: str
    rounds: Callable[[float, float], float]
    vectors: int


GROWTHS = {
    "local_mixvr": Growth("M", lambda n, m: m, 3),
    "minibatch_asgd": Growth("N^(1/4)", lambda n, m: n**0.25, 1),
    "slowcal_sgd": Growth("(M N)^(1/3)", lambda n, m: (m * n) ** (1 / 3), 2),
    "minibatch_sgd": Growth("N^(1/2)", lambda n, m: n**0.5, 1),
    "local_sgd": Growth("M N^(1/2)", lambda n, m: m * n**0.5, 1),
}


@dataclass(frozen=True, slots=True)
class Need:
    """What one method needs.

    Args:
        rounds: R_min.
        samples_per_round: K = N / (M R_min), on each worker; below 1 there are too few samples for
            the optimal rate with any number of rounds.
        vectors: averaged over the workers in all rounds, in sizes of the model.
    """

    method: str
    formula: str
    rounds: float
    samples_per_round: float
    vectors: float

    @property
    def is_possible(self) -> bool:
        """Whether every round would have a sample on each worker."""
        return self.samples_per_round >= 1


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What every method needs for N samples on M workers, fewest rounds first."""

    samples: float
    workers: int
    needs: tuple[Need, ...]

    @property
    def crossover_workers(self) -> float:
        """M = N^(1/4): with fewer workers local_mixvr needs the fewest rounds, with more ASGD."""
        return float(self.samples**0.25)

    @property
    def asgd_over_mixvr(self) -> float:
        """How many times the rounds of local_mixvr minibatch_asgd needs, N^(1/4) / M."""
        return self.crossover_workers / self.workers


def plan_rounds(samples: float, workers: int) -> RoundPlan:
    """R_min of every method. Raises `ConfigError` where there are fewer samples than workers."""
    if workers < 1:
        raise ConfigError(f"workers: at least 1 needed; got {workers}")
    if not samples >= workers or samples == float("inf"):
        raise ConfigError(
            f"samples: a finite number, at least one for each of {workers} workers, needed; "
            f"got {samples:g}"
        )
    needs = []
    for method, growth in GROWTHS.items():
        rounds = growth.rounds(samples, workers)
        needs.append(
            Need(
                method=method,
                formula=growth.formula,
                rounds=rounds,
                samples_per_round=samples / (workers * rounds),
                vectors=rounds * growth.vectors,
            )
        )
    return RoundPlan(samples, workers, tuple(sorted(needs, key=lambda need: need.rounds)))
