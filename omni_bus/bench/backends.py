"""The kinds of routes that can be measured, by their names on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.bench.audio_dialects import Speech, Transcription
from omni_bus.bench.dialects import Chat, Completions

if TYPE_CHECKING:
    from omni_bus.bench.dialects import Dialect

SPEECH, TRANSCRIPTION = "openai-audio-speech", "openai-audio"

DIALECTS: dict[str, Dialect] = {
    "openai-chat": Chat(),
    "openai": Completions(),
    SPEECH: Speech(),
    TRANSCRIPTION: Transcription(),
}
"""By `--backend`, with the names that vLLM and vLLM-Omni have for them."""
