"""The options of ``omni-bus bench serve``, and what is allowed of each.

Those that ``vllm bench serve`` has too mean the same.
"""

from __future__ import annotations

import math
import os
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from yarl import URL

from omni_bus.bench import dataset
from omni_bus.bench.backends import DIALECTS, SPEECH, TRANSCRIPTION
from omni_bus.bench.goodput import KEYS
from omni_bus.bench.measures import INTENDED, METRICS
from omni_bus.bench.run import MODES
from omni_bus.errors import BadInput, unknown_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

AUDIO_METRICS = tuple(name for name in METRICS if name.startswith("audio_"))
MODALITIES = ("text", "audio")
MAX_COUNT = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all of them; numbers stay text, since a refusal of ours says what is allowed."""
    _add_server(parser.add_argument_group("server"))
    _add_prompts(parser.add_argument_group("prompts and answers"))
    _add_load(parser.add_argument_group("load"))
    _add_word_errors(parser.add_argument_group("word errors"))
    _add_report(parser.add_argument_group("report"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="default: %(default)s")
    group.add_argument("--model", metavar="NAME", help="default: the first one that the server lists")
    group.add_argument(
        "--backend", metavar="NAME", default="openai-chat", help=f"{_or(DIALECTS)}; default: %(default)s"
    )
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's, such as /v1/chat/completions")
    group.add_argument(
        "--header",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="sent with every request; may be given several times. A key in OPENAI_API_KEY is sent as well",
    )
    group.add_argument("--request-timeout", metavar="SECONDS", default="900", help="default: %(default)s")
    group.add_argument(
        "--server-pid",
        metavar="PID",
        action="append",
        default=[],
        help="count the processor time of this process and its children; may be given several times",
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        metavar="NAME",
        help=f"{_or(dataset.NAMES)}; default: sentences for {SPEECH} and {TRANSCRIPTION}, else random",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="custom: JSONL with 'prompt' or 'messages', and 'output_tokens' if wanted; custom_audio: JSONL with "
        "'audio' (a file) and 'text' if it is known what is said; sharegpt: its JSON",
    )
    group.add_argument(
        "--sentences-per-prompt",
        metavar="N",
        default="3",
        help="of the fifty of `sentences`, which are spoken first where sounds are sent; default: %(default)s",
    )
    group.add_argument("--num-prompts", metavar="N", default="100", help="requests; default: %(default)s")
    group.add_argument(
        "--seed", metavar="N", default="0", help="of prompts, arrivals and leavers; default: %(default)s"
    )
    group.add_argument("--disable-shuffle", action="store_true", help="take a file's prompts in their order")
    group.add_argument(
        "--input-len",
        "--random-input-len",
        metavar="WORDS",
        default="256",
        help="of random prompts; default: %(default)s",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--custom-output-len",
        "--sharegpt-output-len",
        metavar="TOKENS",
        help="of answers, at most; default: 128 for random, else what the file says",
    )
    group.add_argument(
        "--random-range-ratio", metavar="R", default="0", help="lengths vary evenly by this share; default: %(default)s"
    )
    group.add_argument(
        "--random-prefix-len", metavar="WORDS", default="0", help="that all prompts begin with; default: %(default)s"
    )
    group.add_argument("--ignore-eos", action="store_true", help="have answers as long as they may be")
    group.add_argument(
        "--modalities", metavar="LIST", default="text", help="text, audio or text,audio; default: %(default)s"
    )
    group.add_argument("--voice", metavar="NAME", help="of the sound; default: the server's")
    group.add_argument("--temperature", metavar="T", help="default: the server's")
    group.add_argument("--top-p", metavar="P", help="default: the server's")
    group.add_argument("--extra-body", metavar="JSON", help="an object that is added to each request's body")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode",
        metavar="MODE",
        default="load",
        help=f"{_or(MODES)}: slow-reader runs the load alone and then beside slow readers; in cancel-storm all clients "
        "leave at random moments. Default: %(default)s",
    )
    group.add_argument(
        "--request-rate", metavar="RPS", default="inf", help="requests a second; default: inf, as fast as allowed"
    )
    group.add_argument(
        "--burstiness",
        metavar="B",
        default="1",
        help="1: a Poisson process; less: bursts; more: smoother; inf: a constant rate. Default: %(default)s",
    )
    group.add_argument("--max-concurrency", metavar="N", help="requests at once; default: any number")
    group.add_argument("--num-warmups", metavar="N", default="0", help="requests before the first measured one")
    group.add_argument("--slow-readers", metavar="N", default="4", help="default: %(default)s")
    group.add_argument(
        "--slow-reader-rate",
        metavar="TPS",
        default="10",
        help="tokens a second each reads; of sound, pieces of 256 bytes; default: %(default)s",
    )
    group.add_argument(
        "--slow-reader-output-len", metavar="TOKENS", default="4096", help="of their answers; default: %(default)s"
    )


def _add_word_errors(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--wer",
        metavar="N",
        nargs="?",
        const="50",
        help="count the word errors of the first N answers, once nothing is measured any more; what was spoken is sent "
        "to the server's /v1/audio/transcriptions. Default of N: %(const)s",
    )
    group.add_argument(
        "--wer-base-url", metavar="URL", help="another server to send it to; it gets none of the --header"
    )
    group.add_argument("--wer-model", metavar="NAME", help="that transcribes; default: the server's own choice")


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        metavar="KEY:VALUE",
        nargs="+",
        default=[],
        help=f"limits that a good request keeps, as in ttft:500 tpot:50; milliseconds, keys {', '.join(KEYS)}",
    )
    group.add_argument(
        "--percentile-metrics", metavar="LIST", help=f"of {', '.join(METRICS)}; default: those that apply"
    )
    group.add_argument("--metric-percentiles", metavar="LIST", default="90,99", help="default: %(default)s")
    group.add_argument("--json", action="store_true", help="print JSON, for programs")
    group.add_argument("--plot", metavar="FILE", help="draw a picture: .png, .svg or .pdf (needs matplotlib)")
    group.add_argument("--save-result", action="store_true", help="write the JSON to a file")
    group.add_argument("--save-detailed", action="store_true", help="and each request's moments with it")
    group.add_argument("--result-dir", metavar="DIRECTORY", default=".", help="default: the current one")
    group.add_argument("--result-filename", metavar="NAME", help="default: label, rate, model and time")
    group.add_argument("--label", metavar="NAME", help="of the result; default: the backend")
    group.add_argument(
        "--metadata",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="put into the result; several times if wanted",
    )


def _or(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


# --- values -------------------------------------------------------------------------------------------------


def integer(text: str, option: str, *, low: int, high: int = MAX_COUNT) -> int:
    """Return an option's integer.

    Raises:
        BadInput: none, or outside of its bounds.
    """
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise BadInput(f"{option} {text} came (allowed: an integer from {low} to {high})", field=option)
    return value


def number(text: str, option: str, allowed: str, is_allowed: Callable[[float], bool]) -> float:
    """Return an option's number.

    Raises:
        BadInput: none, or one that is not allowed.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or not is_allowed(value):
        raise BadInput(f"{option} {text} came (allowed: {allowed})", field=option)
    return value


def positive(text: str, option: str, *, may_be_inf: bool = False) -> float:
    """Return an option's number above 0."""
    allowed = f"a number above 0{', or inf' if may_be_inf else ''}"
    return number(text, option, allowed, lambda value: value > 0 and (may_be_inf or math.isfinite(value)))


def one_of(text: str, option: str, known: Iterable[str]) -> str:
    """Return an option's name.

    Raises:
        UnknownName: it is not known; lists those that are.
    """
    names = list(known)
    if text not in names:
        raise unknown_name(f"value of {option}:", text, names, field=option)
    return text


def names_of(text: str, option: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return an option's list of names, each once; an empty text is an empty list."""
    return tuple(dict.fromkeys(one_of(word.strip(), option, known) for word in text.split(",") if word.strip()))


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Return the pairs of ``NAME=VALUE`` words.

    Raises:
        BadInput: a word without name or equals sign; its value is not shown, since it may be a key.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise BadInput(f"{option}: a word without '=' or a name before it came (allowed: NAME=VALUE)", field=option)
        found[name] = value
    return found


def percentiles_of(text: str) -> tuple[float, ...]:
    """Return the percentiles, in order."""
    option, allowed = "--metric-percentiles", "numbers from 0 to 100 with commas between them, as in 50,90,99"
    found = {number(word, option, allowed, lambda value: 0 <= value <= 100) for word in text.split(",")}
    return tuple(sorted(found))


def metrics_of(args: argparse.Namespace, *, has_rate: bool, has_audio: bool) -> tuple[str, ...]:
    """Return the names of the metrics to report: those asked for, else those that such a run has."""
    if args.percentile_metrics is not None:
        found = names_of(args.percentile_metrics, "--percentile-metrics", tuple(METRICS))
        if not found:
            raise BadInput(
                f"--percentile-metrics is empty (allowed: one or more of {', '.join(METRICS)})",
                field="--percentile-metrics",
            )
        return found
    left_out = (*(() if has_rate else INTENDED), *(() if has_audio else AUDIO_METRICS))
    return tuple(name for name in METRICS if name not in left_out)


def base_url_of(text: str, option: str = "--base-url") -> str:
    """Return a server's address.

    Raises:
        BadInput: it is none.
    """
    try:
        url = URL(text)
        is_good = url.scheme in ("http", "https") and bool(url.host) and not url.query_string
    except ValueError:
        is_good = False
    if not is_good:
        raise BadInput(
            f"{option} {text} came (allowed: http:// or https:// with a host, as http://127.0.0.1:8000)",
            field=option,
        )
    return text


def path_of(text: str) -> str:
    """Return the route's path."""
    if not text.startswith("/"):
        raise BadInput(f"--endpoint {text} came (allowed: a path, as /v1/chat/completions)", field="--endpoint")
    return text


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the headers, with the key of the environment if there is one."""
    key = os.environ.get("OPENAI_API_KEY")
    given = pairs(args.header, "--header")
    if key and not any(name.lower() == "authorization" for name in given):
        given["Authorization"] = f"Bearer {key}"
    return given


def extra_body_of(text: str | None) -> dict[str, Any]:
    """Return the object that each body gets.

    Raises:
        BadInput: it is none.
    """
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadInput(
            f'--extra-body {text}: {error} (allowed: a JSON object, as {{"top_k": 1}})', field="--extra-body"
        ) from error


def dataset_of(args: argparse.Namespace) -> str:
    """Return the dataset's name: what is asked for, or what suits the backend.

    Raises:
        UnknownName: there is no such dataset.
        BadInput: it has what the backend doesn't send.
    """
    if args.dataset_name is None:
        return "sentences" if args.backend in (SPEECH, TRANSCRIPTION) else "random"
    name = one_of(args.dataset_name, "--dataset-name", dataset.NAMES)
    if name == "custom_audio" and args.backend != TRANSCRIPTION:
        raise BadInput(
            f"--dataset-name {name} came for {args.backend} (allowed: with --backend {TRANSCRIPTION})",
            field="--dataset-name",
        )
    return name


def num_heard_of(args: argparse.Namespace, prompts: Sequence[dataset.Prompt]) -> int:
    """Return of how many answers word errors are counted.

    Raises:
        BadInput: they can't be counted with this backend or dataset.
    """
    for option in ("wer_base_url", "wer_model"):
        if getattr(args, option) is not None and (args.wer is None or args.backend != SPEECH):
            name = f"--{option.replace('_', '-')}"
            raise BadInput(f"{name} came (allowed: with --wer and --backend {SPEECH})", field=name)
    if args.wer is None:
        return 0
    if args.backend not in (SPEECH, TRANSCRIPTION):
        raise BadInput(f"--wer came with --backend {args.backend} (allowed: {SPEECH}, {TRANSCRIPTION})", field="--wer")
    if not all(prompt.as_text() for prompt in prompts):
        raise BadInput("--wer came, and not every sound has a text (allowed: 'text' in each line)", field="--wer")
    return integer(args.wer, "--wer", low=1, high=10_000)


class Asked(NamedTuple):
    """What a run asks."""

    prompts: list[dataset.Prompt]
    again: list[dataset.Prompt]
    aside: dataset.Prompt


def prompts_of(args: argparse.Namespace, seed: int) -> Asked:
    """Return what is asked: a prompt for each request of a phase, as many for a second one, one for all else.

    Raises:
        BadInput: an option of the dataset, or its file, is not as it must be.
    """
    name = dataset_of(args)
    count = integer(args.num_prompts, "--num-prompts", low=1, high=1_000_000)
    output_len = None if args.output_len is None else integer(args.output_len, "--output-len", low=1)
    if name in ("random", "sentences") and args.dataset_path is not None:
        allowed = "--dataset-name custom, custom_audio or sharegpt with it"
        raise BadInput(
            f"--dataset-path {args.dataset_path} came for {name} (allowed: {allowed})", field="--dataset-path"
        )
    if name == "sentences":
        num_sentences = integer(args.sentences_per_prompt, "--sentences-per-prompt", low=1, high=1000)
        found = dataset.sentence_prompts(2 * count + 1, num_sentences, random.Random(seed))
        return Asked(found[:count], found[count:-1], found[-1])
    if name == "random":
        lengths = _lengths(args, output_len)
        *prompts, aside = dataset.random_prompts(count + 1, lengths, random.Random(seed))
        again = dataset.random_prompts(count, lengths, random.Random(seed), mark="again")
        return Asked(prompts, again, aside)
    if args.dataset_path is None:
        raise BadInput(f"--dataset-name {name} needs a file (allowed: --dataset-path FILE)", field="--dataset-path")
    if name == "custom_audio":
        found = dataset.read_custom_audio(args.dataset_path)
    else:
        read = dataset.read_custom if name == "custom" else dataset.read_sharegpt
        found = read(args.dataset_path, output_len)
    *prompts, aside = dataset.draw(found, count + 1, random.Random(seed), is_shuffled=not args.disable_shuffle)
    return Asked(prompts, prompts, aside)


def _lengths(args: argparse.Namespace, output_len: int | None) -> dataset.Lengths:
    return dataset.Lengths(
        input_len=integer(args.input_len, "--input-len", low=1, high=1_000_000),
        output_len=128 if output_len is None else output_len,
        range_ratio=number(
            args.random_range_ratio, "--random-range-ratio", "from 0 to below 1", lambda value: 0 <= value < 1
        ),
        prefix_len=integer(args.random_prefix_len, "--random-prefix-len", low=0, high=1_000_000),
    )
