"""What this deployment, or anybody, can't do of what a client asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.session.codes import Code, SessionError

if TYPE_CHECKING:
    from omni_bus.core.session.config import SessionConfig
    from omni_bus.core.session.server_events import Capabilities

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


def check_modalities(modalities: tuple[str, ...], capabilities: Capabilities, at: str) -> None:
    """Refuse modalities that this deployment does not make.

    Raises:
        SessionError: names the first.
    """
    made = {"text": capabilities.supports_text_output, "audio": capabilities.supports_audio_output}
    for modality in modalities:
        if not made[modality]:
            allowed = ", ".join(name for name, is_made in made.items() if is_made)
            param = f"{at}.output_modalities"
            message = f"{param}: {modality!r} came (allowed: {allowed})"
            raise SessionError(Code.INVALID_VALUE, message, param=param)


def check_config(config: SessionConfig, capabilities: Capabilities) -> None:
    """Refuse what this deployment can't do.

    Raises:
        SessionError: names the field.
    """
    if config.type == "realtime":
        check_modalities(config.output_modalities, capabilities, "session")
    if config.tools and not capabilities.supports_tools:
        raise SessionError(Code.INVALID_VALUE, "session.tools: this model calls none", param="session.tools")
    if config.audio.input.transcription is not None and not capabilities.supports_transcription:
        param = "session.audio.input.transcription"
        raise SessionError(Code.INVALID_VALUE, f"{param}: nothing here writes speech down", param=param)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Refuse what is larger than OpenAI allows.

    Raises:
        SessionError: says how large it is.
    """
    if metadata is None:
        return
    is_small = len(metadata) <= MAX_METADATA and all(
        len(key) <= MAX_METADATA_KEY and len(value) <= MAX_METADATA_VALUE for key, value in metadata.items()
    )
    if not is_small:
        allowed = f"{MAX_METADATA} pairs, keys of {MAX_METADATA_KEY} and values of {MAX_METADATA_VALUE} characters"
        message = f"response.metadata: {len(metadata)} pairs came (allowed: {allowed})"
        raise SessionError(Code.INVALID_VALUE, message, param="response.metadata")
