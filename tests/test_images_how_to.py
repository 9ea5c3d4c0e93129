"""What the how-to about images shows works as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from gossamer.config import build_recipe, load_recipe

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "how-to" / "images.md").read_text(encoding="utf-8")


def test_the_program_learns(capsys) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(program, "images.md", "exec"), {})
    assert float(capsys.readouterr().out) > 0.9


def test_the_section_is_understood() -> None:
    (section,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    tables = {**tomllib.loads(section), "method": {"name": "local_sgd"}}
    assert build_recipe(tables, base=ROOT).task.name == "images"


def test_the_recipe_is_there() -> None:
    (name,) = set(re.findall(r"recipes/\w+\.toml", PAGE))
    assert load_recipe(ROOT / name).task.name == "images"
