"""Worker and coordinator processes for tests: held at named points, killed, stopped, asked.

`python programs.py SOCKET` imports everything once and then forks a process for each line that it
reads: `{"program": "worker", ...}`. Each process connects to the test's SOCKET and tells its events
there, one JSON object a line. A process that was told to hold at a point stands still there, until
the test writes a line to it or kills it: nothing has to be guessed with sleeps.

The points, each with a round (or null: the first time):

    training           in the middle of the inner steps
    send:KIND          before the first message of this kind is sent
    sending:KIND       all of a message is out but its checksum
    received:KIND      a message has come and is not yet used
    saving             a checkpoint's tensors are written, and it is not complete

`python programs.py '{...}'` is one worker that prints its events.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gossamer.cluster.checkpoint
import gossamer.cluster.worker
from gossamer.cluster.certs import COORDINATOR, Credentials, worker_name
from gossamer.cluster.context import ClusterContext
from gossamer.cluster.control import Client
from gossamer.cluster.coordinator import serve
from gossamer.cluster.job import Job
from gossamer.cluster.outbox import Sending
from gossamer.cluster.plan import CoordinatorSettings
from gossamer.cluster.syncer import SyncerProcess
from gossamer.cluster.worker import WorkerProcess
from gossamer.comm.context import MethodState, Tag
from gossamer.comm.donation import digest
from gossamer.errors import GossamerError
from gossamer.methods import build_method
from gossamer.methods.decoupled_diloco import LearnerState, SyncerState
from gossamer.testing.agent import enter_namespace
from gossamer.training.problems import TinyMLP
from gossamer.training.replica import Replica
from gossamer.training.settings import Training

Tell = Callable[[str, dict[str, Any]], None]
_lock = threading.Lock()


class Holds:
    """Where this process is to stand still."""

    def __init__(self, wanted: list[list[Any]], tell: Tell) -> None:
        self._wanted = {(point, round_index) for point, round_index in wanted}
        self._tell = tell
        self._released = threading.Semaphore(0)
        self.told = False

    def release(self) -> None:
        self.told = True
        self._released.release()

    def reach(self, point: str, round_index: int) -> None:
        """Stand still here, once, if that is wanted."""
        met = self._wanted & {(point, round_index), (point, None)}
        if met:
            self._wanted -= met
            self._tell("held", {"point": point, "round": round_index})
            self._released.acquire()


class HeldTask(TinyMLP):
    """The problem, which can be held or spoilt at a step."""

    def __init__(self, options: dict[str, Any], reach: Callable[[str, int], None]) -> None:
        super().__init__(num_hidden=options.get("hidden", 16))
        self._reach = reach
        self._inner_steps = options.get("hyperparameters", {}).get("inner_steps", 100)
        self._spoilt_step = options.get("nan_step", -1)

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        if step % self._inner_steps == self._inner_steps // 2:
            self._reach("training", step // self._inner_steps)
        inputs, targets = super().train_batch(worker, step)
        if step == self._spoilt_step:
            targets = targets * float("nan")
        return inputs, targets


def hold_at(holds: Holds, mute: dict[str, int]) -> None:
    """Put the points into the library's own code.

    Messages with all of `mute`'s properties (fields of a tag, and the receiver) are never written.
    """
    put, recv, send = Sending._put, ClusterContext.recv, ClusterContext.send
    write_tensors = gossamer.cluster.checkpoint.write_tensors

    async def _put(self: Sending, call: Any, frame: bytes) -> None:
        told = {"receiver": self.header.receiver, **self.header.tag._asdict()}
        if mute and mute.items() <= told.items():
            await asyncio.Event().wait()
        num_bytes = self.header.num_bytes
        place: int = self.__dict__.get("place", -1)  # -1: the header is next
        if place >= num_bytes and (self.header.tag.kind != "join" or self.header.tag.part):
            holds.reach(f"sending:{self.header.tag.kind}", self.header.tag.round_index)
        self.__dict__["place"] = 0 if place < 0 else place + len(frame)
        await put(self, call, frame)

    def held_send(self: ClusterContext, dst: int, tag: Tag, *args: Any, **options: Any) -> Any:
        holds.reach(f"send:{tag.kind}", tag.round_index)
        return send(self, dst, tag, *args, **options)

    async def held_recv(self: ClusterContext, src: int, tag: Tag, **options: Any) -> Tensor:
        payload = await recv(self, src, tag, **options)
        holds.reach(f"received:{tag.kind}", tag.round_index)
        return payload

    def held_write(path: Path, tensors: Mapping[str, Tensor]) -> None:
        write_tensors(path, tensors)
        if path.parent.name.startswith((".round-", ".merge-")):
            holds.reach("saving", int(path.parent.name.split("-")[1].split(".")[0]))

    Sending._put = _put  # type: ignore[method-assign]
    ClusterContext.send = held_send  # type: ignore[method-assign]
    ClusterContext.recv = held_recv  # type: ignore[method-assign]
    gossamer.cluster.checkpoint.write_tensors = held_write


def be_quiet(holds: Holds) -> None:
    """Report nothing to the coordinator until the test writes a line."""
    report = Client.report

    async def quiet_report(self: Client, **options: Any) -> bool:
        return await report(self, **options) if holds.told else False

    Client.report = quiet_report  # type: ignore[method-assign,assignment]


def make_job(options: dict[str, Any], reach: Callable[[str, int], None]) -> Job:
    return Job(
        method=build_method(options["method"], options.get("hyperparameters", {})),
        task=HeldTask(options, reach),
        training=Training(
            workers=options.get("workers", 4),
            rounds=options.get("rounds", 5),
            learning_rate=0.02,
            warmup_steps=3,
        ),
        seed=options.get("seed", 11),
        deadline_s=options.get("deadline_s", 20.0),
        step_time_s=options.get("step_time_s", 0.0),
        rejoin_moments=options.get("rejoin_moments", "donor"),
        checkpoint_every=options.get("checkpoint_every", 1),
    )


class TellingProcess(WorkerProcess):
    """Tells more of its state at boundaries than a user's log needs."""

    def state_digest(self, state: MethodState) -> str | None:
        replica: Replica = self._replica
        self._events("position", {
            "round": state.rounds_completed,
            "steps": replica.steps_completed,
            "learning_rate": replica.learning_rate,
            "moments": None if replica.optimizer is None
            else digest([t for _, t in sorted(replica.optimizer.state_tensors().items())]),
            "versions": state.versions.tolist() if isinstance(state, LearnerState) else [],
        })  # fmt: skip
        return super().state_digest(state)


class TellingSyncer(SyncerProcess):
    """Tells what it has made durable."""

    async def _enter(self) -> MethodState | None:
        state = await super()._enter()
        if isinstance(state, SyncerState):
            self._events("entered", described(state))
        return state

    async def _merged(self, ctx: ClusterContext, state: MethodState) -> None:
        await super()._merged(ctx, state)
        if isinstance(state, SyncerState):
            self._events("durable", described(state))


def described(state: SyncerState) -> dict[str, Any]:
    return {
        "versions": state.versions.tolist(),
        "merged_in": state.merged_in.tolist(),
        "state": digest([state.point, state.momentum]),
    }


def credentials_of(options: dict[str, Any], name: str) -> Credentials | None:
    folder = options.get("certs")
    return None if folder is None else Credentials.load(Path(folder), name)


def run_worker(options: dict[str, Any], tell: Tell, holds: Holds) -> None:
    process = TellingProcess(
        make_job(options, holds.reach),
        coordinator=options["coordinator"],
        listen=options.get("listen", "127.0.0.1:0"),
        credentials=credentials_of(options, worker_name(options.get("worker") or 0)),
        folder=Path(options["folder"]) if options.get("folder") else None,
        worker=options.get("worker"),
        rate=options.get("rate"),
        delay_s=options.get("delay_s", 0.0),
        events=tell,
    )
    if "largest_file_bytes" in options:
        most = options["largest_file_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        summary = asyncio.run(process.run())
    except (GossamerError, OSError) as error:
        tell("error", {"type": type(error).__name__, "message": str(error)})
        raise SystemExit(1) from None
    replica = process._replica
    parameters = bytes(replica.parameters.view(torch.uint8).numpy())
    tell("end", {"summary": summary, "parameters": parameters.hex()})


def run_syncer(options: dict[str, Any], tell: Tell, holds: Holds) -> None:
    index = options.get("index", 0)
    job = make_job(options, holds.reach)
    process = TellingSyncer(
        job,
        coordinator=options["coordinator"],
        credentials=credentials_of(options, f"syncer-{index}"),
        folder=Path(options["folder"]),
        index=index,
        events=tell,
    )
    try:
        summary = asyncio.run(process.run())
    except (GossamerError, OSError) as error:
        tell("error", {"type": type(error).__name__, "message": str(error)})
        raise SystemExit(1) from None
    tell("end", {"summary": summary})


def run_coordinator(options: dict[str, Any], tell: Tell) -> None:
    tell_address = lambda address: tell("listening", {"address": address})  # noqa: E731
    settings = CoordinatorSettings.model_validate(options["settings"])
    work = serve(
        settings,
        credentials=credentials_of(options, COORDINATOR),
        listener=tell,
        on_start=tell_address,
        linger_s=0.5,
    )
    status = asyncio.run(work)
    tell("end", {"status": status.model_dump(mode="json")})


def run_program(options: dict[str, Any], address: str) -> None:
    """One forked process, from its connection with the test to its end."""
    if options.get("namespace"):
        enter_namespace(options["namespace"])
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)

    def tell(kind: str, fields: dict[str, Any]) -> None:
        text = json.dumps({"event": kind, **fields}) + "\n"
        with _lock:
            line.sendall(text.encode())

    tell("hello", {"id": options["id"], "pid": os.getpid()})
    holds = Holds(options.get("hold", []), tell)

    def listen() -> None:
        while line.recv(1):
            holds.release()
        os._exit(1)  # the test is gone

    threading.Thread(target=listen, daemon=True).start()
    if options["program"] == "coordinator":
        run_coordinator(options, tell)
    else:
        hold_at(holds, options.get("mute", {}))
        if options.get("quiet"):
            be_quiet(holds)
        run = run_syncer if options["program"] == "syncer" else run_worker
        run(options, tell, holds)
    line.shutdown(socket.SHUT_WR)


def warm_up() -> None:
    """Import now what torch imports when it is first used."""
    job = make_job({"method": "diloco"}, lambda point, round_index: None)
    engine = job.build_engine()
    engine.train(engine.new_replicas(1)[1][0], 1)


def fork_for_each_line(address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    warm_up()
    for text in sys.stdin:
        sys.stdout.flush()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                run_program(json.loads(text), address)
                code = 0
            except SystemExit:
                pass
            finally:
                if code and sys.exc_info()[0] not in (None, SystemExit):
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                sys.stderr.flush()
                os._exit(code)


def print_event(kind: str, fields: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    if not sys.argv[1].startswith("{"):
        fork_for_each_line(sys.argv[1])
        return
    run_worker(json.loads(sys.argv[1]), print_event, Holds([], print_event))


if __name__ == "__main__":
    main()
