"""Random perfect matchings that every worker derives for itself, without a coordinator.

Workers that agree on (seed, round, members) agree on who meets whom. Views of the membership may
differ for a moment: messages then carry differing epochs in their tags and never meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.errors import ConfigError
from gossamer.seeding import stream as named_stream

Matching = tuple[tuple[int, int], ...]


def random_matching(
    seed: int, round_index: int, members: Sequence[int], stream: str = "mix"
) -> Matching:
    """Pairs (i, j) with i < j, sorted; uniform over the perfect matchings of `members`.

    A pure function of its arguments, in which the order of `members` does not matter. With an odd
    number one member, uniformly chosen, is left alone; a single member has no pair.

    Args:
        seed: the run's seed, the same on every worker.
        round_index: 0-based.
        members: indices of the workers that take part, each once.
        stream: matchings of different names are independent ("mix1", "mix2").

    Raises `ConfigError` where a member is named twice.
    """
    ordered = sorted(members)
    if len(set(ordered)) != len(ordered):
        raise ConfigError(f"members of a matching must differ; got {tuple(members)}")
    rng = named_stream("matching", stream, seed, round_index, *ordered)
    shuffled = [ordered[k] for k in rng.permutation(len(ordered))]
    pairs = zip(shuffled[0::2], shuffled[1::2], strict=False)  # an odd last one stays alone
    return tuple(sorted((min(a, b), max(a, b)) for a, b in pairs))


def partner_of(worker: int, matching: Matching) -> int | None:
    """Whom `worker` meets, or None where it is left alone."""
    for a, b in matching:
        if worker == a:
            return b
        if worker == b:
            return a
    return None
