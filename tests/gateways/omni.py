"""One stage that hears, sees, writes and speaks: it says what it was given, word by word."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from omni_bus.engine import EngineRequest, Inputs, Report, StreamingEngine
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Audio, Blob, Json, Payload, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

RATE_HZ = 16_000


class OmniParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    voice: str | None = None


class Omni(StreamingEngine):
    """A hundredth of a second for each word; without end when the user's last words are ``go on``."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json", "audio": "audio", "images": "image"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"audio", "images"})
    emits: ClassVar[dict[str, str]] = {"text": "text", "audio": "audio"}
    Params = OmniParams
    seen: ClassVar[list[tuple[Any, OmniParams, frozenset[str]]]] = []
    """What it was asked for: the messages, the parameters, the outputs."""
    num_open: ClassVar[int] = 0

    def load(self, report: Report) -> None:
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        (prompt,) = [payload async for payload in inputs.port("prompt")]
        assert isinstance(prompt, Json)
        clips = [payload async for payload in inputs.port("audio")]
        pictures = [payload async for payload in inputs.port("images")]
        messages = prompt.value["messages"]
        self.seen.append((messages, request.params, request.outputs))
        lengths = [round(clip.num_frames / clip.rate_hz * 1000) for clip in clips if isinstance(clip, Audio)]
        sizes = [f"{picture.width}x{picture.height}" for picture in pictures]  # pyright: ignore[reportAttributeAccessIssue]
        words = ["heard", *map(str, lengths), "saw", *sizes]
        is_endless = messages[-1]["content"] == "go on"
        type(self).num_open += 1
        try:
            for word in words:
                yield "text", Text(f"{word} ")
                if "audio" in request.outputs:
                    yield "audio", Audio(RATE_HZ, 1, "s16", Blob(b"\x10\x00" * (RATE_HZ // 100)))
            while is_endless:
                await asyncio.sleep(0)
                yield "audio", Audio(RATE_HZ, 1, "s16", Blob(bytes(2 * RATE_HZ // 100)))
        finally:
            type(self).num_open -= 1
        yield Finish(usage=Usage(len(messages), len(words)))
