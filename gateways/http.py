"""What HTTP gateways share: keys, limits, request ids and errors."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec
from aiohttp import web

from gateways import hosts, websockets
from gateways.hosts import Hosts
from gateways.http_counts import HttpCounts
from gateways.json_body import HEAVY_BYTES, MAX_JSON_WEIGHT, BodyBuffer, JsonWeight, Pace
from gateways.keys import KeyRing, KeySource, sources_of
from gateways.origins import ANY, Origins, problems_of
from gateways.problems import Problem, to_problem
from omni_bus.errors import BadInput, DeadlineExceeded, OmniBusError, Refused, Unavailable
from omni_bus.gateway import STOPPING, Gateway
from omni_bus.runtime.watch import FileWatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from http import HTTPStatus

    from omni_bus.config.schema import CallerConfig

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
KEY_NAME = web.RequestKey("key_name", str)
"""Who sent the request, for fairness among callers; never the key. Empty where no key is needed or none came."""

BODY_BYTES = web.RequestKey("body_bytes", int)
"""Length of the body, once it was read."""

FAILURE = web.RequestKey("failure", int)
"""The status of an error that came after the response had begun."""

ENCODINGS = ("identity", "gzip", "deflate")
"""Content encodings of request bodies; aiohttp passes others on undecoded."""

OPEN = frozenset({"/health", "/healthz", "/load", "/ping", "/version", "/metrics", "/openapi.json"})
"""Paths that want no key and are served while the gateway drains; a WebSocket wants one on every path."""

SCHEMES = ("bearer", "api-key")
"""Of the header ``Authorization``; the second is the robots' clients' (OpenPI)."""

MAX_TIMEOUT_S = 86400.0
"""What a caller may give as its time limit."""

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
SESSION_HEADER = "X-Session-ID"
MAX_SESSION_CHARACTERS = 256
_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table that every HTTP gateway has."""

    api_keys: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """Any of these opens the gateway, as ``Authorization: Bearer KEY``, each for a caller of its own; so do the keys of
    the deployment's callers. With none from any source it is open to all."""

    api_key_env: str = ""
    """Name of an environment variable with one more key, or several with commas between."""

    api_key_file: str = ""
    """File with more keys, one a line; read again when it changes."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may send requests and read answers (CORS), or ``"*"`` alone; by default none."""

    cors_credentials: bool = False
    """Lets these pages send cookies and logins of the browser, which a proxy before the gateway may need."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may open WebSockets besides the gateway's own, or ``"*"`` alone."""

    allowed_hosts: tuple[str, ...] = ()
    """Names by which the gateway may be addressed (``Host``) besides addresses, localhost and the name it listens on,
    or ``"*"`` alone; with none, and with API keys, any."""

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
        self._keys = KeyRing(sources_of(_own_keys(self.options), self.callers))
        self._watch = self._watched()
        self._counts = HttpCounts()
        self._origins = Origins(
            self.name,
            readers=self.options.cors_origins,
            with_credentials=self.options.cors_credentials,
            sockets=self.options.allowed_origins,
        )
        self._hosts = Hosts(self.name, named=self.options.allowed_hosts, bound=self.host)

    @classmethod
    def check(cls, options: HttpOptions) -> list[str]:
        """Return what is wrong with the sources of keys, with origins and with hosts."""
        problems = problems_of("cors_origins", options.cors_origins)
        problems += problems_of("allowed_origins", options.allowed_origins)
        problems += hosts.problems_of("allowed_hosts", options.allowed_hosts)
        if options.cors_credentials and ANY in options.cors_origins:
            problems.append(
                f'cors_credentials: true is not allowed with cors_origins = ["{ANY}"]; allowed: named origins'
            )
        try:
            _own_keys(options).read()
        except BadInput as error:
            problems.append(error.message)
        return problems

    @classmethod
    def is_guarded(cls, options: HttpOptions, callers: Mapping[str, CallerConfig]) -> bool:
        """Whether any source of keys is named; one that can't be read stops the start."""
        return any(source.keys or source.env or source.file for source in sources_of(_own_keys(options), callers))

    def close(self) -> None:
        """Watch the key files no more."""
        if self._watch is not None:
            self._watch.close()

    def _watched(self) -> FileWatch | None:
        if not self._keys.files:
            return None
        try:
            return FileWatch(self._keys.files, self._keys.reload)
        except OSError as error:
            fields = {"gateway": self.name, "why": str(error)}
            logger.warning("key files can't be watched: changes need a restart", extra={"fields": fields})
            return None

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

    async def expect(self, request: web.Request, *, max_bytes: int = 0) -> web.StreamResponse | None:
        """Answer ``Expect: 100-continue``: a body that would be refused is not asked for.

        Args:
            request: whose body has not come.
            max_bytes: limit of the route's body, where it is not the gateway's.
        """
        try:
            self._authorise(request)
            expected = request.headers.get("Expect", "")
            if expected.lower() != "100-continue":
                raise Problem(417, f"Expect: {expected[:40]} came (allowed: 100-continue)")
            check_length(request, max_bytes or self.options.max_body_bytes)
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
        self._counts.num_open += 1
        try:
            response = await self._respond(request, handler)
            outcome = response.status
        finally:
            told = str(request.get(FAILURE, outcome))
            self._counts.num_open -= 1
            self._counts.end(request, told)
            fields = {
                "id": request[REQUEST_ID],
                "route": f"{request.method} {request.path}",
                "outcome": told,
                "total_s": round(loop.time() - started_at, 6),
                "bytes": request.writer.output_size,
            }
            logger.info("request ended", extra={"fields": fields})
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._hosts.check(request, is_guarded=self._keys.is_guarded)
            response = self._origins.preflight(request)
            if response is None:
                self._origins.check_upgrade(request)
                self._authorise(request)
                if self.is_draining and not is_open(request):
                    raise Unavailable(STOPPING)
                response = await handler(request)
        except web.HTTPException as error:
            response = _router_problem(request, error).response()
        except ConnectionError:
            raise
        except Exception as error:  # the edge: a failure of a handler becomes an answer and ends that request only
            problem = to_problem(error)
            log_failure(problem, error, request[REQUEST_ID])
            if (socket := request.get(websockets.SOCKET)) is not None:
                request[FAILURE] = problem.status
                await websockets.close(socket, problem)
                return socket
            if request.writer.output_size:
                # A second head would read as more of the answer; a connection that breaks off says it is not whole.
                request[FAILURE] = problem.status
                raise ConnectionAbortedError("the answer has begun, an error can't be sent any more") from error
            response = problem.response()
        if not response.prepared:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
        return response

    def _authorise(self, request: web.Request) -> None:
        caller = self.caller_of(request)
        request[KEY_NAME] = caller or ""
        if caller is None and request.method != "OPTIONS" and not is_open(request):
            ways = "the header 'Authorization: Bearer KEY'"
            if websockets.is_upgrade(request):
                ways += f" or the subprotocol '{websockets.KEY_PROTOCOL}KEY'"
            raise Problem(
                401,
                f"a valid API key is needed, as {ways}",
                headers={"WWW-Authenticate": "Bearer"},
                must_close=request.can_read_body,
            )

    def caller_of(self, request: web.Request) -> str | None:
        """Return who sends a request: a caller's name, empty where no key is needed; None for no valid key."""
        if not self._keys.is_guarded:
            return ""
        owners = [owner for key in keys_of(request) if (owner := self._keys.owner(key)) is not None]
        return owners[0] if owners else None


def keys_of(request: web.Request) -> list[str]:
    """Return the keys that a request came with, whatever they are good for."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    keys = [key.strip()] if scheme.lower() in SCHEMES else []
    if websockets.is_upgrade(request):
        prefix = websockets.KEY_PROTOCOL
        keys += [name.removeprefix(prefix) for name in websockets.offered(request) if name.startswith(prefix)]
    return keys


def is_open(request: web.Request) -> bool:
    """Whether a request wants no key, whoever sends it."""
    return request.path in OPEN and not websockets.is_upgrade(request)


def log_failure(problem: Problem, error: Exception, request_id: str) -> None:
    """Log a failure that is ours; with a traceback where it was not foreseen, and without what the client was told.

    To refuse for want of capacity or time is no failure, and the request's own line tells of it.
    """
    if problem.status >= 500 and not isinstance(error, Refused | DeadlineExceeded):
        unforeseen = None if isinstance(error, OmniBusError) else error
        fields = {"id": request_id, "status": problem.status, "kind": type(error).__name__}
        logger.error("request failed", exc_info=unforeseen, extra={"fields": fields})


def _own_keys(options: HttpOptions) -> KeySource:
    return KeySource("api_key", "", options.api_keys, options.api_key_env, options.api_key_file)


class Terms(TypedDict):
    """What `BusClient.submit` is told of a request besides its contents."""

    key: str
    timeout_s: float | None
    input_bytes: int
    session: str


def terms_of(request: web.Request) -> Terms:
    """Return who asks, and what the request's headers say.

    That is how long the answer may take (``X-Request-Timeout``, seconds) and whose replicas it is to have
    (``X-Session-ID``); besides, how much waits with it.

    Raises:
        Problem: 400, the time limit or the session can't be read.
    """
    return Terms(
        key=request[KEY_NAME],
        timeout_s=_timeout_s(request),
        input_bytes=request.get(BODY_BYTES, 0),
        session=_session(request),
    )


def _session(request: web.Request) -> str:
    name = request.headers.get(SESSION_HEADER, "")
    # Bytes that are no UTF-8 come as halves of surrogate pairs, which are not printable and have no form on the wire.
    if len(name) > MAX_SESSION_CHARACTERS or not name.isprintable():
        allowed = f"1 to {MAX_SESSION_CHARACTERS} printable characters"
        raise Problem(400, f"{SESSION_HEADER}: {name[:40]} came (allowed: {allowed})", param=SESSION_HEADER)
    return name


def _timeout_s(request: web.Request) -> float | None:
    text = request.headers.get("X-Request-Timeout")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        allowed = f"seconds, above 0 and at most {MAX_TIMEOUT_S:g}"
        raise Problem(400, f"X-Request-Timeout: {text[:40]} came (allowed: {allowed})", param="X-Request-Timeout")
    return seconds


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
        raise too_large(f"{length}", max_bytes)


def too_large(size: str, max_bytes: int) -> Problem:
    """Return the refusal of a body of so many bytes."""
    return Problem(413, f"body: {size} bytes came (allowed: at most {max_bytes})", must_close=True)


async def read_body(request: web.Request, options: HttpOptions) -> bytes:
    """Read the whole body within the gateway's limits of size and time.

    Raises:
        Problem: 413, 408 for a sender that stalls, 400 for bytes that break HTTP or their content encoding.
    """
    return (await _read(request, options, None)).to_bytes()


async def _read(request: web.Request, options: HttpOptions, weight: JsonWeight | None) -> BodyBuffer:
    check_length(request, options.max_body_bytes)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        message = f"Content-Encoding: {encoding[:40]} came (allowed: {', '.join(ENCODINGS)})"
        raise Problem(400, message, must_close=request.can_read_body)
    body = BodyBuffer(request.content_length if encoding == "identity" else None)
    pace = Pace.of_running_loop()
    now = asyncio.get_running_loop().time
    ends_at = now() + options.body_total_timeout_s
    try:
        async with asyncio.timeout(min(options.body_timeout_s, options.body_total_timeout_s)) as limit:
            async for piece in request.content.iter_any():
                if body.num_bytes >= HEAVY_BYTES:
                    await pace.turn()
                began_at = perf_counter()
                if body.num_bytes + len(piece) > options.max_body_bytes:
                    raise too_large(f"more than {options.max_body_bytes}", options.max_body_bytes)
                body.add(piece)
                if weight is not None:
                    weight.add(piece)
                pace.spend(perf_counter() - began_at)
                limit.reschedule(min(ends_at, now() + options.body_timeout_s))
    except TimeoutError:
        length = request.content_length
        of = f" of {length}" if length is not None else ""
        message = f"body: {body.num_bytes}{of} bytes came, then nothing in time (allowed: {options.body_timeout_s:g} s)"
        raise Problem(408, message, must_close=True) from None
    except web.RequestPayloadError as error:
        raise Problem(400, "body: it breaks HTTP or its content encoding", must_close=True) from error
    request[BODY_BYTES] = body.num_bytes
    return body


async def read_json(request: web.Request, options: HttpOptions) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        Problem: another content type or malformed JSON (400), and what `read_body` raises.
    """
    if request.content_type != "application/json":
        came = request.headers.get("Content-Type", "")[:100] or "none"
        message = f"Content-Type: {came} came (allowed: application/json)"
        raise Problem(400, message, must_close=request.can_read_body)
    weight = JsonWeight()
    body = await _read(request, options, weight)
    if weight.total > MAX_JSON_WEIGHT:
        raise Problem(
            400,
            f"body: JSON of weight {weight.total} came (allowed: at most {MAX_JSON_WEIGHT}; a comma weighs 1, "
            "an opening bracket or brace 3, a colon 5, twenty digits in a row 12)",
        )
    try:
        document = await body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(
            400, f"body: {error} after {body.num_bytes} bytes" if "truncated" in str(error) else f"body: {error}"
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
