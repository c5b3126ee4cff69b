"""What the OpenAI gateway answers about sound, as Structs: speech, voices and transcriptions; see `openai_answers`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateways.openai_answers import Exact
from omni_bus.media.encoder import Format

# --- speech -------------------------------------------------------------------------------------------------


class SpeechTokens(Exact, frozen=True):
    """What the input was, for a voice that counts tokens; for others the characters of the text."""

    text_tokens: int
    audio_tokens: int


class SpeechUsage(Exact, frozen=True):
    """What a voice read and made."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: SpeechTokens


class SpeechEvent(Exact, frozen=True):
    """One event of a text that is read aloud; with sound in it the sound is base64 of bytes that concatenate."""

    type: Literal["speech.audio.delta", "speech.audio.done", "speech.audio.error"]
    audio: str | msgspec.UnsetType = msgspec.UNSET
    response_format: Format | msgspec.UnsetType = msgspec.UNSET
    usage: SpeechUsage | msgspec.UnsetType = msgspec.UNSET
    error: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class SpeechResult(Exact, frozen=True):
    """What came of one item: a file in base64, or an error."""

    index: int
    status: Literal["success", "error"]
    audio_data: str | msgspec.UnsetType = msgspec.UNSET
    media_type: str | msgspec.UnsetType = msgspec.UNSET
    usage: SpeechUsage | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET


class SpeechBatch(Exact, frozen=True):
    """Several texts that were read aloud."""

    id: str
    total: int
    succeeded: int
    failed: int
    results: list[SpeechResult]


# --- voices -------------------------------------------------------------------------------------------------


class _Voice(Exact, frozen=True, kw_only=True):
    """What is known of an uploaded voice."""

    name: str
    consent: str
    created_at: int
    mime_type: str
    file_size: int
    ref_text: str | msgspec.UnsetType = msgspec.UNSET
    speaker_description: str | msgspec.UnsetType = msgspec.UNSET


class NewVoice(_Voice, frozen=True, kw_only=True):
    """A voice that is kept now."""


class UploadedVoice(_Voice, frozen=True, kw_only=True):
    """One of the caller's voices."""

    embedding_source: Literal["audio"]
    embedding_dim: int | None


class VoiceList(Exact, frozen=True):
    """Names of all voices in lower case, and what is known of the caller's own."""

    voices: list[str]
    uploaded_voices: list[UploadedVoice] | msgspec.UnsetType = msgspec.UNSET


class VoiceCreated(Exact, frozen=True, kw_only=True):
    """A voice is kept: as OpenAI's SDKs know it, its id being its name in lower case, and as vLLM-Omni tells it."""

    id: str
    object: Literal["audio.voice"]
    created_at: int
    name: str
    type: Literal["audio_sample"]
    success: Literal[True]
    voice: NewVoice


class VoiceDeleted(Exact, frozen=True, kw_only=True):
    """A voice is gone."""

    success: Literal[True]
    message: str
    id: str
    object: Literal["audio.voice.deleted"]
    deleted: Literal[True]


# --- transcriptions -----------------------------------------------------------------------------------------


class DurationUsage(Exact, frozen=True):
    """Seconds of sound, rounded up."""

    type: Literal["duration"]
    seconds: int


class Transcription(Exact, frozen=True):
    """What was said; a translation has no usage."""

    text: str
    usage: DurationUsage | msgspec.UnsetType = msgspec.UNSET


class TranscribedWord(Exact, frozen=True):
    """A word, and when it was said, in seconds."""

    word: str
    start: float
    end: float


class TranscribedSegment(Exact, frozen=True, kw_only=True):
    """What was said from `start` to `end`, in seconds, and what the model thinks of it, where it says so."""

    id: int
    start: float
    end: float
    text: str
    seek: int | msgspec.UnsetType = msgspec.UNSET
    tokens: list[int] | msgspec.UnsetType = msgspec.UNSET
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    avg_logprob: float | msgspec.UnsetType = msgspec.UNSET
    compression_ratio: float | msgspec.UnsetType = msgspec.UNSET
    no_speech_prob: float | msgspec.UnsetType = msgspec.UNSET


class VerboseTranscription(Exact, frozen=True, kw_only=True):
    """What was said when; a translation has no usage."""

    task: Literal["transcribe", "translate"]
    language: str | None
    duration: float
    text: str
    segments: list[TranscribedSegment] | None
    words: list[TranscribedWord] | None
    usage: DurationUsage | msgspec.UnsetType = msgspec.UNSET


class TranscriptionDelta(Exact, frozen=True):
    """An event of a stream: what comes next of the text."""

    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptionDone(Exact, frozen=True):
    """The last event of a stream: the whole text."""

    type: Literal["transcript.text.done"]
    text: str
    usage: DurationUsage
