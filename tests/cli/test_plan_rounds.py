"""`gossamer plan rounds`: the published ratios, the rates behind the formulas, the words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.measure.round_complexity import GROWTHS, plan_rounds
from gossamer.methods import METHODS

# The term of each method's rate that depends on rounds, and the optimal rate, without constants.
TERMS: dict[str, Callable[[float, float], float]] = {
    "minibatch_sgd": lambda r, k: 1 / r,
    "minibatch_asgd": lambda r, k: 1 / r**2,
    "local_sgd": lambda r, k: 1 / (k ** (1 / 3) * r ** (2 / 3)),
    "slowcal_sgd": lambda r, k: 1 / (k**0.25 * r),
    "local_mixvr": lambda r, k: 1 / (k**0.5 * r),
}


@given(
    method=st.sampled_from(sorted(TERMS)),
    samples=st.floats(1e2, 1e14),
    workers=st.integers(1, 1000),
)
def test_the_terms_meet_where_the_formula_says(method: str, samples: float, workers: int) -> None:
    """At R_min the method's own term equals 1 / sqrt(N), and above it is smaller."""
    rounds = GROWTHS[method].rounds(samples, workers)
    optimal = samples**-0.5

    def term(r: float) -> float:
        return TERMS[method](r, samples / (workers * r))

    assert math.isclose(term(rounds), optimal, rel_tol=1e-9)
    assert term(2 * rounds) < optimal < term(rounds / 2)


@pytest.mark.parametrize(
    ("samples", "workers", "ratio", "published"),
    [(1.28e6, 8, 4.204, 4.2), (15e12, 64, 30.75, 30.7)],
)
def test_the_published_ratios_come_out(
    samples: float, workers: int, ratio: float, published: float
) -> None:
    plan = plan_rounds(samples, workers)
    assert plan.asgd_over_mixvr == pytest.approx(ratio, rel=2e-4)
    assert plan.asgd_over_mixvr == pytest.approx(published, abs=0.06)
    rounds = {need.method: need.rounds for need in plan.needs}
    assert rounds["minibatch_asgd"] / rounds["local_mixvr"] == plan.asgd_over_mixvr


def test_the_winner_changes_at_the_crossover() -> None:
    assert plan_rounds(1e8, 99).needs[0].method == "local_mixvr"
    assert plan_rounds(1e8, 101).needs[0].method == "minibatch_asgd"
    assert plan_rounds(1e8, 7).crossover_workers == pytest.approx(100)


def test_all_planned_methods_exist() -> None:
    assert set(GROWTHS) <= set(METHODS)


def test_rounds_that_leave_no_samples_are_told() -> None:
    needs = {need.method: need for need in plan_rounds(1000, 16).needs}
    assert needs["local_sgd"].samples_per_round == pytest.approx(1000 / (16 * 16 * 1000**0.5))
    assert not needs["local_sgd"].is_possible
    assert needs["local_mixvr"].is_possible


@pytest.mark.parametrize(("samples", "workers"), [(3, 4), (float("inf"), 4), (float("nan"), 4)])
def test_impossible_numbers_are_refused(samples: float, workers: int) -> None:
    with pytest.raises(ConfigError, match="samples: a finite number, at least one for each of 4"):
        plan_rounds(samples, workers)


def test_the_command_prints_what_it_counts(gossamer: Any) -> None:
    told = gossamer("plan", "rounds", "--samples", "1.28M", "--workers", "8")
    assert told.code == 0
    assert "N = 1.28M samples, M = 8 workers" in told.out
    assert "needs 4.204 times the rounds of local_mixvr" in told.out
    assert "Crossover M = N^(1/4) = 33.64" in told.out
    rows = [line.split()[0] for line in told.out.splitlines() if line.split()[:1]]
    order = [name for name in rows if name in GROWTHS]
    assert order == ["local_mixvr", "minibatch_asgd", "slowcal_sgd", "minibatch_sgd", "local_sgd"]
    many = gossamer("plan", "rounds", "--samples", "1.28M", "--workers", "100").out
    assert "Here local_mixvr needs 2.973 times the rounds of minibatch_asgd" in many


def test_machines_get_one_object(gossamer: Any) -> None:
    content = gossamer("plan", "rounds", "--samples", "15T", "--workers", "64", "--json").json
    assert content["asgd_over_mixvr"] == pytest.approx(30.75, abs=0.005)
    assert content["fewest_rounds"] == "local_mixvr"
    assert content["samples"] == 15e12
    by_name = {row["method"]: row for row in content["rows"]}
    assert by_name["local_mixvr"]["vectors"] == 3 * 64
    assert by_name["local_mixvr"]["samples_per_round"] == pytest.approx(15e12 / 64**2)


@pytest.mark.parametrize(
    ("samples", "workers", "message"),
    [
        ("many", "8", "--samples: a count expected"),
        ("1.28M", "0", "workers: at least 1 needed"),
        ("4", "8", "samples: a finite number"),
    ],
)
def test_mistakes_are_one_line(gossamer: Any, samples: str, workers: str, message: str) -> None:
    told = gossamer("plan", "rounds", "--samples", samples, "--workers", workers)
    assert told.code == 2
    assert message in told.error_line


def test_help_has_an_example(gossamer: Any) -> None:
    assert (
        "gossamer plan rounds --samples 1.28M --workers 8"
        in gossamer("plan", "rounds", "--help").out
    )
