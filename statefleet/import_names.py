"""The check that Statefleet's import names lead to its own packages, which are in one folder.

``coordinator``, ``store_actors`` and ``spark_jobs`` are names that a program's own modules may have. Python imports the first one on
``sys.path``. A program that would import another module is refused, before anything of that module is run.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

#: Packages that are imported by these names beside ``statefleet``.
PACKAGES = ("coordinator", "store_actors", "spark_jobs")
_FOLDER = Path(__file__).parents[1]


def check_import_names(folder: Path = _FOLDER) -> None:
    """Check that each package is imported from a folder; nothing is imported for it.

    Raises
    ------
    ImportError
        Another module is imported by one of the names, or none.
    """
    for name in PACKAGES:
        package = folder / name / "__init__.py"
        origin = _origin(name)
        if origin is None:
            raise ImportError(
                f"Statefleet's package {name!r} is not in {folder}, where the others are: install Statefleet again",
                name=name,
                path=str(folder),
            )
        if origin.resolve() != package.resolve():
            raise ImportError(
                f"import {name} leads to {origin}, and not to Statefleet's package {package.parent}: rename the first, or start the "
                f"program where {origin.parent.parent if origin.stem == '__init__' else origin.parent} is not on sys.path; Statefleet "
                "imports nothing of it",
                name=name,
                path=str(origin),
            )


def _origin(name: str) -> Path | None:
    """Return the file of the module that a top-level name leads to; the folder of a package without ``__init__.py``."""
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None) or (spec.origin if spec is not None else None)
    folders = getattr(module, "__path__", None) or (spec.submodule_search_locations if spec is not None else None) or ()
    paths = [file, *folders] if file is not None else list(folders)
    return Path(paths[0]) if paths else None
