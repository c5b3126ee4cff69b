"""Orders to a running supervisor, over a socket file in its run directory: one order a connection.

It is no part of the bus: what restarts the coordinator must not depend on it, and who may enter the directory may give
orders. A connection is as long as its order; lines of JSON, the order first, then news, the outcome last. Whoever gave
the order may leave before its end, which changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from omni_bus.errors import BadInput, Unavailable
from omni_bus.runtime.deployment import ipc_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

MAX_ORDER_BYTES = 64 * 1024
"""Of one line."""

DONE, BAD_ORDER, NOT_POSSIBLE, NOT_CLEAN = 0, 1, 2, 3
"""Codes of an outcome, which a command exits with: the last one for what was cut, or not over in time."""


class _Order(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Parent of all orders, tagged with the class name."""


class Drain(_Order, frozen=True):
    """Give these stages or replicas no new requests, and tell when they have none left."""

    targets: tuple[str, ...]
    timeout_s: float | None = None
    """Seconds to wait for running requests; None waits as long as a stop does."""
    is_forced: bool = False
    """End what still runs then."""


class Resume(_Order, frozen=True):
    """Give them requests again."""

    targets: tuple[str, ...]


class Restart(_Order, frozen=True):
    """Restart stages, replicas, gateways or the coordinator one after the other; with no target, all of them."""

    targets: tuple[str, ...] = ()
    timeout_s: float | None = None
    is_forced: bool = False


class Scale(_Order, frozen=True):
    """Have so many replicas of each of these stages."""

    wanted: dict[str, int]
    timeout_s: float | None = None
    is_forced: bool = False


class Sleep(_Order, frozen=True):
    """Have the engines of these stages or replicas sleep once they have no requests left."""

    targets: tuple[str, ...]
    level: int = 1
    """1 lets go of accelerator memory and keeps the weights, 2 lets go of all."""
    timeout_s: float | None = None
    is_forced: bool = False


class Wake(_Order, frozen=True):
    """Wake them, and give them requests again; with no target, all that sleep."""

    targets: tuple[str, ...] = ()


class News(msgspec.Struct, frozen=True, tag=True):
    """What became of one process in the course of an order."""

    process: str
    phase: str
    fraction: float = 0.0
    pid: int | None = None


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """The end of an order."""

    code: int
    message: str


Order: TypeAlias = Drain | Resume | Restart | Scale | Sleep | Wake
Say: TypeAlias = "Callable[[News], None]"

_orders = msgspec.json.Decoder(Order)
_answers = msgspec.json.Decoder(News | Outcome)


def control_path(run_dir: str) -> str:
    """Return the socket file of a deployment's supervisor."""
    return ipc_endpoint(run_dir, "control").removeprefix("ipc://")


class ControlServer:
    """Takes orders while it is open.

    Args:
        path: the socket file, in a directory that only the user can enter.
        carry_out: called with each order and with what tells its news; returns its outcome.
    """

    def __init__(self, path: str, carry_out: Callable[[Order, Say], Coroutine[None, None, Outcome]]) -> None:
        self._path = path
        self._carry_out = carry_out
        self._server: asyncio.Server | None = None
        self._orders: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MAX_ORDER_BYTES)

    async def close(self) -> None:
        """Break off what is being carried out, tell so, and listen no longer."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        Path(self._path).unlink(missing_ok=True)  # noqa: ASYNC240 (a local socket's name: no disk is waited for)
        orders = list(self._orders)
        for order in orders:
            order.cancel()
        await asyncio.gather(*orders, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._orders.add(task)
        try:
            outcome = await self._obey(reader, writer)
        except asyncio.CancelledError:
            outcome = Outcome(NOT_POSSIBLE, "the deployment is stopping")
        except Exception:  # one order must not end the supervisor; its giver learns that it failed
            logger.exception("an order could not be carried out")
            outcome = Outcome(NOT_POSSIBLE, "it failed; the supervisor's log says why")
        finally:
            self._orders.discard(task)
        _write(writer, outcome)
        with contextlib.suppress(OSError):  # whoever gave the order has left
            writer.close()

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Outcome:
        try:
            line = await reader.readline()
            order = _orders.decode(line)
        except (ValueError, msgspec.MsgspecError) as error:
            return Outcome(BAD_ORDER, f"no order that is known here: {error}")
        return await self._carry_out(order, lambda news: _write(writer, news))


def _write(writer: asyncio.StreamWriter, answer: News | Outcome) -> None:
    if not writer.is_closing():
        writer.write(msgspec.json.encode(answer) + b"\n")


async def give_order(path: str, order: Order, on_news: Say) -> Outcome:
    """Have a supervisor carry an order out.

    Raises:
        Unavailable: it is not there, or ended before it told the outcome.
        BadInput: the order is too long.
    """
    line = msgspec.json.encode(order) + b"\n"
    if len(line) > MAX_ORDER_BYTES:
        raise BadInput(f"the order has {len(line)} bytes (allowed: {MAX_ORDER_BYTES})")
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ORDER_BYTES)
    except OSError as error:
        raise Unavailable(f"the deployment takes no orders: {error.strerror or error}") from error
    try:
        writer.write(line)
        while answer := await reader.readline():
            match _answers.decode(answer):
                case News() as news:
                    on_news(news)
                case Outcome() as outcome:
                    return outcome
    except ConnectionError:
        pass
    finally:
        writer.close()
    raise Unavailable("the deployment ended before the order was carried out")
