"""What Ray's compiled parts write to standard error by themselves, before they have a log, is kept out of what a program prints."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["native_notes_kept", "stderr_without_notes"]

#: A line of Ray's C++ code that tells something (I) or warns (W): ``[2026-11-24 15:29:37,160 I 700 708] gcs_client.cc:96: ..``.
#: Errors go on.
_NOTE = re.compile(rb"\[\d{4}-\d\d-\d\d [\d:,]+ [IW] \d+ \d+\] \w+\.(?:cc|h):\d+: ")
_PIECE = 1 << 16


def stderr_without_notes() -> tuple[int, threading.Thread]:
    """A standard error for a process that is started: all that it writes is passed on to this process's own, but for Ray's notes.

    Returns
    -------
    int
        File descriptor to write to. Whoever gave it to another process closes it.
    threading.Thread
        Passes on until all have closed it.
    """
    read, write = os.pipe()
    # As the process would have had it, whatever becomes of this process's own later.
    passing = threading.Thread(target=_pass_on, args=(read, os.dup(2)), name="statefleet-stderr", daemon=True)
    passing.start()
    return write, passing


@contextmanager
def native_notes_kept() -> Iterator[None]:
    """Keep Ray's notes to itself while something is tried that tells its failure in another way, too.

    For moments only: file descriptor 2 is another one meanwhile. What other threads write is passed on.
    """
    before = os.dup(2)
    write, passing = stderr_without_notes()
    try:
        os.dup2(write, 2)
        os.close(write)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        # A process that was started meanwhile may have it for longer.
        passing.join(timeout=1.0)


def _pass_on(read: int, write: int) -> None:
    rest = b""
    with suppress(OSError):  # nobody takes it any more
        while piece := os.read(read, _PIECE):
            *lines, rest = (rest + piece).splitlines(keepends=True)
            if rest.endswith(b"\n"):
                lines, rest = [*lines, rest], b""
            elif not rest.startswith(b"["):
                # Not the beginning of a note: somebody may wait for it.
                lines, rest = [*lines, rest], b""
            os.write(write, b"".join(line for line in lines if not _NOTE.match(line)))
        os.write(write, rest)
    # Who writes on is not held up.
    with suppress(OSError):
        while os.read(read, _PIECE):
            pass
    os.close(read)
    os.close(write)
