"""What a model is given of a conversation: its items in order, as messages, within a budget.

Of an answer only what was heard counts. A call without its result is left out, and so is a result without its call;
both stand side by side whatever was said between them, since chat templates want them so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import RetentionRatio
from omni_bus.core.session.effects import ChatMessage, ClipPart, ImagePart
from omni_bus.core.session.input_buffer import BYTES_PER_MS
from omni_bus.core.session.items import (
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputImage,
    InputText,
    Item,
    Message,
    OutputAudio,
    OutputText,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Heard = Callable[[Message, str], str]

CHARACTERS_PER_TOKEN = 4
"""About so many, in English."""

CHARACTERS_PER_SOUND_SECOND = 25 * CHARACTERS_PER_TOKEN
"""Models that hear take about 25 tokens for a second."""

CHARACTERS_PER_IMAGE = 2000


def messages_of(items: Sequence[Item], heard: Heard, *, hears_audio: bool) -> list[tuple[ChatMessage, ...]]:
    """Return the messages in groups that must stay together.

    Args:
        items: in order.
        heard: of an assistant's message and its text, the part that counts.
        hears_audio: sound is given to the model; else its transcript is.
    """
    results = {item.call_id: item.output for item in items if isinstance(item, FunctionCallOutput)}
    groups: list[tuple[ChatMessage, ...]] = []
    calls: list[FunctionCall] = []
    for item in items:
        if isinstance(item, FunctionCall):
            if item.call_id in results and item.status == "completed":
                calls.append(item)
            continue
        if isinstance(item, Message):
            groups += _called(calls, results)
            calls = []
            message = _message(item, heard, hears_audio=hears_audio)
            if message.content:
                groups.append((message,))
    return groups + _called(calls, results)


def _called(calls: list[FunctionCall], results: dict[str, str]) -> list[tuple[ChatMessage, ...]]:
    """Return calls that were made together, with their results."""
    if not calls:
        return []
    asking = ChatMessage(
        role="assistant", tool_calls=tuple((call.call_id, call.name, call.arguments) for call in calls)
    )
    answers = (ChatMessage(role="tool", tool_call_id=call.call_id, content=(results[call.call_id],)) for call in calls)
    return [(asking, *answers)]


def _message(item: Message, heard: Heard, *, hears_audio: bool) -> ChatMessage:
    content: list[str | ClipPart | ImagePart] = []
    for part in item.content:
        match part:
            case InputText(text=text):
                content.append(text)
            case OutputText(text=text):
                content.append(heard(item, text))
            case OutputAudio(transcript=transcript):
                content.append(heard(item, transcript or ""))
            case InputAudio(audio=audio, transcript=transcript):
                content.append(ClipPart(audio) if hears_audio and audio else (transcript or "").strip())
            case InputImage(image_url=url):
                content += [] if url is None else [ImagePart(url)]
    return ChatMessage(role=item.role, content=tuple(part for part in content if part))


def within_budget(
    groups: list[tuple[ChatMessage, ...]],
    instructions: str,
    truncation: Literal["auto", "disabled"] | RetentionRatio,
    budget: int,
) -> tuple[ChatMessage, ...]:
    """Return the prompt: the instructions, and as many of the latest messages as the budget allows.

    Raises:
        SessionError: it is too long, and the session wants nothing dropped.
    """
    system = (ChatMessage(role="system", content=(instructions,)),) if instructions else ()
    room = min(budget - len(instructions), _allowed(truncation))
    size = sum(_size_of_group(group) for group in groups)
    if size > room:
        if truncation == "disabled":
            message = f"the conversation has about {size} characters (allowed: {room:g}) and truncation is disabled"
            raise SessionError(Code.INPUT_BACKPRESSURE, message, param="truncation")
        # A part of the budget stays free, so that not every turn from now on changes where the prompt begins.
        room *= _retained(truncation)
    kept = list(groups)
    while len(kept) > 1 and size > room:
        size -= _size_of_group(kept.pop(0))
    return (*system, *(message for group in kept for message in group))


def _allowed(truncation: Literal["auto", "disabled"] | RetentionRatio) -> float:
    """Return the characters that the client allows, besides instructions."""
    limits = truncation.token_limits if isinstance(truncation, RetentionRatio) else None
    tokens = None if limits is None else limits.post_instructions
    return math.inf if tokens is None else tokens * CHARACTERS_PER_TOKEN


def _retained(truncation: Literal["auto", "disabled"] | RetentionRatio) -> float:
    return truncation.retention_ratio if isinstance(truncation, RetentionRatio) else 1.0


def _size_of_group(group: tuple[ChatMessage, ...]) -> int:
    return sum(_size_of(message) for message in group)


def _size_of(message: ChatMessage) -> int:
    size = sum(len(name) + len(arguments) for _, name, arguments in message.tool_calls)
    for part in message.content:
        match part:
            case ClipPart(audio=audio):
                size += len(audio) // BYTES_PER_MS * CHARACTERS_PER_SOUND_SECOND // 1000
            case ImagePart():
                size += CHARACTERS_PER_IMAGE
            case _:
                size += len(part)
    return size
