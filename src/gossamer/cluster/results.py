"""What a worker leaves in its folder when it has finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from gossamer.training.replica import Replica


def write_results(root: Path, summary: dict[str, Any], replica: Replica | None) -> None:
    """`summary.json`, and `final.safetensors` of a worker that has a state; each atomic."""
    root.mkdir(parents=True, exist_ok=True)
    if replica is not None:
        tensors = {
            "parameters": replica.parameters,
            "buffers": replica.buffers,
            "counters": replica.counters,
        }
        partial = root / ".final.partial"
        save_file({n: t.detach().cpu().clone() for n, t in tensors.items()}, partial)
        partial.rename(root / "final.safetensors")
    partial = root / ".summary.partial"
    partial.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    partial.rename(root / "summary.json")
