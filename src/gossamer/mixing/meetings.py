"""Meetings: pairs of workers at random times, one stream of them that every worker derives itself.

Asynchronous gossip lets the ends of an edge meet at the points of a Poisson process. Here the times
are drawn from the run's seed, so that all workers agree on who meets whom and in which order. The
order is total: workers that hold their own meetings in it can never wait for each other in a
circle.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gossamer.errors import ConfigError
from gossamer.mixing.graphs import Edge
from gossamer.mixing.topologies import Topology
from gossamer.seeding import stream as named_stream


class Meeting(NamedTuple):
    """Two workers, and when they meet.

    Args:
        serial: position in the round's total order, 0-based.
        time: inner steps since the round's start.
        first, second: the two workers, first < second.
    """

    serial: int
    time: float
    first: int
    second: int

    def partner_of(self, worker: int) -> int:
        """The other one."""
        return self.second if worker == self.first else self.first


def check_topology_of_meetings(topology: Topology, num_workers: int) -> None:
    """Raise `ConfigError` where meetings cannot be drawn on a topology's edges."""
    topology.validate_for(num_workers)
    if topology.changes != "never":
        raise ConfigError(
            f"method.topology: meetings are drawn on a fixed graph, and {topology.name!r} is "
            f'another one in each round; "complete" lets any two meet'
        )


@functools.lru_cache(maxsize=32)
def meetings_of_round(
    edges: tuple[Edge, ...],
    *,
    seed: int,
    round_index: int,
    num_workers: int,
    num_steps: int,
    rate: float,
) -> tuple[Meeting, ...]:
    """All meetings of a round, in order of time: a Poisson process, each time on a random edge.

    Args:
        edges: pairs of workers that may meet; equally likely.
        seed: the run's seed, the same on every worker.
        round_index: 0-based.
        num_workers: M, workers in the round.
        num_steps: inner steps in the round, the unit of time.
        rate: meetings that a worker takes part in per step, on average over the workers.
    """
    if not edges:
        return ()
    ends = [worker for edge in edges for worker in edge]
    rng = named_stream("meetings", seed, round_index, num_workers, num_steps, *ends)
    count = int(rng.poisson(rate * num_workers / 2 * num_steps))
    times = np.sort(rng.random(count)) * num_steps
    chosen = rng.integers(len(edges), size=count)
    return tuple(
        Meeting(serial, float(time), *edges[edge])
        for serial, (time, edge) in enumerate(zip(times, chosen, strict=True))
    )


@functools.lru_cache(maxsize=32)
def chi_of_meetings(edges: tuple[Edge, ...], num_workers: int, rate: float) -> tuple[float, float]:
    """(chi1, chi2) of meetings on a graph, which A2CiD2 takes its constants from.

    Each edge meets `lambda = rate M / (2 |E|)` times a step; with Lambda the Laplacian with these
    weights, chi1 = 1 / (its least positive eigenvalue), and chi2 = half the largest effective
    resistance of an edge, (e_i - e_j)^T Lambda^+ (e_i - e_j) / 2, which is never larger. (A. Nabli
    et al., 2023, arXiv:2306.08289; a graph that has come apart counts by its parts.)

    Args:
        edges: pairs of workers that may meet; equally likely.
        num_workers: M, those without an edge included.
        rate: meetings that a worker takes part in per step, on average over the workers.

    Raises `ConfigError` where there is no edge or no meeting.
    """
    if not edges or rate <= 0:
        raise ConfigError("chi is defined for a graph with edges, and meetings on them")
    row = {worker: k for k, worker in enumerate(sorted({w for edge in edges for w in edge}))}
    laplacian = np.zeros((len(row), len(row)))
    for i, j in edges:
        a, b = row[i], row[j]
        laplacian[[a, b], [a, b]] += 1.0
        laplacian[[a, b], [b, a]] -= 1.0
    laplacian *= rate * num_workers / (2 * len(edges))
    values = np.linalg.eigvalsh(laplacian)
    least = float(values[values > 1e-9 * values[-1]][0])
    inverse = np.linalg.pinv(laplacian, rcond=1e-9, hermitian=True)
    ends = [(row[i], row[j]) for i, j in edges]
    largest = max(inverse[a, a] + inverse[b, b] - 2 * inverse[a, b] for a, b in ends)
    return 1.0 / least, float(largest) / 2
