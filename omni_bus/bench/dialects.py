"""What is sent to a route and how its answer is read: one class for each kind of route.

A dialect knows its path and the body of a request, and makes a reader for each answer. A reader takes bytes as they
come and notes in the request's `Record` what they hold; so a route whose answer is no event stream differs only there.
"""

from __future__ import annotations

import base64
import io
import wave
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from omni_bus.bench.events import EventParser
from omni_bus.bench.record import Record, StageTiming

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.bench.dataset import Prompt


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of a run asks for beside its prompt."""

    model: str
    modalities: tuple[str, ...] = ()
    """Empty leaves it to the server."""
    voice: str | None = None
    ignore_eos: bool = False
    sampling: dict[str, Any] = {}
    extra_body: dict[str, Any] = {}
    wants_stage_metrics: bool = False


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A body that is no JSON: fields and a file."""

    fields: dict[str, str]
    file: bytes
    file_name: str


class Reader(Protocol):
    """Reads one answer."""

    @property
    def is_over(self) -> bool:
        """Whether the answer said that it is whole, or has no way to say so."""
        ...

    def begin(self, headers: Mapping[str, str]) -> None:
        """Take the answer's headers."""
        ...

    def feed(self, data: bytes, at: float) -> int:
        """Note what bytes hold, in the record; return how many pieces of text or sound that were."""
        ...


class Dialect(Protocol):
    """A kind of route."""

    path: ClassVar[str]
    needs_model: ClassVar[bool]
    """Whether a request must name its model; the server's list doesn't tell what each one does."""
    has_tokens: ClassVar[bool]
    """Whether answers are counted in tokens."""

    def body(self, prompt: Prompt, wishes: Wishes) -> dict[str, Any] | Form:
        """Return the body of a request."""
        ...

    def reader(self, record: Record, *, keeps_answer: bool) -> Reader:
        """Return a reader that notes in a record; the text or sound itself only if it is looked at later."""
        ...

    def lengthened(self, prompt: Prompt, output_len: int) -> Prompt:
        """Return a prompt whose answer has about so many tokens."""
        ...


# --- event streams ------------------------------------------------------------------------------------------


class _Audio(msgspec.Struct):
    data: str | None = None


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """As vLLM named it before."""
    audio: _Audio | None = None


class AudioMetadata(msgspec.Struct):
    """What a server says of a piece of sound."""

    frame_count: int | None = None
    sample_rate_hz: int | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    audio_metadata: AudioMetadata | None = None


class Usage(msgspec.Struct):
    """What a server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _StageMetrics(msgspec.Struct):
    num_tokens_out: int | None = None
    vllm_tpot_ms: float | None = None
    vllm_itls_ms: list[float] | None = None


class _Metrics(msgspec.Struct):
    stage_metrics: dict[str, _StageMetrics] = {}


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    modality: str | None = None
    usage: Usage | None = None
    metrics: _Metrics | None = None
    error: Any = None


class EventReader(ABC):
    """Reads an answer in server-sent events, the last of which may be ``[DONE]``."""

    decoder: ClassVar[msgspec.json.Decoder[Any]]
    """Of what each event holds."""

    def __init__(self, record: Record, *, keeps_answer: bool) -> None:
        self.is_over = False
        self._record = record
        self._keeps_answer = keeps_answer
        self._events = EventParser()

    def begin(self, headers: Mapping[str, str]) -> None:
        """Nothing there is needed."""

    def feed(self, data: bytes, at: float) -> int:
        """Note what bytes hold; an event that can't be read is a failure of the request."""
        num_pieces = 0
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self.is_over = True
                continue
            try:
                num_pieces += self._note(self.decoder.decode(event), at)
            except (msgspec.DecodeError, ValueError) as error:  # no JSON, other JSON, or sound that is none
                self._record.fail("unreadable event", f"{error}: {event[:200]!r}")
        return num_pieces

    @abstractmethod
    def _note(self, event: Any, at: float) -> int:
        """Note what an event says; return how many pieces of text or sound it brings."""

    def _note_text(self, text: str, at: float) -> None:
        self._record.texts.append((at, len(text)))
        if self._keeps_answer:
            self._record.answer.append(text)


class StreamReader(EventReader):
    """Reads the chunks of chat and of plain completions, which differ in where the text is."""

    decoder = msgspec.json.Decoder(_Chunk)

    def _note(self, event: _Chunk, at: float) -> int:
        chunk, record = event, self._record
        if chunk.error is not None:
            record.fail(*error_in_stream(chunk.error))
        if chunk.usage is not None and chunk.modality != "audio":  # which always says zero
            record.prompt_tokens = chunk.usage.prompt_tokens
            if not chunk.choices or chunk.usage.completion_tokens:
                record.output_tokens, record.tokens_from = chunk.usage.completion_tokens, "usage"
        if chunk.metrics is not None:
            self._note_stages(chunk.metrics)
        num_pieces = 0
        for choice in chunk.choices:
            text, sound_s = _contents(choice, chunk.modality)
            if text:
                self._note_text(text, at)
            if sound_s:
                record.sounds.append((at, sound_s))
            num_pieces += bool(text) + bool(sound_s)
        return num_pieces

    def _note_stages(self, metrics: _Metrics) -> None:
        """Keep what the first stage says: it makes the text, and its counts are cumulative, so the last one stands."""
        stage = metrics.stage_metrics.get("0")
        if stage is None or stage.num_tokens_out is None:
            return
        itls_s = tuple(gap / 1000 for gap in stage.vllm_itls_ms or ())
        tpot_s = None if stage.vllm_tpot_ms is None else stage.vllm_tpot_ms / 1000
        self._record.timing = StageTiming(stage.num_tokens_out, itls_s, tpot_s)


def _contents(choice: _Choice, modality: str | None) -> tuple[str, float]:
    """Return the text of a choice and the seconds of its sound."""
    delta = choice.delta
    if delta is None:
        return choice.text or "", 0.0
    if delta.audio is not None:
        return "", sound_s(delta.audio.data or "", choice.audio_metadata)
    content = delta.content if isinstance(delta.content, str) else ""
    if modality == "audio":
        return "", sound_s(content, choice.audio_metadata)
    return (delta.reasoning or delta.reasoning_content or "") + content, 0.0


PCM_RATE_HZ = 24_000
"""Of `pcm16` where the chunk doesn't say: OpenAI's, mono."""


def sound_s(data: str, metadata: AudioMetadata | None) -> float:
    """Return how long a piece of sound is.

    Args:
        data: base64, of a WAV file or of raw 16 bit samples.
        metadata: what the server says of it, which makes decoding needless.

    Raises:
        ValueError: a WAV file that is none.
    """
    if not data:
        return 0.0
    if metadata is not None and metadata.frame_count is not None and metadata.sample_rate_hz:
        return metadata.frame_count / metadata.sample_rate_hz
    if data.startswith("UklGR"):  # RIFF in base64
        try:
            with wave.open(io.BytesIO(base64.b64decode(data))) as file:
                return file.getnframes() / file.getframerate()
        except (wave.Error, EOFError) as error:
            raise ValueError(f"a piece of sound that is no WAV file: {error}") from error
    num_bytes = len(data) * 3 // 4 - data[-2:].count("=")
    return num_bytes / 2 / PCM_RATE_HZ


def error_in_stream(error: Any) -> tuple[str, str]:
    """Return the name and the message of an error that came as an event."""
    if not isinstance(error, dict):
        return "error in the stream", str(error)
    return f"error in the stream: {error.get('type') or error.get('code') or 'unnamed'}", str(error.get("message", ""))


# --- the routes ---------------------------------------------------------------------------------------------


class Chat:
    """``/v1/chat/completions``: text, and sound where it is asked for."""

    path: ClassVar[str] = "/v1/chat/completions"
    needs_model: ClassVar[bool] = True
    has_tokens: ClassVar[bool] = True

    def body(self, prompt: Prompt, wishes: Wishes) -> dict[str, Any]:
        """Return a streamed request."""
        body: dict[str, Any] = {"messages": prompt.as_messages(), **_common(wishes)}
        if prompt.output_len is not None:
            body["max_completion_tokens"] = prompt.output_len
        if wishes.modalities:
            body["modalities"] = list(wishes.modalities)
        if "audio" in wishes.modalities:
            # Raw samples: a file of its own around each piece would say no more.
            body["audio"] = {"format": "pcm16"} | ({} if wishes.voice is None else {"voice": wishes.voice})
        return body | wishes.extra_body

    def reader(self, record: Record, *, keeps_answer: bool) -> Reader:
        """Return a reader of chunks."""
        return StreamReader(record, keeps_answer=keeps_answer)

    def lengthened(self, prompt: Prompt, output_len: int) -> Prompt:
        """Return the prompt with another limit."""
        return msgspec.structs.replace(prompt, output_len=output_len)


class Completions:
    """``/v1/completions``: text after text."""

    path: ClassVar[str] = "/v1/completions"
    needs_model: ClassVar[bool] = True
    has_tokens: ClassVar[bool] = True

    def body(self, prompt: Prompt, wishes: Wishes) -> dict[str, Any]:
        """Return a streamed request; messages are joined, since this route has no turns."""
        body: dict[str, Any] = {"prompt": prompt.as_text(), **_common(wishes)}
        if prompt.output_len is not None:
            body["max_tokens"] = prompt.output_len
        return body | wishes.extra_body

    def reader(self, record: Record, *, keeps_answer: bool) -> Reader:
        """Return a reader of chunks."""
        return StreamReader(record, keeps_answer=keeps_answer)

    def lengthened(self, prompt: Prompt, output_len: int) -> Prompt:
        """Return the prompt with another limit."""
        return msgspec.structs.replace(prompt, output_len=output_len)


def _common(wishes: Wishes) -> dict[str, Any]:
    body: dict[str, Any] = {"model": wishes.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= wishes.sampling
    if wishes.ignore_eos:
        body["ignore_eos"] = True
    if wishes.wants_stage_metrics:
        body["return_stage_metrics"] = True
    return body
