"""What this deployment, or anybody, can't do of what a client asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.items import FunctionCall, InputAudio, InputImage, InputText, Item, Message, OutputText

if TYPE_CHECKING:
    from omni_bus.core.session.config import SessionConfig
    from omni_bus.core.session.server_events import Capabilities

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

PICTURES = ("data:image/png;base64,", "data:image/jpeg;base64,")
"""How pictures in messages begin."""


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
    if config.type == "transcription" and not capabilities.supports_transcription:
        message = "session.type: 'transcription' came, and nothing here writes speech down"
        raise SessionError(Code.INVALID_VALUE, message, param="session.type")
    check_prompt(config.prompt, "session")
    if config.include:
        param = "session.include"
        raise SessionError(Code.INVALID_VALUE, f"{param}: no recogniser here tells what it asks for", param=param)
    if config.tools and not capabilities.supports_tools:
        raise SessionError(Code.INVALID_VALUE, "session.tools: this model calls none", param="session.tools")
    if config.audio.input.transcription is not None and not capabilities.supports_transcription:
        param = "session.audio.input.transcription"
        raise SessionError(Code.INVALID_VALUE, f"{param}: nothing here writes speech down", param=param)
    for name in ("delay", "keywords", "languages"):
        if getattr(config.audio.input.transcription, name, None):
            param = f"session.audio.input.transcription.{name}"
            raise SessionError(Code.INVALID_VALUE, f"{param}: no recogniser here takes it", param=param)


def check_prompt(prompt: dict[str, Any] | None, at: str) -> None:
    """Refuse a stored prompt.

    Raises:
        SessionError: there are none.
    """
    if prompt is not None:
        param = f"{at}.prompt"
        message = f"{param}: no prompts are stored here (allowed: null; instructions say the same)"
        raise SessionError(Code.INVALID_VALUE, message, param=param)


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


def check_item(item: Item, capabilities: Capabilities, at: str = "item") -> None:
    """Refuse content that does not go with the item's role, or that no model here takes.

    Raises:
        SessionError: names the part.
    """
    if isinstance(item, FunctionCall) and not item.name:
        param = f"{at}.name"
        raise SessionError(Code.INVALID_VALUE, f"{param}: '' came (allowed: a function's name)", param=param)
    if not isinstance(item, Message):
        return
    allowed: dict[str, tuple[type, ...]] = {"system": (InputText,), "assistant": (OutputText,)}
    for index, part in enumerate(item.content):
        param = f"{at}.content[{index}].type"
        tag = _tag(type(part))
        kinds = allowed.get(item.role) or _user_kinds(capabilities)
        if not isinstance(part, kinds):
            names = ", ".join(_tag(kind) for kind in kinds)
            message = f"{param}: {tag!r} came in a message of role {item.role!r} (allowed: {names})"
            raise SessionError(Code.INVALID_VALUE, message, param=param)
        if isinstance(part, InputImage) and not (part.image_url or "").lower().startswith(PICTURES):
            param = f"{at}.content[{index}].image_url"
            came = "it is missing" if part.image_url is None else f"{part.image_url[:40]!r} came"
            message = f"{param}: {came} (allowed: {' or '.join(PICTURES)}, base64)"
            raise SessionError(Code.INVALID_IMAGE, message, param=param)


def _user_kinds(capabilities: Capabilities) -> tuple[Any, ...]:
    kinds: tuple[Any, ...] = (InputText,)
    if capabilities.supports_audio_input:
        kinds += (InputAudio,)
    return (*kinds, InputImage) if capabilities.supports_image_input else kinds


def _tag(kind: type[Any]) -> str:
    return str(kind.__struct_config__.tag)
