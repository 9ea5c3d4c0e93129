"""Training, evaluating and predicting with one module that stands for many replicas.

The module's parameters are views of whichever flat vector is being worked on, and all replicas of a
process share one gradient vector: M replicas cost their vectors and moments, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.comm.context import TrainReport
from gossamer.errors import ConfigError, NonFiniteError
from gossamer.measure.probes import log_probabilities
from gossamer.seeding import derive_seed
from gossamer.training.buffers import BufferLayout
from gossamer.training.layout import ParameterLayout
from gossamer.training.optimizers import InnerOptimizer, learning_rate_at
from gossamer.training.replica import Replica
from gossamer.training.settings import Training
from gossamer.training.task import Batch, Counts, Predicts, Scores, Task


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Mean held-out loss, and the task's own metrics (mean over the evaluation batches)."""

    loss: float
    metrics: dict[str, float]


class Engine:
    """The numerics of a run.

    Args:
        task: what is trained; its model is built once, from the run's seed.
        training: the inner training's settings.
        seed: the run's seed.
        total_steps: inner steps of the whole run, for the learning-rate schedule.
        real: False puts everything on the meta device, where tensors have shapes and no storage.
    """

    def __init__(
        self, task: Task, training: Training, *, seed: int, total_steps: int, real: bool
    ) -> None:
        self.task, self.training, self.seed, self.total_steps = task, training, seed, total_steps
        self.real = real
        with _seeded(derive_seed(seed, "init")), torch.device("cpu" if real else "meta"):
            self.model = task.build()
        self.layout = ParameterLayout.of(self.model)
        if real:
            _check_has_storage(self.model)
        self.buffer_layout = BufferLayout.of(self.model)
        self.unit = task.unit if isinstance(task, Counts) else "batches"
        self.units_per_batch = task.units_per_batch if isinstance(task, Counts) else 1
        self._parameters = dict(self.model.named_parameters())
        first = self._parameters[self.layout.names[0]]
        self._device = first.device if real else torch.device("meta")
        self._gradient = self._new(self.layout.numel).zero_()
        self._cast = [s for s in self.layout.slots if s.dtype is not self.layout.dtype]
        if real:
            self._collect_gradients(self._gradient)

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.layout.dtype, device=self._device)

    def _collect_gradients(self, flat: Tensor) -> None:
        """Let backward accumulate straight into a flat gradient [P]."""
        for name, view in self.layout.views(flat).items():
            parameter = self._parameters[name]
            if parameter.dtype is self.layout.dtype:
                parameter.grad = view

    def new_replicas(self, num_workers: int) -> tuple[Tensor, list[Replica]]:
        """`num_workers` equal replicas with the initial weights, and their parameters [M, P]."""
        start = self._new(self.layout.numel)
        for name, view in self.layout.views(start).items():
            view.copy_(self._parameters[name].detach())
        floats = self._new(self.buffer_layout.num_floats, dtype=self.buffer_layout.dtype)
        integers = self._new(self.buffer_layout.num_integers, dtype=torch.int64)
        self.buffer_layout.store(self.model, floats, integers)
        rows = start.repeat(num_workers, 1)
        replicas = [
            Replica(
                worker=worker,
                layout=self.layout,
                parameters=rows[worker],
                buffers=floats.clone(),
                counters=integers.clone(),
                optimizer=self._new_optimizer(rows[worker]) if self.real else None,
                learning_rate=learning_rate_at(0, self.training, self.total_steps),
            )
            for worker in range(num_workers)
        ]
        return rows, replicas

    def _new_optimizer(self, parameters: Tensor) -> InnerOptimizer:
        return InnerOptimizer(parameters, self._gradient, self.layout.num_decayed, self.training)

    def attach(self, parameters: Tensor, buffers: Tensor, counters: Tensor) -> None:
        """Point the module at a flat vector and give it these buffers."""
        for name, view in self.layout.views(parameters).items():
            parameter = self._parameters[name]
            if parameter.dtype is self.layout.dtype:
                parameter.data = view
        self._refresh_cast(parameters)
        self.buffer_layout.load(self.model, buffers, counters)

    def _refresh_cast(self, parameters: Tensor) -> None:
        """Low-precision weights are copies of the flat vector, renewed after each step."""
        for slot in self._cast:
            piece = parameters[slot.offset : slot.end].view(slot.shape)
            self._parameters[slot.name].data.copy_(piece)

    def train(
        self, replica: Replica, num_steps: int, on_step: Callable[[], None] | None = None
    ) -> TrainReport:
        """`num_steps` inner steps of a replica, in place; `on_step` is called after each.

        Raises `NonFiniteError` where the loss or the gradient stops being finite.
        """
        if not self.real:
            return self._count(replica, num_steps, float("nan"))
        total = 0.0
        self.attach(replica.parameters, replica.buffers, replica.counters)
        self.model.train()
        with _preserved_rng():
            for _ in range(num_steps):
                batch = self._load(replica)
                total += self._forward_backward(replica, batch, self._gradient.zero_())
                self._step(replica)
                if on_step is not None:
                    on_step()
        self.buffer_layout.store(self.model, replica.buffers, replica.counters)
        return TrainReport(num_steps, total / num_steps, num_steps * self.units_per_batch)

    def gradient(self, replica: Replica) -> tuple[Tensor, float]:
        """The gradient [P] on the replica's next batch, and the loss; shared memory, not a copy."""
        if not self.real:
            return self._gradient, float("nan")
        self.attach(replica.parameters, replica.buffers, replica.counters)
        self.model.train()
        with _preserved_rng():
            batch = self._load(replica)
            loss = self._forward_backward(replica, batch, self._gradient.zero_())
        self.buffer_layout.store(self.model, replica.buffers, replica.counters)
        return self._gradient, loss

    def scratch(self) -> Tensor:
        """The gradient's memory [P], which each training call fills anew."""
        return self._gradient

    def check_points(self, points: Sequence[Tensor], num_batches: int) -> None:
        """Raise `ConfigError` where there are no points, one is not [P], or there is no batch."""
        size = self.layout.numel
        if not points or any(tuple(point.shape) != (size,) for point in points):
            shapes = [list(point.shape) for point in points]
            raise ConfigError(f"gradients: points of shape [{size}] needed; got shapes {shapes}")
        if num_batches < 1:
            raise ConfigError(f"gradients: num_batches must be at least 1, got {num_batches}")

    def gradients(
        self,
        replica: Replica,
        points: Sequence[Tensor],
        num_batches: int,
        on_step: Callable[[], None] | None = None,
    ) -> tuple[list[Tensor], float]:
        """Mean gradients [P] at `points` over the next batches, and the first point's mean loss.

        See `Context.gradients`. Nobody may write to `points` meanwhile; `on_step` is called after
        each evaluation.
        """
        self.check_points(points, num_batches)
        points = [point.detach().to(self.layout.dtype) for point in points]
        if not self.real:
            self._count(replica, num_batches, float("nan"))
            return [torch.empty_like(self._gradient) for _ in points], float("nan")
        sums = [torch.zeros_like(self._gradient) for _ in points]
        loss = 0.0
        self.model.train()
        try:
            with _preserved_rng():
                for _ in range(num_batches):
                    loss += self._add_gradients(replica, points, sums, on_step)
        finally:
            self._collect_gradients(self._gradient)
        if num_batches > 1:
            for total in sums:
                total.div_(num_batches)
        return sums, loss / num_batches

    def _add_gradients(
        self,
        replica: Replica,
        points: Sequence[Tensor],
        sums: Sequence[Tensor],
        on_step: Callable[[], None] | None,
    ) -> float:
        """Add the gradients on the next batch, which counts as done; the first point's loss."""
        replica.learning_rate = self._learning_rate(replica)
        batch = self._load(replica)
        drawn = _generator_states()
        floats, integers = torch.empty_like(replica.buffers), torch.empty_like(replica.counters)
        loss = 0.0
        for index, (point, total) in enumerate(zip(points, sums, strict=True)):
            self.attach(point, replica.buffers, replica.counters)
            self._collect_gradients(total)
            _set_generator_states(drawn)
            value = self._forward_backward(replica, batch, total)
            self._check_finite("gradient", float(torch.linalg.vector_norm(total)), replica)
            if index == 0:
                loss = value
                self.buffer_layout.store(self.model, floats, integers)
            if on_step is not None:
                on_step()
        replica.buffers.copy_(floats)
        replica.counters.copy_(integers)
        self._count(replica, 1, float("nan"))
        return loss

    def apply_gradient(self, replica: Replica, gradient: Tensor) -> None:
        """One inner-optimizer step with a given gradient [P]."""
        if not self.real:
            self._count(replica, 1, float("nan"))
            return
        if gradient.data_ptr() != self._gradient.data_ptr():
            self._gradient.copy_(gradient)
        self._step(replica)

    def _count(self, replica: Replica, num_steps: int, loss: float) -> TrainReport:
        replica.steps_completed += num_steps
        replica.samples_completed += num_steps * self.units_per_batch
        return TrainReport(num_steps, loss, num_steps * self.units_per_batch)

    def _load(self, replica: Replica) -> Batch:
        """The replica's next batch; the generators go on from here into the forward pass."""
        step = replica.steps_completed
        _seed_generators(derive_seed(self.seed, "step", replica.worker, step))
        return self.task.train_batch(replica.worker, step)

    def _forward_backward(self, replica: Replica, batch: Batch, flat: Tensor) -> float:
        """Add the gradient to `flat`, where backward collects it; the loss as a number."""
        for slot in self._cast:
            self._parameters[slot.name].grad = None
        loss = self.task.loss(self.model, batch)
        _check_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own stub is untyped
        for slot in self._cast:
            grad = self._parameters[slot.name].grad
            if grad is not None:
                flat[slot.offset : slot.end].view(slot.shape).add_(grad)
        value = float(loss.detach())
        self._check_finite("training loss", value, replica)
        return value

    def _step(self, replica: Replica) -> None:
        """Clip, and one update of the inner optimizer."""
        assert replica.optimizer is not None
        replica.learning_rate = self._learning_rate(replica)
        norm = float(torch.linalg.vector_norm(self._gradient))
        self._check_finite("gradient", norm, replica)
        if 0 < self.training.clip_norm < norm:
            self._gradient.mul_(self.training.clip_norm / norm)
        replica.optimizer.step(replica.learning_rate)
        self._refresh_cast(replica.parameters)
        self._count(replica, 1, float("nan"))

    def _learning_rate(self, replica: Replica) -> float:
        """The recipe's, for the replica's next inner step."""
        return learning_rate_at(replica.steps_completed, self.training, self.total_steps)

    def _check_finite(self, what: str, value: float, replica: Replica) -> None:
        if value - value != 0.0:  # NaN and infinities
            raise NonFiniteError(
                what,
                worker=replica.worker,
                step=replica.steps_completed,
                learning_rate=self._learning_rate(replica),
            )

    @contextmanager
    def _evaluating(self, parameters: Tensor, buffers: Tensor, counters: Tensor) -> Iterator[None]:
        self.attach(parameters, buffers, counters)
        self.model.eval()
        with torch.no_grad(), _seeded(derive_seed(self.seed, "evaluation")):
            yield

    def evaluate(self, parameters: Tensor, buffers: Tensor, counters: Tensor) -> EvalReport:
        """Loss and metrics of a flat vector [P] on the held-out set."""
        losses: list[float] = []
        metrics: dict[str, list[float]] = {}
        with self._evaluating(parameters, buffers, counters):
            for batch in self.task.eval_batches():
                losses.append(float(self.task.loss(self.model, batch)))
                if isinstance(self.task, Scores):
                    for name, value in self.task.metrics(self.model, batch).items():
                        metrics.setdefault(name, []).append(value)
        if not losses:
            raise ConfigError("the task has no evaluation batches")
        means = {name: sum(values) / len(values) for name, values in metrics.items()}
        return EvalReport(sum(losses) / len(losses), means)

    @property
    def predicts(self) -> bool:
        """Whether the task's models give distributions that can be compared."""
        return isinstance(self.task, Predicts)

    def predict(self, parameters: Tensor, buffers: Tensor, counters: Tensor) -> Tensor:
        """Log-probabilities on the fixed probe batch, fp32 [positions, classes]."""
        if not isinstance(self.task, Predicts):
            raise ConfigError(
                f"{type(self.task).__name__} has no predictions to compare: give it the methods "
                f"`predict(model, batch)` and `probe_batch()`"
            )
        with self._evaluating(parameters, buffers, counters):
            logits = self.task.predict(self.model, self.task.probe_batch())
            return log_probabilities(logits)

    def state_dict(
        self, parameters: Tensor, buffers: Tensor, counters: Tensor
    ) -> dict[str, Tensor]:
        """The model's own state dict for a flat vector, copied."""
        self.attach(parameters, buffers, counters)
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def _check_has_storage(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"{name!r} is on the meta device and has no values to train: build the model on "
                f'the CPU, or run with numerics = "none"'
            )


def _check_loss(loss: object) -> None:
    """Raise `ConfigError` where a task's loss cannot be differentiated."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    got = repr(loss)
    if isinstance(loss, Tensor):
        got = f"shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a gradient")
    raise ConfigError(f"the task's loss must be a scalar tensor with a gradient; got {got}")


def _seed_generators(seed: int) -> None:
    """Seed the global generators that modules draw from.

    `torch.manual_seed` would also queue the seed, with a formatted stack, for every kind of device
    that is not in use: a hundred times slower, and a queue that grows with every step.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _generator_states() -> list[Tensor]:
    """The states of the global generators that `_seed_generators` seeds."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


def _set_generator_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def _preserved_rng() -> Iterator[None]:
    """Leave the caller's global generator as it was."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generator, which modules draw from, for a while."""
    with _preserved_rng():
        _seed_generators(seed)
        yield
