"""The client of ``WS /v1/realtime/robot/openpi``: observations out, actions in, for any server that speaks OpenPI."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from omni_bus.client.failures import ConnectFailed, ConnectionLost, EventRefused
from omni_bus.client.socket import PATIENCE, Patience, address, open_socket
from omni_bus.errors import BadInput
from omni_bus.media.numpy_frames import MAX_FRAME_BYTES, decode, encode
from omni_bus.wire.records import pack, unpack

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from omni_bus.client.socket import EventSocket

PATH = "/v1/realtime/robot/openpi"


class Robot:
    """A connection; see `connect_robot`. One question at a time: ask in one task.

    Attributes:
        metadata: what the server says of its policy.
    """

    def __init__(self, socket: EventSocket, metadata: dict[str, Any]) -> None:
        self._socket = socket
        self.metadata = metadata

    async def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the actions for an observation.

        Args:
            observation: NumPy arrays, plain values, lists and maps by key; `session_id`, `seed` and `sampling_params`
                are the protocol's.

        Returns:
            ``actions``, (steps, action_dim) float32, and what else the policy gives; arrays are writable.

        Raises:
            EventRefused: the server did not act on it (`code`, `param`); most servers let the connection go on.
            ConnectionLost: the connection is over.
            BadInput: the observation has no form on the wire.
        """
        answer = await self._ask(observation)
        if isinstance(answer, dict) and answer.get("type") == "error":
            message = str(answer.get("detail") or answer.get("message") or "error")
            raise EventRefused(message, code=_text(answer.get("code")), param=_text(answer.get("field")))
        return answer if isinstance(answer, dict) else {"actions": answer}

    async def reset(self) -> None:
        """End all sessions of this connection: each begins anew with its next observation; raises as `infer` does."""
        await self.infer({"endpoint": "reset"})

    async def close(self) -> None:
        """Leave. Harmless when closed."""
        await self._socket.close()

    async def _ask(self, value: Mapping[str, Any]) -> Any:
        try:
            frame = encode(pack(dict(value)))
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"observation: {error}", field="observation") from error
        if len(frame) > MAX_FRAME_BYTES:
            raise BadInput(f"observation: {len(frame)} bytes (allowed: at most {MAX_FRAME_BYTES})", field="observation")
        await self._socket.send_bytes(frame)
        return _read(await self._socket.receive())


@asynccontextmanager
async def connect_robot(
    url: str, *, model: str | None = None, api_key: str | None = None, patience: Patience = PATIENCE
) -> AsyncGenerator[Robot]:
    """Connect; the connection is closed when the block is left.

    Args:
        url: of the server, ``http://HOST:PORT``, or of its WebSocket.
        model: the policy, where the server has several.
        api_key: sent as a bearer token.
        patience: how long to wait for the server.

    Raises:
        ConnectFailed: nobody answers there, or no policy is to be had.
        BadInput: `url` or `api_key` can't be one.
    """
    socket = await open_socket(address(url, PATH, model=model), api_key, patience)
    try:
        try:
            async with asyncio.timeout(patience.open_s):
                metadata = _read(await socket.receive())
        except TimeoutError:
            raise ConnectFailed(f"{url}: no metadata came within {patience.open_s:g} s") from None
        except EventRefused as error:
            raise ConnectFailed(f"{url}: {error.message}", code=error.code) from error
        if not isinstance(metadata, dict):
            raise ConnectFailed(f"{url}: something else than metadata came")
        yield Robot(socket, metadata)
    finally:
        await socket.close()


def _read(message: str | bytes | None) -> Any:
    """Return what a message says.

    Raises:
        EventRefused: it is a text, by which servers tell of errors.
        ConnectionLost: there is none, or it can't be read.
    """
    if message is None:
        raise ConnectionLost("the server closed before it answered", close_code=1000)
    if isinstance(message, str):
        raise EventRefused(message, code=None)
    try:
        return unpack(decode(message, must_be_map=False))
    except BadInput as error:
        raise ConnectionLost(f"an answer that can't be read: {error.message}") from error


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
