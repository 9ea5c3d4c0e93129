"""How many events a second the virtual loop handles.

An event is one timer that fires: into a plain callback, or waking a coroutine that waits in
`sleep_until_ns`. Times are of the CPU, so that a busy machine does not spoil them much.
"""

from __future__ import annotations

import argparse
import json
import time

from gossamer.sim.clock import VirtualLoop, sleep_until_ns


def timers_per_s(num_events: int, num_chains: int) -> float:
    """Chains of callbacks, each of which sets the next timer."""
    loop = VirtualLoop()
    left = num_events

    def fire(step_ns: int) -> None:
        nonlocal left
        left -= 1
        if left >= num_chains:
            loop.call_at_ns(loop.time_ns() + step_ns, fire, step_ns)

    for chain in range(num_chains):
        loop.call_at_ns(1 + chain, fire, 1 + chain)
    start = time.process_time()
    loop.run_forever()
    return (num_events - left) / (time.process_time() - start)


def sleeps_per_s(num_events: int, num_chains: int) -> float:
    """Coroutines that sleep again and again."""
    loop = VirtualLoop()

    async def sleeper(step_ns: int) -> None:
        for _ in range(num_events // num_chains):
            await sleep_until_ns(loop.time_ns() + step_ns)

    async def main() -> None:
        tasks = [loop.create_task(sleeper(1 + chain)) for chain in range(num_chains)]
        for task in tasks:
            await task

    start = time.process_time()
    loop.run_until_complete(main())
    elapsed = time.process_time() - start
    loop.close()
    return num_events // num_chains * num_chains / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=300_000, help="events per measurement")
    parser.add_argument("--tasks", type=int, default=64, help="timers or coroutines at a time")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    kinds = {"timers_per_s": timers_per_s, "sleeps_per_s": sleeps_per_s}
    best = {
        name: round(max(measure(given.events, given.tasks) for _ in range(given.repeats)))
        for name, measure in kinds.items()
    }
    if given.json:
        print(json.dumps({"events": given.events, "tasks": given.tasks, **best}))
        return
    print(f"timer callbacks:             {best['timers_per_s']:>10,} events/s")
    print(f"coroutines that sleep:       {best['sleeps_per_s']:>10,} events/s")


if __name__ == "__main__":
    main()
