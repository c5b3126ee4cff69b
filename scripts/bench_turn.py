#!/usr/bin/env python3
"""A spoken turn, with its words asked for in the pause that may be its end, and only when it is over.

The shipped ``configs/voice_chat.toml`` with its real models, in processes of their own, and a second stage of sessions
that has ``transcribes_pauses = false``. A recorded sentence is spoken to either in turn, at the pace of speech, each
time in a new session. Prints when things happened after the end of speech, by the sessions' own clocks, and the ratio.

Run: ``python scripts/bench_turn.py [--turns N]``
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import wave
from typing import TYPE_CHECKING, Any

import measured
from omni_bus.client import Item
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import payload_of, server_event

if TYPE_CHECKING:
    from omni_bus.client import BusClient, Request

CONFIG = measured.ROOT / "configs" / "voice_chat.toml"
SPEECH = measured.ROOT / "tests" / "speech" / "bicycle.wav"
PIECE_S = 0.02
PIECE = bytes(640)
SILENCE_S = 3.0
"""After the sentence: sound goes on being sent, as a microphone does."""

LATER = """
[stages.later]
adapter = "realtime"
chat = "voice_chat"
vad = "listen"
asr = "heard"
transcribes_pauses = false

[pipelines.later]
edges = ["in.events -> later.events", "later.events -> out.events"]
window_chunks = 64
"""
SESSION = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16_000}}}}
PARTS = ("detected", "generation", "first_text", "first_audio")


async def speak(request: Request, sound: bytes) -> None:
    """Speak at the pace of speech, and be silent for a while."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    sound += PIECE * round(SILENCE_S / PIECE_S)
    for number, start in enumerate(range(0, len(sound), len(PIECE))):
        await request.send("events", payload_of(asked.AudioAppend(audio=sound[start : start + len(PIECE)])))
        await asyncio.sleep(max(0.0, begun + (number + 1) * PIECE_S - loop.time()))


async def until(request: Request, kind: Any) -> Any:
    """Return the next event of a kind."""
    async for item in request:
        assert isinstance(item, Item)
        event = server_event(item.payload)
        assert not isinstance(event, said.ErrorEvent), event
        if isinstance(event, kind):
            return event
    raise RuntimeError(f"the session ended before {kind.__name__}")


async def turn(client: BusClient, pipeline: str, name: str, sound: bytes) -> dict[str, float]:
    """Return the milliseconds from the end of speech to each part of the answer."""
    request = await client.submit(pipeline, ["events"], session=name)
    await request.send("events", payload_of(asked.SessionOpen(session_id=name, session=SESSION)))
    await until(request, said.SessionCreated)
    speaking = asyncio.create_task(speak(request, sound))
    await until(request, said.AudioDelta)
    await request.send("events", payload_of(asked.ResponseCancel()))
    response = (await until(request, said.ResponseDone)).response
    speaking.cancel()
    await request.send("events", payload_of(asked.SessionClose()))
    async for _ in request:
        pass
    assert response.timings is not None
    return response.timings


async def measure(deployment: measured.Deployment, num_turns: int) -> dict[str, list[dict[str, float]]]:
    """Take turns with both, so that they meet the same machine."""
    with wave.open(str(SPEECH)) as file:
        sound = file.readframes(file.getnframes())
    found: dict[str, list[dict[str, float]]] = {"later": [], "live": []}
    async with await deployment.client() as client:
        for number in range(-1, num_turns):  # the first is for warmth
            for pipeline, turns in found.items():
                timings = await turn(client, pipeline, f"{pipeline}{number}", sound)
                if number >= 0:
                    turns.append(timings)
    return found


def main() -> int:
    """Run both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10, help="with each of the two")
    args = parser.parse_args()
    toml = CONFIG.read_text(encoding="utf-8").replace("port = 8000", "port = 0") + LATER
    measured.header()
    with measured.Deployment(toml, start_s=180.0) as deployment:
        found = asyncio.run(measure(deployment, args.turns))
    names = {"later": "when the turn is over", "live": "in the pause"}
    medians = {
        names[pipeline]: [measured.median(timings[part] for timings in turns) for part in PARTS]
        for pipeline, turns in found.items()
    }
    measured.table("a turn's words asked for", [f"{part} ms" for part in PARTS], medians)
    later, early = medians[names["later"]], medians[names["live"]]
    measured.ratio("end of speech to first sound, in the pause against when it is over", early[-1] / later[-1], "< 1")
    measured.ratio("detected to generation, likewise", (early[1] - early[0]) / (later[1] - later[0]), "< 0.5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
