"""Drawings of a mixing graph: workers on a circle, in text and as a picture."""

from __future__ import annotations

import math
from io import BytesIO

from gossamer.errors import ConfigError
from gossamer.mixing.graphs import MixingGraph

_ROWS, _COLUMNS = 21, 45  # of the text; a character is about twice as high as wide
DRAWN_MAX = 32  # workers; more are too many for text


def text_drawing(graph: MixingGraph) -> str:
    """The graph as lines of text, worker indices on a circle; "" for more than `DRAWN_MAX`."""
    if len(graph.members) > DRAWN_MAX:
        return ""
    places = {worker: _on_text(x, y) for worker, (x, y) in _circle(graph.members).items()}
    canvas = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for i, j, _ in graph.edges:
        for row, column in _line(places[i], places[j]):
            canvas[row][column] = "·"
    for worker, (row, column) in places.items():
        label = str(worker)
        start = min(max(0, column - len(label) // 2), _COLUMNS - len(label))
        for k, character in enumerate(label):
            canvas[row][start + k] = character
    return "\n".join("".join(row).rstrip() for row in canvas).strip("\n")


def adjacency_lines(graph: MixingGraph) -> list[str]:
    """One line a worker: its peers."""
    width = len(str(max(graph.members)))
    return [
        f"{worker:>{width}}: "
        + (", ".join(str(peer) for peer, _ in graph.neighbours(worker)) or "-")
        for worker in graph.members
    ]


def picture(graph: MixingGraph, title: str, kind: str) -> bytes:
    """The graph as a PNG or SVG image; the width of a line is its weight.

    Args:
        kind: "png" or "svg".

    Raises `ConfigError` where matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib: pip install 'gossamer[plot]'") from None
    places = _circle(graph.members)
    heaviest = max((weight for _, _, weight in graph.edges), default=1.0)
    with rc_context({"svg.hashsalt": "gossamer"}):
        figure = Figure(figsize=(5.0, 5.2), layout="constrained")
        plot = figure.add_subplot()
        for i, j, weight in graph.edges:
            xs, ys = zip(places[i], places[j], strict=True)
            plot.plot(xs, ys, color="0.45", linewidth=0.4 + 1.8 * weight / heaviest, zorder=1)
        xs, ys = zip(*places.values(), strict=True)
        plot.scatter(xs, ys, s=320, color="#2a6f97", zorder=2)
        for worker, (x, y) in places.items():
            plot.text(x, y, str(worker), ha="center", va="center", color="white", zorder=3)
        plot.set_title(title)
        plot.set_aspect("equal")
        plot.set_axis_off()
        file = BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
    return file.getvalue()


def _circle(members: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Where each worker is, on the unit circle, clockwise from the top."""
    step = 2 * math.pi / len(members)
    return {worker: (math.sin(k * step), math.cos(k * step)) for k, worker in enumerate(members)}


def _on_text(x: float, y: float) -> tuple[int, int]:
    """(row, column) of a point of the unit square."""
    return round((1 - y) / 2 * (_ROWS - 1)), round((1 + x) / 2 * (_COLUMNS - 1))


def _line(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """The cells between two cells."""
    steps = max(abs(a[0] - b[0]), abs(a[1] - b[1]) // 2, 1)
    return [
        (round(a[0] + (b[0] - a[0]) * k / steps), round(a[1] + (b[1] - a[1]) * k / steps))
        for k in range(1, steps)
    ]
