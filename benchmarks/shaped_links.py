"""Measured against predicted: real workers on shaped links, and the simulator on the same recipe.

Four hosts (network namespaces, so as root) on 100 Mbit/s links train a model whose steps are paced
so that an all-reduce takes 1.78 times as long as a round's training, as in Factored Gossip DiLoCo.

    python benchmarks/shaped_links.py utilisation [--delay 0.05]
    python benchmarks/shaped_links.py exchange     # a pair's exchange, percent of the line rate
    python benchmarks/shaped_links.py overlap      # inner steps beside Mix1 and alone
    python benchmarks/shaped_links.py cut          # one link out for a while
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.cluster.certs import COORDINATOR, Credentials, issue, worker_name
from gossamer.cluster.coordinator import Coordinator
from gossamer.cluster.job import Job
from gossamer.cluster.plan import CoordinatorSettings
from gossamer.cluster.transport import GrpcTransport
from gossamer.cluster.worker import WorkerProcess
from gossamer.comm.context import Tag
from gossamer.measure.settings import Measure
from gossamer.methods import build_method
from gossamer.sim.compute import Timing
from gossamer.sim.network import Network
from gossamer.sim.simulate import simulate
from gossamer.testing.namespaces import HUB_ADDRESS, Hosts, missing, shaped_hosts
from gossamer.training.engine import Engine
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

WORKERS = 4
RATIO = 1.78  # all-reduce over training time
PORT = 7000


class Cheap:
    """A model of P values whose step costs next to nothing: the pacing decides.

    All but `USED` of them are left alone by the loss, as a backward pass over all of them takes
    time of the processor that four workers on one machine share, and their network with them.
    """

    USED = 1024
    unit = "samples"
    units_per_batch = 1

    def __init__(self, num_parameters: int) -> None:
        self.num_parameters = num_parameters
        self._direction = torch.linspace(-1, 1, self.USED)

    def build(self) -> nn.Module:
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(torch.zeros(self.USED)))
        rest = torch.zeros(self.num_parameters - self.USED)
        module.register_parameter("rest", nn.Parameter(rest))
        return module

    def train_batch(self, worker: int, step: int) -> float:
        return 1.0 + worker + step

    def eval_batches(self) -> list[float]:
        return [0.0]

    def loss(self, model: nn.Module, batch: float) -> Tensor:
        return batch * torch.dot(self._direction, model.get_parameter("weight"))


def make_job(options: dict[str, Any]) -> Job:
    return Job(
        method=build_method(options["method"], {"inner_steps": options["inner_steps"]}),
        task=Cheap(options["parameters"]),
        training=Training(
            workers=options["workers"], rounds=options["rounds"], optimizer="sgd",
            learning_rate=1e-4, schedule="constant", clip_norm=0, weight_decay=0,
        ),
        deadline_s=options.get("deadline_s", 60.0),
        step_time_s=options["step_time_s"],
        checkpoint_every=0,
    )  # fmt: skip


def tell(kind: str, fields: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, "at": time.time(), **fields}), flush=True)


def worker_main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    worker = options["worker"]
    process = WorkerProcess(
        make_job(options),
        coordinator=f"{HUB_ADDRESS}:{PORT}",
        listen=f"{options['address']}:{PORT}",
        credentials=Credentials.load(options["certs"], worker_name(worker)),
        worker=worker,
        delay_s=options["delay_s"],
        events=tell,
        digests=False,
    )
    tell("end", {"summary": asyncio.run(process.run())})


async def coordinator_main(options: dict[str, Any]) -> None:
    job = make_job(options)
    coordinator = Coordinator(
        CoordinatorSettings(
            listen=f"{HUB_ADDRESS}:{PORT}", store=Path(options["folder"]) / "run.sqlite",
            workers=options["workers"], rounds=options["rounds"], deadline=job.deadline_s,
            configuration=job.configuration,
        ),
        credentials=Credentials.load(options["certs"], COORDINATOR),
    )  # fmt: skip
    await coordinator.start()
    await coordinator.ended.wait()
    await asyncio.sleep(1)
    await coordinator.close()


def start(role: str, inside: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
    command = [*inside, sys.executable, __file__, role, "--options", json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def cluster(hosts: Hosts, options: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run it; the events of each worker."""
    with tempfile.TemporaryDirectory() as folder:
        certs = Path(folder) / "certs"
        addresses = [hosts.address(w) for w in range(options["workers"])]
        issue(certs, options["workers"], hosts=[HUB_ADDRESS, *addresses])
        options = options | {"folder": folder, "certs": str(certs)}
        coordinator = start("coordinator", hosts.hub, options)
        workers = [
            start("worker", hosts.inside(w), options | {"worker": w, "address": addresses[w]})
            for w in range(options["workers"])
        ]
        on_start = options.get("meanwhile")
        if on_start == "cut":
            cut_and_restore(hosts, workers[0])
        outputs = [process.communicate()[0] for process in workers]
        coordinator.kill()
        coordinator.wait()
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def cut_and_restore(hosts: Hosts, first: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait for the second boundary of worker 0, then pull worker 3's cable for a while."""
    assert first.stdout is not None
    for line in first.stdout:
        if json.loads(line).get("round") == 2:
            break
    hosts.cut(3)
    time.sleep(seconds)
    hosts.restore(3)


def steady_utilization(events: list[dict[str, Any]]) -> float:
    """Training time over elapsed time between the first and the last boundary."""
    ends = [e for e in events if e["kind"] == "boundary"]
    first, last = ends[1], ends[-1]
    return (last["train_time_s"] - first["train_time_s"]) / (last["at"] - first["at"])


def utilisation(arguments: argparse.Namespace) -> dict[str, Any]:
    allreduce_s = 2 * (WORKERS - 1) / WORKERS * arguments.parameters * 32 / (arguments.mbit * 1e6)
    step_s = allreduce_s / RATIO / arguments.inner_steps
    rows = {}
    for method in arguments.method or ["diloco", "GlobalM1", "GlobalM1LocalM2"]:
        options = {
            "method": method, "workers": WORKERS, "rounds": arguments.rounds,
            "inner_steps": arguments.inner_steps, "parameters": arguments.parameters,
            "step_time_s": step_s, "delay_s": arguments.delay,
        }  # fmt: skip
        with shaped_hosts(WORKERS, mbit=arguments.mbit, mtu=arguments.mtu) as hosts:
            events = cluster(hosts, options)
        measured = sum(map(steady_utilization, events)) / WORKERS
        job = make_job(options)
        predicted = simulate(
            method=job.method, task=Cheap(arguments.parameters), training=job.training,
            network=Network(bandwidth=arguments.mbit * 1e6 / 8, latency=arguments.delay),
            timing=Timing(step_time=step_s), measure=Measure(every=0), numerics="none",
        ).summary["utilization"]  # fmt: skip
        rows[method] = {"measured": measured, "predicted": predicted}
        print(f"{method:16s} measured {measured:.1%}  predicted {predicted:.1%}", flush=True)
    return rows


async def overlap_end(options: dict[str, Any]) -> None:
    """Worker 0 trains, alone and while a vector is mixed, in turns; worker 1 only mixes."""
    me, peer = options["worker"], 1 - options["worker"]
    transport = await connected(options, peer)
    payload = torch.randn(options["parameters"])
    task = TinyMLP(num_inputs=256, num_hidden=1024, batch_size=256)
    training = Training(workers=1, rounds=1, optimizer="adamw", learning_rate=1e-3)
    engine = Engine(task, training, seed=0, total_steps=10**6, real=True)
    _, (replica,) = engine.new_replicas(1)
    loop = asyncio.get_running_loop()

    async def steps() -> float:
        started = time.perf_counter()
        await loop.run_in_executor(None, engine.train, replica, options["steps"])
        return time.perf_counter() - started

    async def mix(index: int) -> None:
        tag = Tag("mix1", 0, step=index)
        sending = transport.send(peer, tag, payload)
        await transport.recv(peer, tag, 60.0)
        await sending.delivered()

    for index in range(options["rounds"]):
        alone_s = await steps() if me == 0 else 0.0
        mixing = loop.create_task(mix(index))
        beside_s = await steps() if me == 0 else 0.0
        still_mixing = not mixing.done()
        await mixing
        tell("pair", {"alone_s": alone_s, "beside_s": beside_s, "covered": still_mixing})
    await transport.close(2.0)


def overlap(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {"parameters": arguments.parameters, "rounds": 15, "steps": arguments.steps}
    with shaped_hosts(2, mbit=arguments.mbit, mtu=arguments.mtu) as hosts:
        outputs = pair_of_ends(hosts, "overlap-end", options)
    pairs = [json.loads(line) for line in outputs[0].splitlines()][1:]  # the first one warms up
    ratios = sorted(pair["beside_s"] / pair["alone_s"] for pair in pairs)
    covered = sum(pair["covered"] for pair in pairs)
    median = ratios[len(ratios) // 2]
    print(f"{arguments.steps} inner steps beside Mix1 take {median:.3f} times as long as alone "
          f"(median of {len(ratios)} pairs, {ratios[0]:.3f} to {ratios[-1]:.3f}; the line was busy "
          f"to their end in {covered})")  # fmt: skip
    return {"median": median, "ratios": ratios, "covered": covered}


async def connected(options: dict[str, Any], peer: int) -> GrpcTransport:
    """A transport that has met its peer."""
    transport = GrpcTransport(
        options["worker"], "0" * 32, listen=f"{options['address']}:{PORT}",
        delay_s=options["delay_s"],
        credentials=Credentials.load(options["certs"], worker_name(options["worker"])),
    )  # fmt: skip
    await transport.start()
    transport.set_peer(peer, f"{options['peer']}:{PORT}")
    hello = Tag("hello", 0)
    transport.send(peer, hello, torch.zeros(1), exact=True)
    await transport.recv(peer, hello, 30.0)
    return transport


def pair_of_ends(hosts: Hosts, role: str, options: dict[str, Any]) -> list[bytes]:
    """Run `role` on two hosts that know of each other; what they print."""
    with tempfile.TemporaryDirectory() as folder:
        certs = Path(folder) / "certs"
        issue(certs, 2, hosts=[hosts.address(0), hosts.address(1)])
        ends = [
            start(role, hosts.inside(w), {
                "delay_s": 0.0, **options, "worker": w, "address": hosts.address(w),
                "peer": hosts.address(1 - w), "certs": str(certs),
            })
            for w in range(2)
        ]  # fmt: skip
        return [process.communicate()[0] for process in ends]


async def exchange_end(options: dict[str, Any]) -> None:
    """One side of a pair that exchanges a payload, again and again."""
    peer = 1 - options["worker"]
    transport = await connected(options, peer)
    payload = torch.randn(options["parameters"])
    for index in range(options["rounds"]):
        started = time.perf_counter()
        tag = Tag("mix2", 0, step=index)
        sending = transport.send(peer, tag, payload)
        await transport.recv(peer, tag, 60.0)
        await sending.delivered()
        tell("exchanged", {"seconds": time.perf_counter() - started})
    await transport.close(2.0)


def exchange(arguments: argparse.Namespace) -> dict[str, Any]:
    ideal = arguments.parameters * 32 / (arguments.mbit * 1e6)
    options = {"parameters": arguments.parameters, "rounds": 5, "delay_s": arguments.delay}
    with shaped_hosts(2, mbit=arguments.mbit, mtu=arguments.mtu) as hosts:
        outputs = pair_of_ends(hosts, "exchange-end", options)
    seconds = [json.loads(line)["seconds"] for out in outputs for line in out.splitlines()]
    median = sorted(seconds)[len(seconds) // 2]
    share = ideal / median
    print(f"exchange of {arguments.parameters * 4e-6:.1f} MB both ways: {median:.2f} s, ideal "
          f"{ideal:.2f} s, {share:.1%} of the line rate")  # fmt: skip
    return {"seconds": median, "ideal_s": ideal, "share_of_line_rate": share}


def cut(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {
        "method": "GlobalM1LocalM2", "workers": WORKERS, "rounds": 60, "inner_steps": 5,
        "parameters": 200_000, "step_time_s": 0.4, "delay_s": 0.0, "deadline_s": 10.0,
        "meanwhile": "cut",
    }  # fmt: skip
    with shaped_hosts(WORKERS, mbit=arguments.mbit, mtu=arguments.mtu) as hosts:
        events = cluster(hosts, options)
    ended = [w for w, own in enumerate(events) if own and own[-1]["kind"] == "end"]
    joined = [e["round"] for e in events[3] if e["kind"] == "joined"]
    print(f"workers that did the last round: {ended}; worker 3 came back at rounds {joined}")
    return {"ended": ended, "joined": joined}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what")
    parser.add_argument("--options", help=argparse.SUPPRESS)
    parser.add_argument("--parameters", type=int, default=16_000_000)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inner-steps", type=int, default=2)
    parser.add_argument("--method", action="append", help="of `utilisation`; again for more")
    parser.add_argument("--steps", type=int, default=100, help="of a piece of `overlap`")
    parser.add_argument("--delay", type=float, default=0.0, help="one way, seconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = json.loads(arguments.options or "{}")
    if arguments.what == "worker":
        worker_main(options)
    elif arguments.what == "coordinator":
        asyncio.run(coordinator_main(options))
    elif arguments.what == "exchange-end":
        asyncio.run(exchange_end(options))
    elif arguments.what == "overlap-end":
        torch.set_num_threads(1)
        asyncio.run(overlap_end(options))
    else:
        reason = missing()
        if reason is not None:
            sys.exit(f"skipped: {reason}")
        programs = {
            "utilisation": utilisation, "exchange": exchange, "overlap": overlap, "cut": cut,
        }  # fmt: skip
        result = programs[arguments.what](arguments)
        if arguments.json:
            print(json.dumps(result))


if __name__ == "__main__":
    main()
