"""What a session may be told about itself, in the field names and the nesting of OpenAI's session object.

Updates are JSON merge patches (RFC 7396) with two differences: null is a value where a field may be null and an error
elsewhere, and a table whose ``type`` changes is replaced, since its siblings belong to the former type.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta, Struct

from omni_bus.core.session.codes import Code, SessionError

Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=60_000)]

MAX_SHOWN = 80
"""Characters of a value in an error."""

Modality: TypeAlias = Literal["text", "audio"]


class Pcm(Struct, frozen=True, tag_field="type", tag="audio/pcm", forbid_unknown_fields=True):
    """Signed 16-bit little-endian samples, one channel."""

    rate: Annotated[int, Meta(ge=8000, le=192_000)] = 24_000

    @property
    def rate_hz(self) -> int:
        """Samples a second."""
        return self.rate


class PcmFloat(Struct, frozen=True, tag_field="type", tag="audio/pcm_f32le", forbid_unknown_fields=True):
    """32-bit little-endian float samples in [-1, 1], one channel."""

    rate: Annotated[int, Meta(ge=8000, le=192_000)] = 24_000

    @property
    def rate_hz(self) -> int:
        """Samples a second."""
        return self.rate


class MuLaw(Struct, frozen=True, tag_field="type", tag="audio/pcmu", forbid_unknown_fields=True):
    """G.711 mu-law: one byte a sample, 8 kHz."""

    @property
    def rate_hz(self) -> int:
        """Samples a second."""
        return 8000


class ALaw(Struct, frozen=True, tag_field="type", tag="audio/pcma", forbid_unknown_fields=True):
    """G.711 A-law: one byte a sample, 8 kHz."""

    @property
    def rate_hz(self) -> int:
        """Samples a second."""
        return 8000


AudioFormat: TypeAlias = Pcm | PcmFloat | MuLaw | ALaw


class ServerVad(Struct, frozen=True, tag_field="type", tag="server_vad", forbid_unknown_fields=True):
    """The end of a turn is a pause in speech."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: Annotated[int, Meta(ge=1000, le=300_000)] | None = None
    min_speech_duration_ms: Milliseconds = 96


class SemanticVad(Struct, frozen=True, tag_field="type", tag="semantic_vad", forbid_unknown_fields=True):
    """The end of a turn is a pause after words that sound complete."""

    eagerness: Literal["auto", "low", "medium", "high"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection: TypeAlias = ServerVad | SemanticVad


class Transcription(Struct, frozen=True, forbid_unknown_fields=True):
    """How what the user says is written down; null where it isn't."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    delay: str | None = None
    keywords: tuple[str, ...] | None = None
    languages: tuple[str, ...] | None = None


class NoiseReduction(Struct, frozen=True, forbid_unknown_fields=True):
    """Accepted and shown; no stage does it."""

    type: Literal["near_field", "far_field"]
    strength: float | None = None


class AudioInput(Struct, frozen=True, forbid_unknown_fields=True):
    """What comes from the client."""

    format: AudioFormat = Pcm()
    transcription: Transcription | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: TurnDetection | None = ServerVad()


class AudioOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """What goes to the client; `voice` None is the pipeline's own."""

    format: AudioFormat = Pcm()
    voice: str | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0


class AudioConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Both directions."""

    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class Tool(Struct, frozen=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that must be called."""

    type: Literal["function"]
    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool

MaxTokens: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["inf"]


class Duplex(Struct, frozen=True, forbid_unknown_fields=True):
    """What only duplex dialects set: how speech of the user that falls on speech of the model is judged."""

    overlap_policy: Literal["listen_only", "barge_in_on_speech", "auto"] = "listen_only"
    overlap_short_ack_ms: Milliseconds = 700
    overlap_barge_in_ms: Milliseconds = 1200
    overlap_silence_rms: Annotated[float, Meta(ge=0, le=1)] = 0.003
    """Of samples in [-1, 1]; what is below is no speech."""
    auto_response: bool = False
    idle_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 300.0
    """A connection on which its client says nothing for so long counts as lost."""
    has_wav_headers: bool = False
    """Each piece of sound goes out as a wav file of its own."""
    extra_body: dict[str, Any] = {}
    """Of the client's keys those that nobody here reads; shown as they came."""
    extras: dict[str, Any] = {}
    """The same of keys of the session itself."""


class RetentionRatio(Struct, frozen=True, tag_field="type", tag="retention_ratio", forbid_unknown_fields=True):
    """What of a conversation that is too long is kept: so much of what it may be."""

    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: TokenLimits | None = None


class TokenLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """How long a conversation may be, its instructions aside."""

    post_instructions: Annotated[int, Meta(ge=1)] | None = None


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    """How long a model that thinks may do so."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class Tracing(Struct, frozen=True, forbid_unknown_fields=True):
    """How a client's own traces name the session; accepted and shown, no trace is sent anywhere."""

    workflow_name: str | None = None
    group_id: str | None = None
    metadata: dict[str, Any] | None = None


class SessionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """All of it; the defaults are those of OpenAI."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str = ""
    output_modalities: Annotated[tuple[Modality, ...], Meta(min_length=1, max_length=2)] = ("audio",)
    instructions: str = ""
    audio: AudioConfig = AudioConfig()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: MaxTokens = "inf"
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    truncation: Literal["auto", "disabled"] | RetentionRatio = "auto"
    tracing: Literal["auto"] | Tracing | None = None
    prompt: dict[str, Any] | None = None
    include: tuple[str, ...] | None = None
    playback_commit_policy: Literal["commit_all_on_done", "ack_only"] = "commit_all_on_done"
    duplex: Duplex | None = None
    """None for sessions that speak another dialect."""


def merged(config: SessionConfig, patch: dict[str, Any], *, at: str = "session") -> SessionConfig:
    """Return the configuration with a merge patch applied; the former one is unchanged.

    Raises:
        SessionError: a field is unknown or has a value that is not allowed; names it below `at`.
    """
    former = cast("dict[str, Any]", msgspec.to_builtins(config))
    return cast("SessionConfig", converted(_fields_merged(former, patch), SessionConfig, at=at))


def converted(value: Any, kind: Any, *, at: str) -> Any:
    """Return `value` as `kind`.

    Raises:
        SessionError: names the field below `at`, what came and what is allowed.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = f"{at}{path.rstrip('`')}".removeprefix(".")
        if "unknown field" in what:
            param = f"{param}.{what.split('`')[1]}".removeprefix(".")
            raise SessionError(Code.UNKNOWN_PARAMETER, f"{param}: no such field", param=param) from error
        if "missing required field" in what:
            param = f"{param}.{what.split('`')[1]}".removeprefix(".")
            raise SessionError(Code.MISSING_PARAMETER, f"{param}: is missing", param=param) from error
        came = _shown(_found(value, path.rstrip("`")))
        raise SessionError(Code.INVALID_VALUE, f"{param}: {came} came: {what}", param=param) from error


def _found(value: Any, path: str) -> Any:
    """Follow a path such as ``.tools[0].name``; stops where it leads nowhere."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if isinstance(value, dict):
            value = cast("dict[str, Any]", value).get(name)
        elif isinstance(value, (list, tuple)) and index:
            value = cast("list[Any]", value)[int(index)]
    return cast("Any", value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _fields_merged(former: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    return {**former, **{name: _merged(former.get(name), value) for name, value in patch.items()}}


def _merged(former: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(former, dict):
        return cast("Any", patch)
    base, new = cast("dict[str, Any]", former), cast("dict[str, Any]", patch)
    is_other_kind = "type" in new and new["type"] != base.get("type")
    return new if is_other_kind else _fields_merged(base, new)
