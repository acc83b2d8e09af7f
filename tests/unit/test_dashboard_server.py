"""The dashboard's HTTP server on a real socket: access, the stream, the page's files, errors as JSON."""

from __future__ import annotations

import asyncio
import datetime as dt
import http.client
import ipaddress
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.errors import InvalidRequestError, StoreUnavailableError
from statefleet.dashboard import server as server_module
from statefleet.dashboard.access import Access, is_loopback
from statefleet.dashboard.lookups import LookUps
from statefleet.dashboard.options import DashboardOptions
from statefleet.dashboard.server import Server
from statefleet.dashboard.values import column_json, row_json, typed_value
from statefleet.dashboard.watching import Watching
from tests.fed_fleet import FedFleet
from tests.served_dashboard import served

STATIC = Path(server_module.__file__).with_name("static")
TOKEN = "a-token-that-nobody-guesses"
PATHS = [
    "/",
    "/api/stream",
    "/main.js",
    "/api/shards/query-00/0",
    "/api/shards/query-00/0/keys",
    "/api/states/query-00",
    "/nothing",
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(FedFleet(2, 6)) as address:
        yield address


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with served(FedFleet(2, 6), token=TOKEN) as address:
        yield address


def ask(
    url: str, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: str | None = None
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and text of an answer; of the stream the first event."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"{host}:{port}", "Content-Length": str(len(body or "")), **(headers or {})}.items():
        connection.putheader(name, value)
    connection.endheaders(body.encode() if body else None)
    answer = connection.getresponse()
    is_stream = answer.headers.get("Content-Type") == "text/event-stream"
    text = "".join(answer.readline().decode() for _ in range(3)) if is_stream else answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text


# -- access -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "0.0.0.0",
     "[::]:80", "10.0.0.9", "localhost:80, evil.example", ""],
)  # fmt: skip
def test_a_foreign_name_that_points_to_this_machine_is_not_answered(url: str, path: str, host: str) -> None:
    code, _, text = ask(url, path, {"Host": host})
    assert code in (400, 421)
    assert "query-0" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:8080", "[::1]:1"])
def test_names_of_this_machine_are_answered_also_through_a_forwarded_port(url: str, host: str) -> None:
    assert ask(url, "/", {"Host": host})[0] == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer no"}, {"Authorization": TOKEN}, {"Cookie": "statefleet_token=no"}]
)
def test_without_the_token_nothing_is_shown(locked: str, path: str, headers: dict[str, str]) -> None:
    code, answer_headers, text = ask(locked, path, headers)
    assert code == 401
    assert "set-cookie" not in answer_headers
    assert not re.search(r"query-0|bucket|Shards|" + TOKEN, text)


def test_the_token_in_an_address_counts_once_and_becomes_a_cookie_that_scripts_do_not_see(locked: str) -> None:
    assert ask(locked, f"/api/states/query-00?token={TOKEN}")[0] == 401
    code, headers, _ = ask(locked, f"/?token={TOKEN}")
    assert (code, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= {attribute.strip() for attribute in cookie.split(";")}
    code, _, page = ask(locked, "/", {"Cookie": cookie.split(";")[0]})
    assert (code, "Statefleet" in page) == (200, True)
    assert ask(locked, "/main.js", {"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_a_cookie_is_of_one_dashboard_and_does_not_reveal_the_token(locked: str) -> None:
    _, headers, _ = ask(locked, f"/?token={TOKEN}")
    name, _, value = headers["set-cookie"].split(";")[0].partition("=")
    assert TOKEN not in headers["set-cookie"]
    assert ask(locked, "/", {"Cookie": f"{name}={TOKEN}"})[0] == 401, "the token itself is no cookie"
    assert ask(locked, "/", {"Authorization": f"Bearer {value}"})[0] == 401, "a cookie is no token"
    other_access = Access("another fleet's token", only_loopback_names=False)
    # A browser keeps both cookies: cookies do not depend on the port.
    assert other_access._cookie_name != name
    assert (
        ask(locked, "/", {"Cookie": f"{other_access._cookie_name}={other_access._cookie_value}; {name}={value}"})[0]
        == 200
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_pages_may_not_look_anything_up(url: str, headers: dict[str, str]) -> None:
    for path in ("/api/stream", "/api/states/query-00"):
        assert ask(url, path, headers)[0] == 403
    code, answer_headers, _ = ask(url, "/api/states/query-00/look-up", headers, "POST", "{}")
    assert code == 403
    assert not [name for name in answer_headers if name.startswith("access-control")]
    assert ask(url, "/", {"Sec-Fetch-Site": "cross-site"})[0] == 200, "a link to the page may be anywhere"


#: Values of headers and parts of paths that a stranger can send.
ODD = [
    b"\xff", b"Bearer \xff", b"Bearer \xed\xa0\x80", b"http://[", b"http://[::1", b"http://a]b", "http://\u2100".encode(), b"x" * 9000,
    b"%ff", b"%ED%A0%80", b"%zz", b"%", "\u00e9\u2603".encode(), b'"', b'a="\\377"', b"statefleet_x=\xff", b"1;2;=,", b"\x7f", b"",
    b"*", b"application/json; charset=nonsense", b"application/json; charset=base64", b"application/json; charset=\xff",
    b"application/json",
]  # fmt: skip
HEADERS = [
    b"Authorization", b"Origin", b"Host", b"Cookie", b"Sec-Fetch-Site", b"Content-Type", b"Content-Encoding", b"Expect", b"Upgrade",
    b"Accept", b"Accept-Encoding", b"Range", b"If-None-Match", b"Transfer-Encoding",
]  # fmt: skip
BODIES = [
    b"", b"{", b"\xff", b"[]", b"null", b"[" * 5000, b'{"key": {"a": "\\ud800"}}', b'{"key": {"\\ud800": 1}}',
    b'{"key": {}, "versions": 1e999}',
    b'{"key": {}, "versions": ' + b"9" * 5000 + b"}", b'{"key": NaN}', b'{"key":' * 900 + b"1" + b"}" * 900, b"x" * 70_000,
]  # fmt: skip


def odd_requests() -> Iterator[bytes]:
    """Yield requests with one odd thing each."""

    def request(line: bytes, *headers: tuple[bytes, bytes], body: bytes = b"") -> bytes:
        fields = {b"Host": b"127.0.0.1", b"Connection": b"close", b"Content-Length": str(len(body)).encode()}
        lines = [line, *(name + b": " + value for name, value in {**fields, **dict(headers)}.items())]
        return b"\r\n".join([*lines, b"", body])

    look_up = b"POST /api/states/query-00/look-up HTTP/1.1"
    for odd in ODD:
        for name in HEADERS:
            yield request(b"GET /main.js HTTP/1.1", (name, odd))
            yield request(look_up, (b"Content-Type", b"application/json"), (name, odd), body=b'{"key": {}}')
        for path in (
            b"",
            b"?token=",
            b"api/shards/",
            b"api/shards/q/",
            b"api/states/q?part=",
            b"api/states/q/rows?limit=",
        ):
            yield request(b"GET /" + path + odd + b" HTTP/1.1")
        yield request(odd + b" / HTTP/1.1")
    for body in BODIES:
        yield request(look_up, (b"Content-Type", b"application/json"), body=body)


def first_bytes(url: str, request: bytes) -> bytes:
    """Return the head of what is answered to a request."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer and (received := connection.recv(65536)):
            answer += received
    return answer.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize("needs_token", [False, True])
def test_whatever_a_stranger_sends_is_refused_or_answered_without_a_stack_trace(
    url: str, locked: str, needs_token: bool, caplog: pytest.LogCaptureFixture
) -> None:
    statuses = set()
    for request in odd_requests():
        head = first_bytes(locked if needs_token else url, request)
        version, status = head[:12].split()
        # HTTP/1.0 is aiohttp's own answer to what it cannot parse, before it is a request.
        assert status != b"500", request
        assert version == b"HTTP/1.0" or b"X-Content-Type-Options: nosniff" in head, request
        statuses.add((version, int(status)))
    # A line in the log for each request would fill the disk.
    assert not [record for record in caplog.records if record.exc_info]
    assert (b"HTTP/1.0", 400) in statuses
    seen = {status for version, status in statuses if version == b"HTTP/1.1"}
    assert seen == {401} if needs_token else seen >= {200, 400, 403, 404, 413, 417, 421}


def test_only_the_loopback_answers(url: str) -> None:
    port = int(url.rstrip("/").rpartition(":")[2])
    for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} | {
        "127.0.0.2"
    }:
        if address != "127.0.0.1":
            with pytest.raises(OSError):
                socket.create_connection((str(address), port), timeout=2)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopbacks_need_no_token(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.4", "head.example", "localhost.example", ""])
def test_other_hosts_need_a_token(host: str) -> None:
    assert not is_loopback(host)


def test_where_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "file:///fleet"
    default = DashboardOptions()
    assert (default.host, default.port_of(uri)) == ("127.0.0.1", default.port_of(uri))
    assert 20000 <= default.port_of(uri) < 30000
    assert DashboardOptions.of(None, None) is None
    assert DashboardOptions.of(None, 80) == DashboardOptions("127.0.0.1", 80)
    assert DashboardOptions.of("::", 0) == DashboardOptions("::", 0)
    assert ipaddress.ip_address(DashboardOptions.shown_host("0.0.0.0", "10.1.2.3")) == ipaddress.ip_address("10.1.2.3")
    assert DashboardOptions.shown_host("::1", "10.1.2.3") == "[::1]"
    with pytest.raises(InvalidRequestError, match="a port is"):
        DashboardOptions.of(None, 70000)
    monkeypatch.setenv("STATEFLEET_DASHBOARD_TOKEN", "short")
    with pytest.raises(InvalidRequestError, match="too short") as error:
        DashboardOptions.token()
    assert "short," not in str(error.value).replace("too short", "")
    monkeypatch.setenv("STATEFLEET_DASHBOARD_TOKEN", TOKEN)
    assert DashboardOptions.token() == TOKEN
    monkeypatch.setenv("STATEFLEET_DASHBOARD_TOKEN", "")
    assert DashboardOptions.token() is None


# -- the page -----------------------------------------------------------------------------------------------------


def test_the_page_fetches_nothing_from_other_sites_and_makes_no_markup_of_text(url: str) -> None:
    code, headers, page = ask(url, "/")
    assert (code, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?://", page)
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert ask(url, f"/{name}")[0] == 200, name
    for file in STATIC.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", file.read_text()
        ), file


def test_the_library_comes_with_its_licence_as_its_makers_gave_it() -> None:
    licence = (STATIC / "vendor" / "uPlot.LICENSE.txt").read_text()
    assert "MIT" in licence
    assert (
        (STATIC / "vendor" / "uPlot.min.js")
        .read_text()
        .startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    )


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/../server.py",
        "/%2e%2e/server.py",
        "/vendor/../../server.py",
        "/etc/passwd",
        "//etc/passwd",
        "/vendor",
    ],
)
def test_unknown_paths_are_not_found(url: str, path: str) -> None:
    code, headers, text = ask(url, path)
    assert code == 404
    assert "import" not in text
    assert "content-security-policy" in headers


def test_an_unknown_method_is_refused(url: str) -> None:
    assert ask(url, "/api/stream", method="DELETE")[0] == 405


# -- the stream ---------------------------------------------------------------------------------------------------


def events(url: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("GET", "/api/stream")
    answer = connection.getresponse()
    received = []
    while len(received) < count:
        name, data, end = (answer.readline().decode() for _ in range(3))
        assert end == "\n"
        received.append((name.removeprefix("event: ").strip(), json.loads(data.removeprefix("data: "))))
    connection.close()
    return received


def test_the_stream_begins_with_the_whole_picture_and_continues_with_changes(url: str) -> None:
    (first, view), (second, change) = events(url, 2)
    assert (first, second) == ("view", "change")
    assert len(view["tables"]["shards"]) == 6
    newer = change["changes"]["queries"]["set"]["query-00"]
    assert newer["version"] == view["tables"]["queries"]["query-00"]["version"] + 1
    assert "num_shards" not in newer


class Troubled:
    """A fleet whose coordinator fails at the second look, and is slow."""

    def __init__(self) -> None:
        self.fed = FedFleet(1, 2)
        self.looks = 0

    def watch(self, known: Any) -> dict[str, Any]:
        self.looks += 1
        if self.looks == 2:
            raise StoreUnavailableError("the coordinator is in trouble")
        return {**self.fed.watch(known), "took_ms": 100}

    def answering(self, status: Any) -> dict[str, bool]:
        return {}


def test_a_failing_coordinator_is_shown_and_looked_at_again_and_a_slow_one_is_looked_at_less_often() -> None:
    fleet = Troubled()
    with served(fleet) as url:
        started = time.monotonic()
        received = events(url, 3)
    # The pause is twenty times the tenth of a second that a look took.
    assert time.monotonic() - started > 1.8
    assert "in trouble" in received[1][1]["changes"]["fleet"]["set"]["fleet"]["error"]
    assert received[2][1]["changes"]["fleet"]["set"]["fleet"]["error"] is None


def test_several_browsers_share_one_look_at_the_fleet() -> None:
    fleet = Troubled()
    fleet.looks = 10
    with served(fleet) as url, ThreadPoolExecutor(8) as threads:
        views = [future.result()[0][1] for future in [threads.submit(events, url, 1) for _ in range(8)]]
    assert len(views) == 8
    assert fleet.looks <= 12


def test_a_shard_is_answered_in_full_from_the_last_report(url: str) -> None:
    code, _, text = ask(url, "/api/shards/query-00/1")
    shard = json.loads(text)
    assert (code, shard["partition_id"], shard["delta_files"]) == (200, 1, 10)
    for path in ("query-00/9", "query-00/-1", "query-00/x", "query-00/99999999999999999999", "nothing/0"):
        code, headers, text = ask(url, f"/api/shards/{path}")
        assert (code, headers["content-type"]) == (404, "application/json; charset=utf-8")
        assert json.loads(text)["kind"] == "InvalidRequestError"


# -- look-ups -----------------------------------------------------------------------------------------------------


class Answers(LookUps):
    """Look-ups that fail in each possible way."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def describe(self, state_name: str, part: str) -> dict[str, Any]:
        raise {
            "invalid": InvalidRequestError("there is no such state"),
            "away": StoreUnavailableError("nobody is there"),
        }.get(state_name, RuntimeError("a secret of the process"))

    def look_up(self, state_name: str, part: str, key: Any, versions: int) -> dict[str, Any]:
        self.requests.append((state_name, part, key, versions))
        return {"versions": [], "complete": True}


@pytest.fixture
def answering() -> Iterator[tuple[str, Answers]]:
    """A server without a fleet, with look-ups that fail."""
    loop = asyncio.new_event_loop()
    answers = Answers()
    watching = Watching(FedFleet(1, 1), lambda: 0)
    server = Server(watching, lambda: answers, ThreadPoolExecutor(1), Access(None, only_loopback_names=True))
    host, port = loop.run_until_complete(server.start("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(loop.run_forever)
        yield f"http://{host}:{port}/", answers
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        running.result(10)
    loop.close()


@pytest.mark.parametrize(
    ("state", "code", "text"),
    [
        ("invalid", 400, "there is no such state"),
        ("away", 503, "nobody is there"),
        ("broken", 500, "the look-up failed"),
    ],
)
def test_errors_are_json(answering: tuple[str, Answers], state: str, code: int, text: str) -> None:
    status, headers, body = ask(answering[0], f"/api/states/{state}")
    assert (status, headers["content-type"]) == (code, "application/json; charset=utf-8")
    assert text in json.loads(body)["error"]
    assert "secret" not in body


def test_a_look_up_is_json_with_a_key_and_nothing_else(answering: tuple[str, Answers]) -> None:
    url, answers = answering
    path, kind = "/api/states/clicks/look-up?part=left", {"Content-Type": "application/json"}
    for body in ("", "no", "[]", '{"key": 1}', '{"key": {}, "versions": "x"}'):
        assert ask(url, path, kind, "POST", body)[0] == 400, body
    assert ask(url, path, {"Content-Type": "text/plain"}, "POST", '{"key": {}}')[0] == 415
    assert ask(url, path, kind, "POST", json.dumps({"key": {"k": "x" * 100_000}}))[0] in (400, 413)
    assert not answers.requests
    assert ask(url, path, kind, "POST", '{"key": {"user": "<b>"}, "versions": 3}')[0] == 200
    assert answers.requests == [("clicks", "left", {"user": "<b>"}, 3)]


# -- values -------------------------------------------------------------------------------------------------------


UTC = dt.UTC
WINDOW = pa.struct([("start", pa.timestamp("us", tz="UTC")), ("end", pa.timestamp("us", tz="UTC"))])


@pytest.mark.parametrize(
    ("typed", "kind", "value"),
    [("u7", pa.string(), "u7"), ("7", pa.int64(), 7), (7, pa.int32(), 7), ("-1.5", pa.float64(), -1.5), ("true", pa.bool_(), True),
     (False, pa.bool_(), False), ("1.20", pa.decimal128(5, 2), Decimal("1.20")), ("0x00ff", pa.binary(), b"\x00\xff"),
     ("2025-01-31", pa.date32(), dt.date(2025, 1, 31)), ("2025-01-31 10:00:00", pa.timestamp("us"), dt.datetime(2025, 1, 31, 10)),
     ("2025-01-31T10:00:00", pa.timestamp("us", tz="UTC"), dt.datetime(2025, 1, 31, 10, tzinfo=UTC)),
     (None, pa.int64(), None), ("[1, 2]", pa.list_(pa.int64()), [1, 2]), ("", pa.string(), ""),
     ('{"start": "2025-01-01", "end": "2025-01-02"}', WINDOW,
      {"start": dt.datetime(2025, 1, 1, tzinfo=UTC), "end": dt.datetime(2025, 1, 2, tzinfo=UTC)})],
)  # fmt: skip
def test_typed_text_becomes_a_value_of_the_column(typed: Any, kind: pa.DataType, value: Any) -> None:
    parsed = typed_value(typed, kind, "k")
    assert parsed == value
    assert pa.array([parsed], kind)[0].as_py() == value


@pytest.mark.parametrize(
    ("typed", "kind"),
    [("x", pa.int64()), ("", pa.int64()), ("1.5", pa.int64()), ("x", pa.float64()), ("maybe", pa.bool_()), ("x", pa.decimal128(5)),
     ("0xzz", pa.binary()), ("today", pa.date32()), ("x", pa.timestamp("us")), ("{}", WINDOW), ("x", WINDOW),
     ("[", pa.list_(pa.int8())), ("7", pa.list_(pa.int64())), (7, pa.string()), ({"a": 1}, pa.string()), ("[]", WINDOW),
     ("[" * 100_000, pa.list_(pa.int64()))],
)  # fmt: skip
def test_text_that_is_no_value_is_refused_with_the_type(typed: Any, kind: pa.DataType) -> None:
    with pytest.raises(InvalidRequestError, match="no value of the column's type"):
        typed_value(typed, kind, "k")


def test_rows_are_json_that_a_browser_reads_exactly_and_of_a_size_that_it_can_show() -> None:
    row = {
        "big": 2**60, "small": 2**53, "nan": float("nan"), "bytes": b"\x01", "when": dt.datetime(2025, 1, 1, tzinfo=UTC),
        "list": list(range(1000)), "text": "x" * 10_000, "none": None, "deep": {"d": Decimal("1.10")}, "map": [("a", 2**60)],
    }  # fmt: skip
    shown = json.loads(json.dumps(row_json(row), allow_nan=False))
    assert (shown["big"], shown["small"], shown["nan"], shown["bytes"]) == (str(2**60), 2**53, "nan", "0x01")
    assert shown["when"] == "2025-01-01 00:00:00+00:00"
    assert (len(shown["list"]), shown["list"][-1]) == (201, "… (1000 items)")
    assert shown["text"].endswith("… (10000 characters)")
    assert (shown["none"], shown["deep"], shown["map"]) == (None, {"d": "1.10"}, [["a", str(2**60)]])
    assert (
        column_json(pa.field("w", WINDOW))["example"]
        == '{"start": "2025-01-31 13:30:00", "end": "2025-01-31 13:30:00"}'
    )
