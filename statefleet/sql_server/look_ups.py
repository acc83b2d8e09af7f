"""Look-ups of single keys: their way round DuckDB, and the calls that all connections share."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from statefleet.reads.json_values import key_value
from statefleet.reads.projections import FoundKey
from statefleet.reads.state import LiveState
from statefleet.sql_server.messages import Column
from statefleet.sql_server.statements import PointLookUp, Value
from statefleet.sql_server.values import Encoder, PgType, type_of

#: Keys of a call at most.
_MOST_KEYS = 256
#: Calls of a state that are under way at once: usually one, so that many keys share the next; one more for each that takes so long.
_CALLS, _LONG_S = 4, 0.05


@dataclass(frozen=True)
class KeyPlan:
    """How a look-up is answered."""

    state: LiveState
    key: Sequence[tuple[pa.Field, Value]]
    #: The type of each parameter.
    parameters: Sequence[PgType]
    #: The columns of the state that are read, in the order of the result.
    names: tuple[str, ...]
    columns: Sequence[Column]
    types: Sequence[PgType]
    limit: int | None

    @classmethod
    def of(cls, look_up: PointLookUp, state: LiveState) -> KeyPlan | None:
        """Return the plan of a look-up; None if it asks for something else than the rows of a key."""
        if look_up.version is not None:
            state = state.at(look_up.version)
        schema, keys = state.schema, state.keys
        chosen = look_up.columns or tuple((name, name) for name in schema.names)
        if not keys or set(look_up.key) != set(keys) or not {name for name, _ in chosen} <= set(schema.names):
            return None
        key = [(schema.field(name), value) for name, value in look_up.key.items()]
        if not all(_is_for_keys(field.type, value) for field, value in key):
            return None
        of_parameters = {value.parameter: type_of(field.type) for field, value in key if value.parameter}
        if sorted(of_parameters) != list(range(1, len(of_parameters) + 1)):
            return None
        types = [type_of(schema.field(name).type) for name, _ in chosen]
        return cls(
            state,
            key,
            [of_parameters[number] for number in sorted(of_parameters)],
            tuple(name for name, _ in chosen),
            [Column(shown, of.oid, of.size) for (_, shown), of in zip(chosen, types, strict=True)],
            types,
            look_up.limit,
        )

    def key_of(self, parameters: Sequence[Any]) -> dict[str, Any]:
        """Return the key for some values of the parameters; a value is None if it is null, and then no row is equal to it.

        Raises
        ------
        InvalidRequestError
            A value is not of its column's type: what is equal to it, DuckDB knows.
        """
        key = {}
        for field, value in self.key:
            given = parameters[value.parameter - 1] if value.parameter else value.text
            key[field.name] = _fitting(field, given)
        return key


def _is_for_keys(of: pa.DataType, value: Value) -> bool:
    """Return whether equality with a column of a type is the same in SQL and in a look-up."""
    kinds = pa.types
    if kinds.is_string(of) or kinds.is_large_string(of):
        return value.is_text is not False
    if kinds.is_signed_integer(of) or kinds.is_boolean(of):
        return value.is_text is not True
    return value.is_text is None and (kinds.is_date32(of) or kinds.is_timestamp(of) or kinds.is_binary(of))


def _fitting(field: pa.Field, given: Any) -> Any:
    """Return a value as one of a key column, of which :func:`_is_for_keys` is true.

    Raises
    ------
    InvalidRequestError
        It is of another type, or beyond the column's range.
    """
    of = field.type
    if given is None or (isinstance(given, str) and (pa.types.is_string(of) or pa.types.is_large_string(of))):
        return given
    if isinstance(given, str):
        given = key_value(field, given)
    # Arrow would check as well, but imports pandas at its first value.
    if pa.types.is_integer(of):
        is_fitting = type(given) is int and -1 << of.bit_width - 1 <= given < 1 << of.bit_width - 1
    elif pa.types.is_timestamp(of):
        if isinstance(given, dt.datetime) and of.tz is not None and given.tzinfo is None:
            given = given.replace(tzinfo=dt.UTC)
        is_fitting = isinstance(given, dt.datetime) and (of.tz is None) == (given.tzinfo is None)
    else:
        kinds = {pa.bool_(): bool, pa.date32(): dt.date}
        is_fitting = type(given) is kinds.get(of, bytes)
    if not is_fitting:
        raise InvalidRequestError("a value does not fit its key column", column=field.name, type=str(of))
    return given


def encoders(types: Sequence[PgType], formats: Sequence[int]) -> list[Encoder]:
    """Return how the values of each column are sent."""
    return [of.binary if binary else of.text for of, binary in zip(types, formats, strict=True)]


_Group = tuple[LiveState, tuple[str, ...]]


@dataclass(slots=True)
class _Waiting:
    """Keys of a group that are to be sent, with those who wait for them, and how many calls are under way."""

    keys: deque[tuple[Mapping[str, Any], asyncio.Future[FoundKey]]]
    calls: int = 0


class LookUps:
    """Look-ups of all connections, in one thread's loop: keys that come while calls are under way are sent together.

    `threads` make the calls; `patient_threads` those for a single key whose call has failed, which may wait for a shard that is lost.
    """

    def __init__(self, threads: Executor, patient_threads: Executor) -> None:
        self._threads, self._patient_threads = threads, patient_threads
        self._groups: dict[_Group, _Waiting] = {}

    def find(self, state: LiveState, names: tuple[str, ...], key: Mapping[str, Any]) -> asyncio.Future[FoundKey]:
        """Return the rows of a key, from a call that begins after this one."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[FoundKey] = loop.create_future()
        group = state, names
        waiting = self._groups.get(group)
        if waiting is None:
            waiting = self._groups[group] = _Waiting(deque())
        waiting.keys.append((key, answer))
        if not waiting.calls:
            waiting.calls += 1
            # In the loop's next round, so that what came with it is sent with it.
            loop.call_soon(self._send, group, waiting)
        elif len(waiting.keys) == 1:
            loop.call_later(_LONG_S, self._overtake, group, waiting, answer)
        return answer

    def _overtake(self, group: _Group, waiting: _Waiting, answer: asyncio.Future[FoundKey]) -> None:
        """Send the keys that wait beside a call that takes long, if the first of them is still there."""
        if waiting.keys and waiting.keys[0][1] is answer and waiting.calls < _CALLS:
            waiting.calls += 1
            self._send(group, waiting)

    def _send(self, group: _Group, waiting: _Waiting) -> None:
        """Send the keys that wait, or end the call if there are none."""
        sent: list[tuple[Mapping[str, Any], asyncio.Future[FoundKey]]] = []
        while waiting.keys and len(sent) < _MOST_KEYS:
            key, answer = waiting.keys.popleft()
            if not answer.done():
                sent.append((key, answer))
        if not sent:
            waiting.calls -= 1
            if not waiting.calls:
                self._groups.pop(group, None)
            return
        state, names = group
        call = self._call(self._threads, state, names, [key for key, _ in sent], is_patient=False)

        def taken(done: asyncio.Future[list[FoundKey]]) -> None:
            error = _error_of(done)
            for index, (key, answer) in enumerate(sent):
                if error is None and not answer.done():
                    answer.set_result(done.result()[index])
                elif error is not None:
                    # Each by itself, so that each has its own answer or error.
                    alone = self._call(self._patient_threads, state, names, [key], is_patient=True)
                    alone.add_done_callback(partial(_pass_on, answer))
            self._send(group, waiting)

        call.add_done_callback(taken)

    def _call(
        self,
        threads: Executor,
        state: LiveState,
        names: tuple[str, ...],
        keys: Sequence[Mapping[str, Any]],
        *,
        is_patient: bool,
    ) -> asyncio.Future[list[FoundKey]]:
        find = partial(state.find_each, keys, [*dict.fromkeys(names)], is_patient=is_patient)
        return asyncio.get_running_loop().run_in_executor(threads, find)


def _error_of(done: asyncio.Future[list[FoundKey]]) -> BaseException | None:
    return asyncio.CancelledError() if done.cancelled() else done.exception()


def _pass_on(answer: asyncio.Future[FoundKey], done: asyncio.Future[list[FoundKey]]) -> None:
    error = _error_of(done)
    if answer.done():
        return
    if error is None:
        answer.set_result(done.result()[0])
    else:
        answer.set_exception(error)


class Plans:
    """Plans of look-ups by the text of their statements, for a few seconds: columns change only with a query's program.

    `state_of` returns the state that a table is.
    """

    def __init__(self, state_of: Callable[[str], LiveState], *, seconds: float = 2.0, most: int = 1000) -> None:
        self._state_of = state_of
        self._seconds, self._most = seconds, most
        self._known: dict[str, tuple[float, KeyPlan | None]] = {}

    def known(self, text: str, now_s: float) -> tuple[KeyPlan | None] | None:
        """Return the plan of a statement in a tuple; None if it has to be made."""
        entry = self._known.get(text)
        return (entry[1],) if entry is not None and now_s < entry[0] else None

    def made(self, text: str, look_up: PointLookUp, now_s: float) -> KeyPlan | None:
        """Return the plan of a look-up, which is made now: the fleet may be asked."""
        plan = KeyPlan.of(look_up, self._state_of(look_up.table))
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[text] = now_s + self._seconds, plan
        return plan
