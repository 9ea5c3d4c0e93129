"""Many replicas of the two-layer network at once, without the simulator's costs.

A batch of four images keeps no core busy: most of a step's time goes into calling torch. Here the
replicas of all workers, and of several runs, are one stack of tensors [n, ...], and a step of all
of them is a handful of batched matrix products. The batches, the initial weights and the rules are
those of the simulator; `largest_difference` compares the two, parameter by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import gossamer as gm
from gossamer.comm.collectives import mean_of
from gossamer.training.engine import Engine
from gossamer.training.images import ImageTask

IMAGES_MAX = 64  # of one replica in one pass


class Stack:
    """Replicas of `ConvNet`, `num_workers` for each of the runs.

    Args:
        task: the task; batches and weights of a run are those that its seed gives.
        seeds: of the runs, which may be equal.
        num_batches: batches that each worker will read.
    """

    def __init__(
        self, task: ImageTask, seeds: Sequence[int], num_workers: int, num_batches: int
    ) -> None:
        self.num_runs, self.num_workers = len(seeds), num_workers
        self.batch_size, self.num_classes = task.batch_size, task.num_classes
        self.task = task
        self.engines = [
            Engine(task, gm.Training(), seed=seed, total_steps=1, real=True) for seed in seeds
        ]
        order: dict[tuple[int, int], Tensor] = {}
        for seed in sorted(set(seeds)):
            task.prepare(num_workers=num_workers, seed=seed, num_steps=num_batches)
            for worker in range(num_workers):
                read = [task.batch_indices(worker, step) for step in range(num_batches)]
                order[seed, worker] = torch.from_numpy(np.concatenate(read))
        self._order = torch.stack([order[s, w] for s in seeds for w in range(num_workers)])
        starts = [engine.new_replicas(1)[0][0] for engine in self.engines]
        self.start = torch.stack([start for start in starts for _ in range(num_workers)])
        self._slots = {slot.name: slot for slot in self.engines[0].layout.slots}
        self._read = 0

    def gradients(self, points: Sequence[Tensor], num_batches: int = 1) -> list[Tensor]:
        """Mean gradients [n, P] at each of the points [n, P] on everybody's next batches."""
        first, count = self._read, num_batches * self.batch_size
        self._read += count
        totals = [torch.zeros_like(point) for point in points]
        for begin in range(first, first + count, IMAGES_MAX):
            chosen = self._order[:, begin : min(begin + IMAGES_MAX, first + count)]
            labels = self.task.train.labels[chosen]
            images = self.task.train.take(chosen.flatten())
            columns = self._columns(images, len(chosen))
            for point, total in zip(points, totals, strict=True):
                self._add_gradient(point, columns, labels, total)
        return [total.div_(count) for total in totals]

    def _columns(self, images: Tensor, num_replicas: int) -> Tensor:
        """The patches that a 3 x 3 convolution of stride 2 sees, [n, C 9, B places]."""
        patches = F.unfold(images, 3, padding=1, stride=2)  # [n B, C 9, places]
        patches = patches.view(num_replicas, -1, *patches.shape[1:]).transpose(1, 2)
        return patches.flatten(2)

    def _leaf(self, point: Tensor, name: str, *shape: int) -> Tensor:
        slot = self._slots[name]
        piece = point[:, slot.offset : slot.end].view(len(point), *shape)
        return piece.detach().requires_grad_()

    def _add_gradient(self, point: Tensor, columns: Tensor, labels: Tensor, total: Tensor) -> None:
        """Add to `total` [n, P] the gradients of the summed losses at `point`."""
        n, size = labels.shape
        shapes = {name: slot.shape for name, slot in self._slots.items()}
        wide, wider = shapes["first.weight"][0], shapes["second.weight"][0]
        channels, height, width = self.task.train.shape
        rows, cols = -(-height // 2), -(-width // 2)
        leaves = {
            "first.weight": self._leaf(point, "first.weight", wide, channels * 9),
            "first.bias": self._leaf(point, "first.bias", wide, 1),
            "second.weight": self._leaf(point, "second.weight", wider, wide * 9),
            "second.bias": self._leaf(point, "second.bias", wider, 1),
            "head.weight": self._leaf(point, "head.weight", *shapes["head.weight"]),
            "head.bias": self._leaf(point, "head.bias", 1, self.num_classes),
        }
        hidden = F.relu(
            torch.baddbmm(leaves["first.bias"], leaves["first.weight"], columns)
        )  # [n, wide, B places]
        images = hidden.view(n, wide, size, rows, cols).transpose(1, 2).flatten(0, 1)
        hidden = F.relu(
            torch.baddbmm(leaves["second.bias"], leaves["second.weight"], self._columns(images, n))
        )
        flat = hidden.view(n, wider, size, -1).transpose(1, 2).flatten(2)  # [n, B, features]
        logits = torch.baddbmm(leaves["head.bias"], flat, leaves["head.weight"].transpose(1, 2))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        for name, gradient in zip(
            leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True
        ):
            slot = self._slots[name]
            total[:, slot.offset : slot.end] += gradient.reshape(n, -1)

    def average(self, vectors: Tensor) -> Tensor:
        """Every run's mean over its workers [n, P], by the collectives' formula."""
        grouped = vectors.view(self.num_runs, self.num_workers, -1)
        first = grouped[:, :1]
        return (first + (grouped - first).mean(1, keepdim=True)).expand_as(grouped).flatten(0, 1)

    def accuracies(self, points: Tensor) -> list[float | None]:
        """Of each run's averaged model; None where it is not finite."""
        grouped = points.view(self.num_runs, self.num_workers, -1)
        found: list[float | None] = []
        for engine, rows in zip(self.engines, grouped, strict=True):
            mean = mean_of(tuple(rows))
            (replica,) = engine.new_replicas(1)[1]
            report = engine.evaluate(mean, replica.buffers, replica.counters)
            known = bool(torch.isfinite(mean).all()) and math.isfinite(report.loss)
            found.append(report.metrics["accuracy"] if known else None)
        return found


def local_sgd(stack: Stack, rates: Tensor, rounds: int, inner_steps: int) -> Tensor:
    """Parameters [n, P] after the last round; `rates` [n, 1] are the replicas' learning rates."""
    x = stack.start.clone()
    for _ in range(rounds):
        for _ in range(inner_steps):
            x -= rates * stack.gradients([x])[0]
        x = stack.average(x).clone()
    return x


def local_momentum(stack: Stack, rates: Tensor, rounds: int, inner_steps: int) -> Tensor:
    """Heavy ball of 0.9; parameters and momenta are averaged."""
    x, momentum = stack.start.clone(), torch.zeros_like(stack.start)
    for _ in range(rounds):
        for _ in range(inner_steps):
            momentum = 0.9 * momentum + stack.gradients([x])[0]
            x -= rates * momentum
        x, momentum = stack.average(x).clone(), stack.average(momentum).clone()
    return x


def slowcal_sgd(stack: Stack, rates: Tensor, rounds: int, inner_steps: int) -> Tensor:
    """Linear weights: step t is t long, x is the t-weighted mean of w."""
    x, w = stack.start.clone(), stack.start.clone()
    for r in range(rounds):
        for t in range(r * inner_steps + 1, (r + 1) * inner_steps + 1):
            w -= t * rates * stack.gradients([x])[0]
            x = torch.lerp(x, w, 2 / (t + 2))
        x, w = stack.average(x).clone(), stack.average(w).clone()
    return x


def minibatch_sgd(stack: Stack, rates: Tensor, rounds: int, inner_steps: int) -> Tensor:
    """One step a round."""
    x = stack.start.clone()
    for _ in range(rounds):
        x = x - rates * stack.average(stack.gradients([x], inner_steps)[0])
    return x


def minibatch_asgd(stack: Stack, rates: Tensor, rounds: int, inner_steps: int) -> Tensor:
    """One step of Nesterov momentum 0.9 a round."""
    x, velocity = stack.start.clone(), torch.zeros_like(stack.start)
    for _ in range(rounds):
        gradient = stack.average(stack.gradients([x], inner_steps)[0])
        velocity = 0.9 * velocity + gradient
        x = x - rates * (gradient + 0.9 * velocity)
    return x


def data_parallel(stack: Stack, rates: Tensor, rounds: int, inner_steps: int) -> Tensor:
    """Plain steps, each along everybody's mean gradient."""
    return minibatch_sgd(stack, rates, rounds * inner_steps, 1)


def local_mixvr(
    stack: Stack,
    rates: Tensor,
    rounds: int,
    inner_steps: int,
    *,
    alpha: float = 0.1,
    gamma: float = 0.95,
) -> Tensor:
    """beta = 0.1 and gamma, the share of w in x; all constant."""
    minibatch = math.ceil(Fraction(str(alpha)) * inner_steps)
    x, w, d = stack.start.clone(), stack.start.clone(), torch.zeros_like(stack.start)
    old = x.clone()
    is_first = True

    def estimate(num_batches: int) -> Tensor:
        if is_first:
            return stack.gradients([x], num_batches)[0]
        new_gradient, old_gradient = stack.gradients([x, old], num_batches)
        return new_gradient + 0.9 * (d - old_gradient)

    for _ in range(rounds):
        for _ in range(inner_steps - minibatch):
            d, is_first = estimate(1), False
            old, w = x, w - rates * d
            x = torch.lerp(x, w, gamma)
        x, w = stack.average(x).clone(), stack.average(w).clone()
        d, is_first = stack.average(estimate(minibatch)).clone(), False
        old, w = x, w - rates * d
        x = torch.lerp(x, w, gamma)
    return x


def local_mixvr_average(
    stack: Stack, rates: Tensor, rounds: int, inner_steps: int, *, alpha: float = 0.1
) -> Tensor:
    """The other reading of 0.95, as the weight of the old average."""
    return local_mixvr(stack, rates, rounds, inner_steps, alpha=alpha, gamma=1 - 0.95)


# By the name of the method, or of a variant of it.
RULES = {
    "data_parallel": data_parallel,
    "minibatch_sgd": minibatch_sgd,
    "minibatch_asgd": minibatch_asgd,
    "local_sgd": local_sgd,
    "local_momentum": local_momentum,
    "slowcal_sgd": slowcal_sgd,
    "local_mixvr": local_mixvr,
    "local_mixvr_average": local_mixvr_average,
}
VARIANTS: dict[str, tuple[str, dict[str, str | bool]]] = {
    "local_mixvr_average": ("local_mixvr", {"gamma_weighs": "average"}),
    "no_variance_reduction": ("local_mixvr", {"variance_reduction": False}),
    "no_anytime": ("local_mixvr", {"anytime_averaging": False}),
    "no_drift_correction": ("local_mixvr", {"drift_correction": False}),
}


def largest_difference(method: str, task: ImageTask, settings: dict[str, float]) -> float:
    """Between the simulator's parameters and the stack's, after 3 rounds of 8 batches.

    In units of how far the parameters have moved, both as root mean squares.
    """
    seeds, rate = (3, 4), 0.02 if method != "slowcal_sgd" else 0.002
    ours = Stack(task, seeds, 4, 3 * 8)
    rates = torch.full((len(ours.start), 1), rate)
    ends = RULES[method](ours, rates, 3, 8, **settings)
    name, fixed = VARIANTS.get(method, (method, {}))
    worst = 0.0
    for run, seed in enumerate(seeds):
        theirs = gm.simulate(
            method=gm.build_method(name, {"inner_steps": 8, **fixed, **settings}),
            task=task,
            workers=4,
            rounds=3,
            seed=seed,
            training=gm.Training(
                optimizer="sgd", learning_rate=rate, weight_decay=0, clip_norm=0,
                schedule="constant",
            ),
            measure=gm.Measure(every=0),
        ).parameters  # fmt: skip
        ours_here = ends[4 * run : 4 * run + 4]
        moved = (theirs - ours.start[4 * run]).norm()
        worst = max(worst, float((ours_here - theirs).norm() / moved))
    return worst
