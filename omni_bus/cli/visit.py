"""A command's short visit to the bus of a running deployment, on this host or another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from omni_bus.bus.curve import Curve
from omni_bus.cli.deployment import add_name_argument
from omni_bus.client import BusClient
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import BadInput, Unavailable
from omni_bus.ids import CLIENT_PREFIX
from omni_bus.runtime import rundir
from omni_bus.runtime.deployment import DEPLOYMENT_FILE, read_deployment
from omni_bus.runtime.exposure import is_loopback

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Generator

WELCOME_S = 3.0
"""A coordinator that is alive answers within milliseconds."""


class Visit(NamedTuple):
    """A client on a deployment's bus, and what is known of that deployment."""

    client: BusClient
    pipelines: dict[str, Pipeline]


def add_visit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--name``, and what a deployment on another host needs."""
    add_name_argument(parser)
    parser.add_argument("--connect", metavar="tcp://HOST:PORT", help="visit the coordinator at this address instead")
    parser.add_argument("--keys", metavar="FOLDER", help="with --connect: this client's keys, from `omni-bus keys`")
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="with --connect: this host's address as the deployment reaches it"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="with --connect: go without keys to an address off the loopback"
    )


@contextlib.asynccontextmanager
async def visit(args: argparse.Namespace) -> AsyncGenerator[Visit]:
    """Join the deployment that ``--name`` or ``--connect`` says; leave it at the end.

    Raises:
        BadInput: it is not running, or several are; or the address or the keys can't be used.
        Unavailable: its coordinator does not answer, or refuses the key, or it ended in the meantime.
    """
    if args.connect is not None:
        async with _visit_elsewhere(args) as found:
            yield found
        return
    path, about = rundir.find(rundir.root(os.environ), args.name)
    deployment = read_deployment(path / DEPLOYMENT_FILE)
    name = _name(args)
    with _while_it_lives(about):
        client = await BusClient.connect(
            name,
            deployment.listen(name),
            deployment.coordinator_endpoint,
            timeout_s=WELCOME_S,
            curve=deployment.curve(),
        )
        async with client:
            yield Visit(client, deployment.pipelines)


def _name(args: argparse.Namespace) -> str:
    return f"{args.command.partition(' ')[0]}-{os.getpid()}"


@contextlib.asynccontextmanager
async def _visit_elsewhere(args: argparse.Namespace) -> AsyncGenerator[Visit]:
    """Join a deployment by its coordinator's address; what it serves is asked for."""
    host, port = _host_and_port(args.connect)
    if args.keys is None and not args.insecure and not is_loopback(host):
        raise BadInput(
            f"--connect {args.connect}: not the loopback (allowed: with --keys, or --insecure)", field="--keys"
        )
    curve = None if args.keys is None else Curve(args.keys)
    name = _name(args)
    if curve is not None and curve.is_client:
        name = f"{CLIENT_PREFIX}{curve.name}.{name}"
    address = args.listen or _own_address(host, port)
    client = await BusClient.connect(
        name,
        f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0",
        args.connect,
        timeout_s=WELCOME_S,
        curve=curve,
    )
    async with client:
        try:
            async with asyncio.timeout(WELCOME_S):
                pipelines = await client.admin("pipelines")
        except TimeoutError:
            raise Unavailable(f"the coordinator does not answer (waited {WELCOME_S:g} s)") from None
        yield Visit(client, msgspec.convert(pipelines, dict[str, Pipeline]))


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"--connect {endpoint}: not an address (allowed: tcp://HOST:PORT)", field="--connect")
    return host.strip("[]"), int(port)


def _own_address(host: str, port: int) -> str:
    """Return this host's address on the way to another one; nothing is sent.

    Raises:
        BadInput: there is no way.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such host"
        raise BadInput(f"--connect: {host} can't be reached: {reason}", field="--connect") from error


@contextlib.contextmanager
def _while_it_lives(about: rundir.About) -> Generator[None]:
    """Cut short what is done inside when the supervisor ends: nobody is left then who could tell of an end.

    Raises:
        Unavailable: it ended.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        has_ended = True
        loop.remove_reader(supervisor)
        task.cancel()

    gone = f"the deployment '{about.name}' has ended"
    try:
        supervisor = os.pidfd_open(about.pid)
    except ProcessLookupError:
        raise Unavailable(gone) from None
    loop.add_reader(supervisor, end)
    try:
        yield
    except asyncio.CancelledError:
        if has_ended and task.uncancel() == 0:
            raise Unavailable(gone) from None
        raise
    finally:
        loop.remove_reader(supervisor)
        os.close(supervisor)
