"""OpenAI's beta dialect of live conversations: other names and flat sessions over the GA events."""

from __future__ import annotations

from typing import Any, cast

from gateways.realtime.ga import GaDialect, ga_response
from gateways.realtime.session import beta_format, beta_modalities, beta_session
from omni_bus.core.session import server_events as said

BETA_DELTAS = {
    "response.output_text.delta": "response.text.delta",
    "response.output_text.done": "response.text.done",
    "response.output_audio.delta": "response.audio.delta",
    "response.output_audio.done": "response.audio.done",
    "response.output_audio_transcript.delta": "response.audio_transcript.delta",
    "response.output_audio_transcript.done": "response.audio_transcript.done",
}
"""GA's names of what a response says, and the beta ones."""

NAMES = {**BETA_DELTAS, "conversation.item.added": "conversation.item.created"}
"""The same of all events."""

UNKNOWN = ("conversation.item.done", "conversation.item.input_audio_transcription.segment")
"""What beta clients have no word for."""

CONTENT = {"output_text": "text", "output_audio": "audio"}
"""The same of content in items."""


class BetaDialect(GaDialect):
    """See `GaDialect`."""

    is_beta = True

    def frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        """Return what a client is told of one event."""
        frames = [_renamed(frame) for frame in super().frames(event) if frame["type"] not in UNKNOWN]
        if isinstance(event, said.SessionUpdated) and event.session.config.type == "transcription":
            frames[0]["type"] = "transcription_session.updated"
        return frames

    def session(self, view: said.SessionView) -> dict[str, Any]:
        """Return a session in the flat shape."""
        return beta_session(view)

    def response(self, view: said.ResponseView) -> dict[str, Any]:
        """Return a response in the flat shape."""
        response = ga_response(view)
        del response["audio"], response["output_modalities"]
        response["max_output_tokens"] = view.max_output_tokens
        response["output"] = [_item(item) for item in response["output"]]
        return response | {
            "modalities": beta_modalities(view.output_modalities),
            "voice": view.output_audio.voice,
            "output_audio_format": beta_format(view.output_audio.format),
        }


def _renamed(frame: dict[str, Any]) -> dict[str, Any]:
    frame["type"] = NAMES.get(frame["type"], frame["type"])
    if "item" in frame:
        frame["item"] = _item(frame["item"])
    return frame


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if "content" not in item:
        return item
    parts = cast("list[dict[str, Any]]", item["content"])
    return item | {"content": [part | {"type": CONTENT.get(part["type"], part["type"])} for part in parts]}
