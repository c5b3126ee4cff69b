"""Every error of the project.

::

    OmniBusError
    ├── BadInput            the caller's fault: names the field, the value and what is allowed
    │   ├── UnknownName     no such model, pipeline, adapter, actor …
    │   ├── InputTooLarge   a body, prompt or payload over its limit
    │   │   └── MediaTooLarge   a file, picture, sound or video over one of its limits
    │   ├── Unreachable     an address that the caller named does not answer as it must
    │   ├── StorageQuotaExceeded   what the caller keeps here is as much as it may
    │   └── ConfigError     a deployment file that can't be served; carries every problem at once
    ├── BadFrame            the peer's fault: bytes or a frame that break the protocol
    ├── Refused             capacity: nothing wrong with the request, try again after `retry_after_s`
    │   ├── Overloaded      the queue is full
    │   ├── QuotaExceeded   the caller's own limit or rate
    │   ├── Unavailable     a needed stage is not there (starting, lost, draining)
    │   └── StorageFull     the disk, or what all callers together may keep on it, is full
    ├── DeadlineExceeded    the request's own time limit passed
    ├── RequestCancelled    somebody asked for it to end
    ├── StageFailed         a stage raised while working on the request
    ├── StageLost           the process that worked on the request is gone
    │   └── LinkBroken      it lives, but the connection to it broke, and frames may be lost
    └── StartFailed         a process of the deployment did not come up

Errors that cross the bus travel as `ErrorInfo`; `to_info` and `from_info` convert, and `code` is the key.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error on the wire."""

    code: str
    message: str
    field: str = ""
    stage: str = ""
    is_retry_safe: bool = False
    retry_after_s: float = 0.0


class OmniBusError(Exception):
    """Parent of all; raised itself only for a code this version does not know."""

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        stage: str = "",
        is_retry_safe: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.stage = stage
        self.is_retry_safe = is_retry_safe
        self.retry_after_s = retry_after_s

    def to_info(self) -> ErrorInfo:
        """Return the form that crosses the bus."""
        return ErrorInfo(self.code, self.message, self.field, self.stage, self.is_retry_safe, self.retry_after_s)


class BadInput(OmniBusError):
    """The caller sent something that can't be honoured; the message says what would have been allowed."""

    code = "bad_input"


class UnknownName(BadInput):
    """A name that is not in its table; the message lists the known ones."""

    code = "unknown_name"


class InputTooLarge(BadInput):
    """A body, prompt or payload over its limit."""

    code = "input_too_large"


class MediaTooLarge(InputTooLarge):
    """A file, picture, sound or video over its limit of bytes, pixels, frames or seconds."""

    code = "media_too_large"


class Unreachable(BadInput):
    """An address that the caller named does not answer, not in time, or not with what was asked for."""

    code = "unreachable"


class StorageQuotaExceeded(BadInput):
    """What the caller keeps here is as much as it may: something must be deleted first."""

    code = "storage_quota_exceeded"


class ConfigError(BadInput):
    """A deployment file that can't be served."""

    code = "config"

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class BadFrame(OmniBusError):
    """Bytes or a frame that break the protocol: the sender's fault."""

    code = "bad_frame"


class Refused(OmniBusError):
    """Not now."""

    code = "refused"


class Overloaded(Refused):
    """In-flight and queue limits are reached."""

    code = "overloaded"


class QuotaExceeded(Refused):
    """The caller is at a limit of its own, whatever capacity there is."""

    code = "quota_exceeded"


class Unavailable(Refused):
    """A stage that the request needs has no live replica."""

    code = "unavailable"


class StorageFull(Refused):
    """The disk, or what all callers together may keep on it, is full."""

    code = "storage_full"


class DeadlineExceeded(OmniBusError):
    """The request's time limit passed."""

    code = "deadline_exceeded"


class RequestCancelled(OmniBusError):
    """Somebody asked for the request to end."""

    code = "cancelled"


class StageFailed(OmniBusError):
    """An engine raised while it worked on the request."""

    code = "stage_failed"


class StageLost(OmniBusError):
    """The process that worked on the request is gone."""

    code = "stage_lost"


class LinkBroken(StageLost):
    """The connection between two actors that worked on the request broke, and what was under way may be lost."""

    code = "link_broken"


class StartFailed(OmniBusError):
    """A process of the deployment did not come up."""

    code = "start_failed"


_BY_CODE: dict[str, type[OmniBusError]] = {
    cls.code: cls
    for cls in (
        BadInput,
        UnknownName,
        InputTooLarge,
        MediaTooLarge,
        Unreachable,
        StorageQuotaExceeded,
        BadFrame,
        Refused,
        Overloaded,
        QuotaExceeded,
        Unavailable,
        StorageFull,
        DeadlineExceeded,
        RequestCancelled,
        StageFailed,
        StageLost,
        LinkBroken,
        StartFailed,
    )
}


def from_info(info: ErrorInfo) -> OmniBusError:
    """Return the exception that an `ErrorInfo` stands for."""
    return _BY_CODE.get(info.code, OmniBusError)(
        info.message,
        field=info.field,
        stage=info.stage,
        is_retry_safe=info.is_retry_safe,
        retry_after_s=info.retry_after_s,
    )


def unknown_name(what: str, name: str, known: Iterable[str], *, field: str = "") -> UnknownName:
    """Return the error for a name that is not in its table, with the nearest known one."""
    names = sorted(known)
    allowed = ", ".join(names) or "none"
    return UnknownName(f"unknown {what} '{name}'{did_you_mean(name, names)} (known: {allowed})", field=field)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'replicas'?``, or nothing where no known name is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""
