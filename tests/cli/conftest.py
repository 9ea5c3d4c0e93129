"""A command line in this process, a small recipe, and a stand-in for the simulator.

The stand-in makes the tests of the command line quick and lets them choose how a run ends; that
the real simulator fits behind it is what `test_real_runs.py` is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import cli
from gossamer.commands import running
from gossamer.sim.listener import Listener, StopFlag

RECIPE = """
seed = 5

[task]
name = "text"
model = "llama-tiny"
data = "shakespeare"
eval_sequences = 4
probe_sequences = 1

[train]
workers = 3
rounds = 2
batch_size = 1
sequence_length = 16

[method]
name = "diloco"
inner_steps = 2
outer_learning_rate = 0.5
"""


@dataclass
class Outcome:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        content = json.loads(self.out)
        assert isinstance(content, dict)
        return content

    @property
    def error_line(self) -> str:
        """The last line of stderr, and a check that it is the only one of its kind."""
        lines = self.err.strip().splitlines()
        assert sum(line.startswith(("error:", "interrupted:")) for line in lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[-1]


@dataclass
class FakeResult:
    parameters: torch.Tensor
    averaged: dict[str, torch.Tensor]
    summary: dict[str, Any]


@dataclass
class FakeSimulation:
    """Stands in for `simulate`; `ending` is called after each round and may raise."""

    ending: Callable[[int, StopFlag], None] = lambda rounds_completed, stop: None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, *, listener: Listener, stop: StopFlag, **given: Any) -> FakeResult:
        self.calls.append(given)
        method, workers, rounds = given["method"], given["workers"], given["rounds"]
        model = given["task"].build()
        listener.on_start(workers * rounds * method.inner_steps, 0)
        listener.on_event("start", {})
        for done in range(1, rounds + 1):
            listener.on_steps(workers * method.inner_steps)
            told = {"round": done, "time_s": 3600.0 * done}
            listener.on_event("round", {**told, "bytes_sent_total": 3e9 * done, "train_loss": 2.0})
            listener.on_event("measure", {**told, "eval_loss": 3.0 / done})
            self.ending(done, stop)
        listener.on_event("end", {})
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        noise = torch.randn(workers, len(flat), generator=torch.Generator().manual_seed(0))
        summary = {
            "method": method.name,
            "workers": workers,
            "rounds": rounds,
            "inner_steps": method.inner_steps,
            "seed": given["seed"],
            "eval_loss": 1.5,
            "eval_perplexity": 4.48,
            "eval_accuracy": None,
            "utilization": 0.5,
            "time_s": 7200.0,
            "train_time_s": 3600.0,
            "bytes_sent": 2e9,
            "consensus_l2": 0.25,
            "js_distance": float("nan"),
            "failed_transfers": 0,
            "retries": 0,
        }
        return FakeResult(flat + 0.05 * noise, dict(model.state_dict()), summary)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> FakeSimulation:
    fake = FakeSimulation()
    monkeypatch.setattr(running, "simulate", fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of the test's own, with `recipe.toml` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def gossamer(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command in this process."""

    def run(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
