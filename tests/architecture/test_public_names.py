"""The package's public names: all listed, all there, and none a burden before it is used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import gossamer


def test_every_public_name_leads_somewhere() -> None:
    assert sorted([*gossamer._HOMES, "__version__"]) == sorted(gossamer.__all__)
    for name, home in gossamer._HOMES.items():
        assert getattr(gossamer, name) is getattr(sys.modules[home], name)
    assert dir(gossamer) == sorted(gossamer.__all__)


def test_types_and_values_come_from_the_same_place() -> None:
    """What a type checker reads under TYPE_CHECKING is what runs."""
    imports = [
        (alias.name, node.module)
        for node in ast.walk(ast.parse(inspect.getsource(gossamer)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gossamer")
        for alias in node.names
    ]
    assert dict(imports) == gossamer._HOMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Dilocco'"):
        _ = gossamer.Dilocco


def test_help_and_usage_errors_do_not_wait_for_torch() -> None:
    code = "import sys, gossamer.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
