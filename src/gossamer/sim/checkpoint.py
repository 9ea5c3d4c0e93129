"""Checkpoints of a simulated run, taken without disturbing it.

A checkpoint is a consistent cut: every worker as it was when it passed the boundary before round r,
and the transfers of earlier rounds that were still on the network then or later, because they take
their share of the links from what comes after. Nobody waits for these payloads (a message of a
round that its receiver has completed is refused), so their bytes need not be kept.

A boundary during which a worker dies, returns or is given up is not saved; the next one is.

Layout of a checkpoint folder `round-000012`: `worker-003.safetensors` for each worker that takes
part in round 12, and `state.json` with everything else. It is written beside its final name and
renamed when complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.comm.context import MethodState, Tag
from gossamer.comm.ledger import Entry
from gossamer.comm.members import MemberLog
from gossamer.comm.state import state_scalars, state_tensors, with_tensors
from gossamer.errors import CheckpointError, ConfigError
from gossamer.fingerprint import first_difference
from gossamer.sim.context import SimContext, WorkerStats
from gossamer.sim.flow import Flow
from gossamer.sim.lives import Absence
from gossamer.sim.post import flow_from_json, flow_to_json, of_earlier_round
from gossamer.training.replica import Replica

if TYPE_CHECKING:
    from gossamer.sim.world import World

SCHEMA_VERSION = 1
KEPT = 2  # newest checkpoints that stay on disk


def folder_of(root: Path, round_index: int) -> Path:
    """Where the checkpoint after `round_index` completed rounds lies."""
    return root / f"round-{round_index:06d}"


@dataclass
class CheckpointWriter:
    """Collects one cut while workers pass it."""

    round_index: int
    folder: Path
    begun_ns: int
    begun: dict[str, Any]  # what the world was like when the first worker passed
    num_history: int
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    ledger: list[Entry] = field(default_factory=list)

    @classmethod
    def begin(cls, world: World, round_index: int) -> CheckpointWriter | None:
        """The first worker is at the boundary; None while somebody is on the way in or out."""
        if any(life.phase in ("expelled", "joining") for life in world.lives):
            return None
        root = world.settings.checkpoint_dir
        if root is None:
            raise ConfigError("a checkpoint is wanted, and there is no folder for it")
        folder = folder_of(root, round_index)
        aside = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        world.post.start_log(round_index)
        flying = [
            {"flow": flow_to_json(flow), "snapshot": flow.snapshot()}
            for flow in world.network.active_flows()
            if of_earlier_round(flow.tag, round_index)
        ]
        begun = {
            "members": world.members.dump(),
            "absent": {
                str(worker): _absent(world, worker)
                for worker, life in enumerate(world.lives)
                if life.phase == "down"
            },
            "join_attempts": world.joins.attempts,
            "lost": list(world.lost),
            "flying": flying,
        }
        writer = cls(round_index, folder, world.loop.time_ns(), begun, len(world.history))
        for worker, life in enumerate(world.lives):
            if life.phase == "down":
                writer._save_tensors(world.replicas[worker], {})
        return writer

    @property
    def _aside(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.partial")

    def abandon(self, world: World) -> None:
        """Somebody died or returned: this boundary is not saved."""
        world.post.take_log(self.round_index)
        shutil.rmtree(self._aside)

    def _save_tensors(self, replica: Replica, more: dict[str, Tensor]) -> None:
        assert replica.optimizer is not None  # only runs with numerics are saved
        tensors = {"parameters": replica.parameters, "buffers": replica.buffers}
        tensors["counters"] = replica.counters
        tensors |= {f"moments.{n}": t for n, t in replica.optimizer.state_tensors().items()}
        path = self._aside / f"worker-{replica.worker:03d}.safetensors"
        whole = {name: tensor.contiguous().clone() for name, tensor in (tensors | more).items()}
        try:
            save_file(whole, path)
        except SafetensorError as error:  # a full disk, as the library says it
            shutil.rmtree(self._aside, ignore_errors=True)
            raise OSError(f"cannot write {path}: {error}") from None

    def add_worker(self, world: World, ctx: SimContext, state: MethodState) -> None:
        """Save one worker as it passes the boundary."""
        replica = ctx.replica
        self._save_tensors(replica, {f"state.{n}": t for n, t in state_tensors(state).items()})
        self.workers[ctx.worker] = {
            "time_ns": world.loop.time_ns(),
            "state": state_scalars(state),
            "stats": dataclasses.asdict(ctx.stats),
            "chain": world.trace.chain(ctx.worker),
            **_counters(replica),
        }
        own = world.ledger.of_sender(ctx.worker)
        self.ledger += [entry for entry in own if entry.kind != "join"]

    def commit(self, world: World) -> None:
        """All have passed: write the rest, and give the folder its name."""
        later = world.history[self.num_history :]
        # Those who passed have given their own entries; the others have sent nothing since.
        rest = [
            entry
            for entry in world.ledger.entries()
            if entry.sender not in self.workers or entry.kind == "join"
            if of_earlier_round(Tag(entry.kind, entry.round_index), self.round_index)
        ]
        document = {
            "schema_version": SCHEMA_VERSION,
            "header": json.loads(world.header),
            "round": self.round_index,
            "time_ns": self.begun_ns,
            "begun": self.begun,
            "workers": {str(worker): saved for worker, saved in sorted(self.workers.items())},
            "later": world.post.take_log(self.round_index),
            "history": world.history[: self.num_history] + later,
            "ledger": [list(entry) for entry in self.ledger + rest],
        }
        with (self._aside / "state.json").open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(self.folder, ignore_errors=True)
        self._aside.rename(self.folder)
        _rotate(self.folder.parent)
        world.emit("checkpoint", {"round": self.round_index, "path": str(self.folder)})


def _rotate(root: Path) -> None:
    for old in sorted(root.glob("round-*"))[:-KEPT]:
        shutil.rmtree(old)


def _absent(world: World, worker: int) -> dict[str, Any]:
    life = world.lives[worker]
    return {
        "return_ns": life.absence.return_ns if life.absence else None,
        "reason": life.absence.reason if life.absence else "",
        "stats": dataclasses.asdict(world.stats[worker]),
        "chain": world.trace.chain(worker),
        **_counters(world.replicas[worker]),
    }


def _counters(replica: Replica) -> dict[str, Any]:
    return {
        "steps_completed": replica.steps_completed,
        "samples_completed": replica.samples_completed,
        "learning_rate": replica.learning_rate,
    }


@dataclass(frozen=True)
class SavedWorker:
    """One worker at the boundary, or as it was when it went away."""

    time_ns: int  # when it passed
    state: MethodState | None  # None: it is away
    absence: Absence | None
    parameters: Tensor
    buffers: Tensor
    counters: Tensor
    moments: dict[str, Tensor]
    stats: WorkerStats
    chain: str
    steps_completed: int
    samples_completed: int
    learning_rate: float


@dataclass(frozen=True)
class Saved:
    """A loaded checkpoint."""

    round_index: int
    time_ns: int
    members: MemberLog
    workers: dict[int, SavedWorker]
    join_attempts: list[int]
    history: list[dict[str, Any]]
    lost: list[dict[str, Any]]
    ledger: list[Entry]
    flying: list[dict[str, Any]]
    later: dict[str, list[dict[str, Any]]]

    def restore_network(self, world: World) -> None:
        """Put the old transfers back: they take their share of the links until they end."""
        flows = [(flow_from_json(entry["flow"]), entry["snapshot"]) for entry in self.flying]
        world.network.restore(flows)
        by_key = {_key(flow): flow for flow, _ in flows}
        for entry in self.later["started"]:
            flow = flow_from_json(entry["flow"])
            by_key[_key(flow)] = flow
            world.loop.call_at_ns(entry["time_ns"], world.network.start, flow)
        for entry in self.later["cancelled"]:
            cancelled = by_key.get(_key(flow_from_json(entry["flow"])))
            if cancelled is not None:
                world.loop.call_at_ns(entry["time_ns"], world.network.cancel, cancelled)


def _key(flow: Flow) -> tuple[int, int, Tag]:
    return (flow.src, flow.dst, flow.tag)


def newest(root: Path) -> Path:
    """The newest complete checkpoint below `root`; `root` itself where it is one."""
    if (root / "state.json").is_file():
        return root
    found = sorted(root.glob("round-*/state.json"))
    if not found:
        raise ConfigError(
            f"no checkpoint in {root}; runs save one every `run.checkpoint_every` rounds"
        )
    return found[-1].parent


def load_checkpoint(path: Path, kind: type[MethodState], header: str) -> Saved:
    """Read a checkpoint made with the same settings.

    Args:
        path: a checkpoint folder, or the folder that holds them (then the newest).
        kind: the method's state class.
        header: the present run's settings as JSON; any difference is a `ConfigError` naming it.

    Raises `ConfigError` or, for damaged files, `CheckpointError`.
    """
    folder = newest(path)
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'state.json'} cannot be read: {error}") from None
    if document.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(f"{folder} has schema {document.get('schema_version')}, not 1")
    difference = first_difference(document["header"], json.loads(header))
    if difference is not None:
        raise ConfigError(
            f"{folder} belongs to another configuration: {difference}; resume with the run's own"
        )
    begun = document["begun"]
    workers = {
        int(worker): _load_worker(folder, int(worker), saved, kind)
        for worker, saved in (begun["absent"] | document["workers"]).items()
    }
    return Saved(
        round_index=document["round"],
        time_ns=document["time_ns"],
        members=MemberLog.load(begun["members"]),
        workers=workers,
        join_attempts=begun["join_attempts"],
        history=document["history"],
        lost=begun["lost"],
        ledger=[Entry(*entry) for entry in document["ledger"]],
        flying=begun["flying"],
        later=document["later"],
    )


def _load_worker(
    folder: Path, worker: int, saved: dict[str, Any], kind: type[MethodState]
) -> SavedWorker:
    path = folder / f"worker-{worker:03d}.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    fields = {n.removeprefix("state."): t for n, t in tensors.items() if n.startswith("state.")}
    here = "state" in saved
    return SavedWorker(
        time_ns=saved["time_ns"] if here else 0,
        state=with_tensors(kind, fields, saved["state"]) if here else None,
        absence=None if here else Absence(saved["return_ns"], saved["reason"]),
        parameters=tensors["parameters"],
        buffers=tensors["buffers"],
        counters=tensors["counters"],
        moments={
            n.removeprefix("moments."): t for n, t in tensors.items() if n.startswith("moments.")
        },
        stats=WorkerStats(**saved["stats"]),
        chain=saved["chain"],
        steps_completed=saved["steps_completed"],
        samples_completed=saved["samples_completed"],
        learning_rate=saved["learning_rate"],
    )
