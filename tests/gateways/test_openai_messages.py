"""Messages and their parts: what each becomes, and what is refused where."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateways.openai_messages import MAX_MEDIA, Source, file_ids_of, read_messages
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import BadInput
from omni_bus.wire.frames import RouteEdge
from omni_bus.wire.prompt import Prompt


def edge(text: str, kind: str) -> RouteEdge:
    (source, source_port), (target, target_port) = (end.split(".") for end in text.split(" -> "))
    return RouteEdge(source, source_port, target, target_port, kind, 8, 2**20)


SEES = Pipeline(
    "sees",
    "sees",
    (),
    (
        edge("in.messages -> vlm.prompt", "json"),
        edge("in.images -> vlm.images", "image"),
        edge("in.audio -> ears.audio", "audio"),
        edge("ears.text -> vlm.heard", "text"),
        edge("vlm.text -> out.text", "text"),
    ),
)
INPUTS = ("messages", "images", "audio")


def read(*messages: Any, inputs: tuple[str, ...] = INPUTS, **uploaded: str):
    return read_messages(list(messages), SEES, inputs, uploaded={f"file-{key}": port for key, port in uploaded.items()})


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def refusal_of(message: Any, **options: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(message, **options)
    return caught.value


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "input_text", "text": "lo"}, "!"]

    assert read({"role": "developer", "content": parts}).messages == [{"role": "developer", "content": "Hello!"}]


def test_answer_of_ours_can_be_sent_back() -> None:
    answered = {
        "role": "assistant",
        "content": "Hi.",
        "refusal": None,
        "audio": {"id": "a", "data": "UklG"},
        "name": None,
    }
    spoken = {"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "Hey."}, "tool_calls": []}
    refused = {"role": "assistant", "content": None, "refusal": "No.", "annotations": []}

    assert [message["content"] for message in read(answered, spoken, refused).messages] == ["Hi.", "Hey.", "No."]


def test_calls_and_results_are_passed_on() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}, "index": 0}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "cat"}]}
    found = read({"role": "assistant", "content": None, "tool_calls": [call]}, result).messages

    assert found == [
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "cat"},
    ]


def test_reasoning_and_names_are_passed_on() -> None:
    found = read(
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "content": "y", "reasoning": "z"},
        {"role": "assistant", "content": "y", "reasoning_content": "z"},
    ).messages

    assert [message.get("name", message.get("reasoning")) for message in found] == ["Ann", "z", "z"]


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (IMAGE, Source(port="images", place="messages[0].content[1].image_url.url", url="data:image/png;base64,AA==")),
        (
            {"image_url": "http://x/y"},
            Source(port="images", place="messages[0].content[1].image_url", url="http://x/y"),
        ),
        (
            {"type": "image_url", "image_url": {"url": "file:///a", "detail": "low"}},
            Source(port="images", place="messages[0].content[1].image_url.url", url="file:///a"),
        ),
        (
            {"type": "file", "file": {"file_data": "data:image/png;base64,AA==", "filename": "a.png"}},
            Source(port="images", place="messages[0].content[1].file.file_data", url="data:image/png;base64,AA=="),
        ),
        (
            {"type": "file", "file": {"file_id": "file-picture"}},
            Source(port="images", place="messages[0].content[1].file.file_id", file_id="file-picture"),
        ),
    ],
)
def test_picture_is_a_part_and_a_source(part: Any, source: Source) -> None:
    found = read(user({"type": "text", "text": "What?"}, part), picture="images")

    assert found.media == [source]
    assert found.messages[0]["content"] == [{"type": "text", "text": "What?"}, {"type": "image"}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,UklG"}},
        {"audio_url": "https://x/y.wav"},
        {"type": "file", "file": {"file_id": "file-sound"}},
    ],
)
def test_sound_for_another_stage_leaves_no_part_in_the_messages(part: Any) -> None:
    """The stage that reads the messages gets only what the other one makes of it."""
    found = read(user({"type": "text", "text": "What?"}, part), sound="audio")

    assert [source.port for source in found.media] == ["audio"]
    assert found.messages[0]["content"] == "What?"


def test_messages_are_what_stages_read() -> None:

    found = read(user("a", IMAGE), {"role": "assistant", "content": "b", "reasoning": "c"})

    assert len(msgspec.convert({"messages": found.messages}, Prompt).messages) == 2


def test_ids_of_files_are_found_before_anything_is_checked() -> None:
    part = {"type": "file", "file": {"file_id": "file-a"}}

    assert file_ids_of([user(part, 5, {"file": 5}), 5, {"content": 5}]) == ["file-a"]


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        ("Hello", "messages[0]", "an object with 'role' and 'content'"),
        ({"content": "x"}, "messages[0].role", "null came (allowed: system"),
        ({"role": "robot", "content": "x"}, "messages[0].role", "'robot' came"),
        ({"role": "user"}, "messages[0].content", "null came"),
        ({"role": "tool", "content": None}, "messages[0].content", "null came"),
        ({"role": "assistant", "content": None}, "messages[0].content", "null came"),
        ({"role": "user", "content": []}, "messages[0].content", "an empty list came"),
        ({"role": "user", "content": 5}, "messages[0].content", "5 came"),
        ({"role": "user", "content": "x", "contnet": "y"}, "messages[0].contnet", "did you mean 'content'"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name", "a string"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "messages[0].reasoning", "the role is user"),
        ({"role": "user", "content": "x", "tool_call_id": "y"}, "messages[0].tool_call_id", "the role is user"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls", "the role is user"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]", "`id`"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls", "Expected `array`"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "b", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
            "Expected `str`",
        ),
        ({"role": "assistant", "content": "x", "function_call": {}}, "messages[0].function_call", "'tool_calls'"),
        (user(7), "messages[0].content[0]", "7 came"),
        (user({}), "messages[0].content[0].type", "null came"),
        (user({"type": "text"}), "messages[0].content[0].text", "null came"),
        (user({"type": "text", "text": "x", "size": 1}), "messages[0].content[0].size", "unknown field"),
        (user({"type": "smell"}), "messages[0].content[0].type", "'smell' came (allowed: text, image_url"),
        (user({"type": "image_embeds"}), "messages[0].content[0].type", "'image_embeds' came"),
        (user({"type": "image_url"}), "messages[0].content[0].image_url", "null came"),
        (user({"type": "image_url", "image_url": ""}), "messages[0].content[0].image_url", "a URL"),
        (user({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url", "null came"),
        (user({"type": "image_url", "image_url": {"url": 5}}), "messages[0].content[0].image_url.url", "5 came"),
        (
            user({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}),
            "messages[0].content[0].image_url.detail",
            "auto, low, high",
        ),
        (user(IMAGE | {"uuid": "x"}), "messages[0].content[0].uuid", "unknown field"),
        (user({"type": "video_url", "video_url": {"url": "x"}}), "messages[0].content[0].type", "takes nothing else"),
        (user({"type": "input_audio", "input_audio": "x"}), "messages[0].content[0].input_audio", "an object"),
        (
            user({"type": "input_audio", "input_audio": {"data": "x", "format": "pcm"}}),
            "messages[0].content[0].input_audio.format",
            "wav, mp3",
        ),
        (
            user({"type": "input_audio", "input_audio": {"data": "http://x", "format": "wav"}}),
            "messages[0].content[0].input_audio.data",
            "base64",
        ),
        (user({"type": "file", "file": {}}), "messages[0].content[0].file", "one of 'file_id' and 'file_data'"),
        (user({"type": "file", "file": {"file_id": "x"}}), "messages[0].content[0].file.file_id", "uploaded"),
        (user({"type": "file", "file": {"file_data": "x"}}), "messages[0].content[0].file.file_data", "a data URL"),
        (
            user({"type": "file", "file": {"file_data": "data:text/plain,x"}}),
            "messages[0].content[0].file.file_data",
            "a picture, a sound or a video",
        ),
        (user(*[IMAGE] * (MAX_MEDIA + 1)), f"messages[0].content[{MAX_MEDIA}]", "64 pictures"),
    ],
)
def test_bad_message_is_refused_at_its_place(message: Any, field: str, words: str) -> None:
    error = refusal_of(message)

    assert error.field == field
    assert words in error.message
    assert "allowed: )" not in error.message


def test_media_of_a_model_that_reads_text_are_refused() -> None:
    error = refusal_of(user(IMAGE), inputs=("messages",))

    assert error.field == "messages[0].content[0].type"
    assert "this model takes nothing else" in error.message


def test_refusal_shows_no_long_prompt() -> None:
    assert "secret" not in refusal_of("secret " * 100).message
