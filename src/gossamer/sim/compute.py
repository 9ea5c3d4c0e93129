"""The compute model: how much virtual time inner steps take on each worker.

A step's own time is a pure function of (seed, worker, step index). Slow phases stretch it and
hangs interrupt it. Steps end on whole nanoseconds, one after the other, so doing the same steps in
two calls ends at the same time as doing them in one.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from statistics import NormalDist
from typing import Literal, Self

from pydantic import Field, model_validator

from gossamer.errors import ConfigError, check
from gossamer.seeding import stream
from gossamer.settings import Settings
from gossamer.sim.clock import to_ns
from gossamer.sim.faults import FaultPlan
from gossamer.units import Count, Duration

PayloadDtype = Literal["fp64", "fp32", "bf16", "fp16", "int8"]

BYTES_PER_VALUE: dict[PayloadDtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}

_SPEED_MIN = 1e-6
_STEPS_PER_BLOCK = 64  # drawn at a time
_STANDARD_NORMAL = NormalDist()


class Timing(Settings):
    """The recipe's [timing]: what a step costs, and what size of model transfers stand for."""

    parameters: Count | None = Field(
        default=None, ge=1,
        description="charge transfers as if the model had so many parameters; left out: its own",
    )  # fmt: skip
    payload_dtype: PayloadDtype | None = Field(
        default=None, description="bytes per value that are charged; left out: the payload's own"
    )
    step_time: Duration = Field(default=0.1, gt=0, description="one inner step at speed 1")
    speeds: tuple[float, ...] | None = Field(
        default=None, description="relative speed per worker (2: half the step time); left out: 1"
    )
    jitter: float = Field(
        default=0.0, ge=0, le=100,
        description="relative standard deviation of a step's time (log-normal, its mean kept)",
    )  # fmt: skip
    stall_probability: float = Field(default=0.0, ge=0, lt=1, description="that a step stalls")
    stall_time: Duration = Field(default=1.0, gt=0, description="what a stall adds to its step")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for speed in self.speeds or ():
            if not _SPEED_MIN <= speed <= 1 / _SPEED_MIN:
                raise ValueError(
                    f"speeds: each is from {_SPEED_MIN:g} to {1 / _SPEED_MIN:g}; got {speed:g}"
                )
        return self

    def validate_for(self, num_workers: int) -> None:
        """Raise `ConfigError` unless there is one speed per worker."""
        if self.speeds is not None and len(self.speeds) != num_workers:
            raise ConfigError(
                f"timing.speeds: one per worker is needed, {num_workers} in all; "
                f"got {len(self.speeds)}"
            )


class ComputeModel:
    """When work that a worker begins will be done.

    Args:
        timing: step time, speeds, jitter, stalls.
        faults: slow phases (work proceeds at 1 / factor), hangs and failures of chips (no work).
        num_workers: workers are 0 .. num_workers - 1.
        seed: of jitter and stalls.

    Raises `ConfigError` where `timing` does not fit `num_workers`.
    """

    def __init__(self, timing: Timing, faults: FaultPlan, num_workers: int, seed: int) -> None:
        timing.validate_for(num_workers)
        self.timing = timing
        self._faults, self._seed = faults, seed
        self._speeds = timing.speeds or (1.0,) * num_workers
        self._step_ns = [max(1, to_ns(timing.step_time / speed)) for speed in self._speeds]
        self._stall_ns = to_ns(timing.stall_time)
        self._is_random = timing.jitter > 0 or timing.stall_probability > 0
        # A log-normal of mean exactly 1 and relative standard deviation `jitter`.
        variance = math.log1p(timing.jitter**2)
        self._log_deviation, self._log_mean = math.sqrt(variance), -variance / 2

    def finish_ns(self, worker: int, start_ns: int, first_step: int, num_steps: int) -> int:
        """When `num_steps` steps begun at `start_ns` are done; the first is step `first_step`."""
        check(num_steps >= 0, f"cannot do {num_steps} steps")
        now_ns, step, end = start_ns, first_step, first_step + num_steps
        while step < end:
            change_ns = self._faults.next_compute_change(worker, now_ns)
            if self._is_disturbed(worker, now_ns):
                now_ns = self._advance(worker, now_ns, self.step_ns(worker, step))
                step += 1
                continue
            num_clean, clean_ns = self._clean_run(worker, step, end, now_ns, change_ns)
            now_ns, step = now_ns + clean_ns, step + num_clean
            if step < end:  # this one runs into the disturbance
                now_ns = self._advance(worker, now_ns, self.step_ns(worker, step))
                step += 1
        return now_ns

    def finish_ns_of(self, worker: int, start_ns: int, seconds_of_work: float) -> int:
        """When work of so many seconds at speed 1 is done; without jitter and stalls."""
        check(seconds_of_work >= 0, f"cannot work for {seconds_of_work} s")
        return self._advance(worker, start_ns, to_ns(seconds_of_work / self._speeds[worker]))

    def step_ns(self, worker: int, step: int) -> int:
        """A step's own time, before slow phases and hangs."""
        base_ns = self._step_ns[worker]
        if not self._is_random:
            return base_ns
        block, place = divmod(step, _STEPS_PER_BLOCK)
        if self.timing.jitter > 0:
            normal = _STANDARD_NORMAL.inv_cdf(_uniforms(self._seed, "jitter", worker, block)[place])
            factor = math.exp(self._log_mean + self._log_deviation * normal)
            base_ns = max(1, round(base_ns * factor))
        if self.timing.stall_probability > 0:
            draw = _uniforms(self._seed, "stall", worker, block)[place]
            if draw < self.timing.stall_probability:
                base_ns += self._stall_ns
        return base_ns

    def _is_disturbed(self, worker: int, at_ns: int) -> bool:
        faults = self._faults
        return faults.slow_factor(worker, at_ns) > 1 or faults.stopped_until(worker, at_ns) > at_ns

    def _clean_run(
        self, worker: int, step: int, end: int, now_ns: int, change_ns: int | None
    ) -> tuple[int, int]:
        """How many steps are done by `change_ns`, and their time; at full speed until then."""
        if not self._is_random:
            step_ns, num_steps = self._step_ns[worker], end - step
            if change_ns is not None:
                num_steps = min(num_steps, (change_ns - now_ns) // step_ns)
            return num_steps, num_steps * step_ns
        total_ns = num_steps = 0
        for index in range(step, end):
            step_ns = self.step_ns(worker, index)
            if change_ns is not None and now_ns + total_ns + step_ns > change_ns:
                break
            total_ns, num_steps = total_ns + step_ns, num_steps + 1
        return num_steps, total_ns

    def _advance(self, worker: int, now_ns: int, work_ns: int) -> int:
        """When `work_ns` of work begun at `now_ns` is done, through hangs and slow phases."""
        faults, left = self._faults, Fraction(work_ns)
        while left > 0:
            now_ns = faults.stopped_until(worker, now_ns)
            factor = Fraction(faults.slow_factor(worker, now_ns))
            change_ns = faults.next_compute_change(worker, now_ns)
            end_ns = now_ns + math.ceil(left * factor)
            if change_ns is None or end_ns <= change_ns:
                return end_ns
            left -= (change_ns - now_ns) / factor
            now_ns = change_ns
        return now_ns


@functools.lru_cache(maxsize=1 << 10)
def _uniforms(seed: int, what: str, worker: int, block: int) -> tuple[float, ...]:
    """The block's uniforms in (0, 1), one per step."""
    drawn: list[float] = stream(seed, what, worker, block).random(_STEPS_PER_BLOCK).tolist()
    return tuple(max(uniform, 2.0**-54) for uniform in drawn)  # multiples of 2**-53, 0 included
