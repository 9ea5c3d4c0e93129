"""The averaged model of a cluster run, from the files that its workers leave."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from torch import Tensor, nn

from gossamer.cluster.job import Job
from gossamer.cluster.tensor_file import read_tensors, write_tensors
from gossamer.errors import CheckpointError, ConfigError
from gossamer.measure.replicas import average

Vectors = tuple[Tensor, Tensor, Tensor]  # parameters [P], buffers [B], counters [I]
VECTORS = ("parameters", "buffers", "counters")


@runtime_checkable
class SavesPretrained(Protocol):
    """A model of Hugging Face's kind."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write weights and configuration into a folder."""


def worker_folder(run: Path, worker: int) -> Path:
    """Where a worker keeps its files."""
    return run / f"worker-{worker:03d}"


def syncer_folder(run: Path, index: int) -> Path:
    """Where a syncer (counted from 0) keeps its files."""
    return run / f"syncer-{index:03d}"


def read_vectors(path: Path) -> Vectors:
    """A worker's parameters, buffers and counters. Raises `CheckpointError`."""
    tensors = {name: t for name, t in read_tensors(path) if name in VECTORS}
    if len(tensors) < len(VECTORS):
        raise CheckpointError(f"{path} has no {', '.join(n for n in VECTORS if n not in tensors)}")
    return tensors["parameters"], tensors["buffers"], tensors["counters"]


def export_averaged(run: Path, job: Job, out: Path) -> Path:
    """Average what the workers of a finished run hold, and write it as one model.

    Args:
        run: the folder with each worker's `worker-NNN/final.safetensors`, those of other machines
            copied to it.
        job: of the run; its task builds the model.
        out: a folder, new or empty. A model with `save_pretrained` writes itself there; of any
            other the state dict becomes `model.safetensors`.

    Returns `out`. Raises `ConfigError` where there is nothing to average or `out` holds files,
    `CheckpointError` where a file is damaged or of another model, and `OSError` where the disk is
    full or may not be written to; nothing half-written stays.
    """
    files = sorted(run.glob("worker-*/final.safetensors"))
    if not files:
        raise ConfigError(f"{run} has no worker-NNN/final.safetensors: did the run finish there?")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder; nothing is overwritten")
    engine = job.build_engine()
    vectors = [read_vectors(path) for path in files]
    for path, (parameters, _, _) in zip(files, vectors, strict=True):
        if parameters.numel() != engine.layout.numel:
            raise CheckpointError(
                f"{path} has {parameters.numel()} parameters, and the task's model "
                f"{engine.layout.numel}"
            )
    state = engine.state_dict(*average(vectors))
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write_model(aside, engine.model, state)
        aside.replace(out)
    except (OSError, SafetensorError) as error:  # the second: a full disk, as the library says it
        raise OSError(f"cannot write {out}: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _write_model(folder: Path, model: nn.Module, state: dict[str, Tensor]) -> None:
    if isinstance(model, SavesPretrained):
        model.load_state_dict(state)
        model.save_pretrained(str(folder))
    else:
        write_tensors(folder / "model.safetensors", state)
