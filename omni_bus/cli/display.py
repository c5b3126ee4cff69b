"""What ``omni-bus up`` shows: on a terminal a live table while it starts, else plain lines; JSON lines for programs."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from omni_bus.cli.writer import Writer
from omni_bus.observe.log import JsonFormatter, traceback_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from actors.process import Process
    from omni_bus.runtime.deployment import Deployment

QUIET_EVENTS = {"listening", "actor ready", "actor gone", "request ended", "output"}
"""Events that people need not read: they are shown in other words, or come with every request."""


DROPPED = "lines were not shown, since nobody read them"
"""Told once somebody reads again."""

STYLES = {"ready": "green", "failed": "bold red", "stopped": "dim"}
"""Of phases in the table; other ones are on their way."""


class Shown(Protocol):
    """A process as a table shows it: a supervisor's own, or what a command hears of one. Times are monotonic."""

    name: str
    phase: str
    fraction: float
    started_at: float
    ready_at: float | None

    @property
    def pid(self) -> int | None:
        """Its process id, if it has one."""
        ...


class Display(Protocol):
    """How the supervisor's news are shown."""

    def begin(self, processes: Sequence[Process]) -> None:
        """The start begins."""
        ...

    def changed(self, process: Process) -> None:
        """A process changed its phase."""
        ...

    def line(self, fields: dict[str, Any]) -> None:
        """A log line of a child."""
        ...

    def ready(self, deployment: Deployment, urls: dict[str, str], after_s: float) -> None:
        """All processes are ready."""
        ...

    def stopping(self) -> None:
        """A stop was asked for."""
        ...

    def end(self) -> None:
        """Nothing more will come."""
        ...

    def handler(self, actor: str) -> logging.Handler:
        """Return where this process's own log lines go."""
        ...


def make_display(log_format: str, out: TextIO) -> Display:
    """Return the display of a ``--log-format``."""
    if log_format == "json":
        return JsonDisplay(out)
    if log_format == "auto" and out.isatty():
        return TableDisplay(out)
    return PlainDisplay(out)


class _Handler(logging.Handler):
    """Hands this process's own log lines to a display."""

    def __init__(self, formatter: logging.Formatter, say: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


class JsonDisplay:
    """One JSON object a line: the children's log lines as they are, and the supervisor's own events."""

    def __init__(self, out: TextIO) -> None:
        self._out = Writer(out, _dropped_as_json)

    def begin(self, processes: Sequence[Process]) -> None:
        """List the processes."""
        self._event("starting", processes=[process.name for process in processes])

    def changed(self, process: Process) -> None:
        """Say the phase, and how long the process is up."""
        fields: dict[str, Any] = {"process": process.name, "phase": process.phase, "fraction": process.fraction}
        fields["restarts"] = process.num_restarts
        if process.child is not None:
            fields |= {"pid": process.child.pid, "exit": process.child.exit_code}
        self._event("process", **fields)

    def line(self, fields: dict[str, Any]) -> None:
        """Pass a child's line on."""
        self._say(json.dumps(fields))

    def ready(self, deployment: Deployment, urls: dict[str, str], after_s: float) -> None:
        """Say where the gateways listen."""
        models = [pipeline.serve_as for pipeline in deployment.pipelines.values()]
        self._event("ready", gateways=urls, models=models, after_s=round(after_s, 3))

    def stopping(self) -> None:
        """Say so."""
        self._event("stopping")

    def end(self) -> None:
        """Say so."""
        self._event("stopped")
        self._out.close()

    def handler(self, actor: str) -> logging.Handler:
        """Log in the same form, to the same place."""
        return _Handler(JsonFormatter(actor), self._say)

    def _event(self, event: str, **fields: Any) -> None:
        self.line(_of_supervisor(event, "INFO", **fields))

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")


def _of_supervisor(event: str, level: str, **fields: Any) -> dict[str, Any]:
    return {"time": round(time.time(), 3), "level": level, "actor": "supervisor", "event": event, **fields}


def _dropped_as_json(count: int) -> str:
    return json.dumps(_of_supervisor(DROPPED, "WARNING", count=count))


def _dropped(count: int) -> str:
    return _plain("WARNING", "supervisor", DROPPED, {"count": count})


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = traceback_of(record.exc_info[1])
        return _plain(record.levelname, "supervisor", record.getMessage(), fields)


def _plain(level: str, actor: str, event: str, fields: dict[str, Any]) -> str:
    said = " ".join(f"{key}={value}" for key, value in fields.items() if value not in ("", None) and key != "traceback")
    trace = f"\n{fields['traceback']}" if "traceback" in fields else ""
    return f"{time.strftime('%H:%M:%S')} {level.lower():7} {actor}: {event}{' ' if said else ''}{said}{trace}"


class PlainDisplay:
    """A line for each thing that a person wants to know."""

    def __init__(self, out: TextIO) -> None:
        self._out = Writer(out, _dropped)
        self._phases: dict[str, str] = {}

    def begin(self, processes: Sequence[Process]) -> None:
        """Say how many processes start."""
        self._say(f"starting {len(processes)} processes: {', '.join(process.name for process in processes)}")

    def changed(self, process: Process) -> None:
        """Say a new phase, once."""
        if self._phases.get(process.name) == process.phase:
            return
        self._phases[process.name] = process.phase
        elapsed = ""
        if process.phase == "ready" and process.ready_at is not None:
            elapsed = f" after {process.ready_at - process.started_at:.1f} s"
        self._say(f"  {process.name}: {process.phase}{elapsed}")

    def line(self, fields: dict[str, Any]) -> None:
        """Show a child's line if it is for people."""
        shown = dict(fields)
        level, actor, event = (str(shown.pop(key, "")) for key in ("level", "actor", "event"))
        shown.pop("time", None)
        if event not in QUIET_EVENTS or level in ("WARNING", "ERROR"):
            self._say(_plain(level, actor, event, shown))

    def ready(self, deployment: Deployment, urls: dict[str, str], after_s: float) -> None:
        """Say where the gateways listen and what they serve."""
        self._say(f"ready after {after_s:.1f} s")
        for name, url in urls.items():
            models = ", ".join(deployment.pipelines[pipeline].serve_as for pipeline in deployment.served.get(name, ()))
            self._say(f"  {name}: {url}  serving {models}")

    def stopping(self) -> None:
        """Say what will happen."""
        self._say("stopping: running requests may finish; stop again to end them now")

    def end(self) -> None:
        """Say so."""
        self._say("stopped")
        self._out.close()

    def handler(self, actor: str) -> logging.Handler:
        """Log in the same form, to the same place."""
        del actor
        return _Handler(_LineFormatter(), self._say)

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")


class TableDisplay(PlainDisplay):
    """A live table of the processes while they start; lines after that."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(out)
        self._processes: Sequence[Process] = ()
        console = Console(file=cast("TextIO", self._out))
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)
        self._is_live = False

    def begin(self, processes: Sequence[Process]) -> None:
        """Show the table."""
        self._processes = processes
        self._live.start()
        self._is_live = True

    def changed(self, process: Process) -> None:
        """Redraw, or say it when the table is gone."""
        if self._is_live:
            self._live.refresh()
        else:
            super().changed(process)

    def ready(self, deployment: Deployment, urls: dict[str, str], after_s: float) -> None:
        """Leave the table as it is and go on below."""
        self._leave()
        super().ready(deployment, urls, after_s)
        is_chat = any("messages" in pipeline.inputs for pipeline in deployment.pipelines.values())
        self._say('Ctrl-C stops; from another terminal: omni-bus call "Hello"' if is_chat else "Ctrl-C stops")

    def end(self) -> None:
        """Give the terminal back."""
        self._leave()
        super().end()

    def _leave(self) -> None:
        if self._is_live:
            self._live.refresh()
            self._live.stop()
            self._is_live = False

    def _say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Any:
        return process_table(self._processes)


def process_table(processes: Iterable[Shown]) -> Any:
    """Return a rich table of processes."""
    from rich.markup import escape
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table("process", "phase", "progress", "elapsed", "pid", box=None, header_style="dim")
    now = time.monotonic()
    for process in processes:
        is_ready = process.ready_at is not None
        until = process.ready_at if process.ready_at is not None else now
        table.add_row(
            process.name,
            f"[{STYLES.get(process.phase, 'yellow')}]{escape(process.phase)}[/]",
            ProgressBar(total=1.0, completed=1.0 if is_ready else process.fraction, width=24),
            f"{until - process.started_at:.1f} s" if process.started_at else "",
            str(process.pid) if process.pid is not None else "",
        )
    return table
