"""``WS /v1/realtime/video``: fragments that play when they come, in pairs with what is said of them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).parent))

from videos import SLOW, deployment_of, marks_of  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from adapters.synthetic_marks import PictureMark
from gateways.videos import live_messages
from omni_bus.media.mp4 import boxes

START = {"type": "session.start", "prompt": "a cat"}


def socket_of(deployment: Running) -> connect:
    return connect(f"ws://127.0.0.1:{deployment.port}/v1/realtime/video", max_size=2**20)


async def say(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def event_of(socket: ClientConnection) -> dict[str, Any]:
    received = await socket.recv()
    assert isinstance(received, str), "bytes came that nothing was said of"
    return json.loads(received)


async def chunk_of(socket: ClientConnection, metadata: dict[str, Any]) -> bytes:
    """The bytes that belong to metadata, which come next whatever else is said."""
    data = await socket.recv()
    assert isinstance(data, bytes)
    assert len(data) == metadata["byte_length"]
    return data


async def rest_of(socket: ClientConnection) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Everything up to the end of the session, which is its last word."""
    events, chunks = [], []
    try:
        while True:
            events.append(await event_of(socket))
            if events[-1]["type"] == "video.chunk_metadata":
                chunks.append(await chunk_of(socket, events[-1]))
    except websockets.ConnectionClosed:
        return events, chunks


async def until_idle(deployment: Running) -> None:
    while deployment.stages["camera.0"].stats.active:
        await deployment.gateway.client.admin("status")
    assert deployment.gateway.client.requests == {}


async def test_clip_comes_while_it_is_made() -> None:
    async with running(deployment_of()) as deployment, socket_of(deployment) as socket:
        sampling = {"num_inference_steps": 1, "num_frames": 99}
        await say(socket, **START, num_frames=10, size="80x64", fps=12, format="m4s", sampling_params=sampling)
        started = await event_of(socket)
        assert (started["type"], started["format"]) == ("video.start", "m4s")
        expected = {"model": "camera", "num_frames": 10, "width": 80, "height": 64, "fps": 12}
        assert started["config"] == expected | {"num_inference_steps": 1}
        events, chunks = await rest_of(socket)

        *metadata, done = events
        assert done == {"type": "session.done", "request_id": started["request_id"], "chunks": 4, "stopped": False}
        assert {each["request_id"] for each in metadata} == {started["request_id"]}
        assert [each["num_frames"] for each in metadata] == [3, 3, 3, 1]
        assert [each["generation_chunk_index"] for each in metadata] == [0, 1, 2, 3]
        assert [each["transport_chunk_index"] for each in metadata] == [0, 1, 2, 3]
        assert {each["kind"] for each in metadata} == {"media"}
        assert [kind for kind, _, _ in boxes(chunks[0])][:2] == [b"ftyp", b"moov"]
        for num_chunks, num_frames in ((1, 3), (2, 6), (4, 10)):
            marks = marks_of(b"".join(chunks[:num_chunks]))
            assert marks == [PictureMark("a_cat", i, 10) for i in range(num_frames)]
        assert socket.close_code == 1000


async def test_what_happens_in_it_is_seen_and_told() -> None:
    async with (
        running(deployment_of("step_time_s = 0.05\nnum_frames = 60")) as deployment,
        socket_of(deployment) as socket,
    ):
        await say(socket, **START)
        first = [await event_of(socket), await event_of(socket)]
        chunks = [await chunk_of(socket, first[1])]
        event = {"event_id": "e1", "event": {"prompt": "rain"}, "transition_chunks": 2.0}
        for _ in range(2):
            await say(socket, type="session.interaction", interaction=event)
        await say(socket, type="session.interaction", interaction={"event": {"multi_modal_data": {"camera": {}}}})
        await say(socket, type="session.interaction", interaction={"event": {"prompt": "snow"}})
        events, rest = await rest_of(socket)
        chunks += rest

    told = [each for each in events if each["type"] != "video.chunk_metadata"]
    queued = [each for each in told if each["type"] == "session.interaction.queued"]
    assert queued[0]["event_id"] == "e1"
    assert len(queued) == 3  # of which the stage refuses the one that only has what it doesn't know
    errors = {each["code"]: each for each in told if each["type"] == "error"}
    assert errors["event_id_conflict"]["event_id"] == "e1"
    assert errors["interaction_failed"]["event_id"] == queued[1]["event_id"]
    metadata = [each for each in events if each["type"] == "video.chunk_metadata"]
    for moment in ("started", "completed"):
        seen = [event_id for each in metadata for event_id in each[f"{moment}_event_ids"]]
        assert sorted(seen) == sorted(["e1", queued[2]["event_id"]]), moment
    assert any("e1" in each["active_event_ids"] for each in metadata)
    markers = [mark.marker for mark in marks_of(b"".join(chunks))]
    assert markers[0] == "a_cat"
    assert markers[-1] == "snow"


async def test_session_is_stopped() -> None:
    async with running(deployment_of(SLOW)) as deployment, socket_of(deployment) as socket:
        await say(socket, **START)
        await socket.recv()
        await say(socket, type="session.stop")
        events, chunks = await rest_of(socket)
        assert events[-1]["type"] == "session.done"
        assert (events[-1]["stopped"], events[-1]["chunks"]) == (True, len(chunks))
        assert socket.close_code == 1000
        await until_idle(deployment)


async def test_client_that_leaves_frees_its_slot() -> None:
    async with running(deployment_of(SLOW)) as deployment:
        for is_rude in (False, True):
            async with socket_of(deployment) as socket:
                await say(socket, **START)
                await socket.recv()
                if is_rude:
                    socket.transport.abort()
            await until_idle(deployment)


async def test_client_that_takes_nothing_slows_its_own_video() -> None:
    async with running(deployment_of("num_frames = 100000")) as deployment, socket_of(deployment) as socket:
        stage = deployment.stages["camera.0"]
        await say(socket, **START, width=1024, height=1024)
        socket.transport.pause_reading()
        while not stage.stats.suspended:
            await deployment.gateway.client.admin("status")
        async with socket_of(deployment) as other:
            await say(other, **START, num_frames=4)
            events, _ = await rest_of(other)
            assert events[-1]["type"] == "session.done"
        assert stage.stats.suspended == 1
        socket.transport.abort()
        await until_idle(deployment)


async def test_pings_are_answered_and_lasting_silence_is_not_waited_for() -> None:
    """A stage that hangs: the client's pings keep the session alive, and without them it ends."""
    gateway = "video_stall_timeout_s = 0.5"
    async with running(deployment_of("hang_at_step = 5", gateway)) as deployment, socket_of(deployment) as socket:
        await say(socket, **START)
        assert (await event_of(socket))["type"] == "video.start"
        for _ in range(8):
            await say(socket, type="session.ping")
            while (event := await event_of(socket))["type"] == "video.chunk_metadata":
                await chunk_of(socket, event)
            assert event == {"type": "session.pong"}
            await asyncio.sleep(0.1)  # longer, all together, than the silence that is allowed
        events, _ = await rest_of(socket)
        assert [event["type"] for event in events] == ["error", "session.done"]
        assert events[-1]["stopped"]


async def test_client_that_says_nothing_is_not_waited_for() -> None:
    gateway = "video_start_timeout_s = 0.1"
    async with running(deployment_of("", gateway)) as deployment, socket_of(deployment) as socket:
        events, _ = await rest_of(socket)
        assert [event["type"] for event in events] == ["error"]
        assert "session.start" in events[0]["message"]


async def test_failure_ends_the_connection_without_a_done() -> None:
    async with running(deployment_of("fail_at_step = 6")) as deployment, socket_of(deployment) as socket:
        await say(socket, **START)
        events, _ = await rest_of(socket)
        assert [event["type"] for event in events if event["type"] != "video.chunk_metadata"] == [
            "video.start",
            "error",
        ]
        assert socket.close_code == 1011


BAD_STARTS: list[tuple[Any, str]] = [
    ("{", "message"),
    ("[]", "message"),
    (b"\x00", "message"),
    ("{}", "type"),
    ({"type": "session.stop"}, "type"),
    ({"type": "session.start"}, "prompt"),
    (START | {"format": "mp4"}, "format"),
    (START | {"model": "other"}, "model"),
    (START | {"size": "1x1"}, "size"),
    (START | {"num_inference_steps": 0}, "num_inference_steps"),
    (START | {"guidance_scale": "NaN"}, "guidance_scale"),
    (START | {"seed": 2**64}, "seed"),
    (START | {"generate_sound": True}, "generate_sound"),
    (START | {"extra_params": {"preencode_mp4": True}}, "extra_params.preencode_mp4"),
    (START | {"extra_params": 1}, "extra_params"),
    (START | {"sampling_params": [1]}, "sampling_params"),
    (START | {"sampling_params": {"unheard": 1}}, "extra_params"),
    (START | {"image_reference": [{"image_url": "a"}, {"image_url": "b"}]}, "image_reference"),
    (START | {"image_reference": {"image_url": "data:image/png;base64,AAAA"}}, "image_reference.image_url"),
    (START | {"nonsense": 1}, "nonsense"),
]


async def test_bad_start_is_refused_by_its_field() -> None:
    async with running(deployment_of()) as deployment:
        for message, field in BAD_STARTS:
            async with socket_of(deployment) as socket:
                await socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
                events, _ = await rest_of(socket)
                assert [event["type"] for event in events] == ["error"], (message, events)
                assert events[0]["message"].startswith(f"{field}:"), (message, events)
                assert socket.close_code == 1008
        assert deployment.stages["camera.0"].stats.done == 0


BAD_MESSAGES: list[tuple[Any, str]] = [
    ("{", "message"),
    ("1", "message"),
    (b"\x00", "message"),
    ("x" * (live_messages.MAX_CONTROL_BYTES + 1), "message"),
    ({"type": "session.start"}, "type"),
    ({"type": "dance"}, "type"),
    ({"type": "session.interaction"}, "interaction"),
    *(
        ({"type": "session.interaction", "interaction": interaction}, f"interaction.{field}")
        for interaction, field in (
            ({"event_id": ""}, "event_id"),
            ({"event_id": 1}, "event_id"),
            ({"event": "x"}, "event"),
            ({"event": {}}, "event.prompt"),
            ({"event": {"prompt": " "}}, "event.prompt"),
            ({"event": {"prompt": "x", "negative_prompt": "y"}}, "event.negative_prompt"),
            ({"event": {"multi_modal_data": {}}}, "event.multi_modal_data"),
            ({"event": {"multi_modal_data": {"a": 1}}}, "event.multi_modal_data"),
            ({"event": {"prompt": "x"}, "transition_chunks": -1}, "transition_chunks"),
            ({"event": {"prompt": "x"}, "transition_chunks": 1.5}, "transition_chunks"),
            ({"event": {"prompt": "x"}, "transition_chunks": True}, "transition_chunks"),
        )
    ),
]


async def test_bad_message_is_refused_and_the_session_goes_on() -> None:
    async with running(deployment_of(SLOW)) as deployment, socket_of(deployment) as socket:
        await say(socket, **START)
        for message, field in BAD_MESSAGES:
            await socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
            while (event := await event_of(socket))["type"] != "error":
                if event["type"] == "video.chunk_metadata":
                    await chunk_of(socket, event)
            assert event["message"].startswith(f"{field}:"), (message, event)
        await say(socket, type="session.stop")
        events, _ = await rest_of(socket)
        assert events[-1]["stopped"]


@pytest.mark.parametrize("model", ["silent"])
async def test_model_that_takes_no_interaction_says_so(model: str) -> None:
    async with running(deployment_of(SLOW)) as deployment, socket_of(deployment) as socket:
        await say(socket, **START, model=model)
        for _ in range(2):  # what was refused may come again
            interaction = {"event_id": "e", "event": {"prompt": "x"}}
            await say(socket, type="session.interaction", interaction=interaction)
            while (event := await event_of(socket))["type"] != "error":
                if event["type"] == "video.chunk_metadata":
                    await chunk_of(socket, event)
            assert (event["code"], event["event_id"]) == ("interaction_failed", "e")
