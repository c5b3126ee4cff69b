"""What types alone can't say about a frame that came from the network.

Whatever passes here can be used without a second thought: durations can be given to a timer, an edge is one of its
route, a count isn't negative, a JSON-like value can be encoded again, and a payload's bytes have the shape that it
names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omni_bus.wire.frames import (
    Admin,
    AdminReply,
    Admit,
    AnyFrame,
    Chunk,
    Close,
    Credit,
    Done,
    Failed,
    Hello,
    Open,
    Outlook,
    Progress,
    Reject,
    Release,
    Reroute,
    Route,
    Stalled,
    Submit,
    Welcome,
)
from omni_bus.wire.payloads import Text, check
from omni_bus.wire.plain import check_plain
from omni_bus.wire.prefix import MAX_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_READS = 64
"""Streams of one process that used what one frame gives back; the owner opens an event for each."""

MAX_SECONDS = 1e9
"""32 years: what every timer takes."""


def check_frame(frame: AnyFrame) -> None:
    """Refuse a frame whose values make no sense.

    Raises:
        ValueError: names the frame, the field and what is allowed.
    """
    kind = type(frame)
    if isinstance(frame, Chunk):  # by far the most frequent one
        if frame.edge < 0 or frame.seq < 0:
            raise ValueError(f"Chunk: edge {frame.edge} and seq {frame.seq} must not be negative")
        payload = frame.payload
        if type(payload) is not Text or payload.num_tokens < 0:  # most are text, and `check` would say no more of it
            check(payload)
        return
    checker = _CHECKS.get(kind)
    if checker is not None:
        checker(frame)


def _seconds(field: str, value: float | None) -> None:
    # One comparison refuses NaN and both infinities too.
    if value is not None and not abs(value) <= MAX_SECONDS:
        raise ValueError(f"{field} is {value}: seconds must be finite and at most {MAX_SECONDS:g}")


def _counts(frame: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(frame, field)
        if value < 0:
            raise ValueError(f"{type(frame).__name__}: {field} is {value}, it must not be negative")


def _check_route(route: Route) -> None:
    _seconds("Route.timeout_s", route.timeout_s)
    for edge in route.edges:
        _counts(edge, "window_chunks", "window_bytes")


def _check_hello(frame: Hello) -> None:
    for route in frame.live:
        _check_route(route)
    for ran_s in frame.ran_s:
        _seconds("Hello.ran_s", ran_s)


def _check_welcome(frame: Welcome) -> None:
    _seconds("Welcome.heartbeat_s", frame.heartbeat_s)
    if frame.heartbeat_s <= 0:
        raise ValueError(f"Welcome.heartbeat_s is {frame.heartbeat_s}: it must be positive")


def _check_progress(frame: Progress) -> None:
    if not math.isfinite(frame.fraction):
        raise ValueError(f"Progress.fraction is {frame.fraction}: it must be finite")


def _check_submit(frame: Submit) -> None:
    _seconds("Submit.timeout_s", frame.timeout_s)
    _counts(frame, "input_bytes", "tokens")
    if len(frame.prefix) > MAX_BLOCKS:
        raise ValueError(f"Submit.prefix has {len(frame.prefix)} blocks (allowed: at most {MAX_BLOCKS})")


def _check_open(frame: Open) -> None:
    if not 0 <= frame.edge < len(frame.route.edges):
        raise ValueError(f"Open.edge is {frame.edge}, the route has edges 0 to {len(frame.route.edges) - 1}")
    _check_route(frame.route)
    check_plain(frame.params)


def _check_credit(frame: Credit) -> None:
    _counts(frame, "edge", "chunks", "bytes")


def _check_close(frame: Close) -> None:
    _counts(frame, "edge", "num_chunks")
    check_plain(frame.finish.detail)


def _check_done(frame: Done) -> None:
    _seconds("Done.stats.first_output_s", frame.stats.first_output_s)
    _seconds("Done.stats.total_s", frame.stats.total_s)


def _check_error(frame: Reject | Failed | Reroute) -> None:
    _seconds(f"{type(frame).__name__}.error.retry_after_s", frame.error.retry_after_s)


def _check_reply(frame: AdminReply) -> None:
    check_plain(frame.result)
    if frame.error is not None:
        _seconds("AdminReply.error.retry_after_s", frame.error.retry_after_s)


def _check_release(frame: Release) -> None:
    if len(frame.reads) > MAX_READS:
        raise ValueError(f"Release.reads names {len(frame.reads)} events (allowed: {MAX_READS})")


_CHECKS: dict[type, Callable[[Any], None]] = {
    Hello: _check_hello,
    Welcome: _check_welcome,
    Progress: _check_progress,
    Submit: _check_submit,
    Admit: lambda frame: _check_route(frame.route),
    Stalled: lambda frame: _seconds("Stalled.seconds", frame.seconds),
    Outlook: lambda frame: _seconds("Outlook.retry_after_s", frame.retry_after_s),
    Reroute: _check_error,
    Reject: _check_error,
    Failed: _check_error,
    Done: _check_done,
    Admin: lambda frame: check_plain(frame.args),
    AdminReply: _check_reply,
    Open: _check_open,
    Credit: _check_credit,
    Close: _check_close,
    Release: _check_release,
}
