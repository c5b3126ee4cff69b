"""One choice of an answer as it comes from the bus: its pieces, how its ports ended, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.client import End, Item
from omni_bus.errors import BadFrame
from omni_bus.wire.frames import Finish, Usage, token_counts
from omni_bus.wire.payloads import Audio, Json, Text
from omni_bus.wire.prompt import Rendered, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_bus.client import RequestEvent
    from omni_bus.wire.payloads import Token

_REASONS = ("stop", "length", "tool_calls", "content_filter")

_OF_THE_WRITER = ("text", "tool_calls", "reasoning", "rendered", "embedding")
"""Ports of the stage that writes; all of them end alike."""


class Ends:
    """How the output ports of one choice ended: its finish reason, and the token counts."""

    def __init__(self, outputs: tuple[str, ...]) -> None:
        self._open = set(outputs)
        self._finishes: dict[str, Finish] = {}
        self.num_tokens = 0
        """Tokens that pieces of text said they have, for engines that count nothing at the end."""

        self.num_frames = 0
        """Samples of each channel of the sound."""
        self.rate_hz = 0
        """Of the sound."""

    def hear(self, sound: Audio) -> None:
        """Note a piece of sound."""
        self.num_frames += sound.num_frames
        self.rate_hz = sound.rate_hz

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """What each stage said of its work, by its name; nothing unless it was asked to."""
        return {
            stage: account
            for finish in self._finishes.values()
            for stage, account in finish.detail.get("metrics", {}).items()
        }

    def add(self, port: str, finish: Finish) -> bool:
        """Note a port's end; True for the last one."""
        self._open.discard(port)
        self._finishes[port] = finish
        return not self._open

    @property
    def _writer(self) -> Finish | None:
        return next((self._finishes[port] for port in _OF_THE_WRITER if port in self._finishes), None)

    @property
    def reason(self) -> str:
        """``stop``, or why the text (or else the sound) ended otherwise."""
        for finish in (self._writer, *self._finishes.values()):
            if finish is not None and finish.reason in _REASONS and finish.reason != "stop":
                return finish.reason
        return "stop"

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the id of the token, that ended the text."""
        writer = self._writer
        return None if writer is None else writer.detail.get("stop_reason")

    @property
    def usage(self) -> Usage:
        """Token counts of the text; zeros when no text was asked for."""
        writer = self._writer
        usage = Usage() if writer is None else writer.usage
        completion = usage.completion_tokens or self.num_tokens
        return Usage(usage.prompt_tokens, completion, usage.cached_tokens)

    @property
    def prompt_details(self) -> dict[str, int]:
        """Tokens of the prompt's media, by OpenAI's names, where the stage that reads it tells them apart."""
        writer = self._writer
        return {} if writer is None else token_counts(writer.detail.get("prompt_tokens_details"))

    @property
    def audio_tokens(self) -> int | None:
        """Tokens that the sound was made of, where the stage that makes it counts them."""
        found = [token_counts(finish.detail) for finish in self._finishes.values()]
        return next((counts["audio_tokens"] for counts in found if "audio_tokens" in counts), None)


def usage_document(usages: Iterable[Iterable[Usage]]) -> dict[str, Any]:
    """Return OpenAI's token counts of an answer.

    Args:
        usages: for each prompt those of its choices; a prompt counts once, however many answers it has.
    """
    prompt = completion = cached = 0
    for choices in usages:
        listed = list(choices)
        prompt += max((usage.prompt_tokens for usage in listed), default=0)
        cached += max((usage.cached_tokens for usage in listed), default=0)
        completion += sum(usage.completion_tokens for usage in listed)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        "completion_tokens_details": None,
    }


def chat_usage(answers: Iterable[Iterable[Ends]]) -> dict[str, Any]:
    """Return OpenAI's token counts of an answer, and where stages tell them apart those of each modality.

    ``completion_tokens`` counts the text alone, as vLLM-Omni does; sound is beside it in its details.

    Args:
        answers: for each prompt the ends of its choices.
    """
    listed = [list(choices) for choices in answers]
    document = usage_document([[ends.usage for ends in choices] for choices in listed])
    media: dict[str, int] = {}
    for choices in listed:
        for name, count in next((ends.prompt_details for ends in choices if ends.prompt_details), {}).items():
            media[name] = media.get(name, 0) + count
    if media:
        text = {"text_tokens": document["prompt_tokens"] - sum(media.values())}
        document["prompt_tokens_details"] = text | media | (document["prompt_tokens_details"] or {})
    sound = [ends.audio_tokens for choices in listed for ends in choices]
    if any(count is not None for count in sound):
        counts = {"text_tokens": document["completion_tokens"], "audio_tokens": sum(count or 0 for count in sound)}
        document["completion_tokens_details"] = counts
    return document


class Choice:
    """Everything of one choice that is not streamed.

    Args:
        outputs: the output ports that were asked for.
    """

    def __init__(self, outputs: tuple[str, ...]) -> None:
        self.outputs = outputs
        self.ends = Ends(outputs)
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.tokens: list[Token] = []
        self.sounds: list[Audio] = []
        self.calls: list[dict[str, Any]] = []
        self.rendered: Rendered | None = None

    def add(self, event: RequestEvent) -> None:
        """Take what came."""
        match event:
            case Item(port="reasoning", payload=Text(text=text)):
                self.reasoning.append(text)
            case Item(payload=Text(text=text, num_tokens=num_tokens, tokens=tokens)):
                self.texts.append(text)
                self.tokens += tokens
                self.ends.num_tokens += num_tokens
            case Item(payload=Audio() as sound) if sound.num_frames:
                self.sounds.append(sound)
                self.ends.hear(sound)
            case Item(port="tool_calls", payload=Json() as payload):
                self._add_call(read_tool_call(payload))
            case Item(port="rendered", payload=Json() as payload):
                self.rendered = read_rendered(payload)
            case Item():
                pass
            case End(port=port, finish=finish):
                self.ends.add(port, finish)

    def _add_call(self, delta: ToolCallDelta) -> None:
        while len(self.calls) <= delta.index:
            self.calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = self.calls[delta.index]
        call["id"] = delta.id or call["id"]
        call["function"]["name"] = delta.name or call["function"]["name"]
        call["function"]["arguments"] += delta.arguments

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.texts)


MAX_CALLS = 1024
"""Of one answer; a stage that counts further is broken."""


def read_tool_call(payload: Json) -> ToolCallDelta:
    """Return a piece of a tool call.

    Raises:
        BadFrame: a stage sent something else.
    """
    delta = _convert(payload, ToolCallDelta)
    if not 0 <= delta.index < MAX_CALLS:
        raise BadFrame(f"tool_calls: index {delta.index} came (allowed: 0 to {MAX_CALLS - 1})")
    return delta


def read_rendered(payload: Json) -> Rendered:
    """Return what a prompt came to.

    Raises:
        BadFrame: a stage sent something else.
    """
    return _convert(payload, Rendered)


def _convert(payload: Json, kind: Any) -> Any:
    try:
        return msgspec.convert(payload.value, kind)
    except msgspec.ValidationError as error:
        raise BadFrame(f"{kind.__name__}: {error}") from None
