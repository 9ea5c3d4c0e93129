"""Dividing samples between workers: every sample to exactly one, the same way every time."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError
from gossamer.seeding import stream

Indices = NDArray[np.int64]

_ATTEMPTS_MAX = 100
_STANDARD_NORMAL = NormalDist()


def permutation(count: int, *key: int | str) -> Indices:
    """0 .. count - 1 in an order that is a pure function of `key`.

    From raw bits and a stable sort: unlike numpy's own permutations the same in every version.
    """
    order: Indices = np.argsort(stream(*key).bit_generator.random_raw(count), kind="stable")
    return order


def split_iid(num_samples: int, num_workers: int, seed: int) -> list[Indices]:
    """Equal shares, to within one sample, of the samples in random order.

    Raises `ConfigError` where there are fewer samples than workers.
    """
    if num_samples < num_workers:
        raise ConfigError(f"{num_samples} samples are too few for {num_workers} workers")
    order = permutation(num_samples, seed, "split")
    cuts = [num_samples * worker // num_workers for worker in range(num_workers + 1)]
    return [order[cuts[w] : cuts[w + 1]] for w in range(num_workers)]


def split_dirichlet(
    labels: Indices, num_workers: int, concentration: float, seed: int, *, samples_min: int = 1
) -> list[Indices]:
    """Each class is divided by shares drawn from a Dirichlet distribution of its own.

    The protocol of T.-M. Hsu, H. Qi and M. Brown, arXiv:1909.06335, in the form in which the shares
    are those of a class over the workers. Small concentrations give each worker few classes, large
    ones tend to the i.i.d. split.

    Args:
        labels: class of each sample, [n].
        concentration: of the symmetric Dirichlet distribution, above 0.
        samples_min: draw again until every worker has so many.

    Raises `ConfigError` where 100 draws have left some worker with fewer than `samples_min`.
    """
    if not 0 < concentration < math.inf:
        raise ConfigError(f"concentration must be above 0 and finite, got {concentration}")
    if len(labels) < num_workers * samples_min:
        raise ConfigError(
            f"{len(labels)} samples are too few for {num_workers} workers of {samples_min} or more"
        )
    for attempt in range(_ATTEMPTS_MAX):
        shards = _divide(labels, num_workers, concentration, (seed, "split", attempt))
        if min(len(shard) for shard in shards) >= samples_min:
            return shards
    raise ConfigError(
        f"concentration {concentration:g} leaves some of {num_workers} workers with fewer than "
        f"{samples_min} samples, {_ATTEMPTS_MAX} times; use a larger one, or fewer workers"
    )


def _divide(
    labels: Indices, num_workers: int, concentration: float, key: tuple[int | str, ...]
) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in range(num_workers)]
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        members = members[permutation(len(members), *key, "order", label)]
        source = stream(*key, "shares", label)
        logs = [_log_gamma_variate(concentration, source) for _ in range(num_workers)]
        shares = np.exp(np.array(logs) - max(logs))
        cuts = np.floor(len(members) * np.cumsum(shares / shares.sum())).astype(np.int64)
        for worker, part in enumerate(np.split(members, cuts[:-1])):
            parts[worker].append(part)
    return [np.concatenate(part) for part in parts]


def _log_gamma_variate(shape: float, source: np.random.Generator) -> float:
    """The logarithm of a Gamma(shape, 1) variate, which for small shapes is itself below 1e-308.

    G. Marsaglia and W. Tsang, "A Simple Method for Generating Gamma Variables", 2000, and for
    shapes below 1 the power of a uniform on top; from raw bits, as `permutation`.
    """
    boost = 0.0
    if shape < 1:
        boost, shape = math.log(_uniform(source)) / shape, shape + 1
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        normal = _STANDARD_NORMAL.inv_cdf(_uniform(source))
        cube = (1 + c * normal) ** 3
        if cube > 0:
            bound = normal**2 / 2 + d - d * cube + d * math.log(cube)
            if math.log(_uniform(source)) < bound:
                return math.log(d * cube) + boost


def _uniform(source: np.random.Generator) -> float:
    """In (0, 1), a multiple of 2^-54."""
    return ((int(source.bit_generator.random_raw()) >> 11) + 0.5) * 2.0**-53
