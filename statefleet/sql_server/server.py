"""A server through which clients of PostgreSQL read the states of a fleet by SQL."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, SetupError
from coordinator.runtime.extras import import_extra
from coordinator.runtime.hosts import is_loopback
from statefleet.reads.sql import Cancellation, RunningQuery, ValuesOf, described, running
from statefleet.reads.state import LiveState
from statefleet.sql_server.catalogue import Catalogue
from statefleet.sql_server.conversation import Conversation
from statefleet.sql_server.look_ups import KeyPlan, LookUps, Plans
from statefleet.sql_server.messages import Column
from statefleet.sql_server.queries import Execution
from statefleet.sql_server.statements import Command, PointLookUp
from statefleet.sql_server.values import TEXT

#: Variable of the environment that has the token.
TOKEN = "STATEFLEET_SQL_TOKEN"
_SHORTEST = 16
#: Threads for queries, and for look-ups.
_QUERIES, _LOOK_UPS = 4, 4
#: Of PostgreSQL's settings, those that clients ask for. The first ones every client is told.
_TOLD = MappingProxyType(
    {
        "server_version": "14.0",
        "server_encoding": "UTF8",
        "client_encoding": "UTF8",
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "integer_datetimes": "on",
        "standard_conforming_strings": "on",
        "default_transaction_read_only": "on",
        "in_hot_standby": "off",
        "is_superuser": "off",
    }
)
_ASKED = MappingProxyType(
    {
        "transaction isolation level": "read committed",
        "transaction_isolation": "read committed",
        "default_transaction_isolation": "read committed",
        "transaction_read_only": "on",
        "search_path": "public",
        "max_identifier_length": "63",
        "server_version_num": "140000",
        "time zone": "UTC",
        "extra_float_digits": "1",
        "bytea_output": "hex",
        "statement_timeout": "0",
        "lc_collate": "C",
    }
)


class States(Protocol):
    """What is served: the states of a fleet."""

    def states(self) -> list[str]: ...

    def state(self, name: str, /) -> LiveState: ...

    def table(self, name: str, /) -> LiveState: ...


@dataclass(frozen=True)
class Limits:
    """What clients may have.

    Attributes
    ----------
    rows
        Rows of a result.
    seconds
        Time of a statement, with that in which its client takes the rows.
    connections
        Clients at once; as many more may be about to log in.
    memory
        Memory of a query of DuckDB's, as it is written there; what needs more is on disk.
    """

    rows: int = 100_000
    seconds: float = 60.0
    connections: int = 100
    memory: str = "512MiB"
    message_bytes: int = 1 << 20
    login_s: float = 10.0


class Access:
    """Who is let in: whoever sends the token as the password, or everybody if there is none."""

    def __init__(self, token: str | None) -> None:
        if token is not None and len(token) < _SHORTEST:
            raise InvalidRequestError(
                f"the token is too short to keep anybody out; nothing is served; take {_SHORTEST} characters or more",
                characters=len(token),
            )
        self._token = token

    @property
    def needs_token(self) -> bool:
        """Whether a client has to send it."""
        return self._token is not None

    def lets_in(self, password: str) -> bool:
        """Return whether a password is the token, in a time that does not depend on where they differ."""
        return self._token is None or hmac.compare_digest(password.encode(), self._token.encode())


class SqlServer:
    """The conversations with all clients, in the loop of one thread.

    Parameters
    ----------
    tls
        With what connections are encrypted; None to serve them in the open.
    """

    def __init__(self, states: States, access: Access, limits: Limits, tls: ssl.SSLContext | None) -> None:
        self.access, self.limits, self.tls = access, limits, tls
        self.settings = dict(_TOLD)
        self._states = states
        self._queries = ThreadPoolExecutor(_QUERIES, thread_name_prefix="statefleet-sql-query")
        self._keys = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="statefleet-sql-key")
        self.look_ups = LookUps(self._keys)
        self._plans = Plans(states.table)
        self._catalogue = Catalogue(states)
        self._conversations: dict[int, Conversation] = {}
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
        self._queries.shutdown(wait=False, cancel_futures=True)
        self._keys.shutdown(wait=False, cancel_futures=True)

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

    def forget(self, conversation: Conversation) -> None:
        """Take note that a conversation has ended."""
        self._conversations.pop(conversation.number, None)

    def is_full(self) -> bool:
        """Return whether no further client is let in."""
        return sum(each.is_known for each in self._conversations.values()) >= self.limits.connections

    def cancel(self, number: int, secret: bytes) -> None:
        """End the statement of a connection, for who knows its secret."""
        conversation = self._conversations.get(number)
        if conversation is not None and hmac.compare_digest(secret, conversation.secret):
            conversation.end("the statement was cancelled, as its client wanted")

    # -- statements -------------------------------------------------------------------------------------------------

    def known_plan(self, text: str) -> tuple[KeyPlan | None] | None:
        """Return the plan of a look-up in a tuple; None if it has to be made."""
        return self._plans.known(text, asyncio.get_running_loop().time())

    async def made_plan(self, text: str, look_up: PointLookUp) -> KeyPlan | None:
        """Return the plan of a look-up; None if DuckDB is to answer it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._queries, self._plans.made, text, look_up, loop.time())

    async def described(self, text: str) -> tuple[list[pa.DataType | None], pa.Schema]:
        """Return the types of a query's parameters, where they are known, and its columns."""

        def describe() -> tuple[list[pa.DataType | None], pa.Schema]:
            if self._catalogue.may_answer(text):
                with self._catalogue.running(text, None) as answer:
                    if answer is not None:
                        return answer[1], answer[0].schema
            return described(text, self._states.table)

        return await asyncio.get_running_loop().run_in_executor(self._queries, describe)

    def execution(self, text: str, values_of: ValuesOf) -> Execution:
        """Return a query that is to begin."""

        @contextmanager
        def opened(cancellation: Cancellation) -> Iterator[RunningQuery]:
            settings = {"memory_limit": self.limits.memory}
            if self._catalogue.may_answer(text):
                with self._catalogue.running(text, values_of, settings=settings, cancellation=cancellation) as answer:
                    if answer is not None:
                        yield answer[0]
                        return
            with running(text, self._states.table, values_of, settings=settings, cancellation=cancellation) as query:
                yield query

        return Execution(self._queries, opened, self.limits.rows)

    def columns_of(self, command: Command | None) -> list[Column]:
        """Return the columns of a command's answer."""
        return [Column(command.name, TEXT.oid, -1)] if command is not None and command.tag == "SHOW" else []

    def setting(self, name: str) -> str:
        """Return a setting as PostgreSQL has it."""
        known = {key.lower(): value for key, value in (_TOLD | _ASKED).items()}
        if name not in known:
            raise InvalidRequestError(
                "there is no such setting here; information_schema.tables has the states", setting=name
            )
        return known[name]


class ServedSql:
    """A server that runs in a thread of this process. Made by ``fleet.serve_sql()``; it ends with :meth:`close`, or as a context.

    Attributes
    ----------
    host, port
        Where it listens.
    """

    def __init__(self, server: SqlServer, host: str, port: int) -> None:
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
    return ServedSql(SqlServer(states, Access(token), limits or Limits(), context), host, port)
