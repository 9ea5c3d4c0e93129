"""Topologies: the graphs they are named after, alike on all workers, for any members."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.mixing.graphs import Edge, MixingGraph, Weights, weighted_graph
from gossamer.mixing.topologies import (
    TOPOLOGIES,
    EdgeList,
    ErdosRenyi,
    OnePeerExponential,
    RandomRing,
    SmallWorld,
    Topology,
    mixing_graph,
    parse_topology,
)
from gossamer.settings import Settings

NAMED = sorted(set(TOPOLOGIES) - {"edges"})
WEIGHTS: list[Weights] = ["metropolis", "uniform", "laplacian"]
MEMBERS = st.sets(st.integers(0, 60), min_size=1, max_size=12).map(sorted)


def graph_of(edges: tuple[Edge, ...], members: list[int]) -> nx.Graph:
    graph = nx.Graph(edges)
    graph.add_nodes_from(members)
    return graph


def same_graph(name: str, count: int, expected: nx.Graph) -> bool:
    edges = parse_topology(name).edges(0, 0, range(count))
    return nx.is_isomorphic(graph_of(edges, list(range(count))), expected)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 9])
def test_named_graphs_are_those_of_networkx(count: int) -> None:
    assert same_graph("complete", count, nx.complete_graph(count))
    assert same_graph("star", count, nx.star_graph(count - 1))
    assert same_graph("ring", count, nx.cycle_graph(count) if count > 2 else nx.path_graph(2))
    hops = [h for h in (1, 2, 4, 8) if h < count]
    assert same_graph("exponential", count, nx.circulant_graph(count, hops))


def test_hypercube_and_torus_are_those_of_networkx() -> None:
    for dimension in (1, 2, 3, 4):
        assert same_graph("hypercube", 2**dimension, nx.hypercube_graph(dimension))
    assert same_graph("torus", 12, nx.grid_2d_graph(3, 4, periodic=True))
    assert same_graph("torus", 16, nx.grid_2d_graph(4, 4, periodic=True))
    assert same_graph("torus", 7, nx.cycle_graph(7))  # a prime number has one row


def test_a_hypercube_that_lacks_corners_is_connected() -> None:
    topology = parse_topology("hypercube")
    for count in range(2, 34):
        assert nx.is_connected(graph_of(topology.edges(0, 0, range(count)), list(range(count))))


@pytest.mark.parametrize("name", NAMED)
@given(members=MEMBERS, seed=st.integers(0, 2**40), round_index=st.integers(0, 10**6))
def test_edges_are_a_pure_function_of_seed_round_and_members(
    name: str, members: list[int], seed: int, round_index: int
) -> None:
    topology = parse_topology({"name": name, "probability": 0.9} if "erdos" in name else name)
    edges = topology.edges(seed, round_index, members)
    assert edges == parse_topology(topology.model_dump()).edges(seed, round_index, members[::-1])
    assert list(edges) == sorted(set(edges))
    assert all(a < b and {a, b} <= set(members) for a, b in edges)
    arcs = topology.arcs(seed, round_index, members)
    assert list(arcs) == sorted(set(arcs))
    assert all(a != b and {a, b} <= set(members) for a, b in arcs)
    if len(members) > 1 and "exponential" not in name:
        assert {(min(arc), max(arc)) for arc in arcs} == set(edges)
        assert {(b, a) for a, b in arcs} == set(arcs)


@pytest.mark.parametrize("name", NAMED)
def test_what_is_said_of_change_is_so(name: str) -> None:
    topology = parse_topology(name)
    seen = {topology.edges(seed, r, range(12)) for seed in range(4) for r in range(12)}
    period = topology.period(12)
    assert (period is None) == (topology.changes == "at random")
    assert len(seen) == period if period else len(seen) > 20
    if period:
        assert topology.edges(0, 1, range(12)) == topology.edges(5, 1 + 3 * period, range(12))


@given(members=MEMBERS, seed=st.integers(0, 1000))
def test_a_random_ring_passes_everybody_once(members: list[int], seed: int) -> None:
    edges = RandomRing().edges(seed, 0, members)
    graph = graph_of(edges, members)
    assert nx.is_connected(graph)
    if len(members) > 2:
        assert len(edges) == len(members)
        assert all(degree == 2 for _, degree in graph.degree)


def test_random_rings_are_uniform() -> None:
    """5 members have 4! / 2 rings; chi-square with 11 degrees of freedom, once in 1000 samples."""
    draws = 3000
    counts: dict[tuple[Edge, ...], int] = {}
    for r in range(draws):
        edges = RandomRing().edges(3, r, range(5))
        counts[edges] = counts.get(edges, 0) + 1
    assert len(counts) == 12
    assert sum((n - draws / 12) ** 2 / (draws / 12) for n in counts.values()) < 31.26


def test_streams_and_seeds_give_other_rings() -> None:
    one = [RandomRing().edges(0, r, range(8)) for r in range(5)]
    assert one != [RandomRing().edges(1, r, range(8)) for r in range(5)]
    assert one != [RandomRing().edges(0, r, range(8), stream="other") for r in range(5)]


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_one_peer_exponential_averages_exactly_in_one_turn(count: int) -> None:
    topology = OnePeerExponential()
    product = np.eye(count)
    for r in range(topology.period(count) or 0):
        graph = mixing_graph(topology, "metropolis", seed=0, round_index=r, members=range(count))
        assert all(len(graph.neighbours(worker)) == 1 for worker in range(count))
        product = graph.matrix() @ product
    np.testing.assert_allclose(product, np.full((count, count), 1 / count), atol=1e-15)


def test_directed_exponential_graphs_send_forwards_only() -> None:
    one = OnePeerExponential()
    assert one.arcs(0, 0, range(5)) == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0))
    assert one.arcs(0, 2, range(5)) == ((0, 4), (1, 0), (2, 1), (3, 2), (4, 3))
    assert one.arcs(0, 3, range(5)) == one.arcs(0, 0, range(5))
    static = parse_topology("exponential").arcs(0, 0, [10, 20, 30])
    assert static == ((10, 20), (10, 30), (20, 10), (20, 30), (30, 10), (30, 20))
    # 1-peer exponential, directed: the product over a turn is J for powers of two
    product = np.eye(8)
    for r in range(3):
        w = np.eye(8) / 2
        for src, dst in one.arcs(0, r, range(8)):
            w[dst, src] += 0.5
        product = w @ product
    np.testing.assert_allclose(product, np.full((8, 8), 1 / 8))


def test_a_ring_closes_when_a_worker_leaves_and_opens_when_it_returns() -> None:
    ring = parse_topology("ring")
    assert ring.edges(0, 0, [0, 1, 2, 3]) == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert ring.edges(0, 1, [0, 1, 3]) == ((0, 1), (0, 3), (1, 3))
    assert ring.edges(0, 2, [0, 1, 2, 3]) == ring.edges(0, 0, [0, 1, 2, 3])


def test_random_graphs_are_connected_and_of_their_own_seed() -> None:
    sparse = ErdosRenyi(probability=0.3)
    edges = sparse.edges(0, 0, range(10))
    assert nx.is_connected(graph_of(edges, list(range(10))))
    assert sparse.edges(99, 5, range(10)) == edges  # the run's seed does not matter
    assert ErdosRenyi(probability=0.3, seed=1).edges(0, 0, range(10)) != edges
    assert len(ErdosRenyi(probability=1).edges(0, 0, range(5))) == 10
    small = SmallWorld(degree=4, rewiring=0.3).edges(0, 0, range(20))
    assert SmallWorld(degree=4, rewiring=0.3, seed=1).edges(0, 0, range(20)) != small
    assert nx.is_connected(graph_of(small, list(range(20)))) and len(small) == 40
    lattice = SmallWorld(degree=4, rewiring=0).edges(0, 0, range(20))
    assert nx.is_isomorphic(nx.Graph(lattice), nx.circulant_graph(20, [1, 2]))
    assert len(SmallWorld(degree=4).edges(0, 0, range(4))) == 6


def test_an_edge_list_keeps_its_workers() -> None:
    path = EdgeList(pairs=((1, 0), (1, 2), (2, 3)))
    path.validate_for(4)
    assert path.edges(0, 0, [0, 1, 2, 3]) == ((0, 1), (1, 2), (2, 3))
    assert path.edges(0, 0, [0, 1, 3]) == ((0, 1),)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ("rnig", r"^unknown topology 'rnig'; did you mean 'ring'\?$"),
        (3, "the name of a topology, or a table"),
        ({"degree": 4}, "the name of a topology, or a table"),
        ({"name": "ring", "degree": 4}, "unknown setting 'degree'"),
        ({"name": "small_world", "degree": 3}, "^degree: an even number expected, got 3$"),
        ({"name": "erdos_renyi", "probability": 0}, "probability: .*greater than 0; got 0"),
        ({"name": "edges"}, "pairs"),
        ({"name": "edges", "pairs": [[1, 1]]}, r"pairs: two different .*, got \[1, 1\]"),
        ({"name": "edges", "pairs": []}, "pairs"),
    ],
)
def test_mistakes_are_named(given_: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_topology(given_)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (EdgeList(pairs=((0, 1), (1, 4))), "worker 4 is not in this run, which has 4 workers"),
        (EdgeList(pairs=((0, 1), (2, 3))), "not connected, so its parts would never agree"),
        (ErdosRenyi(probability=0.001), "none of 100 graphs of 4 workers .* raise the probab"),
    ],
)
def test_graphs_that_do_not_fit_the_run_are_refused(topology: Topology, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topology.validate_for(4)


def test_a_topology_reads_as_a_recipe_says_it() -> None:
    assert str(parse_topology("ring")) == "ring"
    world = parse_topology({"name": "small_world", "degree": 4, "rewiring": 0.5})
    assert str(world) == "small_world(rewiring=0.5)"


def test_a_setting_takes_a_name_or_a_table_and_gives_the_table_back() -> None:
    from gossamer.mixing.topologies import TopologySetting, topology_field

    class Example(Settings):
        topology: TopologySetting = topology_field("ring")

    assert Example().topology.name == "ring"
    example = Example(topology={"name": "small_world", "degree": 6})
    assert example.model_dump()["topology"] == {
        "name": "small_world", "degree": 6, "rewiring": 0.2, "seed": 0
    }  # fmt: skip
    assert Example(**example.model_dump()) == example
    with pytest.raises(ConfigError, match=r"^topology: unknown topology 'rign'; did you mean"):
        Example(topology="rign")


# ------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMED)
def test_matrices_are_what_their_names_say(name: str, weights: Weights) -> None:
    """Laplacian against networkx; doubly stochastic at alpha = 1 for the other two rules."""
    topology = parse_topology(name)
    members = [1, 4, 6, 7, 9, 10, 12]
    graph = mixing_graph(topology, weights, seed=3, round_index=2, members=members)
    reference = graph_of(topology.edges(3, 2, members), members)
    degree = dict(reference.degree)
    for a, b in reference.edges:
        largest = max(degree.values()) if weights == "uniform" else max(degree[a], degree[b])
        reference[a][b]["weight"] = 1.0 if weights == "laplacian" else 1 / (1 + largest)
    adjacency = nx.to_numpy_array(reference, nodelist=members)
    expected = np.diag(adjacency.sum(axis=0)) - adjacency
    np.testing.assert_allclose(graph.laplacian(), expected, atol=1e-15)
    w = graph.matrix(0.5)
    assert np.array_equal(w, w.T)
    np.testing.assert_allclose(w.sum(axis=1), 1)
    if weights != "laplacian":
        assert (graph.matrix() >= -1e-15).all()
    for row, worker in enumerate(members):
        pairs = graph.neighbours(worker, 0.5)
        assert list(pairs) == sorted(pairs)
        assert dict(pairs) == {
            peer: pytest.approx(w[row, k])
            for k, peer in enumerate(members)
            if k != row and w[row, k]
        }


def test_the_papers_weights() -> None:
    """Pair average, a third each, and J: alpha * lambda as the paper has them."""

    def matrix(name: str, count: int) -> np.ndarray:
        graph = mixing_graph(
            parse_topology(name), "metropolis", seed=0, round_index=0, members=range(count)
        )
        return graph.matrix()

    assert set(matrix("random_pairs", 8).ravel()) == {0.0, 0.5}
    np.testing.assert_allclose(sorted(matrix("random_ring", 5)[0]), [0, 0, 1 / 3, 1 / 3, 1 / 3])
    np.testing.assert_allclose(matrix("complete", 7), np.full((7, 7), 1 / 7))


@given(data=st.data(), count=st.integers(2, 8), weights=st.sampled_from(WEIGHTS[:2]))
def test_failed_edges_leave_a_doubly_stochastic_matrix(
    data: st.DataObject, count: int, weights: Weights
) -> None:
    possible = [(a, b) for a in range(count) for b in range(a + 1, count)]
    edges = data.draw(st.lists(st.sampled_from(possible), unique=True))
    failed = data.draw(st.lists(st.sampled_from(edges), unique=True)) if edges else []
    graph = weighted_graph(range(count), edges, weights)
    w = graph.matrix(failed=[(b, a) for a, b in failed])
    assert np.array_equal(w, w.T) and (w >= -1e-15).all()
    np.testing.assert_allclose(w.sum(axis=0), 1)
    kept = graph.matrix()
    for a, b in failed:
        assert w[a, b] == 0 < kept[a, b]
    for a in range(count):
        back = sum(kept[a, b] for b in range(count) if (min(a, b), max(a, b)) in failed)
        assert w[a, a] == pytest.approx(kept[a, a] + back)


def test_edges_that_are_none_are_refused() -> None:
    for edges in ([(0, 0)], [(0, 7)]):
        with pytest.raises(ConfigError, match="no edge between two of the workers"):
            weighted_graph([0, 1, 2], edges)
    with pytest.raises(ConfigError, match="must differ"):
        weighted_graph([0, 1, 1], [])
    graph = weighted_graph([0, 1, 2], [(0, 1), (1, 0)])
    assert graph == MixingGraph((0, 1, 2), ((0, 1, 0.5),))
    with pytest.raises(ConfigError, match="failed edge"):
        graph.matrix(failed=[(1, 2)])
    assert graph.neighbours(2) == () and graph.neighbours(17) == ()
