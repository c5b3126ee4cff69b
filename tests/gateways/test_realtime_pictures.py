"""Pictures in live conversations: items and frames of video, for models that see, and refused by others."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from tests.gateways.conversation import LOUD, Client, check_ga, connected, deployed

SEES = ('"in.messages -> llm.prompt",', '"in.messages -> llm.prompt", "in.images -> llm.images",')
DUPLEX = "/v1/realtime?duplex=1&model=synthetic-sessions"


def drawn(kind: str = "PNG", side: int = 16, colour: str = "red") -> str:
    """Return a picture in base64."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def url(kind: str = "png", data: str | None = None) -> str:
    return f"data:image/{kind};base64,{drawn(kind.upper()) if data is None else data}"


def item(*urls: Any, text: str = "What is it") -> dict[str, Any]:
    pictures = [{"type": "input_image", "image_url": each} for each in urls]
    return {"type": "message", "role": "user", "content": [*pictures, {"type": "input_text", "text": text}]}


async def words_read(client: Client) -> int:
    """Return how many words the model was given; of a picture one."""
    await client.say("response.create", response={"modalities": ["text"]})
    return (await client.until("response.done"))["response"]["usage"]["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/realtime", DUPLEX])
async def test_a_model_that_sees_is_given_the_pictures_of_items(path: str) -> None:
    async with deployed(SEES) as deployment, connected(deployment, path) as client:
        await client.say("conversation.item.create", item=item())
        blind = await words_read(client)
        await client.say("conversation.item.create", item=item(url("png"), url("jpeg"), text="And"))
        added = await client.until("conversation.item.added")
        await client.say("conversation.item.retrieve", item_id=added["item"]["id"])
        whole = await client.until("conversation.item.retrieved")
        answer = len(client.text("response.output_text.delta").split())

        assert await words_read(client) == blind + answer + len(["And", "picture", "picture"])
        assert [part.get("image_url") for part in added["item"]["content"]] == [None] * 3  # events bring no media
        assert whole["item"]["content"][0]["image_url"] == url("png")
        if path == "/v1/realtime":
            check_ga(client.frames)


async def test_frames_of_video_are_seen_with_the_turn_that_they_ride_on() -> None:
    async with deployed(SEES) as deployment, connected(deployment, DUPLEX) as client:
        assert (await client.until("session.created"))["session"]["capabilities"]["supports_image_input"] is True
        read: list[int] = []
        sound = base64.b64encode(LOUD * 8000).decode()
        for frames in ([], [drawn("PNG"), url("jpeg")]):
            await client.say("input_audio_buffer.append", audio=sound, video_frames=frames, max_slice_nums=1)
            await client.say("input.commit")
            read.append((await client.until("response.done"))["response"]["usage"]["input_tokens"])
            await client.say("conversation.item.delete", item_id=client.frames[-2]["item"]["id"])
            await client.until("conversation.item.deleted")
            user = client.of("input_audio_buffer.committed")[-1]["item_id"]
            await client.say("conversation.item.delete", item_id=user)
            await client.until("conversation.item.deleted")

        assert read[1] == read[0] + 2


BAD = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"item": item("https://example.com/cat.png")}, "invalid_image", "item.content[0].image_url"),
    ({"item": item(url("gif", "AAAA"))}, "invalid_image", "item.content[0].image_url"),
    ({"item": item(url(), url("png", BAD))}, "invalid_image", "item.content[1].image_url"),
    ({"item": item(url("png", "!"))}, "invalid_image", "item.content[0].image_url"),
    ({"item": item(None)}, "invalid_image", "item.content[0].image_url"),
    ({"item": item(url("png", drawn(side=90)))}, "invalid_image", "item.content[0].image_url"),
    ({"item": item(*[url()] * 9)}, "input_backpressure", "item.content"),
]
FRAMES: list[tuple[Any, str]] = [
    (5, "video_frames"),
    ([BAD], "video_frames[0]"),
    ([drawn(), "AAAA"], "video_frames[1]"),
    ([drawn()] * 3, "video_frames"),
    (["A" * 4_000_004], "video_frames[0]"),
]


async def test_pictures_that_are_none_are_refused_by_their_field() -> None:
    small = ("port = 0", "port = 0\nmax_image_pixels = 4096")
    async with deployed(SEES, small) as deployment, connected(deployment, DUPLEX) as client:
        for fields, code, param in REFUSED:
            await client.say("conversation.item.create", event_id="mine", **fields)
            refused = (await client.error())["error"]
            assert (refused["code"], refused["param"], refused["event_id"]) == (code, param, "mine"), refused
        for frames, param in FRAMES:
            await client.say("input_audio_buffer.append", audio="AAAA", video_frames=frames)
            refused = (await client.error())["error"]
            assert (refused["code"], refused["param"]) == ("invalid_video_frames", param), refused
        await client.say("input_audio_buffer.append", audio="AAAA", video_frames=[drawn()], max_slice_nums=9)
        assert (await client.error())["error"]["param"] == "max_slice_nums"
        await client.say("response.create", response={"input": [item(url("png", BAD))]})
        assert (await client.error())["error"]["param"] == "response.input[0].content[0].image_url"
        await client.say("conversation.item.create", item=item(url()))
        assert await words_read(client) > 0


@pytest.mark.parametrize("path", ["/v1/realtime", DUPLEX])
async def test_a_model_that_sees_nothing_refuses_pictures_by_name(path: str) -> None:
    async with deployed() as deployment, connected(deployment, path) as client:
        await client.say("conversation.item.create", item=item(url()))
        refused = (await client.error())["error"]
        assert refused["param"] == "item.content[0].type"
        assert "allowed: input_text, input_audio" in refused["message"]
        if path == DUPLEX:
            await client.say("input_audio_buffer.append", audio="AAAA", video_frames=[drawn()])
            refused = (await client.error())["error"]
            assert (refused["code"], refused["param"]) == ("invalid_input_modality", "video_frames")
