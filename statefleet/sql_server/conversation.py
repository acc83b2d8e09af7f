"""The conversation with one client: its statements one after the other, and their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, StateStoreError
from statefleet.sql_server import messages, statements
from statefleet.sql_server.backend import Backend
from statefleet.sql_server.connection import Connection, Refusal
from statefleet.sql_server.look_ups import KeyPlan, encoders
from statefleet.sql_server.messages import Bind, Column, ProtocolError, Reader
from statefleet.sql_server.queries import EndedError, Execution, TooMuchError
from statefleet.sql_server.values import TEXT, PgType, parameter, type_of

log = logging.getLogger(__name__)

#: Characters of a statement. DuckDB plans longer ones for minutes, and does not look whether they were cancelled.
_LONGEST = 1 << 17
#: Of a connection: prepared statements and portals at most, and characters of the statements together.
_STATEMENTS, _PORTALS, _CHARACTERS = 1000, 100, 8 << 20
#: Bytes of an answer that are sent while more of it is made.
_SENT_BYTES = 64 << 10


@dataclass(slots=True)
class _Prepared:
    text: str
    #: Types of its parameters, as the client gave them; 0 where it left that open.
    oids: list[int]
    command: statements.Command | None
    look_up: statements.PointLookUp | None
    #: Types of its parameters and columns of its result, once the client has been told.
    described: tuple[list[int], list[Column]] | None = None

    def oid(self, index: int, known: Sequence[PgType]) -> int:
        """Return the type of a parameter: the client's, else that of what it is compared with, else text."""
        given = self.oids[index] if index < len(self.oids) else 0
        return given or (known[index].oid if index < len(known) else TEXT.oid)


@dataclass(slots=True)
class _Portal:
    """A statement with values for its parameters."""

    prepared: _Prepared
    bind: Bind
    plan: KeyPlan | None = None
    execution: Execution | None = None
    #: Rows that a look-up found and that are not sent yet; None if nothing was looked up.
    found: list[dict[str, Any]] | None = None
    sent: int = 0

    def values(self, known: Sequence[PgType]) -> list[Any]:
        """Return the values of the parameters, whose types are those that the client gave, or else these."""
        given = zip(self.bind.formats, self.bind.values, strict=True)
        return [parameter(self.prepared.oid(index, known), *each) for index, each in enumerate(given)]


class Conversation(Connection):
    """A connection whose messages are answered in their order, by one task."""

    def __init__(self, server: Backend, number: int) -> None:
        super().__init__(server, number)
        #: ``I``, ``T`` in a transaction, ``E`` in one that failed.
        self._status = b"I"
        self._is_skipping = False
        #: Seconds that a statement may take.
        self._seconds = server.limits.seconds
        self._prepared: dict[str, _Prepared] = {}
        self._portals: dict[str, _Portal] = {}

    async def _ended(self) -> None:
        for portal in list(self._portals.values()):
            await self._end_portal(portal)

    # -- messages ---------------------------------------------------------------------------------------------------

    async def _next(self) -> bool:
        while (message := self._inbox.next()) is None:
            await self._more()
        kind, body = message
        if kind == b"X":
            await self._flush()
            return False
        if kind == b"S":
            self._is_skipping = False
            await self._end_portals()
            self._send(messages.ready(self._status))
        elif kind == b"Q":
            await self._answered(self._simple(Reader(body).text()))
            await self._end_portals()
            self._is_skipping = False
            self._send(messages.ready(self._status))
        elif kind == b"H":
            await self._flush()
        elif not self._is_skipping:
            step = self._STEPS.get(kind)
            if step is None:
                raise ProtocolError("a message is of a kind that is not known here")
            self._is_skipping = not await self._answered(step(self, body))
        if self._out_bytes > _SENT_BYTES:
            await self._flush()
        return True

    async def _answered(self, work: Any) -> bool:
        """Do what a message asks for; return False if it failed, which the client was told."""
        self._ended_by = ""
        try:
            await work
        except (ConnectionError, ProtocolError):
            raise
        except asyncio.CancelledError:
            if self._is_closing or not self._ended_by:
                raise
            self._fail(Refusal("57014", self._ended_by))
        except Exception as error:  # noqa: BLE001 - the client is told, and the log has what is not the client's
            self._fail(Refusal("57014", self._ended_by) if self._ended_by else error)
        else:
            return True
        return False

    def _fail(self, error: Exception) -> None:
        code, reason = "XX000", f"{type(error).__name__}; the log of the server has more; nothing was changed"
        if isinstance(error, Refusal):
            code, reason = error.code, str(error)
        elif isinstance(error, statements.ReadOnlyError):
            code, reason = "25006", str(error)
        elif isinstance(error, TooMuchError | EndedError):
            code, reason = ("54000" if isinstance(error, TooMuchError) else "57014"), str(error)
        elif isinstance(error, InvalidRequestError):
            code, reason = "42000", str(error)
        elif isinstance(error, StateStoreError):
            code, reason = "58000", f"{type(error).__name__}: {error}"
        else:
            log.error("a statement has failed", exc_info=error)
        self._send(messages.failure("ERROR", code, reason))
        if self._status == b"T":
            self._status = b"E"

    async def _simple(self, text: str) -> None:
        each = statements.split(text)
        if not each:
            self._send(messages.EMPTY_QUERY)
        for statement in each:
            portal = _Portal(self._understood(statement, []), Bind("", "", [], [], []))
            self._portals[""] = portal
            try:
                columns = await self._begun(portal)
                if columns:
                    self._send(messages.row_description(columns, self._formats(portal, len(columns))))
                await self._run(portal, 0)
            finally:
                await self._end_portal(portal)

    def _understood(self, text: str, oids: list[int]) -> _Prepared:
        if len(text) > _LONGEST:
            raise Refusal("54000", f"a statement has {_LONGEST:,} characters at most; send values as parameters")
        look_up = statements.look_up_of(text)
        command = None if look_up is not None or statements.is_empty(text) else statements.command_of(text)
        return _Prepared(text, oids, command, look_up)

    async def _parse(self, body: bytes) -> None:
        fields = Reader(body)
        name, text = fields.text(), fields.text()
        oids = [fields.int32() & 0xFFFFFFFF for _ in range(fields.int16())]
        if len(statements.split(text)) > 1:
            raise Refusal("42601", "a prepared statement is one statement; prepare each by itself")
        others = [prepared for other, prepared in self._prepared.items() if other != name]
        if len(others) >= _STATEMENTS or sum(len(other.text) for other in others) + len(text) > _CHARACTERS:
            raise Refusal("54000", "the connection has too many prepared statements; close some (DEALLOCATE ALL)")
        self._prepared[name] = self._understood(text, oids)
        self._send(messages.PARSE_COMPLETE)

    async def _bind(self, body: bytes) -> None:
        bind = Bind.of(body)
        prepared = self._statement(bind.statement)
        if len(bind.formats) != len(bind.values):
            raise ProtocolError("each parameter has a format")
        old = self._portals.pop(bind.portal, None)
        if old is not None:
            await self._end_portal(old)
        if len(self._portals) >= _PORTALS:
            raise Refusal("54000", "the connection has too many portals; close some")
        self._portals[bind.portal] = _Portal(prepared, bind, await self._plan(prepared))
        self._send(messages.BIND_COMPLETE)

    async def _describe(self, body: bytes) -> None:
        is_portal, name = body[:1] == b"P", Reader(body[1:]).text()
        if is_portal:
            portal = self._portal(name)
            columns = await self._begun(portal)
            formats = self._formats(portal, len(columns))
        else:
            prepared = self._statement(name)
            oids, columns = await self._described(prepared)
            formats = [0] * len(columns)
            self._send(messages.parameter_description(oids))
        self._send(messages.row_description(columns, formats) if columns else messages.NO_DATA)

    async def _described(self, prepared: _Prepared) -> tuple[list[int], list[Column]]:
        if prepared.command is not None or statements.is_empty(prepared.text):
            return [], self._server.columns_of(prepared.command)
        plan = await self._plan(prepared)
        if plan is not None:
            known, columns = list(plan.parameters), list(plan.columns)
        else:
            arrow, schema = await self._server.described(prepared.text)
            known, columns = _types(arrow), _columns(schema)
        prepared.described = [prepared.oid(index, known) for index in range(len(known))], columns
        return prepared.described

    async def _execute(self, body: bytes) -> None:
        fields = Reader(body)
        await self._run(self._portal(fields.text()), fields.int32())

    async def _close(self, body: bytes) -> None:
        kind, name = body[:1], Reader(body[1:]).text()
        if kind == b"P":
            portal = self._portals.pop(name, None)
            if portal is not None:
                await self._end_portal(portal)
        else:
            self._prepared.pop(name, None)
        self._send(messages.CLOSE_COMPLETE)

    _STEPS = {b"P": _parse, b"B": _bind, b"D": _describe, b"E": _execute, b"C": _close}  # noqa: RUF012

    def _statement(self, name: str) -> _Prepared:
        if name not in self._prepared:
            raise Refusal("26000", f"there is no prepared statement {name!r}; prepare it again")
        return self._prepared[name]

    def _portal(self, name: str) -> _Portal:
        if name not in self._portals:
            raise Refusal("34000", f"there is no portal {name!r}; it ends with its transaction")
        return self._portals[name]

    async def _plan(self, prepared: _Prepared) -> KeyPlan | None:
        if prepared.look_up is None:
            return None
        known = self._server.known_plan(prepared.text)
        return known[0] if known is not None else await self._server.made_plan(prepared.text, prepared.look_up)

    # -- running ----------------------------------------------------------------------------------------------------

    def _formats(self, portal: _Portal, columns: int) -> list[int]:
        given = portal.bind.result_formats
        formats = given * columns if len(given) == 1 else given or [0] * columns
        if len(formats) != columns:
            raise ProtocolError("each column of a result has a format")
        return formats

    async def _begun(self, portal: _Portal) -> list[Column]:
        """Begin what a portal runs, if it is not, and return its columns."""
        prepared = portal.prepared
        if self._status == b"E" and (prepared.command is None or prepared.command.tag not in ("COMMIT", "ROLLBACK")):
            raise Refusal("25P02", "the transaction has failed; end it: ROLLBACK")
        if prepared.command is not None or statements.is_empty(prepared.text):
            return self._server.columns_of(prepared.command)
        if portal.plan is None and prepared.look_up is not None:
            portal.plan = await self._plan(prepared)
        if portal.plan is not None and portal.found is None and portal.execution is None:
            await self._look_up(portal, portal.plan)
        if portal.found is not None and portal.plan is not None:
            return list(portal.plan.columns)
        if portal.execution is None:
            portal.execution = self._server.execution(prepared.text, lambda types: portal.values(_types(types)))
            self._expire_after(portal.execution)
            await self._awaited(portal.execution, portal.execution.begin())
        columns = _columns(portal.execution.schema)
        if prepared.described is not None and [column.oid for column in columns] != [
            column.oid for column in prepared.described[1]
        ]:
            raise Refusal(
                "0A000", "the result has other types than before; cast the parameters: $1::bigint; or prepare it again"
            )
        return columns

    def _expire_after(self, running: Execution | asyncio.Future[Any]) -> None:
        """End what runs when its time is over; and the connection, if its client does not take the rows."""
        seconds = self._seconds
        whose = (
            "raise statement_timeout"
            if seconds < self._server.limits.seconds
            else "start the server with more --seconds"
        )
        reason = f"the statement took more than {seconds:g} s; ask for less, or {whose}"

        def expire() -> None:
            if self._running is running:
                self.end(reason)
            elif isinstance(running, Execution):
                running.cancel(reason)
                if not self._may_write.is_set():
                    self._transport.abort()

        handle = asyncio.get_running_loop().call_later(seconds, expire)
        running.add_done_callback(lambda _: handle.cancel())

    async def _look_up(self, portal: _Portal, plan: KeyPlan) -> None:
        """Find the rows of a key; what is no value of a key's type is left to DuckDB."""
        try:
            key = plan.key_of(portal.values(plan.parameters))
        except (InvalidRequestError, IndexError):
            return
        if any(value is None for value in key.values()):
            portal.found = []
            return
        answer = self._server.look_ups.find(plan.state, plan.names, key)
        self._expire_after(answer)
        found = await self._awaited(answer, answer)
        portal.found = list(found.rows[: plan.limit])

    async def _run(self, portal: _Portal, most: int) -> None:
        """Send the rows of a portal, at most so many if that is not 0."""
        columns = await self._begun(portal)
        command = portal.prepared.command
        if command is not None:
            self._obey(command)
        elif portal.found is not None and portal.plan is not None:
            self._send_found(portal, portal.plan, most)
        elif portal.execution is not None:
            await self._send_rows(portal, portal.execution, self._formats(portal, len(columns)), most)
        else:
            self._send(messages.EMPTY_QUERY)

    def _send_found(self, portal: _Portal, plan: KeyPlan, most: int) -> None:
        assert portal.found is not None
        rows = portal.found[: most or None]
        encode = list(zip(plan.names, encoders(plan.types, self._formats(portal, len(plan.names))), strict=True))
        for row in rows:
            try:
                values = [None if row[name] is None else encoder(row[name]) for name, encoder in encode]
            except KeyError as error:
                raise Refusal("0A000", "the columns of the state have changed; ask again") from error
            self._send(messages.data_row(values))
        del portal.found[: len(rows)]
        portal.sent += len(rows)
        self._send(messages.SUSPENDED if portal.found and most else messages.complete(f"SELECT {portal.sent}"))

    async def _send_rows(self, portal: _Portal, execution: Execution, formats: list[int], most: int) -> None:
        left = most or None
        while left != 0:
            sent = await self._awaited(execution, execution.rows(formats, left))
            if sent is None:
                self._send(messages.complete(f"SELECT {portal.sent}"))
                return
            count, data = sent
            portal.sent += count
            left = None if left is None else left - count
            self._send(data)
            if self._out_bytes > _SENT_BYTES:
                await self._flush()
        self._send(messages.SUSPENDED)

    def _obey(self, command: statements.Command) -> None:
        tag = command.tag
        if tag == "BEGIN" or (tag == "ROLLBACK" and command.name == "to"):
            self._status = b"T"
        elif tag in ("COMMIT", "ROLLBACK"):
            tag = "ROLLBACK" if self._status == b"E" else tag
            self._status = b"I"
        elif tag == "DISCARD ALL" or (tag == "DEALLOCATE" and command.name.lower() == "all"):
            self._prepared.clear()
        elif tag == "DEALLOCATE":
            self._prepared.pop(command.name, None)
        elif command.name == "statement_timeout" and tag == "SHOW":
            self._send(messages.data_row([f"{1000 * self._seconds:.0f}ms".encode()]))
        elif command.name == "statement_timeout":
            self._seconds = min(command.seconds or self._server.limits.seconds, self._server.limits.seconds)
        elif tag == "SHOW":
            self._send(messages.data_row([self._server.setting(command.name).encode()]))
        self._send(messages.complete(tag))

    async def _end_portals(self) -> None:
        """End all portals, unless a transaction keeps them."""
        if self._status == b"I" and self._portals:
            for portal in self._portals.values():
                await self._end_portal(portal)
            self._portals.clear()

    async def _end_portal(self, portal: _Portal) -> None:
        if portal.execution is not None:
            await portal.execution.close()
            portal.execution = None


def _types(arrow: Sequence[pa.DataType | None]) -> list[PgType]:
    return [TEXT if of is None else type_of(of) for of in arrow]


def _columns(schema: pa.Schema) -> list[Column]:
    types = [type_of(of.type) for of in schema]
    return [Column(of.name, kind.oid, kind.size) for of, kind in zip(schema, types, strict=True)]
