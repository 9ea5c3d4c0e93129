"""`simulate`: one run of one method in the simulated world, from settings to summary."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gossamer.comm.ledger import Ledger
from gossamer.errors import ConfigError, GossamerError, Interrupted
from gossamer.measure.replicas import average, sha256_of
from gossamer.measure.settings import Measure
from gossamer.methods.base import Method, training_of
from gossamer.sim.checkpoint import load_checkpoint
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults
from gossamer.sim.listener import Listener, NullListener, StopFlag
from gossamer.sim.network import Network
from gossamer.sim.world import World, WorldSettings
from gossamer.training.engine import Engine
from gossamer.training.settings import Training
from gossamer.training.task import Prepares, Task

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SimulationResult:
    """What a run leaves.

    Args:
        parameters: [M, P], every worker's parameters after its last outer step (of a worker that
            was lost, as they were then); on the meta device without numerics.
        workers: indices of the workers that did the last round.
        summary: the run in numbers; the keys that every run folder's `summary.json` has.
        history: rounds, measurements and losses of workers, in order.
        ledger: every payload byte.
        averaged: state dict of the averaged model; empty without numerics.
    """

    parameters: Tensor
    workers: tuple[int, ...]
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    ledger: Ledger
    averaged: dict[str, Tensor]


def simulate(
    *,
    method: Method,
    task: Task,
    workers: int | None = None,
    rounds: int | None = None,
    seed: int = 0,
    training: Training | None = None,
    network: Network | None = None,
    timing: Timing | None = None,
    faults: Faults | None = None,
    measure: Measure | None = None,
    numerics: Literal["real", "none"] = "real",
    listener: Listener | None = None,
    checkpoint_every: int | None = None,
    checkpoint_dir: Path | str | None = None,
    resume: Path | str | None = None,
    stop: StopFlag | None = None,
) -> SimulationResult:
    """Train with `method` on simulated workers; the same arguments give the same bits.

    Args:
        method: the method and its hyperparameters, such as `DiLoCo(inner_steps=20)`.
        task: what is trained; see `gossamer.training.task`.
        workers, rounds: override those of `training`.
        training: inner optimizer and schedule.
        network, timing, faults: the simulated world.
        measure: what is evaluated, and how often.
        numerics: "none" puts tensors on the meta device, so that only time passes.
        listener: hears of progress.
        checkpoint_every: rounds between checkpoints; None or 0: only when stopped.
        checkpoint_dir: where they go; None: nowhere.
        resume: a checkpoint (or the folder of several) of the same settings to go on from.
        stop: asks the run to save and stop at the next round boundary.

    Raises:
        ConfigError: the settings do not fit together; nothing was done.
        Interrupted: `stop` was requested.
        GossamerError: the run failed; the notes hold the seed, the fault plan and the last events.
    """
    _check_kinds(method, task, (training, network, timing, faults, measure))
    given = {k: v for k, v in (("workers", workers), ("rounds", rounds)) if v is not None}
    values = (training or Training()).model_dump(exclude_unset=True)
    training = training_of(method, Training(**{**values, **given}))
    settings = WorldSettings(
        method=method,
        num_workers=training.workers,
        num_rounds=training.rounds,
        seed=_checked_seed(seed),
        network=network or Network(),
        timing=timing or Timing(),
        faults=faults or Faults(),
        measure=measure or Measure(),
        checkpoint_every=checkpoint_every,
        checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir is not None else None,
    )
    real = numerics == "real"
    _check(settings, numerics, resumes=resume is not None)
    engine = prepare_engine(task, training, method, seed=seed, real=real)
    method.validate_for(engine.layout, settings.num_workers)
    if getattr(method, "js_threshold", None) is not None and not engine.predicts:
        raise ConfigError("method.js_threshold needs a task with predictions")
    header = _header(settings, training, engine, numerics)
    saved = load_checkpoint(Path(resume), method.State, header) if resume is not None else None
    world = World(
        settings,
        engine,
        header=header,
        listener=listener or NullListener(),
        stop=stop or StopFlag(),
        saved=saved,
    )
    world.emit("start", {"method": method.name, "workers": settings.num_workers, "seed": seed})
    try:
        world.run()
    except Interrupted:
        raise
    except GossamerError as error:
        _explain(error, world)
        raise
    result = _result(world)
    world.emit("end", {"summary": result.summary})
    return result


def prepare_engine(
    task: Task, training: Training, method: Method, *, seed: int, real: bool
) -> Engine:
    """Tell the task about the run, and build its model. Raises `ConfigError`."""
    total_steps = training.rounds * method.inner_steps
    if isinstance(task, Prepares):
        task.prepare(num_workers=training.workers, seed=seed, num_steps=total_steps)
    return Engine(task, training, seed=seed, total_steps=total_steps, real=real)


def _check_kinds(method: object, task: object, sections: tuple[object, ...]) -> None:
    """Refuse arguments of another kind, such as the class of a task instead of a task."""
    if not isinstance(method, Method):
        raise ConfigError(
            f"method: an object such as DiLoCo(inner_steps=20) needed; got {method!r}"
        )
    for name in ("name", "State"):
        if not hasattr(method, name):
            raise ConfigError(f"method: {type(method).__name__} needs a class attribute `{name}`")
    if isinstance(task, type) or not isinstance(task, Task):
        raise ConfigError(
            "task: an object with build(), loss(model, batch), train_batch(worker, step) and "
            f"eval_batches() needed; got {task!r}"
        )
    kinds = (Training, Network, Timing, Faults, Measure)
    for section, kind in zip(sections, kinds, strict=True):
        if section is not None and not isinstance(section, kind):
            name = kind.__name__
            raise ConfigError(f"{name.lower()}: {name}(...) needed; got {section!r}")


def _checked_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed: a whole number, 0 or more, is needed; got {seed!r}")
    return seed


def _check(settings: WorldSettings, numerics: str, *, resumes: bool) -> None:
    """Refuse what cannot run, before anything is built."""
    if numerics not in ("real", "none"):
        raise ConfigError(f'numerics: "real" or "none" is needed; got {numerics!r}')
    every = settings.checkpoint_every or 0
    if every < 0:
        raise ConfigError(f"checkpoint_every: a number of rounds, 0 or more, needed; got {every}")
    if every and settings.checkpoint_dir is None:
        raise ConfigError(f"checkpoint_every = {every} needs a checkpoint_dir to write to")
    if settings.method.num_syncers and (resumes or every):
        raise ConfigError(
            f"{settings.method.name}: a run with a syncer cannot be saved and resumed yet; leave "
            "out checkpoint_every (and --resume)"
        )
    settings.network.validate_for(settings.num_workers + settings.method.num_syncers)
    settings.timing.validate_for(settings.num_workers)
    if numerics == "none":
        why = settings.method.needs_numerics()
        if why is not None:
            raise ConfigError(f'run.numerics = "none" is not possible: {why}')
        if resumes or every:
            raise ConfigError('run.numerics = "none" has nothing to save or to resume')


def _header(settings: WorldSettings, training: Training, engine: Engine, numerics: str) -> str:
    """All that decides the run, as JSON: what a resumed run must agree with."""
    return json.dumps(
        {
            "seed": settings.seed,
            "numerics": numerics,
            "method": {"name": settings.method.name, **settings.method.model_dump(mode="json")},
            "train": training.model_dump(mode="json"),
            "network": settings.network.model_dump(mode="json"),
            "timing": settings.timing.model_dump(mode="json"),
            "faults": settings.faults.model_dump(mode="json"),
            "layout": engine.layout.fingerprint(),
        },
        sort_keys=True,
    )


def _result(world: World) -> SimulationResult:
    finished = [w for w, life in enumerate(world.lives) if life.phase == "ended"]
    averaged: dict[str, Tensor] = {}
    if world.engine.real:
        vectors = [
            (r.parameters, r.buffers, r.counters) for r in (world.replicas[w] for w in finished)
        ]
        averaged = world.engine.state_dict(*average(vectors))
    return SimulationResult(
        parameters=world.rows,
        workers=tuple(finished),
        summary=_summary(world),
        history=world.history,
        ledger=world.ledger,
        averaged=averaged,
    )


def _summary(world: World) -> dict[str, Any]:
    """The run in numbers; None stands for what was not measured."""
    rounds = [event for event in world.history if event["kind"] == "round"]
    measured = [event for event in world.history if event["kind"] == "measure"]
    last = measured[-1] if measured else {}
    stats = world.stats
    finished = [s.finished_ns for s in stats if s.finished_ns is not None]
    train_s = [s.train_ns / 1e9 for s in stats]
    alive_s = [_alive_ns(s) / 1e9 for s in stats]
    total = world.ledger.total()
    samples = sum(s.samples for s in stats)
    retries = [s.records.get("retries", [0.0])[0] for s in stats]
    unit = world.engine.unit
    return {
        "schema_version": SCHEMA_VERSION,
        "method": world.method.name,
        "world": "sim",
        "workers": world.num_workers,
        "rounds": world.num_rounds,
        "inner_steps": world.method.inner_steps,
        "parameters": world.engine.layout.numel,
        "unit": unit,
        "tokens": samples if unit == "tokens" else None,
        "samples": samples,
        "train_loss": rounds[-1]["train_loss"] if rounds else None,
        "eval_loss": last.get("eval_loss"),
        "eval_perplexity": last.get("eval_perplexity"),
        "eval_accuracy": last.get("eval_accuracy"),
        "eval_excess_loss": last.get("eval_excess_loss"),
        "worker_eval_losses": last.get("worker_eval_losses"),
        "time_s": max(finished) / 1e9,
        "train_time_s": sum(train_s) / len(train_s),
        "blocked_time_s": (sum(alive_s) - sum(train_s)) / len(alive_s),
        "utilization": world.utilization(),
        "bytes_sent": round(total / world.num_workers),
        "bytes_sent_total": total,
        "bytes_by_kind": world.ledger.by_kind(),
        "consensus_l2": last.get("consensus_l2"),
        "consensus_l2_inner": last.get("consensus_l2_inner"),
        "js_distance": last.get("js_distance"),
        "js_divergence_mway": last.get("js_divergence_mway"),
        "failed_transfers": sum(s.failed_transfers for s in stats),
        "retries": int(max(retries)),
        "records": _records(world),
        "lost": world.lost,
        "seed": world.seed,
        "trace_hash": world.trace.hash(),
        "parameters_sha256": sha256_of(world.rows),
    }


def _alive_ns(stats: Any) -> int:
    alive: int = stats.alive_ns
    if stats.alive_since_ns is not None and stats.finished_ns is not None:
        alive += stats.finished_ns - stats.alive_since_ns
    return alive


def _records(world: World) -> dict[str, dict[str, float]]:
    """What the method recorded, over all workers and rounds: how often, and the mean."""
    totals: dict[str, list[float]] = {}
    for stats in [*world.stats, *world.syncers.stats.values()]:
        for name, (count, total) in stats.records.items():
            cell = totals.setdefault(name, [0.0, 0.0])
            cell[0] += count
            cell[1] += total
    return {name: {"count": c, "mean": t / c} for name, (c, t) in sorted(totals.items())}


def _explain(error: GossamerError, world: World) -> None:
    """Attach what is needed to understand and to replay a failure."""
    plan = world.plan.describe()
    error.add_note(f"seed {world.seed}, at {world.loop.time():.6f} s of virtual time")
    error.add_note("fault plan: " + ("; ".join(plan) if plan else "none"))
    error.add_note("last events:\n" + world.trace.tail())
    overrides = shlex.quote(f"seed={world.seed}")
    error.add_note(f"replay: gossamer train RUN/config.toml --set {overrides} --out REPLAY")
