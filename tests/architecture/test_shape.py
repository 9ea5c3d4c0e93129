"""Sizes, broad handlers and docstrings, read from the sources.

The lists of exceptions are ratchets: an entry that is no longer needed fails the test, so they can
only become shorter.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import gossamer
from gossamer import methods
from gossamer.methods import METHODS

PACKAGE = Path(gossamer.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
METHOD_FILE_LINES_MAX = 300

# "file.py:function": why it may be longer.
LONG_FUNCTIONS: dict[str, str] = {}
# "file.py": why it may be longer.
LONG_FILES: dict[str, str] = {
    "methods/decoupled_diloco.py": "it has two loops, a learner's and a syncer's",
}
# "file.py:function": why it may catch everything.
BROAD_HANDLERS: dict[str, str] = {}

SECTIONS = ("Source", "Update", "Symbols", "Departures", "Reduces to", "Cost", "Fails")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: Function) -> int:
    """Lines of a function with its signature and without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def is_broad(handler: ast.ExceptHandler) -> bool:
    """`except:`, `except Exception`, `except BaseException`, alone or in a tuple.

    One that ends in a bare `raise` swallows nothing.
    """
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [c.id if isinstance(c, ast.Name) else None for c in caught]
    return handler.type is None or "Exception" in names or "BaseException" in names


def long_functions(source: str, name: str) -> list[str]:
    tree = ast.parse(source)
    return [f"{name}:{f.name}" for f in functions(tree) if code_lines(f) > FUNCTION_LINES_MAX]


def broad_handlers(source: str, name: str) -> list[str]:
    """The innermost function of each broad handler."""
    found: list[str] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ExceptHandler) and is_broad(node):
            found.append(f"{name}:{function}")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "<module>")
    return found


def file_is_long(source: str, name: str) -> bool:
    limit = METHOD_FILE_LINES_MAX if name.startswith("methods/") else FILE_LINES_MAX
    return len(source.splitlines()) > limit


def each_source() -> Iterator[tuple[str, str]]:
    return ((p.read_text(), p.relative_to(PACKAGE).as_posix()) for p in SOURCES)


def test_functions_fit_a_screen() -> None:
    found = [hit for source, name in each_source() for hit in long_functions(source, name)]
    assert sorted(found) == sorted(LONG_FUNCTIONS)


def test_files_are_short() -> None:
    found = [name for source, name in each_source() if file_is_long(source, name)]
    assert sorted(found) == sorted(LONG_FILES)


def test_nothing_catches_everything() -> None:
    found = [hit for source, name in each_source() for hit in broad_handlers(source, name)]
    assert sorted(found) == sorted(BROAD_HANDLERS)


def test_a_long_function_is_seen() -> None:
    def source(lines: int) -> str:
        doc = '    """One.\n\n    Two.\n    """\n'
        return "async def f():\n" + doc + "    x = 1\n" * (lines - 1)

    assert long_functions(source(FUNCTION_LINES_MAX), "a.py") == []
    assert long_functions(source(FUNCTION_LINES_MAX + 1), "a.py") == ["a.py:f"]


@pytest.mark.parametrize(
    "caught", ["", " Exception", " BaseException as e", " (OSError, Exception)"]
)
def test_a_broad_handler_is_seen(caught: str) -> None:
    source = f"def f():\n    try:\n        pass\n    except{caught}:\n        pass\n"
    assert broad_handlers(source, "a.py") == ["a.py:f"]


@pytest.mark.parametrize(
    "handler", ["except (OSError, ValueError):\n    pass", "except BaseException:\n    raise"]
)
def test_a_handler_that_swallows_no_surprise_is_allowed(handler: str) -> None:
    assert broad_handlers(f"try:\n    pass\n{handler}\n", "a.py") == []


def method_modules() -> list[str]:
    """The files of methods: all of the package but the base."""
    return [m.name for m in pkgutil.iter_modules(methods.__path__) if m.name != "base"]


@pytest.mark.parametrize("name", method_modules())
def test_a_method_file_says_all_that_it_must(name: str) -> None:
    module = importlib.import_module(f"gossamer.methods.{name}")
    starts = [line for line in (module.__doc__ or "").splitlines() if line[:1].strip()]
    for section in SECTIONS:
        assert any(line.startswith(section) for line in starts), f"{name}: no section {section!r}"
    assert any(m.__module__ == module.__name__ for m in METHODS.values()), f"{name}: no row"


def test_methods_are_registered_under_their_own_names() -> None:
    assert {name: kind.name for name, kind in METHODS.items()} == {n: n for n in METHODS}


def test_no_public_function_takes_anything() -> None:
    """`**kwargs` swallows what is misspelt; only settings and passing on a call may have it."""
    found = []
    for source, name in each_source():
        for function in functions(ast.parse(source)):
            if function.args.kwarg is not None and not function.name.startswith("_"):
                found.append(f"{name}:{function.name}")
    assert found == []


def test_every_public_object_has_a_docstring() -> None:
    missing = []
    for source, name in each_source():
        tree = ast.parse(source)
        for node in ast.iter_child_nodes(tree):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and ast.get_docstring(node) is None
            ):
                missing.append(f"{name}:{node.name}")
    assert missing == []


def test_modules_have_docstrings() -> None:
    sources = [s for s in each_source() if s[0].strip()]
    assert [name for source, name in sources if ast.get_docstring(ast.parse(source)) is None] == []
    assert inspect.getdoc(methods)
