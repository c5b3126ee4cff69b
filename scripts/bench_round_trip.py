#!/usr/bin/env python3
"""Text to speech to text: how many words get lost between the default voice and the default recogniser.

The shipped ``configs/speech.toml`` in processes of its own: hibari reads each sentence of
``omni_bus/bench/sentences.txt``, the sound goes as a WAV file to ``/v1/audio/transcriptions``, and what comes back is
compared word by word, whatever the case and punctuation, small numbers as words. Exits with 1 if more than 3 % of the
words are wrong.

Run: ``python scripts/bench_round_trip.py [--quick] [--sentences N]``
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
import time
import wave

import aiohttp

import measured
from omni_bus.bench.dataset import SENTENCES
from omni_bus.bench.word_errors import compare, words_of
from omni_bus.client import BusClient, Item
from omni_bus.wire.payloads import Audio, Text

AIM = 0.03
_SUMS = ("words", "errors", "sound_s", "transcribe_s")
CONFIG = measured.ROOT / "configs" / "speech.toml"


async def speak(client: BusClient, text: str) -> tuple[bytes, float]:
    """Return a WAV file of a text, and its seconds."""
    out = io.BytesIO()
    async with await client.submit("speech", ["audio"], {"voice": {"seed": 1}}) as request:
        await request.send("text", Text(text))
        request.finish("text")
        with wave.open(out, "wb") as file:
            file.setparams((1, 2, 24_000, 0, "NONE", ""))
            async for event in request:
                if isinstance(event, Item) and isinstance(event.payload, Audio):
                    file.writeframes(event.payload.data.view)
            seconds = file.getnframes() / 24_000
    return out.getvalue(), seconds


async def transcribe(session: aiohttp.ClientSession, sound: bytes) -> str:
    """Return what is heard in a WAV file."""
    form = aiohttp.FormData({"model": "whisper-1", "language": "en"})
    form.add_field("file", sound, filename="speech.wav")
    async with session.post("/v1/audio/transcriptions", data=form) as response:
        response.raise_for_status()
        return (await response.json())["text"]


async def round_trips(deployment: measured.Deployment, sentences: list[str]) -> list[dict[str, object]]:
    """Return what became of each sentence."""
    rows: list[dict[str, object]] = []
    client = await deployment.client()
    async with client, aiohttp.ClientSession(deployment.ready["gateways"]["openai"]) as session:
        for sentence in sentences:
            begun = time.perf_counter()
            sound, seconds = await speak(client, sentence)
            spoken = time.perf_counter()
            heard = await transcribe(session, sound)
            rows.append(
                {
                    "said": sentence,
                    "heard": heard,
                    "words": len(words_of(sentence)),
                    "errors": compare(words_of(sentence), words_of(heard)).errors,
                    "sound_s": seconds,
                    "speak_s": spoken - begun,
                    "transcribe_s": time.perf_counter() - spoken,
                }
            )
    return rows


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sentences", type=int, default=50, help="how many (default 50)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="five sentences")
    args = options.parse_args()
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()[: 5 if args.quick else args.sentences]
    measured.header()
    toml = CONFIG.read_text(encoding="utf-8").replace("port = 8000", "port = 0")
    with measured.Deployment(toml) as deployment:
        rows = asyncio.run(round_trips(deployment, sentences))
    total = {name: sum(float(str(row[name])) for row in rows) for name in _SUMS}
    times = {name: measured.median(float(str(row[name])) for row in rows) for name in ("speak_s", "transcribe_s")}
    for row in rows:
        if row["errors"]:
            print(f"  said:  {row['said']}\n  heard: {row['heard']}")
    measured.table(
        "round trips",
        ("sentences", "words", "errors", "sound, s", "speak, median s", "transcribe, median s"),
        {"hibari, whisper tiny.en": [float(len(rows)), *(total[name] for name in _SUMS[:3]), *times.values()]},
    )
    rate = total["errors"] / total["words"]
    print("\nratios")
    measured.ratio("words heard right / words said", 1 - rate, f"aim: at least {1 - AIM:g}", key="words_right")
    measured.ratio("sound that comes in / time to write it down", total["sound_s"] / total["transcribe_s"])
    measured.write_json(args.json, {"sentences": rows})
    sys.exit(rate > AIM)


if __name__ == "__main__":
    main()
