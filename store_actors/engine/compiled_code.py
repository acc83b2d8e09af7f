"""Checks that compiled kernels on disk are of the current sources, and compiles them before they are used.

Numba keeps a compiled function beside its module and takes it for good as long as that one file is unchanged; functions that it calls
from other files are compiled into it. So a changed file would go on being used in its old form by the kernels of all other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

#: Folder of the store actors' kernels.
KERNELS = Path(__file__).parent

log = logging.getLogger(__name__)


def drop_stale(package: str) -> None:
    """Delete a package's compiled kernels unless they were made of all the sources that are there now.

    To be called before a kernel is imported. Where the package's folder cannot be written nothing happens: Numba keeps nothing in it.

    Parameters
    ----------
    package
        Its folder; kernels are in its ``*kernels.py``.
    """
    folder = Path(package)
    digest = _digest(folder)
    kept = folder / "__pycache__"
    stamp = kept / "kernels.sha256"
    with contextlib.suppress(OSError):
        if stamp.read_text() == digest:
            return
    try:
        kept.mkdir(exist_ok=True)
        for pattern in ("*.nbi", "*.nbc"):
            for compiled in kept.glob(pattern):
                compiled.unlink(missing_ok=True)
        # Last: a process that dies before it leaves the work to the next one.
        beside = stamp.with_name(f"{stamp.name}.{os.getpid()}")
        beside.write_text(digest)
        beside.replace(stamp)
    except OSError as error:
        log.debug("compiled kernels in %s were left as they are: %s", kept, error)


def _digest(folder: Path) -> str:
    """Return the digest of the sources of all kernels of a package."""
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*kernels.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _whole(folder: Path) -> Path:
    """Return the path of the file with the digest of the sources that all kernels were compiled from, for this version of Python."""
    return folder / "__pycache__" / f"kernels.{sys.implementation.cache_tag}.whole"


def is_compiled(folder: Path = KERNELS) -> bool:
    """Return whether all kernels are compiled here; also where the folder cannot be written, and Numba keeps them elsewhere."""
    try:
        return _whole(folder).read_text() == _digest(folder)
    except OSError:
        return not os.access(folder, os.W_OK)


def warm(folder: Path = KERNELS, package: str = "store_actors.engine") -> Iterator[tuple[int, int]]:
    """Compile what is not compiled yet, so that no process has to do it later: about a minute of a core, once on a machine.

    Yields
    ------
    tuple of int
        Modules that are done, and all of them.
    """
    modules = sorted(source.stem for source in folder.glob("*kernels.py"))
    for done, module in enumerate(modules):
        yield done, len(modules)
        import_module(f"{package}.{module}")
    with contextlib.suppress(OSError):
        _whole(folder).write_text(_digest(folder))
    yield len(modules), len(modules)


def warm_with_progress() -> None:
    """Compile what is not compiled yet, with progress on standard error, unless all is compiled."""
    if is_compiled():
        return
    print("statefleet: compiling code, about a minute of a core, once on this machine", file=sys.stderr, flush=True)
    for done, number in warm():
        print(f"statefleet: {done} of {number} modules are compiled", file=sys.stderr, flush=True)
