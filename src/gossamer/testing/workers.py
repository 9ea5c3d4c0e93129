"""Run a coroutine once per worker in the simulated world, without a method or a model to train.

    async def work(ctx, round_):
        values = torch.full((10,), float(ctx.worker))
        await all_reduce_mean(ctx, round_.tag("sum"), round_.members.workers, values)
        return values

    outcome = run_workers(4, work, network=Network(latency="10ms"))
    outcome.results[0]      # 1.5 everywhere

A check written against `Run` holds in any world that can start workers this way.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from gossamer.comm.context import Context, MethodState, Round
from gossamer.comm.ledger import Ledger
from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods.base import Method
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults
from gossamer.sim.listener import NullListener, StopFlag
from gossamer.sim.network import Network
from gossamer.sim.world import World, WorldSettings
from gossamer.training.engine import Engine
from gossamer.training.problems import Quadratic
from gossamer.training.replica import Replica
from gossamer.training.settings import Training
from gossamer.training.task import Task

T = TypeVar("T")
Work = Callable[[Context, Round], Coroutine[Any, Any, T]]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What the workers left.

    Args:
        results: what each worker returned, by worker; those that were lost are not in it.
        lost: workers that did not get to the end, as in a run's summary.
        records: what was recorded, by worker and name: (how often, sum).
        ledger: every payload byte.
        time_s: virtual time at which the last worker was done.
        trace_hash: of everything that happened.
    """

    results: dict[int, T]
    lost: list[dict[str, Any]]
    records: dict[int, dict[str, tuple[int, float]]]
    ledger: Ledger
    time_s: float
    trace_hash: str

    def recorded(self, name: str) -> float:
        """The sum of what all workers recorded under `name`."""
        return sum(own[name][1] for own in self.records.values() if name in own)


class Run(Protocol):
    """A world that runs `work` once on each of `num_workers` workers, for portable checks."""

    def __call__(self, num_workers: int, work: Work[T]) -> Outcome[T]:
        """Results by worker. An error that leaves `work` ends the run and is raised."""


def run_workers(
    num_workers: int,
    work: Work[T],
    *,
    network: Network | None = None,
    timing: Timing | None = None,
    faults: Faults | None = None,
    task: Task | None = None,
    training: Training | None = None,
    num_rounds: int = 1,
    seed: int = 0,
) -> Outcome[T]:
    """Run `work(ctx, round_)` on each worker for each round, in virtual time.

    Args:
        num_workers: workers; at least 1.
        work: what a worker does in one round; what it returns in the last one is its result.
        network, timing, faults: the simulated world; by default a fast one where nothing fails.
        task, training: what `ctx.train` does; by default steps on a small quadratic.
        num_rounds: how often `work` is called on each worker.
        seed: of everything that is drawn.

    Raises:
        ConfigError: the settings do not fit together.
        GossamerError: what `work` raised and the world does not take for the loss of one worker
            (`NonFiniteError` and `OutOfSync` are such losses), or what the world found.
    """
    if num_workers < 1 or num_rounds < 1:
        raise ConfigError(f"at least one worker and round, got {num_workers=}, {num_rounds=}")
    results: dict[int, T] = {}
    settings = WorldSettings(
        method=_scripted(work, results),
        num_workers=num_workers,
        num_rounds=num_rounds,
        seed=seed,
        network=network or Network(),
        timing=timing or Timing(),
        faults=faults or Faults(),
        measure=Measure(every=0),
    )
    engine = Engine(
        task or Quadratic(num_parameters=4, num_workers=num_workers),
        training or Training(),
        seed=seed,
        total_steps=num_rounds,
        real=True,
    )
    world = World(settings, engine, header="", listener=NullListener(), stop=StopFlag())
    world.run()
    return Outcome(
        results=dict(sorted(results.items())),
        lost=world.lost,
        records={
            worker: {name: (int(count), total) for name, (count, total) in stats.records.items()}
            for worker, stats in enumerate(world.stats)
        },
        ledger=world.ledger,
        time_s=max(s.finished_ns for s in world.stats if s.finished_ns is not None) / 1e9,
        trace_hash=world.trace.hash(),
    )


def _scripted(work: Work[T], results: dict[int, T]) -> Method:
    """A method whose rounds are `work`."""

    class Scripted(Method):
        name: ClassVar[str] = "scripted"
        State: ClassVar[type[MethodState]] = MethodState

        def init(self, replica: Replica) -> MethodState:
            return MethodState()

        async def run(self, ctx: Context, state: MethodState) -> None:
            async for round_ in ctx.rounds(state):
                result = await work(ctx, round_)
            results[ctx.worker] = result

    return Scripted(inner_steps=1)
