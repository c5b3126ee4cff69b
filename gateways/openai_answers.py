"""What the OpenAI gateway answers, as Structs: `/openapi.json` is made of them, and tests hold real answers to them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from omni_bus.media.encode import Format

FinishReason = Literal["stop", "length", "content_filter"]


class _Exact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parent of answers that have no other fields than these."""


# --- the server ---------------------------------------------------------------------------------------------


class Version(_Exact, frozen=True):
    """The server's version."""

    version: str


class StageHealth(msgspec.Struct, frozen=True):
    """One stage, replica by replica: phase, how far a start is, whether it lives and serves, counts."""

    replicas: list[dict[str, Any]]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests can be served, and the truth about each stage and gateway."""

    status: Literal["healthy", "unhealthy"]
    live: bool
    ready: bool
    reason: str | msgspec.UnsetType = msgspec.UNSET
    stages: dict[str, StageHealth]
    gateways: dict[str, dict[str, Any]]


class Permission(_Exact, frozen=True):
    """Of one model; clients of OpenAI's first API want it."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class Model(_Exact, frozen=True):
    """One pipeline under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[Permission]


class ModelList(_Exact, frozen=True):
    """All names of all pipelines."""

    object: Literal["list"]
    data: list[Model]


# --- files --------------------------------------------------------------------------------------------------


class File(_Exact, frozen=True):
    """A file that its caller keeps here."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(_Exact, frozen=True):
    """One page of a caller's files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(_Exact, frozen=True):
    """A file is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


# --- chat completions ---------------------------------------------------------------------------------------


class Usage(_Exact, frozen=True):
    """Tokens of the text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class AudioMetadata(_Exact, frozen=True):
    """What sound was before it was encoded; `frame_count` counts samples of each channel."""

    format: Format
    sample_rate_hz: int
    frame_count: int
    channels: int


class SpokenMessage(_Exact, frozen=True):
    """Sound: one file in base64, and what it says."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(_Exact, frozen=True):
    """Text, sound or both."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[Any] | None
    audio: SpokenMessage | None
    function_call: None
    reasoning: str | None


class Choice(_Exact, frozen=True):
    """The one answer."""

    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    audio_metadata: AudioMetadata | None


class ChatCompletion(_Exact, frozen=True):
    """An answer that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    service_tier: str | None
    system_fingerprint: str | None
    usage: Usage
    metrics: dict[str, Any] | None


class AudioPiece(_Exact, frozen=True):
    """A piece of sound where ``audio_delta = "audio"``."""

    id: str
    data: str


class Delta(_Exact, frozen=True):
    """What a chunk adds: text, or sound as base64 of a file of its own, told apart by the chunk's modality."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    audio: AudioPiece | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(_Exact, frozen=True):
    """The one answer, as far as this chunk goes."""

    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishReason | None
    audio_metadata: AudioMetadata | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(_Exact, frozen=True):
    """One event of a stream; with usage asked for, the last one has it and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    modality: Literal["text", "audio"] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
