"""A body is what came, however it is kept; what is dear to decode weighs more; heavy ones leave the loop to others."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateways.json_body import HEAVY_BYTES, MAX_JSON_WEIGHT, MAX_TURN_S, BodyBuffer, JsonWeight, Pace


def weight_of(body: bytes, piece: int = 1 << 16) -> int:
    weight = JsonWeight()
    for at in range(0, len(body), piece):
        weight.add(body[at : at + piece])
    return weight.total


def filled(body: bytes, length: int | None, piece: int = 100_000) -> BodyBuffer:
    buffer = BodyBuffer(length)
    for at in range(0, len(body), piece):
        buffer.add(body[at : at + piece])
    return buffer


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=30), st.booleans())
def test_buffer_holds_what_came(pieces: list[bytes], is_length_known) -> None:
    whole = b"".join(pieces) * (HEAVY_BYTES // 20)
    buffer = filled(whole, len(whole) if is_length_known else None, 77_777)

    assert buffer.num_bytes == len(whole)
    assert buffer.to_bytes() == whole


@pytest.mark.parametrize("size", [0, 1, HEAVY_BYTES - 20, HEAVY_BYTES, 3 * HEAVY_BYTES])
@pytest.mark.parametrize("is_length_known", [True, False])
async def test_document_is_decoded_wherever_it_lies(size: int, is_length_known) -> None:
    document = {"text": "é" * size, "list": [1, 2.5, None, True, {"a": []}]}
    body = json.dumps(document).encode()

    assert await filled(body, len(body) if is_length_known else None).decode() == document


@pytest.mark.parametrize("is_length_known", [True, False])
async def test_body_shorter_than_it_said_is_no_padding(is_length_known) -> None:
    body = b'{"a": "' + b"x" * HEAVY_BYTES
    buffer = filled(body, len(body) + 1000 if is_length_known else None)

    assert buffer.to_bytes() == body
    with pytest.raises(msgspec.DecodeError, match="truncated"):
        await buffer.decode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", 0),
        (b'{"a":1}', 3 + 5),
        (b"[1,2,3]", 3 + 2),
        (b'{"a":{"b":[]}}', 3 * 3 + 2 * 5),
        (b'"QUJDRA=="', 0),
        (b"1" * 19, 0),
        (b"1" * 60, 36),
        (b'{"t":"a,b,c"}', 3 + 5 + 2),
    ],
)
def test_weight_is_the_sum_of_its_marks(body: bytes, expected: int) -> None:
    assert weight_of(body) == expected


@given(st.binary(max_size=300), st.integers(1, 50))
def test_weight_of_marks_does_not_depend_on_the_pieces(body: bytes, piece: int) -> None:
    """Only a long number may be parted; digits are left out here."""
    body = body.translate(None, b"0123456789")

    assert weight_of(body, piece) == weight_of(body) == sum({44: 1, 91: 3, 123: 3, 58: 5}.get(byte, 0) for byte in body)


def test_prompts_of_a_million_tokens_are_light_enough() -> None:
    """As token ids; as JSON in a text; and media in base64 of any size."""
    assert weight_of(b'{"prompt":[' + b"128000," * 1_000_000 + b"1]}") < MAX_JSON_WEIGHT
    text = json.dumps([{"name": "a value of some length", "other": [1, 2]}] * 40_000)
    assert weight_of(json.dumps({"content": text}).encode()) < MAX_JSON_WEIGHT
    assert weight_of(b'{"url":"data:image/png;base64,' + b"iVBORw0KGgoAAAANSUhEUgAA" * 1_000_000 + b'"}') < 100


async def test_heavy_bodies_are_decoded_one_at_a_time_with_the_loop_free_in_between(monkeypatch) -> None:
    body = b'{"a": "' + b"x" * HEAVY_BYTES + b'"}'
    events: list[str] = []
    decode = BodyBuffer._decode

    def noted(self: BodyBuffer) -> Any:
        events.append("decode")
        return decode(self)

    async def tick() -> None:
        while True:
            events.append("tick")
            await asyncio.sleep(0)

    monkeypatch.setattr(BodyBuffer, "_decode", noted)
    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(filled(body, len(body)).decode() for _ in range(5)))
    ticking.cancel()

    assert events.count("decode") == 5
    assert "decode decode" not in " ".join(events)


async def test_collector_is_as_it_was_even_after_a_failure() -> None:
    body = b"[" + b" " * HEAVY_BYTES
    assert gc.isenabled()
    with pytest.raises(msgspec.DecodeError):
        await filled(body, len(body)).decode()
    assert gc.isenabled()


async def test_heavy_bodies_share_the_turns_of_the_loop() -> None:
    """One piece that costs a whole share is all of its turn, however many bodies wait."""
    pace, number, worked = Pace.of_running_loop(), 0, []

    async def count_turns() -> None:
        nonlocal number
        while len(worked) < 12:
            number += 1
            await asyncio.sleep(0)

    async def body() -> None:
        for _ in range(3):
            await pace.turn()
            worked.append(number)
            pace.spend(MAX_TURN_S)

    await asyncio.gather(count_turns(), *(body() for _ in range(4)))

    assert len(set(worked)) == len(worked) == 12


HALF = "unexpected end of escaped utf-16 surrogate pair"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (rb'{"a": "\ud800"}', rf"{HALF} \(byte 7\)"),
        (rb'{"a": "\uDBFF"', HALF),
        (rb'{"a": "\ud800x', HALF),
        (rb'{"a": "\ud800\n"}', HALF),
        (rb'{"a": "\\\ud800"}', HALF),
        (rb'{"\ud800": "and much more after it"}', HALF),
        (rb'{"a": "' + b"x" * 300_000 + rb'\ud800"}', rf"{HALF} \(byte 300007\)"),
        (rb'{"a": "\ud800', "truncated"),
        (rb'{"a": "\ud800\u', "truncated"),
        (rb'{"a": "\ud83d\ude0', "truncated"),
        (rb'{"a": "\\ud800"', "truncated"),
        (rb'{"a": "\ud83d\ude00"', "truncated"),
    ],
)
@pytest.mark.parametrize("is_length_known", [True, False])
async def test_half_of_a_surrogate_pair_is_told_from_a_body_that_breaks_off(
    raw: bytes, words: str, *, is_length_known: bool
) -> None:
    buffer = filled(raw, len(raw) if is_length_known else None)
    with pytest.raises(msgspec.DecodeError, match=words):
        await buffer.decode()
