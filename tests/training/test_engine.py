"""Training through the simulator against plain PyTorch, and models of every kind."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer.methods.diloco as diloco_module
from gossamer.comm.context import MethodState
from gossamer.errors import ConfigError, NonFiniteError
from gossamer.measure.settings import Measure
from gossamer.methods import DataParallel, DiLoCo, LocalSGD, Method
from gossamer.seeding import derive_seed, torch_stream
from gossamer.sim.compute import Timing
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.testing import run_workers
from gossamer.training.engine import Engine
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training
from gossamer.training.task import Prepares, Task
from gossamer.training.text import TextTask

AT_THE_END = Measure(every=0)


class Regression:
    """Any model on random inputs [B, *shape]; the loss is the mean of (outputs - 1)^2."""

    def __init__(self, build: Callable[[], nn.Module], *shape: int, batch_size: int = 4) -> None:
        self.build = build
        self.shape, self.batch_size = shape, batch_size

    def inputs(self, *name: int | str) -> Tensor:
        generator = torch_stream(0, *name)
        return torch.randn(self.batch_size, *self.shape, generator=generator)

    def train_batch(self, worker: int, step: int) -> Tensor:
        return self.inputs("train", worker, step)

    def eval_batches(self) -> Iterable[Tensor]:
        return [self.inputs("held out")]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch)
        return ((outputs.float() - 1) ** 2).mean()


def run(
    task: Task,
    method: Method | None = None,
    *,
    workers: int = 1,
    rounds: int = 2,
    seed: int = 0,
    **training: Any,
) -> SimulationResult:
    return simulate(
        method=method or LocalSGD(inner_steps=3),
        task=task,
        workers=workers,
        rounds=rounds,
        seed=seed,
        training=Training(**training),
        measure=AT_THE_END,
    )


def initial_model(task: Task, seed: int = 0) -> nn.Module:
    torch.manual_seed(derive_seed(seed, "init"))
    return task.build()


def plain_loop(
    task: Task, training: Training, num_steps: int, *, workers: Iterable[int] = (0,)
) -> nn.Module:
    """What a PyTorch tutorial would write; the loss is the mean over the workers' batches."""
    workers = list(workers)
    if isinstance(task, Prepares):
        task.prepare(num_workers=len(workers), seed=0, num_steps=num_steps)
    model = initial_model(task)
    model.train()
    optimizer: torch.optim.Optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if training.optimizer == "adamw":
        optimizer = torch.optim.AdamW(
            groups,
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            weight_decay=training.weight_decay,
        )
    else:
        optimizer = torch.optim.SGD(
            groups,
            lr=training.learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
    warmup, floor = training.warmup_steps, training.final_learning_rate

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / (num_steps - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(num_steps):
        optimizer.zero_grad()
        for worker in workers:
            loss = task.loss(model, task.train_batch(worker, step)) / len(workers)
            loss.backward()
        if training.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        scheduler.step()
    return model


def assert_same_weights(result: SimulationResult, model: nn.Module, atol: float) -> None:
    expected = model.state_dict()
    assert list(result.averaged) == list(expected)
    for name, value in result.averaged.items():
        assert torch.allclose(value, expected[name], rtol=0, atol=atol), name


# ----------------------------------------------------------------------------------- equal to torch

NANO = {"model": "llama-nano", "batch_size": 2, "sequence_length": 16, "eval_sequences": 2}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.05, "learning_rate": 0.02},
        {"clip_norm": 0.0, "warmup_steps": 5},
        {"weight_decay": 0.5, "beta1": 0.5, "beta2": 0.8, "epsilon": 1e-4},
        {"optimizer": "sgd", "learning_rate": 0.1},
        {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "clip_norm": 0.05},
    ],
    ids=["default", "clipped", "unclipped", "other moments", "sgd", "momentum"],
)
def test_one_worker_is_a_plain_pytorch_loop(options: dict[str, Any]) -> None:
    task = TinyMLP(dtype=torch.float64)
    result = run(task, LocalSGD(inner_steps=10), rounds=3, **options)
    model = plain_loop(task, Training(**options), 30)
    # PyTorch's clip divides by the norm plus 1e-6; everything else is equal to fp64 rounding.
    clipped = options.get("clip_norm") == 0.05
    assert_same_weights(result, model, 2e-5 if clipped else 1e-12)
    moved = (result.parameters[0] - run(task, rounds=1, learning_rate=1e-12).parameters[0]).abs()
    assert float(moved.max()) > 1e-3


def test_one_worker_on_a_llama_is_a_plain_pytorch_loop() -> None:
    options = {"learning_rate": 1e-3, "clip_norm": 0.0}
    result = run(TextTask(**NANO), LocalSGD(inner_steps=4), rounds=2, **options)
    assert_same_weights(result, plain_loop(TextTask(**NANO), Training(**options), 8), 2e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_four_data_parallel_workers_are_one_with_four_batches(clip_norm: float) -> None:
    task = TinyMLP(dtype=torch.float64)
    options = {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": clip_norm}
    result = run(task, DataParallel(inner_steps=5), workers=4, rounds=3, **options)
    model = plain_loop(task, Training(**options), 15, workers=range(4))
    assert_same_weights(result, model, 1e-13 if clip_norm == 0 else 2e-5)
    assert torch.equal(result.parameters, result.parameters[:1].expand(4, -1))


def test_the_first_outer_step_comes_after_exactly_h_inner_steps_and_the_second_after_2h(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Logged(TinyMLP):
        def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
            log.append(f"inner {step}")
            return super().train_batch(worker, step)

    real_step = diloco_module.nesterov_step_

    def logged_step(*arguments: Any, **options: Any) -> None:
        log.append("outer")
        real_step(*arguments, **options)

    monkeypatch.setattr(diloco_module, "nesterov_step_", logged_step)
    run(Logged(), DiLoCo(inner_steps=3))
    assert log == [
        "inner 0",
        "inner 1",
        "inner 2",
        "outer",
        "inner 3",
        "inner 4",
        "inner 5",
        "outer",
    ]


# -------------------------------------------------------------------------------- where values live


def make_engine(task: Task, *, real: bool = True, seed: int = 0, **training: Any) -> Engine:
    return Engine(task, Training(**training), seed=seed, total_steps=10, real=real)


def test_replicas_are_rows_of_one_matrix_and_the_module_is_a_view_of_the_one_in_use() -> None:
    engine = make_engine(TinyMLP())
    rows, replicas = engine.new_replicas(3)
    assert rows.shape == (3, engine.layout.numel)
    for worker, replica in enumerate(replicas):
        assert replica.parameters.data_ptr() == rows[worker].data_ptr()
    before = rows.clone()
    engine.train(replicas[1], 2)
    assert engine.model[0].weight.data_ptr() == rows[1].data_ptr()
    assert torch.equal(rows[[0, 2]], before[[0, 2]]) and not torch.equal(rows[1], before[1])


def storages(*roots: object) -> dict[int, int]:
    """Bytes of every tensor storage that is reachable from `roots`, by its address."""
    found: dict[int, int] = {}
    seen: dict[int, object] = {}
    pending: list[object] = list(roots)
    while pending:
        thing = pending.pop()
        is_code = isinstance(thing, type | FunctionType | BuiltinFunctionType | ModuleType)
        if id(thing) in seen or is_code:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            pending.append(thing.grad)
        else:
            pending.extend(gc.get_referents(thing))
    return found


@pytest.mark.parametrize("num_workers", [1, 8])
def test_replicas_cost_three_vectors_each_and_one_gradient_together(num_workers: int) -> None:
    engine = make_engine(TinyMLP(50, 200, 50))
    rows, replicas = engine.new_replicas(num_workers)
    for replica in replicas:
        engine.train(replica, 1)
    vector_bytes = 4 * engine.layout.numel
    total = sum(storages(rows, replicas, engine.model, engine._gradient).values())
    assert total == pytest.approx((3 * num_workers + 1) * vector_bytes, rel=0.005)
    assert total - vector_bytes <= 3.2 * num_workers * vector_bytes


@pytest.mark.parametrize("method", [DiLoCo(inner_steps=1), LocalSGD(inner_steps=1)])
def test_a_methods_state_shares_no_storage_with_replicas(method: Method) -> None:
    engine = make_engine(TinyMLP())
    rows, replicas = engine.new_replicas(2)
    states = [method.init(replica) for replica in replicas]
    theirs = storages(rows, replicas)
    mine = [storages(*vars(state).values()) for state in states]
    assert not theirs.keys() & {*mine[0], *mine[1]}
    assert not mine[0].keys() & mine[1].keys()


def test_equal_seeds_build_equal_weights_and_other_seeds_others() -> None:
    def weights(seed: int) -> Tensor:
        return make_engine(TinyMLP(), seed=seed).new_replicas(1)[0]

    torch.manual_seed(123)
    first = weights(0)
    torch.manual_seed(456)
    assert torch.equal(first, weights(0)) and not torch.equal(first, weights(1))
    flat = torch.cat([p.detach().flatten() for p in initial_model(TinyMLP()).parameters()])
    assert sorted(flat.tolist()) == sorted(first[0].tolist())


# ------------------------------------------------------------------------------ models of all kinds


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.outer(torch.tanh(self.inner(inputs))) + self.frozen
        return result


def test_tied_weights_stay_tied_and_frozen_ones_stay() -> None:
    """In training, in what workers agree on, and in what a run leaves; one update, not two."""
    built: list[TiedModel] = []

    def build() -> TiedModel:
        built.append(TiedModel())
        return built[-1]

    options = {"clip_norm": 0.0, "learning_rate": 0.02}
    result = run(Regression(build, 4), DiLoCo(inner_steps=2), workers=3, **options)
    model = built[0]
    assert model.inner.weight is model.outer.weight
    assert torch.equal(result.averaged["inner.weight"], result.averaged["outer.weight"])
    assert torch.equal(result.averaged["frozen"], torch.full((4,), 0.5))
    assert result.parameters.shape == (3, 20)
    fresh = TiedModel()
    fresh.load_state_dict(result.averaged)
    assert fresh.inner.weight is fresh.outer.weight
    alone = run(Regression(TiedModel, 4), **options)
    assert_same_weights(alone, plain_loop(Regression(TiedModel, 4), Training(**options), 6), 1e-6)


class Unused(nn.Module):
    """Half of it has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.scale * self.used(inputs)
        return result


def test_scalars_train_and_parameters_outside_the_loss_only_decay() -> None:
    start = initial_model(Regression(Unused, 3))
    result = run(Regression(Unused, 3), rounds=1, weight_decay=0.1, schedule="constant")
    assert result.averaged["scale"].shape == () and float(result.averaged["scale"]) != 0.5
    assert torch.equal(result.averaged["unused.bias"], start.unused.bias)
    shrunk = start.unused.weight * (1 - 4e-3 * 0.1) ** 3
    assert torch.allclose(result.averaged["unused.weight"], shrunk, rtol=1e-6)


def convolutional() -> nn.Module:
    """A group of several channels: a channel of its own would cancel the bias before it.

    The gradient of such a bias is rounding alone, and Adam moves it by the learning rate in a
    direction that another processor rounds the other way.
    """
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)
    )


class Recurrent(nn.Module):
    """An LSTM keeps a list of its own weights, which has to follow the flat vector."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(inputs)[0]
        return outputs


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


def sparse() -> nn.Module:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 3, sparse=True)

        def forward(self, inputs: Tensor) -> Tensor:
            rows: Tensor = self.table(inputs[:, 0].abs().long().clamp(max=6))
            return rows

    return Bag()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (convolutional, (2, 5, 5)),
        (Recurrent, (6, 3)),
        (weight_normed, (3,)),
        (lambda: nn.Linear(3, 2, bias=False), (3,)),
        (lambda: nn.LayerNorm(3), (3,)),
    ],
    ids=["convolution", "lstm", "weight norm", "matrices only", "vectors only"],
)
def test_any_module_trains_as_in_plain_pytorch(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    options = {"clip_norm": 0.0, "learning_rate": 0.01}
    task = Regression(build, *shape)
    assert_same_weights(run(task, **options), plain_loop(task, Training(**options), 6), 1e-6)


def test_sparse_gradients_fill_the_flat_one() -> None:
    options = {"clip_norm": 0.0, "weight_decay": 0.0, "optimizer": "sgd", "learning_rate": 0.1}
    task = Regression(sparse, 3)
    assert_same_weights(run(task, **options), plain_loop(task, Training(**options), 6), 1e-6)


def test_models_without_values_run_without_numerics_only() -> None:
    def on_meta() -> nn.Module:
        return nn.Linear(3, 2, device="meta")

    with pytest.raises(ConfigError, match=r"'weight' is on the meta device .* numerics = \"none\""):
        run(Regression(on_meta, 3))
    result = simulate(
        method=DiLoCo(inner_steps=1), task=Regression(on_meta, 3), workers=2, rounds=1,
        numerics="none",
    )  # fmt: skip
    assert result.parameters.is_meta


def test_a_model_that_insists_on_the_cpu_costs_no_storage_without_numerics() -> None:
    task = Regression(lambda: nn.BatchNorm1d(3, device="cpu"), 3)
    rows, replicas = make_engine(task, real=False).new_replicas(5)
    assert rows.is_meta and replicas[0].buffers.is_meta and replicas[0].counters.is_meta


# ----------------------------------------------------------------------------------- low precision


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 32, bias=False), nn.LayerNorm(32)).to(torch.bfloat16)


class NarrowTask(Regression):
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return super().loss(model, batch.bfloat16())


def test_bf16_weights_are_the_rounded_fp32_ones_and_small_updates_are_not_lost() -> None:
    """At rate 1e-6 no bf16 weight near 0.1 can move by itself; in fp32 all 768 do."""
    task = NarrowTask(narrow, 24)
    options = {"learning_rate": 1e-6, "weight_decay": 0.0, "schedule": "constant"}
    engine = make_engine(task, **options)
    rows, (replica,) = engine.new_replicas(1)
    start = rows[0].clone()
    assert rows.dtype is torch.float32
    engine.train(replica, 100)
    weight = engine.layout.views(replica.parameters)["0.weight"]
    assert int((weight != engine.layout.views(start)["0.weight"]).sum()) >= 760
    for name, view in engine.layout.views(replica.parameters).items():
        parameter = engine.model.get_parameter(name)
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter.detach(), view.bfloat16())


def test_outer_state_of_a_bf16_model_is_fp32() -> None:
    engine = make_engine(NarrowTask(narrow, 24))
    _, (replica,) = engine.new_replicas(1)
    state = DiLoCo(inner_steps=1).init(replica)
    assert state.anchor.dtype is state.momentum.dtype is torch.float32
    result = run(NarrowTask(narrow, 24), DiLoCo(inner_steps=2), workers=2)
    assert result.parameters.dtype is torch.float32
    assert result.averaged["0.weight"].dtype is torch.bfloat16
    assert result.summary["eval_loss"] > 0


def test_each_bf16_replica_is_trained_from_its_own_weights() -> None:
    engine = make_engine(NarrowTask(narrow, 24))
    _, (one, other) = engine.new_replicas(2)
    engine.train(one, 1)
    engine.train(other, 1)
    engine.train(one, 1)
    alone = make_engine(NarrowTask(narrow, 24))
    _, (replica,) = alone.new_replicas(1)
    alone.train(replica, 2)
    assert torch.equal(one.parameters, replica.parameters)


# ----------------------------------------------------------------------------------------- buffers


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_running_statistics_are_averaged_and_never_reach_the_outer_optimizer() -> None:
    """One DiLoCo round with lr 1.7, mu 0.9: statistics are the plain mean of the workers'."""
    task = Regression(normed, 3)
    alone = make_engine(task, schedule="constant")
    _, replicas = alone.new_replicas(3)
    for replica in replicas:
        alone.train(replica, 4)
    mean = torch.stack([replica.buffers for replica in replicas]).mean(0)
    method = DiLoCo(inner_steps=4, outer_learning_rate=1.7)
    result = run(task, method, workers=3, rounds=1, schedule="constant")
    statistics = [result.averaged[f"1.running_{name}"] for name in ("mean", "var")]
    assert torch.allclose(torch.cat(statistics), mean, rtol=0, atol=1e-6)
    assert int(result.averaged["1.num_batches_tracked"]) == 4


@pytest.mark.parametrize("method", [DiLoCo(inner_steps=2), DataParallel(inner_steps=2)])
def test_variances_stay_positive_and_counters_count_steps(method: Method) -> None:
    result = run(Regression(normed, 3), method, workers=3, rounds=8, learning_rate=0.05)
    assert float(result.averaged["1.running_var"].min()) > 0
    assert int(result.averaged["1.num_batches_tracked"]) == 16
    assert math.isfinite(result.summary["eval_loss"])


def test_counters_take_the_maximum_of_the_workers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("largest", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("cache", torch.zeros(2), persistent=False)

        def forward(self, batch: Tensor) -> Tensor:
            worker = int(batch[0, 0])
            self.largest.clamp_(min=10 * worker)
            self.seen[worker] = True
            return self.weight

    class ByWorker(Regression):
        def train_batch(self, worker: int, step: int) -> Tensor:
            return torch.full((1, 1), float(worker))

        def eval_batches(self) -> list[Tensor]:
            return [torch.zeros(1, 1)]

    result = run(ByWorker(Counting), workers=3, rounds=1)
    assert int(result.averaged["largest"]) == 20
    assert result.averaged["seen"].tolist() == [True] * 3
    assert "cache" not in result.averaged and result.averaged["empty"].shape == (0,)


class Reassigns(nn.Module):
    """Keeps a running mean by giving its buffer a new tensor at each step, and the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("last", torch.zeros(4, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.average = 0.5 * self.average + 0.5 * inputs.mean(0)
            self.last = inputs
        return self.weight + 0 * inputs


def test_buffers_that_a_module_reassigns_belong_to_the_worker_all_the_same() -> None:
    task = Regression(Reassigns, 3)
    engine = make_engine(task)
    _, (one, other) = engine.new_replicas(2)
    for replica in (one, other, one, other):
        engine.train(replica, 1)
    for worker, replica in enumerate((one, other)):
        first, second = (task.train_batch(worker, step).mean(0) for step in (0, 1))
        assert torch.allclose(replica.buffers[:3], 0.25 * first + 0.5 * second, atol=1e-6)
        assert torch.equal(replica.buffers[3:], task.train_batch(worker, 1).flatten())


def test_a_batch_that_the_model_keeps_is_not_overwritten_by_another_workers() -> None:
    class Kept(Regression):
        batches: ClassVar[dict[int, Tensor]] = {w: torch.full((4, 3), w + 1.0) for w in (0, 1)}

        def train_batch(self, worker: int, step: int) -> Tensor:
            return self.batches[worker]

    run(Kept(Reassigns, 3), workers=2)
    assert all(bool((Kept.batches[worker] == worker + 1).all()) for worker in (0, 1))


def test_an_fp64_buffer_of_an_fp32_model_keeps_its_digits_through_a_run() -> None:
    class Timed(Reassigns):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("time", torch.tensor(1.0, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            self.time += 2**-40
            return self.weight + 0 * inputs

    result = run(Regression(Timed, 3), workers=2, rounds=2)
    assert float(result.averaged["time"]) == 1 + 6 * 2**-40


def test_a_buffer_that_grows_is_refused() -> None:
    class Grows(Reassigns):
        def forward(self, inputs: Tensor) -> Tensor:
            self.average = torch.cat([self.average, self.average])
            return self.weight + 0 * inputs

    with pytest.raises(ConfigError, match=r"replaced its buffer 'average'"):
        run(Regression(Grows, 3))


# ------------------------------------------------------------------------------------------ chance


class Masks(nn.Module):
    """Notes each dropout mask that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.drawn: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(64), 0.5, training=self.training)
        if self.training:
            self.drawn.append(mask)
        return mask * self.weight


def drawn_masks(seed: int, workers: int = 2) -> list[Tensor]:
    model: list[Masks] = []

    def build() -> Masks:
        model.append(Masks())
        return model[-1]

    run(Regression(build, 1), workers=workers, rounds=2, seed=seed)
    return model[0].drawn


def test_dropout_differs_between_workers_and_steps_and_is_reproducible() -> None:
    masks = drawn_masks(0)
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks) == 12
    torch.rand(5)  # the caller's generator has no say
    assert all(torch.equal(a, b) for a, b in zip(masks, drawn_masks(0), strict=True))
    assert not torch.equal(masks[0], drawn_masks(1)[0])
    alone = drawn_masks(0, workers=1)  # nor do the other workers
    assert all(torch.equal(a, b) for a, b in zip(alone[:3], masks[:3], strict=True))


@pytest.mark.parametrize("method", [LocalSGD(inner_steps=2), DataParallel(inner_steps=2)])
def test_a_run_leaves_the_callers_generator_alone(method: Method) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run(Regression(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout()), 3), method, workers=2)
    assert torch.equal(torch.rand(3), expected)


# -------------------------------------------------------------------------------------- divergence


class Poisoned(TinyMLP):
    """Worker 2's loss is NaN, or its gradient alone, at its step 3."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def train_batch(self, worker: int, step: int) -> Any:
        return *super().train_batch(worker, step), (worker, step) == (2, 3)

    def eval_batches(self) -> list[Any]:
        return [(*batch, False) for batch in super().eval_batches()]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        *data, poisoned = batch
        loss = super().loss(model, tuple(data))
        if not poisoned:
            return loss
        if self.what == "loss":
            return loss * math.nan
        zero = (loss - loss.detach()) ** 2
        return loss + zero.sqrt()  # sqrt at 0: the value is 0, the derivative 0 * infinity


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("what", "quantity"), [("loss", "training loss"), ("gradient", "gradient")]
)
def test_what_is_not_finite_names_worker_step_and_learning_rate(
    what: str, quantity: str, clip_norm: float
) -> None:
    engine = make_engine(Poisoned(what), clip_norm=clip_norm, warmup_steps=8, learning_rate=0.016)
    rows, replicas = engine.new_replicas(3)
    with pytest.raises(
        NonFiniteError,
        match=rf"^{quantity} of worker 2 is not finite after 3 inner steps "
        rf"\(learning rate 0\.008\); a smaller learning rate",
    ) as caught:
        engine.train(replicas[2], 5)
    error = caught.value
    assert (error.worker, error.step, error.learning_rate) == (2, 3, 0.008)
    assert bool(torch.isfinite(rows).all())
    engine.train(replicas[0], 2)  # the shared gradient holds nothing of it any more
    assert bool(torch.isfinite(rows).all())


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(
    "method",
    [LocalSGD(inner_steps=2), DiLoCo(inner_steps=2), DataParallel(inner_steps=2)],
    ids=["local_sgd", "diloco", "data_parallel"],
)
def test_the_others_go_on_without_a_diverged_worker_and_the_summary_says_so(
    method: Method, what: str
) -> None:
    result = run(Poisoned(what), method, workers=4, rounds=4, clip_norm=0.0)
    (lost,) = result.summary["lost"]
    assert (lost["worker"], lost["cause"]) == (2, "non_finite")
    assert "worker 2 is not finite after 3 inner steps" in lost["reason"]
    assert result.workers == (0, 1, 3)
    assert bool(torch.isfinite(result.parameters).all())
    survivors = result.parameters[[0, 1, 3]]
    assert torch.equal(survivors, survivors[:1].expand(3, -1))
    assert math.isfinite(result.summary["eval_loss"])


# ---------------------------------------------------------------------------------------- counting


def test_steps_and_samples_are_counted_on_every_way_of_training() -> None:
    async def work(ctx: Any, round_: Any) -> list[int]:
        report = await ctx.train(3)
        assert (report.num_steps, report.num_samples) == (3, 48)
        ctx.apply_gradient(await ctx.gradient())
        return [ctx.replica.steps_completed, ctx.replica.samples_completed]

    timing = Timing(step_time=2.0)
    outcome = run_workers(2, work, task=TinyMLP(), timing=timing)
    assert outcome.results == {0: [4, 64], 1: [4, 64]}
    assert outcome.time_s == 8.0


def test_a_gradient_applied_at_once_is_an_inner_step() -> None:
    def rows(by_hand: bool) -> Tensor:
        engine = make_engine(TinyMLP())
        rows, (replica,) = engine.new_replicas(1)
        for _ in range(4):
            if by_hand:
                engine.apply_gradient(replica, engine.gradient(replica)[0].clone())
            else:
                engine.train(replica, 1)
        return rows

    assert torch.equal(rows(True), rows(False))


def test_evaluation_uses_the_model_as_it_is_used_and_changes_nothing() -> None:
    """Evaluation mode: no dropout, running statistics; and no gradient, no counter, no draw."""
    task = Regression(lambda: nn.Sequential(normed(), nn.Dropout(0.5)), 3)
    engine = make_engine(task)
    _, (replica,) = engine.new_replicas(1)
    engine.train(replica, 5)
    vectors = (replica.parameters, replica.buffers, replica.counters)
    before = [vector.clone() for vector in vectors]
    loss = engine.evaluate(*vectors).loss
    assert loss == engine.evaluate(*vectors).loss
    assert all(torch.equal(a, b) for a, b in zip(before, vectors, strict=True))
    model = task.build()
    model.load_state_dict(engine.state_dict(*vectors))
    model.eval()
    with torch.no_grad():
        expected = task.loss(model, next(iter(task.eval_batches())))
    assert loss == pytest.approx(float(expected), rel=1e-6)


def test_a_method_without_state_of_its_own_has_only_its_count() -> None:
    state = LocalSGD(inner_steps=1).init(make_engine(TinyMLP()).new_replicas(1)[1][0])
    assert vars(state) == {"rounds_completed": 0, "residual": None}
    assert type(state) is MethodState
