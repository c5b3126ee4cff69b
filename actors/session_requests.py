"""What a session asks other pipelines for: to hear speech, to write it down, to answer; each is one bus request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from omni_bus.client import End, Item
from omni_bus.core.pipeline import IN
from omni_bus.core.session.config import ServerVad
from omni_bus.core.session.effects import ChatMessage, ClipPart, ImagePart
from omni_bus.core.session.input_buffer import RATE_HZ
from omni_bus.core.session.server_events import InputTokens, OutputTokens, ResponseUsage
from omni_bus.core.session.turns import CANDIDATE_MS, candidate_ms
from omni_bus.errors import BadFrame, OmniBusError, StageFailed
from omni_bus.media.decode import ImageRequest, decode
from omni_bus.media.inline import decode_data_url_blocking
from omni_bus.media.sound import slices
from omni_bus.media.telephony import SAMPLE_BYTES, Mouth
from omni_bus.wire.frames import Usage, token_counts
from omni_bus.wire.payloads import Audio, Blob, Image, Json, Text
from omni_bus.wire.prompt import Function, FunctionTool, Message, Part, Prompt, Tool, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.session_host import SessionHost
    from omni_bus.client import BusClient, Request
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.core.session.config import AudioFormat, TurnDetection
    from omni_bus.core.session.effects import Generate, JudgeTurn, Transcribe
    from omni_bus.media.telephony import Encoding
    from omni_bus.wire.frames import Finish
    from omni_bus.wire.payloads import Payload

logger = logging.getLogger(__name__)

PIECE_MS = 60
"""Sound goes to the client in pieces of at most this length: truncation is as fine as that."""

MAX_WAITING_BYTES = 15 * 32_000
"""Of sound that a detector has not taken yet, before the client is held up: fifteen seconds. With what is under
way to it (`FED_BYTES` for each chunk of the edge's window) less than the core lets it be late."""

FED_BYTES = 32_000
"""Of one chunk to a detector: a second."""

MAX_MADE_BYTES = 2 * 2**20
"""Of sound of one answer that waits for its time, before its voice is held up: twenty seconds and more."""

CLIP_BYTES = 1 << 20
"""Of one chunk to a recogniser."""

MAX_PIXELS = 89_478_485
"""Of a picture, as gateways have it by default."""

TURN = "turn"
"""Output port on which a judge of turns says how complete one sounds."""

SPEECH = ("speech", "events")
"""Output ports on which detectors of speech say when it begins and ends."""


class Asking:
    """One request, in a task of its own; cancelling it cancels the request in every stage."""

    def __init__(self, host: SessionHost, bus: BusClient, pipeline: Pipeline) -> None:
        self.host = host
        self.bus = bus
        self.pipeline = pipeline
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._guarded())

    async def stop(self) -> None:
        """End it, and wait for that."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()

    async def _guarded(self) -> None:
        try:
            await self._run()
        except OmniBusError as error:
            self._failed(error)
        except Exception as error:  # one request of one session: the others go on
            logger.error("a session's request failed", exc_info=error)  # noqa: TRY400 (its message may quote a prompt)
            self._failed(StageFailed(f"{self.pipeline.name}: {type(error).__name__}"))

    async def _run(self) -> None:
        raise NotImplementedError

    def _failed(self, error: OmniBusError) -> None:
        raise NotImplementedError

    async def _submit(self, outputs: tuple[str, ...], params: Mapping[str, Mapping[str, Any]]) -> Request:
        honoured = {stage: dict(values) for stage, values in params.items() if values}
        return await self.bus.submit(
            self.pipeline.name, outputs, honoured, session=self.host.core.id, key=self.host.caller
        )

    def _honoured(self, wanted: Mapping[str, Any], stages: tuple[str, ...] | None = None) -> dict[str, dict[str, Any]]:
        """Return parameters for each stage that has them; those that are None are not wanted."""
        return {
            stage: {
                name: value
                for name, value in wanted.items()
                if value is not None and name in self.pipeline.params.get(stage, {})
            }
            for stage in (self.pipeline.stages if stages is None else stages)
        }


class Detector(Asking):
    """Hears speech begin and end, as long as it is fed."""

    def __init__(
        self, host: SessionHost, bus: BusClient, pipeline: Pipeline, stream: int, config: TurnDetection
    ) -> None:
        super().__init__(host, bus, pipeline)
        self._stream = stream
        self._config = config
        self._waiting: deque[bytes] = deque()
        self._num_waiting = 0
        self._changed = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()

    def feed(self, audio: bytes) -> None:
        """More sound."""
        self._waiting.append(audio)
        self._num_waiting += len(audio)
        if self._num_waiting > MAX_WAITING_BYTES:
            self.has_room.clear()
        self._changed.set()

    def cancel(self) -> None:
        """End it; whoever waits for room need not."""
        self.has_room.set()
        super().cancel()

    async def _run(self) -> None:
        detection = self._config if isinstance(self._config, ServerVad) else ServerVad()
        wanted = {
            "threshold": min(0.99, max(0.01, detection.threshold)),
            "min_speech_ms": detection.min_speech_duration_ms,
            "min_silence_ms": max(32, candidate_ms(self._config)),
            "pause_ms": CANDIDATE_MS,
            "until_drained": True,
        }
        heard_s: Any = None
        (port,) = [name for name in SPEECH if name in self.pipeline.outputs][:1]
        async with await self._submit((port,), self._honoured(wanted)) as request:
            feeding = asyncio.create_task(self._feed(request))
            try:
                async for event in request:
                    match event:
                        case Item(payload=payload):
                            self._on_speech(payload)
                        case End(finish=finish):
                            heard_s = finish.detail.get("heard")
                        case _:
                            pass
            finally:
                feeding.cancel()
                await asyncio.wait([feeding])
        self.has_room.set()
        if isinstance(heard_s, int | float):
            self.host.on_vad_left(self._stream, heard_s * 1000)
        else:
            self.host.on_vad_failed(self._stream, "the detector of speech ended")

    async def _feed(self, request: Request) -> None:
        with contextlib.suppress(OmniBusError):  # the reader of the request is told as well
            while True:
                while self._waiting:
                    audio = self._next()
                    await request.send("audio", Audio(RATE_HZ, 1, "s16", Blob(audio)))
                    self._num_waiting -= len(audio)
                    if self._num_waiting <= MAX_WAITING_BYTES:
                        self.has_room.set()
                self._changed.clear()
                await self._changed.wait()

    def _next(self) -> bytes:
        """Return what waits, at most a second of it: a client's small pieces become one chunk where they pile up."""
        audio = bytearray()
        while self._waiting and len(audio) < FED_BYTES:
            audio += self._waiting.popleft()
        if len(audio) > FED_BYTES:
            self._waiting.appendleft(bytes(audio[FED_BYTES:]))
        return bytes(audio[:FED_BYTES])

    def _on_speech(self, payload: Payload) -> None:
        found = _converted(payload, _Speech)
        self.host.on_vad(self._stream, found.type, found.at * 1000, found.heard * 1000)

    def _failed(self, error: OmniBusError) -> None:
        self.has_room.set()
        self.host.on_vad_failed(self._stream, error.message)


class Judge(Asking):
    """Says how complete a turn sounds; where it can't, the turn ends after a pause that is right for most."""

    def __init__(self, host: SessionHost, bus: BusClient, pipeline: Pipeline, wanted: JudgeTurn) -> None:
        super().__init__(host, bus, pipeline)
        self._wanted = wanted

    async def _run(self) -> None:
        async with await self._submit((TURN,), {}) as request:
            await request.send("audio", Audio(RATE_HZ, 1, "s16", Blob(self._wanted.audio)))
            request.finish("audio")
            async for event in request:
                if isinstance(event, Item):
                    self.host.on_judged(self._wanted.pause, _converted(event.payload, _Turn).probability)

    def _failed(self, error: OmniBusError) -> None:
        logger.warning("a turn could not be judged: %s", error.code)


class _Turn(msgspec.Struct, frozen=True):
    """What a judge of turns says."""

    probability: float


class _Speech(msgspec.Struct, frozen=True):
    """What a detector says, in seconds of what it was fed."""

    type: Any
    at: float
    heard: float


class Recogniser(Asking):
    """Writes one item down."""

    def __init__(self, host: SessionHost, bus: BusClient, pipeline: Pipeline, wanted: Transcribe) -> None:
        super().__init__(host, bus, pipeline)
        self._wanted = wanted

    async def _run(self) -> None:
        item_id = self._wanted.item_id
        params = self._honoured({"language": self._wanted.language, "prompt": self._wanted.prompt})
        sound = Audio(RATE_HZ, 1, "s16", Blob(self._wanted.audio))
        async with await self._submit(("text",), params) as request:
            for piece in slices(sound, CLIP_BYTES // 2):
                await request.send("audio", piece)
            request.finish("audio")
            async for event in request:
                if isinstance(event, Item) and isinstance(event.payload, Text):
                    self.host.on_transcript(item_id, event.payload.text)
        self.host.on_transcribed(item_id)

    def _failed(self, error: OmniBusError) -> None:
        self.host.on_transcript_failed(self._wanted.item_id, error.message)


class Answer(Asking):
    """Makes one answer: text at once, sound when it is time for it."""

    def __init__(self, host: SessionHost, bus: BusClient, pipeline: Pipeline, wanted: Generate) -> None:
        super().__init__(host, bus, pipeline)
        self._wanted = wanted
        self._sounds: deque[tuple[bytes, float]] = deque()
        """Pieces in the client's form, and how long each is."""
        self._num_made = 0
        self._made = asyncio.Event()
        self._has_room = asyncio.Event()
        self._mouth: Mouth | None = None
        self._finishes: dict[str, Finish] = {}
        self._num_tokens = 0

    @property
    def _id(self) -> str:
        return self._wanted.response_id

    async def _run(self) -> None:
        modalities = self._wanted.options.modalities
        # Words are wanted also of what is spoken.
        ports = ("text", "audio", "tool_calls") if "audio" in modalities else ("text", "tool_calls")
        outputs = tuple(port for port in ports if port in self.pipeline.outputs)
        if not self._wanted.options.tools:
            outputs = tuple(port for port in outputs if port != "tool_calls")
        async with await self._submit(outputs, self._params()) as request:
            await self._send(request, outputs)
            reading = asyncio.create_task(self._read(request))
            reading.add_done_callback(lambda _: self._made.set())
            try:
                await self._speak(reading)
                await reading
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        self.host.on_generated(self._id, self._reason(), self._usage())

    def _params(self) -> dict[str, dict[str, Any]]:
        options = self._wanted.options
        readers = self.pipeline.readers_of("messages")
        written = self._honoured({"max_tokens": options.max_output_tokens, "temperature": options.temperature}, readers)
        speed = None if options.speed == 1 else options.speed
        # Where sound is made in several stages, either may be a parameter of any of them.
        spoken = self._honoured({"voice": options.voice, "speed": speed})
        return {stage: written.get(stage, {}) | params for stage, params in spoken.items()}

    async def _send(self, request: Request, outputs: tuple[str, ...]) -> None:
        inputs = {edge.source_port for edge in self.pipeline.needed(outputs) if edge.source == IN}
        await request.send("messages", Json(msgspec.to_builtins(prompt_of(self._wanted))))
        for part in (part for message in self._wanted.messages for part in message.content):
            match part:
                case ClipPart(audio=audio) if "audio" in inputs:
                    await request.send("audio", Audio(RATE_HZ, 1, "s16", Blob(audio)))
                case ImagePart(image_url=url) if "images" in inputs:
                    await request.send("images", await asyncio.to_thread(_picture_blocking, url))
                case _:
                    pass
        for port in inputs:
            request.finish(port)

    async def _read(self, request: Request) -> None:
        """Take what is made as it comes; hold its makers up while too much sound waits."""
        async for event in request:
            match event:
                case Item(port="text", payload=Text(text=text, num_tokens=num_tokens)):
                    self._num_tokens += num_tokens
                    self.host.on_text(self._id, text)
                case Item(port="tool_calls", payload=payload):
                    self.host.on_tool_call(self._id, _converted(payload, ToolCallDelta))
                case Item(payload=Audio() as sound):
                    self._take(sound)
                case End(port=port, finish=finish):
                    self._finishes[port] = finish
                    if port == "tool_calls":
                        self.host.on_tool_calls_done(self._id)
                case _:
                    pass
            while self._num_made > MAX_MADE_BYTES:
                self._has_room.clear()
                await self._has_room.wait()
        if self._mouth is not None:
            self._add(self._mouth.finish())

    def _take(self, sound: Audio) -> None:
        if self._mouth is None:
            form = self._wanted.options.format
            self._mouth = Mouth(sound, encoding_of(form), form.rate_hz)
        try:
            self._add(self._mouth.feed(sound))
        except ValueError as error:
            raise BadFrame(f"audio: {error}") from error

    def _add(self, data: bytes) -> None:
        form = self._wanted.options.format
        bytes_per_ms = SAMPLE_BYTES[encoding_of(form)] * form.rate_hz / 1000
        step = int(PIECE_MS * form.rate_hz / 1000) * SAMPLE_BYTES[encoding_of(form)]
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            self._sounds.append((piece, len(piece) / bytes_per_ms))
            self._num_made += len(piece)
        self._made.set()

    async def _speak(self, reading: asyncio.Task[None]) -> None:
        """Say what was made, never further ahead of what is heard than the client is to buffer."""
        while True:
            if self._sounds:
                await self.host.until_time_for_more(self._id)
                audio, duration_ms = self._sounds.popleft()
                self._num_made -= len(audio)
                self._has_room.set()
                self.host.on_audio(self._id, audio, duration_ms)
            elif reading.done():
                return
            else:
                self._made.clear()
                await self._made.wait()

    def _reason(self) -> str:
        ends = [finish.reason for finish in self._finishes.values()]
        return next((reason for reason in ends if reason in {"length", "content_filter"}), "stop")

    def _usage(self) -> ResponseUsage:
        finish = self._finishes.get("text") or self._finishes.get("tool_calls")
        usage = Usage() if finish is None else finish.usage
        heard = {} if finish is None else token_counts(finish.detail.get("prompt_tokens_details"))
        sound, seen = heard.get("audio_tokens", 0), heard.get("image_tokens", 0) + heard.get("video_tokens", 0)
        written = usage.completion_tokens or self._num_tokens
        said = max((token_counts(end.detail).get("audio_tokens", 0) for end in self._finishes.values()), default=0)
        return ResponseUsage(
            total_tokens=usage.prompt_tokens + written + said,
            input_tokens=usage.prompt_tokens,
            output_tokens=written + said,
            input_token_details=InputTokens(
                text_tokens=usage.prompt_tokens - sound - seen,
                audio_tokens=sound,
                image_tokens=seen,
                cached_tokens=usage.cached_tokens,
            ),
            output_token_details=OutputTokens(text_tokens=written, audio_tokens=said),
        )

    def _failed(self, error: OmniBusError) -> None:
        self.host.on_failed(self._id, error.code, error.message)


def encoding_of(form: AudioFormat) -> Encoding:
    """Return a format's media type."""
    return str(type(form).__struct_config__.tag)  # pyright: ignore[reportReturnType] (the tags are the encodings)


def prompt_of(wanted: Generate) -> Prompt:
    """Return a session's messages as stages that write text read them."""
    options = wanted.options
    messages = [_message(message) for message in wanted.messages]
    return Prompt(
        # A chat template wants somebody to have spoken: where the model speaks first, that is nobody.
        messages=messages if any(message.role != "system" for message in messages) else [*messages, _NOTHING],
        tools=[Tool(function=FunctionTool(**tool)) for tool in options.tools],
        tool_choice=options.tool_choice,
        parallel_tool_calls=options.parallel_tool_calls,
        reasoning_effort=options.reasoning_effort,
    )


_NOTHING = Message(role="user", content="")


def _message(message: ChatMessage) -> Message:
    role: Any = message.role
    calls = [
        ToolCall(id=call_id, function=Function(name=name, arguments=arguments))
        for call_id, name, arguments in message.tool_calls
    ]
    if calls:
        return Message(role="assistant", tool_calls=calls)
    if all(isinstance(part, str) for part in message.content):
        text = "\n".join(part for part in message.content if isinstance(part, str))
        return Message(role=role, content=text, tool_call_id=message.tool_call_id)
    return Message(role=role, content=[_part(part) for part in message.content])


def _part(part: str | ClipPart | ImagePart) -> Part:
    match part:
        case str():
            return Part(type="text", text=part)
        case ClipPart():
            return Part(type="audio")
        case ImagePart():
            return Part(type="image")


def _picture_blocking(url: str) -> Image:
    """Return what a ``data:`` URL shows; a gateway has had it decoded before, in a process that may be lost.

    Raises:
        BadInput: it is no picture.
        MediaTooLarge: it has too many pixels.
    """
    data = decode_data_url_blocking(url, field="image_url", max_bytes=len(url))
    pixels = io.BytesIO()
    picture = cast("Image", decode(io.BytesIO(data), ImageRequest("image_url", MAX_PIXELS), pixels))
    return replace(picture, data=Blob(pixels.getvalue()))


def _converted(payload: Payload, kind: Callable[..., Any]) -> Any:
    try:
        return msgspec.convert(payload.value if isinstance(payload, Json) else None, kind)
    except msgspec.ValidationError as error:
        raise BadFrame(f"{kind.__name__}: {error}") from error
