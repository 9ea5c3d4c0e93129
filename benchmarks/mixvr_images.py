"""Local MixVR and its rivals on images: test accuracy against the number of rounds.

    python benchmarks/mixvr_images.py run --suite mnist --file results.jsonl   # what is missing
    python benchmarks/mixvr_images.py show --file results.jsonl --plot accuracy.png
    python benchmarks/mixvr_images.py check

`run` does a few minutes of work and stops; call it until it exits with 3, which says that nothing
is left. `--share 0/2` and `--share 1/2` divide the work between two processes.

Suites. "mnist": Fashion-MNIST, M = 4, a network of two convolutions, batches of 4, two epochs (7500
batches per worker). "resnet": the same images halved to 14 x 14, M = 8, resnet8 with batch
normalisation, batches of 16, half an epoch (234 batches per worker), one seed; it stands for
CIFAR-10 with ResNet-18, which two cores do not bear.

How. The trainings of "resnet" are the simulator's. Those of "mnist" train all their replicas, seeds
and tries as one stack (`stacked_images.py`); `check` compares that with the simulator, which is
several times slower.

Tuning. Every method has as many tries, on a tenth (mnist) or a third (resnet) of the batches, with
the same number of rounds, one seed that the results do not use, and 5000 of the training images
held out. That is done for three (two) numbers of rounds; a final training takes what was best for
the one most like it, in rounds (minibatch methods) or in inner steps a round (the others).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from stacked_images import RULES, VARIANTS, Stack, largest_difference
from torch.nn import functional as F

import gossamer as gm
from gossamer.errors import GossamerError
from gossamer.training.image_files import LabelledImages, find_images
from gossamer.training.images import ImageTask, PixelSource

BUDGET_S = 150.0  # no further piece is begun after so long
VALIDATION_IMAGES = 5000
TUNING_SEED = 1000
CEILING = "data_parallel"


@dataclass(frozen=True)
class Suite:
    """One experiment.

    Args:
        batches: per worker, in all rounds.
        rounds: numbers of rounds, R.
        tuned_rounds: those of them for which methods are tuned.
        tuning_share: of the batches that tuning takes.
        shrink: images are averaged over squares of so many pixels.
    """

    name: str
    model: str
    workers: int
    batch_size: int
    batches: int
    rounds: tuple[int, ...]
    tuned_rounds: tuple[int, ...]
    tuning_share: float
    seeds: int
    shrink: int


SUITES = {
    "mnist": Suite("mnist", "cnn", 4, 4, 7500, (5, 15, 50, 150, 500), (5, 50, 500), 0.1, 3, 1),
    "resnet": Suite("resnet", "resnet8", 8, 16, 234, (3, 13, 39), (3, 39), 1 / 3, 3, 2),
    "parts": Suite("parts", "cnn", 4, 4, 750, (5, 50), (5, 50), 1.0, 3, 1),
}

_RATES = (0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.12, 0.15, 0.2, 0.25,
          0.3)  # fmt: skip

# Fifteen tries each, as keyword arguments with the learning rate. Local MixVR's paper has the
# grid 0.01, 0.05, 0.1 and the same alpha; here 0.05 and 0.1 diverge where 0.95 weighs w, so that
# its rates are lower there. Where it weighs the old average they are the paper's.
_MNIST: dict[str, list[dict[str, float]]] = {
    "local_mixvr": [
        {"rate": rate, "alpha": alpha}
        for alpha in (0.05, 0.1, 0.25, 0.5, 0.75)
        for rate in (0.01, 0.02, 0.03)
    ],
    "local_sgd": [{"rate": rate} for rate in _RATES],
    "local_momentum": [{"rate": rate / 10} for rate in _RATES],
    "minibatch_sgd": [{"rate": rate * 10} for rate in _RATES],
    "minibatch_asgd": [{"rate": rate} for rate in _RATES],
    "slowcal_sgd": [{"rate": rate} for rate in _RATES],  # times 2 / T: its step grows with t
    CEILING: [{"rate": rate} for rate in _RATES],
    "local_mixvr_average": [
        {"rate": rate, "alpha": alpha}
        for alpha in (0.05, 0.1, 0.25, 0.5, 0.75)
        for rate in (0.01, 0.05, 0.1)
    ],
}

# Seven tries each: five, and two more after the first five were best at their ends.
_RESNET: dict[str, list[dict[str, float]]] = {
    "local_mixvr_average": [
        {"rate": 0.02, "alpha": 0.05},
        {"rate": 0.05, "alpha": 0.05},
        {"rate": 0.1, "alpha": 0.05},
        {"rate": 0.05, "alpha": 0.25},
        {"rate": 0.05, "alpha": 0.5},
        {"rate": 0.2, "alpha": 0.05},
        {"rate": 0.4, "alpha": 0.05},
    ],
    "local_sgd": [{"rate": rate} for rate in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)],
    "local_momentum": [{"rate": rate} for rate in (0.002, 0.005, 0.01, 0.02, 0.05, 0.07, 0.1)],
    "minibatch_sgd": [{"rate": rate} for rate in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0)],
    "minibatch_asgd": [{"rate": rate} for rate in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)],
    "slowcal_sgd": [{"rate": rate} for rate in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)],
}

# What each part of Local MixVR does to it: seven rates for each, on a tenth of the batches.
_PARTS: dict[str, list[dict[str, float]]] = {
    method: [{"rate": rate, "alpha": 0.05} for rate in (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15)]
    for method in ("local_mixvr", "no_variance_reduction", "no_anytime", "no_drift_correction")
}
_PARTS["local_sgd"] = [{"rate": rate} for rate in (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15)]

GRIDS = {"mnist": _MNIST, "resnet": _RESNET, "parts": _PARTS}


@dataclass(frozen=True)
class Piece:
    """One training.

    Args:
        kind: "tune" or "final".
        rounds: R; 0 for the ceiling, which has as many as batches.
        settings: of the method, as JSON; "" in a final one, which takes the best of tuning.
    """

    suite: str
    kind: str
    method: str
    rounds: int
    seed: int
    settings: str = ""


def pieces_of(suite: Suite) -> Iterator[Piece]:
    """All trainings, tuning first, then one seed after the other."""
    for method, grid in GRIDS[suite.name].items():
        for rounds in (0,) if method == CEILING else suite.tuned_rounds:
            for settings in grid:
                yield Piece(suite.name, "tune", method, rounds, TUNING_SEED, json.dumps(settings))
    tuned_first = sorted(suite.rounds, key=lambda rounds: rounds not in suite.tuned_rounds)
    for seed in range(suite.seeds):
        for rounds in tuned_first:
            for method in GRIDS[suite.name]:
                if method != CEILING:
                    yield Piece(suite.name, "final", method, rounds, seed)
        if CEILING in GRIDS[suite.name]:
            yield Piece(suite.name, "final", CEILING, 0, seed)


@cache
def images_of(shrink: int, held_out: bool) -> tuple[LabelledImages, LabelledImages]:
    """(train, test), the latter from the training images where some are `held_out` of them."""
    train, test = find_images("fashion-mnist").load()
    if held_out:
        train, test = (
            LabelledImages(train.pixels[where], train.labels[where])
            for where in (slice(VALIDATION_IMAGES, None), slice(0, VALIDATION_IMAGES))
        )
    if shrink == 1:
        return train, test
    small = (
        LabelledImages(F.avg_pool2d(part.pixels.float(), shrink).round().byte(), part.labels)
        for part in (train, test)
    )
    return tuple(small)  # type: ignore[return-value]


def shape_of(piece: Piece) -> tuple[int, int]:
    """(rounds, inner steps) of a training."""
    suite = SUITES[piece.suite]
    batches = round(suite.batches * (suite.tuning_share if piece.kind == "tune" else 1.0))
    if piece.method == CEILING:
        return 1, batches
    return piece.rounds, max(2, round(batches / piece.rounds))


def rate_of(piece: Piece, settings: dict[str, float]) -> float:
    """The learning rate; of slowcal_sgd so that its mean step is the one that is given."""
    rounds, inner_steps = shape_of(piece)
    return settings["rate"] * (2 / (rounds * inner_steps) if piece.method == "slowcal_sgd" else 1)


def task_of(piece: Piece) -> ImageTask:
    """The task, on a part of the training images in tuning."""
    suite = SUITES[piece.suite]
    train_images, test_images = images_of(suite.shrink, piece.kind == "tune")
    return ImageTask(
        train=PixelSource(train_images, train_images.pixels),
        test=PixelSource(test_images, train_images.pixels),
        model=suite.model,
        batch_size=suite.batch_size,
    )


def train(piece: Piece, settings: dict[str, float]) -> dict[str, Any]:
    """One training in the simulator: its accuracy, or how it ended."""
    rounds, inner_steps = shape_of(piece)
    name, fixed = VARIANTS.get(piece.method, (piece.method, {}))
    others = {k: v for k, v in settings.items() if k != "rate"}
    method = gm.build_method(name, {"inner_steps": inner_steps, **fixed, **others})
    plain = {"optimizer": "sgd", "weight_decay": 0.0, "clip_norm": 0.0, "schedule": "constant"}
    begun = time.process_time()
    ended: dict[str, Any] = {"accuracy": None, "loss": None}
    try:
        summary = gm.simulate(
            method=method,
            task=task_of(piece),
            workers=SUITES[piece.suite].workers,
            rounds=rounds,
            seed=piece.seed,
            training=gm.Training(learning_rate=rate_of(piece, settings), **plain),
            measure=gm.Measure(every=0),
        ).summary
        ended = {"accuracy": summary["eval_accuracy"], "loss": summary["eval_loss"]}
        ended["bytes_sent"] = summary["bytes_sent"]
    except GossamerError as error:
        ended["failed"] = str(error)
    return ended | {"inner_steps": inner_steps, "cpu_s": round(time.process_time() - begun, 1)}


def train_stack(pieces: list[Piece], settings: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Several trainings that differ in seed and learning rate alone, at once."""
    piece, workers = pieces[0], SUITES[pieces[0].suite].workers
    rounds, inner_steps = shape_of(piece)
    begun = time.process_time()
    stack = Stack(task_of(piece), [p.seed for p in pieces], workers, rounds * inner_steps)
    rates = torch.tensor([rate_of(p, s) for p, s in zip(pieces, settings, strict=True)])
    others = {k: v for k, v in settings[0].items() if k != "rate"}
    rates = rates.repeat_interleave(workers)[:, None]
    ends = RULES[piece.method](stack, rates, rounds, inner_steps, **others)
    seconds = round((time.process_time() - begun) / len(pieces), 1)
    return [
        {"accuracy": accuracy, "inner_steps": inner_steps, "cpu_s": seconds}
        for accuracy in stack.accuracies(ends)
    ]


def stacked_with(pieces: list[Piece], suite: Suite) -> list[Piece]:
    """The first of `pieces` and the others that can be trained along with it."""
    first = pieces[0]
    if suite.model != "cnn" or first.method not in RULES:
        return [first]

    def kind(piece: Piece) -> tuple[Any, ...]:
        settings = json.loads(piece.settings) if piece.settings else {}
        return piece.kind, piece.method, piece.rounds, settings.get("alpha")

    return [piece for piece in pieces if kind(piece) == kind(first)]


def read(file: Path) -> list[dict[str, Any]]:
    """All results so far."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line]


def nearest_tuned(piece: Piece) -> int:
    """The tuned number of rounds that is most like a final training.

    For the minibatch methods one with about as many rounds; for those with local steps one whose
    rounds had about as many inner steps, as it is these that a learning rate must suit.
    """
    suite = SUITES[piece.suite]
    if piece.method.startswith("minibatch"):
        return min(suite.tuned_rounds, key=lambda r: abs(math.log(r / piece.rounds)))
    _, wanted = shape_of(piece)

    def unlike(rounds: int) -> float:
        tuning = Piece(suite.name, "tune", piece.method, rounds, TUNING_SEED)
        return abs(math.log(shape_of(tuning)[1] / wanted))

    return min(suite.tuned_rounds, key=unlike)


def best_settings(results: list[dict[str, Any]], piece: Piece) -> dict[str, float] | None:
    """The best of tuning for the nearest tuned number of rounds; None while it is not complete."""
    tried = [
        r for r in results
        if (r["suite"], r["kind"], r["method"]) == (piece.suite, "tune", piece.method)
    ]  # fmt: skip
    if piece.rounds:
        tuned = nearest_tuned(piece)
        tried = [r for r in tried if r["rounds"] == tuned]
    if len(tried) < len(GRIDS[piece.suite][piece.method]):
        return None
    best = max(tried, key=lambda r: -1.0 if r["accuracy"] is None else r["accuracy"])
    chosen: dict[str, float] = json.loads(best["settings"])
    return chosen


def current(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the final trainings whose settings are no longer the best, as more were tried."""
    best: dict[Piece, dict[str, float] | None] = {}

    def holds(result: dict[str, Any]) -> bool:
        if result["kind"] == "tune" or result["method"] not in GRIDS[result["suite"]]:
            return True
        piece = Piece(result["suite"], "final", result["method"], result["rounds"], 0)
        if piece not in best:
            best[piece] = best_settings(results, piece)
        return best[piece] in (None, result["used"])

    return [result for result in results if holds(result)]


def run(suite: Suite, file: Path, share: str) -> int:
    """Do what is missing until the time is over; the exit code."""
    mine, shares = (int(part) for part in share.split("/"))
    begun = time.monotonic()
    keys = {tuple(r[k] for k in Piece.__dataclass_fields__) for r in current(read(file))}
    missing = [
        piece for piece in pieces_of(suite)
        if list(GRIDS[suite.name]).index(piece.method) % shares == mine
        and tuple(asdict(piece).values()) not in keys
    ]  # fmt: skip
    while missing:
        if time.monotonic() - begun > BUDGET_S:
            return 0
        pieces = stacked_with(missing, suite)
        settings = [
            json.loads(p.settings) if p.settings else best_settings(read(file), p) for p in pieces
        ]
        used = [s for s in settings if s is not None]
        if len(used) < len(pieces):
            time.sleep(5)  # the other process is still tuning it
            return 0
        stacked = len(pieces) > 1 or (pieces[0].method in RULES and suite.model == "cnn")
        ended = train_stack(pieces, used) if stacked else [train(pieces[0], used[0])]
        with file.open("a") as lines:
            for piece, chosen, end in zip(pieces, used, ended, strict=True):
                lines.write(json.dumps(asdict(piece) | {"used": chosen} | end) + "\n")
                print(piece.method, piece.rounds, piece.seed, chosen, end, flush=True)
        missing = [piece for piece in missing if piece not in pieces]
    return 3


def table(results: list[dict[str, Any]], suite: Suite) -> dict[str, dict[int, list[float | None]]]:
    """Accuracies by method and rounds, one for each seed; None: it diverged."""
    cells: dict[str, dict[int, list[float | None]]] = {}
    for result in results:
        if (result["suite"], result["kind"]) == (suite.name, "final"):
            row = cells.setdefault(result["method"], {})
            row.setdefault(result["rounds"], []).append(result["accuracy"])
    return cells


def cell(values: list[float | None]) -> str:
    """Mean and standard deviation in percent."""
    known = torch.tensor([v for v in values if v is not None])
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} diverged"
    spread = f" ± {100 * known.std():.1f}" if len(known) > 1 else ""
    return f"{100 * known.mean():.1f}{spread}"


def show(file: Path, plot: Path | None) -> None:
    """Tables, what tuning chose, and the picture."""
    results = current(read(file))
    shown = [s for s in SUITES.values() if table(results, s)]
    for suite in shown:
        cells = table(results, suite)
        print(
            f"\n{suite.name}\n\n| method | " + " | ".join(f"R = {r}" for r in suite.rounds) + " |"
        )
        print("|---" * (1 + len(suite.rounds)) + "|")
        for method, row in cells.items():
            if method != CEILING:
                texts = [cell(row[r]) if r in row else "-" for r in suite.rounds]
                print(f"| {method} | " + " | ".join(texts) + " |")
        if CEILING in cells:
            print(f"\n{CEILING}, a step a batch: {cell(cells[CEILING][0])}")
        for method in cells:
            for rounds in (0,) if method == CEILING else suite.rounds:
                chosen = best_settings(results, Piece(suite.name, "final", method, rounds, 0))
                print(f"  {method} R = {rounds}: {chosen}")
    if plot is not None:
        draw(results, shown, plot)


def draw(results: list[dict[str, Any]], suites: list[Suite], plot: Path) -> None:
    """Accuracy against rounds, mean and range over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(suites), 4.4), layout="constrained")
    for index, suite in enumerate(suites, start=1):
        axes = figure.add_subplot(1, len(suites), index)
        for method, row in table(results, suite).items():
            known = {r: [v for v in vs if v is not None] for r, vs in row.items()}
            rounds = sorted(r for r in known if known[r])
            means = [100 * sum(known[r]) / len(known[r]) for r in rounds]
            if method == CEILING:
                axes.axhline(means[0], color="grey", linestyle=":", label=method)
                continue
            low = [m - 100 * min(known[r]) for m, r in zip(means, rounds, strict=True)]
            high = [100 * max(known[r]) - m for m, r in zip(means, rounds, strict=True)]
            axes.errorbar(rounds, means, yerr=[low, high], marker="o", capsize=2, label=method)
        axes.set_xscale("log")
        axes.set_xlabel("rounds R (the same samples in all)")
        axes.set_ylabel("test accuracy (%)")
        axes.set_title(f"{suite.name}: M = {suite.workers}, batches of {suite.batch_size}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(plot, dpi=130)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("action", choices=["run", "show", "check"])
    parser.add_argument("--suite", choices=sorted(SUITES), default="mnist")
    parser.add_argument("--file", type=Path, default=Path("mixvr_images.jsonl"))
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.action == "show":
        show(given.file, given.plot)
        return 0
    warnings.simplefilter("ignore")
    if given.action == "check":
        task = ImageTask.from_files("fashion-mnist", batch_size=4)
        for method in RULES:
            settings = {"alpha": 0.25} if method.startswith("local_mixvr") else {}
            print(f"{method}: {largest_difference(method, task, settings):.2g}")
        return 0
    if SUITES[given.suite].model != "cnn":
        return run(SUITES[given.suite], given.file, given.share)
    with torch.backends.mkldnn.flags(enabled=False):  # twice as fast for so small a network
        return run(SUITES[given.suite], given.file, given.share)


if __name__ == "__main__":
    sys.exit(main())
