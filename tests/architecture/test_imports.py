"""Who may import whom: the layers of the package, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gossamer

PACKAGE = Path(gossamer.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

PURE = {
    "__future__",
    "abc",
    "asyncio",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "itertools",
    "math",
    "typing",
}
TRAINING_INTERFACE = {
    f"gossamer.training.{name}" for name in ("buffers", "layout", "replica", "settings", "task")
}
FOUNDATION = {"gossamer.errors", "gossamer.seeding", "gossamer.settings", "gossamer.units"}

# A layer and what it may import; a name covers everything below it.
MAY_IMPORT = {
    "methods": PURE
    | FOUNDATION
    | TRAINING_INTERFACE
    | {
        "torch",
        "pydantic",
        "gossamer.codec",
        "gossamer.comm",
        "gossamer.methods",
        "gossamer.mixing",
        "gossamer.outer",
    },
}

# A layer and what it must never import.
WORLDS_AND_ABOVE = {
    f"gossamer.{name}" for name in ("sim", "cluster", "report", "config", "cli", "commands")
}
NEVER = {
    "comm": WORLDS_AND_ABOVE | {"gossamer.methods"},
    "outer": WORLDS_AND_ABOVE | {"gossamer.methods", "gossamer.comm"},
    "mixing": WORLDS_AND_ABOVE | {"gossamer.methods", "gossamer.comm"},
    "codec": WORLDS_AND_ABOVE | {"gossamer.methods", "gossamer.comm"},
    "training": WORLDS_AND_ABOVE | {"gossamer.methods"},
    "measure": WORLDS_AND_ABOVE | {"gossamer.methods"},
    "sim": {f"gossamer.{name}" for name in ("cluster", "report", "config", "cli", "commands")},
    "cluster": {f"gossamer.{name}" for name in ("sim", "report", "cli", "commands")},
    "report": {"gossamer.cli", "gossamer.commands", "gossamer.cluster"},
}

# The wall clock and unseeded randomness: only where people look on.
CLOCKS = {"random", "secrets", "time", "datetime", "uuid"}
MAY_SEE_THE_CLOCK = {"cli.py", "commands", "report", "cluster"}


def imports_of(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, *([base] if base else [])])
            # "from gossamer import sim" imports gossamer.sim.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_below(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def module_of(path: Path) -> str:
    return ".".join(("gossamer", *path.relative_to(PACKAGE).with_suffix("").parts))


def offences(source: str, path: Path) -> list[str]:
    """What a file imports against the rules."""
    relative = path.relative_to(PACKAGE)
    layer = relative.parts[0]
    found = []
    for line, name in imports_of(ast.parse(source), module_of(path)):
        where = f"{relative}:{line} imports {name}"
        if layer in MAY_IMPORT and not is_below(name, MAY_IMPORT[layer]):
            found.append(where)
        if is_below(name, NEVER.get(layer, set())):
            found.append(where)
        if layer not in MAY_SEE_THE_CLOCK and is_below(name, CLOCKS):
            found.append(where)
        if is_below(name, {"pickle", "marshal", "shelve", "dill", "cloudpickle"}):
            found.append(where)
    return found


def test_the_import_rules_hold() -> None:
    assert [line for path in SOURCES for line in offences(path.read_text(), path)] == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("methods/new.py", "import time"),
        ("methods/new.py", "import os"),
        ("methods/new.py", "def f():\n    from gossamer.sim import clock"),
        ("methods/new.py", "from gossamer import sim"),
        ("methods/new.py", "from ..sim import clock"),
        ("methods/new.py", "from gossamer.training.engine import Engine"),
        ("methods/new.py", "import logging"),
        ("sim/new.py", "import gossamer.cluster.worker"),
        ("cluster/new.py", "from gossamer.sim.clock import VirtualLoop"),
        ("comm/new.py", "from gossamer.config import Recipe"),
        ("outer/new.py", "from gossamer.report import tables"),
        ("mixing/new.py", "from random import shuffle"),
        ("training/new.py", "import datetime"),
        ("config.py", "import time"),
        ("report/new.py", "import pickle"),
    ],
)
def test_the_import_rules_see_each_offence(place: str, source: str) -> None:
    assert len(offences(source, PACKAGE / place)) >= 1


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("methods/new.py", "from gossamer.comm.context import Context\nfrom torch import nn"),
        ("methods/new.py", "from gossamer.training.layout import ParameterLayout"),
        ("report/new.py", "import time"),
        ("sim/new.py", "from gossamer.methods.base import Method"),
    ],
)
def test_the_import_rules_allow_what_is_right(place: str, source: str) -> None:
    assert offences(source, PACKAGE / place) == []
