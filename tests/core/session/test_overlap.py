"""Every row of the table."""

import pytest

from omni_bus.core.session.overlap import Decision, Overlap, decide, is_short_ack, rms

ROWS = [
    ({"client_action": "interrupt", "can_barge_in": False}, ("listen", "barge_in_unsupported", True)),
    ({"force_barge_in": True, "can_barge_in": False}, ("listen", "barge_in_unsupported", True)),
    ({"client_action": "cancel"}, ("barge_in", "client_overlap_action", True)),
    ({"client_action": "listen", "overlap_speech_ms": 800}, ("listen", "client_overlap_action", True)),
    ({"client_action": "listen", "overlap_speech_ms": 600}, ("listen", "client_overlap_action", False)),
    ({"client_action": "ack", "overlap_speech_ms": 800}, ("listen", "client_overlap_action", False)),
    ({"client_action": "ignore"}, ("drop", "client_overlap_action", False)),
    ({"force_barge_in": True}, ("barge_in", "client_force_barge_in", True)),
    ({"is_auto_response": True, "policy": "barge_in_on_speech"}, ("barge_in", "barge_in_on_speech", True)),
    (
        {"is_auto_response": True, "policy": "barge_in_on_speech", "has_detector": True},
        ("barge_in", "server_vad_speech_started", True),
    ),
    (
        {"is_auto_response": True, "policy": "barge_in_on_speech", "is_continuing": True},
        ("listen", "auto_response_continuous", True),
    ),
    ({"is_auto_response": True}, ("listen", "auto_response_continuous", True)),
    ({"force_listen": True, "policy": "barge_in_on_speech"}, ("listen", "client_force_listen", True)),
    ({"is_speech": False, "policy": "barge_in_on_speech"}, ("drop", "silence_or_noise", False)),
    ({"transcript": " Okay. ", "policy": "barge_in_on_speech"}, ("listen", "short_ack_transcript", False)),
    ({}, ("listen", "policy_listen_only", True)),
    ({"policy": "barge_in_on_speech", "can_barge_in": False}, ("listen", "barge_in_unsupported", True)),
    ({"policy": "barge_in_on_speech", "is_continuing": True}, ("listen", "server_vad_utterance_active", True)),
    ({"policy": "barge_in_on_speech"}, ("barge_in", "policy_barge_in_on_speech", True)),
    (
        {"policy": "barge_in_on_speech", "has_detector": True},
        ("barge_in", "server_vad_speech_started", True),
    ),
    ({"policy": "auto", "duration_ms": 200, "overlap_speech_ms": 700}, ("listen", "short_ack", True)),
    ({"policy": "auto", "overlap_speech_ms": 1200}, ("barge_in", "long_overlap_speech", True)),
    ({"policy": "auto", "overlap_speech_ms": 1000}, ("listen", "accumulating_overlap_speech", True)),
]


@pytest.mark.parametrize(("given", "expected"), ROWS)
def test_row(given, expected):
    assert decide(Overlap(**given)) == Decision(*expected)


@pytest.mark.parametrize(("text", "is_short"), [("Yes!", True), ("go on", True), ("好的", True), ("yes but", False)])
def test_short_acknowledgements(text, is_short):
    assert is_short_ack(text) == is_short


def test_rms():
    assert rms(b"") == 0
    assert rms(b"\x00\x40\x00\xc0") == 0.5
    assert rms(b"\x00\x40\x00\xc0\x01") == 0.5
