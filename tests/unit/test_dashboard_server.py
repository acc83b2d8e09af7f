"""The dashboard's HTTP server on a real socket: access, the page's files, the fleet's status, look-ups, errors as JSON."""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.model.errors import InvalidRequestError, StoreUnavailableError
from coordinator.runtime.hosts import is_loopback
from statefleet.dashboard import server as server_module
from statefleet.dashboard.access import Access
from statefleet.dashboard.options import DashboardOptions
from statefleet.reads.fleet import LiveFleet
from tests.fed_fleet import FedFleet
from tests.served_dashboard import served

STATIC = Path(server_module.__file__).with_name("static")
TOKEN = "a-token-that-nobody-guesses"
PATHS = ["/", "/api/fleet", "/main.js", "/api/states/query-00", "/nothing"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(FedFleet(2, 6).status) as address:
        yield address


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with served(FedFleet(2, 6).status, token=TOKEN) as address:
        yield address


def ask(
    url: str, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: str | None = None
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and text of an answer."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"{host}:{port}", "Content-Length": str(len(body or "")), **(headers or {})}.items():
        connection.putheader(name, value)
    connection.endheaders(body.encode() if body else None)
    answer = connection.getresponse()
    text = answer.read().decode()
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
    assert ask(locked, f"/api/fleet?token={TOKEN}")[0] == 401
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
    both = f"{other_access._cookie_name}={other_access._cookie_value}; {name}={value}"
    assert ask(locked, "/", {"Cookie": both})[0] == 200


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
    for path in ("/api/fleet", "/main.js"):
        assert ask(url, path, headers)[0] == 403
    code, answer_headers, _ = ask(url, "/api/states/query-00", headers, "POST", "{}")
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
    b'{"key": {"k0": 1e999, "k1": {}}}', b'{"key": {}, "part": 7}',
    b'{"key": {"k0": ' + b"9" * 5000 + b"}}", b'{"key": NaN}', b'{"key":' * 900 + b"1" + b"}" * 900, b"x" * 70_000,
]  # fmt: skip


def odd_requests() -> Iterator[bytes]:
    """Yield requests with one odd thing each."""

    def request(line: bytes, *headers: tuple[bytes, bytes], body: bytes = b"") -> bytes:
        fields = {b"Host": b"127.0.0.1", b"Connection": b"close", b"Content-Length": str(len(body)).encode()}
        lines = [line, *(name + b": " + value for name, value in {**fields, **dict(headers)}.items())]
        return b"\r\n".join([*lines, b"", body])

    look_up = b"POST /api/states/clicks HTTP/1.1"
    for odd in ODD:
        for name in HEADERS:
            yield request(b"GET /main.js HTTP/1.1", (name, odd))
            yield request(look_up, (b"Content-Type", b"application/json"), (name, odd), body=b'{"key": {}}')
        for path in (b"", b"?token=", b"api/fleet?", b"api/states/"):
            yield request(b"GET /" + path + odd + b" HTTP/1.1")
        yield request(odd + b" / HTTP/1.1")
        yield request(b"POST /api/states/" + odd + b" HTTP/1.1", (b"Content-Type", b"application/json"), body=b"{}")
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


def test_loopbacks_need_no_token_and_others_do() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.4", "head.example", "localhost.example", ""]))


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
    licence, library = ((STATIC / "vendor" / name).read_text() for name in ("uPlot.LICENSE.txt", "uPlot.min.js"))
    assert "MIT" in licence
    assert library.startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")


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
    assert ask(url, "/api/fleet", method="DELETE")[0] == 405


# -- the fleet and its states -------------------------------------------------------------------------------------


def test_the_status_is_json_that_is_compressed_for_who_takes_it(url: str) -> None:
    code, headers, text = ask(url, "/api/fleet")
    answer = json.loads(text)
    assert (code, headers["content-type"], answer["error"]) == (200, "application/json; charset=utf-8", None)
    assert [query["name"] for query in answer["fleet"]["queries"]] == ["query-00", "query-01"]
    assert sum(len(query["shards"]) for query in answer["fleet"]["queries"]) == 6
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("GET", "/api/fleet", headers={"Accept-Encoding": "gzip"})
    compressed = connection.getresponse()
    assert compressed.getheader("Content-Encoding") == "gzip"
    assert len(compressed.read()) < len(text) / 3
    connection.close()


def look_up(url: str, state: str, body: str) -> tuple[int, dict[str, object]]:
    code, headers, text = ask(url, f"/api/states/{state}", {"Content-Type": "application/json"}, "POST", body)
    assert headers["content-type"] == "application/json; charset=utf-8"
    return code, json.loads(text)


def test_a_key_is_looked_up_by_the_text_of_its_columns(url: str) -> None:
    key = {"k0": "2026-01-01 00:02:50", "k1": "user-0b"}
    code, found = look_up(url, "clicks", json.dumps({"key": key}))
    assert (code, found["version"], found["more"], found["parts"]) == (200, 43, False, [])
    assert found["rows"] == [["2026-01-01 00:02:50+00:00", "user-0b", "33", "1", "33"]]
    columns = found["columns"]
    assert isinstance(columns, list)
    assert columns[:3:2] == [
        {"name": "k0", "type": "timestamp[us, tz=UTC]", "is_key": True},
        {"name": "a0_max", "type": "int64", "is_key": False},
    ]
    assert look_up(url, "clicks", json.dumps({"key": {**key, "k1": None}}))[1]["rows"] == []
    described = look_up(url, "profiles", "{}")[1]
    assert (described["part"], "rows" in described) == ("default", False)


@pytest.mark.parametrize(
    ("state", "body", "text"),
    [
        ("nothing", "{}", "no such state"),
        ("profiles", '{"part": "left"}', "part"),
        ("clicks", '{"key": {"k0": "2026-01-01"}}', "a value for each key column"),
        ("clicks", '{"key": {"k0": "soon", "k1": "u"}}', "does not fit its key column"),
        ("clicks", '{"key": {"k0": "2026-01-01", "k1": 7}}', "does not fit its key column"),
        ("clicks", '{"key": 1}', "a look-up is"),
        ("clicks", '{"key": {}, "part": 1}', "a look-up is"),
        ("clicks", "[]", "a look-up is"),
        ("clicks", "", "a look-up is"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_in_words(url: str, state: str, body: str, text: str) -> None:
    code, answer = look_up(url, state, body)
    assert (code, answer["kind"]) == (400, "InvalidRequestError")
    assert text in str(answer["error"])


def test_a_look_up_is_json_of_a_bounded_size(url: str) -> None:
    assert ask(url, "/api/states/clicks", {"Content-Type": "text/plain"}, "POST", "{}")[0] == 415
    assert look_up(url, "clicks", json.dumps({"key": {"k0": "", "k1": "x" * 60_000}}))[0] == 400
    large = '"' + "x" * 70_000
    assert ask(url, "/api/states/clicks", {"Content-Type": "application/json"}, "POST", large)[0] in (400, 413)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (StoreUnavailableError("nobody is there"), 503, "nobody is there"),
        (RuntimeError("a secret of the process"), 500, "the look-up failed"),
    ],
)
def test_errors_are_json_without_what_only_the_log_may_tell(error: Exception, code: int, text: str) -> None:
    def fleet() -> LiveFleet:
        raise error

    with served(FedFleet(1, 1).status, fleet=fleet) as url:
        status, answer = look_up(url, "clicks", "{}")
    assert status == code
    assert text in str(answer["error"])
    assert "secret" not in str(answer)
