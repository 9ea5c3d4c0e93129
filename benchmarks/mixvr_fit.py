"""Rounds needed against samples, fitted and drawn, from what `mixvr_rounds.py measure` wrote.

    python benchmarks/mixvr_fit.py FILE [FILE ...] --target 0.1 --plot docs/images/mixvr_rounds.svg

For each method, M and N: the least R at which the mean excess loss over the seeds, with the best of
the step sizes, is at most TARGET |w*| sigma / sqrt(N), interpolated between powers of two on
logarithmic scales. 1 means that one round is enough, and that fewer cannot be told apart; "-" that
no R that was tried is. Then the exponent of N in that R, by least squares over the N at which it is
known, with two 95 % intervals: from the residuals of the line, and from a bootstrap over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

Curve = dict[int, np.ndarray]  # R: excess losses [seeds, step sizes]
NAMES = ("minibatch_sgd", "minibatch_asgd", "local_sgd", "slowcal_sgd", "local_mixvr")
DRAWS = 1000
STUDENT = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}  # 97.5 %


def load(paths: list[Path]) -> dict[tuple[str, int], dict[int, Curve]]:
    """By (method, M): by N: the curve. Rows of the same R with other seeds are joined."""
    parts: dict[tuple[str, int, int, int], dict[int, list[float]]] = defaultdict(dict)
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = (row["method"], row["workers"], row["samples"], row["rounds"])
            parts[key].update(zip(row["seeds"], row["excess_loss"], strict=True))
    curves: dict[tuple[str, int], dict[int, Curve]] = defaultdict(lambda: defaultdict(dict))
    for (method, workers, samples, rounds), by_seed in sorted(parts.items()):
        losses = np.array([by_seed[seed] for seed in sorted(by_seed)])
        curves[method, workers][samples][rounds] = np.nan_to_num(losses, nan=np.inf)
    return curves


def losses(curve: Curve, chosen: np.ndarray | None = None) -> dict[int, float]:
    """R: mean excess loss over the (chosen) seeds, at the best step size."""
    found = {}
    for rounds, values in sorted(curve.items()):
        seeds = values if chosen is None else values[chosen % len(values)]
        found[rounds] = float(seeds.mean(0).min())
    return found


def rounds_needed(curve: dict[int, float], target: float) -> float:
    """The least R that reaches the target; infinite where none does."""
    before: tuple[int, float] | None = None
    for rounds, loss in curve.items():
        if loss <= target:
            if before is None:
                return float(rounds)
            share = math.log(before[1] / target) / math.log(before[1] / loss)
            return before[0] * (rounds / before[0]) ** share
        before = (rounds, loss)
    return math.inf


def slope(needed: dict[int, float]) -> tuple[float, float]:
    """The exponent of N, and the half-width of its 95 % interval from the residuals."""
    known = [(math.log(n), math.log(r)) for n, r in needed.items() if math.isfinite(r)]
    if len(known) < 3:
        return math.nan, math.nan
    x, y = np.array(known).T
    x = x - x.mean()
    exponent = float((x * y).sum() / (x * x).sum())
    residuals = y - y.mean() - exponent * x
    freedom = len(known) - 2
    error = math.sqrt(float((residuals**2).sum()) / freedom / float((x * x).sum()))
    return exponent, STUDENT[min(freedom, max(STUDENT))] * error


def bootstrap(curves: dict[int, Curve], constant: float) -> tuple[dict[int, tuple], tuple]:
    """95 % intervals of each R and of the exponent, over the seeds."""
    generator = np.random.default_rng(0)
    needed: dict[int, list[float]] = {samples: [] for samples in curves}
    exponents = []
    count = min(len(values) for curve in curves.values() for values in curve.values())
    for _ in range(DRAWS):
        chosen = generator.integers(0, count, count)
        drawn = {
            samples: rounds_needed(losses(curve, chosen), constant / math.sqrt(samples))
            for samples, curve in curves.items()
        }
        for samples, rounds in drawn.items():
            needed[samples].append(rounds)
        exponents.append(slope(drawn)[0])
    intervals = {
        samples: tuple(np.quantile(values, [0.025, 0.975], method="nearest"))
        for samples, values in needed.items()
    }
    finite = [value for value in exponents if math.isfinite(value)]
    whole = tuple(np.quantile(finite, [0.025, 0.975])) if finite else (math.nan, math.nan)
    return intervals, whole


def report(curves: dict[tuple[str, int], dict[int, Curve]], constant: float) -> list[dict]:
    """One entry a method and M, printed as a table."""
    entries = []
    for workers in sorted({workers for _, workers in curves}):
        for method in NAMES:
            if (method, workers) not in curves:
                continue
            by_samples = curves[method, workers]
            needed = {
                samples: rounds_needed(losses(curve), constant / math.sqrt(samples))
                for samples, curve in sorted(by_samples.items())
            }
            exponent, width = slope(needed)
            intervals, seeds_interval = bootstrap(by_samples, constant)
            entries.append(
                {
                    "method": method,
                    "workers": workers,
                    "needed": needed,
                    "intervals": intervals,
                    "exponent": exponent,
                    "width": width,
                    "bootstrap": seeds_interval,
                }
            )
    columns = [f"N = {samples}" for samples in sorted(entries[0]["needed"])]
    headings = ["method", "M", *columns, "exponent", "by the seeds"]
    print(f"| {' | '.join(headings)} |")
    print("|---" * len(headings) + "|")
    for entry in entries:
        cells = " | ".join(_cell(rounds) for rounds in entry["needed"].values())
        low, high = entry["bootstrap"]
        print(
            f"| {entry['method']} | {entry['workers']} | {cells} | {entry['exponent']:.2f} "
            f"+- {entry['width']:.2f} | {low:.2f} to {high:.2f} |"
        )
    return entries


def _cell(rounds: float) -> str:
    return f"{rounds:.1f}" if math.isfinite(rounds) else "-"


def draw(
    entries: list[dict],
    curves: dict[tuple[str, int], dict[int, Curve]],
    constant: float,
    path: Path,
) -> None:
    """R against N for each M, and the loss against R at the largest N."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "gossamer"
    workers = sorted({entry["workers"] for entry in entries})
    figure, axes = plt.subplots(1, len(workers) + 1, figsize=(5 * (len(workers) + 1), 4.2))
    for axis, count in zip(axes, workers, strict=False):
        for index, method in enumerate(NAMES):
            for entry in entries:
                if (entry["method"], entry["workers"]) == (method, count):
                    _draw_needed(axis, entry, f"C{index}")
        axis.set(xscale="log", yscale="log", xlabel="samples N", title=f"M = {count}")
        axis.set_ylim(0.7, 4000)  # an interval that ends beyond has no R that was tried at its end
        axis.set_ylabel(f"rounds to {constant:g} |w*| sigma / sqrt(N)")
        axis.legend(fontsize=7, loc="upper left")
    largest = max(n for by_samples in curves.values() for n in by_samples)
    for index, method in enumerate(NAMES):
        curve = losses(curves[method, workers[-1]][largest])
        values = [loss * math.sqrt(largest) for loss in curve.values()]
        axes[-1].plot(list(curve), values, "o-", color=f"C{index}", label=method, markersize=3)
    axes[-1].axhline(constant, color="grey", linewidth=0.8)
    axes[-1].set(xscale="log", yscale="log", xlabel="rounds R", ylabel="excess loss x sqrt(N)")
    axes[-1].set_title(f"M = {workers[-1]}, N = {largest}")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")


def _draw_needed(axis, entry: dict, color: str) -> None:
    known = {n: r for n, r in entry["needed"].items() if math.isfinite(r)}
    if not known:
        return
    low, high = (
        [abs(known[n] - min(max(entry["intervals"][n][side], 1e-9), 1e9)) for n in known]
        for side in (0, 1)
    )
    label = f"{entry['method']}: N^{entry['exponent']:.2f}"
    axis.errorbar(
        list(known), list(known.values()), yerr=[low, high], fmt="o-", color=color, label=label,
        markersize=4, capsize=2,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--target", type=float, default=0.1)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    curves = load(arguments.files)
    entries = report(curves, arguments.target)
    if arguments.plot is not None:
        draw(entries, curves, arguments.target, arguments.plot)


if __name__ == "__main__":
    main()
