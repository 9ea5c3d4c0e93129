"""What `simulate` refuses, and what it takes in more than one form."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer.training.task as task_module
from gossamer.comm.context import Context, MethodState
from gossamer.errors import ConfigError, RunFailed
from gossamer.methods import DiLoCo
from gossamer.methods.base import Method
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import TinyMLP
from gossamer.training.replica import Replica
from gossamer.training.settings import Training


def run(**given: Any) -> SimulationResult:
    return simulate(
        **{"method": DiLoCo(inner_steps=2), "task": TinyMLP(), "workers": 2, "rounds": 2, **given}
    )


class Alone(Method):
    """Workers that never speak."""

    name = "alone"
    State = MethodState

    def init(self, replica: Replica) -> MethodState:
        return MethodState()

    async def run(self, ctx: Context, state: MethodState) -> None:
        async for _ in ctx.rounds(state):
            await ctx.train(self.inner_steps)


class Stateless(Method):
    name = "stateless"

    def init(self, replica: Replica) -> MethodState:
        return MethodState()

    async def run(self, ctx: Context, state: MethodState) -> None: ...


class Once(Alone):
    async def run(self, ctx: Context, state: MethodState) -> None:
        await ctx.train(1)


class HalfATask:
    def build(self) -> nn.Module:
        return nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": DiLoCo}, r"^method: an object such as DiLoCo\(inner_steps=20\) needed; got "),
        ({"method": "diloco"}, r"^method: an object .*got 'diloco'$"),
        ({"method": Stateless()}, r"^method: Stateless needs a class attribute `State`$"),
        ({"task": TinyMLP}, r"^task: an object with build\(\), loss\(model, batch\), train_batch"),
        ({"task": HalfATask()}, r"^task: .*eval_batches\(\) needed; got <.*HalfATask"),
        ({"network": "100Mbit/s"}, r"^network: Network\(\.\.\.\) needed; got '100Mbit/s'$"),
        ({"training": {"workers": 2}}, r"^training: Training\(\.\.\.\) needed; got \{"),
        ({"workers": 0}, r"^workers: .*got 0$"),
        ({"workers": True}, r"^workers: a number expected; got True$"),
        ({"rounds": 1.5}, r"^rounds: .*got 1.5$"),
        ({"checkpoint_every": 1}, r"^checkpoint_every = 1 needs a checkpoint_dir"),
        ({"checkpoint_every": -1, "checkpoint_dir": "c"}, r"^checkpoint_every: .*got -1$"),
    ],
)
def test_arguments_of_another_kind_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run(**given)
    assert "\n" not in str(caught.value)


def test_numbers_are_taken_as_settings_take_them() -> None:
    assert (
        run(workers=2.0, rounds="2").summary["parameters_sha256"]
        == (run().summary["parameters_sha256"])
    )


def test_folders_may_be_given_as_text(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    whole = run(checkpoint_every=1, checkpoint_dir=folder).summary
    assert run(resume=folder + "/round-000001").summary == whole


def test_a_method_that_leaves_before_the_last_round_is_an_error() -> None:
    assert run(method=Alone(inner_steps=1)).summary["rounds"] == 2
    with pytest.raises(RunFailed, match=r"Once.run returned after 0 of 2 rounds; .*ctx.rounds"):
        run(method=Once(inner_steps=1))


class Constant(TinyMLP):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return 1.0


class Detached(TinyMLP):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).detach()


class PerSample(TinyMLP):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).expand(3)


@pytest.mark.parametrize(
    ("task", "got"),
    [
        (Constant(), r"got 1\.0\n"),
        (Detached(), r"got shape \[\] without a gradient\n"),
        (PerSample(), r"got shape \[3\]\n"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_named(task: TinyMLP, got: str) -> None:
    with pytest.raises(ConfigError, match="the task's loss must be a scalar .*" + got):
        run(task=task)


class OnePrediction(TinyMLP):
    def predict(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().predict(model, batch)[0]


def test_predictions_may_be_a_single_distribution() -> None:
    assert 0 <= run(task=OnePrediction(), method=Alone(inner_steps=2)).summary["js_distance"] <= 1


def test_training_and_network_may_come_ready_made() -> None:
    ready = run(workers=None, rounds=None, training=Training(workers=2, rounds=2),
                network=Network())  # fmt: skip
    assert ready.summary == run().summary


def test_the_task_in_the_documentation_is_a_whole_one() -> None:
    """And one that does not say what it counts: then batches are counted, not samples."""
    assert task_module.__doc__ is not None
    example = textwrap.dedent(task_module.__doc__.partition("\n\n")[2].partition("\nis a whole")[0])
    names: dict[str, Any] = {"torch": torch}
    exec(example, names)
    summary = run(
        task=names["Quadratic"](), rounds=3, training=Training(learning_rate=0.05)
    ).summary
    assert summary["eval_loss"] < run(task=names["Quadratic"](), rounds=1).summary["eval_loss"]
    assert (summary["unit"], summary["samples"], summary["tokens"]) == ("batches", 3 * 2 * 2, None)
