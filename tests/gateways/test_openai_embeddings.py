"""Embeddings against a running deployment."""

from __future__ import annotations

import base64
import math
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE, post  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.openai_answers import EmbeddingList

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/v1/embeddings"
WIDTH = 8


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


async def embed(deployment: Running, given: Any, **fields: Any) -> dict[str, Any]:
    status, answer = await post(deployment, PATH, {"input": given} | fields)
    assert status == 200, answer
    msgspec.convert(answer, EmbeddingList)
    return answer


async def test_each_input_has_its_vector(able: Running) -> None:
    answer = await embed(able, ["one", "two words", "one"])

    vectors = [item["embedding"] for item in answer["data"]]
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert {len(vector) for vector in vectors} == {WIDTH}
    assert vectors[0] == vectors[2] != vectors[1]
    assert answer["model"] == "vectors"
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


async def test_base64_holds_the_same_numbers(able: Running) -> None:
    numbers = (await embed(able, "one"))["data"][0]["embedding"]
    packed = (await embed(able, "one", encoding_format="base64"))["data"][0]["embedding"]

    assert list(struct.unpack(f"<{WIDTH}f", base64.b64decode(packed))) == numbers


async def test_fewer_dimensions_are_the_first_ones_at_length_one(able: Running) -> None:
    whole = (await embed(able, "one"))["data"][0]["embedding"]
    cut = (await embed(able, "one", dimensions=3))["data"][0]["embedding"]

    assert len(cut) == 3
    assert math.isclose(math.hypot(*cut), 1, rel_tol=1e-6)
    assert all(math.isclose(a / cut[0], b / whole[0], rel_tol=1e-5) for a, b in zip(cut, whole, strict=False))


async def test_tokens_are_taken_for_text(able: Running) -> None:
    _, tokens = await post(able, "/tokenize", {"prompt": "one"})

    assert (await embed(able, tokens["tokens"]))["data"] == (await embed(able, "one"))["data"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": ["a"] * 1025}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": "word " * 1001}, 400, "input"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": WIDTH + 1}, 400, "dimensions"),
        ({"input": "a", "user": 5}, 400, "user"),
        ({"input": "a", "temperature": 1}, 400, "temperature"),
        ({"input": "a", "model": "nope"}, 404, "model"),
        ({"input": "a", "model": "able"}, 404, "model"),
    ],
)
async def test_bad_bodies_are_refused_by_name(able: Running, body: dict[str, Any], status: int, param: str) -> None:
    found, document = await post(able, PATH, body)

    assert (found, document["error"]["param"]) == (status, param), document


async def test_one_bad_input_fails_all(able: Running) -> None:
    status, document = await post(able, PATH, {"input": ["good", "word " * 1001]})

    assert (status, document["error"]["param"]) == (400, "input")
