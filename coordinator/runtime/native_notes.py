"""Keeps the notes that Ray's C++ code writes to standard error, before it has a log file, out of a program's output."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: A line of Ray's C++ code, of level info (I) or warning (W): ``[2026-11-24 15:29:37,160 I 700 708] gcs_client.cc:96: ..``.
#: Errors are passed on.
_NOTE = re.compile(rb"\[\d{4}-\d\d-\d\d [\d:,]+ [IW] \d+ \d+\] \w+\.(?:cc|h):\d+: ")
_PIECE = 1 << 16


def stderr_without_notes() -> tuple[int, threading.Thread]:
    """Return a standard error for a child process: its output is passed on to this process's own, without Ray's notes.

    Returns
    -------
    int
        File descriptor to write to. The caller closes it once the child has it.
    threading.Thread
        Passes output on until all processes have closed the descriptor.
    """
    read, write = os.pipe()
    # A copy of descriptor 2, which may be redirected later.
    passing = threading.Thread(target=_pass_on, args=(read, os.dup(2)), name="statefleet-stderr", daemon=True)
    passing.start()
    return write, passing


@contextmanager
def native_notes_kept() -> Iterator[None]:
    """Suppress Ray's notes during an attempt whose failure is also reported in another way.

    The block must be short, as file descriptor 2 is redirected meanwhile. Output of other threads is passed on.
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
        # A process that was started meanwhile may keep the descriptor open.
        passing.join(timeout=1.0)


def _pass_on(read: int, write: int) -> None:
    rest = b""
    with suppress(OSError):  # the reader is gone
        while piece := os.read(read, _PIECE):
            *lines, rest = (rest + piece).splitlines(keepends=True)
            if rest.endswith(b"\n"):
                lines, rest = [*lines, rest], b""
            elif not rest.startswith(b"["):
                # This cannot become a note, and a reader may wait for it.
                lines, rest = [*lines, rest], b""
            os.write(write, b"".join(line for line in lines if not _NOTE.match(line)))
        os.write(write, rest)
    # Reads on, so that later writers are not blocked.
    with suppress(OSError):
        while os.read(read, _PIECE):
            pass
    os.close(read)
    os.close(write)
