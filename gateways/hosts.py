"""By which names a gateway may be addressed: what keeps web pages out that rebind their own name to its address.

A page of ``evil.example`` whose name server points at this host after the page is loaded is of the same origin as the
gateway, for the browser and for any check of ``Origin`` against ``Host`` (DNS rebinding). It can't choose ``Host``,
though: that is its own name. An address can't be rebound, and ``localhost`` is resolved by no name server (RFC 6761,
section 6.3), so these are always allowed. A gateway that wants keys is no use to such a page, which has none.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING

from yarl import URL

from gateways.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

ANY = "*"
_LOCAL = "localhost"
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*")


def problems_of(field: str, hosts: Sequence[str]) -> list[str]:
    """Return what is wrong with a list of hosts."""
    if list(hosts) == [ANY]:
        return []
    allowed = f'allowed: names like "gpu-box.example", without scheme or port, or "{ANY}" alone'
    wrong = [host for host in hosts if not (_NAME.fullmatch(host.lower()) or _is_address(host))]
    return [f"{field}: '{host}' is not allowed; {allowed}" for host in wrong]


class Hosts:
    """The names of one gateway.

    Args:
        gateway: its name in the deployment, for messages.
        named: those that a person allows; `ANY` checks nothing.
        bound: where it listens; a name there is allowed.
    """

    def __init__(self, gateway: str, *, named: Sequence[str], bound: str) -> None:
        self._gateway = gateway
        self._is_told = bool(named)
        self._allows_any = ANY in named
        self._allowed = {_LOCAL, *(name.lower() for name in (*named, bound) if name)}

    def check(self, request: web.Request, *, is_guarded: bool) -> None:
        """Refuse a request that is addressed to somebody else.

        Where keys guard the gateway only names that a person has set are checked. A request that names
        no host comes from no browser.

        Args:
            request: any, WebSocket upgrades and preflights too.
            is_guarded: nobody gets in without a key.

        Raises:
            Problem: 403.
        """
        host = request.headers.get("Host")
        if not host or self._allows_any or (is_guarded and not self._is_told):
            return
        name = _name_of(host)
        if name is not None and (name in self._allowed or name.endswith(f".{_LOCAL}") or _is_address(name)):
            return
        raise Problem(
            403,
            f"Host: {host[:100]} came (allowed: addresses, {', '.join(sorted(self._allowed))}; others as "
            f"gateways.{self._gateway}.allowed_hosts)",
            param="Host",
            must_close=request.can_read_body,
        )


def _name_of(host: str) -> str | None:
    """Return the name or address in a ``Host``; None if there is none."""
    if set(host) & set("/?#@\\"):
        return None
    try:
        url = URL(f"http://{host}")
        name = url.raw_host
        _ = url.port
    except ValueError:
        return None
    return None if not name else name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
