"""Chat completions of synthetic engines: the shape of answers and streams, and that nothing is lost in them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from array import array
from typing import Any

import aiohttp
import pytest

from actors.testing import Running, running
from gateways.openai_chat_answer import ChunkWriter
from gateways.openai_chat_body import parse
from gateways.openai_models import can_serve
from omni_bus.core.pipeline import Pipeline
from omni_bus.wire.frames import RouteEdge

CHAT = "/v1/chat/completions"
PAST_THE_FIRST_WINDOWS = 40
"""A step that comes only when the gateway has taken the first pieces: an edge's window is 16 chunks of text. An earlier
failure may reach it, by way of the coordinator, before them."""
SPOKEN = """
[stages.llm]
adapter = "synthetic-text"
max_prompt_tokens = 50
[stages.voice]
adapter = "synthetic-speech"
[pipelines.chat]
serve_as = "spoken"
aliases = ["also-spoken"]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
"""


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "sampling_params_list": [{"tokens": 4}]} | fields


async def post(deployment: Running, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession(deployment.url) as session, session.post(CHAT, json=body(**fields)) as response:
        return response.status, await response.json()


async def stream(deployment: Running, **fields: Any) -> tuple[int, list[Any]]:
    """Return the status and every event, parsed; the end marker as it is."""
    sent = body(stream=True, **fields)
    async with aiohttp.ClientSession(deployment.url) as session, session.post(CHAT, json=sent) as response:
        text = await response.text()
        if response.status != 200:
            return response.status, [json.loads(text)]
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = text.removesuffix("\n\n").split("\n\n")
        data = [event.removeprefix("data: ") for event in events]
        assert all(event != raw for event, raw in zip(events, data, strict=True))
        return 200, [raw if raw == "[DONE]" else json.loads(raw) for raw in data]


def samples_of(chunks: list[dict[str, Any]]) -> array[int]:
    pcm = b"".join(base64.b64decode(c["choices"][0]["delta"]["content"]) for c in chunks if is_sound(c))
    return array("h", pcm)


def is_sound(chunk: dict[str, Any]) -> bool:
    return chunk.get("modality") == "audio" and "content" in chunk["choices"][0]["delta"]


def wav_samples(data: str) -> array[int]:
    with wave.open(io.BytesIO(base64.b64decode(data))) as file:
        return array("h", file.readframes(10**9))


async def test_stream_has_the_agreed_shape() -> None:
    async with running(SPOKEN) as deployment:
        _, events = await stream(deployment, stream_options={"include_usage": True}, audio={"format": "pcm16"})

    *chunks, usage, done = events
    assert done == "[DONE]"
    assert len({(c["id"], c["model"], c["created"], c["object"]) for c in [*chunks, usage]}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["modality"] == "text"
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["modality"] == "text"]
    assert "".join(texts) == "hi:0 hi:1 hi:2 hi:3"
    assert len(texts) > 2
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in c for c in chunks)
    assert usage["choices"] == []
    assert "modality" not in usage
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}


@pytest.mark.parametrize(
    "text", ["a", "", '"content":""', "\\ \n \u2028 é 😀", '{"content":""},"logprobs":null'], ids=range(5)
)
def test_chunk_of_text_alone_is_the_chunk_that_any_other_way_makes(text: str) -> None:
    edges = (
        RouteEdge("in", "messages", "llm", "prompt", "json", 8, 99),
        RouteEdge("llm", "text", "out", "text", "text", 8, 99),
    )
    chat = parse({"messages": [{"role": "user", "content": "hi"}]}, {"chat": Pipeline("chat", "chat", (), edges)})
    writer = ChunkWriter("chatcmpl-1", '"content":""', chat)

    for index in (0, 1, 0):
        assert writer.text(index, text) == writer._chunk(index, "text", {"content": text})


async def test_client_of_http_1_0_gets_the_events_without_chunks() -> None:
    sent = json.dumps(body(stream=True))
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    async with running(SPOKEN) as deployment:
        reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
        writer.write((head + sent).encode())
        answer = (await reader.read()).decode()
        writer.close()

    head, _, text = answer.partition("\r\n\r\n")
    assert "chunked" not in head
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


async def test_streamed_sound_has_every_sample_once() -> None:
    async with running(SPOKEN) as deployment:
        _, events = await stream(deployment, audio={"format": "pcm16"}, sampling_params_list=[{"tokens": 50}])
        _, whole = await post(deployment, sampling_params_list=[{"tokens": 50}])

    samples = samples_of(events[:-1])
    assert len(samples) > 0
    assert samples == wav_samples(whole["choices"][0]["message"]["audio"]["data"])
    metadata = [c["choices"][0]["audio_metadata"] for c in events[:-1] if is_sound(c)]
    assert sum(m["frame_count"] for m in metadata) == len(samples)
    assert {(m["format"], m["sample_rate_hz"], m["channels"]) for m in metadata} == {("pcm16", 24000, 1)}


async def test_text_leaves_while_sound_is_still_to_come() -> None:
    async with running(SPOKEN) as deployment:
        _, events = await stream(deployment, sampling_params_list=[{"tokens": 500}])

    modalities = [event["modality"] for event in events[:-1]]
    assert modalities.index("audio") < len(modalities) - 1 - modalities[::-1].index("text")


async def test_each_wav_piece_is_a_file() -> None:
    async with running(SPOKEN) as deployment:
        _, events = await stream(deployment)

    pieces = [wav_samples(c["choices"][0]["delta"]["content"]) for c in events[:-1] if is_sound(c)]
    assert len(pieces) > 0
    assert all(len(piece) > 0 for piece in pieces)


async def test_openai_form_of_sound_is_a_setting() -> None:
    async with running(SPOKEN + 'audio_delta = "audio"\n') as deployment:
        _, events = await stream(deployment, modalities=["audio"], audio={"format": "pcm16"})

    deltas = [c["choices"][0]["delta"] for c in events[:-1]]
    sound = [delta["audio"] for delta in deltas if "audio" in delta]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert all("content" not in delta for delta in deltas)
    assert len({piece["id"] for piece in sound}) == 1
    assert len(array("h", b"".join(base64.b64decode(piece["data"]) for piece in sound))) > 0


async def test_whole_answer_has_the_agreed_shape() -> None:
    async with running(SPOKEN) as deployment:
        status, answer = await post(deployment, model="also-spoken", audio={"format": "flac"})

    choice = answer["choices"][0]
    audio = choice["message"]["audio"]
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "spoken"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == audio["transcript"] == "hi:0 hi:1 hi:2 hi:3"
    assert base64.b64decode(audio["data"])[:4] == b"fLaC"
    assert audio["expires_at"] - answer["created"] == 24 * 3600
    assert choice["audio_metadata"]["format"] == "flac"
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == 5


async def test_text_alone_runs_no_voice() -> None:
    async with running(SPOKEN) as deployment:
        _, answer = await post(deployment, modalities=["text"])
        _, events = await stream(deployment, modalities=["text"])

        assert deployment.stages["voice.0"].stats.done == 0
    assert answer["choices"][0]["message"]["audio"] is None
    assert {event["modality"] for event in events[:-1]} == {"text"}


async def test_sound_alone_has_no_content() -> None:
    async with running(SPOKEN) as deployment:
        _, answer = await post(deployment, modalities=["audio"])
        _, events = await stream(deployment, modalities=["audio"])

    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert len(wav_samples(message["audio"]["data"])) > 0
    assert {event["modality"] for event in events[:-1]} == {"audio"}
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_cut_text_is_told_although_sound_ends_later() -> None:
    async with running(SPOKEN) as deployment:
        _, events = await stream(deployment, sampling_params_list=None, max_tokens=2)
        _, answer = await post(deployment, sampling_params_list=None, max_completion_tokens=2)

    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "hi:0 hi:1"


@pytest.mark.parametrize("streamed", [False, True])
async def test_prompt_beyond_the_context_is_a_bad_request(streamed) -> None:
    """Streams too: the status is not decided before the engine has spoken."""
    messages = [{"role": "user", "content": "word " * 60}]
    async with running(SPOKEN) as deployment:
        if streamed:
            status, (document,) = await stream(deployment, messages=messages)
        else:
            status, document = await post(deployment, messages=messages)

    assert status == 400
    assert document["error"]["param"] == "messages"
    assert "60 tokens came (allowed: 50)" in document["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_an_adapter_refuses_is_a_bad_request(streamed) -> None:
    async with running(SPOKEN) as deployment:
        if streamed:
            status, (document,) = await stream(deployment, sampling_params_list=None, stop=["x"])
        else:
            status, document = await post(deployment, sampling_params_list=None, stop=["x"])

    assert status == 400
    assert document["error"]["param"] == "stop"


async def test_failure_before_the_first_piece_has_a_status() -> None:
    async with running(SPOKEN) as deployment:
        status, (document,) = await stream(deployment, sampling_params_list=[{"fail_at_step": 0}])

    assert status == 500
    assert document["error"]["stage"] == "llm"


async def test_failure_in_mid_stream_is_the_last_event(caplog) -> None:
    caplog.set_level("INFO", logger="gateways.http")
    async with running(SPOKEN) as deployment:
        failing = [{"tokens": 100, "fail_at_step": PAST_THE_FIRST_WINDOWS}]
        status, events = await stream(deployment, sampling_params_list=failing, modalities=["text"])
        after, _ = await post(deployment)

    assert status == 200
    assert after == 200
    assert events[-1]["error"]["code"] == 500
    assert events[-1]["error"]["retry_safe"] is False
    ends = [record.fields for record in caplog.records if record.getMessage() == "request ended"]  # type: ignore[attr-defined]
    assert [end["outcome"] for end in ends] == ["500", "200"]
    assert all(c["choices"][0]["finish_reason"] is None for c in events[:-1])


async def test_answer_beyond_its_limit_asks_for_a_stream() -> None:
    async with running(SPOKEN + "max_answer_bytes = 20000\n") as deployment:
        status, document = await post(deployment, sampling_params_list=[{"tokens": 100}])
        streamed, events = await stream(deployment, sampling_params_list=[{"tokens": 100}])

    assert (status, document["error"]["param"]) == (400, "stream")
    assert (streamed, events[-1]) == (200, "[DONE]")


async def test_stages_that_load_are_reported_and_refused() -> None:
    async with running(SPOKEN, loads_stages=False) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.get("/health") as response:
            assert response.status == 503
            report = await response.json()
        async with session.post(CHAT, json=body()) as response:
            assert response.status == 503
        async with session.get("/ping") as response:
            assert (response.status, await response.read()) == (503, b"")

        assert (report["status"], report["live"], report["ready"]) == ("unhealthy", True, False)
        assert "stage llm" in report["reason"]
        assert report["stages"]["llm"]["replicas"][0]["is_live"] is True
        assert report["stages"]["llm"]["replicas"][0]["is_ready"] is False

        for stage in deployment.stages.values():
            await stage.load()
        await deployment.until_ready()
        async with session.get("/health") as response:
            assert (response.status, (await response.json())["status"]) == (200, "healthy")


async def test_silent_coordinator_makes_health_say_so() -> None:
    async with running(SPOKEN) as deployment, aiohttp.ClientSession(deployment.url) as session:
        await deployment.coordinator.close()
        async with session.get("/health") as response:
            assert response.status == 503
            assert "coordinator does not answer" in (await response.json())["reason"]


def test_only_pipelines_that_chat_can_express_are_served() -> None:
    def pipeline(*edges: tuple[str, str, str, str, str]) -> Pipeline:
        return Pipeline("p", "p", (), tuple(RouteEdge(*edge, 8, 2**20) for edge in edges))

    messages = ("in", "messages", "llm", "prompt", "json")
    assert can_serve(pipeline(messages, ("llm", "text", "out", "text", "text")))
    assert not can_serve(pipeline(messages, ("llm", "image", "out", "image", "image")))
    assert not can_serve(pipeline(messages, ("llm", "text", "out", "audio", "text")))
    assert not can_serve(
        pipeline(messages, ("in", "more", "llm", "more", "text"), ("llm", "text", "out", "text", "text"))
    )
    assert not can_serve(pipeline(("in", "prompt", "llm", "prompt", "text"), ("llm", "text", "out", "text", "text")))
    assert not can_serve(pipeline(messages))
