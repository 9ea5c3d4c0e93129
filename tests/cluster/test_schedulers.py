"""The examples for schedulers are at least well-formed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"the how-to has an example in {language}"
    return found


def test_shell_scripts_parse() -> None:
    for script in examples("bash"):
        check = subprocess.run(
            ["bash", "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert check.returncode == 0, check.stderr


def test_manifests_parse() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which nothing else here does")
    for manifest in examples("yaml"):
        job = yaml.safe_load(manifest)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
        (command,) = container["args"]
        assert command.startswith("exec gossamer worker") and "$JOB_COMPLETION_INDEX" in command
