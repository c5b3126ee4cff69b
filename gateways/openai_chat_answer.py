"""What a chat answer looks like: chunks of a stream, and the one object of an answer that is not streamed.

Where protocols differ vLLM-Omni's form wins: a chunk says its `modality`, and sound travels as base64 in
``delta.content``, each piece a file of its own. ``audio_delta = "audio"`` in the gateway's table gives OpenAI's
``delta.audio`` instead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from gateways.openai_logprobs import chat_logprobs, prompt_logprobs
from omni_bus.media.encode import base64_blocking, encode_blocking
from omni_bus.media.encoder import Format
from omni_bus.media.sound import join
from omni_bus.wire.payloads import Audio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateways.openai_chat_body import Chat
    from gateways.openai_choice import Choice, Ends
    from omni_bus.wire.payloads import Token
    from omni_bus.wire.prompt import Rendered, ToolCallDelta

AudioDelta: TypeAlias = Literal["content", "audio"]

EXPIRES_S = 24 * 3600
"""Clients want a time after which an answer's sound is gone; nothing is stored, so it is one that they know."""


def finish_reason(chat: Chat, ends: Ends) -> str:
    """Return why a choice ended; after a call that the request named, OpenAI says ``stop``."""
    is_named = str(chat.prompt.get("tool_choice", "")).startswith("function:")
    return "stop" if is_named and ends.reason == "tool_calls" else ends.reason


class ChunkWriter:
    """The chunks of one stream: all with the same id, model and time."""

    def __init__(self, answer_id: str, model: str, chat: Chat, audio_delta: AudioDelta = "content") -> None:
        self._head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._chat = chat
        self._audio_id = f"audio-{answer_id}"
        self._audio_delta: AudioDelta = audio_delta
        self._have_role: set[int] = set()
        self._is_plain = chat.logprobs is None and not chat.returns_token_ids
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """Of each choice what comes before and after the text in a chunk that has nothing else."""

    def role(self, index: int, rendered: Rendered | None = None) -> bytes:
        """The first chunk of a choice with text; the first of all says what the prompt came to, if that is wanted."""
        self._have_role.add(index)
        top: dict[str, Any] = {}
        if rendered is not None and self._chat.returns_token_ids:
            top["prompt_token_ids"] = rendered.token_ids
        if rendered is not None and self._chat.returns_prompt_text:
            top["prompt_text"] = rendered.text
        return self._chunk(index, "text", {"role": "assistant", "content": ""}, top)

    def text(self, index: int, text: str, tokens: Sequence[Token] = (), usage: dict[str, Any] | None = None) -> bytes:
        """A piece of text."""
        if usage is None and self._is_plain:
            before, after = self._around_text.get(index) or self._frame_text(index)
            return b"%b%b%b" % (before, msgspec.json.encode(text), after)
        extra: dict[str, Any] = {}
        if self._chat.logprobs is not None and tokens:
            extra["logprobs"] = chat_logprobs(tokens, self._chat.logprobs)
        if self._chat.returns_token_ids:
            extra["token_ids"] = [token.id for token in tokens]
        return self._chunk(index, "text", {"content": text}, _usage(usage), **extra)

    def _frame_text(self, index: int) -> tuple[bytes, bytes]:
        """Encode what all chunks of a choice share, once."""
        mark = b'"content":""'  # nowhere else: within a string its quotes would be escaped
        before, _, after = self._chunk(index, "text", {"content": ""}).partition(mark)
        self._around_text[index] = framed = (before + mark[:-2], after)
        return framed

    def reasoning(self, index: int, text: str, usage: dict[str, Any] | None = None) -> bytes:
        """A piece of what the model thinks before it answers."""
        return self._chunk(index, "text", {"reasoning": text}, _usage(usage))

    def tool_call(self, index: int, delta: ToolCallDelta, usage: dict[str, Any] | None = None) -> bytes:
        """A piece of a call; the first of each has its id and name."""
        function: dict[str, Any] = {"arguments": delta.arguments}
        call: dict[str, Any] = {"index": delta.index, "function": function}
        if delta.id is not None:
            call |= {"id": delta.id, "type": "function"}
        if delta.name is not None:
            function["name"] = delta.name
        return self._chunk(index, "text", {"tool_calls": [call]}, _usage(usage))

    def audio(self, index: int, sound: Audio, file_base64: bytes, fmt: Format) -> bytes:
        """A piece of sound, encoded already."""
        data = file_base64.decode("ascii")
        if self._audio_delta == "audio":
            delta: dict[str, Any] = {"audio": {"id": self._audio_id, "data": data}}
            if index not in self._have_role:
                delta["role"] = "assistant"
        else:
            delta = {"role": "assistant", "content": data}
        self._have_role.add(index)
        metadata = audio_metadata(fmt, sound.rate_hz, sound.channels, sound.num_frames)
        return self._chunk(index, "audio", delta, audio_metadata=metadata)

    def finish(self, index: int, modality: str, ends: Ends, metrics: dict[str, Any] | None = None) -> bytes:
        """The last chunk of a choice, its only one with a finish reason."""
        delta = {} if index in self._have_role else {"role": "assistant"}
        top = {"metrics": metrics} if metrics is not None else {}
        reason = finish_reason(self._chat, ends)
        return self._chunk(index, modality, delta, top, finish_reason=reason, stop_reason=ends.stop_reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk after the last one, for those who ask for it."""
        return msgspec.json.encode(self._head | {"choices": []} | _usage(usage))

    def _chunk(
        self, index: int, modality: str, delta: dict[str, Any], top: dict[str, Any] | None = None, **extra: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        return msgspec.json.encode({**self._head, "modality": modality, "choices": [choice], **(top or {})})


def _usage(usage: dict[str, Any] | None) -> dict[str, Any]:
    return {} if usage is None else {"usage": {key: value for key, value in usage.items() if value is not None}}


def audio_metadata(fmt: Format, rate_hz: int, channels: int, num_frames: int) -> dict[str, Any]:
    """Say what the sound was before it was encoded; `frame_count` counts samples of each channel."""
    return {"format": fmt, "sample_rate_hz": rate_hz, "frame_count": num_frames, "channels": channels}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of an answer that is not streamed."""

    id: str
    model: str
    chats: tuple[Chat, ...]
    """What was asked for, by choice."""
    choices: list[Choice]
    usage: dict[str, Any]
    metrics: dict[str, Any] | None = None

    @property
    def has_sound(self) -> bool:
        """Whether it takes a while to render."""
        return any(choice.sounds for choice in self.choices)


def render_blocking(answer: Answer) -> bytes:
    """Return the body of an answer; with sound it takes a while and belongs on a thread.

    Raises:
        BadInput: the format can't hold the sound.
        ValueError: the sound changed its rate or channels.
    """
    created = int(time.time())
    chat, first = answer.chats[0], answer.choices[0].rendered
    document = {
        "id": answer.id,
        "object": "chat.completion",
        "created": created,
        "model": answer.model,
        "choices": [
            _choice(answer, index, chat, choice, created)
            for index, (chat, choice) in enumerate(zip(answer.chats, answer.choices, strict=True))
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": answer.usage,
        "prompt_logprobs": prompt_logprobs(first),
        "prompt_token_ids": first.token_ids if first is not None and chat.returns_token_ids else None,
        "prompt_text": first.text if first is not None and chat.returns_prompt_text else None,
        "metrics": answer.metrics,
    }
    return msgspec.json.encode(document)


def _choice(answer: Answer, index: int, chat: Chat, choice: Choice, created: int) -> dict[str, Any]:
    text = chat.echo + choice.text if "text" in chat.modalities else None
    if choice.calls and text == "":
        text = None  # OpenAI: a message that only calls says nothing
    audio, metadata = _sound(f"{answer.id}-{index}" if index else answer.id, chat, choice, text or "", created)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": audio,
        "function_call": None,
        "reasoning": "".join(choice.reasoning) or None,
    }
    if choice.calls:
        message["tool_calls"] = choice.calls
    return {
        "index": index,
        "message": message,
        "logprobs": None if chat.logprobs is None else chat_logprobs(choice.tokens, chat.logprobs),
        "finish_reason": finish_reason(chat, choice.ends),
        "stop_reason": choice.ends.stop_reason,
        "token_ids": [token.id for token in choice.tokens] if chat.returns_token_ids else None,
        "audio_metadata": metadata,
    }


def _sound(
    audio_id: str, chat: Chat, choice: Choice, transcript: str, created: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return a message's ``audio``, and what the sound was before it was encoded."""
    if not choice.sounds:
        return None, None
    sound = join(choice.sounds)
    file_base64 = base64_blocking(encode_blocking(sound, chat.audio_format))
    audio = {
        "id": f"audio-{audio_id}",
        "data": msgspec.Raw(b'"' + file_base64 + b'"'),
        "expires_at": created + EXPIRES_S,
        "transcript": transcript,
    }
    return audio, audio_metadata(chat.audio_format, sound.rate_hz, sound.channels, sound.num_frames)
