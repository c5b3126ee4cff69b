"""Broken HTTP: raw bytes that break the protocol in every known way, and JSON bodies of the wrong kind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gzip
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from loads.chats import CHAT

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

ANSWER_S = 30.0
"""A server that neither answers nor closes for so long hangs."""

AT_ONCE = 128
TIMEOUTS = "header_timeout_s = 0.5\nbody_timeout_s = 0.5\nkeepalive_timeout_s = 0.5"
"""For the gateway's table, since what is cut off is waited for."""

MAX_READ = 1 << 20
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "modalities": ["text"], "max_tokens": 3}
SECRET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""A request inside of what should be another's body; its answer would show that it was taken for one of its own."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
TRACES = (b"Traceback (most recent call last)", b'.py", line ')


class Input(NamedTuple):
    """What is sent on one connection."""

    data: bytes
    is_cut: bool = False
    """The client breaks the connection instead of waiting for an answer."""
    max_answers: int = 1
    """More answers than this mean that a part of the input was taken for a request of its own."""


Make: TypeAlias = "Callable[[Random], Input]"


class Tally:
    """What inputs of one kind came to."""

    def __init__(self) -> None:
        self.num_tried = 0
        self.statuses: Counter[int] = Counter()
        self.num_closed = 0
        """Connections that the server closed without an answer, or that the client broke."""
        self.broken: list[str] = []

    def take(self, sent: Input, answer: bytes) -> None:
        """Judge an answer."""
        self.num_tried += 1
        statuses = [int(found) for found in _STATUS.findall(answer)]
        self.statuses.update(statuses)
        self.num_closed += not statuses
        if any(status >= 500 for status in statuses):
            self._break("a server's error", sent, answer)
        elif any(trace in answer for trace in TRACES):
            self._break("a traceback", sent, answer)
        elif len(statuses) > sent.max_answers:
            self._break("a request was smuggled", sent, answer)

    def hung(self, sent: Input) -> None:
        """Note that nothing came at all."""
        self.num_tried += 1
        self._break("no end", sent, b"")

    def _break(self, what: str, sent: Input, answer: bytes) -> None:
        self.broken.append(f"{what}: {sent.data[:300]!r} -> {answer[:300]!r}")


async def fuzz(url: str, make: Make, count: int, dice: Random) -> Tally:
    """Send so many inputs to a server, some at once."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    tally = Tally()
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            sent = make(dice)
            try:
                tally.take(sent, await exchange(address.hostname or "", address.port or 0, sent))
            except TimeoutError:
                tally.hung(sent)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return tally


async def exchange(host: str, port: int, sent: Input) -> bytes:
    """Send an input; return what comes until the server closes.

    Raises:
        TimeoutError: it does not.
    """
    reader, writer = await asyncio.open_connection(host, port)
    found = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(sent.data)
            if sent.is_cut:
                return b""
            async with asyncio.timeout(ANSWER_S):
                while len(found) < MAX_READ and (data := await reader.read(65536)):
                    found += data
        return bytes(found)
    finally:
        writer.transport.abort()


# --- JSON bodies ----------------------------------------------------------------------------------------------


_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, -0.0, 0.5, "", "\0", "x" * 5000, "\ud800",
    "../../etc/passwd", "${jndi:ldap://x}", [], [[]], [None], {}, {"": {}}, {"type": "image_url"}, "hi", ["text"],
)  # fmt: skip
_NAMES = (
    "messages", "model", "stream", "stream_options", "modalities", "audio", "max_tokens", "temperature", "top_p",
    "top_k", "seed", "stop", "n", "tools", "tool_choice", "response_format", "logit_bias", "extra_body",
    "sampling_params_list", "request_id", "voice", "speed", "speaker", "user", "logprobs", "stop_token_ids",
    "presence_penalty", "metadata", "",
)  # fmt: skip
"""Not those that make an answer long: such a request is no broken one."""


def json_body(dice: Random) -> Input:
    """Return a chat request whose body is wrong, or odd, somewhere."""
    body = json.loads(json.dumps(GOOD))
    for _ in range(dice.choice((1, 1, 2, 4))):
        _spoil(body, dice)
    document: Any = body if dice.random() < 0.95 else dice.choice(_ODD)
    data = json.dumps(document, ensure_ascii=dice.random() < 0.7).encode(errors="surrogatepass")
    if dice.random() < 0.25:
        data = mutated(data, dice)
    return Input(head(f"Content-Length: {len(data)}") + data)


def _spoil(value: Any, dice: Random) -> None:
    """Change something somewhere inside."""
    if isinstance(value, dict):
        name = dice.choice([*value, *_NAMES])
        if isinstance(value.get(name), dict | list) and value[name] and dice.random() < 0.6:
            _spoil(value[name], dice)
        elif dice.random() < 0.1 and name in value:
            del value[name]
        else:
            value[name] = copy.deepcopy(dice.choice(_ODD))
    elif isinstance(value, list):
        i = dice.randrange(len(value))
        if isinstance(value[i], dict | list) and value[i] and dice.random() < 0.7:
            _spoil(value[i], dice)
        else:
            value[i] = copy.deepcopy(dice.choice(_ODD))


# --- raw bytes ------------------------------------------------------------------------------------------------


def head(*lines: str, method: str = "POST", path: str = CHAT, version: str = "HTTP/1.1") -> bytes:
    """Return a request's head that asks for the connection to be closed."""
    fixed = ("Host: localhost", "Content-Type: application/json", "Connection: close")
    return "\r\n".join([f"{method} {path} {version}", *fixed, *lines, "", ""]).encode("utf-8", "surrogateescape")


BODY = json.dumps(GOOD).encode()
CHUNKED = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
LENGTH = f"Content-Length: {len(BODY)}"
TE = "Transfer-Encoding: chunked"


def shapes() -> dict[str, Input]:
    """Return inputs that are wrong in known ways, by what is wrong."""
    behind = str(len(SECRET))
    found = {
        "length and chunks": head(LENGTH, TE) + b"0\r\n\r\n" + SECRET,
        "chunks and length": head(TE, "Content-Length: 4") + b"0\r\n\r\n" + SECRET,
        "two lengths": head("Content-Length: 0", f"Content-Length: {behind}") + SECRET,
        "two lengths in one": head(f"Content-Length: 0, {behind}") + SECRET,
        "signed length": head("Content-Length: +0") + SECRET,
        "negative length": head("Content-Length: -1") + BODY,
        "length in words": head("Content-Length: ten") + BODY,
        "length with a blank": head("Content-Length : 0") + SECRET,
        "hexadecimal length": head("Content-Length: 0x10") + BODY,
        "huge length": head("Content-Length: " + "9" * 400) + BODY,
        "length in other digits": head("Content-Length: \u0663") + BODY,
        "spelt differently": head("Transfer-Encoding: xchunked") + CHUNKED,
        "two encodings": head("Transfer-Encoding: chunked, identity") + CHUNKED,
        "encoding twice": head(TE, "Transfer-Encoding: identity") + CHUNKED,
        "tab in the encoding": head("Transfer-Encoding:\tchunked\t") + CHUNKED,
        "encoding in HTTP/1.0": head(TE, version="HTTP/1.0") + b"0\r\n\r\n" + SECRET,
        "folded header": head("Transfer-Encoding:\r\n chunked") + CHUNKED,
        "chunk size not hexadecimal": head(TE) + b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
        "chunk size signed": head(TE) + b"-1\r\n" + BODY,
        "chunk size huge": head(TE) + b"f" * 40 + b"\r\n" + BODY,
        "chunk size with 0x": head(TE) + b"0x5\r\nabcde\r\n0\r\n\r\n",
        "chunk without end": head(TE) + b"5\r\nabcdefgh",
        "chunk with bare line feeds": head(TE) + b"0\n\n" + SECRET,
        "long chunk extension": head(TE) + b"5;" + b"x" * 20_000 + b"\r\nabcde\r\n0\r\n\r\n",
        "trailer with a length": head(TE) + b"0\r\nContent-Length: 5\r\n\r\n",
        "bare line feeds": head(LENGTH).replace(b"\r\n", b"\n") + BODY,
        "carriage returns only": head(LENGTH).replace(b"\r\n", b"\r") + BODY,
        "NUL in a header": head("X-A: a\0b", LENGTH) + BODY,
        "NUL in the path": head(LENGTH, path="/v1/\0") + BODY,
        "line feed in a header": head("X-A: a\nContent-Length: 0", LENGTH) + BODY,
        "header without a colon": head("nonsense", LENGTH) + BODY,
        "header without a name": head(": nothing", LENGTH) + BODY,
        "header name with a blank": head("X A: b", LENGTH) + BODY,
        "long header": head("X-A: " + "a" * 100_000, LENGTH) + BODY,
        "many headers": head(*[f"X-{i}: a" for i in range(20_000)], LENGTH) + BODY,
        "long path": head(LENGTH, path="/" + "a" * 100_000) + BODY,
        "path that climbs": head(path="/v1/models/../../../etc/passwd", method="GET"),
        "path that is encoded twice": head(path="/v1/models/%252e%252e%00", method="GET"),
        "path that is no UTF-8": head(path="/v1/models/%ff%fe", method="GET"),
        "absolute path": head(LENGTH, path="http://elsewhere/v1/chat/completions") + BODY,
        "path of CONNECT": head(method="CONNECT", path="elsewhere:443"),
        "asterisk": head(method="OPTIONS", path="*"),
        "no path": b"POST HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "no version": b"GET /version\r\n\r\n",
        "future version": head(LENGTH, version="HTTP/9.9") + BODY,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        "TLS": bytes.fromhex("16030100c8010000c40303") + b"\x11" * 180,
        "unknown method": head(LENGTH, method="BREW") + BODY,
        "method with odd letters": head(LENGTH, method="PO\x7fST") + BODY,
        "two hosts": head("Host: y", LENGTH) + BODY,
        "no host": b"GET /version HTTP/1.1\r\n\r\n",
        "WebSocket where there is none": head("Upgrade: websocket", "Sec-WebSocket-Version: 13", method="GET"),
        "gzip that is none": head(LENGTH, "Content-Encoding: gzip") + BODY,
        "gzip bomb": _compressed(b" " * 40_000_000),
        "unknown encoding": head(LENGTH, "Content-Encoding: br") + BODY,
        "no body": head(LENGTH),
        "half a body": head(LENGTH) + BODY[:10],
        "more than the body": head(LENGTH) + BODY + b"x" * 1000,
        "another type": head(LENGTH).replace(b"application/json", b"text/plain") + BODY,
        "type with odd parameters": head(LENGTH).replace(b"application/json", b"application/json; charset=\xff;;=")
        + BODY,
        "expectation": head("Expect: 100-continue, a-miracle", LENGTH) + BODY,
        "nested deeply": _json(b'{"messages": ' + b"[" * 100_000),
        "many values": _json(b'{"messages": [' + b"[]," * 1_100_000 + b"[]]}"),
        "not UTF-8": _json(b'{"messages": "\xff\xfe"}'),
        "byte order mark": _json(b"\xef\xbb\xbf" + BODY),
        "nothing": b"",
        "blank lines": b"\r\n" * 1000,
    }
    return {what: Input(data) for what, data in found.items()}


def _json(body: bytes) -> bytes:
    return head(f"Content-Length: {len(body)}") + body


def _compressed(body: bytes) -> bytes:
    packed = gzip.compress(body, 1)
    return head(f"Content-Length: {len(packed)}", "Content-Encoding: gzip") + packed


_SHAPES = list(shapes().values())
_SMALL = [shape for shape in _SHAPES if len(shape.data) < 30_000]


def raw(dice: Random) -> Input:
    """Return a broken request: one of the known shapes, whole, cut or mutated, or two of them, or noise."""
    roll = dice.random()
    if roll < 0.01:
        return dice.choice(_SHAPES)
    data = dice.choice(_SMALL).data if roll < 0.85 else head(LENGTH) + BODY
    if roll > 0.95:
        return Input(dice.randbytes(dice.randrange(1, 400)))
    if dice.random() < 0.6:
        data = mutated(data, dice)
    if dice.random() < 0.2:
        data = data[: dice.randrange(len(data) + 1)]
    is_twice = dice.random() < 0.1
    # What is mutated may well be two good requests; only the known shapes tell smuggling from pipelining.
    is_known = any(data is shape.data for shape in _SMALL)
    return Input(data * 2 if is_twice else data, dice.random() < 0.1, 1 if is_known and not is_twice else 100)


def mutated(data: bytes, dice: Random) -> bytes:
    """Return bytes with a few changed, inserted, repeated or removed."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5))):
        if not changed:
            break
        at = dice.randrange(len(changed))
        match dice.randrange(5):
            case 0:
                changed[at] = dice.randrange(256)
            case 1:
                changed[at:at] = dice.choice((b"\r\n", b"\n", b"\0", b" ", b":", b"\xff", b'"', b"{", b"[", b"0"))
            case 2:
                del changed[at : at + dice.randrange(1, 20)]
            case 3:
                changed[at:at] = changed[at : at + dice.randrange(1, 50)]
            case _:
                changed[at] ^= 1 << dice.randrange(8)
    return bytes(changed)
