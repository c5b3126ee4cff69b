"""What of a deployment other machines could use without a key; a deployment says aloud that it wants that."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from omni_bus.config.layer import Path, Problem
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.config.schema import DeploymentConfig


class Exposure(NamedTuple):
    """An address that is not the loopback's and needs no key, and what can be done about it."""

    path: Path
    what: str
    remedy: str

    @property
    def problem(self) -> Problem:
        """As a reason to refuse the deployment."""
        return Problem(self.path, f"{self.what}; allowed: {self.remedy}, or --insecure")


def exposures(config: DeploymentConfig, protocols: Mapping[str, type[Any]]) -> list[Exposure]:
    """Return what anybody who reaches this machine could use.

    Args:
        config: the deployment.
        protocols: the class of each gateway.
    """
    found: list[Exposure] = []
    host = bind_host(config.bind)
    if host and not config.security.key_folder and not is_loopback(host):
        found.append(
            Exposure(
                ("bind",),
                f"{config.bind} is not the loopback, and the actors have no keys: whoever reaches them can read and "
                "send everything",
                '127.0.0.1, or keys: `omni-bus keys FOLDER`, then security.key_folder = "FOLDER"',
            )
        )
    for name, gateway in config.gateways.items():
        is_guarded = getattr(protocols[name], "is_guarded", None)
        options = msgspec.convert(gateway.options, protocols[name].Options)
        if is_loopback(gateway.host) or (is_guarded is not None and is_guarded(options, config.callers)):
            continue
        found.append(
            Exposure(
                ("gateways", name, "host"),
                f"{gateway.host or 'the empty host'} is not the loopback, and the gateway has no API key: whoever "
                "reaches it can use it",
                f"127.0.0.1, or a key: gateways.{name}.api_key_file, or callers with keys",
            )
        )
    return found


def security_problems(config: DeploymentConfig) -> list[Problem]:
    """Return why the deployment's own addresses or keys can't work."""
    problems: list[Problem] = []
    host = bind_host(config.bind)
    if host == "*" or any(address.is_unspecified for address in _addresses(host)):
        what = f"{config.bind} stands for all addresses of this machine, and actors tell each other one"
        problems.append(Problem(("bind",), f"{what}; allowed: the address that others connect to"))
    if config.security.key_folder:
        from omni_bus.bus.curve import Curve  # only then: it takes ZeroMQ with it

        try:
            keys = Curve(config.security.key_folder)
        except BadInput as error:
            problems.append(Problem(("security", "key_folder"), error.message))
        else:
            if keys.is_client:
                what = f"{config.security.key_folder} is a client's folder"
                problems.append(Problem(("security", "key_folder"), f"{what}; allowed: the deployment's"))
    return problems


def bind_host(bind: str) -> str:
    """Return the host of a deployment's ``bind``; nothing for ``ipc``."""
    return bind.removeprefix("tcp://").strip("[]") if bind.startswith("tcp://") else ""


def numeric_bind(bind: str) -> str:
    """Return a ``bind`` as sockets take it: with the address of a name, which ZeroMQ doesn't look up to listen.

    A name that stands for none (an interface's, which ZeroMQ knows) is left as it is.
    """
    host = bind_host(bind)
    found = _addresses(host) if host else []
    if not found:
        return bind
    address = next((address for address in found if address.version == 4), found[0])
    return f"tcp://[{address}]" if address.version == 6 else f"tcp://{address}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: every address that it stands for is the loopback's."""
    found = _addresses(host.strip("[]"))
    return bool(found) and all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in found)


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    if not host or host == "*":
        return []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # no such name, or no name at all
        return []
    return [ipaddress.ip_address(str(address[0])) for *_, address in found]
