"""Goodput under failing chips: data parallel training against learners that do not wait.

Data parallel rows are one job on all chips, whose stops are run. Decoupled rows run the learners'
and the syncer's real loops, without numerics; a learner is an elastic job on its share of chips.
Times of the failure model are fitted to the published table; see `gossamer.sim.chaos`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.measure.settings import Measure
from gossamer.methods.decoupled_diloco import DecoupledDiLoCo
from gossamer.sim.chaos import elastic, job_goodput, restart
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults
from gossamer.sim.network import Network, WorkerLink
from gossamer.sim.simulate import simulate

CHIPS = (150e3, 300e3, 600e3, 1.2e6, 2.4e6)
LEARNERS = (2, 4, 8, 16)

# Percent, by learners (0: data parallel that restarts, 1: elastic data parallel) and chips.
PUBLISHED: dict[int, dict[float, int]] = {
    0: dict(zip(CHIPS, (72, 57, 38, 27, 18), strict=True)),
    1: dict(zip(CHIPS, (88, 80, 69, 58, 40), strict=True)),
    2: dict(zip(CHIPS, (94, 88, 80, 70, 54), strict=True)),
    4: dict(zip(CHIPS, (96, 93, 89, 82, 73), strict=True)),
    8: dict(zip(CHIPS, (98, 96, 94, 88, 80), strict=True)),
    16: dict(zip(CHIPS, (99, 98, 96, 93, 86), strict=True)),
}
"""Table 1 of Decoupled DiLoCo (arXiv:2604.21428), as reported by readers of the paper."""

_PARAMETERS = 5.04e9  # of the paper's main model; only its transfers depend on it
_CYCLE = 24  # P = H, as in the paper
_JOB_DURATION_S = 2e6


@dataclass(frozen=True)
class Cell:
    """One system on so many chips.

    Args:
        learners: 0: data parallel that restarts, 1: elastic, otherwise Decoupled DiLoCo.
        step_time_s: of an inner step; what a learner loses to a failure does not depend on it.
        learner_steps: to run in all, divided among the learners.
    """

    chips: float
    learners: int
    step_time_s: float = 10.0
    learner_steps: int = 8000
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What came out, in [0, 1]; and learners in a merge, None without merges."""

    goodput: float
    merged_learners: float | None


class _Shapes:
    """A model of 24 equal tensors, which nobody trains."""

    def build(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(_CYCLE)])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    def train_batch(self, worker: int, step: int) -> Tensor:
        return torch.zeros(1, 64)

    def eval_batches(self) -> list[Tensor]:
        return []


def published(cell: Cell) -> int | None:
    """The paper's percentage, where its table has one."""
    return PUBLISHED.get(cell.learners, {}).get(cell.chips)


def measure(cell: Cell) -> Measured:
    """Run one cell. Raises `ConfigError` for numbers that make no run."""
    if cell.learners < 2:
        chaos = elastic(cell.chips) if cell.learners else restart(cell.chips)
        return Measured(job_goodput(chaos, seed=cell.seed, duration_s=_JOB_DURATION_S), None)
    result = simulate(
        method=DecoupledDiLoCo(inner_steps=_CYCLE, codec="int4", codec_down="bf16"),
        task=_Shapes(),
        workers=cell.learners,
        rounds=max(1, round(cell.learner_steps / cell.learners / _CYCLE)),
        seed=cell.seed,
        numerics="none",
        measure=Measure(every=0),
        timing=Timing(step_time=cell.step_time_s, parameters=_PARAMETERS),
        network=Network(
            bandwidth="10Gbit/s",
            latency="20ms",
            workers=(WorkerLink(worker=cell.learners, bandwidth="1Tbit/s"),),
        ),
        faults=Faults(chaos=elastic(cell.chips)),
    )
    merged = result.summary["records"]["merged_learners"]["mean"]
    return Measured(result.summary["utilization"], merged)
