"""Gossip with momentum: the second-moment operator, its table, and the optimal pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gossamer.errors import ConfigError
from gossamer.mixing.consensus import (
    Form,
    consensus_rate,
    mode_modulus,
    optimal_choice,
    stable_choice,
)
from gossamer.mixing.matrices import Matrix
from gossamer.mixing.topologies import EdgeList, Topology, mixing_graph, parse_topology

PAIRS, RING = parse_topology("random_pairs"), parse_topology("random_ring")
GAMMAS = (0.0, 0.2, 0.5, 0.7, 0.8, 0.9)

# topology, alpha * lambda, form: the rates at GAMMAS that are known of 8 workers (+- 0.01)
TABLE: list[tuple[Topology, float, Form, tuple[float, ...]]] = [
    (PAIRS, 1 / 2, "A", (0.43, 0.49, 0.75, 0.95, 1.06, 1.17)),
    (PAIRS, 1 / 2, "B", (0.43, 0.46, 0.65, 0.84, 0.94, 1.05)),
    (PAIRS, 1 / 4, "A", (0.58, 0.50, 0.63, 0.81, 0.91, 1.02)),
    (PAIRS, 1 / 4, "B", (0.57, 0.51, 0.50, 0.64, 0.72, 0.81)),
    (RING, 1 / 3, "A", (0.24, 0.35, 0.64, 0.84, 0.95, 1.05)),
    (RING, 1 / 3, "B", (0.24, 0.28, 0.44, 0.58, 0.66, 0.73)),
    (RING, 1 / 4, "A", (0.29, 0.32, 0.60, 0.80, 0.90, 1.01)),
]


@pytest.mark.parametrize(("topology", "weight", "form", "known"), TABLE)
def test_the_known_table_of_rates(
    topology: Topology, weight: float, form: Form, known: tuple[float, ...]
) -> None:
    for gamma, rate in zip(GAMMAS, known, strict=True):
        computed = consensus_rate(topology, "laplacian", 8, alpha=weight, gamma=gamma, form=form)
        assert computed == pytest.approx(rate, abs=0.02)
        assert (computed < 1) == (rate < 1)


def one_round(w: Matrix, gamma: float, form: Form) -> Matrix:
    """The map of (x, x_prev) on everything, written down from the update itself."""
    eye, zero = np.eye(len(w)), np.zeros_like(w)
    if form == "A":
        return np.block([[w + gamma * eye, -gamma * eye], [eye, zero]])
    return np.block([[(1 + gamma) * w, -gamma * w], [eye, zero]])


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("count", [3, 4])
def test_three_numbers_are_the_whole_operator(count: int, gamma: float, form: Form) -> None:
    """Against E[A (x) A] over all matchings, with no use of symmetry, on centred vectors."""
    matchings = {PAIRS.edges(0, r, range(count)) for r in range(60)}
    assert len(matchings) == 3
    centre = np.eye(count) - 1 / count
    both = np.kron(np.eye(2), centre)
    total = 0
    for matching in sorted(matchings):
        w = np.eye(count)
        for a, b in matching:
            w[np.ix_((a, b), (a, b))] = 0.5
        a = both @ one_round(w, gamma, form) @ both
        total = total + np.kron(a, a)
    whole = np.abs(np.linalg.eigvals(total / len(matchings))).max()
    rate = consensus_rate(PAIRS, "metropolis", count, alpha=1, gamma=gamma, form=form)
    assert rate == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize("name", ["ring", "star", "one_peer_exponential", "erdos_renyi"])
def test_fixed_and_turning_graphs_against_the_product_of_rounds(name: str, form: Form) -> None:
    topology = parse_topology(name)
    count, gamma, alpha = 6, 0.6, 0.9
    turn = topology.period(count) or 1
    product = np.eye(2 * count)
    centre = np.kron(np.eye(2), np.eye(count) - 1 / count)
    for r in range(turn):
        w = mixing_graph(
            topology, "metropolis", seed=0, round_index=r, members=range(count)
        ).matrix(alpha)  # fmt: skip
        product = centre @ one_round(w, gamma, form) @ centre @ product
    expected = np.abs(np.linalg.eigvals(product)).max() ** (2 / turn)
    rate = consensus_rate(topology, "metropolis", count, alpha=alpha, gamma=gamma, form=form)
    assert rate == pytest.approx(expected, rel=1e-6)


def test_without_momentum_the_rate_is_rho() -> None:
    for name, rho in (("random_pairs", 3 / 7), ("complete", 0.0), ("random_ring", 5 / 21)):
        for form in ("A", "B"):
            rate = consensus_rate(
                parse_topology(name), "metropolis", 8, alpha=1, gamma=0, form=form
            )
            assert rate == pytest.approx(rho, abs=1e-12)


def test_form_a_is_stable_up_to_twice_one_plus_gamma() -> None:
    for gamma in (0.0, 0.4, 0.9):
        limit = 2 * (1 + gamma)
        assert mode_modulus(0.999 * limit, gamma, "A") < 1 < mode_modulus(1.001 * limit, gamma, "A")


def laplacian_of(name: str, count: int) -> Matrix:
    graph = mixing_graph(
        parse_topology(name), "laplacian", seed=0, round_index=0, members=range(count)
    )
    return graph.laplacian()


def test_the_ring_of_32() -> None:
    """chi = 104.1; 0.98097 without momentum and 0.82147 with it, in norm per round."""
    ring, laplacian = parse_topology("ring"), laplacian_of("ring", 32)
    for gamma, expected in ((0.0, 0.98097), (None, 0.82147)):
        choice = optimal_choice(laplacian, form="A", gamma=gamma)
        rate = consensus_rate(
            ring, "laplacian", 32, alpha=choice.alpha, gamma=choice.gamma, form="A"
        )
        assert math.sqrt(rate) == pytest.approx(expected, abs=5e-6)
    low, high = 2 - 2 * math.cos(2 * math.pi / 32), 4
    assert choice.alpha == pytest.approx(4 / (math.sqrt(high) + math.sqrt(low)) ** 2)


def rate_on(laplacian: Matrix, alpha: float, gamma: float, form: Form) -> float:
    return max(mode_modulus(alpha * x, gamma, form) for x in np.linalg.eigvalsh(laplacian)[1:])


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize(("name", "count"), [("ring", 9), ("star", 6), ("torus", 12)])
def test_no_neighbouring_pair_is_better(name: str, count: int, form: Form) -> None:
    laplacian = laplacian_of(name, count)
    best = optimal_choice(laplacian, form=form)
    rate = rate_on(laplacian, *best, form)
    for a in np.linspace(0.5, 1.5, 41):
        for g in np.linspace(0, 0.99, 100):
            assert rate <= rate_on(laplacian, a * best.alpha, g, form) + 1e-9


@pytest.mark.parametrize(("name", "count"), [("ring", 9), ("star", 6), ("torus", 12)])
def test_the_best_partner_of_a_given_alpha_or_gamma(name: str, count: int) -> None:
    laplacian = laplacian_of(name, count)
    high = float(np.linalg.eigvalsh(laplacian)[-1])
    for alpha in (0.2 / high, 1 / high, 2.5 / high):
        choice = optimal_choice(laplacian, form="A", alpha=alpha)
        assert choice.alpha == alpha
        others = [rate_on(laplacian, alpha, g, "A") for g in np.linspace(0, 0.999, 400)]
        assert rate_on(laplacian, *choice, "A") <= min(others) + 1e-9
    for gamma in (0.0, 0.3, 0.8):
        choice = optimal_choice(laplacian, form="A", gamma=gamma)
        assert choice.gamma == gamma
        others = [rate_on(laplacian, a, gamma, "A") for a in np.linspace(0.01, 4 / high, 400)]
        assert rate_on(laplacian, *choice, "A") <= min(others) + 1e-9


def test_form_b_chooses_both_or_none() -> None:
    laplacian = laplacian_of("ring", 5)
    with pytest.raises(ConfigError, match='set both alpha and gamma to "auto"'):
        optimal_choice(laplacian, form="B", alpha=0.3)
    assert optimal_choice(laplacian, form="B", gamma=0) == optimal_choice(
        laplacian, form="A", gamma=0
    )


def test_parts_of_a_graph_have_the_pace_of_the_slowest() -> None:
    graph = mixing_graph(
        EdgeList(pairs=((0, 1), (2, 3), (3, 4))),
        "laplacian", seed=0, round_index=0, members=range(5),
    )  # fmt: skip
    # eigenvalues 2 of the pair, 1 and 3 of the path
    choice = optimal_choice(graph.laplacian(), form="A")
    assert choice.alpha == pytest.approx(4 / (math.sqrt(3) + 1) ** 2)
    assert optimal_choice(np.zeros((1, 1)), form="A") == (1, 0)
    assert optimal_choice(np.zeros((3, 3)), form="B", gamma=0.3) == (1, 0.3)


def test_a_stable_choice_is_stable() -> None:
    choice = stable_choice(PAIRS, "metropolis", 8, alpha=1, gamma=0.9, form="A")
    assert choice == (1, 0.6)
    assert stable_choice(PAIRS, "metropolis", 8, alpha=1, gamma=0.25, form="A") == (1, 0.2)
    # alpha far too large: no momentum helps, a smaller alpha does
    lazier = stable_choice(parse_topology("ring"), "laplacian", 8, alpha=2, gamma=0, form="A")
    assert lazier is not None and lazier.alpha < 0.5
    parts = EdgeList(pairs=((0, 1), (2, 3)))
    assert stable_choice(parts, "metropolis", 4, alpha=1, gamma=0.5, form="A") is None


def test_one_worker_agrees_with_itself() -> None:
    assert consensus_rate(PAIRS, "metropolis", 1, alpha=1, gamma=0.9, form="A") == 0
