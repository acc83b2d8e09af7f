"""What all connections to a server of SQL share: the states, limits, who is let in, look-ups and queries."""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from statefleet.reads.sql import Cancellation, RunningQuery, ValuesOf, described, running
from statefleet.sql_server.catalogue import Catalogue, States
from statefleet.sql_server.look_ups import KeyPlan, LookUps, Plans
from statefleet.sql_server.messages import Column
from statefleet.sql_server.queries import Execution
from statefleet.sql_server.statements import Command, PointLookUp
from statefleet.sql_server.values import TEXT

#: Characters of a token at least.
_SHORTEST = 16
#: Threads for queries, for look-ups, and for those that wait for a shard.
_QUERIES, _LOOK_UPS, _PATIENT = 16, 8, 8
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
        "lc_collate": "C",
    }
)


@dataclass(frozen=True)
class Limits:
    """What clients may have."""

    #: Rows of a result.
    rows: int = 100_000
    #: Time of a statement, with that in which its client takes the rows.
    seconds: float = 60.0
    #: Clients at once; as many more may be about to log in.
    connections: int = 100
    #: Memory of a query of DuckDB's, as it is written there; what needs more is on disk.
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


class Client(Protocol):
    """A connection, as the others know it."""

    is_known: bool
    secret: bytes

    def end(self, reason: str) -> None: ...

    def close(self) -> None: ...


class Backend:
    """What all connections share: the states, who may read them, and what runs. `tls` encrypts them; None to serve them in the open."""

    def __init__(self, states: States, access: Access, limits: Limits, tls: ssl.SSLContext | None) -> None:
        self.access, self.limits, self.tls = access, limits, tls
        self.settings = dict(_TOLD)
        self._states = states
        self._queries = ThreadPoolExecutor(_QUERIES, thread_name_prefix="statefleet-sql-query")
        self._keys = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="statefleet-sql-key")
        self._patient = ThreadPoolExecutor(_PATIENT, thread_name_prefix="statefleet-sql-patient")
        self.look_ups = LookUps(self._keys, self._patient)
        self._plans = Plans(states.table)
        self._catalogue = Catalogue(states)
        self._conversations: dict[int, Client] = {}

    def shut_down(self) -> None:
        """Begin nothing more."""
        for threads in (self._queries, self._keys, self._patient):
            threads.shutdown(wait=False, cancel_futures=True)

    def forget(self, number: int) -> None:
        """Take note that a conversation has ended."""
        self._conversations.pop(number, None)

    def is_full(self) -> bool:
        """Return whether no further client is let in."""
        return sum(each.is_known for each in self._conversations.values()) >= self.limits.connections

    def cancel(self, number: int, secret: bytes) -> None:
        """End the statement of a connection, for who knows its secret."""
        client = self._conversations.get(number)
        if client is not None and hmac.compare_digest(secret, client.secret):
            client.end("the statement was cancelled, as its client wanted")

    # -- statements -------------------------------------------------------------------------------------------------

    def known_plan(self, text: str) -> tuple[KeyPlan | None] | None:
        """Return the plan of a look-up in a tuple; None if it has to be made."""
        return self._plans.known(text, asyncio.get_running_loop().time())

    async def made_plan(self, text: str, look_up: PointLookUp) -> KeyPlan | None:
        """Return the plan of a look-up; None if DuckDB is to answer it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._patient, self._plans.made, text, look_up, loop.time())

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
