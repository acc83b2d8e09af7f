"""A DuckDB database without access to files, the network, extensions and the variables of the program."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from coordinator.runtime.extras import import_extra

#: A query may come from any user who may read states, as with ``statefleet sql``; it runs with the rights of the process.
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
def isolated_database(settings: Mapping[str, str] = MappingProxyType({})) -> Iterator[Any]:
    """Open an in-memory database. Data beyond its memory is in a folder that only this user can read, and that is deleted with it.

    `settings` are further ones of DuckDB's: ``memory_limit``, say.
    """
    # Imported here, since most readers do not need it.
    duckdb = import_extra("duckdb")
    with (
        tempfile.TemporaryDirectory(prefix="statefleet-sql-") as folder,
        duckdb.connect(config={**settings, **_SETTINGS, "temp_directory": folder}) as database,
    ):
        yield database
