"""Random groups of any size that every worker derives for itself; pairs are the groups of two."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.errors import ConfigError
from gossamer.seeding import stream as named_stream

Groups = tuple[tuple[int, ...], ...]


def random_groups(
    seed: int, round_index: int, members: Sequence[int], size: int, stream: str = "mix"
) -> Groups:
    """All members in groups of `size`, each sorted; the last group may be smaller.

    A pure function of its arguments, in which the order of `members` does not matter. With `size`
    2 the groups are the pairs of `random_matching` with the same seed, round, members and stream.

    Args:
        seed: the run's seed, the same on every worker.
        round_index: 0-based.
        members: indices of the workers that take part, each once.
        size: workers in a group, at least 1.
        stream: groups of different names are independent.

    Raises `ConfigError` where a member is named twice or `size` is below 1.
    """
    ordered = sorted(members)
    if len(set(ordered)) != len(ordered):
        raise ConfigError(f"members of a group must differ; got {tuple(members)}")
    if size < 1:
        raise ConfigError(f"a group has at least one member; got {size=}")
    rng = named_stream("matching", stream, seed, round_index, *ordered)
    shuffled = [ordered[k] for k in rng.permutation(len(ordered))]
    chunks = (shuffled[k : k + size] for k in range(0, len(shuffled), size))
    return tuple(sorted(tuple(sorted(chunk)) for chunk in chunks))


def group_of(worker: int, groups: Groups) -> tuple[int, ...]:
    """The group that `worker` is in; (worker,) where it is in none."""
    for group in groups:
        if worker in group:
            return group
    return (worker,)


def pull_of_random_groups(num_workers: int, size: int) -> float:
    """k: the share of its disagreement that a worker's group lets it see, on average.

    The mean over workers and draws of ||x_i - mean of its group||^2, over ||x_i - mean of all||^2:
    (M - G) / (M - 1) with G groups. 0 for a single worker, and 1 where one group holds all.
    """
    if num_workers < 2:
        return 0.0
    num_groups = -(-num_workers // size)
    return (num_workers - num_groups) / (num_workers - 1)
