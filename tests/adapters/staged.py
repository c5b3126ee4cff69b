"""A thinker and a talker in lockstep, as two stages that run at once are: each step's rows go on at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adapters.tensors import to_torch
from omni_bus.testing import Collected, StepDriver
from omni_bus.wire.payloads import Audio, Blob, Image, Json, Payload, Video

if TYPE_CHECKING:
    from adapters.omni.talker import OmniTalker
    from adapters.omni.thinker import OmniThinker
    from omni_bus.errors import OmniBusError


def messages_of(question: tuple[Any, ...]) -> dict[str, list[Payload]]:
    """Return the input ports' payloads of a message of texts, pictures, clips and sounds."""
    parts: list[dict[str, Any]] = []
    inputs: dict[str, list[Payload]] = {}
    for part in question:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        blob = Blob(np.ascontiguousarray(part).tobytes())
        kind = {1: "audio", 3: "image", 4: "video"}[part.ndim]
        parts.append({"type": kind})
        port = "images" if kind == "image" else kind
        payload: Payload
        if kind == "audio":
            payload = Audio(16_000, 1, "f32", blob)
        elif kind == "image":
            height, width, channels = part.shape
            payload = Image(height, width, channels, blob)
        else:
            frames, height, width, _ = part.shape
            payload = Video(0, frames, height, width, 1, 2, blob)
        inputs.setdefault(port, []).append(payload)
    return {"prompt": [Json({"messages": [{"role": "user", "content": parts}]})], **inputs}


@dataclass
class Answer:
    """What came of one question."""

    thinker: Collected
    talker: Collected
    token_ids: list[int] = field(default_factory=list)
    was_early: bool = False
    """Whether codes came before the text had ended."""

    @property
    def codes(self) -> Any:
        """Codes, or frames of them where there is more than one."""
        frames = [np.frombuffer(piece.data.view, "<i4").tolist() for piece in self.talker.port("codes")]
        return [frame[0] for frame in frames] if all(len(frame) == 1 for frame in frames) else frames

    @property
    def thinker_rows(self) -> torch.Tensor:
        """All rows that the thinker sent."""
        return torch.cat([to_torch(piece, "cpu") for piece in self.thinker.port("hidden")])

    @property
    def prompt_tokens(self) -> torch.Tensor:
        """The prompt's ids and positions."""
        [prompt] = self.thinker.port("prompt_tokens")
        return to_torch(prompt, "cpu")

    @property
    def error(self) -> OmniBusError | None:
        """What either stage failed with."""
        return self.thinker.error or self.talker.error


class Staged:
    """Asks both engines; text and codes are greedy."""

    def __init__(
        self, thinker: OmniThinker, talker: OmniTalker, *, voice: str, num_tokens: int, min_codes: int, num_codes: int
    ) -> None:
        self.thinker = StepDriver(thinker)
        self.talker = StepDriver(talker)
        self._thinker_params = {"temperature": 0.0, "max_tokens": num_tokens, "token_ids": True}
        self._talker_params = {
            "temperature": 0.0,
            "min_tokens": min_codes,
            "max_tokens": num_codes,
            "voice": voice,
        }

    def ask(self, *questions: tuple[Any, ...]) -> list[Answer]:
        """Answer these at once."""
        pairs: list[tuple[str, str]] = []
        for question in questions:
            first = self.thinker.add(
                messages_of(question), self._thinker_params, outputs=["text", "hidden", "prompt_tokens"]
            )
            second = self.talker.add({}, self._talker_params, is_complete=False)
            pairs.append((first, second))
        answers = [Answer(self.thinker.results[first], self.talker.results[second]) for first, second in pairs]
        while self.thinker.live or self.talker.live:
            self._step(pairs, answers)
        for answer in answers:
            answer.token_ids = [token.id for piece in answer.thinker.port("text") for token in piece.tokens]
        return answers

    def _step(self, pairs: list[tuple[str, str]], answers: list[Answer]) -> None:
        known = [len(answer.thinker.outputs) for answer in answers]
        were_live = set(self.thinker.live)
        if self.thinker.live:
            self.thinker.step()
        for (first, second), answer, begin in zip(pairs, answers, known, strict=True):
            for port, payload in answer.thinker.outputs[begin:]:
                if port in ("hidden", "prompt_tokens"):
                    self.talker.feed(second, port, [payload])
            if first in were_live and answer.thinker.is_over:
                self.talker.feed(second, "hidden", [], is_last=True)
                self.talker.feed(second, "prompt_tokens", [], is_last=True)
        if self.talker.live:
            self.talker.step()
        for (first, _), answer in zip(pairs, answers, strict=True):
            if first in self.thinker.live and answer.talker.port("codes"):
                answer.was_early = True
