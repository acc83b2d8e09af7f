"""A connection of a client: its bytes, who it is, and what ends the statement that runs."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from contextlib import suppress
from typing import Any

from statefleet.sql_server import messages
from statefleet.sql_server.backend import Backend
from statefleet.sql_server.messages import Inbox, ProtocolError, Reader
from statefleet.sql_server.queries import Execution

log = logging.getLogger(__name__)


class Refusal(Exception):
    """What a client is told, with its SQLSTATE."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Connection(asyncio.Protocol):
    """A connection of a client. Its messages are answered in their order, by one task.

    The client names the connection by its number when it cancels a statement.
    """

    def __init__(self, server: Backend, number: int) -> None:
        self._server = server
        self._inbox = Inbox(server.limits.message_bytes)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._came = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_reading = True
        self._is_closed = False
        #: What runs now, and why it was ended.
        self._running: Execution | asyncio.Future[Any] | None = None
        self._ended_by = ""
        self.number = number
        self.secret = secrets.token_bytes(4)
        self.is_known = False

    # -- the connection, as asyncio calls it ------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._task = asyncio.get_running_loop().create_task(self._converse())

    def data_received(self, data: bytes) -> None:
        self._inbox.feed(data)
        if len(self._inbox) > self._server.limits.message_bytes and self._is_reading:
            # Whole messages wait already: more is read once they are answered.
            self._is_reading = False
            self._transport.pause_reading()
        self._came.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        self._came.set()
        self._may_write.set()
        self.end("the client is gone")

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def end(self, reason: str) -> None:
        """End the statement that runs, if there is one."""
        if self._running is not None:
            self._ended_by = reason
            self._running.cancel()

    @property
    def _is_closing(self) -> bool:
        """Whether the conversation is to end, and not only a statement of it."""
        return self._task is not None and self._task.cancelling() > 0

    async def _awaited(self, running: Execution | asyncio.Future[Any], step: Any) -> Any:
        """Return what comes of a step of what runs, which others may end meanwhile."""
        self._running = running
        try:
            return await step
        finally:
            self._running = None

    async def _next(self) -> bool:
        """Answer the next message; return whether there may be another one."""
        raise NotImplementedError

    async def _ended(self) -> None:
        """Free what the client has left."""
        raise NotImplementedError

    def close(self) -> None:
        """End the conversation."""
        if self._task is not None:
            self._task.cancel()

    # -- bytes ------------------------------------------------------------------------------------------------------

    async def _more(self) -> None:
        # Before anything is awaited: what comes meanwhile wakes this up.
        self._came.clear()
        await self._flush()
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()
        if self._is_closed:
            raise ConnectionResetError
        await self._came.wait()
        if self._is_closed:
            raise ConnectionResetError

    def _send(self, *parts: bytes) -> None:
        for part in parts:
            self._out.append(part)
            self._out_bytes += len(part)

    async def _flush(self) -> None:
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()
            self._out_bytes = 0
        if not self._may_write.is_set():
            await self._may_write.wait()
        if self._is_closed:
            raise ConnectionResetError

    # -- the beginning ----------------------------------------------------------------------------------------------

    async def _converse(self) -> None:
        try:
            async with asyncio.timeout(self._server.limits.login_s):
                is_let_in = await self._begin()
            if is_let_in:
                self.is_known = True
                while await self._next():
                    pass
        except ProtocolError as error:
            self._refuse("08P01", f"{error}; the connection is closed")
        except Refusal as refusal:
            self._refuse(refusal.code, str(refusal))
        except (OSError, TimeoutError, ssl.SSLError):
            # The client is gone, or did not say who it is in time.
            pass
        except Exception:
            log.exception("a connection has failed; the others go on")
        finally:
            try:
                await asyncio.shield(self._ended())
            finally:
                self._server.forget(self.number)
                self._transport.close()

    def _refuse(self, code: str, reason: str) -> None:
        with suppress(OSError):
            self._transport.write(b"".join([*self._out, messages.failure("FATAL", code, reason)]))

    async def _first(self) -> tuple[int, Reader]:
        while (first := self._inbox.first()) is None:
            await self._more()
        return first

    async def _begin(self) -> bool:
        """Return whether a client is let in; else it wanted a statement of another connection cancelled."""
        code, fields = await self._first()
        while code in (messages.TLS, messages.GSS):
            context = self._server.tls if code == messages.TLS else None
            if context is not None and len(self._inbox):
                # What came in the open would be taken for what came encrypted.
                raise ProtocolError("a client waits for the answer before it encrypts")
            self._transport.write(b"N" if context is None else b"S")
            if context is not None:
                self._transport = await asyncio.get_running_loop().start_tls(
                    self._transport, self, context, server_side=True, ssl_handshake_timeout=self._server.limits.login_s
                )
            code, fields = await self._first()
        if code == messages.CANCEL:
            self._server.cancel(fields.int32(), fields.data(4))
            return False
        if code >> 16 != messages.VERSION >> 16:
            raise ProtocolError("this is no client of PostgreSQL's protocol, version 3")
        given: dict[str, str] = {}
        while (name := fields.text()) != "":
            given[name] = fields.text()
        options = [name for name in given if name.startswith("_pq_.")]
        if code != messages.VERSION or options:
            self._send(messages.negotiated(options))
        await self._check_client()
        settings = self._server.settings | {"session_authorization": given.get("user", "")}
        settings["application_name"] = given.get("application_name", "")
        self._send(
            messages.authentication(0),
            messages.parameters(settings),
            messages.key_data(self.number, self.secret),
            messages.ready(b"I"),
        )
        return True

    async def _check_client(self) -> None:
        if self._server.tls is not None and self._transport.get_extra_info("ssl_object") is None:
            raise Refusal("28000", "connections here are encrypted; connect with sslmode=require or stricter")
        if self._server.is_full():
            raise Refusal("53300", "there are too many connections; close some, or start the server with more")
        if self._server.access.needs_token:
            self._send(messages.authentication(3))
            while (answer := self._inbox.next()) is None:
                await self._more()
            if answer[0] != b"p" or not self._server.access.lets_in(Reader(answer[1]).text()):
                raise Refusal("28P01", "the password is not the server's token")
