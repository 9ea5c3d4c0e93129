"""Taking part in a run from a program of one's own: any model, any optimizer, any loop.

with gm.join("10.0.0.1:7700", method=gm.DiLoCo(inner_steps=50), model=model,
             optimizer=optimizer) as run:
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if not run.step(loss):
            break
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.cluster.certs import Credentials, certified_worker
from gossamer.cluster.control import Client
from gossamer.cluster.job import KEEPALIVE_S, own_configuration
from gossamer.cluster.own_model import OwnModel, Predict
from gossamer.cluster.worker import WorkerProcess
from gossamer.comm.donation import Moments
from gossamer.errors import ConfigError
from gossamer.methods.base import Method
from gossamer.training.settings import Training

Events = Callable[[str, dict[str, Any]], None]


def _silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class OwnWork:
    """A run whose training is not Gossamer's; see `gossamer.cluster.job.Work`."""

    method: Method
    training: Training
    seed: int
    deadline_s: float
    checkpoint_every: int
    moments: Moments
    own: OwnModel
    keepalive_s: float = KEEPALIVE_S
    step_time_s: float = 0.0
    starts_differ: bool = True

    @cached_property
    def configuration(self) -> dict[str, Any]:
        return own_configuration(
            self.method,
            workers=self.training.workers,
            rounds=self.training.rounds,
            seed=self.seed,
            deadline_s=self.deadline_s,
            moments=self.moments,
        )

    def build_engine(self) -> OwnModel:
        """The user's own. Raises `ConfigError` where the method does not fit it."""
        self.method.validate_for(self.own.layout, self.training.workers)
        return self.own


@dataclass(frozen=True)
class _Options:
    """How to take part, as `join` was told."""

    address: str
    method: Method
    seed: int
    worker: int | None
    listen: str
    advertise: str | None
    certificates: Path | None
    folder: Path | None
    checkpoint_every: int
    rejoin_moments: Moments
    events: Events


def join(
    address: str,
    *,
    method: Method,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    predict: Predict | None = None,
    seed: int = 0,
    worker: int | None = None,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    certificates: Path | str | None = None,
    folder: Path | str | None = None,
    checkpoint_every: int = 1,
    rejoin_moments: Moments = "donor",
    events: Events = _silent,
) -> Run:
    """Take part in the run of the coordinator at `address`, with a training loop of one's own.

    The coordinator is started by `gossamer coordinator --method NAME:... --workers N --rounds N`.
    All new workers begin with the parameters of the first one. What comes of `with` is a `Run`.

    Args:
        address: HOST:PORT of the coordinator.
        method: how the workers agree; the coordinator's.
        model: updated in place. Its trainable parameters become views of one flat fp32 vector
            where they are fp32 on the CPU, and are copied from and to it at the rounds otherwise.
        optimizer: only so that a worker that joins later can take over its state.
        predict: logits of the model on a fixed batch, for methods that compare predictions.
        seed: of the run; the coordinator's.
        worker: the index wanted; None: the one in the certificate, or any that is free.
        listen: HOST:PORT where this worker listens; port 0 takes a free one.
        advertise: the address that the others are told; by default the one listened on.
        certificates: folder of this worker's certificate; None on loopback only.
        folder: for checkpoints and results; None: none are written.
        checkpoint_every: rounds between checkpoints; 0: none.
        rejoin_moments: whose optimizer state a joiner goes on with.
        events: hears of rounds, joins and losses, in another thread.

    Raises `ConfigError` for a method that must see each step's gradient, or has a syncer.
    """
    if method.moments_are_shared or method.makes_own_steps:
        uses = "makes its own steps from" if method.makes_own_steps else "averages"
        raise ConfigError(
            f"{method.name} {uses} the gradients of each step, which a loop of one's own does "
            f"not hand over; local_sgd with inner_steps = 1 averages the parameters after each"
        )
    if method.num_syncers:
        raise ConfigError(
            f"{method.name} has a syncer, which must know the model: it runs from a recipe, by "
            f"`gossamer launch` or `gossamer worker` and `gossamer syncer`"
        )
    options = _Options(
        address=address,
        method=method,
        seed=seed,
        worker=worker,
        listen=listen,
        advertise=advertise,
        certificates=None if certificates is None else Path(certificates),
        folder=None if folder is None else Path(folder),
        checkpoint_every=checkpoint_every,
        rejoin_moments=rejoin_moments,
        events=events,
    )
    return Run(OwnModel(model, optimizer, predict), options)


class Run:
    """One worker's part in a run; use as a context manager. Made by `join`.

    Entering waits until the run begins, or until a donor's state is here. Leaving before the run
    is over leaves the run, and the others go on.
    """

    def __init__(self, own: OwnModel, options: _Options) -> None:
        self._own, self._options = own, options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gossamer")
        self._result: Future[dict[str, Any]] | None = None
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._process: WorkerProcess | None = None
        self._num_workers = self._num_rounds = 0

    def __enter__(self) -> Run:
        self._result = self._thread.submit(asyncio.run, self._take_part())
        self._result.add_done_callback(lambda _: self._own.end())
        try:
            if not self._own.wait():
                self._raise_failure()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def step(self, loss: Tensor | float | None = None, *, num_samples: int = 0) -> bool:
        """Say that an inner step is done; at the end of a round, wait until the workers agree.

        Args:
            loss: of the step, for the reports.
            num_samples: what the step was trained on, for the totals.

        Returns whether the run goes on. Raises what has ended this worker's part otherwise.
        """
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        value = float("nan") if loss is None else float(loss)
        if self._own.step(value, num_samples):
            return True
        self._raise_failure()
        return False

    @property
    def worker(self) -> int:
        """My index, 0 .. num_workers - 1."""
        return self._own.replica.worker

    @property
    def num_workers(self) -> int:
        """Workers that the run was planned for."""
        return self._num_workers

    @property
    def num_rounds(self) -> int:
        """Rounds that the run will do."""
        return self._num_rounds

    @property
    def rounds_completed(self) -> int:
        """Rounds that are done."""
        return 0 if self._process is None else self._process.progress.rounds_completed

    @property
    def steps_completed(self) -> int:
        """Inner steps that are done; a joiner has its donor's, for the learning-rate schedule."""
        return self._own.replica.steps_completed

    @property
    def over(self) -> bool:
        """Whether the run is over."""
        return self._result is not None and self._result.done()

    @property
    def summary(self) -> dict[str, Any]:
        """This worker's figures, after the run. Raises `ConfigError` where there are none."""
        if self._result is None or not self._result.done() or self._result.exception() is not None:
            raise ConfigError("a worker has figures when it has done the last round")
        return self._result.result()

    # ------------------------------------------------------------------------------------- inside

    def _raise_failure(self) -> None:
        assert self._result is not None
        with contextlib.suppress(asyncio.CancelledError):
            self._result.result()

    def _leave(self) -> None:
        """End the network's thread, and hear it out."""
        if self._result is not None and not self._result.done():
            self._begun.wait()
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # it has ended in this moment
                self._loop.call_soon_threadsafe(self._stop)
            self._own.end()
        self._thread.shutdown(wait=True)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        if self._main is not None:
            self._main.cancel()

    async def _take_part(self) -> dict[str, Any]:
        """All that the network's thread does."""
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        self._begun.set()
        options = self._options
        folder, index = options.certificates, options.worker
        credentials = None
        if folder is not None:
            index = certified_worker(folder) if index is None else index
            credentials = Credentials.load(folder, f"worker-{index}")
        client = Client(options.address, credentials=credentials)
        try:
            status = await client.status()
        finally:
            await client.close()
        self._num_workers, self._num_rounds = status.num_workers, status.num_rounds
        work = OwnWork(
            method=options.method,
            training=Training(workers=status.num_workers, rounds=status.num_rounds),
            seed=options.seed,
            deadline_s=status.deadline_s,
            checkpoint_every=options.checkpoint_every,
            moments=options.rejoin_moments,
            own=self._own,
        )
        self._process = WorkerProcess(
            work,
            coordinator=options.address,
            listen=options.listen,
            advertise=options.advertise,
            credentials=credentials,
            folder=options.folder,
            worker=index,
            events=options.events,
            digests=False,
        )
        return await self._process.run()
