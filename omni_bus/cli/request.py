"""What the commands that send one request have in common: their options, the pipeline that is meant, sound as files."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from omni_bus.cli.outfile import check_writable
from omni_bus.cli.visit import add_visit_arguments
from omni_bus.config.load import parse_value
from omni_bus.errors import BadInput, unknown_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Mapping

    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encoder import Format

ENDINGS: dict[str, Format] = {
    "": "wav",
    ".wav": "wav",
    ".mp3": "mp3",
    ".flac": "flac",
    ".opus": "opus",
    ".ogg": "opus",
    ".aac": "aac",
    ".pcm": "pcm",
}
"""Formats of sound by a file's ending."""


def add_request_arguments(parser: argparse.ArgumentParser, does: str) -> None:
    """Add the options of a request; `does` is what its pipeline does, as in "takes messages"."""
    add_visit_arguments(parser)
    parser.add_argument("--model", help=f"a pipeline, by its model name (default: the only one that {does})")
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


def run_request(request: Coroutine[Any, Any, int]) -> int:
    """Run a command's coroutine; SIGTERM ends it as Ctrl-C does, which cancels its request."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return uvloop.run(request)


def params_of(assignments: list[str]) -> dict[str, dict[str, Any]]:
    """Return the parameters by stage of ``-p``.

    Raises:
        BadInput: one of them is no assignment.
    """
    params: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        stage, dot, name = key.partition(".")
        if not (equals and dot and stage and name):
            raise BadInput(f"-p {assignment}: expected STAGE.NAME=VALUE, as in llm.temperature=0", field="-p")
        params.setdefault(stage, {})[name] = parse_value(value)
    return params


def check_timeout(timeout_s: float | None) -> None:
    """Refuse a time limit that is none.

    Raises:
        BadInput: it is not a positive number.
    """
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise BadInput(f"--timeout {timeout_s:g}: not a positive number of seconds", field="--timeout")


def pipeline_of(
    pipelines: Mapping[str, Pipeline], model: str | None, can: Callable[[Pipeline], bool], do: str
) -> Pipeline:
    """Return the pipeline of a model name, or the only one that can do what is wanted.

    Args:
        pipelines: all of them.
        model: as it was given.
        can: whether a pipeline can do it.
        do: what that is, as in "take messages".

    Raises:
        BadInput, UnknownName: none, or several without a name; lists those that can.
    """
    able = [pipeline for pipeline in pipelines.values() if can(pipeline)]
    names = {name: pipeline for pipeline in able for name in (pipeline.name, pipeline.serve_as, *pipeline.aliases)}
    if not able:
        served = ", ".join(pipeline.serve_as for pipeline in pipelines.values())
        raise BadInput(f"no pipeline here can {do} (there are: {served})", field="--model")
    if model is not None:
        if model not in names:
            raise unknown_name("model", model, names, field="--model")
        return names[model]
    if len(able) > 1:
        which = ", ".join(pipeline.serve_as for pipeline in able)
        raise BadInput(f"say which model with --model (those that {do}: {which})", field="--model")
    return able[0]


def check_stages(pipeline: Pipeline, params: Mapping[str, Any]) -> None:
    """Refuse parameters of stages that the pipeline doesn't have.

    Raises:
        UnknownName: names the first, lists those it has.
    """
    for stage in params:
        if stage not in pipeline.stages:
            raise unknown_name(f"stage of '{pipeline.serve_as}'", stage, pipeline.stages, field="-p")


def check_sound_file(path: str, option: str = "--audio-out") -> Format:
    """Return the format of a file of sound, by its ending, once it is sure that it can be written.

    Raises:
        BadInput: it can't, or no format has this ending.
    """
    check_writable(path, option)
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        allowed = ", ".join(filter(None, ENDINGS))
        message = f"{option} {path}: no format of sound ends in {ending}"
        raise BadInput(f"{message} (allowed: {allowed})", field=option)
    return ENDINGS[ending]


def write_file(path: str, data: bytes) -> None:
    """Write a file of sound.

    Raises:
        BadInput: it can't be written.
    """
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise BadInput(f"can't write {path}: {error.strerror}", field="--audio-out") from error
