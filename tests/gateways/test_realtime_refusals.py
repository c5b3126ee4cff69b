"""What clients must not send, in every dialect: refused in the dialect's own words, by the event's name."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from gateways.realtime.reading import MAX_EVENT_BYTES
from tests.gateways.conversation import LOUD, Client, connected, deployed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running

APPEND, COMMIT = "input_audio_buffer.append", "input_audio_buffer.commit"


class Dialect(NamedTuple):
    """How a client comes in, where its refusals have what they have, and how it is answered."""

    path: str
    first: dict[str, Any] | None
    headers: dict[str, str]
    is_flat: bool
    """An error is a text with a code beside it."""
    named: str
    """Where an error has the client's name for its event."""
    commit: dict[str, Any]
    """Asks for an answer."""
    first_sound: str
    """Comes with the answer's first piece of sound."""


GA = Dialect("/v1/realtime", None, {}, False, "event_id", {}, "response.output_audio.delta")
DIALECTS = {
    "ga": GA,
    "beta": GA._replace(headers={"OpenAI-Beta": "realtime=v1"}, first_sound="response.audio.delta"),
    "turn": GA._replace(
        first={"type": "session.update", "model": "synthetic-sessions"},
        is_flat=True,
        named="client_event_id",
        commit={"type": COMMIT, "final": True},
        first_sound="response.audio.delta",
    ),
    "duplex": GA._replace(
        path="/v1/duplex", first={"type": "session.update", "session": {}}, commit={"type": "input.commit"}
    ),
    "native": GA._replace(
        path="/v1/duplex",
        first={"type": "session.create"},
        is_flat=True,
        named="client_event_id",
        commit={"type": "input.commit"},
    ),
}

BAD: list[tuple[str | bytes | dict[str, Any], dict[str, str]]] = [
    # what came, and its code by dialect; beta is as ga, and native as duplex, where they say nothing else
    (b"\0\1", {"ga": "invalid_event", "turn": "invalid_event", "duplex": "bad_event"}),
    ("{", {"ga": "invalid_json", "turn": "invalid_json", "duplex": "invalid_json"}),
    ("[1]", {"ga": "invalid_event", "turn": "invalid_event", "duplex": "bad_event"}),
    ({"type": "dance"}, {"ga": "unknown_event", "turn": "unknown_event", "duplex": "unknown_event"}),
    ({"type": ["dance"]}, {"ga": "invalid_value", "turn": "invalid_value", "duplex": "bad_event"}),
    (
        {"type": APPEND, "audio": "A" * MAX_EVENT_BYTES},
        {"ga": "event_too_large", "turn": "invalid_audio", "duplex": "event_too_large"},
    ),
    (
        {"type": COMMIT, "final": True},
        {"ga": "input_audio_buffer_commit_empty", "turn": "invalid_audio", "duplex": "input_audio_buffer_empty"},
    ),
    ({"type": APPEND, "audio": "AA=A"}, {"ga": "invalid_audio", "turn": "invalid_audio", "duplex": "bad_audio"}),
    (
        {"type": APPEND},
        {"ga": "missing_required_parameter", "turn": "missing_required_parameter", "duplex": "bad_event"},
    ),
    ({"type": COMMIT, "final": "yes"}, {"turn": "invalid_event", "duplex": "bad_event"}),
    ({"type": APPEND, "audio": "AAAA", "sample_rate_hz": 5}, {"turn": "invalid_value", "duplex": "bad_event"}),
    (
        {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 5}}}}},
        {"ga": "invalid_value", "turn": "invalid_event", "duplex": "bad_event"},
    ),
    (
        {"type": "session.update", "session": {"input_audio_format": "mp3"}},
        {"ga": "invalid_value", "turn": "invalid_event", "duplex": "unsupported_audio_format"},
    ),
    (
        {"type": "session.update", "session": {"seat": 10**30}},
        {"ga": "invalid_value", "turn": "invalid_value", "duplex": "bad_event"},
    ),
    (
        {"type": "conversation.item.truncate", "item_id": "nowhere", "audio_end_ms": 1},
        {"ga": "item_not_found", "turn": "unknown_event", "duplex": "item_not_found"},
    ),
    (
        {"type": "response.cancel"},
        {"ga": "response_cancel_not_active", "turn": "response_cancel_not_active", "duplex": "response_not_active"},
    ),
    (
        {"type": "session.resume", "session_id": "x", "resume_token": "old", "last_received_server_event_seq": 0},
        {"ga": "unknown_event", "turn": "unknown_event", "duplex": "unsupported_session_resume"},
    ),
    (
        {"type": "playback.ack", "played_ms": "all"},
        {"ga": "unknown_event", "turn": "unknown_event", "duplex": "bad_event"},
    ),
]


@asynccontextmanager
async def speaking(deployment: Running, name: str) -> AsyncIterator[Client]:
    dialect = DIALECTS[name]
    async with connected(deployment, dialect.path, additional_headers=dialect.headers) as client:
        if dialect.first is not None:
            await client.socket.send(json.dumps(dialect.first))
        await client.until("session.created")
        yield client


def code_of(refused: dict[str, Any], name: str) -> tuple[str, str | None]:
    dialect = DIALECTS[name]
    error = refused if dialect.is_flat else refused["error"]
    assert isinstance(error["error" if dialect.is_flat else "message"], str)
    return error["code"], error.get(dialect.named)


async def answered(client: Client, name: str) -> None:
    """Have a turn answered with sound."""
    dialect = DIALECTS[name]
    if not dialect.commit:
        await client.ask("Hello")
        return
    await client.speak(LOUD, 500, rate_hz=16_000)
    if name in {"duplex", "native"}:
        await client.say(COMMIT)  # of a turn whose sound was refused before
        assert code_of(await client.error(), name)[0] == "commit_aborted"
    await client.socket.send(json.dumps(dialect.commit))


@pytest.mark.parametrize("name", DIALECTS)
async def test_each_is_refused_in_the_dialects_words_and_the_session_goes_on(name: str) -> None:
    family = {"beta": "ga", "native": "duplex"}.get(name, name)
    async with deployed(("tokens = 3", "tokens = 40")) as deployment, speaking(deployment, name) as client:
        if name in {"ga", "beta"}:
            await client.say("session.update", session={"turn_detection": None})
        for index, (bad, codes) in enumerate(BAD):
            if (code := codes.get(family)) is None:
                continue
            mine = None if not isinstance(bad, dict) or "A" * 99 in str(bad) else f"mine_{index}"
            await client.socket.send(json.dumps({"event_id": f"mine_{index}"} | bad) if isinstance(bad, dict) else bad)
            assert code_of(await client.error(), name) == (code, mine), bad

        await answered(client, name)
        await client.until(DIALECTS[name].first_sound)
        if name != "turn":
            await client.say("response.create")
            active = {"ga": "conversation_already_has_active_response", "duplex": "response_already_active"}
            assert code_of(await client.error(), name)[0] == active[family]
        await client.say("response.cancel")
        await client.say("response.cancel", event_id="twice")
        refused = code_of(await client.error(), name)
        assert refused == ("response_not_active" if family == "duplex" else "response_cancel_not_active", "twice")
        ends = {"turn": "response.audio.done", "native": "audio.cancelled"}
        assert ends.get(name, "response.done") in client.kinds()
