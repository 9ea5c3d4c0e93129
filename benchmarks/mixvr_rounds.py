"""How many rounds each method needs to reach the optimal statistical rate, as the samples grow.

    python benchmarks/mixvr_rounds.py check                   the loops here are the methods
    python benchmarks/mixvr_rounds.py sweep --out FILE --limit 150      again until it exits with 0
    python benchmarks/mixvr_fit.py FILE --plot docs/images/mixvr_rounds.svg

N samples are shared by M workers in R rounds, N / (M R) each. `sweep` runs every method for every
N, M and R on a problem whose optimum is known, with 20 step sizes a factor sqrt(2) apart and many
seeds (each with signs of the optimum of its own) at once, and appends the excess losses to a file
of JSON lines. `mixvr_fit.py` finds the rounds that each method needs, and how they grow with N.

The loops are vectorised over step sizes, seeds and workers, as N goes to a million. `check` shows
that they give the iterates of the methods run by `gossamer.simulate`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.measure.settings import Measure
from gossamer.methods import LocalMixVR, LocalSGD, Method, MinibatchASGD, MinibatchSGD, SlowcalSGD
from gossamer.outer.double_momentum import theory_momenta
from gossamer.sim.simulate import simulate
from gossamer.training.convex import HardConvex
from gossamer.training.settings import Training

PROBLEM: dict[str, Any] = {
    "num_parameters": 64,
    "power": 2.0,  # gradient descent converges like 1/R until R is several thousand
    "asymmetry": 0.2,  # local steps are biased: the mean of the workers is not the mean's step
    "noise": 0.5,
    "noise_power": 1.0,  # its covariance is proportional to the curvature
    "multiplicative": 0.5,
}
ALPHA = 0.1  # of Local MixVR, for all N, M and R
STEP_SIZES = 20
CHUNK = 128  # steps whose noise is drawn at a time


class Lanes:
    """Runs side by side: points are [S, G, M, N] for S seeds, G step sizes and M workers.

    Args:
        etas: G step sizes.
        num_steps: samples of each worker in the whole run.
        segments: only means over this many equal stretches are wanted, and over the workers: they
            are drawn once. 0: each step's noise.
    """

    def __init__(
        self,
        seeds: range,
        etas: list[float],
        *,
        workers: int,
        num_steps: int,
        dtype: torch.dtype,
        segments: int = 0,
    ) -> None:
        self.problems = [HardConvex(**PROBLEM, seed=seed, dtype=dtype) for seed in seeds]
        self.workers, self.num_steps = workers, num_steps
        self.eta = torch.tensor(etas, dtype=dtype).view(1, -1, 1, 1)
        self.optimum = torch.stack([p.optimum.to(dtype) for p in self.problems])[:, None, None]
        self.curvature = self.problems[0].curvature.to(dtype)
        self.start = torch.zeros(len(seeds), len(etas), workers, len(self.curvature), dtype=dtype)
        self._step, self._chunk = 0, (self.start, self.start)
        self._segments: tuple[Tensor, Tensor] | None = None
        if segments:
            length = num_steps // segments
            means = [over_workers(self.mean_noise(length)) for _ in range(segments)]
            scales, shifts = (torch.stack(part) for part in zip(*means, strict=True))
            self._segments, self._segment_steps = (scales, shifts), length
            self.rewind()

    def rewind(self) -> None:
        """Back to the first step."""
        self._step = 0

    def noise(self) -> tuple[Tensor, Tensor]:
        """The next step's: curvatures times their scales, and shifts; each [S, 1, M, N]."""
        place = self._step % CHUNK
        if place == 0:
            self._chunk = self._draw(self._step, min(self._step + CHUNK, self.num_steps))
        self._step += 1
        return self._chunk[0][place], self._chunk[1][place]

    def mean_noise(self, count: int) -> tuple[Tensor, Tensor]:
        """The mean of the next `count` steps' noise."""
        if self._segments is not None:
            first = self._step // self._segment_steps
            self._step += count
            last = self._step // self._segment_steps
            return self._segments[0][first:last].mean(0), self._segments[1][first:last].mean(0)
        scales, shifts = torch.zeros_like(self.start[:, :1]), torch.zeros_like(self.start[:, :1])
        left = count
        while left:
            place = self._step % CHUNK
            if place == 0:
                self._chunk = self._draw(self._step, min(self._step + CHUNK, self.num_steps))
            taken = min(left, CHUNK - place)
            scales += self._chunk[0][place : place + taken].sum(0)
            shifts += self._chunk[1][place : place + taken].sum(0)
            self._step, left = self._step + taken, left - taken
        return scales / count, shifts / count

    def _draw(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Steps `first` .. `stop` - 1, each [steps, S, 1, M, N]."""
        drawn = [p.train_batches(self.workers, first, stop) for p in self.problems]
        scales, shifts = (torch.stack(part) for part in zip(*drawn, strict=True))  # [S, M, T, N]
        scales = scales * self.curvature
        return tuple(v.movedim(2, 0)[:, :, None].contiguous() for v in (scales, shifts))  # type: ignore[return-value]

    def slope(self, points: Tensor) -> Tensor:
        """phi' of the distances from the optimum."""
        asymmetry = self.problems[0].asymmetry
        return torch.nn.functional.leaky_relu(points - self.optimum, asymmetry)

    def gradient(self, points: Tensor, noise: tuple[Tensor, Tensor]) -> Tensor:
        return torch.addcmul(noise[1], noise[0], self.slope(points))

    def excess_loss(self, points: Tensor) -> Tensor:
        """Of the workers' mean, fp64 [S, G]."""
        means = points.mean(2)
        return torch.stack([p.excess_loss(x) for p, x in zip(self.problems, means, strict=True)])


def all_reduced(values: Tensor) -> Tensor:
    return values.mean(2, keepdim=True).expand_as(values).contiguous()


def minibatch_sgd(lanes: Lanes, rounds: int, inner_steps: int) -> Tensor:
    x = lanes.start[:, :, :1]
    for _ in range(rounds):
        x = x - lanes.eta * lanes.gradient(x, over_workers(lanes.mean_noise(inner_steps)))
    return x


def minibatch_asgd(lanes: Lanes, rounds: int, inner_steps: int) -> Tensor:
    x = average = lanes.start[:, :, :1]
    for t in range(1, rounds + 1):
        share = 2 / (t + 1)
        gradient = lanes.gradient(
            torch.lerp(average, x, share), over_workers(lanes.mean_noise(inner_steps))
        )
        x = x - lanes.eta * t / 2 * gradient
        average = torch.lerp(average, x, share)
    return average


def over_workers(noise: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return noise[0].mean(2, keepdim=True), noise[1].mean(2, keepdim=True)


def local_sgd(lanes: Lanes, rounds: int, inner_steps: int) -> Tensor:
    x = lanes.start.clone()
    for _ in range(rounds):
        for _ in range(inner_steps):
            x.addcmul_(lanes.eta, lanes.gradient(x, lanes.noise()), value=-1)
        x = all_reduced(x)
    return x


def slowcal_sgd(lanes: Lanes, rounds: int, inner_steps: int) -> Tensor:
    x, w, t = lanes.start.clone(), lanes.start.clone(), 0
    for _ in range(rounds):
        for _ in range(inner_steps):
            t += 1
            w.addcmul_(lanes.eta, lanes.gradient(x, lanes.noise()), value=-t)
            x.lerp_(w, theory_momenta(t).gamma)
        x, w = all_reduced(x), all_reduced(w)
    return x


def local_mixvr(lanes: Lanes, rounds: int, inner_steps: int) -> Tensor:
    method = LocalMixVR(inner_steps=inner_steps, alpha=ALPHA)
    x, w, t = lanes.start.clone(), lanes.start.clone(), 0
    estimator, old_slope = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(rounds):
        for step in range(method.local_steps + 1):
            t += 1
            beta, gamma, weight = theory_momenta(t)
            is_sync = step == method.local_steps
            if is_sync:
                x, w = all_reduced(x), all_reduced(w)
            scales, shifts = lanes.mean_noise(method.minibatch) if is_sync else lanes.noise()
            slope = lanes.slope(x)
            gradient = torch.addcmul(shifts, scales, slope)
            old_gradient = torch.addcmul(shifts, scales, old_slope)  # the slope is known already
            if t == 1:
                estimator = gradient
            else:
                estimator.sub_(old_gradient).mul_(1 - beta).add_(gradient)
            if is_sync:
                estimator = all_reduced(estimator)
            old_slope = slope
            w.addcmul_(lanes.eta, estimator, value=-weight)
            x = torch.lerp(x, w, gamma)
    return x


MINIBATCH = ("minibatch_sgd", "minibatch_asgd")
Loop = Callable[[Lanes, int, int], Tensor]
LOOPS: dict[str, Loop] = {
    "minibatch_sgd": minibatch_sgd,
    "minibatch_asgd": minibatch_asgd,
    "local_sgd": local_sgd,
    "slowcal_sgd": slowcal_sgd,
    "local_mixvr": local_mixvr,
}


def step_sizes(method: str, samples: int, workers: int) -> list[float]:
    """20 of them, a factor sqrt(2) apart, for every R the same.

    The largest is beyond the stability of a plain step (2 / L = 2) for the methods whose step does
    not grow. Those whose step grows like t have it over the number of steps. Local SGD's best falls
    like N^-1/2, and so does its largest.
    """
    steps = samples // workers
    largest = {
        "minibatch_sgd": 5.6,
        "minibatch_asgd": 5.6,
        "local_sgd": 1.4 * min(1.0, math.sqrt(2**13 / samples)),
        "slowcal_sgd": 2.0 / steps,
        "local_mixvr": 2.0 / steps,
    }[method]
    return [largest * 2 ** (-index / 2) for index in range(STEP_SIZES)]


# ------------------------------------------------------------------------------------------ check


def methods_of(inner_steps: int) -> dict[str, Method]:
    return {
        "minibatch_sgd": MinibatchSGD(inner_steps=inner_steps),
        "minibatch_asgd": MinibatchASGD(inner_steps=inner_steps, form="ac_sa"),
        "local_sgd": LocalSGD(inner_steps=inner_steps),
        "slowcal_sgd": SlowcalSGD(inner_steps=inner_steps),
        "local_mixvr": LocalMixVR(inner_steps=inner_steps, alpha=ALPHA, schedule="theory"),
    }


def largest_difference(name: str, *, workers: int, rounds: int, inner_steps: int) -> float:
    """Between a loop here and the method in the simulator, in fp64, over its parameters."""
    eta = step_sizes(name, workers * rounds * inner_steps, workers)[8]
    num_steps = rounds * inner_steps
    lanes = Lanes(
        range(2, 3),
        [eta],
        workers=workers,
        num_steps=num_steps,
        dtype=torch.float64,
        segments=2 * rounds if name in MINIBATCH else 0,
    )
    found = LOOPS[name](lanes, rounds, inner_steps).mean(2)[0, 0]
    result = simulate(
        method=methods_of(inner_steps)[name],
        task=HardConvex(**PROBLEM, seed=2, dtype=torch.float64),
        workers=workers,
        rounds=rounds,
        seed=2,
        training=Training(
            optimizer="sgd", learning_rate=eta, schedule="constant", clip_norm=0, weight_decay=0
        ),
        measure=Measure(every=0),
    )
    assert float(found.abs().max()) > 0.01
    return float((result.parameters - found).abs().max())


def check() -> None:
    for name in LOOPS:
        gap = largest_difference(name, workers=4, rounds=3, inner_steps=150)
        print(f"{name:16s} largest difference from the simulator's parameters {gap:.1e}")
        if gap > 1e-12:
            raise SystemExit(f"{name}: the loop is not the method")


# ---------------------------------------------------------------------------------------- sweep

LOG2_SAMPLES = (11, 12, 14, 16, 18, 20)
WORKERS = (8, 4)
SEEDS = {"minibatch_sgd": 64, "minibatch_asgd": 64}  # others: 32, as each of them costs more
ROUNDS = {
    "minibatch_sgd": 1024,
    "minibatch_asgd": 256,
    "local_sgd": 1024,
    "slowcal_sgd": 128,
    "local_mixvr": 32,
}  # the largest R of each

Task = tuple[int, int, str, list[int], range]  # log2 N, M, method, rounds, seeds


def plan() -> Iterator[Task]:
    """All there is to do, the cheap ones first."""
    for log2_samples in LOG2_SAMPLES:
        for workers in WORKERS:
            for name in LOOPS:
                powers = [2**k for k in range(11)]
                if name not in MINIBATCH and log2_samples == 20:
                    powers = powers[::2] if name != "local_mixvr" else powers[:4]
                counts = [r for r in powers if r <= ROUNDS[name] and r * workers <= 2**log2_samples]
                seeds = SEEDS.get(name, 32)
                if name in MINIBATCH:
                    yield log2_samples, workers, name, counts, range(seeds)
                    continue
                halves = [range(seeds)] if log2_samples < 18 else [range(16), range(16, 32)]
                for rounds in counts:
                    for part in halves:
                        yield log2_samples, workers, name, [rounds], part


def sweep(out: Path, limit_s: float) -> None:
    """Do what is missing in the file, until so much time has passed; exit 3 where more is left."""
    done: dict[tuple[str, int, int, int], set[int]] = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        row = json.loads(line)
        key = (row["method"], row["workers"], row["samples"], row["rounds"])
        done.setdefault(key, set()).update(row["seeds"])
    began = time.monotonic()
    for log2_samples, workers, name, counts, seeds in plan():
        keys = {r: (name, workers, 2**log2_samples, r) for r in counts}
        missing = [r for r in counts if not set(seeds) <= done.get(keys[r], set())]
        if not missing:
            continue
        if time.monotonic() - began > limit_s:
            raise SystemExit(3)
        measure(name, 2**log2_samples, workers, missing, seeds=seeds, out=out)


def measure(
    name: str, samples: int, workers: int, counts: list[int], *, seeds: range, out: Path
) -> None:
    """One method, one N and M, several R; one line of the file for each R."""
    etas = step_sizes(name, samples, workers)
    lanes = Lanes(
        seeds,
        etas,
        workers=workers,
        num_steps=samples // workers,
        dtype=torch.float32,
        segments=max(counts) if name in MINIBATCH else 0,
    )
    for rounds in counts:
        began = time.process_time()
        lanes.rewind()
        points = LOOPS[name](lanes, rounds, samples // (workers * rounds))
        excess = lanes.excess_loss(points)
        row = {
            "method": name,
            "samples": samples,
            "workers": workers,
            "rounds": rounds,
            "seeds": list(seeds),
            "etas": etas,
            "excess_loss": [[float(f"{x:.6g}") for x in of_seed] for of_seed in excess.tolist()],
        }
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        means = np.nan_to_num(excess.mean(0).numpy(), nan=np.inf)
        best = int(means.argmin())
        print(
            f"N={samples} M={workers} {name} R={rounds}: "
            f"{means[best] * math.sqrt(samples):.3f} / sqrt(N), step size {best} of {STEP_SIZES}, "
            f"{time.process_time() - began:.1f} s",
            flush=True,
        )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="the loops here give the methods' iterates")
    one = commands.add_parser("sweep", help="measure what is missing in a file")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--limit", type=float, default=math.inf, help="begin nothing after so many s")
    arguments = parser.parse_args()
    if arguments.command == "check":
        check()
    else:
        sweep(arguments.out, arguments.limit)


if __name__ == "__main__":
    main()
