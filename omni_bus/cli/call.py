"""``omni-bus call``: one request from the shell, straight over the bus."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from omni_bus.cli.outfile import check_writable
from omni_bus.cli.visit import add_visit_arguments, visit
from omni_bus.client import End, Item, Request
from omni_bus.config.load import parse_value
from omni_bus.errors import BadInput, unknown_name
from omni_bus.media.encode import encode_blocking
from omni_bus.media.sound import join
from omni_bus.wire.payloads import Audio, Json, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("text", help="what to say, or - to read it from standard input")
    add_visit_arguments(parser)
    parser.add_argument("--model", help="a pipeline, by its model name (default: the only one that takes messages)")
    parser.add_argument("--system", help="a system message before the text")
    parser.add_argument("--audio-out", metavar="FILE", help="write the spoken answer to a WAV file")
    parser.add_argument(
        "-p",
        "--param",
        dest="params",
        metavar="STAGE.NAME=VALUE",
        action="append",
        default=[],
        help="a parameter of one stage, as in -p llm.temperature=0; may be given several times",
    )
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="time limit of the request")


def run(args: argparse.Namespace) -> int:
    """Print the answer as it comes."""
    # As Ctrl-C: leaving the request's block cancels it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return uvloop.run(_call(args))


async def _call(args: argparse.Namespace) -> int:
    params = _params(args.params)
    if args.audio_out is not None:
        check_writable(args.audio_out, "--audio-out")
    if args.timeout is not None and not 0 < args.timeout < math.inf:
        raise BadInput(f"--timeout {args.timeout:g}: not a positive number of seconds", field="--timeout")
    text = sys.stdin.read() if args.text == "-" else args.text
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": text})
    async with visit(args) as (client, pipelines):
        pipeline = _pipeline(pipelines, args.model)
        for stage in params:
            if stage not in pipeline.stages:
                raise unknown_name(f"stage of '{pipeline.serve_as}'", stage, pipeline.stages, field="-p")
        outputs = _outputs(pipeline, wants_audio=args.audio_out is not None)
        async with await client.submit(pipeline.name, outputs, params, timeout_s=args.timeout) as request:
            await request.send("messages", Json({"messages": messages}))
            request.finish("messages")
            pieces = await _print(request)
    if args.audio_out is not None:
        await asyncio.to_thread(_write_wav, args.audio_out, pieces)
    return 0


async def _print(request: Request) -> list[Audio]:
    """Print the text as it comes, on a line of its own however it ends; return the sound."""
    pieces: list[Audio] = []
    line_end = ""
    try:
        async for event in request:
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


def _params(assignments: list[str]) -> dict[str, dict[str, Any]]:
    params: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        stage, dot, name = key.partition(".")
        if not (equals and dot and stage and name):
            raise BadInput(f"-p {assignment}: expected STAGE.NAME=VALUE, as in llm.temperature=0", field="-p")
        params.setdefault(stage, {})[name] = parse_value(value)
    return params


def _pipeline(pipelines: Mapping[str, Pipeline], model: str | None) -> Pipeline:
    """Return the pipeline of a model name, or the only one that takes messages."""
    able = [pipeline for pipeline in pipelines.values() if pipeline.inputs == {"messages": "json"}]
    names = {name: pipeline for pipeline in able for name in (pipeline.name, pipeline.serve_as, *pipeline.aliases)}
    if model is not None:
        if model not in names:
            raise unknown_name("model", model, names, field="--model")
        return names[model]
    if len(able) != 1:
        which = ", ".join(pipeline.serve_as for pipeline in able) or "none"
        raise BadInput(f"say which model with --model (those that take messages: {which})", field="--model")
    return able[0]


def _outputs(pipeline: Pipeline, *, wants_audio: bool) -> tuple[str, ...]:
    wanted = {"text", "audio"} if wants_audio else {"text"}
    found = tuple(port for port, kind in pipeline.outputs.items() if kind in wanted)
    if wants_audio and "audio" not in pipeline.outputs.values():
        outputs = ", ".join(pipeline.outputs)
        raise BadInput(f"pipeline '{pipeline.name}' has no audio (outputs: {outputs})", field="--audio-out")
    return found or tuple(pipeline.outputs)


def _write_wav(path: str, pieces: list[Audio]) -> None:
    if not pieces:
        raise BadInput("the answer had nothing to speak, so there is no audio to write", field="--audio-out")
    audio = join(pieces)
    try:
        Path(path).write_bytes(encode_blocking(audio, "wav"))
    except OSError as error:
        raise BadInput(f"can't write {path}: {error.strerror}", field="--audio-out") from error
    print(f"wrote {path}: {audio.num_frames / audio.rate_hz:.2f} s at {audio.rate_hz} Hz", file=sys.stderr)
