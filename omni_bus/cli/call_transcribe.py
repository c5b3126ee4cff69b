"""``omni-bus call transcribe``: what is said in a sound, from the shell, straight over the bus."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from gateways.fan_out import Call, run_all
from gateways.http import Terms
from gateways.openai_models import SEGMENTS, SOUND, can_transcribe
from gateways.openai_transcriptions import PIECE_FRAMES, RATE_HZ
from gateways.subtitles import cues_of, srt, vtt
from omni_bus.cli import request
from omni_bus.cli.sound_file import decoded
from omni_bus.cli.visit import visit
from omni_bus.client import End, Item
from omni_bus.core.pipeline import OUT
from omni_bus.errors import BadInput, unknown_name
from omni_bus.media.sound import slices
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    import argparse

    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.payloads import Audio

FORMATS = ("text", "srt", "vtt", "json")
TIMED = ("srt", "vtt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("file", help="a file with sound, or - to read it from standard input")
    parser.add_argument("--language", metavar="CODE", help="ISO 639-1, as en; default: the recogniser's own choice")
    parser.add_argument(
        "--format",
        metavar="NAME",
        default="text",
        help=f"{', '.join(FORMATS)}; text is printed as it comes; default: %(default)s",
    )
    request.add_request_arguments(parser, "transcribes")


def run(args: argparse.Namespace) -> int:
    """Print the text."""
    return request.run_request(_call(args))


async def _call(args: argparse.Namespace) -> int:
    params = request.params_of(args.params)
    request.check_timeout(args.timeout)
    if args.format not in FORMATS:
        raise unknown_name("value of --format:", args.format, FORMATS, field="--format")
    async with visit(args) as (client, pipelines):
        pipeline = request.pipeline_of(pipelines, args.model, can_transcribe, "transcribe")
        request.check_stages(pipeline, params)
        if args.format in TIMED and SEGMENTS not in pipeline.outputs:
            allowed = "text, json: this model doesn't say when something was said"
            raise BadInput(f"--format {args.format} came (allowed: {allowed})", field="--format")
        if args.language is not None:
            for stage in _writers(pipeline):
                params[stage] = {"language": args.language, **params.get(stage, {})}
        sound = await decoded(args.file, RATE_HZ, "FILE")
        wants_segments = args.format != "text" and SEGMENTS in pipeline.outputs
        call = Call(
            pipeline=pipeline.name,
            outputs=("text", SEGMENTS) if wants_segments else ("text",),
            params=params,
            inputs={SOUND: list(slices(sound, PIECE_FRAMES))},
        )
        heard = await _heard(client, call, args, len(sound.data))
    if args.format != "text":
        print(_rendered(args.format, heard, sound), end="")
    return 0


def _writers(pipeline: Pipeline) -> tuple[str, ...]:
    return tuple(dict.fromkeys(edge.source for edge in pipeline.edges if edge.target == OUT))


class _Heard(msgspec.Struct):
    text: str = ""
    language: str | None = None
    segments: list[dict[str, Any]] = []


async def _heard(client: BusClient, call: Call, args: argparse.Namespace, num_bytes: int) -> _Heard:
    """Return what was said; print it as it comes where text is wanted."""
    heard = _Heard()
    terms = Terms(key="", timeout_s=args.timeout, input_bytes=num_bytes, session="")
    line_end = ""
    try:
        async with aclosing(run_all(client, [call], terms)) as events:
            async for _, event in events:
                match event:
                    case Item(payload=Text(text=piece)):
                        # The first word comes with the space before it.
                        piece = piece if heard.text else piece.lstrip()
                        heard.text += piece
                        if args.format == "text" and piece:
                            print(piece, end="", flush=True)
                            line_end = "\n"
                    case Item(payload=Json(value=dict() as segment)):
                        heard.segments.append(segment)
                    case End(finish=finish):
                        heard.language = finish.detail.get("language", heard.language)
                    case _:
                        pass
    finally:
        print(end=line_end, flush=True)
    return heard


def _rendered(fmt: str, heard: _Heard, sound: Audio) -> str:
    if fmt == "json":
        document = {
            "text": heard.text.strip(),
            "language": heard.language,
            "duration": round(sound.num_frames / sound.rate_hz, 3),
            "segments": heard.segments,
        }
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    cues = cues_of(heard.segments)
    return srt(cues) if fmt == "srt" else vtt(cues)
