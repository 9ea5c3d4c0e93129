"""The commands: what they print where, what they leave, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gossamer import cli
from gossamer.commands.compare import DEMO_METHODS
from gossamer.config import load_recipe, prepare, variant
from gossamer.errors import ConfigError, RunFailed
from gossamer.errors import Interrupted as GossamerInterrupted
from gossamer.methods import FactoredGossip
from gossamer.report.run_folder import RunFolder, read_json_object
from gossamer.sim.listener import StopFlag

Gossamer = Callable[..., Any]

BAD_SETTINGS = [
    "method.name=dilocco",
    "method.inner_steps=0",
    "method.inner_steps=-3",
    "method.inner_steps=two",
    "method.outer_learning_rate=-inf",
    "method.mix1=pair",
    "train.workers=0",
    "train.workers=-1",
    "train.workers=1000000",
    "train.learning_rate=nan",
    "train.batch_size=0",
    "train.sequence_length=1000000",
    "network.bandwidth=-5Mbit/s",
    "network.bandwidth=fast",
    "network.failure_probability=1.5",
    "network.workers=[{worker = 77}]",
    "timing.payload_dtype=fp7",
    "timing.speeds=[1.0]",
    "faults.crashes=[{worker = 77, start = 1}]",
    "task.data=nowhere.txt",
    "task.model=lama-tiny",
    "task.nam=text",
    "task.probe_sequences=99",
    "run.world=simm",
    "run.numerics=some",
    "measure.every=-1",
    "seed=abc",
    "seed=-1",
    "sed=1",
    "train",
    "train=3",
]


@pytest.mark.parametrize("setting", BAD_SETTINGS)
def test_a_bad_recipe_is_one_line_and_no_folder(
    setting: str, gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    for out in (["--out", "out"], []):
        outcome = gossamer("train", "recipe.toml", "--set", setting, *out)
        assert outcome.code == 2
        assert outcome.out == ""
        assert outcome.err == outcome.error_line + "\n"  # nothing but the one line
    assert simulation.calls == []
    assert [p.name for p in folder.iterdir()] == ["recipe.toml"]


def test_a_subset_that_matches_nothing_is_refused(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    method = "GlobalM1LocalM2:mix2_subset=layrs.0"
    outcome = gossamer("compare", "recipe.toml", "--method", "diloco", "--method", method)
    assert outcome.code == 2
    assert "did you mean 'layers.0'?" in outcome.error_line
    assert simulation.calls == []
    assert [p.name for p in folder.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "missing.toml"],
        ["train", "recipe.toml", "--resume", "runs/x", "--out", "y"],
        ["train", "--resume", "nowhere"],
        ["train", "recipe.toml", "--nonsense"],
        ["compare", "recipe.toml"],
        ["compare"],
        ["compare", "recipe.toml", "--method", "dilocco"],
        ["compare", "--resume", "nowhere"],
        ["sample", "nowhere"],
        ["sample"],
        ["report", "nowhere"],
        ["sensitivity", "recipe.toml", "--share", "1.5"],
        ["nonsense"],
        ["plan", "nonsense"],
    ],
)
def test_usage_mistakes_are_one_line(
    arguments: list[str], gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    outcome = gossamer(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err == outcome.error_line + "\n"
    assert [p.name for p in folder.iterdir()] == ["recipe.toml"]


def test_every_command_explains_itself_with_examples(gossamer: Gossamer) -> None:
    commands = ["demo", "train", "compare", "sample", "sensitivity", "report", "topology"]
    commands += ["methods", "doctor"]
    assert gossamer("--help").code == 0
    for command in ([name] for name in commands):
        outcome = gossamer(*command, "--help")
        assert outcome.code == 0
        assert f"gossamer {command[0]}" in outcome.out
        assert "--json" in outcome.out
    assert "--method" in gossamer("plan", "time", "--help").out


# --------------------------------------------------------------------------------------- good runs


def test_train_leaves_everything_in_its_folder(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    outcome = gossamer("train", "recipe.toml", "--set", "seed=9")
    assert outcome.code == 0
    run = RunFolder(folder / "runs" / "diloco-1")
    assert {p.name for p in run.path.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "model.json",
        "model.safetensors",
        "workers.safetensors",
    }
    assert run.recipe().seed == 9
    assert run.summary()["seed"] == 9
    assert [e["kind"] for e in run.events()] == ["start", *["round", "measure"] * 2, "end"]
    assert all(event["schema_version"] == 1 for event in run.events())
    assert len(run.worker_parameters()) == 3
    assert "perplexity" in outcome.out
    assert "gossamer report runs/diloco-1" in outcome.err
    assert gossamer("train", "recipe.toml").code == 0
    assert (folder / "runs" / "diloco-2").is_dir()


def test_the_simulator_is_given_the_whole_recipe(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    gossamer("train", "recipe.toml", "--out", "o", "--set", "run.checkpoint_every=2")
    given, recipe = simulation.calls[0], RunFolder(folder / "o").recipe()
    assert given["method"] == recipe.method
    assert (given["workers"], given["rounds"], given["seed"]) == (3, 2, 5)
    for section in ("network", "timing", "faults", "measure"):
        assert given[section] == getattr(recipe, section)
    assert given["training"] == recipe.train
    assert given["numerics"] == "real"
    assert given["checkpoint_every"] == 2
    assert given["resume"] is None


def test_json_is_all_that_is_on_stdout(gossamer: Gossamer, folder: Path, simulation: Any) -> None:
    trained = gossamer("train", "recipe.toml", "--out", "o", "--json")
    assert trained.json["method"] == "diloco"
    assert trained.json["js_distance"] is None  # it was NaN
    compared = gossamer("compare", "recipe.toml", "--method", "diloco", "--out", "c", "--json").json
    assert compared == read_json_object(folder / "c" / "comparison.json")
    assert set(gossamer("methods", "--json").json) == {"methods", "presets"}
    assert gossamer("report", "c", "--json", "--no-plots").json["rows"] == compared["rows"]
    sampled = gossamer("sample", "o", "--length", "5", "--json").json
    assert set(sampled) == {"prompt", "text", "seed"}
    ranked = gossamer("sensitivity", "o", "--json").json
    assert {"baseline_js", "blocks", "proposal"} <= set(ranked)


def test_compare_keeps_the_order_and_numbers_repeated_labels(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    methods = ["diloco", "GlobalM1", "diloco", "diloco:inner_steps=4"]
    options = [part for name in methods for part in ("--method", name)]
    outcome = gossamer("compare", "recipe.toml", *options, "--json")
    assert outcome.code == 0
    labels = [row["label"] for row in outcome.json["rows"]]
    assert labels == ["diloco", "GlobalM1", "diloco-2", "diloco:inner_steps=4"]
    assert [row["inner_steps"] for row in outcome.json["rows"]] == [2, 2, 2, 4]
    assert [call["method"].outer_learning_rate for call in simulation.calls] == [0.5] * 4
    run = folder / "runs" / "compare-1" / "diloco-inner_steps=4"
    assert RunFolder(run).recipe().method.inner_steps == 4


@pytest.mark.parametrize(
    "command", [["sample"], ["train", "--resume"], ["sensitivity"]], ids=lambda c: c[0]
)
def test_a_comparison_given_for_a_run_names_its_runs(
    command: list[str], gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    gossamer("compare", "recipe.toml", "--method", "diloco", "--method", "GlobalM1", "--out", "c")
    outcome = gossamer(*command, "c")
    assert outcome.code == 2
    assert outcome.error_line.endswith("give one of its runs in it: GlobalM1, diloco")


def test_plan_time_trains_nothing(gossamer: Gossamer, folder: Path, simulation: Any) -> None:
    outcome = gossamer("plan", "time", "recipe.toml", "--method", "diloco", "--out", "p")
    assert outcome.code == 0
    assert [call["numerics"] for call in simulation.calls] == ["none"]
    assert not (folder / "p" / "diloco" / "model.safetensors").exists()
    assert gossamer("plan", "time", "recipe.toml").code == 0
    assert len(simulation.calls) > 5


def test_the_demo_compares_the_five_methods(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    outcome = gossamer("demo", "--set", "task.eval_sequences=4", "--set", "train.rounds=1")
    assert outcome.code == 0
    assert len(simulation.calls) == 5
    rows = read_json_object(folder / "runs" / "demo-1" / "comparison.json")["rows"]
    assert [row["label"] for row in rows] == [
        "data_parallel",
        "diloco",
        "GlobalM1",
        "GlobalM1LocalM2",
        "GlobalM1LocalM2-subset",
    ]
    timing = simulation.calls[0]["timing"]
    assert (timing.parameters, timing.payload_dtype, timing.step_time) == (1.5e9, "bf16", 2.355)
    assert {call["workers"] for call in simulation.calls} == {8}
    for hint in ("runs/demo-1", "gossamer report", "gossamer train recipes/shakespeare.toml"):
        assert hint in outcome.err


def test_the_subset_of_the_demo_is_the_papers_share() -> None:
    """43 % of the parameters; the paper's own list would be nearly all of so small a model."""
    with resources.as_file(resources.files("gossamer") / "data" / "demo.toml") as path:
        base = load_recipe(path, ["run.numerics=none"])
    prepared = prepare(variant(base, DEMO_METHODS["GlobalM1LocalM2-subset"]))
    method = prepared.recipe.method
    assert isinstance(method, FactoredGossip)
    slices = prepared.layout.select(method.mix2_subset or ())
    share = sum(piece.stop - piece.start for piece in slices) / prepared.layout.numel
    assert 0.42 < share < 0.44


def test_methods_shows_every_hyperparameter(gossamer: Gossamer) -> None:
    from gossamer.methods import METHODS, PRESETS

    outcome = gossamer("methods")
    for name, kind in METHODS.items():
        assert name in outcome.out
        for field_name, field in kind.model_fields.items():
            assert field_name in outcome.out
            assert field.description, f"{name}.{field_name} has no description"
    assert all(name in outcome.out for name in PRESETS)


# ------------------------------------------------------------------------------------- ends badly


def test_a_failed_run_exits_3_and_says_where_its_files_are(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    def fail(rounds_completed: int, stop: StopFlag) -> None:
        error = RunFailed("all workers were lost")
        error.add_note("seed 5")
        raise error

    simulation.ending = fail
    outcome = gossamer("train", "recipe.toml", "--out", "o")
    assert outcome.code == 3
    assert "error: all workers were lost\nseed 5\n" in outcome.err
    assert "files: o" in outcome.err
    assert "gossamer train o/config.toml" in outcome.err
    assert "Traceback" not in outcome.err
    assert RunFolder(folder / "o").events("measure") != []


def test_a_run_refused_by_the_simulator_leaves_no_folder(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    def refuse(rounds_completed: int, stop: StopFlag) -> None:
        raise ConfigError("this cannot be")

    simulation.ending = refuse
    for arguments in (["train", "recipe.toml"], ["compare", "recipe.toml", "--method", "diloco"]):
        outcome = gossamer(*arguments, "--out", "o")
        assert outcome.code == 2
        assert outcome.error_line == "error: this cannot be"
        assert not (folder / "o").exists()


def _stop_after(rounds: int, checkpoints: Callable[[], Path]) -> Callable[[int, StopFlag], None]:
    """Ctrl-C in round `rounds`; the run saves and stops as the simulator does."""

    def end(rounds_completed: int, stop: StopFlag) -> None:
        if rounds_completed == rounds:
            os.kill(os.getpid(), signal.SIGINT)
        if stop.requested:
            path = checkpoints() / f"round-{rounds_completed:06d}"
            path.mkdir(parents=True)
            (path / "state.json").write_text("{}")
            raise GossamerInterrupted(f"stopped and saved after round {rounds_completed} of 2")

    return end


def test_ctrl_c_exits_130_with_the_command_that_goes_on(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests behind it
    simulation.ending = _stop_after(1, lambda: simulation.calls[-1]["checkpoint_dir"])
    outcome = gossamer("train", "recipe.toml", "--out", "o")
    assert outcome.code == 130
    assert "stopping at the next round boundary (again to abort)" in outcome.err
    assert outcome.error_line == (
        "interrupted: stopped and saved after round 1 of 2; "
        "continue with: gossamer train --resume o"
    )
    assert signal.getsignal(signal.SIGINT) is before  # put back
    simulation.ending = lambda rounds_completed, stop: None
    assert gossamer("train", "--resume", "o").code == 0
    assert simulation.calls[-1]["resume"] == Path("o/checkpoints/round-000001")
    assert RunFolder(folder / "o").is_finished
    again = gossamer("train", "--resume", "o")
    assert again.code == 2
    assert "nothing is left to do" in again.error_line


def test_a_second_ctrl_c_aborts_at_once(gossamer: Gossamer, folder: Path, simulation: Any) -> None:
    def twice(rounds_completed: int, stop: StopFlag) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)

    simulation.ending = twice
    outcome = gossamer("train", "recipe.toml", "--out", "o")
    assert outcome.code == 130
    assert outcome.err.endswith("aborted; no checkpoint was saved in o\n")


def test_a_stopped_comparison_goes_on_where_it_was(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    stop_second = _stop_after(1, lambda: simulation.calls[-1]["checkpoint_dir"])
    simulation.ending = lambda done, stop: len(simulation.calls) == 2 and stop_second(done, stop)
    methods = ["--method", "diloco", "--method", "GlobalM1", "--method", "local_sgd"]
    outcome = gossamer("compare", "recipe.toml", *methods, "--out", "c")
    assert outcome.code == 130
    assert outcome.error_line.endswith("continue with: gossamer compare --resume c")
    unfinished = gossamer("report", "c")
    assert unfinished.code == 2
    assert "gossamer compare --resume c" in unfinished.error_line
    simulation.ending = lambda rounds_completed, stop: None
    outcome = gossamer("compare", "--resume", "c", "--json")
    assert outcome.code == 0
    assert [row["label"] for row in outcome.json["rows"]] == ["diloco", "GlobalM1", "local_sgd"]
    assert len(simulation.calls) == 4  # the first was not done again
    assert simulation.calls[2]["resume"] == Path("c/GlobalM1/checkpoints/round-000001")


def test_resuming_into_another_configuration_names_the_difference(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    simulation.ending = _stop_after(1, lambda: simulation.calls[-1]["checkpoint_dir"])
    gossamer("train", "recipe.toml", "--out", "o")
    simulation.ending = lambda rounds_completed, stop: None
    config = (folder / "o" / "config.toml").read_bytes()
    for changed in ("train.learning_rate=0.1", "seed=6", "measure.every=1", "run.numerics=none"):
        for recipe in ([], ["recipe.toml"]):
            outcome = gossamer("train", *recipe, "--resume", "o", "--set", changed)
            assert outcome.code == 2
            assert changed.partition("=")[0] in outcome.error_line
    assert len(simulation.calls) == 1
    assert (folder / "o" / "config.toml").read_bytes() == config
    outcome = gossamer("train", "recipe.toml", "--resume", "o", "--set", "run.checkpoint_every=1")
    assert outcome.code == 0
    assert simulation.calls[-1]["checkpoint_every"] == 1


def test_a_closed_pipe_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        code = cli.run(["methods", "--json"])
        monkeypatch.undo()
    assert code == 141
    assert capfd.readouterr().err == ""


def test_a_full_disk_is_no_traceback(
    gossamer: Gossamer, folder: Path, simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write_summary", full)
    outcome = gossamer("train", "recipe.toml", "--out", "o")
    assert outcome.code == 3
    assert outcome.err.splitlines() == [
        "error: [Errno 28] No space left on device",
        "files: o; no checkpoint was saved in o",
    ]


def test_a_folder_that_cannot_be_filled_is_left_as_it_was(
    gossamer: Gossamer, folder: Path, simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert gossamer("train", "recipe.toml", "--out", "o").code == 3
    assert not (folder / "o").exists()
    (folder / "p").mkdir()
    assert gossamer("train", "recipe.toml", "--out", "p").code == 3
    assert list((folder / "p").iterdir()) == []
    assert simulation.calls == []


def test_two_runs_never_write_to_one_folder(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    seen: list[Any] = []

    def ending(rounds_completed: int, stop: StopFlag) -> None:
        (folder / "o" / "checkpoints" / "round-000001").mkdir(parents=True, exist_ok=True)
        (folder / "o" / "checkpoints" / "round-000001" / "state.json").write_text("{}")
        if not seen:
            seen.append(gossamer("train", "--resume", "o"))

    simulation.ending = ending
    assert gossamer("train", "recipe.toml", "--out", "o").code == 0
    assert seen[0].code == 2
    assert "another process is writing to the run in 'o'" in seen[0].error_line
    assert len(simulation.calls) == 1


@pytest.mark.parametrize("arguments", [("methods",), ("--help",), ("methods", "--json")])
def test_a_reader_that_leaves_gets_the_code_of_a_broken_pipe(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from gossamer.cli import main; main()", *arguments]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_program_without_stdout_and_stderr_runs_all_the_same(folder: Path) -> None:
    program = f"exec {sys.executable} -c 'from gossamer.cli import main; main()' methods >&- 2>&-"
    assert subprocess.run(["sh", "-c", program], check=False).returncode == 0


def test_a_group_without_a_command_says_that_one_is_missing(gossamer: Gossamer) -> None:
    outcome = gossamer("plan")
    assert (outcome.code, outcome.error_line) == (2, "error: a command is missing")
    assert "time" in outcome.out


@pytest.mark.parametrize("out", ["recipe.toml", "recipe.toml/below"])
def test_a_report_refuses_a_folder_that_cannot_be(
    gossamer: Gossamer, folder: Path, simulation: Any, out: str
) -> None:
    gossamer("train", "recipe.toml", "--out", "o")
    outcome = gossamer("report", "o", "--out", out)
    assert outcome.code == 2
    assert outcome.error_line.startswith(f"error: cannot make the folder {out!r}: ")


def test_sensitivity_looks_at_its_output_before_it_trains(
    gossamer: Gossamer, folder: Path, simulation: Any
) -> None:
    outcome = gossamer("sensitivity", "recipe.toml", "--out", "nowhere/subset.toml")
    assert (outcome.code, simulation.calls) == (2, [])
    assert outcome.error_line.endswith("there is no folder 'nowhere'; make it first")
