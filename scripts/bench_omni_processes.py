#!/usr/bin/env python3
"""What it costs to split an omni model over processes: one stream of a deployment against its engines in one process.

Both do the same work with the same tiny random weights: greedy text and codes of fixed lengths, the sound of each code
as soon as it is certain. In one process the three engines take turns; the deployment is ``configs/qwen2_5_omni.toml``,
asked over HTTP, and its processor time that of all its processes. With ``--trace`` its stages write down when they
compute, and nothing is compared: of one request a trace for Perfetto or ``chrome://tracing`` is written, and with
``--plot`` a picture.

Run: ``scripts/bench_omni_processes.py [--rounds N] [--tokens N] [--codes N] [--trace FILE.json [--plot FILE.png]]``
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import importlib
import json
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import measured

sys.path.insert(0, str(measured.ROOT / "tests" / "adapters"))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from staged import Answer, Staged, messages_of  # type: ignore[import-not-found] (put on the path above)

from adapters.omni.code2wav import OmniCode2Wav
from adapters.omni.talker import OmniTalker
from adapters.omni.thinker import OmniThinker
from omni_bus.testing import make_engine, run_streaming
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from omni_bus.wire.payloads import Payload

torch: Any = importlib.import_module("torch")

QUESTION = "Tell me a story about a dragon."
VOICE = "Ethan"
START_S = 300.0
STAGES = {"thinker": "Thinker", "talker": "Talker", "token2wav": "Code2Wav"}
"""Those of the configuration, and their classes in `traced_omni`."""


class Asked(NamedTuple):
    """One request, in monotonic nanoseconds."""

    begin: int
    first_text: int
    first_sound: int
    end: int
    num_samples: int


class OneProcess(Staged):
    """The three engines by turns."""

    def __init__(self, folder: str, num_tokens: int, num_codes: int) -> None:
        thinker = make_engine(OmniThinker, {"model": folder, "context_length": 512})
        talker = make_engine(OmniTalker, {"model": folder, "context_length": 512})
        super().__init__(thinker, talker, voice=VOICE, num_tokens=num_tokens, min_codes=num_codes, num_codes=num_codes)
        self._thinker_params |= {"min_tokens": num_tokens, "token_ids": False}
        self._vocoder = make_engine(OmniCode2Wav, {"model": folder})

    async def codes(self) -> AsyncIterator[Payload]:
        """Yield each code once it is said."""
        outputs = ["text", "hidden", "prompt_tokens"]
        first = self.thinker.add(messages_of((QUESTION,)), self._thinker_params, outputs=outputs)
        second = self.talker.add({}, self._talker_params, is_complete=False)
        answer = Answer(self.thinker.results[first], self.talker.results[second])
        num_sent = 0
        while self.thinker.live or self.talker.live:
            self._step([(first, second)], [answer])
            for port, payload in answer.talker.outputs[num_sent:]:
                if port == "codes":
                    yield payload
            num_sent = len(answer.talker.outputs)

    def run(self) -> tuple[float, float, int]:
        """Return the seconds of one request, the processor seconds, and its samples."""
        begin, worked = time.perf_counter(), time.process_time()
        inputs: dict[str, Any] = {"codes": self.codes(), "voice": [Json(VOICE)]}
        found = asyncio.run(run_streaming(self._vocoder, inputs, {"seed": 1}))
        took = time.perf_counter() - begin, time.process_time() - worked
        return *took, sum(sound.num_frames for sound in found.port("audio"))


def deployment_of(folder: str, num_tokens: int, num_codes: int, traces: Path | None) -> str:
    """Return the shipped configuration with another model, fixed lengths, and where `traces` is one traced engines."""
    params = {
        "thinker": f"temperature = 0.0, min_tokens = {num_tokens}, max_tokens = {num_tokens}",
        "talker": f"temperature = 0.0, min_tokens = {num_codes}, max_tokens = {num_codes}",
        "token2wav": "seed = 1",
    }
    toml = f"base = {json.dumps(str(measured.ROOT / 'configs' / 'qwen2_5_omni.toml'))}\n[gateways.openai]\nport = 0\n"
    for stage, traced in STAGES.items():
        toml += f"[stages.{stage}]\nmodel = {json.dumps(folder)}\nthreads = 1\nparams = {{ {params[stage]} }}\n"
        if stage != "token2wav":
            toml += "context_length = 512\n"
        if traces is not None:
            toml += f'adapter = "traced_omni:{traced}"\ntrace = {json.dumps(str(traces / stage))}\n'
    return toml


def ask(url: str) -> Asked:
    """Ask for text and sound in one stream."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    body = {"messages": [{"role": "user", "content": QUESTION}], "voice": VOICE, "stream": True}
    begin = time.monotonic_ns()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = {"text": 0, "audio": 0}
    num_samples = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise SystemExit(chunk["error"]["message"])
        first[chunk["modality"]] = first[chunk["modality"]] or time.monotonic_ns()
        num_samples += chunk["choices"][0].get("audio_metadata", {}).get("frame_count", 0)
    end = time.monotonic_ns()
    if response.status != 200:
        raise SystemExit(f"status {response.status}")
    connection.close()
    return Asked(begin, first["text"], first["audio"], end, num_samples)


def spans_of(traces: Path, asked: Asked) -> dict[str, list[dict[str, Any]]]:
    """Return what each stage did while a request ran."""
    found = {}
    for stage in STAGES:
        lines = [json.loads(line) for line in (traces / stage).read_text(encoding="utf-8").splitlines()]
        found[stage] = [line for line in lines if asked.begin <= line["begin"] and line["end"] <= asked.end]
    return found


def write_trace(file: Path, asked: Asked, spans: dict[str, list[dict[str, Any]]]) -> None:
    """Write the trace event format that Perfetto and Chrome read, in microseconds from the request's begin."""

    def at(nanoseconds: int) -> float:
        return (nanoseconds - asked.begin) / 1000

    whole = {"name": "request", "ph": "X", "ts": 0.0, "dur": at(asked.end), "pid": 0, "tid": 0}
    events: list[dict[str, Any]] = [whole]
    for name, when in (("first text", asked.first_text), ("first sound", asked.first_sound)):
        events.append({"name": name, "ph": "i", "s": "g", "ts": at(when), "pid": 0, "tid": 0})
    for pid, name in enumerate(["client", *STAGES]):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        for span in spans.get(name, []):
            duration = (span["end"] - span["begin"]) / 1000
            events.append(
                {"name": span["what"], "ph": "X", "ts": at(span["begin"]), "dur": duration, "pid": pid, "tid": 0}
            )
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def draw(file: Path, asked: Asked, spans: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Draw when each stage computed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes: Any = figure.subplots()
    for row, (stage, colour) in enumerate(zip(STAGES, ("tab:blue", "tab:orange", "tab:green"), strict=True)):
        bars = [((span["begin"] - asked.begin) / 1e6, (span["end"] - span["begin"]) / 1e6) for span in spans[stage]]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colour)
    for name, when in (("first text", asked.first_text), ("first sound", asked.first_sound), ("end", asked.end)):
        at_ms = (when - asked.begin) / 1e6
        axes.axvline(at_ms, color="black", linewidth=0.8, linestyle=":")
        axes.annotate(name, (at_ms, -0.5), (2, 2), textcoords="offset points", fontsize=8, va="bottom")
    axes.set(yticks=range(3), yticklabels=list(STAGES), xlabel="ms after the client asked", title=title)
    axes.set(xlim=(0, (asked.end - asked.begin) / 1e6 * 1.05), ylim=(2.6, -0.75))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def overlap(spans: dict[str, list[dict[str, Any]]]) -> tuple[float, float]:
    """Return the milliseconds in which at least two stages computed, and all three."""
    edges = sorted(
        (when, sign) for found in spans.values() for s in found for when, sign in ((s["begin"], 1), (s["end"], -1))
    )
    two = three = num = last = 0
    for when, sign in edges:
        two += (when - last) * (num >= 2)
        three += (when - last) * (num >= 3)
        num, last = num + sign, when
    return two / 1e6, three / 1e6


def trace(folder: str, args: argparse.Namespace) -> None:
    """Write down one request."""
    with tempfile.TemporaryDirectory() as name:
        toml = deployment_of(folder, args.tokens, args.codes, Path(name))
        with measured.Deployment(toml, start_s=START_S) as deployment:
            url = deployment.ready["gateways"]["openai"]
            ask(url)
            asked = ask(url)
        spans = spans_of(Path(name), asked)
    write_trace(args.trace, asked, spans)
    two_ms, three_ms = overlap(spans)
    for stage, found in spans.items():
        begin, end = found[0]["begin"], found[-1]["end"]
        print(f"{stage}: {len(found)} steps, {(begin - asked.begin) / 1e6:.0f} to {(end - asked.begin) / 1e6:.0f} ms")
    print(f"two stages at once for {two_ms:.0f} ms, all three for {three_ms:.0f} ms; {args.trace}")
    if args.plot is not None:
        title = f"one request: {args.tokens} tokens, {args.codes} codes, {asked.num_samples / 24_000:.1f} s of sound"
        draw(args.plot, asked, spans, title)


def compare(folder: str, args: argparse.Namespace) -> None:
    """Measure both sides by turns and print ratios."""
    alone = OneProcess(folder, args.tokens, args.codes)
    alone.run()
    whole: list[float] = []
    first: list[float] = []
    ratios: list[float] = []
    work: list[float] = []
    num_samples = 0
    with measured.Deployment(deployment_of(folder, args.tokens, args.codes, None), start_s=START_S) as deployment:
        url = deployment.ready["gateways"]["openai"]
        ask(url)
        for _ in range(args.rounds):
            alone_s, worked_s, num_samples = alone.run()
            before = sum(deployment.cpu_s().values())
            asked = ask(url)
            work.append((sum(deployment.cpu_s().values()) - before) / worked_s)
            if asked.num_samples != num_samples:
                raise SystemExit(f"{asked.num_samples} samples came of processes, {num_samples} of one")
            split_s = (asked.end - asked.begin) / 1e9
            whole.append(alone_s)
            first.append((asked.first_sound - asked.begin) / 1e9 / split_s)
            ratios.append(split_s / alone_s)
    print(f"{num_samples / 24_000:.1f} s of sound; in one process {measured.median(whole):.3f} s")
    print(f"from {min(ratios):.3f} to {max(ratios):.3f}")
    measured.ratio("whole request, over processes / in one", measured.median(ratios), "<= 1.05")
    measured.ratio("its processor time, over processes / in one", measured.median(work))
    measured.ratio("first sound over processes / whole request", measured.median(first))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--codes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    measured.header()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny_omni.qwen2_5(Path(folder))
        if args.trace is not None:
            trace(folder, args)
        else:
            compare(folder, args)


if __name__ == "__main__":
    main()
