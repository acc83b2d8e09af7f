"""A DuckDB that reaches what it is given and nothing else: no file, no network, no extension, no variable of the program."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

__all__ = ["isolated_database", "lock_settings"]

#: A query may come from whoever may read states, as by ``statefleet sql``; it runs with the rights of the process.
_SETTINGS = MappingProxyType(
    {
        "enable_external_access": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "python_enable_replacements": "false",
    }
)


@contextmanager
def isolated_database() -> Iterator[Any]:
    """An in-memory database. What does not fit its memory goes to a folder that only this user may read, and that goes with it."""
    # Late: most readers have no need of it.
    import duckdb

    with (
        tempfile.TemporaryDirectory(prefix="statefleet-sql-") as folder,
        duckdb.connect(config={**_SETTINGS, "temp_directory": folder}) as database,
    ):
        yield database


def lock_settings(database: Any) -> None:
    """From here on no query changes a setting of the database."""
    database.execute("SET lock_configuration = true")
