"""Decoupled DiLoCo's tokens: each is accounted for, and in at most one merge of a fragment."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossamer.errors import InvariantViolated
from gossamer.measure.settings import Measure
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Outage
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.testing.accounts import AccountedDiLoCo, Life, MergedShare
from gossamer.testing.decoupled_cases import random_case
from gossamer.training.problems import TinyMLP


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(seed=664)  # a learner's letter is merged after its crash and return
def test_under_any_plan_every_token_is_accounted_for(seed: int) -> None:
    """`benchmarks/decoupled_soak.py` does the same by the thousand."""
    random_case(seed).run()


def run(method: AccountedDiLoCo, faults: Faults) -> SimulationResult:
    return simulate(
        method=method,
        task=TinyMLP(),
        workers=3,
        rounds=5,
        network=Network(bandwidth="1Mbit/s", latency="50ms", deadline="10s"),
        timing=Timing(step_time=1.0),
        faults=faults,
        measure=Measure(every=0),
    )


def test_what_a_dead_learner_had_is_reported_lost() -> None:
    """It dies in its 21st step; fragments are merged each 8 steps and received 2 later."""
    method = AccountedDiLoCo(inner_steps=8)
    result = run(method, Faults(crashes=(CrashAt(worker=1, start=20.5),)))
    method.accounts.check(result)
    (dead,) = [life for life in method.accounts.lives if not life.has_finished]
    assert dead.learner == 1
    lost = result.summary["records"]["lost_tokens"]
    assert (lost["count"], lost["mean"]) == (1, sum(dead.tokens))
    # Received after steps 16 + offset + tau at the latest: fewer than a cycle's tokens are lost.
    assert 0 < sum(dead.tokens) <= 4 * 8 * 16


def test_a_merge_of_a_former_life_does_not_count_for_the_next() -> None:
    """Learner 1 is merged, dies, and is back with the state of a donor that was cut off then."""
    cut = tuple(Outage(worker=w, start=14.0, duration=6.0) for w in (0, 2))
    crash = CrashAt(worker=1, start=21.0, return_after=0.5)
    method = AccountedDiLoCo(inner_steps=8)
    method.accounts.check(run(method, Faults(crashes=(crash,), outages=cut)))
    assert [life.life for life in method.accounts.lives if life.learner == 1] == [0, 1]


def test_the_accounts_see_what_is_wrong() -> None:
    method = AccountedDiLoCo(inner_steps=8)
    result, accounts = run(method, Faults()), method.accounts
    accounts.check(result)
    share = accounts.shares[0]
    wrong = MergedShare(1e9, share.fragment, share.learner, share.life, share.base, 99, 64)
    accounts.shares.append(wrong)
    with pytest.raises(InvariantViolated, match="merged twice"):
        accounts.check(result)
    accounts.shares.pop()
    life = accounts.lives[0]
    accounts.lives[0] = Life(life.learner, life.life, True, life.versions, (0, *life.tokens[1:]))
    with pytest.raises(InvariantViolated, match="pending tokens"):
        accounts.check(result)
