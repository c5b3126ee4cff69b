"""The protocols of Moshi and PersonaPlex: ``WS /api/chat`` and ``WS /v1/audio/duplex``.

Any pipeline that hears sound and speaks while it hears can be served, a live conversation for each socket. A client
that names a persona or a voice is told that it is heard when the pipeline says anything at all: engines that must read
a prompt first send an empty piece of sound once they have.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import WSMsgType, web
from msgspec import Meta

from gateways import websockets
from gateways.conversation import AUDIO, TEXT, Dialect, Microphone, converse
from gateways.fields import refuse_unknown
from gateways.health import ActorRows, report
from gateways.http import HttpGateway, HttpOptions, json_response, terms_of
from gateways.json_body import decode_json
from gateways.moshi_settings import Settings, model_of, params_of, settings_of
from gateways.openai_models import models_of
from gateways.problems import Problem, to_problem
from omni_bus.errors import BadInput, OmniBusError, Refused, Unavailable
from omni_bus.gateway import STOPPING
from omni_bus.media.encode import EncodingPool
from omni_bus.media.opus import RATE_HZ, OpusReader, OpusWriter, missing_package

if TYPE_CHECKING:
    from aiohttp import WSMessage

    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.opus import Samples

CHAT, DUPLEX = "/api/chat", "/v1/audio/duplex"

HANDSHAKE_TAG, AUDIO_TAG, TEXT_TAG, METADATA_TAG, ERROR_TAG = b"\x00", b"\x01", b"\x02", b"\x04", b"\x05"
"""The first byte of a message of ``/api/chat``. Others (3 control, 6 ping, and any that is unknown) are ignored."""

MAX_CHAT_BYTES = 16 * 1024
"""Of a message: a client sends some 300 bytes for a frame, and a page of Opus holds up to 200 times as much sound."""

MAX_DUPLEX_BYTES = 1024 * 1024

Seconds = Annotated[float, Meta(gt=0)]


class MoshiOptions(HttpOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table with ``protocol = "moshi"``."""

    max_lead_s: Annotated[float, Meta(ge=0)] = 1.0
    """Sound that a client may send ahead of the clock; what comes faster waits. 0: as fast as the pipeline takes it."""

    max_waiting_s: Seconds = 2.0
    """Sound of one client that may wait here. Of more, ``/api/chat`` drops the oldest, ``/v1/audio/duplex`` reads no
    more meanwhile."""

    idle_timeout_s: Seconds = 60.0
    """A client that sends nothing for so long loses its conversation."""


class MoshiGateway(HttpGateway):
    """Conversations over WebSockets."""

    Options = MoshiOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.options, MoshiOptions)
        self._models = models_of(self.pipelines.values())
        self._health = ActorRows(self.client)
        self._pool = EncodingPool()
        self._limits = self.options

    @classmethod
    def check(cls, options: HttpOptions) -> list[str]:
        """Return what is wrong with the options, or missing."""
        problem = missing_package()
        return [*super().check(options), *([problem] if problem else [])]

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        """Whether it hears and speaks."""
        return (
            pipeline.inputs == {AUDIO: "audio"}
            and pipeline.outputs.get(AUDIO) == "audio"
            and pipeline.outputs.get(TEXT, "text") == "text"
        )

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application(middlewares=[self.edge])
        app.router.add_get("/health", self._get_health)
        app.router.add_get(CHAT, self._chat, allow_head=False)
        app.router.add_get(DUPLEX, self._duplex, allow_head=False)
        return app

    def close(self) -> None:
        """End the encoding threads."""
        super().close()
        self._pool.close()

    async def _get_health(self, request: web.Request) -> web.Response:
        document = report(await self._health.rows(), self.pipelines, is_draining=self.is_draining)
        document["status"] = "ok" if document["ready"] else document["status"]
        return json_response(document, status=200 if document["ready"] else 503)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        terms_of(request)  # refused before the upgrade, with a status
        socket = await websockets.upgrade(request, max_message_bytes=MAX_CHAT_BYTES, may_compress=False)
        dialect = ChatDialect(socket, self._pool, write_timeout_s=self._limits.write_timeout_s)
        try:
            settings = settings_of(request.query)
            await dialect.load()
            await self._serve(request, dialect, settings, drops_oldest=True)
        except Refused:
            raise  # a client without a conversation gets no message, but the code 1013
        except (Problem, OmniBusError) as error:
            await _tell(dialect, error)
            raise
        await socket.close()
        return socket

    async def _duplex(self, request: web.Request) -> web.StreamResponse:
        terms_of(request)
        socket = await websockets.upgrade(request, max_message_bytes=MAX_DUPLEX_BYTES, may_compress=False)
        dialect = DuplexDialect(socket, self._pool, write_timeout_s=self._limits.write_timeout_s)
        try:
            settings = await self._opened(dialect)
            if settings is not None and await self._serve(request, dialect, settings, drops_oldest=False):
                await dialect.say({"type": "done"})
        except Refused:
            raise
        except (Problem, OmniBusError) as error:
            await _tell(dialect, error)
            raise
        await socket.close()
        return socket

    async def _opened(self, dialect: DuplexDialect) -> Settings | None:
        """Wait for a client that opens its conversation, unless the server stops before."""
        opening = asyncio.ensure_future(dialect.opened(self._limits.idle_timeout_s))
        stopping = asyncio.ensure_future(self.draining.wait())
        try:
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise Unavailable(STOPPING)
            return opening.result()
        finally:
            opening.cancel()
            stopping.cancel()
            await asyncio.gather(opening, stopping, return_exceptions=True)

    async def _serve(
        self, request: web.Request, dialect: ChatDialect | DuplexDialect, settings: Settings, *, drops_oldest: bool
    ) -> bool:
        """Hold a conversation; returns whether the pipeline ended it.

        Raises:
            Refused: there is no room for it.
            Problem, OmniBusError: it is not to be had, or ended so.
        """
        pipeline = model_of(settings.model, self._models)
        outputs = [port for port in (AUDIO, TEXT) if port in pipeline.outputs]
        params = params_of(settings, pipeline)
        async with await self.client.submit(pipeline.name, outputs, params, **terms_of(request)) as call:
            begin = functools.partial(dialect.begin, pipeline)
            is_primed = bool(settings.text_prompt or settings.voice_prompt)
            if not is_primed:
                await begin()
            microphone = Microphone(
                call,
                max_waiting_s=self._limits.max_waiting_s,
                max_lead_s=self._limits.max_lead_s,
                drops_oldest=drops_oldest,
            )
            if dialect.early is not None:
                await microphone.put(dialect.early)
            return await converse(
                call,
                dialect,
                microphone,
                idle_timeout_s=self._limits.idle_timeout_s,
                begin=begin if is_primed else None,
            )


async def _tell(dialect: Dialect, error: Exception) -> None:
    with suppress(ConnectionError):
        await dialect.say_error(to_problem(error).message)


class ChatDialect(Dialect):
    """Tagged binary messages; sound as slices of one Ogg/Opus stream each way."""

    early: Samples | None = None

    _reader: OpusReader
    _writer: OpusWriter

    async def load(self) -> None:
        """Make the codecs, whose library may have to be loaded first."""
        self._reader, self._writer = await self.pool.run(lambda: (OpusReader(), OpusWriter()))

    async def begin(self, pipeline: Pipeline) -> None:
        """Say that the model hears: a client opens its microphone on that."""
        about = {"model": pipeline.serve_as, "sample_rate": RATE_HZ, "channels": 1}
        await self.send(HANDSHAKE_TAG)
        await self.send(METADATA_TAG + msgspec.json.encode(about))

    async def hear(self, message: WSMessage) -> Samples | None:
        """Decode a message's sound."""
        import numpy as np

        if message.type is not WSMsgType.BINARY:
            await self.say_error("message: text came (allowed: binary)")
        elif message.data[:1] == AUDIO_TAG:
            return await self.pool.run(self._reader.feed_blocking, message.data[1:])
        return np.zeros(0, np.float32)

    async def say_audio(self, samples: Samples) -> None:
        """Send the pages that are complete."""
        if pages := await self.pool.run(self._writer.feed_blocking, samples):
            await self.send(AUDIO_TAG + pages)

    async def say_text(self, text: str) -> None:
        """Send words."""
        await self.send(TEXT_TAG + text.encode())

    async def say_error(self, message: str) -> None:
        """Send what is wrong."""
        await self.send(ERROR_TAG + message.encode())


class DuplexDialect(Dialect):
    """JSON as text, sound as binary: float32, little-endian, mono, 24 kHz."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.early: Samples | None = None
        """Sound with which the client began, instead of opening."""

    async def opened(self, timeout_s: float) -> Settings | None:
        """Wait until the client opens its conversation; None if it leaves before."""
        await self.pool.run(importlib.import_module, "numpy")  # a tenth of a second that others would wait
        while (message := await self.receive(timeout_s)) is not None:
            if message.type is WSMsgType.BINARY:
                self.early = await self._samples(message.data)
                return Settings()
            try:
                fields = _read_message(message.data)
                if fields["type"] == "close":
                    return None
                if fields["type"] != "open":
                    raise BadInput(f"type: '{fields['type']}' came (allowed at first: open)", field="type")
                return _settings_of_open(fields)
            except BadInput as error:
                await self.say_error(error.message)
        return None

    async def begin(self, pipeline: Pipeline) -> None:
        """Say that the model hears."""
        await self.say({"type": "ready", "model": pipeline.serve_as})

    async def hear(self, message: WSMessage) -> Samples | None:
        """Read a message; mistakes are told and cost nothing else."""
        import numpy as np

        if message.type is WSMsgType.BINARY:
            return await self._samples(message.data)
        try:
            kind = _read_message(message.data)["type"]
            if kind == "close":
                return None
            if kind == "open":
                raise BadInput("session already open")
            raise BadInput(f"type: '{kind}' came (allowed: close)", field="type")
        except BadInput as error:
            await self.say_error(error.message)
        return np.zeros(0, np.float32)

    async def _samples(self, data: bytes) -> Samples:
        import numpy as np

        if len(data) % 4:
            await self.say_error(f"audio: {len(data)} bytes came (allowed: a multiple of 4, float32)")
            return np.zeros(0, np.float32)
        samples = np.frombuffer(data, "<f4")
        return np.where(np.isfinite(samples), samples, 0).clip(-1.0, 1.0).astype(np.float32)

    async def say_audio(self, samples: Samples) -> None:
        """Send sound."""
        await self.send(samples.astype("<f4").tobytes())

    async def say_text(self, text: str) -> None:
        """Send words."""
        await self.say({"type": "text", "text": text})

    async def say_error(self, message: str) -> None:
        """Send what is wrong."""
        await self.say({"type": "error", "error": message})

    async def say(self, event: dict[str, Any]) -> None:
        """Send an event."""
        await self.send(msgspec.json.encode(event).decode())


def _read_message(text: str) -> dict[str, Any]:
    try:
        fields = decode_json(text.encode(), dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadInput(f"message: {error} (allowed: a JSON object)") from None
    if not isinstance(fields.get("type"), str):
        raise BadInput("type: missing or no string (allowed: open, close)", field="type")
    return fields


def _settings_of_open(fields: dict[str, Any]) -> Settings:
    refuse_unknown(fields, {"type", "persona", "voice", "seed", "model"})
    names = {"persona": "text_prompt", "voice": "voice_prompt", "seed": "seed", "model": "model"}
    values = {names[name]: value for name, value in fields.items() if name in names and value is not None}
    if any(not isinstance(values.get(name, ""), str) for name in ("text_prompt", "voice_prompt", "model")):
        raise BadInput("open: persona, voice and model are strings", field="open")
    return settings_of({name: str(value) for name, value in values.items()})
