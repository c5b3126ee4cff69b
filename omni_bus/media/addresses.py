"""Which addresses a server may be sent to by what a stranger wrote: public ones, and those that a person allowed.

Everything that IANA's special-purpose registries list is refused, whatever the running Python's `ipaddress` thinks of
it, and so is each IPv6 form that carries an IPv4 address inside (mapped, 6to4, Teredo, NAT64): such a form reaches a
place that its look doesn't tell.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# https://www.iana.org/assignments/iana-ipv4-special-registry and RFC 5771 (multicast)
_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by carriers (CGNAT), RFC 6598
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, where clouds keep their metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)

_GLOBAL_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
"""All that IANA gives out; loopback, mapped, NAT64, unique-local, link-local and multicast addresses lie outside."""

# https://www.iana.org/assignments/iana-ipv6-special-registry, as far as it lies inside
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, Teredo (which carries an IPv4 address) among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which carries an IPv4 address
        "3fff::/20",  # documentation
    )
)

_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet's."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    if address.scope_id is not None:
        return False
    return address in _GLOBAL_UNICAST_6 and not any(address in network for network in _NOT_PUBLIC_6)


class AllowedAddresses:
    """Public addresses, and those of networks that a person named.

    Args:
        networks: in CIDR notation, as ``10.1.0.0/16``.

    Raises:
        ValueError: names the text that is no network.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks: list[Network] = [ipaddress.ip_network(text) for text in networks]

    def __contains__(self, address: Address) -> bool:
        return is_public(address) or any(address in network for network in self._networks)


def literal(host: str) -> Address | None:
    """Return the address that a host of a URL spells out, None for a name.

    Raises:
        ValueError: it is neither a name nor an address in its one canonical form. ``127.1``, ``0x7f.0.0.1`` and
            ``2130706433`` are all 127.0.0.1 to some resolvers.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise ValueError("not a host name")
    # A name that ends in a number is an address in disguise (https://url.spec.whatwg.org/#ends-in-a-number-checker).
    if _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]):
        raise ValueError("not an address in its usual form")
    return None


def matches(host: str, patterns: Iterable[str]) -> bool:
    """Whether a host is one of `patterns`: whole names, or ``*.example.org`` for every name below one."""
    host = host.removesuffix(".").lower()
    for pattern in patterns:
        wanted = pattern.lower()
        if host == wanted or (wanted.startswith("*.") and host.endswith(wanted[1:]) and len(host) > len(wanted) - 1):
            return True
    return False
