"""The coordinator's memory on disk: one SQLite file, always one whole version or the next.

A version is the run's state as JSON; beside it lies a log of what happened, for people. Both are
written in one transaction. A process that is killed loses nothing that was saved; a power failure
may lose the newest saves of kind `lazy`, and then leaves an earlier whole version.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gossamer.errors import CheckpointError, ConfigError

APPLICATION_ID = 0x476F7373  # "Goss"
SCHEMA_VERSION = 1

_SCHEMA = f"""
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE state (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    revision INTEGER NOT NULL,
    document TEXT NOT NULL
);
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    revision INTEGER NOT NULL,
    kind TEXT NOT NULL,
    document TEXT NOT NULL
);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


class Store:
    """One run's file, held by one process at a time.

    Args:
        path: the file; made where it is missing.

    Raises `ConfigError` where another process holds it or it is not a coordinator's, and
    `CheckpointError` where it is damaged or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=0.2, isolation_level=None)
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigError(f"the coordinator cannot write to {path}: {error}") from None
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._db.close()
            if "locked" in str(error):
                raise ConfigError(
                    f"{path} is in use by another coordinator; stop it, or name another file"
                ) from None
            raise CheckpointError(f"{path} is no coordinator's file: {error}") from None
        except (ConfigError, CheckpointError):
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if tables == 0 and application in (0, APPLICATION_ID):
            self._db.executescript(_SCHEMA)
        elif application != APPLICATION_ID:
            raise ConfigError(f"{self.path} is an SQLite file of another program")
        elif version != SCHEMA_VERSION:
            raise CheckpointError(
                f"{self.path} has schema {version}, and this version of gossamer reads "
                f"{SCHEMA_VERSION}"
            )
        # Takes the lock, which stays until the process ends.
        self._db.executescript("BEGIN IMMEDIATE; COMMIT;")

    def load(self) -> dict[str, Any] | None:
        """The newest version, None where nothing was ever saved. Raises `CheckpointError`."""
        try:
            row = self._db.execute("SELECT document FROM state").fetchone()
            return None if row is None else _document(row[0])
        except (sqlite3.DatabaseError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from None

    def save(
        self,
        revision: int,
        document: dict[str, Any],
        events: Iterable[tuple[str, dict[str, Any]]] = (),
        *,
        lazy: bool = False,
    ) -> None:
        """Replace the version, and add to the log of events (kind, fields).

        Args:
            lazy: do not wait for the disk.

        Raises `CheckpointError` where the disk is full or gone.
        """
        text = json.dumps(document, separators=(",", ":"))
        rows = [(revision, kind, json.dumps(fields)) for kind, fields in events]
        try:
            self._db.execute(f"PRAGMA synchronous = {'NORMAL' if lazy else 'FULL'}")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT INTO state VALUES (1, ?, ?) ON CONFLICT (id) DO UPDATE "
                "SET revision = excluded.revision, document = excluded.document",
                (revision, text),
            )
            self._db.executemany(
                "INSERT INTO event (revision, kind, document) VALUES (?, ?, ?)", rows
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise CheckpointError(f"{self.path} cannot be written: {error}") from None

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """All that happened, oldest first."""
        rows = self._db.execute("SELECT kind, document FROM event ORDER BY id").fetchall()
        return [(kind, json.loads(document)) for kind, document in rows]

    def close(self) -> None:
        """Give the file free."""
        self._db.close()


def _document(text: str) -> dict[str, Any]:
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("the state is not an object")
    return document
