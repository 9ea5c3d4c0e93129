"""Matchings are fair, pure functions of (seed, round, members, name), and never leave a hole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.mixing.matchings import partner_of, random_matching

MEMBERS = st.sets(st.integers(0, 1000), min_size=1, max_size=12).map(sorted)

GOLDEN = ((0, 7), (1, 3), (2, 6), (4, 5))

# Chi-square with 14 degrees of freedom exceeds this once in 1000 samples.
CHI_SQUARE_14_AT_0_001 = 36.12


@given(st.integers(0, 2**40), st.integers(0, 10**6), MEMBERS)
def test_everyone_but_an_odd_one_is_matched_once(
    seed: int, round_index: int, members: list[int]
) -> None:
    matching = random_matching(seed, round_index, members)
    met = [worker for pair in matching for worker in pair]
    assert len(matching) == len(members) // 2
    assert len(set(met)) == len(met)
    assert set(met) <= set(members)
    assert all(a < b for a, b in matching)
    assert list(matching) == sorted(matching)


@given(st.integers(0, 100), MEMBERS, st.randoms(use_true_random=False))
def test_order_of_members_does_not_matter(seed: int, members: list[int], rng: object) -> None:
    shuffled = list(members)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert random_matching(seed, 3, shuffled) == random_matching(seed, 3, members)


def test_pure_and_untouched_by_global_generators() -> None:
    first = random_matching(0, 1, range(8))
    np.random.seed(7)  # what a user's program may do
    random_matching(5, 5, range(8))
    assert random_matching(0, 1, range(8)) == first


def test_value_is_the_same_in_every_release() -> None:
    """Runs are replayed from their seeds: this must never change."""
    assert random_matching(0, 0, range(8), "mix1") == GOLDEN


def test_uniform_over_the_15_matchings_of_6() -> None:
    draws = 6000
    seen = Counter(random_matching(11, r, range(6)) for r in range(draws))
    assert len(seen) == 15
    expected = draws / 15
    assert sum((n - expected) ** 2 / expected for n in seen.values()) < CHI_SQUARE_14_AT_0_001


def test_uniform_over_the_15_near_matchings_of_5() -> None:
    """Odd M: the lone worker and the pairs of the others are together uniform."""
    draws = 6000
    seen = Counter(random_matching(12, r, [2, 3, 5, 7, 11]) for r in range(draws))
    assert len(seen) == 15
    expected = draws / 15
    assert sum((n - expected) ** 2 / expected for n in seen.values()) < CHI_SQUARE_14_AT_0_001
    alone = Counter(w for m, n in seen.items() for w in [2, 3, 5, 7, 11] * n
                    if partner_of(w, m) is None)  # fmt: skip
    assert set(alone) == {2, 3, 5, 7, 11}
    # binomial(6000, 1/5): standard deviation 31, five of them
    assert all(abs(n - draws / 5) < 155 for n in alone.values())


def test_uniform_over_seeds_as_over_rounds() -> None:
    draws = 6000
    seen = Counter(random_matching(seed, 0, range(6)) for seed in range(draws))
    expected = draws / 15
    assert sum((n - expected) ** 2 / expected for n in seen.values()) < CHI_SQUARE_14_AT_0_001


def test_streams_are_independent() -> None:
    """Two names give the same matching of 6 in one round of 15, as chance has it."""
    rounds = 6000
    same = sum(
        random_matching(0, r, range(6), "mix1") == random_matching(0, r, range(6), "mix2")
        for r in range(rounds)
    )
    assert abs(same - rounds / 15) < 5 * (rounds / 15 * 14 / 15) ** 0.5


def test_small_memberships() -> None:
    assert random_matching(0, 0, []) == ()
    assert random_matching(0, 0, [4]) == ()
    assert random_matching(0, 0, [9, 4]) == ((4, 9),)


def test_a_member_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="must differ"):
        random_matching(0, 0, [1, 2, 2])


@given(st.integers(0, 100), MEMBERS)
def test_partner_is_mutual(seed: int, members: list[int]) -> None:
    matching = random_matching(seed, 0, members)
    alone = [w for w in members if partner_of(w, matching) is None]
    assert len(alone) == len(members) % 2
    for worker in members:
        partner = partner_of(worker, matching)
        if partner is not None:
            assert partner != worker
            assert partner_of(partner, matching) == worker
    assert partner_of(2000, matching) is None
