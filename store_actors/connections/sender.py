"""Frames that are sent over a connection without anybody waiting for it."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from coordinator.runtime.runtime import Runtime


class FrameSender:
    """Sends frames in their order: at once where the connection takes them, which saves a switch to another thread; or else on one.

    One that cannot be sent ends the connection, as what follows would not be whole: its reader learns that, and further frames are
    dropped. Thread-safe.

    Parameters
    ----------
    sealed
        Returns the bytes that are sent for a frame, and is called in the order in which they are sent.
    """

    def __init__(
        self, connection: socket.socket, runtime: Runtime, sealed: Callable[[bytes], bytes] = lambda frame: frame
    ) -> None:
        self._connection, self._threads, self._sealed = connection, runtime.threads, sealed
        self._guard = self._threads.lock()
        self._waiting: deque[tuple[bytes, Callable[[], None]]] = deque()
        #: Set once all that waits is sent; None if nothing waits.
        self._sent: Any = None
        self._is_over = False

    def send(self, frame: bytes, sent: Callable[[], None] = lambda: None, *, is_last: bool = False) -> None:
        """Send a frame, now or later, and nothing after the last one.

        Then a function is called, without the lock, as it may send over another connection.
        """
        with self._guard:
            if self._is_over:
                return
            self._is_over = is_last
            # Empty frames only carry what follows their sending.
            frame = self._sealed(frame) if frame else frame
            if self._sent is None:
                frame = frame[self._sent_at_once(frame) :]
            if frame:
                self._waiting.append((frame, sent))
                if self._sent is None:
                    self._sent = self._threads.future()
                    try:
                        self._threads.start(self._send_waiting, "statefleet-epoch-answers")
                    except RuntimeError:  # there is no thread for it
                        self._cut()
                        raise
                return
        sent()

    def _sent_at_once(self, frame: bytes) -> int:
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._cut()
            return len(frame)

    def _cut(self) -> None:
        """End the connection, with the lock."""
        self._is_over = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._waiting.clear()
        self._end_waiting()

    def _end_waiting(self) -> None:
        """Note that nothing waits any more, with the lock."""
        if self._sent is not None:
            self._sent.set_result(None)
            self._sent = None

    def _send_waiting(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._end_waiting()
                    return
                frame, sent = self._waiting.popleft()
            try:
                self._connection.sendall(frame)
                sent()
            except BaseException as error:
                with self._guard:
                    self._cut()
                if not isinstance(error, OSError):
                    raise

    def beat(self, frame: bytes) -> None:
        """Send a frame if none waits: it only says that this process is there."""
        if self._sent is None:
            self.send(frame)

    def finish(self) -> None:
        """Send nothing more, and wait until all is sent."""
        with self._guard:
            self._is_over = True
            sent = self._sent
        if sent is not None:
            sent.result()
