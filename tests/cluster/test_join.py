"""A training loop of one's own: two processes, and the turns that two threads take."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer as gm
from gossamer.cluster.coordinator import serve
from gossamer.cluster.job import own_configuration
from gossamer.cluster.own_model import OwnModel, OwnOptimizer
from gossamer.cluster.plan import CoordinatorSettings
from gossamer.errors import ConfigError, NonFiniteError
from gossamer.methods import Method
from gossamer.sim.simulate import simulate
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
PATIENCE_S = 60.0


@contextmanager
def coordinator(folder: Path, method: Method, *, workers: int, rounds: int) -> Iterator[str]:
    """A coordinator in a thread; gives its address."""
    configuration = own_configuration(
        method, workers=workers, rounds=rounds, seed=0, deadline_s=20.0, moments="donor"
    )
    settings = CoordinatorSettings(
        store=folder / "run.sqlite",
        workers=workers,
        rounds=rounds,
        deadline=20.0,
        configuration=configuration,
    )
    address: Future[str] = Future()
    ends: Future[Callable[[], object]] = Future()

    async def work() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.set_result(lambda: loop.call_soon_threadsafe(stop.set))
        await serve(settings, stop=stop, on_start=address.set_result)

    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(asyncio.run, work())
        try:
            yield address.result(PATIENCE_S)
        finally:
            if not served.done():
                ends.result(PATIENCE_S)()
            served.result(PATIENCE_S)


Seen = dict[int, torch.Tensor]


def train(
    run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, goal: Callable[[], float]
) -> Seen:
    """TinyMLP's own batches, until `goal` rounds are done; the parameters after each of them."""
    task, seen = TinyMLP(num_hidden=8), Seen()
    while not run.over and run.rounds_completed < goal():
        batch = task.train_batch(run.worker, run.steps_completed)
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        run.step(loss, num_samples=2)
        vector = nn.utils.parameters_to_vector(model.parameters())
        seen.setdefault(run.rounds_completed, vector.detach().clone())
    return seen


def own_worker(
    address: str, method: Method, goal: Callable[[], float], *, worker: int, seed: int = 0,
    **options: Any,
) -> tuple[Seen, Any]:  # fmt: skip
    """One worker from its own initial weights."""
    torch.manual_seed(seed)
    model = TinyMLP(num_hidden=8).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with gm.join(
        address, method=method, model=model, optimizer=optimizer, worker=worker, **options
    ) as run:
        seen = train(run, model, optimizer, goal)
        steps = run.steps_completed
    return seen, steps


def test_two_processes_agree(tmp_path: Path) -> None:
    """The example as it is, beside the same loop in this process, from other initial weights."""
    method = gm.DiLoCo(inner_steps=50)
    with coordinator(tmp_path, method, workers=2, rounds=3) as address:
        example = subprocess.Popen(
            [sys.executable, str(EXAMPLE), address], stdout=subprocess.PIPE, text=True
        )
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before = [id(parameter) for parameter in model.parameters()]
        with gm.join(address, method=method, model=model, optimizer=optimizer) as run:
            assert run.num_workers == 2 and run.num_rounds == 3
            while not run.over:
                inputs = torch.randn(32, 16)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs[:, 0])
                loss.backward()
                optimizer.step()
                run.step(loss, num_samples=32)
        out, _ = example.communicate(timeout=PATIENCE_S)
    assert example.returncode == 0
    checksum = sum(float(parameter.detach().sum()) for parameter in model.parameters())
    assert out.strip().endswith(f"checksum {checksum:.6f}")
    assert [id(parameter) for parameter in model.parameters()] == before
    assert run.summary["samples"] == 3 * 50 * 32
    assert run.summary["rounds_completed"] == 3


def test_an_own_loop_does_what_the_simulator_does(tmp_path: Path) -> None:
    """DiLoCo with plain SGD: the same steps on the same batches, so the same parameters."""
    method = gm.DiLoCo(inner_steps=4)
    training = Training(
        workers=2, rounds=3, optimizer="sgd", learning_rate=0.05, schedule="constant",
        weight_decay=0.0, clip_norm=0.0,
    )  # fmt: skip
    task = TinyMLP(num_hidden=8)
    simulated = simulate(method=method, task=task, training=training, seed=0)
    start = simulate_start(task, training)

    with coordinator(tmp_path, method, workers=2, rounds=3) as address:

        def work(worker: int) -> torch.Tensor:
            model = task.build()
            # Only worker 0 has the simulator's start: the other takes it over.
            if worker == 0:
                model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with gm.join(
                address, method=method, model=model, optimizer=optimizer, worker=worker
            ) as run:
                train(run, model, optimizer, lambda: 3)
            return flat_of(model)

        with ThreadPoolExecutor(2) as threads:
            ends = list(threads.map(work, range(2)))
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], simulated.parameters[0], rtol=1e-5, atol=1e-6)


def flat_of(model: nn.Module) -> torch.Tensor:
    """In the order of the layout."""
    own = OwnModel(model, None, None)
    return own.replica.parameters.clone()


def simulate_start(task: TinyMLP, training: Training) -> dict[str, torch.Tensor]:
    from gossamer.training.engine import Engine

    engine = Engine(task, training, seed=0, total_steps=12, real=True)
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def test_one_leaves_and_comes_back_with_the_others_state(tmp_path: Path) -> None:
    """Whoever leaves the `with` early leaves the run; the same worker joins again from a donor."""
    method = gm.LocalSGD(inner_steps=60)  # rounds long enough for news to get around
    joined: list[dict[str, Any]] = []
    due_s = time.monotonic() + PATIENCE_S

    def goal() -> float:
        """Three rounds after the one that the newcomer begins with."""
        assert time.monotonic() < due_s
        return joined[0]["round"] + 3 if joined else float("inf")

    def hear(kind: str, fields: dict[str, Any]) -> None:
        if kind == "joined":
            joined.append(fields)

    with (
        coordinator(tmp_path, method, workers=2, rounds=10**6) as address,
        ThreadPoolExecutor(1) as threads,
    ):
        staying = threads.submit(own_worker, address, method, goal, worker=0, seed=1)
        own_worker(address, method, lambda: 3, worker=1, seed=2)
        assert not staying.done()
        seen, steps = own_worker(address, method, goal, worker=1, seed=3, events=hear)
        others, _ = staying.result(PATIENCE_S)
    first = joined[0]["round"]
    assert len(joined) == 1 and joined[0]["donor"] == 0 and first > 3
    assert steps == 60 * (first + 3)  # counted on from the donor's
    # After the very last round one of them may have left before the other had heard of it.
    for rounds in (first + 1, first + 2):
        assert torch.equal(seen[rounds], others[rounds])


def test_an_error_of_the_users_own_leaves_the_run(tmp_path: Path) -> None:
    method = gm.LocalSGD(inner_steps=2)
    model = TinyMLP(num_hidden=8).build()
    with coordinator(tmp_path, method, workers=1, rounds=2) as address:
        with pytest.raises(ZeroDivisionError), gm.join(address, method=method, model=model) as run:
            run.step(1.0)
            raise ZeroDivisionError
        with pytest.raises(ConfigError, match="has figures when"):
            _ = run.summary
        # Nothing is left running in this process, and another takes the place.
        assert not [t.name for t in threading.enumerate() if t.name.startswith("gossamer")]
        own_worker(address, method, lambda: 2, worker=0)


def test_a_run_of_another_method_is_refused_when_entering(tmp_path: Path) -> None:
    model = TinyMLP(num_hidden=8).build()
    with coordinator(tmp_path, gm.LocalSGD(inner_steps=2), workers=1, rounds=1) as address:
        other = gm.LocalSGD(inner_steps=3)
        with (
            pytest.raises(ConfigError, match="inner_steps"),
            gm.join(address, method=other, model=model),
        ):
            pass
        own_worker(address, gm.LocalSGD(inner_steps=2), lambda: 1, worker=0)


def test_parameters_that_are_not_finite_end_the_worker(tmp_path: Path) -> None:
    method = gm.LocalSGD(inner_steps=2)
    model = TinyMLP(num_hidden=8).build()
    with (
        coordinator(tmp_path, method, workers=1, rounds=2) as address,
        gm.join(address, method=method, model=model) as run,
    ):
        with torch.no_grad():
            next(iter(model.parameters())).fill_(float("nan"))
        assert run.step()
        with pytest.raises(NonFiniteError, match="after 2 inner steps"):
            run.step()
        assert run.over


def test_gradient_methods_are_refused_at_once() -> None:
    model = TinyMLP(num_hidden=8).build()
    with pytest.raises(ConfigError, match=r"^data_parallel averages the gradients of each step"):
        gm.join("127.0.0.1:1", method=gm.DataParallel(), model=model)


# -------------------------------------------------------------------------------- one's own model


def test_parameters_become_views_and_others_are_copied_at_the_turns() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).to(torch.bfloat16))
    wide, narrow = model[0].weight, model[1].weight
    own = OwnModel(model, None, None)
    views = own.layout.views(own.replica.parameters)
    wide.data.add_(1.0)
    assert torch.equal(views["0.weight"], wide)  # the same memory
    narrow.data.fill_(0.5)
    assert not torch.equal(views["1.weight"], narrow.float())
    own._from_model()
    assert torch.equal(views["1.weight"], narrow.float())
    views["1.weight"].fill_(0.25)
    own._to_model()
    assert model[1].weight is narrow and torch.all(narrow == 0.25)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_the_state_of_an_optimizer_moves_to_another(kind: Any) -> None:
    """After the same next step from the same state both models are equal, bit for bit."""
    models = [nn.Linear(4, 3) for _ in range(2)]
    optimizers = [kind(model.parameters(), lr=0.01) for model in models]

    def step(index: int, seed: int) -> None:
        optimizers[index].zero_grad()
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        models[index](inputs).square().sum().backward()
        optimizers[index].step()

    for seed in range(3):
        step(0, seed)
    models[1].load_state_dict(models[0].state_dict())
    state = OwnOptimizer(optimizers[0]).state_tensors()
    OwnOptimizer(optimizers[1]).load_state_tensors(state)
    for index in range(2):
        step(index, 9)
    assert torch.equal(models[0].weight, models[1].weight)
    OwnOptimizer(optimizers[1]).load_state_tensors({})
    assert not optimizers[1].state


def test_an_optimizer_that_keeps_more_than_tensors_is_named() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["schedule"] = [1, 2]
    with pytest.raises(ConfigError, match=r"^SGD keeps 'schedule' as list, not as a tensor"):
        OwnOptimizer(optimizer).check()


def test_predictions_need_a_function_for_them() -> None:
    model = nn.Linear(2, 3)
    own = OwnModel(model, None, None)
    replica = own.replica
    with pytest.raises(ConfigError, match="give `predict=`"):
        own.predict(replica.parameters, replica.buffers, replica.counters)
    own = OwnModel(model, None, lambda model: model(torch.ones(4, 2)))
    given = own.predict(replica.parameters, replica.buffers, replica.counters)
    torch.testing.assert_close(given.exp().sum(dim=1), torch.ones(4))
    assert model.training
