"""What a chat answer looks like: chunks of a stream, and the one object of an answer that is not streamed.

Where protocols differ vLLM-Omni's form wins: a chunk says its `modality`, and sound travels as base64 in
``delta.content``, each piece a file of its own. ``audio_delta = "audio"`` in the gateway's table gives OpenAI's
``delta.audio`` instead.
"""

from __future__ import annotations

import time
from typing import Any, Literal, TypeAlias

import msgspec

from omni_bus.media.encode import Format, base64_blocking, encode_blocking, join, pcm16
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Audio, Blob

AudioDelta: TypeAlias = Literal["content", "audio"]

EXPIRES_S = 24 * 3600
"""Clients want a time after which an answer's sound is gone; nothing is stored, so it is one that they know."""

_REASONS = ("stop", "length", "content_filter")


class Ends:
    """How the output ports ended: the one finish reason of the choice, and the token counts."""

    def __init__(self, outputs: tuple[str, ...]) -> None:
        self._open = set(outputs)
        self._finishes: dict[str, Finish] = {}
        self.num_tokens = 0
        """Tokens that text pieces said they have, for engines that count nothing at the end."""

    def add(self, port: str, finish: Finish) -> bool:
        """Note a port's end; True for the last one."""
        self._open.discard(port)
        self._finishes[port] = finish
        return not self._open

    @property
    def reason(self) -> str:
        """``stop``, or why the text (or else the sound) was cut."""
        for port in ("text", *self._finishes):
            finish = self._finishes.get(port)
            if finish is not None and finish.reason in _REASONS and finish.reason != "stop":
                return finish.reason
        return "stop"

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of the text; zeros when no text was asked for."""
        finish = self._finishes.get("text")
        usage = Usage() if finish is None else finish.usage
        completion = usage.completion_tokens or self.num_tokens
        details = {"cached_tokens": usage.cached_tokens} if usage.cached_tokens else None
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": usage.prompt_tokens + completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }


class ChunkWriter:
    """The chunks of one stream: all with the same id, model and time."""

    def __init__(self, answer_id: str, model: str, audio_delta: AudioDelta = "content") -> None:
        self._head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._audio_id = f"audio-{answer_id}"
        self._audio_delta: AudioDelta = audio_delta
        self._has_role = False

    def role(self) -> bytes:
        """The first chunk of an answer with text."""
        self._has_role = True
        return self._chunk("text", {"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        """A piece of text."""
        return self._chunk("text", {"content": text})

    def audio(self, sound: Audio, file_base64: bytes, fmt: Format) -> bytes:
        """A piece of sound, encoded already."""
        data = file_base64.decode("ascii")
        if self._audio_delta == "audio":
            delta: dict[str, Any] = {"audio": {"id": self._audio_id, "data": data}}
            if not self._has_role:
                delta["role"] = "assistant"
        else:
            delta = {"role": "assistant", "content": data}
        self._has_role = True
        return self._chunk(
            "audio", delta, audio_metadata=audio_metadata(fmt, sound.rate_hz, sound.channels, sound.num_frames)
        )

    def finish(self, modality: str, reason: str) -> bytes:
        """The last chunk of the choice, the only one with a finish reason."""
        delta = {} if self._has_role else {"role": "assistant"}
        return self._chunk(modality, delta, finish_reason=reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk after the last one, for those who ask for it."""
        given = {key: value for key, value in usage.items() if value is not None}
        return msgspec.json.encode(self._head | {"choices": [], "usage": given})

    def _chunk(self, modality: str, delta: dict[str, Any], *, finish_reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **extra}
        return msgspec.json.encode({**self._head, "modality": modality, "choices": [choice]})


def audio_metadata(fmt: Format, rate_hz: int, channels: int, num_frames: int) -> dict[str, Any]:
    """Say what the sound was before it was encoded; `frame_count` counts samples of each channel."""
    return {"format": fmt, "sample_rate_hz": rate_hz, "frame_count": num_frames, "channels": channels}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of an answer that is not streamed."""

    id: str
    model: str
    text: str | None
    """None when no text was asked for."""
    pieces: list[Audio]
    audio_format: Format
    reason: str
    usage: dict[str, Any]


def render_blocking(answer: Answer) -> bytes:
    """Return the body of an answer; with sound it takes a while and belongs on a thread.

    Raises:
        BadInput: the format can't hold the sound.
        ValueError: the sound changed its rate or channels.
    """
    created = int(time.time())
    audio, metadata, file_base64 = None, None, b""
    if answer.pieces:
        sound = join(answer.pieces)
        if sound.format != "s16":
            sound = Audio(sound.rate_hz, sound.channels, "s16", Blob(pcm16(sound)))
        file_base64 = base64_blocking(encode_blocking(sound, answer.audio_format))
        metadata = audio_metadata(answer.audio_format, sound.rate_hz, sound.channels, sound.num_frames)
        audio = {
            "id": f"audio-{answer.id}",
            "data": msgspec.Raw(b'"' + file_base64 + b'"'),
            "expires_at": created + EXPIRES_S,
            "transcript": answer.text or "",
        }
    message = {
        "role": "assistant",
        "content": answer.text,
        "refusal": None,
        "annotations": None,
        "audio": audio,
        "function_call": None,
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": answer.reason,
        "stop_reason": None,
        "token_ids": None,
        "audio_metadata": metadata,
    }
    document = {
        "id": answer.id,
        "object": "chat.completion",
        "created": created,
        "model": answer.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": answer.usage,
        "metrics": None,
    }
    return msgspec.json.encode(document)
