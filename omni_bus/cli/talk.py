"""``omni-bus talk``: a live conversation from the shell, by files or by microphone and speaker."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from gateways.openai_models import can_converse
from omni_bus.bench.plot import require as require_plot
from omni_bus.cli import request
from omni_bus.cli.deployment import add_name_argument
from omni_bus.cli.outfile import check_writable
from omni_bus.cli.sound_file import decoded
from omni_bus.client.playback import PlaybackClock
from omni_bus.client.realtime import PATH
from omni_bus.client.socket import address
from omni_bus.errors import BadInput
from omni_bus.media.encoder import StreamEncoder, wav_header
from omni_bus.runtime import rundir
from omni_bus.runtime.deployment import DEPLOYMENT_FILE, read_deployment
from omni_bus.talk import plot
from omni_bus.talk.conversation import Conversation, session_of
from omni_bus.talk.dialogue import PARTS, Dialogue, rows_of
from omni_bus.talk.piece import RATE_HZ
from omni_bus.talk.script import Line, Script
from omni_bus.talk.voice import DeviceVoice, FileVoice, require_device
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    add_name_argument(parser)
    parser.add_argument("--url", metavar="ws://HOST:PORT", help=f"talk to this server instead; default path: {PATH}")
    parser.add_argument(
        "--api-key", metavar="KEY", help="of the server; default: OPENAI_API_KEY, which no list of processes shows"
    )
    parser.add_argument("--model", help="default: the only one that holds conversations; with --url the server's own")
    parser.add_argument("--voice", metavar="NAME", help="of the answers; default: the model's own")
    parser.add_argument("--instructions", metavar="TEXT", help="what the model is told first; default: its own")
    parser.add_argument(
        "--input",
        metavar="FILE",
        action="append",
        default=[],
        help="speak this file, - is standard input; given several times, each is spoken once the answer to the one "
        "before was heard. Default: microphone and speaker (wear headphones, or it hears itself), until Ctrl-C",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write what is heard, with its silences, in the format that the name ends in"
    )
    parser.add_argument("--events", metavar="FILE.jsonl", help="write the events of both sides, without sound")
    parser.add_argument("--plot", metavar="FILE", help=f"draw the last turn: {', '.join(PICTURES)} (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Hold the conversation, then print how long each answer took; return 1 if a turn had none, or anything failed."""
    _check(args)
    playback = PlaybackClock()
    dialogue = Dialogue(
        playback,
        lambda text: print(end=text, flush=True),
        lambda text: print(f"omni-bus talk: {text}", file=sys.stderr),
    )
    try:
        request.run_request(_talk(args, playback, dialogue))
    finally:
        _report(args, dialogue)
    return 1 if dialogue.problems else 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what can't be done before anything is said.

    Raises:
        BadInput: names the option.
    """
    if args.output is not None:
        request.check_sound_file(args.output, "--output")
    for option, endings in (("--events", (".jsonl",)), ("--plot", PICTURES)):
        path: str | None = getattr(args, option.removeprefix("--"))
        if path is None:
            continue
        if Path(path).suffix.lower() not in endings:
            raise BadInput(f"{option} {path} came (allowed: a file that ends in {', '.join(endings)})", field=option)
        check_writable(path, option)
    if not (_key(args) or "").isprintable():
        raise BadInput("--api-key: it has characters that no HTTP header holds (allowed: printable)", field="--api-key")
    if args.input.count("-") > 1:
        raise BadInput("--input - came twice (allowed: once, standard input ends)", field="--input")
    if args.plot is not None:
        require_plot()
    if not args.input:
        require_device()


async def _talk(args: argparse.Namespace, playback: PlaybackClock, dialogue: Dialogue) -> int:
    url = _address(args)
    lines = [Line(name, await _sound(name)) for name in args.input]
    with ExitStack() as files:
        log = _log(files, args.events)
        conversation = Conversation(dialogue, playback, _recorder(files, args.output), log)
        async with conversation.connected(url, _key(args), session_of(args.voice, args.instructions)):
            voice = FileVoice(Script(lines, dialogue)) if lines else DeviceVoice()
            files.callback(voice.close)
            await conversation.hold(voice)
    return 0


def _key(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get("OPENAI_API_KEY")


def _address(args: argparse.Namespace) -> str:
    """Return the WebSocket's address: the one that was given, or of the deployment's gateway.

    Raises:
        BadInput, UnknownName: there is none, or it is no address.
    """
    if args.url is None:
        return _address_here(args)
    try:
        return str(address(args.url, PATH, model=args.model))
    except BadInput as error:
        allowed = f"ws://HOST:PORT or wss://HOST:PORT, with or without {PATH}"
        raise BadInput(f"--url {args.url} came (allowed: {allowed})", field="--url") from error


def _address_here(args: argparse.Namespace) -> str:
    path, about = rundir.find(rundir.root(os.environ), args.name)
    deployment = read_deployment(path / DEPLOYMENT_FILE)
    gateways = {
        name: deployment.served[name]
        for name, config in deployment.config.gateways.items()
        if (config.protocol or name) == "openai"
    }
    served = {name: deployment.pipelines[name] for names in gateways.values() for name in names}
    pipeline = request.pipeline_of(served, args.model, can_converse, "hold live conversations")
    gateway = next(name for name, names in gateways.items() if pipeline.name in names)
    return str(address(about.gateways[gateway], PATH, model=pipeline.serve_as))


async def _sound(name: str) -> bytes:
    sound = await decoded(name, RATE_HZ, "--input")
    if not sound.num_frames:
        raise BadInput(f"--input {name}: there is no sound in it", field="--input")
    return bytes(sound.data.view)


def _recorder(files: ExitStack, path: str | None) -> Callable[[bytes], object]:
    """Return what writes the sound that is heard; 20 ms at a time, so that nothing is kept."""
    if path is None:
        return lambda _: None
    file = files.enter_context(_opened(path, "--output"))
    encoder = StreamEncoder(request.check_sound_file(path, "--output"), field="--output")

    def finish() -> None:
        file.write(encoder.finish_blocking())
        if encoder.format == "wav":  # now its size is known
            file.seek(0)
            file.write(wav_header(RATE_HZ, 1, encoder.num_bytes))

    files.callback(finish)
    return lambda sound: file.write(encoder.feed_blocking(Audio(RATE_HZ, 1, "s16", Blob(sound))))


def _log(files: ExitStack, path: str | None) -> Callable[[dict[str, Any]], object]:
    if path is None:
        return lambda _: None
    file = files.enter_context(_opened(path, "--events"))
    return lambda entry: file.write(msgspec.json.encode(entry) + b"\n")


def _opened(path: str, option: str) -> IO[bytes]:
    try:
        return Path(path).open("wb")
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}", field=option) from error


def _report(args: argparse.Namespace, dialogue: Dialogue) -> None:
    """Print the table of latencies and draw the picture."""
    rows = rows_of(dialogue.turns)
    if not rows:
        return
    table = Table("turn", box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for title in (*PARTS.values(), "all", "heard after"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    print("\nms from the end of speech to the first sound:")
    Console(highlight=False).print(table)
    turn = plot.chosen(dialogue.turns)
    if args.plot is not None and turn is not None:
        plot.draw(turn, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
