"""Whatever JSON comes under the names of fields: a dialect returns events or refuses, and so does the session."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateways.realtime.beta import BetaDialect
from gateways.realtime.duplex import DuplexDialect
from gateways.realtime.duplex_reading import ALIASES, DuplexReader
from gateways.realtime.duplex_session import READ
from gateways.realtime.ga import RESPONSE_FIELDS, GaDialect
from gateways.realtime.native import NativeDialect
from gateways.realtime.reading import with_plain_numbers
from gateways.realtime.session import FLAT
from gateways.realtime.turn import TurnDialect
from omni_bus.core.session import client_events as asked
from omni_bus.core.session.codec import client_event, payload_of
from omni_bus.core.session.codes import SessionError
from omni_bus.core.session.config import SessionConfig
from omni_bus.sim.sessions import Talk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TYPES = sorted({*ALIASES, *DuplexReader(lambda _: True)._readers, *GaDialect(lambda _: True).known})
WORDS = [
    "",
    "AAAA",
    "audio/pcm",
    "pcm16",
    "wav",
    "server_vad",
    "semantic_vad",
    "message",
    "user",
    "input_audio",
    "both",
]
NAMES = ["type", "rate", "input", "output", "format", "turn_detection", "content", "role", "threshold", "text", "audio"]
FIELDS = [
    *("audio", "delta", "format", "sample_rate", "vad", "is_speech", "speech_probability", "overlap", "video_frames"),
    *("max_slice_nums", "final", "create_response", "item", "item_id", "audio_end_ms", "content_index", "event_id"),
    *("previous_item_id", "response_id", "played_ms", "committed_ms", "truncate", "event", "payload", "text", "reason"),
    *("server_event_seq", "session_id", "resume_token", "last_received_server_event_seq", "transcript", "model"),
]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.sampled_from(WORDS), st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)


def of(names: Any) -> Any:
    return st.dictionaries(st.sampled_from(sorted(names)), VALUES, max_size=5)


FRAMES = st.builds(
    lambda kind, fields, nested: {**fields, **nested, "type": kind},
    st.sampled_from(TYPES),
    of(FIELDS),
    st.fixed_dictionaries(
        {},
        optional={
            "session": of(READ | {"seat"}) | VALUES,
            "response": of(RESPONSE_FIELDS | FLAT) | VALUES,
            "extra_body": VALUES,
        },
    ),
)


def _turn() -> Callable[[Mapping[str, Any]], list[Any]]:
    dialect = TurnDialect(lambda _: None, "both")
    dialect.read({"type": "session.update", "model": "x"})
    return dialect.read


def _first(kind: type[DuplexDialect]) -> Callable[[Mapping[str, Any]], list[Any]]:
    return lambda fields: kind(lambda _: True, is_beta=False).first(fields, "m")


READERS: dict[str, Callable[[], Callable[[Mapping[str, Any]], list[Any]]]] = {
    "ga": lambda: GaDialect(lambda _: True).read,
    "beta": lambda: BetaDialect(lambda _: True).read,
    "turn": _turn,
    "duplex": lambda: DuplexDialect(lambda _: True, is_beta=False).read,
    "native": lambda: NativeDialect(lambda _: True, is_beta=False).read,
    "first duplex": lambda: _first(DuplexDialect),
    "first native": lambda: _first(NativeDialect),
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None)
@given(frame=FRAMES)
def test_a_frame_is_read_or_refused(name: str, frame: dict[str, Any]) -> None:
    with contextlib.suppress(SessionError):
        for event in READERS[name]()(with_plain_numbers(frame)):
            assert client_event(payload_of(event)) == event
            if isinstance(event, asked.SessionOpen):
                Talk(session=event.session, defaults=SessionConfig(model="m"))
            elif not isinstance(event, asked.SessionResume):
                Talk(session={"duplex": {}} if "duplex" in str(event) else {}).say(event)
