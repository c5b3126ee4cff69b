"""Routes that speak and that transcribe, as dialects: raw samples while they are made, and events with text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from omni_bus.bench.dialects import PCM_RATE_HZ, EventReader, Form, Usage, error_in_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.bench.dataset import Prompt
    from omni_bus.bench.dialects import Reader, Wishes
    from omni_bus.bench.record import Record

MAX_RATE_HZ, MAX_CHANNELS = 1_000_000, 255
"""A server that says more says nothing."""

WORDS_PER_TOKEN = 0.75
"""In English."""


class PcmReader:
    """Reads raw s16 samples; each read is a piece of sound.

    Where the answer ends is HTTP's to say: a connection that breaks before is a failure of its own.
    """

    is_over = True

    def __init__(self, record: Record, *, keeps_answer: bool) -> None:
        self._record = record
        self._keeps_answer = keeps_answer
        self._num_bytes = 0

    def begin(self, headers: Mapping[str, str]) -> None:
        """Take the rate and the channels where the server tells them; else they are 24 kHz and one."""
        self._record.rate_hz = _number(headers, "X-Sample-Rate", MAX_RATE_HZ) or PCM_RATE_HZ
        self._record.channels = _number(headers, "X-Channels", MAX_CHANNELS) or 1

    def feed(self, data: bytes, at: float) -> int:
        """Note the samples that bytes complete."""
        record = self._record
        frame_bytes = 2 * record.channels
        num_frames = (self._num_bytes + len(data)) // frame_bytes - self._num_bytes // frame_bytes
        self._num_bytes += len(data)
        if self._keeps_answer:
            record.pcm.append(data)
        if not num_frames:
            return 0
        record.sounds.append((at, num_frames / record.rate_hz))
        return 1


def _number(headers: Mapping[str, str], name: str, most: int) -> int:
    text = headers.get(name, "")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    return number if number <= most else 0


class Speech:
    """``/v1/audio/speech``: a text read aloud, as raw samples while they are made."""

    path: ClassVar[str] = "/v1/audio/speech"
    needs_model: ClassVar[bool] = False
    has_tokens: ClassVar[bool] = False

    def body(self, prompt: Prompt, wishes: Wishes) -> dict[str, Any]:
        """Return a streamed request."""
        body: dict[str, Any] = {"input": prompt.as_text(), "response_format": "pcm"}
        body |= {"stream": True, "stream_format": "audio"}  # some servers want both
        if wishes.model:
            body["model"] = wishes.model
        if wishes.voice is not None:
            body["voice"] = wishes.voice
        return body | wishes.extra_body

    def reader(self, record: Record, *, keeps_answer: bool) -> Reader:
        """Return a reader of samples."""
        return PcmReader(record, keeps_answer=keeps_answer)

    def lengthened(self, prompt: Prompt, output_len: int) -> Prompt:
        """Return the text again and again, until it has the words of so many tokens."""
        text = prompt.as_text()
        times = max(1, round(output_len * WORDS_PER_TOKEN / max(1, len(text.split()))))
        return msgspec.structs.replace(prompt, text=" ".join([text] * times), messages=())


class _TranscriptUsage(Usage):
    seconds: float | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    """OpenAI's events (``type``), and vLLM's chunks (``choices``)."""

    type: str = ""
    delta: str = ""
    choices: list[_Choice] = []
    usage: _TranscriptUsage | None = None
    error: Any = None


class TranscriptReader(EventReader):
    """Reads the events of a transcription."""

    decoder = msgspec.json.Decoder(_Event)

    def _note(self, event: _Event, at: float) -> int:
        record = self._record
        if event.error is not None:
            record.fail(*error_in_stream(event.error))
        if event.usage is not None:
            if event.usage.completion_tokens:
                record.output_tokens, record.tokens_from = event.usage.completion_tokens, "usage"
            if record.heard_s is None:
                record.heard_s = event.usage.seconds
        if event.type == "transcript.text.done":  # says all of it again
            self.is_over = True
            return 0
        text = event.delta + "".join(each.delta.content or "" for each in event.choices if each.delta is not None)
        if not text:
            return 0
        self._note_text(text, at)
        return 1


class Transcription:
    """``/v1/audio/transcriptions``: a sound, and what is said in it as it is written down."""

    path: ClassVar[str] = "/v1/audio/transcriptions"
    needs_model: ClassVar[bool] = False
    has_tokens: ClassVar[bool] = False

    def body(self, prompt: Prompt, wishes: Wishes) -> Form:
        """Return a streamed request."""
        fields = {"response_format": "json", "stream": "true"}
        if wishes.model:
            fields["model"] = wishes.model
        fields |= {name: str(value) for name, value in (wishes.sampling | wishes.extra_body).items()}
        return Form(fields=fields, file=prompt.sound, file_name=prompt.sound_name)

    def reader(self, record: Record, *, keeps_answer: bool) -> Reader:
        """Return a reader of events."""
        return TranscriptReader(record, keeps_answer=keeps_answer)

    def lengthened(self, prompt: Prompt, output_len: int) -> Prompt:
        """Return the sound as it is: its text is as long as what is said."""
        return prompt
