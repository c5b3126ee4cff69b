"""Bad input of live conversations: an error with its code and the client's name for it, and the session goes on."""

from __future__ import annotations

import json
from typing import Any

from gateways.realtime.reading import MAX_EVENT_BYTES
from tests.gateways.conversation import LOUD, check_ga, connected, deployed

APPEND, UPDATE, ITEM = "input_audio_buffer.append", "session.update", "conversation.item.create"


def update(**session: Any) -> dict[str, Any]:
    return {"type": UPDATE, "session": session}


def user(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": ITEM, "item": {"type": "message", "role": "user", "content": list(content), **fields}}


CASES: list[tuple[str | bytes | dict[str, Any], str, str | None]] = [
    # what came, OpenAI's code, the field
    (b"\0\1", "invalid_event", None),
    ("{", "invalid_json", None),
    ('{"type": "input_audio_buffer.clear"} {}', "invalid_json", None),
    ("[" * 2000, "invalid_json", None),
    ("[]", "invalid_event", None),
    ("7", "invalid_event", None),
    ({}, "missing_required_parameter", "type"),
    ({"type": 5}, "invalid_value", "type"),
    ({"type": "dance"}, "unknown_event", "type"),
    ({"type": "session.open", "session_id": "x"}, "unknown_event", "type"),
    ({"type": "gateway.refuse", "code": "x", "message": "y"}, "unknown_event", "type"),
    ({"type": APPEND}, "missing_required_parameter", "audio"),
    ({"type": APPEND, "audio": "AAA"}, "invalid_audio", "audio"),
    ({"type": APPEND, "audio": "AA=A"}, "invalid_audio", "audio"),
    ({"type": APPEND, "audio": "ÄÄÄÄ"}, "invalid_audio", "audio"),
    ({"type": APPEND, "audio": 5}, "invalid_audio", "audio"),
    ({"type": APPEND, "audio": ["AAAA"]}, "invalid_audio", "audio"),
    ({"type": APPEND, "audio": "A" * MAX_EVENT_BYTES}, "event_too_large", None),
    ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty", None),
    ({"type": UPDATE}, "missing_required_parameter", "session"),
    ({"type": UPDATE, "session": []}, "invalid_value", "session"),
    (update(nonsense=1), "unknown_parameter", "session.nonsense"),
    (
        update(tools=[{"type": "function", "name": "f", "parameters": {"maximum": 10**30}}]),
        "invalid_value",
        "session.tools[0].parameters.maximum",
    ),
    (update(model="another"), "cannot_update_model", "session.model"),
    (update(type="transcription"), "invalid_value", "session.type"),
    (update(output_modalities=["smell"]), "invalid_value", "session.output_modalities[0]"),
    (update(output_modalities=[]), "invalid_value", "session.output_modalities"),
    (update(instructions=5), "invalid_value", "session.instructions"),
    (update(audio=5), "invalid_value", "session.audio"),
    (update(audio={"input": {"format": "mp3"}}), "invalid_value", "session.audio.input.format"),
    (
        update(audio={"input": {"format": {"type": "audio/pcm", "rate": 1}}}),
        "invalid_value",
        "session.audio.input.format.rate",
    ),
    (update(audio={"output": {"speed": 90}}), "invalid_value", "session.audio.output.speed"),
    (update(turn_detection={"type": "guess"}), "invalid_value", "session.audio.input.turn_detection.type"),
    (update(turn_detection={"threshold": 2}), "invalid_value", "session.audio.input.turn_detection.threshold"),
    (update(max_output_tokens=0), "invalid_value", "session.max_output_tokens"),
    (update(tools=[{"type": "mcp"}]), "invalid_value", "session.tools[0].type"),
    (update(tool_choice={"type": "function"}), "missing_required_parameter", "session.tool_choice.name"),
    ({"type": ITEM}, "missing_required_parameter", "item"),
    ({"type": ITEM, "item": {"type": "message"}}, "missing_required_parameter", "item.role"),
    (user({"type": "smell"}), "invalid_value", "item.content[0].type"),
    (user({"type": "output_text", "text": "x"}), "invalid_value", "item.content[0].type"),
    (user({"type": "input_audio", "audio": "!"}), "invalid_value", "item.content[0].audio"),
    (user(id="there"), "item_already_exists", "item.id"),
    (user() | {"previous_item_id": "nowhere"}, "item_not_found", "previous_item_id"),
    (
        {"type": ITEM, "item": {"type": "function_call_output", "call_id": "nobody", "output": ""}},
        "invalid_tool_call_id",
        "item.call_id",
    ),
    ({"type": "conversation.item.retrieve", "item_id": "nowhere"}, "item_not_found", "item_id"),
    ({"type": "conversation.item.delete"}, "missing_required_parameter", "item_id"),
    ({"type": "conversation.item.truncate", "item_id": "nowhere", "audio_end_ms": 1}, "item_not_found", "item_id"),
    ({"type": "conversation.item.truncate", "item_id": "there", "audio_end_ms": -1}, "invalid_value", "audio_end_ms"),
    ({"type": "response.cancel"}, "response_cancel_not_active", "response_id"),
    ({"type": "response.create", "response": 5}, "invalid_value", "response"),
    ({"type": "response.create", "response": {"nonsense": 1}}, "unknown_parameter", "response.nonsense"),
    ({"type": "response.create", "response": {"metadata": {"x" * 65: ""}}}, "invalid_value", "response.metadata"),
    ({"type": "response.create", "response": {"input": [5]}}, "invalid_value", "response.input[0]"),
]


async def test_each_is_refused_by_name_and_the_session_goes_on() -> None:
    async with deployed() as deployment, connected(deployment) as client:
        await client.hear()
        await client.say(ITEM, item={"type": "message", "role": "user", "content": [], "id": "there"})
        await client.until("conversation.item.done")
        for index, (case, code, param) in enumerate(CASES):
            if isinstance(case, dict):
                await client.socket.send(json.dumps({"event_id": f"mine_{index}"} | case))
            else:
                await client.socket.send(case)
            refused = (await client.hear())["error"]
            assert (refused["code"], refused["param"]) == (code, param), (case, refused)
            is_named = isinstance(case, dict) and code != "event_too_large"
            assert refused["event_id"] == (f"mine_{index}" if is_named else None), case
            assert refused["message"]

        await client.ask("Hello")
        done = await client.until("response.done")
        assert done["response"]["status"] == "completed"
        check_ga(client.frames)


async def test_an_error_before_the_dialect_is_known_is_for_all_of_them() -> None:
    async with deployed() as deployment, connected(deployment) as client:
        await client.hear()
        await client.socket.send("{")
        refused = await client.error()
        assert refused["error"]["code"] == refused["code"] == "invalid_json"
        assert refused["error"]["message"] == refused["message"]
        await client.say("input_audio_buffer.clear")
        await client.socket.send("{")
        assert "code" not in await client.error()
        check_ga(client.frames)


async def test_what_comes_at_the_wrong_time() -> None:
    async with deployed(("tokens = 3", "tokens = 4000")) as deployment, connected(deployment) as client:
        await client.ask("Hello")
        await client.until("response.output_audio.delta")
        await client.say("response.create", event_id="second")
        assert (await client.error())["error"]["code"] == "conversation_already_has_active_response"
        await client.say(UPDATE, session={"audio": {"output": {"voice": "another"}}}, event_id="voice")
        assert (await client.error())["error"]["code"] == "cannot_update_voice"
        await client.say("response.cancel")
        done = await client.until("response.done")
        await client.say("response.cancel", event_id="twice")
        assert (await client.error())["error"]["event_id"] == "twice"
        item = done["response"]["output"][0]["id"]
        await client.say("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=10_000_000)
        assert (await client.error())["error"]["param"] == "audio_end_ms"
        await client.say("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=20)
        assert (await client.until("conversation.item.truncated"))["audio_end_ms"] == 20


async def test_ten_thousand_events_at_once_are_answered_in_order() -> None:
    async with deployed() as deployment, connected(deployment) as client:
        await client.hear()
        await client.say(UPDATE, session={"turn_detection": None})
        for index in range(2_500):
            await client.say("dance", event_id=f"a{index}")
            await client.say(APPEND, audio="AAA=")
            await client.say("input_audio_buffer.clear")
            await client.say("response.cancel", event_id=f"b{index}")
        await client.say("conversation.item.retrieve", item_id="last", event_id="last")
        names: list[str] = []
        while not names or names[-1] != "last":
            names.append((await client.error())["error"]["event_id"])

        assert names == [name for index in range(2_500) for name in (f"a{index}", f"b{index}")] + ["last"]
        assert len(client.of("input_audio_buffer.cleared")) == 2_500


async def test_a_duplex_session_takes_nothing_after_its_end() -> None:
    async with (
        deployed() as deployment,
        connected(deployment, "/v1/realtime?duplex=1&model=synthetic-sessions") as client,
    ):
        await client.speak(LOUD, 100)
        for bad, code in (
            ({"type": APPEND, "audio": "AAAA", "sample_rate_hz": 5}, "bad_event"),
            ({"type": APPEND, "audio": "AAAA", "format": "mp3"}, "unsupported_audio_format"),
            ({"type": APPEND, "audio": "AAAA", "is_speech": "yes"}, "bad_event"),
            ({"type": APPEND, "audio": "AAAA", "overlap_action": "shout"}, "bad_event"),
            ({"type": APPEND, "audio": "AAAA", "video_frames": ["AAAA"]}, "invalid_video_frames"),
            ({"type": "playback.ack", "played_ms": True}, "bad_event"),
            ({"type": "playback.ack", "played_ms": 5, "item_id": "item_x"}, "playback_item_not_found"),
            ({"type": "session.event_ack", "server_event_seq": 999}, "invalid_event_ack"),
            ({"type": "session.resume"}, "unsupported_session_resume"),
            ({"type": "turn.signal", "event": "dance"}, "bad_event"),
            ({"type": "response.cancel"}, "response_not_active"),
        ):
            await client.socket.send(json.dumps(bad | {"event_id": "mine"}))
            refused = (await client.error())["error"]
            assert (refused["code"], refused.get("event_id")) == (code, "mine"), bad
        await client.say("session.close")
        await client.speak(LOUD, 300)
        assert (await client.end())[0] == 1000
        assert client.kinds()[-1] == "session.closed"
