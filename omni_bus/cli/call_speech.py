"""``omni-bus call speech``: a text read aloud, from the shell, straight over the bus."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from gateways.fan_out import Call, run_all
from gateways.http import Terms
from gateways.openai_models import SOUND, TEXT, can_speak
from gateways.openai_speech_body import MAX_SPEED, MIN_SPEED, params_of, share_speed
from omni_bus.cli import request
from omni_bus.cli.visit import visit
from omni_bus.client import Item
from omni_bus.errors import BadInput
from omni_bus.media.encoder import StreamEncoder
from omni_bus.wire.payloads import Audio, Text

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encoder import Format

STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("text", help="what to read aloud, or - to read it from standard input")
    parser.add_argument(
        "--audio-out",
        metavar="FILE",
        required=True,
        help=f"in the format that it ends in ({', '.join(filter(None, request.ENDINGS))}); {STDOUT} is standard "
        "output, as WAV while it is made",
    )
    parser.add_argument("--voice", metavar="NAME", help="one of the pipeline's; default: its own")
    parser.add_argument(
        "--speed", metavar="S", type=float, help=f"from {MIN_SPEED:g} to {MAX_SPEED:g}; 2 is twice as fast"
    )
    request.add_request_arguments(parser, "speaks")


def run(args: argparse.Namespace) -> int:
    """Write the sound, and say how long it is."""
    return request.run_request(_call(args))


async def _call(args: argparse.Namespace) -> int:
    params = request.params_of(args.params)
    fmt: Format = "wav" if args.audio_out == STDOUT else request.check_sound_file(args.audio_out)
    request.check_timeout(args.timeout)
    if args.speed is not None and not MIN_SPEED <= args.speed <= MAX_SPEED:
        allowed = f"a number from {MIN_SPEED:g} to {MAX_SPEED:g}"
        raise BadInput(f"--speed {args.speed:g} came (allowed: {allowed})", field="--speed")
    text = sys.stdin.read() if args.text == STDOUT else args.text
    async with visit(args) as (client, pipelines):
        pipeline = request.pipeline_of(pipelines, args.model, can_speak, "speak")
        request.check_stages(pipeline, params)
        own, rest = share_speed(pipeline, args.speed)
        wanted = {name: value for name, value in (("voice", args.voice), ("speed", own)) if value is not None}
        _check_params(pipeline, wanted)
        for stage in pipeline.speakers_of(SOUND):
            params[stage] = wanted | params.get(stage, {})
        call = Call(pipeline=pipeline.name, outputs=("audio",), params=params, inputs={TEXT: [Text(text)]})
        encoder = StreamEncoder(fmt, speed=rest, is_whole=args.audio_out != STDOUT, field="--audio-out")
        seconds = await _write(args.audio_out, encoder, _pieces(client, call, args.timeout))
    if args.audio_out != STDOUT:
        print(f"wrote {args.audio_out}: {seconds / rest:.2f} s at {encoder.rate_hz} Hz", file=sys.stderr)
    return 0


def _check_params(pipeline: Pipeline, wanted: dict[str, Any]) -> None:
    """Refuse what the voice can't be told."""
    known = params_of(pipeline)
    for name in wanted:
        if known and name not in known:
            message = f"--{name}: the voice of {pipeline.serve_as} can't be told so"
            raise BadInput(f"{message} (allowed: {', '.join(sorted(known))}, with -p)", field=f"--{name}")


async def _pieces(client: BusClient, call: Call, timeout_s: float | None) -> AsyncIterator[Audio]:
    terms = Terms(key="", timeout_s=timeout_s, input_bytes=0, session="")
    async with aclosing(run_all(client, [call], terms)) as events:
        async for _, event in events:
            match event:
                case Item(payload=Audio() as sound) if sound.num_frames:
                    yield sound
                case _:
                    pass


async def _write(path: str, encoder: StreamEncoder, pieces: AsyncIterator[Audio]) -> float:
    """Write the sound, to standard output as it comes, to a file when it is complete; return how long it was before.

    Raises:
        BadInput: there is none, or it can't be written.
    """
    kept: list[bytes] = []
    seconds = 0.0

    def feed_blocking(sound: Audio | None) -> None:
        data = encoder.finish_blocking() if sound is None else encoder.feed_blocking(sound)
        if path == STDOUT:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            kept.append(data)

    async for sound in pieces:
        seconds += sound.num_frames / sound.rate_hz
        await asyncio.to_thread(feed_blocking, sound)
    if not seconds:
        raise BadInput("TEXT: there is nothing to speak in it (allowed: words or numbers)", field="TEXT")
    await asyncio.to_thread(feed_blocking, None)
    if path != STDOUT:
        await asyncio.to_thread(request.write_file, path, b"".join(kept))
    return seconds
