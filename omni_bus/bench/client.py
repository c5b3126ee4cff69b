"""The HTTP client: one server of models, asked as its clients would ask it."""

from __future__ import annotations

import asyncio
import io
import socket
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec

from omni_bus.bench.dialects import Form
from omni_bus.bench.occupancy import Occupancy, from_health, from_load, from_metrics
from omni_bus.bench.record import EMPTY
from omni_bus.errors import BadInput, Unreachable, unknown_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

    from omni_bus.bench.dialects import Dialect, Reader
    from omni_bus.bench.record import Record

    Pace = Callable[[int], Awaitable[None]]
    """Called with the number of pieces that were just read; reading goes on when it returns."""

SLOW_BUFFER_BYTES = 4096
"""What a slow reader's socket takes in advance; the kernel's default would hide the slowness for megabytes."""
SLOW_READ_BYTES = 256
"""About one chunk with one token."""

_ASIDE = aiohttp.ClientTimeout(total=10)
"""For everything that is not measured."""


class Server:
    """A server and the connections to it, as a context.

    Args:
        base_url: scheme, host and port; a trailing ``/v1`` is what OpenAI's clients call so, and means the same.
        dialect: how its route is spoken.
        path: of the route.
        headers: sent with every request.
        request_timeout_s: after which an answer is given up.
    """

    def __init__(
        self, base_url: str, dialect: Dialect, path: str, headers: Mapping[str, str], request_timeout_s: float
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._dialect = dialect
        self._url = f"{self.base_url}{path}"
        self._headers = dict(headers)
        self._request_timeout_s = request_timeout_s

    async def __aenter__(self) -> Self:
        self._http = self._session()
        self._slow_http = self._session(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_small_socket),
            read_bufsize=SLOW_BUFFER_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.close()
        await self._slow_http.close()

    def _session(self, **options: Any) -> aiohttp.ClientSession:
        options.setdefault("connector", aiohttp.TCPConnector(limit=0))
        # A request's own time limit is set where it is sent.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return aiohttp.ClientSession(timeout=timeout, headers=self._headers, **options)

    # --- what is measured -------------------------------------------------------------------------------------

    async def ask(
        self,
        record: Record,
        body: dict[str, Any] | Form,
        clock: Callable[[], float],
        *,
        keeps_answer: bool = False,
        pace: Pace | None = None,
        leaves_after_s: float | None = None,
    ) -> None:
        """Send a request and read its answer; the record tells how that went, whatever happened.

        Args:
            record: of this request.
            body: what is sent.
            clock: seconds of the phase.
            keeps_answer: whether the text or the sound is looked at later.
            pace: slows the reading down.
            leaves_after_s: break the connection so long after sending.
        """
        sent = self._encoded(body)
        reader = self._dialect.reader(record, keeps_answer=keeps_answer)
        record.sent_at = clock()
        try:
            async with asyncio.timeout(leaves_after_s):
                await self._exchange(record, sent, reader, clock, pace)
        except TimeoutError:
            record.has_left = True
        finally:
            record.ended_at = clock()

    def _encoded(self, body: dict[str, Any] | Form) -> dict[str, Any]:
        """Return a body as aiohttp's options."""
        if isinstance(body, Form):
            form = aiohttp.FormData(body.fields)
            form.add_field(
                "file", io.BytesIO(body.file), filename=body.file_name, content_type="application/octet-stream"
            )
            return {"data": form}
        # On each request, since a form has a type of its own.
        return {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json", **self._headers}}

    async def _exchange(
        self, record: Record, sent: dict[str, Any], reader: Reader, clock: Callable[[], float], pace: Pace | None
    ) -> None:
        http = self._http if pace is None else self._slow_http
        try:
            async with asyncio.timeout(self._request_timeout_s), http.post(self._url, **sent) as response:
                if response.status != 200:
                    record.fail(*_refusal(response, await response.read()))
                    return
                reader.begin(response.headers)
                while piece := await _read(response.content, pace):
                    num_pieces = reader.feed(piece, clock())
                    if pace is not None:
                        await pace(num_pieces)
        except aiohttp.ClientError as error:  # its time limits too, which are of connecting
            record.fail(type(error).__name__, str(error))
        except TimeoutError:
            record.fail("timeout", f"no whole answer within {self._request_timeout_s:g} s")
        except OSError as error:
            record.fail(type(error).__name__, str(error))
        else:
            if not reader.is_over:
                record.fail("cut", "the answer ended before it said that it was whole")
            elif not record.texts and not record.sounds and not record.output_tokens:
                record.fail(EMPTY, "neither text nor sound came")

    # --- what is not ------------------------------------------------------------------------------------------

    async def choose_model(self, wanted: str | None) -> str:
        """Return the model to ask for: the wanted one, or the first that the server lists.

        Where requests need not name one, and the server lists several, its own choice is best: that is no name.

        Raises:
            Unreachable: nothing answers there, or not as a server of models.
            UnknownName: the server lists models, and the wanted one is not among them.
            BadInput: none is wanted, and the server lists none.
        """
        names = await self._models()
        if wanted is None and not self._dialect.needs_model:
            return names[0] if len(names) == 1 else ""
        if wanted is None:
            if not names:
                raise BadInput(
                    f"--model: {self.base_url}/v1/models lists no model, so one must be named", field="--model"
                )
            return names[0]
        if names and wanted not in names:
            raise unknown_name("value of --model:", wanted, names, field="--model")
        return wanted

    async def _models(self) -> list[str]:
        url = f"{self.base_url}/v1/models"
        try:
            async with self._http.get(url, timeout=_ASIDE) as response:
                if response.status in (401, 403):
                    raise Unreachable(
                        f"--base-url {self.base_url}: {response.status} came for {url} (allowed: a key that it "
                        'knows, in OPENAI_API_KEY or with --header "Authorization=Bearer KEY")',
                        field="--base-url",
                    )
                if response.status != 200:
                    return []
                document = await response.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(
                f"--base-url {self.base_url}: {_words(error)} (allowed: the address of a running server, such as "
                "http://127.0.0.1:8000)",
                field="--base-url",
            ) from error
        try:
            return [card["id"] for card in document["data"]]
        except (KeyError, TypeError):
            return []

    async def count_tokens(self, model: str, text: str) -> int | None:
        """Return the tokens of a text as vLLM's ``/tokenize`` counts them; None if the server has no such route."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        document = await self._document("post", "/tokenize", **self._encoded(body))
        count = document.get("count") if isinstance(document, dict) else None
        return count if isinstance(count, int) else None

    async def occupancy(self) -> Occupancy | None:
        """Return what the server says of the requests that it holds; None if it says nothing."""
        if (found := from_health(await self._document("get", "/health"))) is not None:
            return found
        if (found := from_metrics(await self._text("/metrics"))) is not None:
            return found
        return from_load(await self._document("get", "/load"))

    async def _document(self, method: str, path: str, **options: Any) -> Any:
        text = await self._text(path, method, **options)
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return None

    async def _text(self, path: str, method: str = "get", **options: Any) -> str:
        """Return an answer's body, empty for whatever is no answer: these routes are there or they are not."""
        url = f"{self.base_url}{path}"
        try:
            async with self._http.request(method, url, timeout=_ASIDE, **options) as response:
                return await response.text() if response.status in (200, 503) else ""
        except (aiohttp.ClientError, OSError, UnicodeDecodeError):
            return ""


async def _read(content: aiohttp.StreamReader, pace: Pace | None) -> bytes:
    """Return what is there, once something is; little of it to one that reads slowly; nothing at the end."""
    return await (content.readany() if pace is None else content.read(SLOW_READ_BYTES))


def _small_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    # Before it connects, since the window is agreed on then.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
    made.setblocking(False)
    return made


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> tuple[str, str]:
    """Return name and message of an answer that is no 200: the status, and the error's type where it has one."""
    try:
        error = msgspec.json.decode(body)["error"]
        return f"{response.status} {error.get('type') or response.reason}", str(error.get("message", ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return f"{response.status} {response.reason}", body[:200].decode(errors="replace")


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer within 10 s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't connect: {error.os_error.strerror or error.os_error}"
    return f"{type(error).__name__}: {error}"
