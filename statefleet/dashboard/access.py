"""Who may look: names of this machine on the loopback, whoever has the token elsewhere; and what browsers are told to keep to."""

from __future__ import annotations

import hmac
import ipaddress
import re
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

__all__ = ["Access", "is_loopback"]

#: What a browser on this machine calls it. Any port: ``ssh -L`` forwards another one here.
_OWN_NAMES = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_QUERY = "token"
_SCHEME = "Bearer "

#: Nothing from elsewhere, nothing inline, in nobody's frame; addresses with a token in them go to nobody.
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
_NO_TOKEN = "A token is needed here. `statefleet dashboard URI` prints the address with it.\n"


def is_loopback(host: str) -> bool:
    """Whether a server that is bound there can be reached from its own machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Access:
    """Lets a request through, or not.

    Parameters
    ----------
    token
        What whoever asks must know; None where nobody must.
    only_own_names
        Whether requests for other hosts are refused. A page whose name its owner makes point to 127.0.0.1 (DNS rebinding) is of the
        same origin as this server for the browser that shows it, and could read what is shown. The browser still sends that name. With
        a token this is not needed: the browser has no cookie for that name.
    """

    def __init__(self, token: str | None, *, only_own_names: bool) -> None:
        self._token = token
        self._only_own_names = only_own_names
        # Browsers have one cookie of a name for all ports of a host, and send it to each of them: so the name is this dashboard's own,
        # and whoever else is sent the value does not learn the token.
        self._cookie_name = f"statefleet_{_derived(token, 'name')[:16]}"
        self._cookie_value = _derived(token, "value")

    def middleware(self) -> Middleware:
        """What every request goes through."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        return check

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
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

    @property
    def headers(self) -> dict[str, str]:
        """What goes with an answer that is sent piece by piece."""
        return {**_HEADERS, "Cache-Control": "no-store"}

    def _refused(self, request: web.Request) -> web.Response | None:
        hosts = request.headers.getall("Host", [])
        host = hosts[0] if len(hosts) == 1 else ""
        if self._only_own_names and _OWN_NAMES.fullmatch(host) is None:
            return web.Response(status=421, text=_WRONG_HOST)
        if self._token is not None and not self._knows_token(request):
            return web.Response(status=401, text=_NO_TOKEN, headers={"WWW-Authenticate": "Bearer"})
        # A link to the page may be anywhere; what is below is for the page only.
        if request.path != "/" and not _is_of_this_page(request, host):
            return web.Response(status=403, text=_WRONG_ORIGIN)
        return None

    def _knows_token(self, request: web.Request) -> bool:
        assert self._token is not None
        header = request.headers.get("Authorization", "")
        given = [header.removeprefix(_SCHEME) if header.startswith(_SCHEME) else ""]
        if request.path == "/":
            given.append(request.query.get(_QUERY, ""))
        cookie = request.cookies.get(self._cookie_name, "")
        return _is_equal(cookie, self._cookie_value) or any(_is_equal(text, self._token) for text in given)

    def _let_in(self, request: web.Request) -> web.Response | None:
        """Take the token from the address into a cookie: addresses are kept in histories and logs."""
        if self._token is None or request.path != "/" or _QUERY not in request.query:
            return None
        answer = web.Response(status=303, headers={"Location": "/"})
        facts = self._cookie_name, self._cookie_value
        answer.set_cookie(*facts, httponly=True, samesite="Strict", secure=request.secure, path="/")
        return answer


def _derived(token: str | None, purpose: str) -> str:
    """What only who knows the token can compute, and from which nobody learns it."""
    return hmac.new((token or "").encode(), f"statefleet cookie {purpose}".encode(), "sha256").hexdigest()


def _is_equal(given: str, expected: str) -> bool:
    """In a time that tells nothing of where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _is_of_this_page(request: web.Request, host: str) -> bool:
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    # By the host alone: what ends TLS in front of this server speaks to it without.
    return origin is None or urlsplit(origin).netloc.lower() == host.lower()
