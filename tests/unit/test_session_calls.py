"""Calls of a store actor over a worker's connection: what is called comes as it was sent, and nothing else is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.model.errors import FencedError
from coordinator.model.watermarks import Watermarks
from store_actors.connections.session_calls import answered, decoded_answer, encoded_call
from store_actors.messages.requests import BatchFacts
from tests.unit.keyed_fleet import KeyedFleet

REQUEST = KeyedFleet().request(0)
GRANT = KeyedFleet().coordinator.lease(REQUEST.task, "a")
ROWS = pa.table({"k": ["a", None], "n": pa.array([1, 2], pa.int64())})
CALLS: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "a session": ("open_session", (REQUEST.task, {"state_name": "s"}, REQUEST.stores), ("id", GRANT)),
    "which stores have rows": ("filled_stores", (REQUEST.task, ("a", "b")), ("b",)),
    "rows of keys": ("session_call", ("id", "s", "multi_get", (ROWS,), (("s", "put", (ROWS,)),)), ROWS),
    "no rows": ("session_call", ("id", "s", "due", (7,), ()), ROWS.slice(0, 0)),
    "a piece": ("next_batch", ("id", "scan"), ROWS.to_batches()[0]),
    "no further piece": ("next_batch", ("id", "scan"), None),
    "a commit": ("commit_session", ("id", BatchFacts(Watermarks(1, 2), 3, 4, 5), ()), 4),
    "a commit without facts": ("commit_session", ("id", None, ()), 4),
    "the end of an epoch": ("seal_session", ("id", BatchFacts(Watermarks(1, 2), 3, 4, 5), ()), 4),
    "whether it is committed": ("session_committed", ("id",), True),
    "an end": ("end_session", ("id",), None),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_and_result_come_as_they_were_sent(call: str) -> None:
    method, arguments, result = CALLS[call]
    called: list[Any] = []
    process = SimpleNamespace(**{method: lambda *args: (called.append(args), result)[1]})
    answer = answered(process, encoded_call(method, arguments))
    assert called == [arguments]
    assert decoded_answer(method, answer) == result


def test_numbers_of_numpy_are_numbers() -> None:
    process = SimpleNamespace(session_call=lambda *args: args[3])
    answer = answered(process, encoded_call("session_call", ("id", "s", "due", (np.int64(1 << 60),), ())))
    assert decoded_answer("session_call", answer) == [1 << 60]


def test_an_error_is_of_its_class_with_its_variables() -> None:
    def fail(session_id: str) -> None:
        raise FencedError("it is another one's", session_id=session_id, version=3)

    answer = answered(SimpleNamespace(end_session=fail), encoded_call("end_session", ("id",)))
    with pytest.raises(FencedError, match=r"^it is another one's \[session_id=`id` version=`3`\]$"):
        decoded_answer("end_session", answer)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("kill", ()), ("__init__", ()), ("end_session", ()), ("end_session", (7,)), ("open_session", ({"task": 1},))],
)
def test_other_calls_are_refused(method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"^malformed call: "):
        answered(SimpleNamespace(), encoded_call(method, arguments))


@given(st.binary(max_size=40), st.integers(0, 400))
def test_damaged_calls_are_refused(noise: bytes, cut: int) -> None:
    whole = encoded_call(*CALLS["rows of keys"][:2])
    tables = msgspec.msgpack.encode(("session_call", ("id", "s", "m", (msgspec.msgpack.Ext(1, noise),), ())))
    for call in (noise, whole[:cut], tables):
        with pytest.raises(ValueError, match=r"^malformed call: "):
            answered(SimpleNamespace(), call)
