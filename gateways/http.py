"""What HTTP gateways share: keys, body limits, request ids, errors, and server-sent events with backpressure."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web

from gateways.origins import ANY, Origins, problems_of
from gateways.problems import Problem, to_problem
from omni_bus.errors import BadInput, OmniBusError, Unavailable
from omni_bus.gateway import STOPPING, WRITE_BUFFER_BYTES, Gateway

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from http import HTTPStatus

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
KEY_NAME = web.RequestKey("key_name", str)
"""Which of the gateway's keys a request came with, for fairness among them; never the key."""

FAILURE = web.RequestKey("failure", int)
"""The status of an error that came after the response had begun."""

ENCODINGS = ("identity", "gzip", "deflate")
"""Content encodings of request bodies; aiohttp passes others on undecoded."""

MAX_JSON_MARKS = 1_000_000
"""Commas and opening brackets in a JSON body.

Each value has one of them, and values are what costs: nine million empty lists in 27 MB took two seconds of the loop
and 800 MB (measured). Media in base64 has none, and a prompt with so many is longer than any model's context.
"""

GUARDED = "/v1"
"""Every path under this wants a key once the gateway has any."""

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table that every HTTP gateway has."""

    api_keys: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """Any of these opens the gateway, as ``Authorization: Bearer KEY``; with none from any source it is open to all."""

    api_key_env: str = ""
    """Name of an environment variable with one more key, or several with commas between."""

    api_key_file: str = ""
    """File with more keys, one a line."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may send requests and read answers (CORS), or ``"*"`` alone; by default none."""

    cors_credentials: bool = False
    """Lets these pages send cookies and logins of the browser, which a proxy before the gateway may need."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may open WebSockets besides the gateway's own, or ``"*"`` alone."""

    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 32 * 1024 * 1024
    """Larger request bodies are refused with 413 as soon as that is known."""

    max_answer_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 256 * 1024 * 1024
    """Output that is collected for an answer which is not streamed; a longer one is refused."""

    header_timeout_s: _Seconds = 20.0
    """A client may take so long to send a request's head."""

    body_timeout_s: _Seconds = 20.0
    """A client that sends nothing of its body for so long is answered with 408."""

    body_total_timeout_s: _Seconds = 300.0
    """A client may take so long to send its whole body."""

    write_timeout_s: _Seconds = 300.0
    """A client that takes nothing of a stream for so long is treated as gone."""

    keepalive_timeout_s: _Seconds = 75.0
    """An idle connection is closed after this."""


class HttpGateway(Gateway):
    """A gateway whose errors have OpenAI's shape and whose routes may be guarded by keys."""

    Options = HttpOptions
    options: HttpOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._key_digests = [_digest(key) for key in read_keys(self.options)]
        self._origins = Origins(
            self.name,
            readers=self.options.cors_origins,
            with_credentials=self.options.cors_credentials,
            sockets=self.options.allowed_origins,
        )

    @classmethod
    def check(cls, options: HttpOptions) -> list[str]:
        """Return what is wrong with the sources of keys, and with origins."""
        problems = problems_of("cors_origins", options.cors_origins)
        problems += problems_of("allowed_origins", options.allowed_origins)
        if options.cors_credentials and ANY in options.cors_origins:
            problems.append(
                f'cors_credentials: true is not allowed with cors_origins = ["{ANY}"]; allowed: named origins'
            )
        try:
            read_keys(options)
        except BadInput as error:
            problems.append(error.message)
        return problems

    @classmethod
    def is_guarded(cls, options: HttpOptions) -> bool:
        """Whether any source of keys is named; one that can't be read stops the start."""
        return bool(options.api_keys or options.api_key_env or options.api_key_file)

    @property
    def header_timeout_s(self) -> float:
        """A client may take so long to send a request's head."""
        return self.options.header_timeout_s

    @property
    def keepalive_timeout_s(self) -> float:
        """An idle connection is closed after this."""
        return self.options.keepalive_timeout_s

    async def before_answer(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Say which web pages may read the answer."""
        self._origins.mark(request, response)

    def refuse_head(self, status: HTTPStatus | int, message: str) -> web.Response:
        """Render the refusal of a request whose head could not be read."""
        return Problem(int(status), message, must_close=True).response()

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer ``Expect: 100-continue``: a body that would be refused is not asked for."""
        try:
            self._authorise(request)
            expected = request.headers.get("Expect", "")
            if expected.lower() != "100-continue":
                raise Problem(417, f"Expect: {expected[:40]} came (allowed: 100-continue)")
            check_length(request, self.options.max_body_bytes)
        except Problem as problem:
            problem.must_close = True
            return problem.response()
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    @web.middleware
    async def edge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Name the request, check its key, render what goes wrong, log one line at its end."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        inbound = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = inbound if _GOOD_ID.fullmatch(inbound) else secrets.token_hex(16)
        outcome: int | str = "gone"
        try:
            response = await self._respond(request, handler)
            outcome = response.status
        finally:
            fields = {
                "id": request[REQUEST_ID],
                "route": f"{request.method} {request.path}",
                "outcome": str(request.get(FAILURE, outcome)),
                "total_s": round(loop.time() - started_at, 6),
                "bytes": request.writer.output_size,
            }
            logger.info("request ended", extra={"fields": fields})
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = self._origins.preflight(request)
            if response is None:
                self._origins.check_upgrade(request)
                self._authorise(request)
                if self.is_draining and request.path.startswith(GUARDED):
                    raise Unavailable(STOPPING)
                response = await handler(request)
        except web.HTTPException as error:
            response = _router_problem(request, error).response()
        except ConnectionError:
            raise
        except Exception as error:  # the edge: a failure of a handler becomes an answer and ends that request only
            problem = to_problem(error)
            log_failure(problem, error, request[REQUEST_ID])
            if request.writer.output_size:
                # A second head would read as more of the answer; a connection that breaks off says it is not whole.
                request[FAILURE] = problem.status
                raise ConnectionAbortedError("the answer has begun, an error can't be sent any more") from error
            response = problem.response()
        if not response.prepared:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
        return response

    def _authorise(self, request: web.Request) -> None:
        request[KEY_NAME] = ""
        if not self._key_digests or not request.path.startswith(GUARDED) or request.method == "OPTIONS":
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = _digest(key.strip())
        # Every key is compared, so that the time tells nothing of which one came close.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise Problem(
                401,
                "a valid API key is needed, as the header 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
                must_close=request.can_read_body,
            )
        request[KEY_NAME] = f"{self.name}#{matches.index(True)}"


def log_failure(problem: Problem, error: Exception, request_id: str) -> None:
    """Log a failure that is ours; with a traceback where it was not foreseen, and without what the client was told."""
    if problem.status >= 500:
        unforeseen = None if isinstance(error, OmniBusError) else error
        fields = {"id": request_id, "status": problem.status, "kind": type(error).__name__}
        logger.error("request failed", exc_info=unforeseen, extra={"fields": fields})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(options: HttpOptions) -> list[str]:
    """Return all keys that the options name.

    Raises:
        BadInput: a named source is not there or holds no key.
    """
    keys = list(options.api_keys)
    if options.api_key_env:
        found = [key.strip() for key in os.environ.get(options.api_key_env, "").split(",") if key.strip()]
        if not found:
            message = f"api_key_env: the environment has no key in {options.api_key_env}"
            raise BadInput(message, field="api_key_env")
        keys += found
    if options.api_key_file:
        try:
            lines = Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            message = f"api_key_file: {options.api_key_file} can't be read: {reason}"
            raise BadInput(message, field="api_key_file") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise BadInput(f"api_key_file: {options.api_key_file} holds no key", field="api_key_file")
        keys += found
    return keys


def _router_problem(request: web.Request, error: web.HTTPException) -> Problem:
    """Turn the router's own refusals (404, 405 and their like) into the envelope."""
    must_close = request.can_read_body
    path = request.path[:200]
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.method} {path}: method not allowed (allowed: {allowed})"
            return Problem(405, message, headers={"Allow": allowed}, must_close=must_close)
        case web.HTTPNotFound():
            return Problem(404, f"{request.method} {path}: no such route", must_close=must_close)
        case _:
            return Problem(error.status, error.reason, must_close=must_close)


# --- bodies -------------------------------------------------------------------------------------------------


def check_length(request: web.Request, max_bytes: int) -> None:
    """Refuse a body that says itself that it is too large.

    Raises:
        Problem: 413.
    """
    length = request.content_length
    if length is not None and length > max_bytes:
        raise _too_large(f"{length}", max_bytes)


def _too_large(size: str, max_bytes: int) -> Problem:
    return Problem(413, f"body: {size} bytes came (allowed: at most {max_bytes})", must_close=True)


async def read_body(request: web.Request, options: HttpOptions) -> bytes:
    """Read the whole body within the gateway's limits of size and time.

    Raises:
        Problem: 413, 408 for a sender that stalls, 400 for bytes that break HTTP or their content encoding.
    """
    check_length(request, options.max_body_bytes)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        message = f"Content-Encoding: {encoding[:40]} came (allowed: {', '.join(ENCODINGS)})"
        raise Problem(400, message, must_close=request.can_read_body)
    body = bytearray()
    now = asyncio.get_running_loop().time
    ends_at = now() + options.body_total_timeout_s
    try:
        async with asyncio.timeout(options.body_timeout_s) as limit:
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > options.max_body_bytes:
                    raise _too_large(f"more than {options.max_body_bytes}", options.max_body_bytes)
                limit.reschedule(min(ends_at, now() + options.body_timeout_s))
    except TimeoutError:
        length = request.content_length
        of = f" of {length}" if length is not None else ""
        message = f"body: {len(body)}{of} bytes came, then nothing in time (allowed: {options.body_timeout_s:g} s)"
        raise Problem(408, message, must_close=True) from None
    except web.RequestPayloadError as error:
        raise Problem(400, "body: it breaks HTTP or its content encoding", must_close=True) from error
    return bytes(body)


async def read_json(request: web.Request, options: HttpOptions) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        Problem: another content type or malformed JSON (400), and what `read_body` raises.
    """
    if request.content_type != "application/json":
        came = request.headers.get("Content-Type", "")[:100] or "none"
        message = f"Content-Type: {came} came (allowed: application/json)"
        raise Problem(400, message, must_close=request.can_read_body)
    body = await read_body(request, options)
    num_marks = body.count(b",") + body.count(b"[") + body.count(b"{")
    if num_marks > MAX_JSON_MARKS:
        raise Problem(400, f"body: {num_marks} commas and brackets came (allowed: at most {MAX_JSON_MARKS})")
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(
            400, f"body: {error} after {len(body)} bytes" if "truncated" in str(error) else f"body: {error}"
        ) from None
    except RecursionError:
        raise Problem(400, "body: JSON is nested too deeply") from None
    if not isinstance(document, dict):
        raise Problem(400, f"body: a JSON {_json_kind(document)} came (allowed: an object)")
    return document


def _json_kind(value: Any) -> str:
    match value:
        case list():
            return "array"
        case str():
            return "string"
        case None:
            return "null"
        case bool():
            return "boolean"
        case _:
            return "number"


# --- answers ------------------------------------------------------------------------------------------------


def json_response(document: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a JSON answer."""
    body = msgspec.json.encode(document)
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8", headers=headers)


class EventStream:
    """Server-sent events; the response begins with the first one, so that an earlier failure has a real status.

    `send` returns when the client's connection has room again: whoever makes the next event after that is as slow as
    its reader.
    """

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # proxies that buffer would turn a stream into a lump
                "X-Request-Id": request[REQUEST_ID],
            }
        )

    @property
    def has_begun(self) -> bool:
        """Status and headers are sent."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Send ``data: …`` and wait until the client has taken enough of what came before.

        Raises:
            ConnectionError: the client is gone, or took nothing for `write_timeout_s`.
        """
        if not self.has_begun:
            await self.response.prepare(self._request)
        event = b"data: " + data + b"\n\n"
        transport = self._request.transport
        if transport is not None and len(event) < WRITE_BUFFER_BYTES and not transport.get_write_buffer_size():
            # As nothing waits for the client, this one has room and can't wait: no timer is needed.
            await self.response.write(event)
            return
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write(event)
                await self._request.writer.drain()
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"the client took nothing for {self._write_timeout_s:g} s") from None

    async def end(self) -> None:
        """End the response well."""
        await self.response.write_eof()

    async def fail(self, error: Exception) -> None:
        """Send one error event and close: after it comes no mark of success."""
        problem = to_problem(error)
        log_failure(problem, error, self._request[REQUEST_ID])
        self._request[FAILURE] = problem.status
        self.response.force_close()
        await self.send(msgspec.json.encode(problem.document))
        await self.response.write_eof()
