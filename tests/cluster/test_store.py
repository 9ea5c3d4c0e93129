"""The coordinator's file: one version or the next, whatever happens in between."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.cluster.store import SCHEMA_VERSION, Store
from gossamer.errors import CheckpointError, ConfigError

# Saves version 1, then version 2, and kills itself at one statement of the second transaction.
VICTIM = """
import os, signal, sqlite3, sys
from pathlib import Path
from gossamer.cluster import store

class Victim(sqlite3.Connection):
    statements = None
    def _count(self):
        if self.statements is not None:
            if self.statements == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.statements -= 1
    def execute(self, *given):
        self._count()
        return super().execute(*given)
    def executemany(self, *given):
        self._count()
        return super().executemany(*given)

connect = sqlite3.connect
store.sqlite3.connect = lambda *given, **named: connect(*given, factory=Victim, **named)
opened = store.Store(Path(sys.argv[1]))
opened.save(1, {"version": 1, "filling": "x" * 200_000}, [("one", {})])
opened._db.statements = int(sys.argv[2])
opened.save(2, {"version": 2, "filling": "y" * 200_000}, [("two", {}), ("three", {})])
opened._db.statements = None
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("statement", "version"),
    [(1, 1), (2, 1), (3, 1), (4, 1), (9, 2)],
    ids=["before", "before the state", "before the events", "before the commit", "after"],
)
def test_a_process_killed_while_it_writes_leaves_one_version_or_the_next(
    tmp_path: Path, statement: int, version: int
) -> None:
    path = tmp_path / "run.sqlite"
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, str(path), str(statement)], check=False, timeout=60
    )
    assert victim.returncode == -signal.SIGKILL
    store = Store(path)
    saved = store.load()
    assert saved is not None and saved["version"] == version
    assert saved["filling"] == "xy"[version - 1] * 200_000
    assert [kind for kind, _ in store.events()] == ["one", "two", "three"][: 2 * version - 1]
    store.save(3, {"version": 3})
    assert store.load() == {"version": 3}
    store.close()


WRITER = """
import sys
from pathlib import Path
from gossamer.cluster.store import Store

store = Store(Path(sys.argv[1]))
for version in range(1, 10_000):
    print("begun", version, flush=True)
    store.save(version, {"filling": [version] * 100_000}, [("saved", {})], lazy=version % 2 > 0)
    print("done", version, flush=True)
"""


@pytest.mark.parametrize("begun", [1, 4, 7])
def test_a_process_killed_at_any_moment_loses_nothing_that_was_saved(
    tmp_path: Path, begun: int
) -> None:
    path = tmp_path / "run.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line == f"begun {begun}\n":
                break
        writer.kill()
        done = [line for line in writer.stdout.read().splitlines() if line.startswith("done")]
    newest = begun - 1 + len(done)
    store = Store(path)
    saved = store.load()
    version = saved["filling"][0] if saved else 0
    assert version in (newest, newest + 1)
    assert saved is None or saved["filling"] == [version] * 100_000
    assert len(store.events()) == version
    store.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_what_was_saved_is_there_again(tmp_path: Path, lazy: bool) -> None:
    path = tmp_path / "deep" / "run.sqlite"
    store = Store(path)
    assert store.load() is None
    for version in range(3):
        store.save(version, {"version": version}, [("saved", {"at": version})], lazy=lazy)
    store.close()
    store = Store(path)
    assert store.load() == {"version": 2}
    assert store.events() == [("saved", {"at": version}) for version in range(3)]
    store.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.sqlite")
    with pytest.raises(ConfigError, match="in use by another coordinator"):
        Store(tmp_path / "run.sqlite")
    store.save(1, {"mine": True})
    store.close()
    again = Store(tmp_path / "run.sqlite")
    assert again.load() == {"mine": True}
    again.close()


def test_another_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    store = Store(path)
    store.save(1, {"version": 1})
    store.close()
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    database.close()
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=f"has schema {SCHEMA_VERSION + 1}, and this version"):
        Store(path)
    assert path.read_bytes() == before


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    text, foreign = tmp_path / "text", tmp_path / "foreign"
    text.write_text("a recipe, say\n" * 200)
    with pytest.raises(CheckpointError, match="is no coordinator's file"):
        Store(text)
    database = sqlite3.connect(foreign)
    database.execute("CREATE TABLE bookmarks (address)")
    database.close()
    with pytest.raises(ConfigError, match="another program"):
        Store(foreign)
    with pytest.raises(ConfigError, match="cannot write to"):
        Store(text / "below" / "run.sqlite")


def test_damage_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    store = Store(path)
    store.save(1, {"filling": "x" * 100_000})
    store.close()
    content = bytearray(path.read_bytes())
    content[8192:] = bytes(len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read|no coordinator's file"):
        Store(path).load()


def test_a_full_disk_is_an_error_and_keeps_the_version(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.sqlite")
    store.save(1, {"version": 1})
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*full"):
        store.save(2, {"filling": "x" * 100_000})
    assert store.load() == {"version": 1}
    store.save(3, {"version": 3})
    assert store.load() == {"version": 3}
    store.close()
