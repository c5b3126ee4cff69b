"""Chat clients that know what their answer must be, and that behave as told: read, dawdle, leave.

The deployment has one synthetic pipeline with text and sound (`TOML`), whose words and samples count; so an answer that
is not the request's own, whole and in order is told from a right one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec

from adapters.synthetic_marks import TextMark, read_ramp, read_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
SAMPLES_PER_CHARACTER = 48
SOUND_CHUNK_BYTES = 256 * 1024
"""Of one chunk of sound at most; from 64 KiB on, chunks travel through shared memory."""


TOML = """
heartbeat_s = {heartbeat_s}
max_restarts = 1000000
max_restart_delay_s = 1.0
{more}

[stages.llm]
adapter = "synthetic-text"
replicas = {replicas}
tokens = {tokens}
step_time_s = {step_time_s}
max_num_seqs = {slots}
max_resident = {slots}

[stages.voice]
adapter = "synthetic-speech"
replicas = {replicas}
samples_per_character = {samples_per_character}
max_num_seqs = {slots}

[pipelines.voice]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
max_in_flight = {slots}
max_queued = {max_queued}
{pipeline}

[gateways.openai]
port = 0
processes = {gateways}
{gateway}
"""


def toml(
    *,
    replicas: int = 1,
    gateways: int = 1,
    slots: int = 64,
    max_queued: int = 256,
    tokens: int = 16,
    step_time_s: float = 0.01,
    heartbeat_s: float = 1.0,
    more: str = "",
    gateway: str = "",
    pipeline: str = "",
) -> str:
    """Return a deployment of two stages behind the OpenAI gateway.

    Args:
        replicas: of each stage.
        gateways: processes of the gateway.
        slots: requests that a replica works on at once, and that the pipeline admits in all.
        max_queued: requests that may wait to be admitted.
        tokens: words of an answer whose request does not say.
        step_time_s: what one word takes.
        heartbeat_s: see the configuration.
        more: further keys of the deployment.
        gateway: further keys of the gateway's table.
        pipeline: further keys of the pipeline's table.
    """
    values: dict[str, Any] = {"replicas": replicas, "gateways": gateways, "slots": slots, "max_queued": max_queued}
    values |= {"tokens": tokens, "step_time_s": step_time_s, "heartbeat_s": heartbeat_s, "more": more}
    values |= {"gateway": gateway, "pipeline": pipeline}
    return TOML.format(**values, samples_per_character=SAMPLES_PER_CHARACTER)


Outcome = Literal["right", "wrong", "failed", "refused", "unnamed", "cut", "left"]
"""How a request ended for its client.

``failed`` with an error that has a name, ``refused`` with a Retry-After, ``unnamed`` with neither; ``cut`` by a
connection that could not be made or broke, ``left`` by the client itself.
"""


class Chat(msgspec.Struct, kw_only=True):
    """One request and what became of it; times are seconds of `time.monotonic`."""

    marker: str
    num_tokens: int
    samples_per_character: int = SAMPLES_PER_CHARACTER
    begun_at: float = 0.0
    last_at: float = 0.0
    """When anything last came, or it was sent."""
    ended_at: float = 0.0
    outcome: Outcome | None = None
    name: str = ""
    """The error's type, or the exception's."""
    message: str = ""
    status: int = 0
    retry_after_s: float | None = None
    max_silence_s: float = 0.0
    """The longest time in which nothing came."""

    def saw(self) -> None:
        """Something came."""
        now = time.monotonic()
        self.max_silence_s = max(self.max_silence_s, now - self.last_at)
        self.last_at = now

    def end(self, outcome: Outcome, name: str = "", message: str = "") -> None:
        """It is over."""
        self.saw()
        self.ended_at = self.last_at
        self.outcome, self.name, self.message = outcome, name, message


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How a client behaves."""

    is_streamed: bool = True
    leaves_after_s: float | None = None
    """Leaves so long after it sent its request."""
    leaves_after_bytes: int | None = None
    """Leaves once it has read so much."""
    pause_s: float = 0.0
    """Rests so long between two reads."""
    params: list[dict[str, Any]] = []
    """More parameters, by stage in the pipeline's order."""


def session(url: str) -> aiohttp.ClientSession:
    """Return a session whose requests each have a connection of their own, however many."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def run(http: aiohttp.ClientSession, chat: Chat, manner: Manner) -> None:
    """Send a request and read its answer to the end, or as the manner says; `chat` tells how that went."""
    chat.begun_at = chat.last_at = time.monotonic()
    try:
        async with asyncio.timeout(manner.leaves_after_s):
            await _exchange(http, chat, manner)
    except TimeoutError:
        chat.end("left")
    except (aiohttp.ClientError, ConnectionError) as error:
        chat.end("cut", type(error).__name__, str(error))


async def _exchange(http: aiohttp.ClientSession, chat: Chat, manner: Manner) -> None:
    params: list[dict[str, Any]] = [
        {"tokens": chat.num_tokens},
        {"samples_per_character": chat.samples_per_character, "chunk_bytes": SOUND_CHUNK_BYTES},
    ]
    for given, more in zip(params, manner.params, strict=False):
        given.update(more)
    body = {
        "messages": [{"role": "user", "content": chat.marker}],
        "stream": manner.is_streamed,
        "audio": {"format": "pcm16"},
        "sampling_params_list": params,
    }
    async with http.post(CHAT, json=body) as response:
        chat.saw()
        chat.status = response.status
        if response.status != 200:
            _refused(chat, response, await response.read())
        elif manner.is_streamed:
            await _read_stream(response, chat, manner)
        else:
            _judge_whole(chat, json.loads(await response.read()))
        if chat.outcome == "left":
            response.close()  # breaks the connection; leaving the context would read on


def _refused(chat: Chat, response: aiohttp.ClientResponse, body: bytes) -> None:
    retry_after = response.headers.get("Retry-After")
    if retry_after is not None:
        chat.retry_after_s = float(retry_after)
    error = read_error(body)
    if error is None:
        chat.end("unnamed", str(response.status), body[:200].decode(errors="replace"))
    else:
        chat.end("failed" if retry_after is None else "refused", error["type"], error["message"])


def read_error(body: bytes) -> dict[str, Any] | None:
    """Return the error of a body in the agreed shape; None for any other body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        if isinstance(error["type"], str) and isinstance(error["message"], str) and isinstance(error["code"], int):
            return error
    return None


async def _read_stream(response: aiohttp.ClientResponse, chat: Chat, manner: Manner) -> None:
    texts: list[str] = []
    sound = bytearray()
    num_bytes = 0
    async for event in _events(response, chat):
        num_bytes += len(event)
        if event == b"[DONE]":
            _judge(chat, "".join(texts), bytes(sound))
            return
        document = json.loads(event)
        if "error" in document:
            error = read_error(event)
            chat.end("unnamed" if error is None else "failed", *((error["type"], error["message"]) if error else ()))
            return
        content = document["choices"][0]["delta"].get("content", "")
        if document["modality"] == "audio":
            sound += base64.b64decode(content)
        else:
            texts.append(content)
        if manner.leaves_after_bytes is not None and num_bytes >= manner.leaves_after_bytes:
            chat.end("left")
            return
        if manner.pause_s:
            await asyncio.sleep(manner.pause_s)
            chat.last_at = time.monotonic()
    chat.end("cut", "no [DONE]")


async def _events(response: aiohttp.ClientResponse, chat: Chat) -> AsyncIterator[bytes]:
    rest = b""
    async for data in response.content.iter_any():
        chat.saw()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")


def _judge_whole(chat: Chat, document: dict[str, Any]) -> None:
    message = document["choices"][0]["message"]
    _judge(chat, message["content"], base64.b64decode(message["audio"]["data"]))


def _judge(chat: Chat, text: str, sound: bytes) -> None:
    """Compare an answer with what it must be."""
    try:
        words, ramp = read_text(text), read_ramp(sound)
    except ValueError as error:
        chat.end("wrong", "unreadable", str(error))
        return
    if words != [TextMark(chat.marker, number) for number in range(chat.num_tokens)]:
        chat.end("wrong", "text", text[:200])
    elif ramp.first or ramp.breaks or ramp.num_samples != len(text) * chat.samples_per_character:
        chat.end("wrong", "sound", f"{ramp}"[:200])
    else:
        chat.end("right")
