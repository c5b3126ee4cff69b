"""``omni-bus bench``: load on any server with OpenAI's routes, or of robots, and what its clients see of it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import re
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from omni_bus.bench import plot
from omni_bus.bench.backends import DIALECTS, SPEECH, TRANSCRIPTION
from omni_bus.bench.client import Server
from omni_bus.bench.costs import ServerProcesses
from omni_bus.bench.dialects import Wishes
from omni_bus.bench.goodput import parse_limits
from omni_bus.bench.report import as_json, as_table
from omni_bus.bench.round_trip import spoken
from omni_bus.bench.run import MODES, Outcome, Plan, Run
from omni_bus.bench.summary import summarise
from omni_bus.cli import bench_options as options
from omni_bus.cli import bench_robot
from omni_bus.cli.outfile import check_writable
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PICTURES = (".png", ".svg", ".pdf")


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """How the outcome is told."""

    names: tuple[str, ...]
    percentiles: tuple[float, ...]
    limits: dict[str, float]
    label: str
    metadata: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    summary = "send requests to a server with OpenAI's routes and report latencies, throughput and failures"
    options.add_arguments(benches.add_parser("serve", help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    summary = "let simulated robots ask a server that speaks OpenPI, and report latencies, missed deadlines and batches"
    bench_robot.add_arguments(
        benches.add_parser("robot", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0, or 2 if not one request was answered."""
    if args.bench == "robot":
        return bench_robot.run(args)
    report = _report(args)
    plan = _plan(args)
    result_path = _result_path(args, plan)
    if plan.server_pids:
        ServerProcesses(plan.server_pids)  # refuses now what can't be watched later
    if args.plot is not None:
        if not args.plot.endswith(_PICTURES):
            raise BadInput(f"--plot {args.plot} came (allowed: a file in {', '.join(_PICTURES)})", field="--plot")
        plot.require()
        check_writable(args.plot, "--plot")
    outcome = uvloop.run(_run(args, plan))
    told = [
        (
            phase,
            summarise(
                phase.records,
                label=phase.label,
                names=report.names,
                percentiles=report.percentiles,
                limits=report.limits,
            ),
        )
        for phase in outcome.phases
    ]
    settings = _settings(args, plan, report)
    document = as_json(outcome, told, settings, is_detailed=args.save_detailed)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        print(as_table(outcome, told, _heading(args, plan, outcome)))
    _write(args, plan, outcome, document, result_path)
    return 2 if all(summary.failed == summary.num_requests for _, summary in told) else 0


def _make_room() -> None:
    """Let the process have as many connections as it may, and the loop no pauses for prompts that stay anyway."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()


def _report(args: argparse.Namespace) -> _Report:
    has_rate = math.isfinite(options.positive(args.request_rate, "--request-rate", may_be_inf=True))
    has_audio = "audio" in args.modalities or args.backend in (SPEECH, TRANSCRIPTION)
    return _Report(
        names=options.metrics_of(args, has_rate=has_rate, has_audio=has_audio),
        percentiles=options.percentiles_of(args.metric_percentiles),
        limits=parse_limits(args.goodput),
        label=args.label or args.backend,
        metadata=options.pairs(args.metadata, "--metadata"),
    )


def _plan(args: argparse.Namespace) -> Plan:
    """Return what is to be done; the model's name is still missing if it isn't given."""
    seed = options.integer(args.seed, "--seed", low=0, high=2**63)
    asked = options.prompts_of(args, seed)
    concurrency = args.max_concurrency
    num_heard = options.num_heard_of(args, asked.prompts)
    return Plan(
        mode=options.one_of(args.mode, "--mode", MODES),
        prompts=asked.prompts,
        prompts_again=asked.again,
        aside=asked.aside,
        dialect=DIALECTS[options.one_of(args.backend, "--backend", DIALECTS)],
        wishes=_wishes(args),
        rate=options.positive(args.request_rate, "--request-rate", may_be_inf=True),
        burstiness=options.positive(args.burstiness, "--burstiness", may_be_inf=True),
        max_concurrency=None if concurrency is None else options.integer(concurrency, "--max-concurrency", low=1),
        num_warmups=options.integer(args.num_warmups, "--num-warmups", low=0),
        seed=seed,
        num_slow_readers=options.integer(args.slow_readers, "--slow-readers", low=1, high=10_000),
        slow_reader_rate=options.positive(args.slow_reader_rate, "--slow-reader-rate"),
        slow_reader_output_len=options.integer(args.slow_reader_output_len, "--slow-reader-output-len", low=2),
        num_heard=num_heard,
        hearing=Wishes(model=args.wer_model or "") if num_heard and args.backend == SPEECH else None,
        server_pids=tuple(options.integer(pid, "--server-pid", low=1, high=2**31 - 1) for pid in args.server_pid),
    )


def _wishes(args: argparse.Namespace) -> Wishes:
    sampling: dict[str, Any] = {}
    if args.temperature is not None:
        sampling["temperature"] = options.number(
            args.temperature, "--temperature", "a number, at least 0", lambda value: 0 <= value < math.inf
        )
    if args.top_p is not None:
        sampling["top_p"] = options.number(
            args.top_p, "--top-p", "a number above 0 and at most 1", lambda value: 0 < value <= 1
        )
    return Wishes(
        model=args.model or "",
        modalities=options.names_of(args.modalities, "--modalities", options.MODALITIES),
        voice=args.voice,
        ignore_eos=args.ignore_eos,
        sampling=sampling,
        extra_body=options.extra_body_of(args.extra_body),
    )


async def _run(args: argparse.Namespace, plan: Plan) -> Outcome:
    base_url = options.base_url_of(args.base_url)
    headers = options.headers_of(args)
    timeout_s = options.positive(args.request_timeout, "--request-timeout")
    path = options.path_of(args.endpoint or plan.dialect.path)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(base_url, plan.dialect, path, headers, timeout_s))
        recogniser = None
        if plan.hearing is not None:
            other = args.wer_base_url
            url, given = (base_url, headers) if other is None else (options.base_url_of(other, "--wer-base-url"), {})
            hears = DIALECTS[TRANSCRIPTION]
            recogniser = await stack.enter_async_context(Server(url, hears, hears.path, given, timeout_s))
        model = await server.choose_model(args.model)
        if args.backend == TRANSCRIPTION and not plan.aside.sound:
            speaks = DIALECTS[SPEECH]
            async with Server(base_url, speaks, speaks.path, headers, timeout_s) as voice:
                plan = await _spoken(plan, voice)
        _make_room()
        plan = msgspec.structs.replace(plan, wishes=msgspec.structs.replace(plan.wishes, model=model))
        with _progress(len(plan.prompts) * (2 if plan.mode == "slow-reader" else 1)) as on_done:
            return await Run(server, plan, on_done, recogniser).run()


async def _spoken(plan: Plan, voice: Server) -> Plan:
    """Return the plan with its texts spoken, as sounds to send."""
    again = plan.prompts_again if plan.mode == "slow-reader" else []
    found = await spoken([*plan.prompts, *again, plan.aside], voice, Wishes(model="", voice=plan.wishes.voice))
    count = len(plan.prompts)
    return msgspec.structs.replace(plan, prompts=found[:count], prompts_again=found[count:-1], aside=found[-1])


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show how many requests are done, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn seldom: the thread that draws takes turns with the loop that measures.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task("requests", total=total)
        yield lambda: progress.advance(bar)


# --- what is told -------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace, plan: Plan, report: _Report) -> dict[str, Any]:
    """Return what the run was told; no headers, which may hold keys."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "label": report.label,
        **report.metadata,
        "backend": args.backend,
        "base_url": args.base_url,
        "mode": plan.mode,
        "dataset_name": options.dataset_of(args),
        "request_rate": plan.rate if math.isfinite(plan.rate) else "inf",
        "burstiness": plan.burstiness if math.isfinite(plan.burstiness) else "inf",
        "max_concurrency": plan.max_concurrency,
        "num_warmups": plan.num_warmups,
        "seed": plan.seed,
        "goodput": report.limits,
    }


def _heading(args: argparse.Namespace, plan: Plan, outcome: Outcome) -> str:
    told = [f"{len(plan.prompts)} requests, {options.dataset_of(args)} prompts", _rate_words(plan)]
    if plan.max_concurrency is not None:
        told.append(f"at most {plan.max_concurrency} at once")
    model = outcome.model or "the server's own model"
    return f"{model} at {args.base_url}: {', '.join(told)}"


def _rate_words(plan: Plan) -> str:
    if math.isinf(plan.rate):
        return "as fast as allowed"
    if math.isinf(plan.burstiness):
        kind = "constant"
    else:
        kind = "Poisson" if plan.burstiness == 1 else f"gamma, burstiness {plan.burstiness:g}"
    return f"{plan.rate:g} a second ({kind})"


def _result_path(args: argparse.Namespace, plan: Plan) -> Path | None:
    """Return where the result is to be written, if it is."""
    if not (args.save_result or args.save_detailed):
        return None
    name = args.result_filename
    if name is None:
        concurrency = "" if plan.max_concurrency is None else f"-concurrency{plan.max_concurrency}"
        words = f"{args.label or args.backend}-{plan.rate:g}qps{concurrency}-{args.model or 'model'}"
        words = re.sub(r"[^\w.-]+", "_", words)  # a model's name may hold slashes
        name = f"{words}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = Path(args.result_dir) / name
    check_writable(str(path), "--result-dir" if args.result_filename is None else "--result-filename")
    return path


def _write(
    args: argparse.Namespace, plan: Plan, outcome: Outcome, document: dict[str, Any], result_path: Path | None
) -> None:
    """Write the result and the picture, and say where."""
    if result_path is not None:
        try:
            result_path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
        except OSError as error:
            raise BadInput(f"can't write {result_path}: {error.strerror}", field="--result-filename") from error
        print(f"wrote {result_path}", file=sys.stderr)
    if args.plot is not None:
        over_time = {phase.label: phase.records for phase in outcome.phases}
        storm = outcome.storm
        compared = over_time if storm is None else {"before the storm": storm.calm, "after it": storm.after}
        heading = _heading(args, plan, outcome)
        plot.draw(plot.Drawing(heading=heading, compared=compared, over_time=over_time), args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
