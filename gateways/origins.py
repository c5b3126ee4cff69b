"""Which web pages may use a gateway from a browser: cross-origin requests (CORS) and WebSockets.

A browser tells the page's origin, and keeps answers from the page that don't allow it (https://fetch.spec.whatwg.org,
"HTTP extensions"). WebSockets are not covered by that, so their upgrades are checked here (RFC 6455, section 10.2).
Other clients send no origin and are not concerned.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aiohttp import web
from yarl import URL

from gateways.problems import Problem
from gateways.websockets import is_upgrade

if TYPE_CHECKING:
    from collections.abc import Sequence

ANY = "*"
MAX_AGE_S = 600
"""So long a browser may remember what it was allowed."""

EXPOSED = "Retry-After, X-Request-Id, x-should-retry"
"""Headers of answers that pages may read besides the few that they always may."""

_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
MAX_NAMES_CHARACTERS = 2000


def origin_of(text: str) -> str:
    """Return an origin as browsers write it.

    Raises:
        ValueError: it is none: ``null``, a path or a user in it, a wildcard.
    """
    url = URL(text)
    if url.path != "/" or url.query_string or url.fragment or url.user or url.password or ANY in text or not url.host:
        raise ValueError(f"'{text}' is no origin")
    return str(url.origin())


def problems_of(field: str, origins: Sequence[str]) -> list[str]:
    """Return what is wrong with a list of origins."""
    if list(origins) == [ANY]:
        return []
    allowed = f'allowed: origins like "https://example.com:8443", or "{ANY}" alone'
    found: list[str] = []
    for text in origins:
        try:
            origin_of(text)
        except ValueError:
            found.append(f"{field}: '{text}' is not allowed; {allowed}")
    return found


class Origins:
    """The pages that one gateway allows.

    Args:
        gateway: its name in the deployment, for messages.
        readers: origins whose pages may send requests and read answers; empty switches CORS off.
        with_credentials: these pages may send cookies, client certificates and logins of the browser.
        sockets: further origins whose pages may open WebSockets, besides the gateway's own.
    """

    def __init__(self, gateway: str, *, readers: Sequence[str], with_credentials: bool, sockets: Sequence[str]) -> None:
        self._gateway = gateway
        self._readers = _as_set(readers)
        self._with_credentials = with_credentials
        self._sockets = _as_set(sockets)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer a browser's question whether a page may send a request; None for any other request.

        Raises:
            Problem: 403, the page may not; 404, there is no such route.
        """
        asked = request.headers.get("Access-Control-Request-Method")
        origin = request.headers.get("Origin")
        if not self._readers or request.method != "OPTIONS" or asked is None or origin is None:
            return None
        if self._allowed(origin) is None:
            raise _refusal(origin, f"gateways.{self._gateway}.cors_origins")
        headers = {
            "Access-Control-Allow-Methods": ", ".join(_methods(request, asked)),
            "Access-Control-Max-Age": str(MAX_AGE_S),
            "Vary": "Access-Control-Request-Method, Access-Control-Request-Headers",
        }
        names = request.headers.get("Access-Control-Request-Headers", "").strip()
        if len(names) <= MAX_NAMES_CHARACTERS and _NAMES.fullmatch(names):
            headers["Access-Control-Allow-Headers"] = names  # none of them opens anything by itself
        return web.Response(status=204, headers=headers)

    def mark(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Add to an answer, before its head is sent, which pages may read it."""
        if not self._readers:
            return
        if ANY not in self._readers:
            response.headers.add("Vary", "Origin")
        allowed = self._allowed(request.headers.get("Origin"))
        if allowed is None:
            return
        response.headers["Access-Control-Allow-Origin"] = allowed
        response.headers["Access-Control-Expose-Headers"] = EXPOSED
        if self._with_credentials:
            response.headers["Access-Control-Allow-Credentials"] = "true"

    def check_upgrade(self, request: web.Request) -> None:
        """Refuse a WebSocket of a page that may not open one; anything else passes.

        Raises:
            Problem: 403.
        """
        origin = request.headers.get("Origin")
        if origin is None or not is_upgrade(request):
            return
        known = _known(origin)
        if ANY in self._sockets or (known is not None and (known in self._sockets or _is_own(known, request))):
            return
        raise _refusal(origin, f"gateways.{self._gateway}.allowed_origins", "the gateway's own, or ")

    def check_order(self, request: web.Request) -> None:
        """Refuse what a page has the gateway do that may not send requests.

        A browser sends a POST that looks like a form's without asking first, and only keeps the answer from the page.

        Raises:
            Problem: 403.
        """
        origin = request.headers.get("Origin")
        if origin is None or self._allowed(origin) is not None:
            return
        known = _known(origin)
        if known is None or not _is_own(known, request):
            raise _refusal(origin, f"gateways.{self._gateway}.cors_origins", "the gateway's own, or ")

    def _allowed(self, origin: str | None) -> str | None:
        """Return what an answer to this origin allows; None for nothing."""
        if origin is None:
            return None
        if ANY in self._readers:
            return ANY
        return origin if _known(origin) in self._readers else None


def _as_set(origins: Sequence[str]) -> frozenset[str]:
    return frozenset(origin if origin == ANY else origin_of(origin) for origin in origins)


def _known(origin: str) -> str | None:
    try:
        return origin_of(origin)
    except ValueError:
        return None


def _is_own(origin: str, request: web.Request) -> bool:
    """Whether a page came from where it connects to; a proxy before us may speak TLS, so the scheme doesn't matter."""
    scheme, _, host = origin.partition("://")
    return _known(f"{scheme}://{request.headers.get('Host', '')}") == f"{scheme}://{host}"


def _methods(request: web.Request, asked: str) -> list[str]:
    """Return the methods of a route.

    Raises:
        web.HTTPNotFound: there is no such route.
    """
    match request.match_info.http_exception:
        case None:
            return [asked[:20]] if asked.isalpha() else []
        case web.HTTPMethodNotAllowed() as error:
            return sorted(error.allowed_methods)
        case error:
            raise error


def _refusal(origin: str, key: str, before: str = "") -> Problem:
    return Problem(403, f"Origin: {origin[:100]} came (allowed: {before}one of {key})", param="Origin")
