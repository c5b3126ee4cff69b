"""``omni-bus call``: one request from the shell, straight over the bus."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from omni_bus.cli import request
from omni_bus.cli.visit import visit
from omni_bus.client import End, Item, Request
from omni_bus.errors import BadInput
from omni_bus.media.encode import encode_blocking
from omni_bus.media.sound import join
from omni_bus.wire.payloads import Audio, Json, Text

if TYPE_CHECKING:
    import argparse

    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encoder import Format


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("text", help="what to say, or - to read it from standard input")
    parser.add_argument("--system", help="a system message before the text")
    parser.add_argument(
        "--audio-out", metavar="FILE", help="write the spoken answer to a file, in the format it ends in"
    )
    request.add_request_arguments(parser, "takes messages")
    parser.epilog = (
        "omni-bus call speech TEXT reads a text aloud, and omni-bus call transcribe FILE writes down what is said; to "
        "send these words themselves to a model: omni-bus call -- speech"
    )


def run(args: argparse.Namespace) -> int:
    """Print the answer as it comes."""
    return request.run_request(_call(args))


async def _call(args: argparse.Namespace) -> int:
    params = request.params_of(args.params)
    path: str | None = args.audio_out
    fmt = "wav" if path is None else request.check_sound_file(path)
    request.check_timeout(args.timeout)
    text = sys.stdin.read() if args.text == "-" else args.text
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": text})
    async with visit(args) as (client, pipelines):
        pipeline = request.pipeline_of(pipelines, args.model, _takes_messages, "take messages")
        request.check_stages(pipeline, params)
        outputs = _outputs(pipeline, wants_audio=path is not None)
        async with await client.submit(pipeline.name, outputs, params, timeout_s=args.timeout) as sent:
            await sent.send("messages", Json({"messages": messages}))
            sent.finish("messages")
            pieces = await _print(sent)
    if path is not None:
        await asyncio.to_thread(_write, path, fmt, pieces)
    return 0


def _takes_messages(pipeline: Pipeline) -> bool:
    return pipeline.inputs == {"messages": "json"}


async def _print(sent: Request) -> list[Audio]:
    """Print the text as it comes, on a line of its own however it ends; return the sound."""
    pieces: list[Audio] = []
    line_end = ""
    try:
        async for event in sent:
            match event:
                case Item(payload=Text(text=piece)):
                    print(piece, end="", flush=True)
                    line_end = "\n"
                case Item(payload=Audio() as audio):
                    pieces.append(audio)
                case Item() | End():
                    pass
    finally:
        print(end=line_end, flush=True)
    return pieces


def _outputs(pipeline: Pipeline, *, wants_audio: bool) -> tuple[str, ...]:
    wanted = {"text", "audio"} if wants_audio else {"text"}
    found = tuple(port for port, kind in pipeline.outputs.items() if kind in wanted)
    if wants_audio and "audio" not in pipeline.outputs.values():
        outputs = ", ".join(pipeline.outputs)
        raise BadInput(f"pipeline '{pipeline.name}' has no audio (outputs: {outputs})", field="--audio-out")
    return found or tuple(pipeline.outputs)


def _write(path: str, fmt: Format, pieces: list[Audio]) -> None:
    if not pieces:
        raise BadInput("the answer had nothing to speak, so there is no audio to write", field="--audio-out")
    audio = join(pieces)
    request.write_file(path, encode_blocking(audio, fmt))
    print(f"wrote {path}: {audio.num_frames / audio.rate_hz:.2f} s at {audio.rate_hz} Hz", file=sys.stderr)
