"""What the OpenAI gateway answers, as Structs: `/openapi.json` is made of them, and tests hold real answers to them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from omni_bus.media.encoder import Format

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Exact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parent of answers that have no other fields than these."""


# --- the server ---------------------------------------------------------------------------------------------


class Version(Exact, frozen=True):
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


class Permission(Exact, frozen=True):
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


class Model(Exact, frozen=True):
    """One pipeline under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[Permission]


class ModelList(Exact, frozen=True):
    """All names of all pipelines."""

    object: Literal["list"]
    data: list[Model]


# --- files --------------------------------------------------------------------------------------------------


class File(Exact, frozen=True):
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


class FileList(Exact, frozen=True):
    """One page of a caller's files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Exact, frozen=True):
    """A file is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


# --- chat completions ---------------------------------------------------------------------------------------


class Usage(Exact, frozen=True):
    """Tokens of the prompt and of the text; in the details cached ones, and each modality's where a stage tells."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class AudioMetadata(Exact, frozen=True):
    """What sound was before it was encoded; `frame_count` counts samples of each channel."""

    format: Format
    sample_rate_hz: int
    frame_count: int
    channels: int


class SpokenMessage(Exact, frozen=True):
    """Sound: one file in base64, and what it says."""

    id: str
    data: str
    expires_at: int
    transcript: str


class TokenLogprob(Exact, frozen=True):
    """A token: as text, its natural log-probability, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(Exact, frozen=True):
    """A token of the answer, and the most probable ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Exact, frozen=True):
    """Log-probabilities of the tokens of a text."""

    content: list[ChosenLogprob]
    refusal: None


class PromptLogprob(Exact, frozen=True):
    """A token that might have stood in the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt the candidates by id; null for the first."""


class CalledFunction(Exact, frozen=True):
    """What the model wants called; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Exact, frozen=True):
    """One call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Exact, frozen=True):
    """Text, sound or both, or calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[Any] | None
    audio: SpokenMessage | None
    function_call: None
    reasoning: str | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class Choice(Exact, frozen=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    audio_metadata: AudioMetadata | None


class ChatCompletion(Exact, frozen=True):
    """An answer that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    service_tier: str | None
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    metrics: dict[str, Any] | None


class AudioPiece(Exact, frozen=True):
    """A piece of sound where ``audio_delta = "audio"``."""

    id: str
    data: str


class FunctionDelta(Exact, frozen=True):
    """A piece of a call; pieces of `arguments` concatenate."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(Exact, frozen=True):
    """A piece of the call at `index`; the first one has its id and name."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class Delta(Exact, frozen=True):
    """What a chunk adds: text, or sound as base64 of a file of its own, told apart by the chunk's modality."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET
    audio: AudioPiece | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(Exact, frozen=True):
    """One answer, as far as this chunk goes."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    audio_metadata: AudioMetadata | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(Exact, frozen=True):
    """One event of a stream; with usage asked for, the last one has it and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    modality: Literal["text", "audio"] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


# --- completions, tokens, embeddings ------------------------------------------------------------------------


class CompletionLogprobs(Exact, frozen=True):
    """Log-probabilities of a text's tokens, one list for each fact."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Exact, frozen=True):
    """One text; index = prompt × n + sample."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class Completion(Exact, frozen=True):
    """Texts that go on with prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage
    metrics: dict[str, Any] | None


class CompletionChunkChoice(Exact, frozen=True):
    """A piece of one text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChunk(Exact, frozen=True):
    """One event of a stream; with usage asked for, the last one has it and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Tokenized(Exact, frozen=True):
    """What a prompt comes to."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Exact, frozen=True):
    """What tokens say."""

    prompt: str


class Embedding(Exact, frozen=True):
    """One vector: numbers, or little-endian 32-bit floats in base64."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingUsage(Exact, frozen=True):
    """Tokens of the input."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Exact, frozen=True):
    """One vector for each input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RealtimeClientSecret(Exact, frozen=True):
    """A key that opens live conversations for a time."""

    value: str
    expires_at: int
    session: dict[str, Any]
    """That conversations begin with, as session.created shows it."""


class ServerLoad(Exact, frozen=True):
    """Requests under way on the bus, of all served pipelines."""

    server_load: int
