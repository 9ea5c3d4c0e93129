"""One process's checkpoints on its own disk: atomic, and rotated.

`round-000012/worker.safetensors` and `state.json`; the folder appears under its name only when both
are complete. A run resumes from the newest round that all workers have, whatever their number. A
syncer has its own: what it has merged, in `merge-000012`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.cluster.tensor_file import read_tensors, write_tensors
from gossamer.comm.context import MethodState
from gossamer.comm.state import state_scalars, state_tensors, with_tensors
from gossamer.errors import CheckpointError
from gossamer.training.replica import Replica

KEPT_MERGES = 2
KEPT = 3  # workers may be a round or two apart, and resume from one that all have


class WorkerCheckpoints:
    """The checkpoints of one worker.

    Args:
        root: folder of this worker.
        run_id: of the run that they belong to.
    """

    def __init__(self, root: Path, run_id: str | None = None) -> None:
        self.root, self.run_id = root, run_id

    def rounds(self) -> tuple[int, ...]:
        """Completed rounds of each checkpoint that is there, ascending."""
        found = sorted(self.root.glob("round-*/state.json"))
        return tuple(int(path.parent.name.removeprefix("round-")) for path in found)

    def saved_run_id(self) -> str | None:
        """The run that the newest checkpoint belongs to."""
        rounds = self.rounds()
        if not rounds:
            return None
        saved = self._document(rounds[-1])["run_id"]
        return saved if isinstance(saved, str) else None

    def _folder(self, round_index: int) -> Path:
        return self.root / f"round-{round_index:06d}"

    def save(self, replica: Replica, state: MethodState) -> Path:
        """Write the boundary before round `state.rounds_completed`.

        Raises `OSError` where the disk is full or may not be written to; what was there stays, and
        nothing half-written does.
        """
        tensors: dict[str, Tensor] = {
            "parameters": replica.parameters,
            "buffers": replica.buffers,
            "counters": replica.counters,
            **{f"state.{name}": tensor for name, tensor in state_tensors(state).items()},
        }
        if replica.optimizer is not None:
            own = replica.optimizer.state_tensors()
            tensors |= {f"moments.{name}": tensor for name, tensor in own.items()}
        document = {
            "schema_version": 1,
            "run_id": self.run_id,
            "state": state_scalars(state),
            "steps_completed": replica.steps_completed,
            "samples_completed": replica.samples_completed,
            "learning_rate": replica.learning_rate,
        }
        folder = self._folder(state.rounds_completed)
        _write(folder, "worker.safetensors", tensors, document)
        for old in self.rounds()[:-KEPT]:
            shutil.rmtree(self._folder(old))
        return folder

    def _document(self, round_index: int) -> dict[str, Any]:
        return _read_document(self._folder(round_index) / "state.json")

    def load(self, round_index: int, replica: Replica, blank: MethodState) -> MethodState:
        """Put the replica back as it was, and the method's state, whose tensors are `blank`'s.

        Checkpoints of later rounds go: the run goes on from this one.

        Raises `CheckpointError` where files are damaged or of another model.
        """
        document = self._document(round_index)
        path = self._folder(round_index) / "worker.safetensors"
        places = {
            "parameters": replica.parameters,
            "buffers": replica.buffers,
            "counters": replica.counters,
            **{f"state.{name}": tensor for name, tensor in state_tensors(blank).items()},
        }
        others = _read_into(path, places)
        replica.steps_completed = document["steps_completed"]
        replica.samples_completed = document["samples_completed"]
        replica.learning_rate = document["learning_rate"]
        if replica.optimizer is not None:
            replica.optimizer.load_state_tensors(_below("moments.", others), copy=False)
        for later in [r for r in self.rounds() if r > round_index]:
            shutil.rmtree(self._folder(later))  # rounds that the run does anew
        tensors = state_tensors(blank) | _below("state.", others)
        return with_tensors(type(blank), tensors, document["state"])

    def load_moments(self, replica: Replica) -> None:
        """Only the inner moments of the newest checkpoint, for a joiner that keeps its own."""
        rounds = self.rounds()
        if rounds and replica.optimizer is not None:
            path = self._folder(rounds[-1]) / "worker.safetensors"
            moments = {n: t for n, t in read_tensors(path) if n.startswith("moments.")}
            replica.optimizer.load_state_tensors(_below("moments.", moments), copy=False)


class SyncerCheckpoints:
    """What one syncer has merged, as it was after each of its newest merges.

    Args:
        root: folder of this syncer.
        run_id: of the run that they belong to.
    """

    def __init__(self, root: Path, run_id: str | None = None) -> None:
        self.root, self.run_id = root, run_id

    def numbers(self) -> tuple[int, ...]:
        """Those that are there, ascending."""
        found = self.root.glob("merge-*/state.json")
        return tuple(sorted(int(path.parent.name.removeprefix("merge-")) for path in found))

    def saved_run_id(self) -> str | None:
        """The run that the newest checkpoint belongs to."""
        numbers = self.numbers()
        if not numbers:
            return None
        saved = _read_document(self._folder(numbers[-1]) / "state.json")["run_id"]
        return saved if isinstance(saved, str) else None

    def _folder(self, number: int) -> Path:
        return self.root / f"merge-{number:09d}"

    def save(self, state: MethodState) -> int:
        """Write the state, and return its number. On disk when this returns.

        Raises `OSError` where the disk is full or may not be written to; what was there stays.
        """
        number = max(self.numbers(), default=-1) + 1
        document = {"schema_version": 1, "run_id": self.run_id, "state": state_scalars(state)}
        _write(self._folder(number), "syncer.safetensors", state_tensors(state), document)
        for old in self.numbers()[:-KEPT_MERGES]:
            shutil.rmtree(self._folder(old))
        return number

    def load(self, blank: MethodState) -> MethodState:
        """The newest state, whose tensors are `blank`'s.

        Raises `CheckpointError` where files are missing, damaged or of another model.
        """
        numbers = self.numbers()
        if not numbers:
            raise CheckpointError(f"{self.root} holds no checkpoint of a syncer")
        folder = self._folder(numbers[-1])
        path, tensors = folder / "syncer.safetensors", state_tensors(blank)
        if others := _read_into(path, dict(tensors)):
            raise CheckpointError(f"{path} is of another method: it has {', '.join(others)}")
        document = _read_document(folder / "state.json")
        return with_tensors(type(blank), tensors, document["state"])

    def forget(self) -> None:
        """Remove all of them: the run begins anew."""
        for number in self.numbers():
            shutil.rmtree(self._folder(number))


def _write(folder: Path, name: str, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
    """A folder with tensors and `state.json`, which is there whole or not at all.

    Raises `OSError` where the disk is full or may not be written to.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write_tensors(aside / name, tensors)
        (aside / "state.json").write_text(json.dumps(document), encoding="utf-8")
        _to_disk(aside / "state.json")
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"cannot write checkpoint {folder}: {error}") from None
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _to_disk(folder.parent)


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("schema_version") != 1:
        raise CheckpointError(f"{path} is of another version")
    return document


def _read_into(path: Path, places: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read each tensor to its place, as they are as large as it is; returns the others.

    Raises `CheckpointError` where files are damaged or of another model.
    """
    others: dict[str, Tensor] = {}
    for name, tensor in read_tensors(path):
        place = places.pop(name, None)
        if place is None:
            others[name] = tensor
        elif place.shape != tensor.shape or place.dtype != tensor.dtype:
            raise CheckpointError(f"{path} is of another model")
        else:
            place.copy_(tensor)
    if places:
        raise CheckpointError(f"{path} has no {', '.join(places)}")
    return others


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _below(prefix: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
