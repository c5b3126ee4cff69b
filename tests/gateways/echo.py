"""A stage that says what it hears, and counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from omni_bus.engine import EngineRequest, Inputs, Report, StreamingEngine
from omni_bus.errors import StageFailed
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Blob, Payload, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class EchoParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instructions: str | None = None
    seed: int | None = None
    audio_topk: Annotated[int, Meta(le=500)] | None = None


class Echo(StreamingEngine):
    """Each piece of sound comes back with its number; told to fail, it does so at the second."""

    accepts: ClassVar[dict[str, str]] = {"audio": "audio"}
    emits: ClassVar[dict[str, str]] = {"audio": "audio", "text": "text"}
    Params = EchoParams
    seen: ClassVar[list[EchoParams]] = []

    def load(self, report: Report) -> None:
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        self.seen.append(request.params)
        if request.params.instructions:
            yield "audio", Audio(24_000, 1, "f32", Blob(b""))  # they are read
        count = 0
        async for piece in inputs.port("audio"):
            assert isinstance(piece, Audio)
            if not piece.num_frames:
                continue
            yield "audio", piece
            count += 1
            yield "text", Text(f" é{count}")
            if request.params.instructions == "fail" and count == 2:
                raise StageFailed("it broke")
        yield Finish()
