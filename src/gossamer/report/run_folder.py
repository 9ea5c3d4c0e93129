"""The folder of a run: what is in it, how it is made, refused, continued and read back.

config.toml         the resolved recipe
metrics.jsonl       one event a line, with `schema_version` and `kind`
summary.json        the figures of the finished run
checkpoints/        where a stopped run goes on from (of a cluster run: worker-NNN/round-NNNNNN/)
workers.safetensors the parameters of each worker at the end, [M, P]
model.safetensors   the averaged model; model.json says how to build it
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import load, save
from torch import Tensor

from gossamer.config import Recipe, dump_recipe, load_recipe
from gossamer.errors import CheckpointError, ConfigError
from gossamer.report.files import SCHEMA_VERSION, to_json, write_atomically


class RunFolder:
    """One run's files. `create` and `reopen` make it writable; reading needs neither."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: TextIO | None = None
        self._lock: FolderLock | None = None
        self._made_here = False

    @classmethod
    def create(cls, path: Path | None, recipe: Recipe) -> RunFolder:
        """A new folder holding `config.toml`; None: the next free `runs/<method>-<n>`.

        Raises `ConfigError` where `path` exists and is not an empty folder, and `OSError`, with
        nothing left in it, where the disk is full.
        """
        if path is None:
            path, made_here = claim_next(recipe.method.name), True
        else:
            made_here = claim_folder(path, resume=f"{_command(recipe)} --resume {path}")
        folder = cls(path)
        folder._lock = FolderLock(path)
        folder._made_here = made_here
        try:
            write_atomically(path / "config.toml", dump_recipe(recipe))
            folder._open_metrics()
        except OSError:
            folder.discard()
            raise
        return folder

    def reopen(self) -> Path:
        """Make a stopped run's folder writable again; returns the checkpoint to go on from.

        The metrics are cut back to what the checkpoint knows. Raises `ConfigError` where there is
        no checkpoint.
        """
        checkpoint = self.latest_checkpoint()
        if checkpoint is None:
            raise ConfigError(
                f"the run in {str(self.path)!r} has no checkpoint to go on from; start it again "
                f"in a new folder: gossamer train {self.path / 'config.toml'}"
            )
        self._lock = FolderLock(self.path)
        self._cut_metrics(int(checkpoint.name.removeprefix("round-")))
        self._open_metrics()
        return checkpoint

    def reopen_after(self, recipe: Recipe, rounds: int) -> dict[str, Any] | None:
        """Make a stopped cluster run writable again, to go on after so many rounds.

        The metrics are cut back to these. Returns the last round that they tell of.
        """
        self._lock = FolderLock(self.path)
        write_atomically(self.path / "config.toml", dump_recipe(recipe))
        self._cut_metrics(rounds)
        self._open_metrics()
        told = self.events("round")
        return told[-1] if told else None

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        found = sorted(self.checkpoints.glob("round-*/state.json"))
        return found[-1].parent if found else None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    def recipe(self) -> Recipe:
        """The resolved recipe. Raises `ConfigError` where this is no run folder."""
        self._check_is_run()
        return load_recipe(self.path / "config.toml")

    def summary(self) -> dict[str, Any]:
        """`summary.json`. Raises `ConfigError` where this is no run, or one that is not over."""
        self._check_is_run()
        if not self.is_finished:
            raise ConfigError(
                f"the run in {str(self.path)!r} has not finished (no summary.json); continue it "
                f"with: {_command(self.recipe())} --resume {self.path}"
            )
        return read_json_object(self.path / "summary.json")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, of one kind if given; a torn last line is left out."""
        path = self.path / "metrics.jsonl"
        events = _parse_lines(path.read_text(encoding="utf-8")) if path.is_file() else []
        return [event for event in events if kind is None or event["kind"] == kind]

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append an event, at once on disk as far as this process is concerned."""
        if self._metrics is None:
            raise ConfigError(f"the run folder {str(self.path)!r} is open for reading only")
        line = {"schema_version": SCHEMA_VERSION, "kind": kind, **fields}
        self._metrics.write(to_json(line) + "\n")
        self._metrics.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        content = {"schema_version": SCHEMA_VERSION, **summary}
        write_atomically(self.path / "summary.json", to_json(content, indent=2) + "\n")

    def write_parameters(
        self, recipe: Recipe, parameters: Tensor, averaged: Mapping[str, Tensor]
    ) -> None:
        """The workers' vectors [M, P], and the averaged model with how to build it."""
        workers = {"parameters": parameters.detach().contiguous().cpu()}
        write_atomically(self.path / "workers.safetensors", save(workers))
        model = {name: value.detach().clone().contiguous() for name, value in averaged.items()}
        write_atomically(self.path / "model.safetensors", save(model))
        about = {
            "schema_version": SCHEMA_VERSION,
            "task": recipe.task.name,
            "model": recipe.task.architecture,
            "sequence_length": recipe.train.sequence_length,
        }
        write_atomically(self.path / "model.json", to_json(about, indent=2) + "\n")

    def averaged_model(self) -> dict[str, Tensor]:
        """The averaged model's tensors by name."""
        return self._tensors("model.safetensors")

    def worker_parameters(self) -> Tensor:
        """The workers' parameters at the end of the run, [M, P]."""
        return self._tensors("workers.safetensors")["parameters"]

    def close(self) -> None:
        """Close the metrics; the folder can still be read."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove a folder that `create` has made for a run which was then refused."""
        self.close()
        for name in ("metrics.jsonl", "config.toml"):
            (self.path / name).unlink(missing_ok=True)
        if self._made_here and not any(self.path.iterdir()):
            self.path.rmdir()

    def _check_is_run(self) -> None:
        if not self.path.is_dir():
            raise ConfigError(f"no folder {str(self.path)!r}; give the folder of a run")
        if (self.path / "methods.json").is_file():
            runs = sorted(p.parent.name for p in self.path.glob("*/config.toml"))
            raise ConfigError(
                f"{str(self.path)!r} is a comparison; give one of its runs in it: {', '.join(runs)}"
            )
        if not (self.path / "config.toml").is_file():
            raise ConfigError(f"{str(self.path)!r} is not a run: it has no config.toml")

    def _tensors(self, name: str) -> dict[str, Tensor]:
        path = self.path / name
        if not path.is_file():
            self.summary()  # says so where the run has not finished
            raise ConfigError(
                f'the run in {str(self.path)!r} has no {name}: with numerics = "none" nothing was '
                f"trained"
            )
        return load(path.read_bytes())

    def _open_metrics(self) -> None:
        self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")

    def _cut_metrics(self, rounds: int) -> None:
        """Drop what was told after the checkpoint of `rounds`; those rounds are done again."""
        events = self.events()
        for index, event in enumerate(events):
            if event["kind"] == "checkpoint" and event.get("round") == rounds:
                events = events[: index + 1]
                break
        # The line of a checkpoint is missing where the run was killed before it was written.
        kept = [event for event in events if event.get("round", 0) <= rounds]
        lines = "".join(to_json(event) + "\n" for event in kept)
        write_atomically(self.path / "metrics.jsonl", lines)


def _command(recipe: Recipe) -> str:
    """What carries a recipe out."""
    return "gossamer train" if recipe.run.world == "sim" else "gossamer launch"


class FolderLock:
    """Keeps a second process from writing to a folder, for as long as this one lives.

    Raises `ConfigError` where another process has it. File systems without locks go unguarded.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"another process is writing to the run in {str(path)!r}; wait until it has ended, "
                f"or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                self.release()
                raise

    def release(self) -> None:
        os.close(self._descriptor)


def claim_folder(path: Path, *, resume: str) -> bool:
    """Make `path`; True where it did not exist. Raises `ConfigError` where something is in it."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {str(path)!r} is a file; give a folder")
    if path.is_dir():
        if any(path.iterdir()):
            raise ConfigError(
                f"{str(path)!r} is not empty and is not overwritten; choose another --out, or "
                f"continue what is in it with: {resume}"
            )
        return False
    try:
        make_folder(path, exist_ok=False)
    except FileExistsError:
        raise ConfigError(
            f"{str(path)!r} was made by another run just now; choose another"
        ) from None
    return True


def claim_next(stem: str, parent: Path = Path("runs")) -> Path:
    """Make `runs/<stem>-<n>`, n being the smallest number above all that are there."""
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    while True:
        names = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        taken = [int(match.group(1)) for name in names if (match := pattern.fullmatch(name))]
        path = parent / f"{stem}-{max(taken, default=0) + 1}"
        try:
            make_folder(path, exist_ok=False)
        except FileExistsError:
            continue  # another process took the number a moment ago
        return path


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make `path` with its parents; `ConfigError` where that cannot be.

    Raises `FileExistsError` where it is there already and `exist_ok` is false.
    """
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(f"cannot make the folder {str(path)!r}: {error.strerror}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file that Gossamer has written. Raises `CheckpointError` if damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} is damaged: an object is expected")
    return content


def _parse_lines(text: str) -> list[dict[str, Any]]:
    whole, _, _torn = text.rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]
