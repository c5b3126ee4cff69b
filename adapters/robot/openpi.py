"""A policy on another OpenPI server: openpi's own, vLLM-Omni's, an omni-bus gateway, or anything with that protocol.

Each session has a connection of its own, since servers keep state by connection; the observations of a batch travel at
once. A connection that is found closed is opened again. What a server sends late is never taken for the answer to a
later observation: its connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from adapters.packages import missing
from adapters.robot.policy import Policy
from omni_bus.errors import BadInput, DeadlineExceeded, OmniBusError, StageFailed, StartFailed, Unavailable

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from adapters.robot.policy import Actions, Observation, OnStep
    from omni_bus.engine import Context, Report

logger = logging.getLogger(__name__)

INSTALL = "pip install 'msgpack>=1.0' 'websockets>=15' && pip install --no-deps openpi-client==0.1.2"
"""openpi-client asks for NumPy 1, and works with 2."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024 + 4096
CLOSE_TIMEOUT_S = 1.0
INTERNAL_ERROR = 1011
MAX_WORDS = 500
"""Characters of what a server says that are passed on."""

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class OpenPIOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy's keys of ``[stages.NAME.policy]``."""

    url: Annotated[str, Meta(pattern=r"^wss?://[^/\s]+(/\S*)?$")]
    """``ws://HOST:PORT`` of openpi's server, ``ws://HOST:PORT/v1/realtime/robot/openpi`` of vLLM-Omni and omni-bus."""
    dialect: Literal["openpi", "vllm-omni"] = "openpi"
    """With the second (omni-bus knows it as well), ``session_id``, ``seed`` and ``sampling_params`` are sent along."""
    api_key_env: str = ""
    """The environment variable with the key, if the server wants one."""
    connect_timeout_s: Seconds = 10.0
    """From the first packet to the server's metadata."""
    timeout_s: Seconds = 30.0
    """From an observation to its actions."""


class OpenPIPolicy(Policy):
    """Sends observations on as they came, with `prompt`, and answers what the server does."""

    Options: ClassVar[type[msgspec.Struct]] = OpenPIOptions

    def __init__(self, options: OpenPIOptions, context: Context) -> None:
        super().__init__(options, context)
        self._sockets: dict[str, Any] = {}
        """By session; belongs to the loop's thread."""
        self._closing: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def check(cls, options: OpenPIOptions) -> list[str]:
        """Return what is missing."""
        problems = missing("openpi", {INSTALL: ("msgpack", "openpi_client", "websockets")})
        if options.api_key_env and options.api_key_env not in os.environ:
            problems.append(f"api_key_env: {options.api_key_env} is not set (allowed: a variable with the key)")
        return problems

    def load(self, report: Report) -> None:
        """Ask the server for its metadata.

        Raises:
            StartFailed: a package is missing, or no such server answers.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        report("connecting", 0.0)
        # Connections must answer pings while no observation is under way: their loop runs all the time.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openpi", daemon=True)
        self._thread.start()
        try:
            self.metadata = self._call(self._look())
        except OmniBusError as error:
            self.close()
            raise StartFailed(f"url: {error}") from error
        report("connecting", 1.0)

    def close(self) -> None:
        """Close all connections."""
        if self._loop is None or self._thread is None:
            return
        self._call(self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def forget(self, session: str) -> None:
        """Close the session's connection."""
        if self._loop is not None:
            self._call(self._drop(session))

    def infer(
        self, observations: Sequence[Observation], *, deadline: float | None = None, on_step: OnStep | None = None
    ) -> Sequence[Actions | OmniBusError]:
        """Return what the server answers to each observation, or why it doesn't."""
        return self._call(self._infer_all(observations, deadline))

    # --- on the loop ----------------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _infer_all(
        self, observations: Sequence[Observation], deadline: float | None
    ) -> list[Actions | OmniBusError]:
        return await asyncio.gather(*(self._infer(observation, deadline) for observation in observations))

    async def _infer(self, observation: Observation, deadline: float | None) -> Actions | OmniBusError:
        limit_s = self.options.timeout_s
        if deadline is not None:
            limit_s = min(limit_s, deadline - time.monotonic())
        try:
            async with asyncio.timeout(limit_s):
                return _actions_of(await self._ask(observation))
        except OmniBusError as error:
            return error
        except TimeoutError:
            await self._drop(observation.session)
            if deadline is not None and limit_s < self.options.timeout_s:
                return DeadlineExceeded("the server did not answer by the deadline")
            return StageFailed(f"the server did not answer within {limit_s:g} s")

    async def _ask(self, observation: Observation) -> Any:
        """Return what the server says; a connection that turns out to be closed already is opened once more."""
        from websockets.exceptions import ConnectionClosed

        message = _encoded(self._message(observation))
        session = observation.session
        if observation.is_first:
            await self._drop(session)
        is_fresh = session not in self._sockets
        while True:
            if session not in self._sockets:
                self._sockets[session], _ = await self._connect()
            try:
                await self._sockets[session].send(message)
                answer = await self._sockets[session].recv()
            except ConnectionClosed as error:
                await self._drop(session)
                if is_fresh or (error.rcvd is not None and error.rcvd.code == INTERNAL_ERROR):
                    raise Unavailable(f"the server closed the connection: {_why(error)}", retry_after_s=1.0) from error
                is_fresh = True
                continue
            if isinstance(answer, str):  # the end of this connection; openpi's servers send a traceback
                await self._drop(session)
                logger.warning("the policy's server failed", extra={"fields": {"said": answer[-2000:]}})
                said = "its words are in the stage's log" if "Traceback" in answer else answer[:MAX_WORDS]
                raise StageFailed(f"the policy's server failed with this observation: {said}")
            return _decoded(answer)

    def _message(self, observation: Observation) -> dict[str, Any]:
        message: dict[str, Any] = dict(observation.values)
        if observation.prompt is not None:
            message["prompt"] = observation.prompt
        if self.options.dialect == "vllm-omni":
            message["session_id"] = observation.session
            if observation.seed is not None:
                message["seed"] = observation.seed
            if observation.num_inference_steps is not None:
                message["sampling_params"] = {"num_inference_steps": observation.num_inference_steps}
        return message

    async def _connect(self) -> tuple[Any, dict[str, Any]]:
        """Return a connection and the server's metadata.

        Raises:
            Unavailable: no server answers, or it isn't one of this protocol.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        options: OpenPIOptions = self.options
        key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        socket: Any = None
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                socket = await connect(
                    options.url,
                    additional_headers={"Authorization": f"Api-Key {key}"} if key else None,
                    compression=None,
                    max_size=MAX_MESSAGE_BYTES,
                    close_timeout=CLOSE_TIMEOUT_S,
                    open_timeout=None,
                    ping_timeout=None,  # openpi's server computes on its sockets' loop, and answers no ping meanwhile
                    proxy=None,
                )
                first = await socket.recv()
                metadata = _decoded(first) if isinstance(first, bytes) else None
                if not isinstance(metadata, dict):
                    said = f": {first[:MAX_WORDS]}" if isinstance(first, str) else ""
                    raise Unavailable(f"{options.url} answers without a policy's metadata{said}", retry_after_s=1.0)
        except BaseException as error:
            if socket is not None:
                self._close_later(socket)
            if isinstance(error, OSError | TimeoutError | WebSocketException):
                raise Unavailable(f"{options.url} does not answer: {_why(error)}", retry_after_s=1.0) from error
            raise
        return socket, metadata

    async def _look(self) -> dict[str, Any]:
        socket, metadata = await self._connect()
        await socket.close()
        return _plain(metadata)

    async def _drop(self, session: str) -> None:
        socket = self._sockets.pop(session, None)
        if socket is not None:
            self._close_later(socket)

    def _close_later(self, socket: Any) -> None:
        # The closing handshake takes as long as the server likes, up to its time-out: nobody waits for it.
        task = asyncio.ensure_future(socket.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_all(self) -> None:
        for session in list(self._sockets):
            await self._drop(session)
        await asyncio.gather(*self._closing, return_exceptions=True)


def _encoded(message: dict[str, Any]) -> bytes:
    from openpi_client import msgpack_numpy

    pack: Any = msgpack_numpy.packb
    try:
        return pack(message)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"observation: it can't be sent on: {error}", field="observation") from error


def _decoded(message: bytes) -> Any:
    from openpi_client import msgpack_numpy

    try:
        return msgpack_numpy.unpackb(message)
    except (ValueError, TypeError, KeyError) as error:  # msgpack's own errors are ValueErrors
        raise StageFailed(f"the policy's server sent something else than MessagePack: {error}") from error


def _actions_of(answer: Any) -> Actions:
    """Return the arrays of an answer that have a row for each action.

    Raises:
        OmniBusError: it is an error, or has no actions.
    """
    if isinstance(answer, np.ndarray):
        answer = {"actions": answer}
    if isinstance(answer, dict) and answer.get("type") == "error":
        raise _error_of(answer)
    actions = answer.get("actions") if isinstance(answer, dict) else None
    if not isinstance(actions, np.ndarray) or actions.ndim != 2:
        came = f"shape {actions.shape}" if isinstance(actions, np.ndarray) else type(actions).__name__
        raise StageFailed(f"the policy's server sent no actions of two dimensions: {came} came")
    return {
        key: value
        for key, value in answer.items()
        if isinstance(value, np.ndarray) and value.ndim and len(value) == len(actions)
    }


def _error_of(answer: dict[str, Any]) -> OmniBusError:
    """Return what a server's error is here; omni-bus says whose fault it was, and what exactly is wrong."""
    said = str(answer.get("detail") or answer.get("message") or answer.get("error"))[:MAX_WORDS]
    if answer.get("code") == BadInput.code:
        return BadInput(said, field=str(answer.get("field", "")))
    return StageFailed(f"the policy's server says: {said}")


def _plain(value: Any) -> Any:
    """Return metadata without NumPy in it."""
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case np.ndarray() | np.generic():
            return value.tolist()
        case _:
            return value


def _why(error: BaseException) -> str:
    return str(error)[:MAX_WORDS] or type(error).__name__
