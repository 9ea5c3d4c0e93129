"""`gossamer topology`: figures that are the library's, a drawing that is the graph, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.mixing.consensus import consensus_rate
from gossamer.mixing.topologies import TOPOLOGIES, mixing_graph, parse_topology
from gossamer.report.graph_drawing import adjacency_lines, text_drawing

Gossamer = Callable[..., Any]


@pytest.mark.parametrize("name", sorted(set(TOPOLOGIES) - {"edges"}))
def test_the_machine_form_is_the_librarys(gossamer: Gossamer, name: str) -> None:
    outcome = gossamer("topology", name, "--workers", 6, "--round", 1, "--alpha", 0.8, "--json")
    assert outcome.code == 0, outcome.err
    told = outcome.json
    topology = parse_topology(name)
    graph = mixing_graph(topology, "metropolis", seed=0, round_index=1, members=range(6))
    np.testing.assert_array_equal(told["matrix"], graph.matrix(0.8))
    assert [tuple(edge) for edge in told["edges"]] == list(graph.edges)
    assert told["num_workers"] == 6 and told["period"] == topology.period(6)
    for form in ("A", "B"):
        rate = consensus_rate(topology, "metropolis", 6, alpha=0.8, gamma=0.5, form=form)
        assert told["rate_by_gamma"][form]["0.5"] == rate
    assert (told["optimal"] is None) == (topology.changes != "never")


def test_people_see_the_graph_the_figures_and_the_matrix(gossamer: Gossamer) -> None:
    outcome = gossamer("topology", "ring", "--workers", 4)
    assert outcome.code == 0
    for text in ("ring over 4 workers", "0: 1, 3", "rho", "0.111111 (closed form)", "0.333"):
        assert text in outcome.out
    many = gossamer("topology", "random_pairs", "--workers", 40, "--round", 3)
    assert many.code == 0 and "drawn anew in each round" in many.out
    assert "W = I" not in many.out and "0.487179" in many.out  # 38 / 78


def test_the_ring_of_32_is_in_it(gossamer: Gossamer) -> None:
    told = gossamer("topology", "ring", "--workers", 32, "--weights", "laplacian",
                    "--alpha", 0.3, "--json").json  # fmt: skip
    assert told["chi"] == pytest.approx(104.1, abs=0.05)
    assert told["optimal"]["plain"]["rate"] ** 0.5 == pytest.approx(0.98097, abs=5e-6)
    assert told["optimal"]["form_a"]["rate"] ** 0.5 == pytest.approx(0.82147, abs=5e-6)


def test_parameters_and_edge_files(gossamer: Gossamer, tmp_path: Path) -> None:
    told = gossamer("topology", "small_world", "-m", 10, "--set", "degree=6",
                    "--set", "rewiring=0", "--json").json  # fmt: skip
    assert told["num_edges"] == 30 and told["topology"]["degree"] == 6
    file = tmp_path / "graph.txt"
    file.write_text("# a path\n0 1\n\n1, 2  # and on\n2 3\n")
    told = gossamer("topology", "edges", "-m", 4, "--edges", file, "--json").json
    assert told["topology"]["pairs"] == [[0, 1], [1, 2], [2, 3]]
    assert [edge[:2] for edge in told["edges"]] == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures(gossamer: Gossamer, tmp_path: Path, kind: str) -> None:
    files = [tmp_path / f"{k}.{kind}" for k in range(2)]
    for file in files:
        assert gossamer("topology", "hypercube", "--plot", file).code == 0
    content = files[0].read_bytes()
    assert content == files[1].read_bytes()  # no date in it
    assert content[:4] == b"\x89PNG" if kind == "png" else b"<svg" in content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rign"], "unknown topology 'rign'; did you mean 'ring'?"),
        (["ring", "--weights", "metro"], "unknown weights 'metro'; did you mean 'metropolis'?"),
        (["ring", "--set", "degree=3"], "unknown setting 'degree'"),
        (["ring", "--plot", "ring.gif"], "a file that ends in .png or .svg expected"),
        (["ring", "--edges", "x"], "--edges belongs to `gossamer topology edges`"),
        (["edges"], "give the graph by --edges FILE or --set"),
        (["edges", "--edges", "nowhere.txt"], "cannot read 'nowhere.txt'"),
        (["edges", "--set", "pairs=[[0, 1], [2, 3]]", "-m", "4"], "the graph is not connected"),
        (["ring", "--workers", "1"], "--workers"),
    ],
)
def test_mistakes_are_one_line(gossamer: Gossamer, arguments: list[str], message: str) -> None:
    outcome = gossamer("topology", *arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert message in outcome.error_line


def test_a_line_that_is_no_edge_is_named(gossamer: Gossamer, tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text("0 1\n1 two\n")
    outcome = gossamer("topology", "edges", "--edges", file)
    assert outcome.code == 2 and "line 2 of" in outcome.error_line
    assert "got '1 two'" in outcome.error_line


def test_the_drawing_has_every_worker_and_lines_between_peers_only() -> None:
    empty = mixing_graph(
        parse_topology({"name": "edges", "pairs": [[0, 7]]}), "metropolis",
        seed=0, round_index=0, members=range(1, 9),
    )  # fmt: skip
    assert text_drawing(empty).split() == ["1", "8", "2", "7", "3", "6", "4", "5"]
    full = mixing_graph(
        parse_topology("complete"), "metropolis", seed=0, round_index=0, members=range(12)
    )
    drawn = text_drawing(full)
    assert set(drawn.replace("·", " ").split()) == {str(k) for k in range(12)}
    assert drawn.count("·") > 150
    assert adjacency_lines(empty)[0] == "1: -"
    big = mixing_graph(
        parse_topology("ring"), "metropolis", seed=0, round_index=0, members=range(33)
    )
    assert text_drawing(big) == ""
