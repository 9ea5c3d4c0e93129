"""What the README shows works as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer.main

from gossamer.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_program_in_the_readme_runs(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    assert "torch.Size([4, " in capsys.readouterr().out


def test_the_commands_in_the_readme_exist():
    group = typer.main.get_command(app)
    lines = re.findall(r"^gossamer (\S+)(.*)$", README, flags=re.MULTILINE)
    assert len(lines) >= 7
    for name, rest in lines:
        command = group.commands[name]
        options = {option for p in getattr(command, "params", []) for option in p.opts}
        for word in shlex.split(rest.partition("#")[0].partition(";")[0]):
            if word.startswith("--") and not hasattr(command, "commands"):
                assert word in options, (name, word)


def test_the_make_targets_in_the_readme_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
