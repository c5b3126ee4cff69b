"""Session objects of clients and for clients: every known spelling in, OpenAI's GA or beta shape out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from gateways.fields import shown
from gateways.realtime.reading import table
from omni_bus.core.session.codes import Code, SessionError

if TYPE_CHECKING:
    from omni_bus.core.session.config import AudioFormat, SessionConfig
    from omni_bus.core.session.server_events import SessionView

FORMATS = {
    "audio/pcm": "audio/pcm",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "pcm_s16le": "audio/pcm",
    "s16le": "audio/pcm",
    "audio/pcm_f32le": "audio/pcm_f32le",
    "pcm_f32le": "audio/pcm_f32le",
    "f32le": "audio/pcm_f32le",
    "audio/pcmu": "audio/pcmu",
    "audio/g711_ulaw": "audio/pcmu",
    "g711_ulaw": "audio/pcmu",
    "ulaw": "audio/pcmu",
    "mulaw": "audio/pcmu",
    "audio/pcma": "audio/pcma",
    "audio/g711_alaw": "audio/pcma",
    "g711_alaw": "audio/pcma",
    "alaw": "audio/pcma",
}
"""Spellings of formats, in lower case, and OpenAI's; GA, beta and vLLM-Omni's."""

BETA_FORMATS = {
    "audio/pcm": "pcm16",
    "audio/pcm_f32le": "pcm_f32le",
    "audio/pcmu": "g711_ulaw",
    "audio/pcma": "g711_alaw",
}

PCM = ("audio/pcm", "audio/pcm_f32le")
"""Formats that have a rate."""

READ_ONLY = ("id", "object", "created_at", "expires_at", "client_secret")
"""Of session objects that are sent back as they came."""

_RENAMED = {"modalities": "output_modalities", "max_response_output_tokens": "max_output_tokens"}

_NESTED = {
    "input_audio_format": ("input", "format"),
    "output_audio_format": ("output", "format"),
    "input_audio_transcription": ("input", "transcription"),
    "input_audio_noise_reduction": ("input", "noise_reduction"),
    "turn_detection": ("input", "turn_detection"),
    "voice": ("output", "voice"),
    "speed": ("output", "speed"),
}
"""Flat fields of the beta shape, and where GA has them below ``audio``."""

FLAT = frozenset({*_RENAMED, *_NESTED})
"""Fields of the beta shape that GA has not."""


def session_patch(session: dict[str, Any]) -> dict[str, Any]:
    """Return a client's session object, GA or beta, as a patch in the shape of `SessionConfig`.

    What is absent stays absent and what is null stays null.

    Raises:
        SessionError: a part is no object, or a format is unknown.
    """
    patch = {name: value for name, value in session.items() if name not in READ_ONLY}
    for beta, name in _RENAMED.items():
        if beta in patch:
            patch.setdefault(name, patch.pop(beta))
    given = table(patch, "audio", at="session.")
    audio = {side: dict(table(given, side, at="session.audio.")) for side in given}
    for beta, (side, name) in _NESTED.items():
        if beta in patch:
            audio.setdefault(side, {}).setdefault(name, patch.pop(beta))
    for side, fields in audio.items():
        if fields.get("format") is not None:
            fields["format"] = format_of(fields["format"], f"session.audio.{side}.format")
    output = audio.get("output", {})
    if isinstance(output.get("voice"), dict):
        output["voice"] = cast("dict[str, Any]", output["voice"]).get("id")
    patch.pop("audio", None)
    return {**patch, "audio": audio} if audio else patch


def format_of(value: Any, param: str, rate: Any = None) -> dict[str, Any]:
    """Return a format, in any spelling, as `SessionConfig` has it.

    Args:
        value: a name, or an object with ``type`` and perhaps ``rate``.
        param: the field's name, for the refusal.
        rate: samples a second, where another field says so.

    Raises:
        SessionError: it is unknown.
    """
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {"type": value}
    name = fields.get("type", "audio/pcm")
    known = FORMATS.get(name.lower()) if isinstance(name, str) else None
    if known is None:
        message = f"{param}: {shown(name)} came (allowed: {', '.join(FORMATS)})"
        raise SessionError(Code.UNSUPPORTED_FORMAT, message, param=param)
    rest = {key: field for key, field in fields.items() if key not in ("type", "rate")}
    rate = fields.get("rate") if rate is None else rate
    return {"type": known, **rest} | ({"rate": rate} if rate is not None and known in PCM else {})


def beta_format(audio: AudioFormat) -> str:
    """Return a format's name in OpenAI's beta dialect."""
    return BETA_FORMATS[str(type(audio).__struct_config__.tag)]


def ga_session(view: SessionView) -> dict[str, Any]:
    """Return a session in OpenAI's GA shape."""
    config = _fields(view.config)
    turns = config["audio"]["input"]["turn_detection"]
    if turns is not None:
        turns.pop("min_speech_duration_ms", None)
    session: dict[str, Any] = {
        "type": config["type"],
        "object": "realtime.session" if config["type"] == "realtime" else "realtime.transcription_session",
        "id": view.id,
        "expires_at": None if view.expires_at is None else int(view.expires_at),
    }
    if config["type"] == "transcription":
        return session | {"audio": {"input": config["audio"]["input"]}, "include": config["include"]}
    config["output_modalities"] = ga_modalities(view.config.output_modalities)
    names = ("model", "output_modalities", "instructions", "audio", "tools", "tool_choice", "max_output_tokens")
    session |= {name: config[name] for name in (*names, "truncation", "tracing", "prompt", "include")}
    for name in ("parallel_tool_calls", "reasoning", "temperature"):
        if config[name] is not None:
            session[name] = config[name]
    return session


def beta_session(view: SessionView) -> dict[str, Any]:
    """Return a session in OpenAI's beta shape."""
    config, audio = _fields(view.config), view.config.audio
    given = config["audio"]["input"]
    choice = config["tool_choice"]
    return {
        "id": view.id,
        "object": "realtime.session",
        "model": config["model"],
        "expires_at": None if view.expires_at is None else int(view.expires_at),
        "modalities": beta_modalities(view.config.output_modalities),
        "instructions": config["instructions"],
        "voice": audio.output.voice,
        "speed": audio.output.speed,
        "input_audio_format": beta_format(audio.input.format),
        "output_audio_format": beta_format(audio.output.format),
        "input_audio_transcription": given["transcription"],
        "input_audio_noise_reduction": given["noise_reduction"],
        "turn_detection": given["turn_detection"],
        "tools": config["tools"],
        "tool_choice": choice["name"] if isinstance(choice, dict) else choice,
        "temperature": config["temperature"],
        "max_response_output_tokens": config["max_output_tokens"],
        "tracing": config["tracing"],
    }


def ga_modalities(modalities: tuple[str, ...]) -> list[str]:
    """Return modalities as the GA dialect has them, where sound has its text without saying so."""
    return ["audio"] if "audio" in modalities else ["text"]


def beta_modalities(modalities: tuple[str, ...]) -> list[str]:
    """Return modalities as the beta dialect has them, where sound always has its text beside it."""
    return ["text", "audio"] if "audio" in modalities else ["text"]


def _fields(config: SessionConfig) -> dict[str, Any]:
    fields = cast("dict[str, Any]", msgspec.to_builtins(config))
    fields["tools"] = [{name: value for name, value in tool.items() if value is not None} for tool in fields["tools"]]
    given = fields["audio"]["input"]
    for name in ("transcription", "noise_reduction"):
        if given[name] is not None:
            given[name] = {key: value for key, value in given[name].items() if value is not None}
    return fields
