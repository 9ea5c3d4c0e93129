"""Random runs of Decoupled DiLoCo in which everything goes wrong that a simulated world has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.errors import RunFailed, check
from gossamer.measure.settings import Measure
from gossamer.seeding import stream
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Hang, Outage, Partition, SlowPhase
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.testing.accounts import AccountedDiLoCo
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

ROUNDS = 8
T = TypeVar("T")


class _Draw:
    """Draws in order, of uniform numbers alone."""

    def __init__(self, seed: int) -> None:
        self._stream = stream("decoupled case", seed)

    def random(self) -> float:
        return float(self._stream.random())

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def randint(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int((high - low + 1) * self.random())

    def choice(self, options: Sequence[T]) -> T:
        return options[self.randint(0, len(options) - 1)]


class Poisoned(TinyMLP):
    """A worker's batch of one step is not finite, so that it diverges there; None: no worker."""

    def __init__(self, worker: int | None, step: int) -> None:
        super().__init__(num_hidden=4, batch_size=4)
        self._poisoned = (worker, step)

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """As `TinyMLP`'s, but for the one."""
        inputs, targets = super().train_batch(worker, step)
        return inputs, targets * torch.inf if (worker, step) == self._poisoned else targets


@dataclass(frozen=True)
class Case:
    """One run; the same for the same seed.

    Args:
        quiet_after_s: when the last fault is over, and who waited has noticed; only the network's
            own failures go on.
    """

    seed: int
    workers: int
    method: AccountedDiLoCo
    faults: Faults
    network: Network
    timing: Timing
    poisoned: int | None
    quiet_after_s: float

    def run(self) -> SimulationResult | None:
        """Run it and hold it to its accounts; None where no learner was left.

        Raises `InvariantViolated` where a token is not accounted for or merged twice, a merge is
        not finite, or merging has not gone on after the faults; whatever error ends the run else.
        """
        try:
            result = simulate(
                method=self.method,
                task=Poisoned(self.poisoned, 2 * self.method.inner_steps),
                workers=self.workers,
                rounds=ROUNDS,
                seed=self.seed,
                training=Training(learning_rate=0.02, clip_norm=0),
                network=self.network,
                timing=self.timing,
                faults=self.faults,
                measure=Measure(every=0),
            )
        except RunFailed as error:
            if "all workers are lost" in str(error):
                return None
            raise
        accounts = self.method.accounts
        accounts.check(result)
        rows = result.parameters[list(result.workers)]
        check(bool(torch.isfinite(rows).all()), "a learner has ended with values not finite")
        # Where the run went on for two of the slowest cycles after the last fault, so did merging;
        # but where the quickest learners set the pace alone, all that is due is so before they end,
        # and where transfers fail by chance, all of a few merges may.
        method, timing = self.method, self.timing
        quickest_alone = method.waits is True and method.quorum < self.workers
        cycle_s = method.inner_steps * timing.step_time / min(timing.speeds or (1,))
        goes_on = self.quiet_after_s + 2 * cycle_s < float(result.summary["time_s"])
        may_fail = self.network.failure_probability + self.network.corruption_probability > 0
        if goes_on and not quickest_alone and not may_fail:
            last_s = max((share.at_s for share in accounts.shares), default=0.0)
            check(last_s > self.quiet_after_s, f"nothing was merged after {last_s} s")
        return result


def random_case(seed: int) -> Case:
    """Settings, speeds, links and faults, all drawn from the seed."""
    draw = _Draw(seed)
    workers, inner_steps = draw.choice([2, 3, 4, 6]), draw.choice([4, 6, 8, 12])
    fragments = draw.choice([None, 1, 2, 3])
    settings: dict[str, Any] = {
        "inner_steps": inner_steps,
        "fragments": fragments,
        "quorum": draw.choice([1, 1, 1, draw.randint(1, workers), workers]),
        "grace": draw.choice([0.0, 0.5, 0.9]),
        "due_steps": draw.randint(0, 3),
        "waits": draw.choice([None, None, True, False]),
        "blend": draw.choice([0.0, 0.0, 0.5]),
        "merge": draw.choice(["rda", "average"]),
        "codec": draw.choice(["none", "bf16", "int4", "int1"]),
        "codec_down": draw.choice(["none", "bf16"]),
        "syncers": draw.randint(1, min(fragments or 2, 2)),
    }
    places = range(workers + settings["syncers"])
    rounds_s = float(ROUNDS * inner_steps)
    timing = Timing(
        step_time=1.0,
        speeds=tuple(draw.choice([1.0, 1.0, 0.8, 0.5, 1.3]) for _ in range(workers)),
        jitter=draw.choice([0.0, 0.1, 0.5]),
    )
    deadline_s = draw.choice([3.0, 10.0])
    network = Network(
        bandwidth=draw.choice([300.0, 3e3, 1e5, 1e8]),
        latency=draw.choice([0.0, 0.01, 0.5]),
        failure_probability=draw.choice([0.0, 0.0, 0.05, 0.3]),
        failure_unit="transfer",
        corruption_probability=draw.choice([0.0, 0.0, 0.05]),
        deadline=deadline_s,
    )
    faults, end_s = _faults(draw, workers, places, 0.6 * rounds_s)
    poisoned = draw.choice([None, None, None, workers - 1])
    method = AccountedDiLoCo(**settings)
    return Case(seed, workers, method, faults, network, timing, poisoned, end_s + deadline_s)


def _faults(draw: _Draw, workers: int, places: range, until_s: float) -> tuple[Faults, float]:
    """Some of each kind that begin before `until_s`; and when the last of them ends."""
    ends = [0.0]

    def span(longest_s: float) -> dict[str, Any]:
        start_s, length_s = draw.uniform(0.01, until_s), draw.uniform(0.1, longest_s)
        ends.append(start_s + length_s)
        return {"start": start_s, "duration": length_s}

    def crash() -> CrashAt:
        times = span(draw.choice([0.6, 8.0, 40.0]))
        place = draw.choice(places)
        # Worker 0 and the syncers always come back: without them there is nothing to look at.
        for_good = 0 < place < workers and draw.random() < 0.2
        away_s = None if for_good else times["duration"]
        return CrashAt(worker=place, start=times["start"], return_after=away_s)

    def some(most: int) -> range:
        return range(draw.randint(0, most))

    split = sorted({draw.choice(places) for _ in places})
    faults = Faults(
        crashes=tuple(crash() for _ in some(4)),
        outages=tuple(Outage(worker=draw.choice(places), **span(20)) for _ in some(3)),
        hangs=tuple(Hang(worker=draw.choice(places), **span(15)) for _ in some(2)),
        slow=tuple(
            SlowPhase(worker=draw.randint(0, workers - 1), factor=draw.choice([2, 5]), **span(30))
            for _ in some(2)
        ),
        partitions=tuple(Partition(groups=(tuple(split),), **span(20)) for _ in some(1)),
        rejoin_moments=draw.choice(["donor", "reset"]),
    )
    return faults, max(ends)
