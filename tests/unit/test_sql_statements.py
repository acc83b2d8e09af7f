"""What a statement is, and values in PostgreSQL's forms."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.model.errors import InvalidRequestError
from statefleet.reads.sql import _OF_VERSION
from statefleet.sql_server.catalogue import _DIALECT, _LONGEST, Catalogue
from statefleet.sql_server.messages import Inbox, ProtocolError, Reader
from statefleet.sql_server.statements import Command, ReadOnlyError, command_of, is_empty, look_up_of, split
from statefleet.sql_server.values import TYPES, parameter, type_of


@pytest.mark.parametrize(
    ("text", "table", "columns", "key", "limit", "version"),
    [
        ("select * from t where k = $1", "t", None, {"k": ("$1", 1, None)}, None, None),
        ("SELECT a,b AS c FROM t WHERE k='it''s'", "t", (("a", "a"), ("b", "c")), {"k": ("it's", 0, None)}, None, None),
        ('select "A b" from "public"."x.y" t where t."k" = -5 and "l" = true ;', "x.y", (("A b", "A b"),),
         {"k": ("-5", 0, False), "l": ("true", 0, False)}, None, None),
        ("select t.a\nfrom public.t\nwhere public.t.k = $1::VARCHAR limit 7 as of version 41", "t", (("a", "a"),),
         {"k": ("$1", 1, True)}, 7, 41),
        ("select a from t as u where u.k = $1::int8", "t", (("a", "a"),), {"k": ("$1", 1, False)}, None, None),
    ],
)  # fmt: skip
def test_a_look_up_is_recognised(
    text: str, table: str, columns: object, key: dict[str, object], limit: int | None, version: int | None
) -> None:
    found = look_up_of(text)
    assert found is not None
    assert (found.table, found.columns, found.limit, found.version) == (table, columns, limit, version)
    assert {name: (value.text, value.parameter, value.is_text) for name, value in found.key.items()} == key


@pytest.mark.parametrize(
    "text",
    [
        "select * from t",
        "select * from t where k > 1",
        "select * from t where k = 1 or k = 2",
        "select * from t where k = 1 and k = 2",
        "select * from t where k = null",
        "select * from t where k = l",
        "select * from t where k = 1.5",
        "select * from t where k = $1::date",
        "select * from t, u where k = 1",
        "select * from s.t where k = 1",
        "select u.a from t where k = 1",
        "select distinct a from t where k = 1",
        "select a + 1 from t where k = 1",
        "select a b from t where k = 1",
        "select * from t where k = 1 limit 0",
        "select * from t where k = 1 offset 1",
        "select * from t where k = 1 -- and",
        "select * from t where k = 1; select 2",
        "select * from t where k = 'a' 'b'",
        "select * from t where (k = 1)",
        "with t as (select 1) select * from t where k = 1",
    ],
)
def test_other_queries_are_no_look_ups(text: str) -> None:
    assert look_up_of(text) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["a,", "a ", " ", '"', "''", "a.", "a as b,", "k=1 and ", "select ", "("])
def test_no_text_takes_long_to_be_recognised(piece: str) -> None:
    for text in (
        f"select {piece * 600} from t where k = 1",
        f"select a from t where {piece * 600}",
        f"select a from {piece * 600} where",
    ):
        look_up_of(text[:1999])
        split(text * 50)
        is_empty(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    ["'", '"', "/*", "$a$", "$", "--", " ", "a", "::", "''::", "(", "-", ";", "pg_catalog ", "as ", "in(select case "],
)
def test_the_longest_texts_are_gone_through_once(piece: str) -> None:
    text = f"set x{piece * (1_000_000 // len(piece))}"
    for each in (text, text + "'", text[5:], text[5:] + "x"):
        with contextlib.suppress(InvalidRequestError):
            split(each)
        is_empty(each)
        look_up_of(each)
        _OF_VERSION.search(each)
        _DIALECT.sub("", each[:_LONGEST])
        Catalogue.may_answer(each)
        with contextlib.suppress(ReadOnlyError):
            command_of(each)


def test_statements_are_separated() -> None:
    texts = [
        "select ';'",
        ' select ";" ',
        " select $$;$$",
        " select $a$;$$;$a$ ",
        "/* ; */ select 1 -- ;\n",
        " select 'it''s;' ",
    ]
    assert split(";".join(texts)) == [text.lstrip() if index else text for index, text in enumerate(texts)]
    assert split(" ;; -- nothing\n; /* ; */ ") == []
    assert split("select 1;") == ["select 1"]
    with pytest.raises(InvalidRequestError, match="1,000 statements"):
        split("select 1;" * 1002)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("BEGIN", Command("BEGIN")),
        ("start transaction read only", Command("BEGIN", "only")),
        ("rollback to savepoint a", Command("ROLLBACK", "to")),
        ("SET TimeZone TO 'UTC'", Command("SET", "timezone")),
        ("set time zone 'UTC'", Command("SET", "time zone")),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", Command("SET", "characteristics")),
        ("set extra_float_digits = 3", Command("SET", "extra_float_digits")),
        ("set statement_timeout = 1500", Command("SET", "statement_timeout", 1.5)),
        ("SET SESSION statement_timeout TO '2min';", Command("SET", "statement_timeout", 120.0)),
        ("set local statement_timeout='3 s'", Command("SET", "statement_timeout", 3.0)),
        ("set statement_timeout to default", Command("SET", "statement_timeout")),
        ("reset statement_timeout", Command("RESET", "statement_timeout")),
        ("show  transaction isolation LEVEL ;", Command("SHOW", "transaction isolation level")),
        ('deallocate "S 1"', Command("DEALLOCATE", '1"')),
        ("select 1", None),
        (" (select 1)", None),
        ("-- set\nwith a as (select 1) from a", None),
        ("show tables", None),
    ],
)
def test_commands_of_a_session(text: str, command: Command | None) -> None:
    assert command_of(text) == command


@pytest.mark.parametrize(
    "text", ["set threads = 1", "set", "reindex", "notify x", "declare c cursor for select 1", "?", ""]
)
def test_other_commands_are_refused(text: str) -> None:
    with pytest.raises(ReadOnlyError, match="nothing was changed"):
        command_of(text)


# -- values -----------------------------------------------------------------------------------------------------------

_VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.bool_(): st.booleans(),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(exclude_characters="\0", codec="utf-8")),
    pa.binary(): st.binary(),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.decimal128(38, 9): st.decimals(allow_nan=False, allow_infinity=False, places=9, min_value=-(10**28), max_value=10**28),
    pa.list_(pa.int32()): st.lists(st.none() | st.integers(-(2**31), 2**31 - 1)),
    pa.list_(pa.string()): st.lists(st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"))),
}  # fmt: skip


@pytest.mark.parametrize("arrow", _VALUES, ids=str)
def test_values_come_back_from_text_and_binary(arrow: pa.DataType) -> None:
    of = type_of(arrow)

    @given(_VALUES[arrow])
    def check(value: object) -> None:
        text, binary = of.text(value), of.binary(value)
        assert parameter(of.oid, 0, text) == value
        assert parameter(of.oid, 1, binary) == value

    check()


def test_numbers_are_as_postgresql_has_them() -> None:
    numeric = type_of(pa.decimal128(10, 3))
    for text in ("0", "1", "-1.5", "10000", "12345678.000100", "0.0001", "-0.00012345", "1E+8", "99999999999999999999"):
        value = decimal.Decimal(text)
        got = parameter(1700, 1, numeric.binary(value))
        assert (got, got.as_tuple().exponent) == (value, min(int(value.as_tuple().exponent), 0))
    # As PostgreSQL sends 12345.678: digits of base 10,000 around the point.
    assert numeric.binary(decimal.Decimal("12345.678")) == struct.pack("!hhHhhhh", 3, 1, 0, 3, 1, 2345, 6780)
    assert parameter(1700, 1, numeric.binary(decimal.Decimal("NaN"))).is_nan()
    assert type_of(pa.float32()).text(0.1) == b"0.1"
    assert [type_of(pa.float64()).text(value) for value in (float("nan"), float("-inf"))] == [b"NaN", b"-Infinity"]
    assert type_of(pa.map_(pa.string(), pa.int64())).text([("a", 1)]) == b'{"a": 1}'
    assert (
        type_of(pa.duration("us")).text(dt.timedelta(days=-1, seconds=3661, microseconds=5))
        == b"0 mons -1 days 01:01:01.000005"
    )
    assert type_of(pa.list_(pa.list_(pa.int64()))).name == "json"
    names = ["NULL", "null", None, "", " ", '"', "\\", "\\\n", "{}", "a,b"]
    of_texts = type_of(pa.list_(pa.string()))
    assert parameter(of_texts.oid, 0, of_texts.text(names)) == names


@pytest.mark.parametrize(
    ("oid", "is_binary", "data"),
    [(20, 0, b"x"), (20, 1, b"123"), (16, 0, b"perhaps"), (1082, 0, b"2020-02-31"), (17, 0, b"abc"), (25, 0, b"\xff"), (999999, 0, b""),
     (1083, 1, b"12345678"), (1016, 0, b"{{1}}"), (1016, 1, b"123"), (1700, 0, b"one")],
)  # fmt: skip
def test_a_parameter_that_is_not_of_its_type_is_refused(oid: int, is_binary: int, data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="parameter is"):
        parameter(oid, is_binary, data)


def test_every_type_has_its_number() -> None:
    assert all(of.oid == oid or of.name in ("text", "_text") for oid, of in TYPES.items())


# -- messages ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([b"Q", b"P", b"S"]), st.binary(max_size=40))), st.integers(1, 9))
def test_messages_are_found_however_their_bytes_come(sent: list[tuple[bytes, bytes]], step: int) -> None:
    data = b"".join(kind + struct.pack("!I", len(body) + 4) + body for kind, body in sent)
    inbox, got = Inbox(100), []
    for at in range(0, len(data), step):
        inbox.feed(data[at : at + step])
        while (message := inbox.next()) is not None:
            got.append(message)
    assert got == sent


@given(st.binary(max_size=60))
def test_no_bytes_are_more_than_a_protocol_error(data: bytes) -> None:
    inbox, fields = Inbox(100), Reader(data)
    inbox.feed(data)
    for take in (inbox.first, inbox.next, fields.int16s, fields.text, fields.int32, lambda: fields.data(3)):
        with contextlib.suppress(ProtocolError):
            take()
