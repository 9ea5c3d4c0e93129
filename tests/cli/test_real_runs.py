"""The command line over the real simulator: one short run of each kind."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.report.run_folder import RunFolder
from gossamer.sim.listener import StopFlag

Gossamer = Callable[..., Any]

# Every key that others read from a summary.
PROMISED = {
    "schema_version", "method", "world", "workers", "rounds", "inner_steps", "tokens",
    "train_loss", "eval_loss", "eval_perplexity", "eval_accuracy", "time_s", "train_time_s",
    "blocked_time_s", "utilization", "bytes_sent", "bytes_sent_total", "consensus_l2",
    "js_distance", "failed_transfers", "retries", "seed", "trace_hash", "parameters_sha256",
}  # fmt: skip


def test_train_sample_report_and_sensitivity_fit_together(gossamer: Gossamer, folder: Path) -> None:
    trained = gossamer(
        "train", "recipe.toml", "--out", "o", "--set", "method.name=GlobalM1", "--json"
    )
    assert trained.code == 0, trained.err
    assert set(trained.json) >= PROMISED
    assert trained.json == RunFolder(folder / "o").summary()
    sampled = [
        gossamer("sample", "o", "--prompt", "KING", "--length", "20", "--seed", seed, "--json").json
        for seed in ("1", "1", "2")
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0]["text"] != sampled[2]["text"]
    ranked = gossamer("sensitivity", "o", "--share", "0.5", "--out", "subset.toml", "--json")
    assert ranked.code == 0, ranked.err
    names = {block["name"] for block in ranked.json["blocks"]}
    assert {"embedding", "head", "layers.0"} <= names
    assert ranked.json["proposal"]["recipe"] == (folder / "subset.toml").read_text()
    assert (
        gossamer(
            "sensitivity", "recipe.toml", "--rounds", "1", "--set", "method.name=GlobalM1"
        ).code
        == 0
    )
    assert gossamer("report", "o", "--no-plots").code == 0


def test_a_stopped_run_resumes_to_the_same_bits(
    gossamer: Gossamer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["--set", "train.rounds=4", "--set", "measure.every=1"]
    whole = gossamer("train", "recipe.toml", *settings, "--out", "whole", "--json")
    assert whole.code == 0, whole.err

    record = RunFolder.record

    def interrupt(self: RunFolder, kind: str, fields: dict[str, Any]) -> None:
        record(self, kind, fields)
        if (kind, fields.get("round")) == ("round", 2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunFolder, "record", interrupt)
    stopped = gossamer("train", "recipe.toml", *settings, "--out", "parts")
    assert stopped.code == 130
    assert "gossamer train --resume parts" in stopped.error_line
    assert not RunFolder(folder / "parts").is_finished
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "parts", folder / "copy")

    resumed = gossamer("train", "--resume", "parts", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json == whole.json

    def measured(name: str) -> list[dict[str, Any]]:
        return RunFolder(folder / name).events("measure")

    assert measured("parts") == measured("whole")
    assert gossamer("train", "--resume", "copy", "--json").json == whole.json


def test_a_stop_without_numerics_saves_nothing_and_says_so(
    gossamer: Gossamer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopFlag, "requested", property(lambda self: True))
    outcome = gossamer("train", "recipe.toml", "--set", "run.numerics=none", "--out", "o")
    assert outcome.code == 130
    assert "no checkpoint was saved" in outcome.error_line


def test_divergence_is_a_typed_failure_with_its_seed(gossamer: Gossamer, folder: Path) -> None:
    settings = ["train.learning_rate=1e30", "train.optimizer=sgd", "train.clip_norm=0"]
    options = [part for setting in settings for part in ("--set", setting)]
    outcome = gossamer("train", "recipe.toml", *options, "--set", "train.rounds=6", "--out", "o")
    assert outcome.code == 3, outcome.err
    assert outcome.err.startswith("error: ")
    assert "seed 5" in outcome.err
    assert "files: o" in outcome.err
    assert "Traceback" not in outcome.err


def test_plan_time_agrees_with_training(gossamer: Gossamer, folder: Path) -> None:
    """The same method on the same network takes the same time with numerics and without."""
    options = ["--method", "diloco", "--method", "GlobalM1LocalM2", "--json"]
    planned = gossamer("plan", "time", "recipe.toml", *options).json["rows"]
    trained = gossamer("compare", "recipe.toml", *options).json["rows"]
    for one, other in zip(planned, trained, strict=True):
        for key in ("time_s", "train_time_s", "utilization", "bytes_sent"):
            assert one[key] == other[key], key
        assert one["eval_loss"] is None
        assert other["eval_loss"] > 0


def test_doctor_finds_nothing_wrong(gossamer: Gossamer, folder: Path) -> None:
    outcome = gossamer("doctor", "--json")
    assert outcome.code == 0, outcome.out
    assert outcome.json["healthy"] is True
    assert list(folder.iterdir()) == [folder / "recipe.toml"]
