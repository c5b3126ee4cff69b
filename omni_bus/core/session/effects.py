"""What a session core asks its host to do, in order."""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from omni_bus.core.session.config import AudioFormat, Modality, TurnDetection
from omni_bus.core.session.server_events import AnyServerEvent


class Emit(Struct, frozen=True):
    """Say something to one attachment; `data` is the event as `codec.encoded` writes it."""

    attachment: int
    event: AnyServerEvent
    data: bytes


class EndAttachment(Struct, frozen=True):
    """An attachment is over once it has what was said to it."""

    attachment: int
    reason: str


class StartVad(Struct, frozen=True):
    """Listen for speech from here on; what is said of a former `stream` is not wanted any more."""

    stream: int
    config: TurnDetection


class FeedVad(Struct, frozen=True):
    """More sound: s16, 16 kHz, one channel."""

    stream: int
    audio: bytes


class StopVad(Struct, frozen=True):
    """Listen no more."""

    stream: int


class JudgeTurn(Struct, frozen=True):
    """Say how complete the user's turn sounds so far: s16, 16 kHz, one channel."""

    pause: int
    """Which pause it is about."""
    audio: bytes


class Transcribe(Struct, frozen=True):
    """Write down what a user item says: s16, 16 kHz, one channel."""

    item_id: str
    audio: bytes
    language: str | None
    prompt: str | None
    model: str | None


class StopTranscribing(Struct, frozen=True):
    """Nobody wants it any more."""

    item_id: str


class ClipPart(Struct, frozen=True):
    """Sound in a message, for models that hear: s16, 16 kHz, one channel."""

    audio: bytes


class ImagePart(Struct, frozen=True):
    """A picture in a message: a ``data:`` URL."""

    image_url: str


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of the prompt; strings in `content` are text."""

    role: str
    content: tuple[str | ClipPart | ImagePart, ...] = ()
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    """Of an assistant: id, name and arguments of each call."""
    tool_call_id: str | None = None
    """Of a tool: whose result it is."""


class GenerateOptions(Struct, frozen=True, kw_only=True):
    """How an answer is made."""

    modalities: tuple[Modality, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Functions: name, description, parameters."""
    tool_choice: str = "auto"
    """``none``, ``auto``, ``required`` or ``function:NAME``."""
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    voice: str | None = None
    speed: float = 1.0
    format: AudioFormat
    """What sound the core is given."""


class Generate(Struct, frozen=True):
    """Begin an answer."""

    response_id: str
    messages: tuple[ChatMessage, ...]
    options: GenerateOptions


class CancelGeneration(Struct, frozen=True):
    """Stop an answer in every stage; what it still says is ignored."""

    response_id: str


class SetTimer(Struct, frozen=True):
    """Call `SessionCore.on_timer` at this time; replaces the former one."""

    at: float


class Ended(Struct, frozen=True):
    """The session is over: nothing follows, and nothing of it is held."""

    reason: str


Effect: TypeAlias = (
    Emit
    | EndAttachment
    | StartVad
    | FeedVad
    | StopVad
    | JudgeTurn
    | Transcribe
    | StopTranscribing
    | Generate
    | CancelGeneration
    | SetTimer
    | Ended
)
