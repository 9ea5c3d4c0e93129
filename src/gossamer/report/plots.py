"""Pictures of runs: evaluation loss against virtual time and against bytes sent.

They need matplotlib, the extra `gossamer[plot]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run has measured on its way: events with `eval_loss`, in order."""

    label: str
    events: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Axis:
    """What the loss is drawn against: file name, the event's key, its label, its unit's size."""

    name: str
    key: str
    label: str
    scale: float


AXES = (
    Axis("loss_over_time", "time_s", "virtual time (hours)", 3600.0),
    Axis("loss_over_bytes", "bytes_sent", "sent per worker (GB)", 1e9),
)


def draw(curves: Sequence[Curve]) -> dict[str, bytes]:
    """PNG images by name; those for which nothing was measured are left out.

    Raises `ConfigError` where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "pictures need matplotlib: pip install 'gossamer[plot]', or leave them out with "
            "--no-plots"
        ) from None
    images: dict[str, bytes] = {}
    for axis in AXES:
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        if _draw_axis(figure, curves, axis):
            file = BytesIO()
            figure.savefig(file, format="png", dpi=150)
            images[axis.name] = file.getvalue()
    return images


def points(curve: Curve, axis: Axis) -> list[tuple[float, float]]:
    """(position on the axis, evaluation loss) of every event that has both."""
    pairs = [(event.get(axis.key), event.get("eval_loss")) for event in curve.events]
    return [(x / axis.scale, y) for x, y in pairs if x is not None and y is not None]


def _draw_axis(figure: Figure, curves: Sequence[Curve], axis: Axis) -> bool:
    plot = figure.add_subplot()
    drawn = False
    for curve in curves:
        measured = points(curve, axis)
        if measured:
            xs, ys = zip(*measured, strict=True)
            plot.plot(xs, ys, marker=".", label=curve.label)
            drawn = True
    if not drawn:
        return False
    # Data parallel sends and takes a hundred times what the others do: only ratios can be seen.
    largest = [measured[-1][0] for curve in curves if (measured := points(curve, axis))]
    if min(largest) > 0 and max(largest) / min(largest) > 20:
        plot.set_xscale("log")
    plot.set_xlabel(axis.label)
    plot.set_ylabel("evaluation loss")
    plot.grid(alpha=0.3)
    plot.legend()
    return True
