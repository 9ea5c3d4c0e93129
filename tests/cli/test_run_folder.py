"""Run folders: made late, never overwritten, never half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gossamer.config import Recipe, build_recipe
from gossamer.errors import CheckpointError, ConfigError
from gossamer.report.comparison import entries_of
from gossamer.report.files import to_json, write_atomically
from gossamer.report.run_folder import RunFolder, claim_next, read_json_object


@pytest.fixture
def recipe() -> Recipe:
    return build_recipe({"method": {"name": "diloco"}}, base=Path.cwd())


def test_a_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "summary.json"
    write_atomically(target, "old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, "new content")
    assert target.read_text() == "old"


def test_a_write_leaves_nothing_beside_its_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.json", "1")
    write_atomically(tmp_path / "a.json", b"2")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "2"


def test_json_is_strict() -> None:
    written = to_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": (1, None)})
    assert json.loads(written) == {"a": None, "b": [None, 1.5], "c": [1, None]}


def test_create_makes_parents_and_keeps_the_recipe(tmp_path: Path, recipe: Recipe) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "down", recipe)
    folder.close()
    assert RunFolder(folder.path).recipe() == recipe


def test_an_empty_folder_is_taken_and_a_full_one_refused(tmp_path: Path, recipe: Recipe) -> None:
    RunFolder.create(tmp_path, recipe).close()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"not empty.*--out.*--resume"):
        RunFolder.create(tmp_path, recipe)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_out_may_not_be_or_lie_below_a_file(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="file"):
            RunFolder.create(path, recipe)


def test_default_folders_are_numbered_on(tmp_path: Path) -> None:
    for name in ("diloco-2", "diloco-9", "diloco-x", "my-diloco-40"):
        (tmp_path / name).mkdir()
    assert claim_next("diloco", tmp_path) == tmp_path / "diloco-10"
    assert claim_next("diloco", tmp_path) == tmp_path / "diloco-11"
    assert claim_next("other", tmp_path / "new") == tmp_path / "new" / "other-1"


def test_events_are_on_disk_line_by_line(tmp_path: Path, recipe: Recipe) -> None:
    folder = RunFolder.create(tmp_path, recipe)
    folder.record("round", {"round": 1, "note": "a\nb\u2028c"})
    reader = RunFolder(tmp_path)
    assert reader.events() == [
        {"schema_version": 1, "kind": "round", "round": 1, "note": "a\nb\u2028c"}
    ]
    folder.record("measure", {"round": 1})
    assert [e["kind"] for e in reader.events()] == ["round", "measure"]
    assert [e["kind"] for e in reader.events("measure")] == ["measure"]
    folder.close()


def test_a_torn_last_line_is_left_out(tmp_path: Path, recipe: Recipe) -> None:
    folder = RunFolder.create(tmp_path, recipe)
    folder.record("round", {"round": 1})
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rou')
    assert [e["round"] for e in folder.events()] == [1]


def _checkpoint(folder: Path, rounds: int) -> Path:
    path = folder / "checkpoints" / f"round-{rounds:06d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    return path


@pytest.mark.parametrize("with_line", [True, False])
def test_reopening_forgets_what_came_after_the_checkpoint(
    tmp_path: Path, recipe: Recipe, with_line: bool
) -> None:
    folder = RunFolder.create(tmp_path, recipe)
    folder.record("start", {})
    for done in range(1, 5):
        folder.record("round", {"round": done})
        if done == 2 and with_line:
            folder.record("checkpoint", {"round": 2})
    folder.close()
    _checkpoint(tmp_path, 1)
    newest = _checkpoint(tmp_path, 2)
    again = RunFolder(tmp_path)
    assert again.reopen() == newest
    again.record("round", {"round": 3})
    again.close()
    told = [(e["kind"], e.get("round")) for e in again.events() if e["kind"] != "checkpoint"]
    assert told == [("start", None), ("round", 1), ("round", 2), ("round", 3)]


def test_an_incomplete_checkpoint_does_not_count(tmp_path: Path, recipe: Recipe) -> None:
    folder = RunFolder.create(tmp_path, recipe)
    folder.close()
    _checkpoint(tmp_path, 3)
    (tmp_path / "checkpoints" / "round-000009").mkdir()
    (tmp_path / "checkpoints" / ".round-000012.partial").mkdir()
    latest = folder.latest_checkpoint()
    assert latest is not None
    assert latest.name == "round-000003"


def test_reopening_without_a_checkpoint_says_how_to_start_again(
    tmp_path: Path, recipe: Recipe
) -> None:
    folder = RunFolder.create(tmp_path, recipe)
    folder.close()
    with pytest.raises(ConfigError, match=r"no checkpoint.*gossamer train .*config.toml"):
        folder.reopen()


def test_discard_removes_what_create_made_and_nothing_else(tmp_path: Path, recipe: Recipe) -> None:
    own, given = tmp_path / "own", tmp_path / "given"
    given.mkdir()
    for path in (own, given):
        RunFolder.create(path, recipe).discard()
    assert not own.exists()
    assert list(given.iterdir()) == []


def test_what_is_missing_is_a_clear_refusal(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"is not a run: it has no config.toml"):
        RunFolder(tmp_path).recipe()
    folder = RunFolder.create(tmp_path, recipe)
    folder.close()
    with pytest.raises(ConfigError, match=r"has not finished.*--resume"):
        folder.summary()
    folder.write_summary({"method": "diloco"})
    with pytest.raises(ConfigError, match=r"no model.safetensors"):
        folder.averaged_model()
    (tmp_path / "summary.json").write_text("[1")
    with pytest.raises(CheckpointError, match="cannot read"):
        folder.summary()
    (tmp_path / "summary.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="object"):
        read_json_object(tmp_path / "summary.json")


def test_parameters_come_back_bit_for_bit(tmp_path: Path, recipe: Recipe) -> None:
    folder = RunFolder.create(tmp_path, recipe)
    folder.close()
    parameters = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).T  # not contiguous
    shared = parameters[0]
    folder.write_parameters(recipe, parameters, {"a": shared, "tied": shared})
    assert torch.equal(folder.worker_parameters(), parameters)
    model = folder.averaged_model()
    assert torch.equal(model["a"], shared)
    assert torch.equal(model["tied"], shared)
    assert read_json_object(tmp_path / "model.json")["model"] == "llama-tiny"


def test_labels_and_folders_are_unique() -> None:
    written = ["diloco", "diloco", "diloco-2", "a:b=c", "a-b=c", "x:y=[1,2]", "../evil"]
    entries = entries_of(written)
    assert [e.written for e in entries] == written
    for names in ([e.label for e in entries], [e.folder for e in entries]):
        assert len(set(names)) == len(names)
    assert [e.label for e in entries[:2]] == ["diloco", "diloco-2"]
    assert all("/" not in e.folder and not e.folder.startswith(".") for e in entries)
