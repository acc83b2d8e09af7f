"""Whether the lineage of this driver's queries is sent: where OpenLineage's client finds a configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.model.errors import SetupError
from coordinator.runtime.extras import import_extra

if TYPE_CHECKING:
    from spark_jobs.driver.lineage_events import QueryLineage

log = logging.getLogger(__name__)


def is_configured(environ: Mapping[str, str], folder: Path, home: Path) -> bool:
    """Return whether OpenLineage's own client finds a configuration, in variables or files, that does not turn it off."""
    if environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OPENLINEAGE_URL") or any(name.startswith("OPENLINEAGE__TRANSPORT") for name in environ):
        return True
    named = environ.get("OPENLINEAGE_CONFIG")
    files = (folder / "openlineage.yml", home / ".openlineage" / "openlineage.yml")
    return any(file.is_file() for file in ([Path(named), *files] if named else files))


def open_lineage() -> QueryLineage | None:
    """Return what sends lineage; None if it is not configured, or cannot be had, which is logged once."""
    # Neither raises where there is no such folder.
    if not is_configured(os.environ, Path(), Path(os.path.expanduser("~"))):
        return None
    try:
        lineage: QueryLineage = import_extra("spark_jobs.driver.lineage_events").QueryLineage.connected()
    except SetupError as error:
        _warn(str(error))
    except Exception as error:  # noqa: BLE001 - its configuration is wrong: queries run without lineage
        _warn(f"OpenLineage's client does not start: {type(error).__name__}: {error}")
    else:
        return lineage
    return None


@cache
def _warn(text: str) -> None:
    log.warning("no lineage is sent: %s", text)
