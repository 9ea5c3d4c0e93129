"""How fast two workers exchange a payload on this machine, and how well an emulated line is used.

Each worker is a process of its own. Reported is the median of the better half of repetitions: the
exchange both ways as fast as it goes (GB/s in each direction, and CPU seconds per GB), the same on
an emulated line (percent of the line's rate), and the time of a small message there and back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gossamer.cluster.certs import Credentials, issue, worker_name
from gossamer.cluster.limits import Limits
from gossamer.cluster.transport import GrpcTransport
from gossamer.comm.context import Tag
from gossamer.units import parse_duration, parse_rate, parse_size

RUN = "benchmark"
MESSAGES = 200


async def worker(options: argparse.Namespace) -> dict[str, Any]:
    """One end: says its address on stdout, reads the other's from stdin, then measures."""
    torch.set_num_threads(1)
    me, size = options.worker, int(options.size)
    credentials = Credentials.load(options.certs, worker_name(me)) if options.certs else None
    transport = GrpcTransport(
        me, RUN, listen="127.0.0.1:0", credentials=credentials,
        limits=Limits.for_payload(size), rate=options.rate, delay_s=options.delay,
    )  # fmt: skip
    print(await transport.start(), flush=True)
    loop = asyncio.get_running_loop()
    transport.set_peer(1 - me, (await loop.run_in_executor(None, sys.stdin.readline)).strip())
    payload = torch.zeros(size, dtype=torch.uint8)
    times, cpu = [], []
    for repetition in range(options.repetitions + 1):  # the first one connects
        barrier = Tag("barrier", 0, part=repetition)
        transport.send(1 - me, barrier, payload[:1], exact=True)
        await transport.recv(1 - me, barrier, 60.0)
        start, cpu_start = time.perf_counter(), time.process_time()
        tag = Tag("payload", 0, part=repetition)
        transfer = transport.send(1 - me, tag, payload)
        await transport.recv(1 - me, tag, 60.0)
        await transfer.delivered()
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    start = time.perf_counter()
    for part in range(MESSAGES):
        tag = Tag("ping", 0, part=part)
        for sends in (me == 0, me == 1):
            if sends:
                transport.send(1 - me, tag, payload[:8], exact=True)
            else:
                await transport.recv(1 - me, tag, 60.0)
    round_trip_s = (time.perf_counter() - start) / MESSAGES
    await transport.close(2.0)
    return {"times_s": times[1:], "cpu_s": cpu[1:], "round_trip_s": round_trip_s}


def pair(options: argparse.Namespace, certs: Path | None, rate: float | None) -> dict[str, Any]:
    """Both ends as processes; what worker 0 measured."""
    processes = []
    for index in range(2):
        command = [sys.executable, __file__, "--worker", str(index)]
        command += ["--size", str(options.size), "--repetitions", str(options.repetitions)]
        command += ["--delay", str(options.delay)]
        command += ["--rate", str(rate)] if rate else []
        command += ["--certs", str(certs)] if certs else []
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    addresses = [process.stdout.readline() for process in processes]  # type: ignore[union-attr]
    for process, address in zip(processes, reversed(addresses), strict=True):
        process.stdin.write(address)  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    results = [json.loads(process.communicate()[0]) for process in processes]
    times, cpu = (sorted(results[0][name]) for name in ("times_s", "cpu_s"))
    half = max(1, len(times) // 2)
    return {
        "exchange_s": statistics.median(times[:half]),
        "cpu_s": statistics.median(cpu[:half]),
        "round_trip_ms": results[0]["round_trip_s"] * 1e3,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        certs = Path(folder) / "certs"
        issue(certs, 2)
        size = options.size
        figures: dict[str, Any] = {"payload_bytes": int(size), "delay_s": options.delay}
        for name, place in (("plain", None), ("tls", certs)):
            found = pair(options, place, None)
            figures[name] = {
                "gb_per_s": size / found["exchange_s"] / 1e9,
                "cpu_s_per_gb": found["cpu_s"] / (2 * size) * 1e9,
                "round_trip_ms": found["round_trip_ms"],
            }
        rate = options.rate or parse_rate("100Mbit/s")
        found = pair(options, certs, rate)
        figures["line"] = {
            "bytes_per_s": rate,
            "exchange_s": found["exchange_s"],
            "ideal_s": size / rate + options.delay,
            "percent_of_line": 100 * (size / rate) / found["exchange_s"],
        }
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=40e6, help="payload, such as 40MB")
    parser.add_argument("--rate", type=parse_rate, help="of the emulated line; 100Mbit/s")
    parser.add_argument("--delay", type=parse_duration, default=0.0, help="one way, such as 50ms")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--certs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(asyncio.run(worker(options))))
        return
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
        return
    for name in ("plain", "tls"):
        found = figures[name]
        print(
            f"{name:6} {found['gb_per_s']:.2f} GB/s each way, "
            f"{found['cpu_s_per_gb']:.1f} CPU s/GB, "
            f"{found['round_trip_ms']:.2f} ms there and back"
        )
    line = figures["line"]
    print(
        f"line   {line['exchange_s']:.2f} s for {line['ideal_s']:.2f} s at "
        f"{line['bytes_per_s'] * 8 / 1e6:g} Mbit/s: {line['percent_of_line']:.1f} % of it"
    )


if __name__ == "__main__":
    main()
