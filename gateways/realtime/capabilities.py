"""What duplex clients branch on: a session's capabilities under all names that vLLM-Omni's clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from omni_bus.core.session.server_events import Capabilities

FIXED: dict[str, Any] = {
    "adapter_patterns": ["cascade"],
    "stage_handoff_transport": "zmq",
    "session_admission_mode": "engine_managed",
    "supports_session_lease": True,
    "supports_external_turn_signal": True,
    "supports_client_commit": True,
    "supports_turn_commit_only": True,
    "supports_reencode_context": True,
    "supports_independent_io_streams": True,
    "supports_realtime_endpoint": True,
    "supports_concurrent_turn_requests": False,
    "supports_core_resumable_request": False,
    "supports_session_adapter": False,
    "supports_model_native_turn_policy": False,
    "supports_replace_latest_chunk": False,
    "supports_rollback_to_checkpoint": False,
    "supports_kv_lease": False,
    "supports_core_kv_lease": False,
    "supports_model_internal_state": False,
    "supports_stage_resumption": False,
    "supports_scheduler_native_append": False,
    "supports_stage_connector_handoff": False,
    "requires_model_runner_kv": False,
    "requires_native_stage_role": False,
}
"""Of every session: each answer is a request of its own, over the whole conversation, once the user's turn is over."""

BARGE_IN_MS = 110
"""From the onset that a detector hears to the last sound that is sent: a piece of sound and 50 ms."""


def shown_capabilities(capabilities: Capabilities) -> dict[str, Any]:
    """Return them as session objects have them."""
    given = {
        "audio": capabilities.supports_audio_input,
        "text": capabilities.supports_text_only_turn,
        "image": capabilities.supports_image_input,
        "video": capabilities.supports_image_input,
    }
    turns = {"client": True, "server_vad": capabilities.supports_server_vad}
    turns["semantic_vad"] = capabilities.supports_semantic_vad
    return {
        **msgspec.to_builtins(capabilities),
        **FIXED,
        "supports_multi_session_same_replica": capabilities.supports_multi_session,
        "target_barge_in_latency_ms": BARGE_IN_MS,
        "required_input_modalities": ["audio"],
        "optional_input_modalities": ["video"] if capabilities.supports_image_input else [],
        "input_modes": [name for name, is_given in given.items() if is_given],
        "signal_sources": [name for name, is_there in turns.items() if is_there],
    }
