"""Which compiled kernels on disk still are what the sources say.

Numba keeps a compiled function beside its module and takes it for good as long as that one file is unchanged; functions that it calls
from other files are compiled into it. So a changed file would go on being used in its old form by the kernels of all other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path

__all__ = ["drop_stale"]

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
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*kernels.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    kept = folder / "__pycache__"
    stamp = kept / "kernels.sha256"
    with contextlib.suppress(OSError):
        if stamp.read_text() == digest.hexdigest():
            return
    try:
        kept.mkdir(exist_ok=True)
        for pattern in ("*.nbi", "*.nbc"):
            for compiled in kept.glob(pattern):
                compiled.unlink(missing_ok=True)
        # Last: whoever dies before it leaves the work to the next process.
        beside = stamp.with_name(f"{stamp.name}.{os.getpid()}")
        beside.write_text(digest.hexdigest())
        beside.replace(stamp)
    except OSError as error:
        log.debug("compiled kernels in %s were left as they are: %s", kept, error)
