"""Access control: host names of this machine on the loopback, a token elsewhere; and the security headers of every response."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

#: Host names by which a browser on this machine reaches the server, with any port, since ``ssh -L`` may forward another one.
_LOOPBACK_NAMES = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_QUERY = "token"
_SCHEME = "Bearer "

#: The page loads nothing from other origins and nothing inline, is shown in no frame, and sends its address, which may have the token,
#: to no other site.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_WRONG_HOST = (
    "This dashboard answers to 127.0.0.1, localhost and [::1] only. From another machine, forward a port to it (ssh -L) and open it "
    "under localhost.\n"
)
_WRONG_ORIGIN = "This request comes from another page; nothing was looked up.\n"
_WRONG_EXPECT = "This dashboard knows `Expect: 100-continue` only.\n"
_NO_TOKEN = "A token is needed here. `statefleet dashboard URI` prints the address with it.\n"


class Access:
    """Check of every request, which needs a token unless that is None.

    With `only_loopback_names`, requests for other host names are refused. If the owner of a page makes its name point to 127.0.0.1 (DNS
    rebinding), the browser takes this server for the same origin, and the page could read the responses; but the browser still sends
    that name. With a token this is not needed: the browser has no cookie for that name.
    """

    def __init__(self, token: str | None, *, only_loopback_names: bool) -> None:
        self._token = token
        self._only_loopback_names = only_loopback_names
        # A browser has one cookie of a name for all ports of a host, and sends it to each of them. So the name is derived from the
        # token, and another server that receives the value does not learn the token.
        self._cookie_name = f"statefleet_{_derived(token, 'name')[:16]}"
        self._cookie_value = _derived(token, "value")

    async def answer(self, handler: Handler, request: web.BaseRequest) -> web.StreamResponse:
        """Return a handler's response to a request, which is checked before the handler sees it."""
        answer: web.StreamResponse | None = self._refused(request)
        if answer is None:
            answer = self._let_in(request)
        if answer is None:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = web.Response(status=error.status, text=error.text)
        if not answer.prepared:
            answer.headers.update(_HEADERS)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    def _refused(self, request: web.BaseRequest) -> web.Response | None:
        hosts = request.headers.getall("Host", [])
        host = hosts[0] if len(hosts) == 1 else ""
        if self._only_loopback_names and _LOOPBACK_NAMES.fullmatch(host) is None:
            return web.Response(status=421, text=_WRONG_HOST)
        if self._token is not None and not self._knows_token(request):
            return web.Response(status=401, text=_NO_TOKEN, headers={"WWW-Authenticate": "Bearer"})
        # A link to the page may be on any site; the other paths are for the page only.
        if request.path != "/" and not _is_of_this_page(request, host):
            return web.Response(status=403, text=_WRONG_ORIGIN)
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            return web.Response(status=417, text=_WRONG_EXPECT)
        return None

    def _knows_token(self, request: web.BaseRequest) -> bool:
        assert self._token is not None
        header = request.headers.get("Authorization", "")
        tokens = [header.removeprefix(_SCHEME) if header.startswith(_SCHEME) else ""]
        if request.path == "/":
            tokens.append(request.query.get(_QUERY, ""))
        cookie = request.cookies.get(self._cookie_name, "")
        return _is_equal(cookie, self._cookie_value) or any(_is_equal(text, self._token) for text in tokens)

    def _let_in(self, request: web.BaseRequest) -> web.Response | None:
        """Return a redirect that moves the token from the address into a cookie, since histories and logs keep addresses."""
        if self._token is None or request.path != "/" or _QUERY not in request.query:
            return None
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(
            self._cookie_name, self._cookie_value, httponly=True, samesite="Strict", secure=request.secure, path="/"
        )
        return answer


def _derived(token: str | None, purpose: str) -> str:
    """Return a value that can be computed only with the token, and that does not reveal it."""
    return hmac.new((token or "").encode(), f"statefleet cookie {purpose}".encode(), "sha256").hexdigest()


def _is_equal(text: str, expected: str) -> bool:
    """Return whether two texts are equal, in a time that does not depend on where they differ."""
    # Bytes of a header that are no UTF-8 are surrogates here.
    return hmac.compare_digest(text.encode(errors="surrogatepass"), expected.encode())


def _is_of_this_page(request: web.BaseRequest, host: str) -> bool:
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    try:
        # Only the host is compared: a proxy that terminates TLS in front of this server uses plain HTTP.
        return origin is None or urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
