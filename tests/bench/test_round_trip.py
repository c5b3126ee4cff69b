"""Texts that are spoken and recognised; by the real voice and recogniser: tests/processes/test_speech.py."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from omni_bus.bench.audio_dialects import Speech, Transcription
from omni_bus.bench.client import Server
from omni_bus.bench.dataset import Prompt
from omni_bus.bench.dialects import Wishes
from omni_bus.bench.record import Record
from omni_bus.bench.round_trip import compared, recognise, spoken
from omni_bus.bench.word_errors import WordErrors
from omni_bus.errors import Unavailable

PCM = bytes(range(0, 200, 2)) * 4
WISHES = Wishes(model="m")


def test_worst_texts_are_shown() -> None:
    heard = compared([("a b c", "a b c"), ("a b", "a x"), ("a b c", "x y z")], ["500 Odd: no"])

    assert heard.errors == WordErrors(8, substituted=4)
    assert heard.num_texts == 3
    assert heard.worst == (("a b c", "x y z"), ("a b", "a x"))
    assert heard.failures == ("500 Odd: no",)


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    [(_, heard)] = compared([("a b", "\x1b[31mx\n y")]).worst

    assert heard == "[31mx y"


async def recognised(answer: web.Response) -> tuple[Any, list[dict[str, Any]]]:
    """Send two answers, and one that was cut, to a recogniser that gives an answer; return what it was sent too."""
    forms: list[dict[str, Any]] = []

    async def hear(request: web.Request) -> web.Response:
        form: dict[str, Any] = dict(await request.post())
        forms.append(form | {"file": form["file"].file.read(), "name": form["file"].filename})
        return web.Response(body=answer.body, status=answer.status, content_type=answer.content_type)

    app = web.Application()
    app.router.add_post(Transcription.path, hear)
    told: dict[str, Any] = {"intended_at": 0.0, "pcm": [PCM], "rate_hz": 8000}
    records = [Record(index=0, **told), Record(index=1, **told), Record(index=2, failure="cut", **told)]
    prompts = [Prompt(text="Hello there."), Prompt(text="Hello."), Prompt(text="Never.")]
    async with (
        TestServer(app) as server,
        Server(str(server.make_url("")), Transcription(), Transcription.path, {}, 30.0) as it,
    ):
        return await recognise(records, prompts, it, WISHES), forms


async def test_recogniser_is_sent_what_was_spoken() -> None:
    heard, forms = await recognised(web.Response(text='data: {"type": "t", "delta": "hello"}\n\ndata: [DONE]\n\n'))

    assert (heard.errors, heard.num_texts, heard.failures) == (WordErrors(3, left_out=1), 2, ())
    assert heard.worst == (("Hello there.", "hello"),)
    assert len(forms) == 2
    assert (forms[0]["model"], forms[0]["stream"], forms[0]["name"]) == ("m", "true", "speech.wav")
    sent = forms[0]["file"]
    assert (sent[:4], sent[24:28], sent[44:]) == (b"RIFF", (8000).to_bytes(4, "little"), PCM)


async def test_nothing_heard_is_words_left_out_and_a_refusal_is_none() -> None:
    silent, _ = await recognised(web.Response(text="data: [DONE]\n\n"))
    refused, _ = await recognised(web.json_response({"error": {"type": "Odd", "message": "no"}}, status=500))

    assert (silent.errors, silent.failures) == (WordErrors(3, left_out=3), ())
    assert (refused.errors, refused.failures) == (WordErrors(0), ("500 Odd: no", "500 Odd: no"))


async def test_each_text_is_spoken_once() -> None:
    asked: list[str] = []

    async def speak(request: web.Request) -> web.Response:
        asked.append((await request.json())["input"])
        return web.Response(body=PCM, headers={"X-Sample-Rate": "8000"})

    app = web.Application()
    app.router.add_post(Speech.path, speak)
    prompts = [Prompt(text="One."), Prompt(text="Two."), Prompt(text="One.")]
    async with TestServer(app) as server, Server(str(server.make_url("")), Speech(), Speech.path, {}, 30.0) as voice:
        found = await spoken(prompts, voice, WISHES)

    assert sorted(asked) == ["One.", "Two."]
    assert [prompt.text for prompt in found] == ["One.", "Two.", "One."]
    assert {(prompt.sound[44:], prompt.sound_s) for prompt in found} == {(PCM, len(PCM) / 2 / 8000)}


async def test_text_that_cannot_be_spoken_says_what_else_there_is() -> None:
    wanted = r"404 Not Found.*\(allowed: --dataset-name custom_audio with files\)"
    async with (
        TestServer(web.Application()) as server,
        Server(str(server.make_url("")), Speech(), Speech.path, {}, 30.0) as voice,
    ):
        with pytest.raises(Unavailable, match=wanted):
            await spoken([Prompt(text="One.")], voice, WISHES)
