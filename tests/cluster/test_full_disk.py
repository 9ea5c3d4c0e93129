"""A disk that is full: what was there stays, nothing half-written does, and the error says it.

The operating system refuses to make a file larger than a limit, so writes fail in their midst as
they do on a full disk, without one.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Cluster
from safetensors.torch import load_file
from torch import Tensor, nn

from gossamer.cluster.checkpoint import WorkerCheckpoints
from gossamer.cluster.export import export_averaged
from gossamer.cluster.job import Job
from gossamer.cluster.results import write_results
from gossamer.cluster.tensor_file import read_tensors, write_tensors
from gossamer.errors import CheckpointError
from gossamer.methods import build_method
from gossamer.methods.base import MethodState
from gossamer.training.engine import Engine
from gossamer.training.problems import TinyMLP
from gossamer.training.replica import Replica
from gossamer.training.settings import Training


@contextmanager
def no_room_beyond(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def job_of(task: TinyMLP) -> Job:
    return Job(build_method("diloco", {"inner_steps": 2}), task, Training(workers=1, rounds=4))


def trained(job: Job) -> tuple[Engine, Replica, MethodState]:
    engine = job.build_engine()
    _, (replica,) = engine.new_replicas(1)
    engine.train(replica, 2)
    return engine, replica, job.method.init(replica)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_checkpoint_that_does_not_fit_leaves_the_older_ones(tmp_path: Path) -> None:
    job = job_of(TinyMLP(num_hidden=500))
    engine, replica, state = trained(job)
    checkpoints = WorkerCheckpoints(tmp_path, run_id="1" * 32)
    state.rounds_completed = 1
    checkpoints.save(replica, state)
    saved, files = replica.parameters.clone(), names(tmp_path)
    for room in (0, 100, 10_000):
        engine.train(replica, 1)
        state.rounds_completed += 1
        with no_room_beyond(room), pytest.raises(OSError, match=r"cannot write checkpoint .*round"):
            checkpoints.save(replica, state)
        assert names(tmp_path) == files
    assert checkpoints.rounds() == (1,)
    back = checkpoints.load(1, replica, job.method.init(replica))
    assert back.rounds_completed == 1 and torch.equal(replica.parameters, saved)
    state.rounds_completed = 5
    checkpoints.save(replica, state)
    assert checkpoints.rounds() == (1, 5)


def test_results_that_do_not_fit_leave_what_was_there(tmp_path: Path) -> None:
    _, replica, _ = trained(job_of(TinyMLP(num_hidden=500)))
    write_results(tmp_path, {"round": 1}, replica)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with no_room_beyond(1000), pytest.raises(OSError, match=r"cannot write .*final.safetensors"):
        write_results(tmp_path, {"round": 2}, replica)
    with no_room_beyond(5), pytest.raises(OSError, match=r"cannot write .*summary.json"):
        write_results(tmp_path, {"round": 2}, None)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Pretrained(nn.Sequential):
    """A model of Hugging Face's kind, of two files."""

    def save_pretrained(self, save_directory: str) -> None:
        folder = Path(save_directory)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        write_tensors(folder / "model.safetensors", self.state_dict())


class PretrainedMLP(TinyMLP):
    def build(self) -> nn.Module:
        return Pretrained(*super().build().children())


@pytest.mark.parametrize("task", [TinyMLP(num_hidden=500), PretrainedMLP(num_hidden=500)])
def test_an_export_that_does_not_fit_leaves_nothing(tmp_path: Path, task: TinyMLP) -> None:
    job = job_of(task)
    _, replica, _ = trained(job)
    write_results(tmp_path / "worker-000", {}, replica)
    before = names(tmp_path)
    with no_room_beyond(2000), pytest.raises(OSError, match=r"cannot write .*model"):
        export_averaged(tmp_path, job, tmp_path / "model")
    assert names(tmp_path) == before
    out = export_averaged(tmp_path, job, tmp_path / "model")
    assert "model.safetensors" in names(out)


def test_a_worker_whose_disk_is_full_says_so_and_the_others_go_on(
    cluster: Callable[..., Cluster],
) -> None:
    options: dict[str, Any] = {
        "method": "diloco", "hyperparameters": {"inner_steps": 2}, "rounds": 6, "workers": 3,
        "saves": True, "step_time_s": 0.02, "deadline_s": 20.0,
    }  # fmt: skip
    run = cluster(**options)
    for worker in range(3):
        run.start(worker, **({"largest_file_bytes": 500} if worker == 1 else {}))
    error = run.workers[1].wait("error")
    assert error["type"] == "OSError" and "cannot write checkpoint" in error["message"]
    lost = run.coordinator.wait("lost", worker=1)
    assert lost["cause"] == "error" and "cannot write checkpoint" in lost["reason"]
    ends = run.finish(0, 2)
    assert all(end["summary"]["rounds_completed"] == 6 for end in ends.values())
    assert not list((run.folder / "worker-001").glob("*"))


DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float32)


def test_tensor_files_are_of_the_safetensors_format(tmp_path: Path) -> None:
    """Whatever the library reads is what was written, in every bit, odd sizes included."""
    values = torch.arange(-9, 9).float().reshape(3, 6)
    tensors: dict[str, Tensor] = {str(dtype): values.to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0), "scalar": torch.tensor(2.5), "odd": torch.ones(3).bool()}
    tensors |= {"strided": values.t(), "a ü": values[1]}
    path = tmp_path / "file.safetensors"
    write_tensors(path, tensors)
    for read in (load_file(path), dict(read_tensors(path))):
        assert sorted(read) == sorted(tensors)
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(read_tensors(path))
