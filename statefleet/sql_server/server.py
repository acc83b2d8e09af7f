"""A server through which clients of PostgreSQL read the states of a fleet by SQL."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import threading
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, SetupError
from coordinator.runtime.extras import import_extra
from coordinator.runtime.hosts import is_loopback
from statefleet.sql_server.backend import Access, Backend, Limits
from statefleet.sql_server.catalogue import States
from statefleet.sql_server.conversation import Conversation

#: Variable of the environment that has the token.
TOKEN = "STATEFLEET_SQL_TOKEN"


class SqlServer(Backend):
    """The conversations with all clients, in the loop of one thread."""

    def __init__(self, states: States, access: Access, limits: Limits, tls: ssl.SSLContext | None) -> None:
        super().__init__(states, access, limits, tls)
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve, and return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._conversation, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """End all conversations."""
        if self._server is not None:
            self._server.close()
        for conversation in list(self._conversations.values()):
            conversation.close()
        while self._conversations:
            await asyncio.sleep(0.01)
        self.shut_down()

    def _conversation(self) -> Conversation:
        unknown = [each for each in self._conversations.values() if not each.is_known]
        if len(unknown) >= self.limits.connections:
            # Those who do not say who they are keep nobody out who does.
            unknown[0].close()
        number = secrets.randbelow(1 << 31)
        while number in self._conversations:
            number = secrets.randbelow(1 << 31)
        conversation = self._conversations[number] = Conversation(self, number)
        return conversation


class ServedSql:
    """A server that runs in a thread of this process. Made by ``fleet.serve_sql()``; it ends with :meth:`close`, or as a context."""

    def __init__(self, server: SqlServer, host: str, port: int) -> None:
        #: ``host``, ``port``: Where it listens.
        self.host = host
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="statefleet-sql", daemon=True)
        self._thread.start()
        try:
            self.port = asyncio.run_coroutine_threadsafe(server.start(host, port), self._loop).result()
        except OSError as error:
            self.close()
            raise SetupError(
                "SQL cannot be served there, and the fleet goes on without; choose another host or port",
                host=host,
                port=port,
                cause=error,
            ) from error

    @property
    def url(self) -> str:
        """The address for clients, as libpq and SQLAlchemy take it; without the token."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"postgresql://{host}:{self.port}/statefleet" + ("" if self._server.tls is None else "?sslmode=require")

    def close(self) -> None:
        """End all connections, and stop listening. A second call does nothing."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> ServedSql:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(
    states: States,
    *,
    host: str = "127.0.0.1",
    port: int = 5433,
    token: str | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    limits: Limits | None = None,
) -> ServedSql:
    """Serve states; see :meth:`LiveFleet.serve_sql <statefleet.reads.fleet.LiveFleet.serve_sql>`."""
    import_extra("duckdb")
    token = token or os.environ.get(TOKEN) or None
    if (tls_cert is None) != (tls_key is None):
        raise InvalidRequestError("TLS needs two files: tls_cert and tls_key; nothing is served")
    if not is_loopback(host) and (token is None or tls_cert is None):
        raise InvalidRequestError(
            "beyond the loopback a server needs a token and TLS, since whoever reaches it reads all states; nothing is served; set "
            f"{TOKEN}, and give tls_cert and tls_key; or serve on 127.0.0.1, and forward the port (ssh -L)",
            host=host,
        )
    context = None
    if tls_cert is not None and tls_key is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(tls_cert, tls_key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequestError(
                "the certificate and its key cannot be used; nothing is served; both are PEM files",
                cert=str(tls_cert),
                cause=error,
            ) from error
    # Arrow imports pandas at its first value: now, and not while clients wait.
    pa.scalar(0)
    return ServedSql(SqlServer(states, Access(token), limits or Limits(), context), host, port)
