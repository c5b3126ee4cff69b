#!/usr/bin/env python3
"""How soon a text of 200 words is heard, against how long all of it takes; and how fast the default voice is.

One client asks ``POST /v1/audio/speech`` of a deployment in processes of its own, in turn for a stream and for a file
of the same text and seed. "First byte" is the first one of sound (for wav that of its head, which comes with it).
Then the real-time factor: the processor time of the voice's process for each second of sound, with one thread. With
``--formats`` also what each format adds to that in the gateway.

Run: ``python scripts/bench_speech.py [--quick] [--rounds N]``
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
import urllib.parse
from typing import Any

import measured

TOML = """
[stages.voice]
adapter = "hibari"
threads = 1

[pipelines.speech]
serve_as = "hibari"
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]

[gateways.openai]
port = 0
"""

SENTENCES = (
    "The old lighthouse stood at the end of a narrow path that ran along the cliffs.",
    "Every evening the keeper climbed its hundred and twelve steps with a lamp in his hand.",
    "He had done so for thirty years, and he knew each stone by the sound it made.",
    "On clear nights the light could be seen from the harbour towns on the other shore.",
    "Sailors said that it had saved more lives than all the charts in the admiralty.",
)
"""76 words."""

FORMATS = ("pcm", "wav", "flac", "mp3", "opus", "aac")


def text_of(num_words: int) -> str:
    """Return so many words in sentences."""
    words = (" ".join(SENTENCES) + " ").split() * (num_words // 70 + 1)
    return " ".join(words[:num_words]).rstrip(".,") + "."


def ask(url: str, text: str, **fields: Any) -> tuple[float, float, int]:
    """Return the seconds to the first byte and to the last, and how many came."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    body = json.dumps({"input": text, "seed": 1, **fields})
    begun = time.perf_counter()
    connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read1(65536)
    first_s = time.perf_counter() - begun
    num_bytes = len(data)
    while data := response.read1(65536):
        num_bytes += len(data)
    total_s = time.perf_counter() - begun
    if response.status != 200:
        raise SystemExit(f"status {response.status}")
    connection.close()
    return first_s, total_s, num_bytes


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9, help="how often each is asked for (default 9)")
    options.add_argument("--words", type=int, default=200, help="of the text (default 200)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="two rounds")
    args = options.parse_args()
    rounds = 2 if args.quick else args.rounds
    measured.header()
    text = text_of(args.words)
    firsts: list[float] = []
    wholes: list[float] = []
    factors: list[float] = []
    seconds = 0.0
    costs: dict[str, list[float]] = {fmt: [] for fmt in FORMATS}
    with measured.Deployment(TOML) as deployment:
        url = deployment.ready["gateways"]["openai"]
        ask(url, "Warm up.")
        for _ in range(rounds):
            first_s, _, _ = ask(url, text, response_format="pcm", stream_format="audio")
            firsts.append(first_s)
            before = deployment.cpu_s()["voice.0"]
            _, whole_s, num_bytes = ask(url, text, response_format="pcm")
            wholes.append(whole_s)
            seconds = num_bytes / 2 / 24_000
            factors.append((deployment.cpu_s()["voice.0"] - before) / seconds)
            for fmt in FORMATS:
                before = deployment.cpu_s()["gateway.openai.0"]
                ask(url, text, response_format=fmt, stream_format="audio")
                costs[fmt].append(1000 * (deployment.cpu_s()["gateway.openai.0"] - before) / seconds)
    rows: dict[str, list[float | str]] = {
        "first byte of a stream, s": [measured.median(firsts), min(firsts)],
        "the whole file, s": [measured.median(wholes), min(wholes)],
        "sound, s": [seconds, seconds],
    }
    rows |= {
        f"gateway, {fmt}: processor ms for a second of sound": [measured.median(found), min(found)]
        for fmt, found in costs.items()
    }
    measured.table(f"{args.words} words", ("median", "best"), rows)
    print("\nratios")
    soon = measured.median(first / whole for first, whole in zip(firsts, wholes, strict=True))
    measured.ratio("first byte of a stream / whole file", soon, "<= 0.1")
    measured.ratio("real-time factor of the voice on one core", measured.median(factors), "<= 0.1")
    measured.write_json(args.json, {"first_s": firsts, "whole_s": wholes, "factors": factors, "costs_ms": costs})


if __name__ == "__main__":
    main()
