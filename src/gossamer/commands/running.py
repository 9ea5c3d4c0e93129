"""Carrying out a prepared run in its folder: progress, Ctrl-C, results, words on failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gossamer.config import Prepared, Recipe
from gossamer.errors import ConfigError, GossamerError, Interrupted
from gossamer.report.progress import Display, RunProgress
from gossamer.report.run_folder import RunFolder
from gossamer.sim.listener import Listener, StopFlag
from gossamer.sim.simulate import SimulationResult, simulate


@dataclass(frozen=True, slots=True)
class FolderListener:
    """Writes each event of a run into its folder and passes everything on to the progress."""

    folder: RunFolder
    progress: RunProgress

    def on_start(self, total_steps: int, start_steps: int) -> None:
        self.progress.on_start(total_steps, start_steps)

    def on_steps(self, num_steps: int) -> None:
        self.progress.on_steps(num_steps)

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        self.folder.record(kind, fields)
        self.progress.on_event(kind, fields)


def check_simulated(recipe: Recipe, instead: str) -> None:
    """Refuse a recipe of the cluster world where only the simulator is meant."""
    if recipe.run.world != "sim":
        raise ConfigError(
            f'run.world = "{recipe.run.world}", and this command simulates; use {instead}, or add '
            f"--set run.world=sim"
        )


def carry_out(
    prepared: Prepared,
    folder: RunFolder,
    *,
    label: str,
    display: Display,
    stop: StopFlag,
    resume: Path | None = None,
    resume_command: str | None = None,
) -> dict[str, Any]:
    """Run, write the results into `folder` and return the summary.

    An error leaves with notes: where the files are and which command goes on or runs it again. A
    run that is refused after all leaves no folder.
    """
    progress = display.run(label)
    try:
        result = simulate_prepared(
            prepared,
            listener=FolderListener(folder, progress),
            stop=stop,
            checkpoint_dir=folder.checkpoints,
            resume=resume,
        )
        display.finish(progress)
        _keep(prepared, folder, result)
    except ConfigError:
        if resume is None:
            folder.discard()
        raise
    except Interrupted as error:
        error.add_note(_how_to_go_on(folder, resume_command))
        raise
    except KeyboardInterrupt:
        display.say(f"aborted; {_how_to_go_on(folder, resume_command)}")
        raise
    except GossamerError as error:
        error.add_note(f"files: {folder.path}")
        error.add_note(f"again from the start: gossamer train {folder.path / 'config.toml'}")
        raise
    except OSError as error:
        error.add_note(f"files: {folder.path}; {_how_to_go_on(folder, resume_command)}")
        raise
    finally:
        folder.close()
    return dict(result.summary)


def _how_to_go_on(folder: RunFolder, command: str | None) -> str:
    if folder.latest_checkpoint() is None:
        return f"no checkpoint was saved in {folder.path}"
    return f"continue with: {command or f'gossamer train --resume {folder.path}'}"


def simulate_prepared(
    prepared: Prepared,
    *,
    listener: Listener,
    stop: StopFlag,
    checkpoint_dir: Path | None = None,
    resume: Path | None = None,
) -> SimulationResult:
    """The simulator's run of a recipe."""
    recipe = prepared.recipe
    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    return simulate(
        method=recipe.method,
        task=prepared.task,
        workers=recipe.train.workers,
        rounds=recipe.train.rounds,
        seed=recipe.seed,
        training=recipe.train,
        network=recipe.network,
        timing=recipe.timing,
        faults=recipe.faults,
        measure=recipe.measure,
        numerics=recipe.run.numerics,
        listener=listener,
        checkpoint_every=recipe.run.checkpoint_every or None,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        stop=stop,
    )


def _keep(prepared: Prepared, folder: RunFolder, result: SimulationResult) -> None:
    """Parameters first, so that a summary means that everything is there."""
    recipe = prepared.recipe
    if recipe.run.numerics == "real":
        folder.write_parameters(recipe, result.parameters, result.averaged)
    folder.write_summary(result.summary)


@contextmanager
def stopping_on_signals() -> Iterator[StopFlag]:
    """A flag that the first Ctrl-C (or SIGTERM) raises; the second aborts at once."""
    stop = StopFlag()
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop.request()
        # Not through a buffered stream: the signal may have come in the middle of a write to it.
        os.write(2, b"\nstopping at the next round boundary (again to abort)\n")

    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, handle) for number in signals]
    try:
        yield stop
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)
