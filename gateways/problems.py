"""The one place where errors become HTTP: status, OpenAI's error object, headers.

The envelope is ``{"error": {"message", "type", "param", "code"}}`` with `code` the integer status, for every route and
every status, so that SDKs can read each refusal.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from aiohttp import web

from omni_bus.errors import (
    BadInput,
    DeadlineExceeded,
    MediaTooLarge,
    OmniBusError,
    QuotaExceeded,
    Refused,
    RequestCancelled,
    StageFailed,
    StageLost,
    StorageFull,
    Unreachable,
)

TYPES: dict[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    416: "RangeNotSatisfiableError",
    417: "ExpectationFailedError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    507: "InsufficientStorageError",
}

MAX_MESSAGE_CHARACTERS = 2000

_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+-]+){2,}/?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class Problem(Exception):
    """A refusal with its HTTP status; raised by handlers and rendered at the edge."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
        must_close: bool = False,
    ) -> None:
        # Bytes of a head that are no UTF-8 come as halves of surrogate pairs, which no answer can hold.
        message = message.encode("utf-8", "replace").decode()
        super().__init__(message)
        self.status = status
        self.message = _encodable(message)
        self.param = _encodable(param) if param is not None else None
        self.headers = headers or {}
        self.extra = extra or {}
        self.must_close = must_close
        """The connection can't be used any more: part of the request was not read."""

    @property
    def document(self) -> dict[str, Any]:
        """The error envelope."""
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error | self.extra}

    def response(self) -> web.Response:
        """Render it."""
        body = msgspec.json.encode(self.document)
        response = web.Response(
            status=self.status, body=body, content_type="application/json", charset="utf-8", headers=self.headers
        )
        if self.must_close:
            response.force_close()
        return response


def to_problem(error: Exception) -> Problem:
    """Return what a client is told of an error; an unexpected one says nothing of its cause."""
    match error:
        case Problem():
            return error
        case MediaTooLarge():
            return Problem(413, scrub(error.message), param=error.field or None)
        case Unreachable():
            return Problem(422, scrub(error.message), param=error.field or None)
        case BadInput():
            return Problem(400, scrub(error.message), param=error.field or None)
        case StorageFull():
            return Problem(507, scrub(error.message), headers=_retry_hint(is_safe=False))
        case QuotaExceeded():
            return Problem(429, scrub(error.message), headers=_retry_after(error), extra=_stage(error))
        case Refused():
            return Problem(503, scrub(error.message), headers=_retry_after(error), extra=_stage(error))
        case DeadlineExceeded():
            return Problem(504, scrub(error.message), extra=_stage(error))
        case RequestCancelled():
            return Problem(503, scrub(error.message), headers=_retry_hint(is_safe=False))
        case StageLost():
            extra = _stage(error) | {"retry_safe": error.is_retry_safe}
            return Problem(503, scrub(error.message), headers=_retry_hint(is_safe=error.is_retry_safe), extra=extra)
        case StageFailed():
            extra = _stage(error) | {"retry_safe": error.is_retry_safe}
            return Problem(500, scrub(error.message), headers=_retry_hint(is_safe=error.is_retry_safe), extra=extra)
        case OmniBusError():
            return Problem(500, scrub(error.message), extra=_stage(error))
        case _:
            return Problem(500, "the server failed; its log has the reason under this request's id")


def scrub(message: str) -> str:
    """Return a message without file paths, addresses of objects and tracebacks."""
    before, found, after = message.partition("Traceback (most recent call last)")
    if found:
        message = f"{before}{after.strip().splitlines()[-1] if after.strip() else ''}"
    message = _ADDRESS.sub("<address>", _PATH.sub("<path>", message))
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:MAX_MESSAGE_CHARACTERS]}…"


def _encodable(text: str) -> str:
    """Return a text without what UTF-8 can't hold: bytes of a head that are none of it come as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def _stage(error: OmniBusError) -> dict[str, Any]:
    return {"stage": error.stage} if error.stage else {}


def _retry_after(error: Refused) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def _retry_hint(*, is_safe: bool) -> dict[str, str]:
    """Return the header by which OpenAI's SDKs decide to send a request again, whatever its status."""
    return {"x-should-retry": "true" if is_safe else "false"}
