"""`gossamer methods` and `gossamer doctor`: what there is, and whether it can run here."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from pydantic_core import to_jsonable_python

from gossamer.commands.options import JsonOption, print_json
from gossamer.errors import GossamerError

SHAKESPEARE_SHA256 = "78a72a12249abd2727f764acfa223b759135f8143c58692e80180d719114d5b8"


def methods(json: JsonOption = False) -> None:
    """List the methods, the papers' presets, and every hyperparameter with its default.

    Examples:

        gossamer methods

        gossamer methods --json
    """
    from gossamer.methods import METHODS, PRESETS
    from gossamer.report.tables import stdout_console

    described = {name: _describe(kind) for name, kind in METHODS.items()}
    presets = {name: {"method": base, **settings} for name, (base, settings) in PRESETS.items()}
    if json:
        print_json({"methods": described, "presets": presets})
        return
    console = stdout_console()
    for name, about in described.items():
        console.print(f"{name}: {about['summary']}")
        for field in about["hyperparameters"]:
            default = "" if field["default"] is None else f" [{field['default']}]"
            console.print(f"    {field['name']}{default}  {field['meaning']}", soft_wrap=True)
        console.print()
    console.print("Presets (use them as a name):")
    for name, settings in presets.items():
        written = ", ".join(f"{k} = {v}" for k, v in settings.items() if k != "method")
        console.print(f"    {name}: {settings['method']} with {written}", soft_wrap=True)


def doctor(json: JsonOption = False) -> None:
    """Check that Gossamer can run here: versions, memory, data, disk, and a tiny simulation.

    Exits with 3 where something is wrong.

    Examples:

        gossamer doctor

        gossamer doctor --json
    """
    from gossamer.report.tables import fields_table, stdout_console

    facts = _facts()
    checks = {
        "shipped text": _checked(_check_data),
        "shipped images": _checked(_check_images),
        "write permission": _checked(_check_writing),
        "disk space": _checked(_check_disk),
        "self-test": _checked(_check_simulation),
    }
    healthy = all(check["ok"] for check in checks.values())
    if json:
        print_json({"healthy": healthy, "facts": facts, "checks": checks})
    else:
        console = stdout_console()
        console.print(fields_table("this machine", {k: str(v) for k, v in facts.items()}))
        lines = {k: f"{'ok' if c['ok'] else 'WRONG'}: {c['detail']}" for k, c in checks.items()}
        console.print(fields_table("checks", lines))
    if not healthy:
        raise typer.Exit(3)


def _describe(kind: Any) -> dict[str, Any]:
    module_doc = sys.modules[kind.__module__].__doc__ or ""
    fields = []
    for name, field in kind.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        shown = to_jsonable_python(default)  # some defaults are settings of their own
        fields.append({"name": name, "default": shown, "meaning": field.description or ""})
    return {"summary": module_doc.strip().split("\n")[0], "hyperparameters": fields}


def _facts() -> dict[str, Any]:
    import torch

    return {
        "gossamer": _version_of("gossamer"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "memory": _memory(),
        "matplotlib (pictures)": _version_of("matplotlib"),
        "Fashion-MNIST": _fashion_mnist(),
    }


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    from gossamer.units import format_bytes

    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown"
    return format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _checked(check: Callable[[], str]) -> dict[str, Any]:
    """What a check says, or why it fails."""
    try:
        return {"ok": True, "detail": check()}
    except (GossamerError, OSError) as error:
        return {"ok": False, "detail": str(error)}


def _check_data() -> str:
    from importlib import resources

    content = (resources.files("gossamer") / "data" / "shakespeare.txt.xz").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise OSError(f"the shipped text is damaged (sha256 {digest[:12]}...); install again")
    return f"{len(content)} bytes, checksum right"


def _check_images() -> str:
    from gossamer.training.image_files import find_images

    train, test = find_images("digits").load()
    return f"digits: {len(train.labels)} to train on, {len(test.labels)} held out"


def _fashion_mnist() -> str:
    from gossamer.training.image_files import FASHION_MNIST_DIR

    return str(FASHION_MNIST_DIR) if FASHION_MNIST_DIR.is_dir() else "not installed (make data)"


def _check_writing() -> str:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".gossamer-doctor-") as folder:
        (Path(folder) / "probe").write_text("probe", encoding="utf-8")
    return f"{Path.cwd()} can be written to"


def _check_disk() -> str:
    from gossamer.units import format_bytes

    free = shutil.disk_usage(Path.cwd()).free
    if free < 1e9:
        raise OSError(
            f"{format_bytes(free)} free in {Path.cwd()}; a run with checkpoints needs 1 GB"
        )
    return f"{format_bytes(free)} free"


def _check_simulation() -> str:
    from gossamer.config import build_recipe, prepare
    from gossamer.sim.simulate import simulate

    tables = {
        "task": {"model": "llama-tiny", "eval_sequences": 4, "probe_sequences": 1},
        "train": {"workers": 2, "rounds": 2, "batch_size": 1, "sequence_length": 16},
        "method": {"name": "diloco", "inner_steps": 2},
    }
    prepared = prepare(build_recipe(tables, base=Path.cwd()))
    begun = time.perf_counter()
    result = simulate(
        method=prepared.recipe.method,
        task=prepared.task,
        workers=2,
        rounds=2,
        training=prepared.recipe.train,
    )
    took = time.perf_counter() - begun
    return f"2 workers, 2 rounds in {took:.1f} s; loss {result.summary['eval_loss']:.3f}"
