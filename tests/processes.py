"""Processes of tests: servers, their ports on loopback, and their ends; pauses."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

#: Another user of the machine. Only a superuser can become one.
NOBODY = 65534
#: Begins a program that is run by another user, who may not be able to read this one's Python: what it needs is imported before.
AS_NOBODY = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def end_with_parent() -> None:
    """Have this process end with its parent (Linux): for `preexec_fn` of a server's process."""
    # A killed test process must not leave a server behind.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end_process(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    """End a process: by SIGTERM, and by SIGKILL if it has not ended in time."""
    process.terminate()
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that no process listens on, all different."""
    with ExitStack() as sockets:
        opened = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listening.getsockname()[1] for listening in opened]


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process while the context lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
