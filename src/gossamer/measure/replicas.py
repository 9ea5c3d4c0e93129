"""What a finished boundary is measured by: loss of the averaged model, and disagreement."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.collectives import mean_of
from gossamer.measure.consensus import l2_consensus
from gossamer.measure.divergence import js_distance, js_divergence_mway
from gossamer.training.engine import Engine


def average(vectors: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The averaged model: mean of parameters and float buffers, maximum of integer ones."""
    parameters, buffers, counters = zip(*vectors, strict=True)
    return mean_of(parameters), mean_of(buffers), torch.stack(counters).amax(dim=0)


def measure_replicas(
    engine: Engine,
    vectors: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    each_worker: bool,
) -> dict[str, Any]:
    """Held-out loss and metrics of the averaged model, L2 and JS disagreement of the replicas.

    Args:
        vectors: (parameters [P], buffers [B], counters [I]) of each worker.
        each_worker: also evaluate every worker's own model.
    """
    report = engine.evaluate(*average(vectors))
    fields: dict[str, Any] = {
        "eval_loss": report.loss,
        "eval_perplexity": _perplexity(engine, report.loss),
        "eval_accuracy": report.metrics.get("accuracy"),
        "eval_excess_loss": report.metrics.get("excess_loss"),
        "consensus_l2": l2_consensus(torch.stack([v[0] for v in vectors])),
        "js_distance": None,
        "js_divergence_mway": None,
    }
    if engine.predicts:
        predictions = [engine.predict(*v) for v in vectors]
        fields["js_distance"] = js_distance(predictions) if len(vectors) > 1 else 0.0
        fields["js_divergence_mway"] = js_divergence_mway(predictions)
    if each_worker:
        fields["worker_eval_losses"] = [engine.evaluate(*v).loss for v in vectors]
    return fields


def _perplexity(engine: Engine, loss: float) -> float | None:
    return math.exp(min(loss, 700.0)) if engine.unit == "tokens" else None


def sha256_of(rows: Tensor) -> str | None:
    """Of all workers' parameters [M, P], bit for bit; None without numerics."""
    if rows.is_meta:
        return None
    digest = hashlib.sha256()
    for row in rows.detach().cpu():
        digest.update(row.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
