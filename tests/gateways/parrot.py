"""A stage that speaks with the voice that it is given: it says the reference itself, once for each word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from omni_bus.engine import EngineRequest, Inputs, Report, StreamingEngine
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Audio, Blob, Payload, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

RATE_HZ = 16_000


class ParrotParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    voice: str | None = None
    speed: Annotated[float, Meta(ge=0.5, le=2)] | None = None
    task_type: Literal["CustomVoice", "VoiceDesign", "Base"] = "CustomVoice"
    language: str | None = None
    instructions: str | None = None
    reference_text: str | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    temperature: float = 1.0


class Parrot(StreamingEngine):
    """Without a reference it hums; a token for each word read, one for each piece of sound made."""

    accepts: ClassVar[dict[str, str]] = {"text": "text", "reference": "audio"}
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"reference"})
    Params = ParrotParams
    seen: ClassVar[list[tuple[str, ParrotParams, Audio | None]]] = []
    """What it was asked for, request by request."""

    def load(self, report: Report) -> None:
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        text = "".join([piece.text async for piece in inputs.port("text") if isinstance(piece, Text)])
        references = [piece async for piece in inputs.port("reference") if isinstance(piece, Audio)]
        self.seen.append((text, request.params, references[0] if references else None))
        sound = references[0] if references else Audio(RATE_HZ, 1, "s16", Blob(b"\x10\x00\xf0\xff" * 800))
        words = [word for word in text.split() if any(map(str.isalnum, word))]
        for _ in words:
            yield "audio", sound
        yield Finish(usage=Usage(len(words), len(words)))
