"""What a worker holds besides its tensors: nothing for long, and one tensor more at a time."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Cluster

from gossamer.cluster.process_memory import return_freed_memory
from gossamer.cluster.tensor_file import Aside

PROGRAM = """
import json, sys
import numpy as np
from pathlib import Path
from gossamer.cluster.process_memory import return_freed_memory

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

done = return_freed_memory() if sys.argv[1] == "yes" else None
before = rss()
for _ in range(3):
    blocks, pins = [], []
    for _ in range(50):
        blocks.append(np.ones(2 << 20, np.uint8))
        pins.append(bytes(100_000))  # in the C library's pool, above the block
    del blocks
print(json.dumps({"done": done, "kept": rss() - before - 50 * 100_000}))
"""


def kept_bytes(mode: str) -> int:
    """What a process keeps of 100 MiB that it has freed."""
    command = [sys.executable, "-c", PROGRAM, mode]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert mode == "no" or told["done"]
    return int(told["kept"])


@pytest.mark.skipif(sys.platform != "linux", reason="speaks of glibc")
def test_what_is_freed_goes_back_to_the_system() -> None:
    assert kept_bytes("no") > 50e6, "or there is nothing to mend"
    assert kept_bytes("yes") < 10e6


def test_tensors_that_are_put_aside_come_back_bit_for_bit_and_leave_nothing(
    tmp_path: Path,
) -> None:
    tensors = [torch.randn(1000), torch.empty(0), torch.tensor(3), torch.randn(7).bfloat16()]
    tensors.append(torch.arange(6).reshape(2, 3).t())
    aside = Aside(tmp_path / "new", tensors)
    assert list((tmp_path / "new").iterdir()) == []
    handle = aside._handle
    for index in (4, 0, 1, 3, 2, 0):
        read = aside.read(index)
        assert read.dtype == tensors[index].dtype and torch.equal(read, tensors[index])
        assert read.numel() == 0 or read.data_ptr() != tensors[index].data_ptr()
    gone = weakref.ref(aside)
    del aside
    gc.collect()
    assert gone() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        import os

        os.fstat(handle)


@pytest.mark.parametrize("room", ["folder", "no folder", "full disk"])
def test_a_joiner_gets_the_donors_state_wherever_it_lay_meanwhile(
    cluster: Callable[..., Cluster], room: str
) -> None:
    options: dict[str, Any] = {
        "method": "diloco", "hyperparameters": {"inner_steps": 2}, "rounds": 100_000,
        "workers": 2, "step_time_s": 0.02, "checkpoint_every": 0, "saves": room != "no folder",
    }  # fmt: skip
    limit = {"largest_file_bytes": 500} if room == "full disk" else {}
    run = cluster(**options)
    run.start_all(**limit)
    run.workers[0].wait("boundary", round=2)
    run.workers[1].kill()
    run.start(1, **limit)
    joined = run.workers[1].wait("joined")
    given = run.workers[0].wait("boundary", round=joined["round"])
    assert joined["donor"] == 0 and joined["digest"] == given["digest"]
    together = {
        p.wait("boundary", round=joined["round"] + 2)["digest"] for p in run.workers.values()
    }
    assert len(together) == 1


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert return_freed_memory() is False
