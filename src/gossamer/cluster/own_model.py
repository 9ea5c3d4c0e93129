"""A user's own model and optimizer, seen as a replica that somebody else trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gossamer.cluster.context import Stopped
from gossamer.comm.context import TrainReport
from gossamer.errors import ConfigError, NonFiniteError
from gossamer.training.buffers import BufferLayout
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica

Predict = Callable[[nn.Module], Tensor]


class OwnModel:
    """What a worker process needs of an engine, for a model whose training loop is the user's.

    Two threads take turns. The network's asks for a number of inner steps (`train`) and waits; the
    user's does them, each ended by `step`, which waits in its turn where none is wanted. So the
    parameters belong to one of them at any time.

    Parameters on the CPU with the flat vector's type become views of it; others (on a GPU, or of
    low precision) are copied at the turns. The parameter objects stay, so optimizers keep working.
    """

    units_per_batch = 1

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, predict: Predict | None
    ) -> None:
        self.model, self._predict = model, predict
        self.optimizer = None if optimizer is None else OwnOptimizer(optimizer)
        self.layout = ParameterLayout.of(model)
        self._buffers = BufferLayout.of(model)
        self._flat = torch.empty(self.layout.numel, dtype=self.layout.dtype)
        parameters = dict(model.named_parameters())
        self._copied: list[tuple[Tensor, Tensor]] = []  # the model's own, its place in the vector
        for name, view in self.layout.views(self._flat).items():
            own = parameters[name]
            if own.is_meta:
                raise ConfigError(f"{name!r} is on the meta device and has no values to train")
            view.copy_(own.detach())
            if own.device.type == "cpu" and own.dtype is self.layout.dtype:
                own.data = view
            else:
                self._copied.append((own.data, view))
        self.replica = self._new_replica()
        self._scratch: Tensor | None = None
        self._turn = threading.Condition()
        self._left = 0  # steps that the user has yet to do in this turn
        self._users = True  # the user's thread is not waiting in here
        self._over = False
        self._loss_sum, self._num_samples = 0.0, 0

    def _new_replica(self) -> Replica:
        floats = torch.empty(self._buffers.num_floats, dtype=self._buffers.dtype)
        integers = torch.empty(self._buffers.num_integers, dtype=torch.int64)
        self._buffers.store(self.model, floats, integers)
        return Replica(
            worker=0,
            layout=self.layout,
            parameters=self._flat,
            buffers=floats,
            counters=integers,
            optimizer=self.optimizer,
        )

    # ------------------------------------------------------------------------ the network's thread

    def new_replicas(self, num_workers: int) -> tuple[Tensor, list[Replica]]:
        """The one replica that there is, as it is now."""
        return self._flat.unsqueeze(0), [self.replica]

    def train(
        self, replica: Replica, num_steps: int, on_step: Callable[[], None] | None = None
    ) -> TrainReport:
        """Let the user do `num_steps` inner steps; `on_step` is called after each."""
        self._to_model()
        with self._turn:
            self._loss_sum, self._num_samples = 0.0, 0
            self._left = num_steps
            self._turn.notify_all()
        try:
            for done in range(1, num_steps + 1):
                self._wait_for_step(num_steps - done)
                if on_step is not None:
                    on_step()
        finally:
            with self._turn:  # also where it was stopped in between: the user's step ends first
                self._left = 0
                self._turn.wait_for(lambda: not self._users or self._over)
        self._from_model()
        self._check_finite()
        if self.optimizer is not None:
            self.optimizer.check()
        return TrainReport(num_steps, self._loss_sum / num_steps, self._num_samples)

    def _wait_for_step(self, left: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._left <= left or self._over)
            if self._left > left:
                raise Stopped

    def _check_finite(self) -> None:
        if not bool(torch.isfinite(self._flat).all()):
            raise NonFiniteError(
                "a parameter",
                worker=self.replica.worker,
                step=self.replica.steps_completed,
                learning_rate=self.replica.learning_rate,
            )

    def scratch(self) -> Tensor:
        """A vector [P] of our own: the gradients are the user's."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self._flat)
        return self._scratch

    def gradient(self, replica: Replica) -> tuple[Tensor, float]:
        """Not possible: the user's loop applies its gradients itself."""
        raise ConfigError("a training loop of one's own hands over parameters, not gradients")

    def check_points(self, points: Sequence[Tensor], num_batches: int) -> None:
        """No points are possible: the user's loop chooses where it takes its gradients."""
        raise ConfigError("a training loop of one's own hands over parameters, not gradients")

    def gradients(
        self,
        replica: Replica,
        points: Sequence[Tensor],
        num_batches: int,
        on_step: Callable[[], None] | None = None,
    ) -> tuple[list[Tensor], float]:
        """Not possible either."""
        raise ConfigError("a training loop of one's own hands over parameters, not gradients")

    def apply_gradient(self, replica: Replica, gradient: Tensor) -> None:
        """Not possible either."""
        raise ConfigError("a training loop of one's own hands over parameters, not gradients")

    def predict(self, parameters: Tensor, buffers: Tensor, counters: Tensor) -> Tensor:
        """Log-probabilities by the user's `predict`, fp32 [positions, classes]."""
        if self._predict is None:
            raise ConfigError(
                "this method compares predictions: give `predict=`, a function of the model that "
                "returns its logits on a fixed batch, the same on all workers"
            )
        self._to_model()
        trained = self.model.training
        self.model.eval()
        with torch.no_grad():
            logits = self._predict(self.model)
        self.model.train(trained)
        return torch.log_softmax(logits.flatten(0, -2).float(), dim=-1).cpu()

    def _to_model(self) -> None:
        for own, view in self._copied:
            own.copy_(view)
        self._buffers.load(self.model, self.replica.buffers, self.replica.counters)

    def _from_model(self) -> None:
        for own, view in self._copied:
            view.copy_(own)
        self._buffers.store(self.model, self.replica.buffers, self.replica.counters)

    def end(self) -> None:
        """The run is over, or this worker's part in it: the user waits no longer."""
        with self._turn:
            self._over = True
            self._turn.notify_all()

    # --------------------------------------------------------------------------- the user's thread

    def step(self, loss: float, num_samples: int) -> bool:
        """An inner step is done; waits where none is wanted. Whether more are."""
        with self._turn:
            if self._over:
                return False
            replica = self.replica
            replica.steps_completed += 1
            replica.samples_completed += num_samples
            if self.optimizer is not None:
                replica.learning_rate = self.optimizer.learning_rate
            self._loss_sum += loss
            self._num_samples += num_samples
            if self._left > 0:
                self._left -= 1
        return self.wait()

    def wait(self) -> bool:
        """Until steps are wanted; False where the run is over."""
        with self._turn:
            self._users = False
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._left > 0 or self._over)
            self._users = True
            if not self._over:
                return True
        self._to_model()
        return False


class OwnOptimizer:
    """The state of a user's optimizer as named tensors, which a joiner takes from its donor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def learning_rate(self) -> float:
        """Of the first group."""
        return float(self._optimizer.param_groups[0].get("lr", 0.0))

    def step(self, learning_rate: float) -> None:
        """Not possible: the user's loop steps."""
        raise ConfigError("a training loop of one's own steps its optimizer itself")

    def check(self) -> None:
        """Raise `ConfigError` for an optimizer that keeps anything but tensors."""
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if value is not None and not isinstance(value, Tensor):
                    raise ConfigError(
                        f"{type(self._optimizer).__name__} keeps {key!r} as "
                        f"{type(value).__name__}, not as a tensor, and cannot be handed to a "
                        f"joiner; leave out `optimizer=`, and joiners begin with a fresh one"
                    )

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and counters as "parameter.name", on the CPU."""
        return {
            f"{index}.{key}": value.detach().cpu()
            for index, state in self._optimizer.state_dict()["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def load_state_tensors(self, tensors: dict[str, Tensor], *, copy: bool = True) -> None:
        """See `KeepsMoments.load_state_tensors`."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value.clone() if copy else value
        whole = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**whole, "state": state})
