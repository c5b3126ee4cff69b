"""The official client and what runs on transformers (text, pictures, embeddings), started once."""

from __future__ import annotations

import base64
import io
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from text_engine import AnswersPrompts, client_of, with_one_thread  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOML = """
[stages.llm]
adapter = "transformers"
max_num_seqs = 4
[stages.vlm]
adapter = "transformers-image-text"
model = "{vlm}"
[stages.embed]
adapter = "transformers-embedding"
[stages.sessions]
adapter = "realtime"
chat = "look"
[pipelines.live]
serve_as = "live-eyes"
edges = ["in.events -> sessions.events", "sessions.events -> out.events"]
[pipelines.chat]
serve_as = "text"
edges = [
  "in.messages -> llm.prompt",
  "llm.text -> out.text",
  "llm.reasoning -> out.reasoning",
  "llm.tool_calls -> out.tool_calls",
  "llm.rendered -> out.rendered",
]
[pipelines.look]
serve_as = "eyes"
edges = [
  "in.messages -> vlm.prompt",
  "in.images -> vlm.images",
  "vlm.text -> out.text",
  "vlm.rendered -> out.rendered",
]
[pipelines.embed]
serve_as = "vectors"
edges = ["in.messages -> embed.prompt", "embed.embedding -> out.embedding"]
[gateways.openai]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    pytest.importorskip("transformers")
    toml = TOML.format(vlm="emoji-vlm")
    await with_one_thread()
    async with running(toml) as deployment, client_of(deployment.url) as found:
        await look(found, "#16a34a")  # the process that decodes pictures is there from now on
        yield found


class TestTransformers(AnswersPrompts):
    pass


def picture(colour: str) -> Any:
    """Return a content part with one disc."""
    from PIL import Image, ImageDraw

    drawn = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(drawn).ellipse((32, 32, 224, 224), fill=colour)
    file = io.BytesIO()
    drawn.resize((64, 64), Image.Resampling.LANCZOS).save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


async def look(client: openai.AsyncOpenAI, colour: str, *, stream: bool = False) -> str:
    """Return what is said of a disc."""
    content = [picture(colour), {"type": "text", "text": "describe the picture"}]
    create: Any = client.chat.completions.create
    answer = await create(
        model="eyes", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=16, stream=stream
    )
    if not stream:
        return answer.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


@pytest.mark.parametrize(("colour", "name"), [("#dc2626", "red"), ("#2563eb", "blue")])
async def test_answer_is_about_the_picture(client: openai.AsyncOpenAI, colour: str, name: str) -> None:
    assert await look(client, colour) == f"a {name} circle"
    assert await look(client, colour, stream=True) == f"a {name} circle"


async def test_a_live_conversation_is_about_the_picture(client: openai.AsyncOpenAI) -> None:
    async with client.realtime.connect(model="live-eyes") as live:
        for colour, name in (("#dc2626", "red"), ("#2563eb", "blue")):
            shown: Any = {"type": "input_image", "image_url": picture(colour)["image_url"]["url"]}
            content: Any = [shown, {"type": "input_text", "text": "describe the picture"}]
            item: Any = {"type": "message", "role": "user", "content": content}
            await live.response.create(response={"conversation": "none", "input": [item]})
            while (event := await live.recv()).type != "response.done":
                assert event.type != "error", event
            (answer,) = event.response.output or [None]
            assert answer is not None
            assert answer.type == "message"
            assert [part.text for part in answer.content] == [f"a {name} circle"]


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def test_near_texts_have_near_vectors(client: openai.AsyncOpenAI) -> None:
    texts = [
        "A cat sleeps on the sofa.",
        "A kitten naps on the couch.",
        "The bank raised its rates on loans again today.",
    ]
    found = await client.embeddings.create(model="vectors", input=texts)
    plain = await client.embeddings.create(model="vectors", input=texts[0], encoding_format="float")
    short = await client.embeddings.create(model="vectors", input=texts[0], dimensions=64)
    cat, kitten, bank = (item.embedding for item in found.data)

    assert {len(vector) for vector in (cat, kitten, bank)} == {576}
    assert dot(cat, kitten) > dot(cat, bank)
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(cat, plain.data[0].embedding, strict=True))
    assert len(short.data[0].embedding) == 64
    assert math.isclose(math.hypot(*short.data[0].embedding), 1, abs_tol=1e-5)
    assert found.usage.prompt_tokens > plain.usage.prompt_tokens > 5
