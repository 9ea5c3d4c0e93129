"""The graphs on which workers mix, each a pure function of (seed, round, members).

Fixed graphs are laid over the members in the order of their indices, so that a ring stays a ring
when a worker leaves, and takes it in again when it returns. Only an edge list is tied to worker
indices, and loses the edges of those that are away. Random graphs are drawn once, from a seed of
their own; random matchings and random rings are drawn anew in each round from the run's seed.

    topology = "ring"                                   in a recipe's [method]
    topology = { name = "small_world", degree = 4, rewiring = 0.2 }
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from gossamer.errors import ConfigError, nearest
from gossamer.mixing.graphs import Edge, MixingGraph, Weights, weighted_graph
from gossamer.mixing.matchings import random_matching
from gossamer.seeding import derive_seed
from gossamer.seeding import stream as named_stream
from gossamer.settings import Settings

if TYPE_CHECKING:
    import networkx

_DRAWS_MAX = 100  # of a random graph, until one is connected


class Topology(Settings):
    """Who may mix with whom.

    A subclass gives the edges of a round as pairs of ranks 0 .. M - 1 (`_edges`), and the arcs
    where its directed form is another graph. `changes` says whether the round matters.
    """

    changes: ClassVar[Literal["never", "in turn", "at random"]] = "never"
    name: str

    def __str__(self) -> str:
        """Its name, and the parameters that were given: what a recipe says."""
        given = self.model_dump(exclude_defaults=True, exclude={"name"})
        told = ", ".join(f"{key}={value}" for key, value in given.items())
        return f"{self.name}({told})" if told else self.name

    def validate_for(self, num_workers: int) -> None:
        """Raise `ConfigError` where the graph cannot be laid over so many workers."""

    def period(self, num_members: int) -> int | None:
        """After how many rounds the graphs repeat; None where they are random."""
        return None if self.changes == "at random" else 1

    def edges(
        self, seed: int, round_index: int, members: Sequence[int], stream: str = "mix1"
    ) -> tuple[Edge, ...]:
        """The undirected edges (i, j), i < j, sorted, of a round.

        Args:
            seed: the run's seed, the same on every worker; only random rounds use it.
            round_index: 0-based.
            members: the workers that take part; their order does not matter.
            stream: random rounds of different names are independent.
        """
        return self._cached(seed, round_index, members, stream, directed=False)

    def arcs(
        self, seed: int, round_index: int, members: Sequence[int], stream: str = "mix1"
    ) -> tuple[Edge, ...]:
        """The directed edges (from, to) of a round, sorted: for push-sum.

        Both directions of each edge, unless the topology has a directed form of its own.
        """
        return self._cached(seed, round_index, members, stream, directed=True)

    def _cached(
        self, seed: int, round_index: int, members: Sequence[int], stream: str, *, directed: bool
    ) -> tuple[Edge, ...]:
        ordered = tuple(sorted(members))
        if self.changes != "at random":
            seed, stream = 0, ""
            round_index %= self.period(len(ordered)) or 1
        return _edges(self, seed, round_index, ordered, stream, directed=directed)

    @abstractmethod
    def _edges(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        """Edges of the round between members; in any order and direction."""

    def _arcs(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        """Arcs of the round between members; in any order."""
        edges = tuple(self._edges(seed, round_index, members, stream))
        return (*edges, *((j, i) for i, j in edges))


@functools.lru_cache(maxsize=512)
def _edges(
    topology: Topology,
    seed: int,
    round_index: int,
    members: tuple[int, ...],
    stream: str,
    *,
    directed: bool,
) -> tuple[Edge, ...]:
    if len(members) < 2:
        return ()
    if directed:
        return tuple(sorted(frozenset(topology._arcs(seed, round_index, members, stream))))
    found = topology._edges(seed, round_index, members, stream)
    return tuple(sorted({(min(edge), max(edge)) for edge in found}))


class _Ranked(Topology):
    """A graph over ranks: the k-th member is node k."""

    def _edges(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        ranks = self._ranks(len(members), round_index)
        return [(members[a], members[b]) for a, b in ranks]

    @abstractmethod
    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        """Edges between ranks 0 .. count - 1, count >= 2."""


class Complete(_Ranked):
    """Everybody with everybody."""

    name: Literal["complete"] = "complete"

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        return [(a, b) for a in range(count) for b in range(a + 1, count)]


class Ring(_Ranked):
    """Each with the next and the last, in the order of their indices."""

    name: Literal["ring"] = "ring"

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        return [(a, (a + 1) % count) for a in range(count)]


class Torus(_Ranked):
    """A grid that is closed in both directions, as square as the number of members allows.

    A prime number of members gives a ring.
    """

    name: Literal["torus"] = "torus"

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        import networkx

        rows, columns = torus_shape(count)
        grid = networkx.grid_2d_graph(rows, columns, periodic=True)
        return [(a * columns + b, c * columns + d) for (a, b), (c, d) in grid.edges]


def torus_shape(count: int) -> tuple[int, int]:
    """(rows, columns) of the torus over `count` members, rows <= columns."""
    rows = max(r for r in range(1, int(count**0.5) + 1) if count % r == 0)
    return rows, count // rows


class Hypercube(_Ranked):
    """Ranks that differ in one bit; where M is no power of two, without the corners above M - 1."""

    name: Literal["hypercube"] = "hypercube"

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        return [(a, a ^ hop) for hop in hops(count) for a in range(count) if a < a ^ hop < count]


def hops(count: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `count`."""
    return tuple(1 << bit for bit in range(max(0, count - 1).bit_length()))


class Exponential(_Ranked):
    """The static exponential graph: each with those 1, 2, 4, ... places further, and back.

    Directed, each sends to those further only (B. Ying et al., 2021, arXiv:2110.13363).
    """

    name: Literal["exponential"] = "exponential"

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        return [(a, (a + hop) % count) for hop in hops(count) for a in range(count)]

    def _arcs(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        return self._edges(seed, round_index, members, stream)


class OnePeerExponential(_Ranked):
    """One hop of the exponential graph in each round, in turn: 1, 2, 4, ..., 1, ...

    Directed, each sends to the one that many places further (Assran et al., 2019,
    arXiv:1811.10792). Undirected, ranks meet that differ in that bit, so that all are in pairs
    where M is a power of two, and log2 M rounds give the exact average; otherwise those whose
    partner's rank would be M or more stay alone.
    """

    changes: ClassVar[Literal["never", "in turn", "at random"]] = "in turn"
    name: Literal["one_peer_exponential"] = "one_peer_exponential"

    def period(self, num_members: int) -> int | None:
        return max(1, len(hops(num_members)))

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        hop = hops(count)[round_index % len(hops(count))]
        return [(a, a ^ hop) for a in range(count) if a < a ^ hop < count]

    def _arcs(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        count = len(members)
        hop = hops(count)[round_index % len(hops(count))]
        return [(members[a], members[(a + hop) % count]) for a in range(count)]


class Star(_Ranked):
    """The member with the lowest index with everybody else."""

    name: Literal["star"] = "star"

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        return [(0, a) for a in range(1, count)]


class ErdosRenyi(_Ranked):
    """Each pair with a probability, independently; drawn again until the graph is connected."""

    name: Literal["erdos_renyi"] = "erdos_renyi"
    probability: float = Field(0.5, gt=0, le=1, description="that two workers are neighbours")
    seed: int = Field(0, ge=0, description="of the graph, which is drawn once")

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        import networkx

        for draw in range(_DRAWS_MAX):
            seed = derive_seed(self.seed, "erdos_renyi", count, draw)
            graph = networkx.gnp_random_graph(count, self.probability, seed=seed)
            if networkx.is_connected(graph):
                return list(graph.edges)
        raise ConfigError(
            f"erdos_renyi: none of {_DRAWS_MAX} graphs of {count} workers with probability "
            f"{self.probability:g} was connected; raise the probability"
        )

    def validate_for(self, num_workers: int) -> None:
        self.edges(0, 0, range(num_workers))


class SmallWorld(_Ranked):
    """A ring with `degree` nearest neighbours, some edges of which lead elsewhere.

    D. Watts and S. Strogatz, 1998; drawn again until the graph is connected.
    """

    name: Literal["small_world"] = "small_world"
    degree: int = Field(4, ge=2, description="neighbours on the ring, an even number")
    rewiring: float = Field(0.2, ge=0, le=1, description="probability that an edge leads elsewhere")
    seed: int = Field(0, ge=0, description="of the graph, which is drawn once")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.degree % 2:
            raise ValueError(f"degree: an even number expected, got {self.degree}")
        return self

    def _ranks(self, count: int, round_index: int) -> Iterable[Edge]:
        import networkx

        if count <= self.degree:  # everybody is near everybody
            return Complete()._ranks(count, round_index)
        for draw in range(_DRAWS_MAX):
            seed = derive_seed(self.seed, "small_world", count, draw)
            graph = networkx.watts_strogatz_graph(count, self.degree, self.rewiring, seed=seed)
            if networkx.is_connected(graph):
                return list(graph.edges)
        raise ConfigError(
            f"small_world: none of {_DRAWS_MAX} graphs of {count} workers with degree "
            f"{self.degree} and rewiring {self.rewiring:g} was connected; raise the degree"
        )

    def validate_for(self, num_workers: int) -> None:
        self.edges(0, 0, range(num_workers))


class EdgeList(Topology):
    """Any graph, by its edges between worker indices; those who are away take theirs with them."""

    name: Literal["edges"] = "edges"
    pairs: tuple[Edge, ...] = Field(
        min_length=1, description="pairs of worker indices, such as [[0, 1], [1, 2]]"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, j in self.pairs:
            if i == j or min(i, j) < 0:
                raise ValueError(f"pairs: two different worker indices expected, got [{i}, {j}]")
        return self

    def validate_for(self, num_workers: int) -> None:
        largest = max(max(pair) for pair in self.pairs)
        if largest >= num_workers:
            raise ConfigError(
                f"topology.pairs: worker {largest} is not in this run, which has {num_workers} "
                f"workers (0 to {num_workers - 1})"
            )
        graph = _as_networkx(self.edges(0, 0, range(num_workers)), range(num_workers))
        if not _is_connected(graph):
            raise ConfigError(
                "topology.pairs: the graph is not connected, so its parts would never agree; "
                "add edges between them"
            )

    def _edges(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        present = frozenset(members)
        return [(i, j) for i, j in self.pairs if i in present and j in present]


class RandomPairs(Topology):
    """A random perfect matching in each round; with an odd number of members one stays alone."""

    changes: ClassVar[Literal["never", "in turn", "at random"]] = "at random"
    name: Literal["random_pairs"] = "random_pairs"

    def _edges(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        return random_matching(seed, round_index, members, stream)


class RandomRing(Topology):
    """A random ring through all members in each round: two peers each."""

    changes: ClassVar[Literal["never", "in turn", "at random"]] = "at random"
    name: Literal["random_ring"] = "random_ring"

    def _edges(
        self, seed: int, round_index: int, members: tuple[int, ...], stream: str
    ) -> Iterable[Edge]:
        rng = named_stream("ring", stream, seed, round_index, *members)
        order = [members[k] for k in rng.permutation(len(members))]
        return [(order[k - 1], order[k]) for k in range(len(order))]


TOPOLOGIES: dict[str, type[Topology]] = {
    str(kind.model_fields["name"].default): kind
    for kind in (
        Complete,
        Ring,
        Torus,
        Hypercube,
        Exponential,
        OnePeerExponential,
        Star,
        ErdosRenyi,
        SmallWorld,
        EdgeList,
        RandomPairs,
        RandomRing,
    )
}


def parse_topology(values: object) -> Topology:
    """A topology from its name, or from a table with `name` and its parameters.

    Raises `ConfigError` for an unknown name or a wrong parameter.
    """
    if isinstance(values, Topology):
        return values
    table = {"name": values} if isinstance(values, str) else values
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise ConfigError(
            f"the name of a topology, or a table with a name, expected; got {values!r}; allowed: "
            f"{', '.join(TOPOLOGIES)}"
        )
    if table["name"] not in TOPOLOGIES:
        hint = nearest(table["name"], TOPOLOGIES)
        raise ConfigError(f"unknown topology {table['name']!r}; {hint}")
    return TOPOLOGIES[table["name"]](**table)


TopologySetting = Annotated[SerializeAsAny[Topology], BeforeValidator(parse_topology)]
"""The type of a `Settings` field that takes a topology by its name or as a table."""


def topology_field(default: str) -> Any:
    """A method's field of type `TopologySetting`."""
    return Field(
        default_factory=functools.partial(parse_topology, default),
        description=f"who mixes with whom: {', '.join(TOPOLOGIES)}",
    )


@functools.lru_cache(maxsize=512)
def _weighted(members: tuple[int, ...], edges: tuple[Edge, ...], weights: Weights) -> MixingGraph:
    return weighted_graph(members, edges, weights)


def mixing_graph(
    topology: Topology,
    weights: Weights,
    *,
    seed: int,
    round_index: int,
    members: Sequence[int],
    stream: str = "mix1",
) -> MixingGraph:
    """The weighted graph of a round: what every worker derives alike, without a coordinator.

    Args: as `Topology.edges` and `weighted_graph`.
    """
    ordered = tuple(sorted(members))
    edges = topology.edges(seed, round_index, ordered, stream)
    return _weighted(ordered, edges, weights)


def _as_networkx(edges: Iterable[Edge], members: Iterable[int]) -> networkx.Graph:
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(members)
    graph.add_edges_from(edges)
    return graph


def _is_connected(graph: networkx.Graph) -> bool:
    import networkx

    return bool(networkx.is_connected(graph))
