"""The averaged model of a cluster run, from the files that its workers leave."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.cluster.job import Job
from gossamer.errors import CheckpointError, ConfigError
from gossamer.measure.replicas import average

Vectors = tuple[Tensor, Tensor, Tensor]  # parameters [P], buffers [B], counters [I]


@runtime_checkable
class SavesPretrained(Protocol):
    """A model of Hugging Face's kind."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write weights and configuration into a folder."""


def worker_folder(run: Path, worker: int) -> Path:
    """Where a worker keeps its files."""
    return run / f"worker-{worker:03d}"


def read_vectors(path: Path) -> Vectors:
    """A worker's parameters, buffers and counters. Raises `CheckpointError`."""
    try:
        tensors = load_file(path)
        return tensors["parameters"], tensors["buffers"], tensors["counters"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def export_averaged(run: Path, job: Job, out: Path) -> Path:
    """Average what the workers of a finished run hold, and write it as one model.

    Args:
        run: the folder with each worker's `worker-NNN/final.safetensors`, those of other machines
            copied to it.
        job: of the run; its task builds the model.
        out: a folder, new or empty. A model with `save_pretrained` writes itself there; of any
            other the state dict becomes `model.safetensors`.

    Returns `out`. Raises `ConfigError` where there is nothing to average or `out` holds files,
    and `CheckpointError` where a file is damaged or of another model.
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
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(engine.model, SavesPretrained):
        engine.model.load_state_dict(state)
        engine.model.save_pretrained(str(out))
    else:
        save_file({n: t.contiguous() for n, t in state.items()}, out / "model.safetensors")
    return out
