"""Log lines: JSON on standard error from every process of a deployment, which its supervisor collects and shows.

A line has ``time`` (seconds since the epoch), ``level``, ``actor``, ``event`` and the event's own fields. Prompts and
keys appear in no field of a line above DEBUG.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "actor": self._actor,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


def log_to_stderr(actor: str, level: str) -> None:
    """Send this process's log lines to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(actor))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
