"""Log lines: JSON on standard error from every process of a deployment, which its supervisor collects and shows.

A line has ``time`` (seconds since the epoch), ``level``, ``actor``, ``event`` and the event's own fields. Prompts and
keys appear in no field of a line above DEBUG; since an engine may put a prompt into the message of an exception, that
message is left out above DEBUG too, and only its type and place are written.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import msgspec

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

LIFECYCLE = frozenset({"phase", "listening", "actor ready", "client joined", "client left"})
"""Events by which the supervisor knows how its processes are; written whatever the level."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an event's own fields never replace the line's."""
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "actor": self._actor,
            "event": record.getMessage(),
        }
        line = {**line, **getattr(record, "fields", {}), **line}
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = traceback_of(record.exc_info[1])
        return msgspec.json.encode(line, enc_hook=repr).decode(errors="replace")


def traceback_of(error: BaseException) -> str:
    """Return where an exception came from: places and type, and its message only while this process logs at DEBUG."""
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        return "".join(traceback.format_exception(error))
    places = "".join(traceback.format_tb(error.__traceback__))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = f"{traceback_of(cause)}\n" if cause is not None else ""
    return f"{before}{places}{type(error).__name__}"


class _LevelFilter(logging.Filter):
    """Lets lines of a level pass, and those that the supervisor needs in any case."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.level or record.msg in LIFECYCLE


def log_to_stderr(actor: str, level: str) -> None:
    """Send this process's log lines to standard error as JSON."""
    number = logging.getLevelNamesMapping()[level]
    # A line names none of these, and each record would look them up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(actor))
    handler.addFilter(_LevelFilter(number))
    logging.basicConfig(level=min(number, logging.INFO), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
