"""Meetings: their numbers, times and pairs, and the constants that A2CiD2 takes from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gossamer.errors import ConfigError
from gossamer.mixing.meetings import check_topology_of_meetings, chi_of_meetings, meetings_of_round
from gossamer.mixing.topologies import parse_topology


def ring(num_workers: int) -> tuple[tuple[int, int], ...]:
    return parse_topology("ring").edges(0, 0, range(num_workers))


def complete(num_workers: int) -> tuple[tuple[int, int], ...]:
    return parse_topology("complete").edges(0, 0, range(num_workers))


def test_meetings_come_in_order_of_time_on_edges_at_the_asked_rate() -> None:
    edges = complete(8)
    met = np.zeros(8)
    per_edge: dict[tuple[int, int], int] = dict.fromkeys(edges, 0)
    for r in range(300):
        found = meetings_of_round(
            edges, seed=1, round_index=r, num_workers=8, num_steps=10, rate=1.5
        )
        assert [m.serial for m in found] == list(range(len(found)))
        assert [m.time for m in found] == sorted(m.time for m in found)
        assert all(0 <= m.time <= 10 for m in found)
        for m in found:
            assert m.partner_of(m.first) == m.second and m.partner_of(m.second) == m.first
            met[[m.first, m.second]] += 1
            per_edge[m.first, m.second] += 1
    assert met / 3000 == pytest.approx(1.5, rel=0.06)  # sd of each: 1.2 %
    expected = 300 * 10 * 1.5 * 8 / 2 / len(edges)
    chi_square = sum((n - expected) ** 2 / expected for n in per_edge.values())
    assert chi_square < 28 + 4 * math.sqrt(2 * 28)


def test_meetings_are_a_function_of_seed_round_and_graph() -> None:
    def draw(seed: int = 0, round_index: int = 0, workers: int = 8, steps: int = 10) -> object:
        return meetings_of_round(
            ring(workers), seed=seed, round_index=round_index, num_workers=workers,
            num_steps=steps, rate=1.0,
        )  # fmt: skip

    base = draw()
    meetings_of_round.cache_clear()
    assert draw() == base
    others = [draw(seed=1), draw(round_index=1), draw(workers=9), draw(steps=11)]
    assert all(other != base for other in others)
    assert meetings_of_round((), seed=0, round_index=0, num_workers=1, num_steps=5, rate=1.0) == ()


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_chi_of_the_complete_graph_and_of_the_ring_in_closed_form(
    workers: int, rate: float
) -> None:
    # Every pair meets rate / (M - 1) times a step: Lambda = rate M / (M - 1) (I - J).
    both = (workers - 1) / workers / rate
    assert chi_of_meetings(complete(workers), workers, rate) == pytest.approx((both, both))
    # On the ring, rate / 2 an edge; an edge's resistance is that of 1 and M - 1 edges in parallel.
    chi1 = 1 / (rate * (1 - math.cos(2 * math.pi / workers)))
    chi2 = (workers - 1) / workers / rate
    assert chi_of_meetings(ring(workers), workers, rate) == pytest.approx((chi1, chi2))


def test_chi_by_its_definition_as_suprema() -> None:
    edges = parse_topology({"name": "erdos_renyi", "probability": 0.4}).edges(0, 0, range(9))
    weight = 1.0 * 9 / (2 * len(edges))
    differences = np.zeros((len(edges), 9))
    for k, (i, j) in enumerate(edges):
        differences[k, i], differences[k, j] = 1.0, -1.0
    laplacian = weight * differences.T @ differences
    chi1, chi2 = chi_of_meetings(edges, 9, 1.0)
    x = np.random.default_rng(0).normal(size=(9, 2000))
    x -= x.mean(0)
    ratios = (x**2).sum(0) / np.einsum("ik,ij,jk->k", x, laplacian, x)
    assert ratios.max() <= chi1 * (1 + 1e-12)
    for _ in range(400):  # inverse iteration reaches the supremum
        x = np.linalg.lstsq(laplacian, x, rcond=1e-10)[0]
        x /= np.linalg.norm(x, axis=0)
    ratios = (x**2).sum(0) / np.einsum("ik,ij,jk->k", x, laplacian, x)
    assert ratios.max() == pytest.approx(chi1, rel=1e-9)
    currents = np.linalg.lstsq(laplacian, differences.T, rcond=1e-10)[0]
    resistances = np.einsum("ki,ik->k", differences, currents)
    assert chi2 == pytest.approx(resistances.max() / 2)
    assert chi2 <= chi1


def test_a_graph_that_has_come_apart_counts_by_its_parts() -> None:
    assert chi_of_meetings(((0, 1), (5, 9)), 4, 1.0) == pytest.approx((0.5, 0.5))
    for edges, rate in (((), 1.0), (((0, 1),), 0.0)):
        with pytest.raises(ConfigError, match="chi is defined"):
            chi_of_meetings(edges, 2, rate)


def test_meetings_need_a_fixed_graph() -> None:
    check_topology_of_meetings(parse_topology("ring"), 8)
    with pytest.raises(ConfigError, match=r"random_pairs.*another one in each round.*complete"):
        check_topology_of_meetings(parse_topology("random_pairs"), 8)
    with pytest.raises(ConfigError, match="worker 9 is not in this run"):
        check_topology_of_meetings(parse_topology({"name": "edges", "pairs": [[0, 9]]}), 8)
