"""Which blocks of a model drive the disagreement of its workers, and so deserve to be mixed.

For each block: average only that block over the workers and see how far the mean pairwise
Jensen-Shannon distance of their predictions drops.

Source: arXiv 2606.22768 uses the distance as the signal for choosing the subset of Mix2; the
procedure is reconstructed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tomli_w
import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.measure.blocks import Block
from gossamer.measure.consensus import worker_mean
from gossamer.measure.divergence import js_distance
from gossamer.measure.probes import log_probabilities
from gossamer.training.layout import ParameterLayout

Predict = Callable[[Tensor], Tensor]
Progress = Callable[[int, int, Block], None]


@dataclass(frozen=True, slots=True)
class BlockSensitivity:
    """What averaging one block over the workers does to the mean pairwise JS distance."""

    block: Block
    js_block_averaged: float  # only this block averaged
    drop: float  # baseline minus that; negative where averaging it alone sets workers further apart
    js_rest_averaged: float | None  # all but this block averaged: the disagreement it makes alone

    @property
    def drop_per_parameter(self) -> float:
        return self.drop / self.block.numel


@dataclass(frozen=True, slots=True)
class SensitivityResult:
    """Rows in the order of the blocks that were given."""

    baseline_js: float
    rows: tuple[BlockSensitivity, ...]

    def by_drop(self) -> tuple[BlockSensitivity, ...]:
        """Largest drop first; ties in the order of the blocks."""
        return tuple(sorted(self.rows, key=lambda row: -row.drop))

    def by_drop_per_parameter(self) -> tuple[BlockSensitivity, ...]:
        """Largest drop per parameter first; ties in the order of the blocks."""
        return tuple(sorted(self.rows, key=lambda row: -row.drop_per_parameter))

    def to_dict(self) -> dict[str, object]:
        """For JSON: the baseline and one entry a block, largest drop first."""
        return {
            "baseline_js": self.baseline_js,
            "blocks": [
                {
                    "name": row.block.name,
                    "patterns": list(row.block.patterns),
                    "parameters": row.block.numel,
                    "share": row.block.share,
                    "js_block_averaged": row.js_block_averaged,
                    "drop": row.drop,
                    "drop_per_parameter": row.drop_per_parameter,
                    "js_rest_averaged": row.js_rest_averaged,
                }
                for row in self.by_drop()
            ],
        }


def rank_blocks(
    parameters: Tensor,
    layout: ParameterLayout,
    predict: Predict,
    blocks: Sequence[Block],
    *,
    complement: bool = True,
    progress: Progress | None = None,
) -> SensitivityResult:
    """Measure every block. `parameters` [M, P] are only read.

    Args:
        parameters: the workers' flat vectors, at least two.
        layout: of a row.
        predict: flat vector [P] -> logits or log-probabilities [..., V] on a fixed batch; the
            vector is reused for the next call and must not be kept.
        blocks: what to compare, usually `blocks_of(layout)`.
        complement: also average everything but the block. M forward passes a block become 2 M.
        progress: called after each block with the number done, their total and the block.

    Raises `ConfigError` for fewer than two workers, vectors of another layout, no blocks, or
    predictions that are NaN.
    """
    num_workers, numel = parameters.shape
    if num_workers < 2:
        raise ConfigError(
            f"sensitivity compares workers: two or more are needed; {num_workers} given"
        )
    if numel != layout.numel:
        raise ConfigError(f"the layout has {layout.numel} parameters, the workers have {numel}")
    if not blocks:
        raise ConfigError("no blocks given; blocks_of(layout) gives those of the model")
    mean = worker_mean(parameters)
    everything = (slice(0, numel),)
    baseline = _js_with_average(parameters, mean, (), (), predict)
    rows: list[BlockSensitivity] = []
    for index, block in enumerate(blocks):
        after = _js_with_average(parameters, mean, block.slices, (), predict)
        alone = (
            _js_with_average(parameters, mean, everything, block.slices, predict)
            if complement
            else None
        )
        rows.append(BlockSensitivity(block, after, baseline - after, alone))
        if progress is not None:
            progress(index + 1, len(blocks), block)
    return SensitivityResult(baseline, tuple(rows))


def propose_subset(result: SensitivityResult, share: float) -> tuple[Block, ...]:
    """The blocks to mix for at most `share` (0 to 1) of the parameters, best first.

    Greedy by drop per parameter: a block that does not fit is passed over, and one whose averaging
    does not lower the distance is never taken.

    Raises `ConfigError` for a share outside (0, 1], or where no helpful block fits.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share of the parameters must be above 0 and at most 1; got {share}")
    helpful = [row.block for row in result.by_drop_per_parameter() if row.drop > 0]
    if not helpful:
        raise ConfigError(
            f"averaging any one block does not lower the JS distance ({result.baseline_js:.3g}); "
            f"train longer before measuring, so that the workers differ"
        )
    chosen: list[Block] = []
    used = 0.0
    for block in helpful:
        if used + block.share <= share * (1 + 1e-9):  # forgives the rounding of summed shares
            chosen.append(block)
            used += block.share
    if not chosen:
        smallest = min(helpful, key=lambda block: block.numel)
        raise ConfigError(
            f"no block fits in {share:.3%} of the parameters; the smallest that helps, "
            f"{smallest.name!r}, has {smallest.share:.3%}"
        )
    return tuple(chosen)


def recipe_fragment(blocks: Sequence[Block]) -> str:
    """TOML for a recipe: `[method]` with `mix2_subset`, under a comment of their share."""
    share = sum(block.share for block in blocks)
    patterns = [pattern for block in blocks for pattern in block.patterns]
    comment = f"# {len(blocks)} blocks, {share:.1%} of the parameters, the most sensitive first\n"
    return comment + tomli_w.dumps({"method": {"mix2_subset": patterns}})


def _js_with_average(
    parameters: Tensor,
    mean: Tensor,
    averaged: Sequence[slice],
    kept: Sequence[slice],
    predict: Predict,
) -> float:
    """JS distance where each worker takes the mean in `averaged`, then its own in `kept`."""
    scratch = torch.empty_like(mean)
    log_probs: list[Tensor] = []
    for worker, own in enumerate(parameters):
        scratch.copy_(own)
        for piece in averaged:
            scratch[piece] = mean[piece]
        for piece in kept:
            scratch[piece] = own[piece]
        with torch.no_grad():
            log_probs.append(log_probabilities(predict(scratch)))
        if bool(log_probs[-1].isnan().any()):
            raise ConfigError(
                f"worker {worker} predicts NaN: the run that is measured has diverged"
            )
    return js_distance(log_probs)
