"""`gossamer topology`: what a mixing graph is, and how fast it agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.commands.options import JsonOption, print_json, print_note
from gossamer.errors import ConfigError

_MATRIX_SHOWN_MAX = 12  # workers
_GAMMAS = (0.0, 0.2, 0.5, 0.7, 0.8, 0.9)


def topology(
    name: Annotated[str, typer.Argument(help="Name of the graph, such as ring or random_pairs.")],
    *,
    workers: Annotated[int, typer.Option("--workers", "-m", min=2, help="How many mix.")] = 8,
    weights: Annotated[
        str, typer.Option(help="Rule of the edges' weights: metropolis, uniform or laplacian.")
    ] = "metropolis",
    alpha: Annotated[float, typer.Option(min=1e-9, help="W = I - alpha Lambda.")] = 1.0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A parameter of the graph, such as degree=6."
        ),
    ] = None,
    edges: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For NAME edges: a line of two worker indices an edge."),
    ] = None,
    round_index: Annotated[
        int, typer.Option("--round", min=0, help="Which round to draw, where rounds differ.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of random rounds.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it into a .png or .svg file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw a mixing graph, and print its matrix and how fast it agrees.

    rho is the squared disagreement that a round leaves, chi = l_M / l_2 of the Laplacian. The table
    of rates is the mean-square change of disagreement per round of GASLoC's gossip: below 1 it
    shrinks, from 1 on the workers drift apart.

    Examples:

        gossamer topology ring --workers 8

        gossamer topology random_pairs --workers 16 --round 3 --json

        gossamer topology small_world --workers 20 --set degree=4 --set rewiring=0.3 --plot sw.svg

        gossamer topology edges --workers 4 --edges graph.txt --weights laplacian --alpha 0.25
    """
    from gossamer.mixing.graphs import parse_weights
    from gossamer.mixing.topologies import mixing_graph, parse_topology
    from gossamer.report.graph_drawing import picture

    kind = _plot_kind(plot)
    chosen = parse_topology({**_parameters(name, settings or [], edges), "name": name})
    rule = parse_weights(weights)
    facts = _facts(chosen, rule, workers, alpha)
    graph = mixing_graph(chosen, rule, seed=seed, round_index=round_index, members=range(workers))
    drawn = {"round": round_index, "seed": seed, "edges": [list(edge) for edge in graph.edges]}
    if plot is not None and kind is not None:
        from gossamer.report.files import write_atomically

        write_atomically(plot, picture(graph, f"{name}, {workers} workers", kind))
    if json:
        print_json({**facts, **drawn, "matrix": graph.matrix(alpha).tolist()})
        return
    _show(facts, graph, alpha, changes=chosen.changes, round_index=round_index)
    if plot is not None:
        print_note(f"drawn into {plot}")


def _plot_kind(plot: Path | None) -> str | None:
    if plot is None:
        return None
    kind = plot.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise ConfigError(f"--plot {plot}: a file that ends in .png or .svg expected")
    return kind


def _parameters(name: str, settings: list[str], edges: Path | None) -> dict[str, Any]:
    """The graph's own settings, from `--set` and `--edges`."""
    from gossamer.config import apply_overrides

    parameters = apply_overrides({}, settings)
    if edges is None:
        if name == "edges" and "pairs" not in parameters:
            raise ConfigError("edges: give the graph by --edges FILE or --set 'pairs=[[0, 1]]'")
        return parameters
    if name != "edges":
        raise ConfigError(f"--edges belongs to `gossamer topology edges`, not to {name!r}")
    return {**parameters, "pairs": _read_edges(edges)}


def _read_edges(path: Path) -> list[list[int]]:
    """Pairs of integers, one a line; empty lines and what follows a # are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--edges: cannot read {str(path)!r}: {error}") from None
    pairs = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdigit() for word in words):
            raise ConfigError(
                f"--edges: line {number} of {str(path)!r}: two worker indices expected, such as "
                f"'0 3'; got {line.strip()!r}"
            )
        pairs.append([int(word) for word in words])
    return pairs


def _facts(chosen: Any, rule: Any, workers: int, alpha: float) -> dict[str, Any]:
    """All figures, by name."""
    import dataclasses

    from gossamer.mixing.consensus import Form, consensus_rate, optimal_choice
    from gossamer.mixing.spectra import expected_laplacian, mixing_figures

    forms: tuple[Form, ...] = ("A", "B")
    best: tuple[tuple[str, Form, float | None], ...] = (
        ("plain", "A", 0.0),
        ("form_a", "A", None),
        ("form_b", "B", None),
    )
    figures = mixing_figures(chosen, rule, workers, alpha)
    rates = {
        form: {
            f"{gamma:g}": consensus_rate(chosen, rule, workers, alpha=alpha, gamma=gamma, form=form)
            for gamma in _GAMMAS
        }
        for form in forms
    }
    facts = {
        "topology": chosen.model_dump(mode="json"),
        "weights": rule,
        "alpha": alpha,
        "changes": chosen.changes,
        "period": chosen.period(workers),
        **dataclasses.asdict(figures),
        "rate_by_gamma": rates,
        "optimal": None,
    }
    if chosen.changes == "never":
        laplacian = expected_laplacian(chosen, rule, workers)
        facts["optimal"] = {
            label: {
                **choice._asdict(),
                "rate": consensus_rate(chosen, rule, workers, **choice._asdict(), form=form),
            }
            for label, form, gamma in best
            for choice in [optimal_choice(laplacian, form=form, gamma=gamma)]
        }
    return facts


def _show(
    facts: dict[str, Any], graph: Any, alpha: float, *, changes: str, round_index: int
) -> None:
    from gossamer.report.graph_drawing import adjacency_lines, text_drawing
    from gossamer.report.tables import fields_table, stdout_console

    console = stdout_console()
    when = {
        "never": "the same in each round",
        "in turn": f"round {round_index} of {facts['period']} that take turns",
        "at random": f"round {round_index}; drawn anew in each round",
    }[changes]
    console.print(f"{facts['topology']['name']} over {facts['num_workers']} workers, {when}\n")
    drawing = text_drawing(graph)
    if drawing:
        console.print(drawing + "\n")
    console.print("\n".join(adjacency_lines(graph)))
    console.print(fields_table("how it mixes", _figure_lines(facts)))
    if facts["num_workers"] <= _MATRIX_SHOWN_MAX:
        console.print("W = I - alpha Lambda:")
        for row in graph.matrix(alpha):
            console.print(" ".join(f"{value:6.3f}" if value else "     ." for value in row))
        console.print()
    console.print("mean-square rate per round of gossip with momentum (from 1 on: unstable)")
    console.print("gamma   " + "".join(f"{gamma:>8g}" for gamma in _GAMMAS))
    for form, rates in facts["rate_by_gamma"].items():
        console.print(f"form {form}  " + "".join(f"{rate:8.3f}" for rate in rates.values()))


def _figure_lines(facts: dict[str, Any]) -> dict[str, str]:
    """The figures as people read them."""
    degrees = {facts["degree_min"], facts["degree_max"]}
    how = "closed form" if facts["rho_is_closed_form"] else "computed"
    lines = {
        "weights": f"{facts['weights']}, alpha = {facts['alpha']:g}",
        "edges in a round": f"{facts['num_edges']:g}",
        "peers of a worker": " to ".join(str(degree) for degree in sorted(degrees)),
        "rho": f"{facts['rho']:.6g} ({how})",
        "spectral gap": f"{facts['spectral_gap']:.6g}",
        "chi": f"{facts['chi']:.6g}  (l_2 = {facts['eigenvalue_2']:.6g}, "
        f"l_M = {facts['eigenvalue_max']:.6g})",
    }
    for label, best in (facts["optimal"] or {}).items():
        words = {"plain": "best without momentum", "form_a": "best form A", "form_b": "best form B"}
        lines[words[label]] = (
            f"alpha = {best['alpha']:.5g}, gamma = {best['gamma']:.5g}: disagreement times "
            f"{best['rate'] ** 0.5:.5g} a round"
        )
    return lines
