"""A comparison's folder: one run folder a label, and `comparison.json` over them.

config.toml        the recipe that they have in common
methods.json       labels in order, each with its folder and how it was written
<label>/           a run folder
comparison.json    {"schema_version", "rows": [summary + "label", ...]}, once all are done
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.config import Recipe, dump_recipe, load_recipe
from gossamer.errors import ConfigError
from gossamer.report.files import SCHEMA_VERSION, to_json, write_atomically
from gossamer.report.run_folder import RunFolder, claim_folder, claim_next, read_json_object


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a comparison."""

    label: str
    folder: str
    written: str  # NAME[:key=value,...]


def entries_of(written: Sequence[str]) -> list[Entry]:
    """Labels and folders for methods as they were written; repeated ones get a number."""
    labels: list[str] = []
    folders: list[str] = []
    for text in written:
        labels.append(_unique(text, labels))
        folders.append(_unique(re.sub(r"[^A-Za-z0-9_.+=-]+", "-", text).strip("-."), folders))
    return [
        Entry(label, folder, text)
        for label, folder, text in zip(labels, folders, written, strict=True)
    ]


class Comparison:
    """Runs of one recipe with several methods, in one folder."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path, self.entries = path, list(entries)

    @classmethod
    def create(
        cls, path: Path | None, recipe: Recipe, entries: Sequence[Entry], *, stem: str = "compare"
    ) -> Comparison:
        """A new folder; None: the next free `runs/<stem>-<n>`."""
        if path is None:
            path = claim_next(stem)
        else:
            claim_folder(path, resume=f"gossamer compare --resume {path}")
        write_atomically(path / "config.toml", dump_recipe(recipe))
        methods = [{"label": e.label, "folder": e.folder, "written": e.written} for e in entries]
        content = {"schema_version": SCHEMA_VERSION, "methods": methods}
        write_atomically(path / "methods.json", to_json(content, indent=2) + "\n")
        return cls(path, entries)

    @classmethod
    def reopen(cls, path: Path) -> Comparison:
        """Read back what `create` has written. Raises `ConfigError` where it is none."""
        if not is_comparison(path):
            raise ConfigError(f"{str(path)!r} is not a comparison: it has no methods.json")
        methods = read_json_object(path / "methods.json")["methods"]
        entries = [Entry(m["label"], m["folder"], m["written"]) for m in methods]
        return cls(path, entries)

    def recipe(self) -> Recipe:
        """What the runs have in common."""
        return load_recipe(self.path / "config.toml")

    def folder_of(self, entry: Entry) -> RunFolder:
        """The run folder of one entry, which need not exist yet."""
        return RunFolder(self.path / entry.folder)

    def rows(self) -> list[dict[str, Any]]:
        """The summaries with their labels. Raises `ConfigError` where a run has not finished."""
        unfinished = [e.label for e in self.entries if not self.folder_of(e).is_finished]
        if unfinished:
            raise ConfigError(
                f"the comparison in {str(self.path)!r} has not finished ({unfinished[0]} is "
                f"missing); continue it with: gossamer compare --resume {self.path}"
            )
        return [{"label": e.label, **self.folder_of(e).summary()} for e in self.entries]

    def discard(self) -> None:
        """Remove what `create` has made, unless a run is in it."""
        if any(self.folder_of(entry).path.exists() for entry in self.entries):
            return
        for name in ("methods.json", "config.toml"):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()

    def write(self) -> dict[str, Any]:
        """Write `comparison.json` and return its content."""
        content = {"schema_version": SCHEMA_VERSION, "rows": self.rows()}
        write_atomically(self.path / "comparison.json", to_json(content, indent=2) + "\n")
        return content


def is_comparison(path: Path) -> bool:
    """Whether the folder is one that `Comparison.create` has made."""
    return (path / "methods.json").is_file()


def _unique(name: str, taken: Sequence[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return candidate
