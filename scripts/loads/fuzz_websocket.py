"""Broken WebSockets (RFC 6455) for any route: handshakes that are none, frames that break the protocol, odd texts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import struct
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from loads.fuzz_http import MAX_READ, TRACES, mutated

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

AT_ONCE = 64

QUIET_S = 1.0
"""A server that says nothing for so long waits for the rest of a frame whose length is a lie: the client leaves."""


TEXT, BINARY, CLOSE, PING, PONG, MORE = 1, 2, 8, 9, 10, 0
"""Opcodes; `MORE` continues a message."""

FAULTS_OF_THE_CALLER = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 1013, 1005})
"""Close codes with which a server may answer broken input; 1005 stands for none. 1011 is the server's own fault."""


class Tally:
    """What connections came to."""

    def __init__(self) -> None:
        self.num_tried = 0
        self.ends: Counter[str] = Counter()
        """HTTP statuses of refused handshakes, codes of closed sockets, ``cut`` for no word, ``waits`` for more."""
        self.broken: list[str] = []

    def take(self, sent: bytes, end: str, answer: bytes) -> None:
        """Judge how a connection ended."""
        self.num_tried += 1
        self.ends[end] += 1
        what = ""
        if end.startswith("HTTP 5"):
            what = "a server's error"
        elif end.startswith("close ") and int(end.split()[1]) not in FAULTS_OF_THE_CALLER:
            what = "a close code that blames the server"
        elif any(trace in answer for trace in TRACES):
            what = "a traceback"
        if what:
            self.broken.append(f"{what}: {sent[:300]!r} -> {end} {answer[:300]!r}")


class Attempt(NamedTuple):
    """What is sent on one connection."""

    handshake: bytes
    frames: bytes
    is_cut: bool


SPEECH = "/v1/audio/speech/stream"

SPEECH_OPENINGS = (
    '{"type": "session.config", "stream_audio": true, "response_format": "pcm", "split_granularity": "clause"}',
    '{"type": "session.config", "session": {"split_granularity": "sentence", "sample_rate": 8000}}',
)
SPEECH_TEXTS = (
    *SPEECH_OPENINGS,
    '{"type": "session.config", "speed": 0.25, "response_format": "opus", "word_timestamps": false}',
    '{"type": "session.config", "ref_audio": "data:audio/wav;base64,UklGRg==", "voice": {"id": "default"}}',
    '{"type": "input.text", "text": "One, two. Dr. Three? \\ud83d"}',
    '{"type": "input.text", "text": "\\u0000 \\u3002 x."}',
    '{"type": "input.done"}',
    '{"type": "input.commit"}',
    '{"type": "input.cancel"}',
    '{"type": "session.close"}',
)
"""Messages of `SPEECH`."""


async def fuzz(
    url: str,
    route: str,
    count: int,
    dice: Random,
    *,
    texts: Sequence[str] = (),
    openings: Sequence[str] = (),
    binaries: Sequence[bytes] = (),
) -> Tally:
    """Try so many connections to a route.

    Args:
        url: of the server, without a path.
        route: of the WebSocket.
        count: connections, each with one handshake and some frames.
        dice: decides.
        texts: messages that mean something to the route; they are sent whole and mutated.
        openings: messages without which the route takes no others; most connections begin with one.
        binaries: as `texts`, in binary frames.
    """
    address = urlsplit(url)
    tally = Tally()
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            attempt = make(route, dice, texts, openings, binaries)
            end, answer = await _try(address.hostname or "", address.port or 0, attempt)
            tally.take(attempt.handshake + attempt.frames, end, answer)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return tally


async def _try(host: str, port: int, attempt: Attempt) -> tuple[str, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    found = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(QUIET_S) as limit:
                writer.write(attempt.handshake)
                while b"\r\n\r\n" not in found and (data := await reader.read(65536)):
                    found += data
                writer.write(attempt.frames)
                # After what is broken comes a proper end, so that a server which saw no fault ends too.
                writer.write(b"" if attempt.is_cut else frame(CLOSE, struct.pack(">H", 1000)))
                if not attempt.is_cut:
                    while len(found) < MAX_READ and (data := await reader.read(65536)):
                        found += data
                        limit.reschedule(asyncio.get_running_loop().time() + QUIET_S)
    except TimeoutError:
        return "waits", bytes(found)
    finally:
        writer.transport.abort()
    return _end_of(bytes(found)), bytes(found)


def _end_of(answer: bytes) -> str:
    """Return how the server ended: a refusal's status, or the code of its close frame."""
    top, _, rest = answer.partition(b"\r\n\r\n")
    words = top.split()
    if len(words) < 2 or words[1] != b"101":
        return f"HTTP {words[1].decode(errors='replace')}" if len(words) > 1 else "cut"
    while len(rest) >= 2:
        opcode, length, start = rest[0] & 15, rest[1] & 127, 2
        if length > 125:
            size = 2 if length == 126 else 8
            length, start = int.from_bytes(rest[2 : 2 + size], "big"), 2 + size
        payload, rest = rest[start : start + length], rest[start + length :]
        if opcode == CLOSE:
            return f"close {int.from_bytes(payload[:2], 'big') if len(payload) >= 2 else 1005}"
    return "cut"


# --- what is sent ---------------------------------------------------------------------------------------------


def make(
    route: str, dice: Random, texts: Sequence[str], openings: Sequence[str] = (), binaries: Sequence[bytes] = ()
) -> Attempt:
    """Return one attempt: mostly a good handshake, then frames of which some are broken."""
    handshake = good_handshake(route, dice)
    if dice.random() < 0.15:
        handshake = bad_handshake(route, dice)
    parts = [_good(dice, texts) if dice.random() < 0.4 else _bad(dice, texts) for _ in range(dice.randrange(1, 5))]
    if openings and dice.random() < 0.7:
        parts.insert(0, frame(TEXT, dice.choice(openings).encode()))
    if binaries:
        found = [dice.choice(binaries) for _ in range(dice.randrange(4))]
        parts[:0] = [frame(BINARY, each if dice.random() < 0.3 else mutated(each, dice)) for each in found]
    return Attempt(handshake, b"".join(parts), dice.random() < 0.1)


def good_handshake(route: str, dice: Random) -> bytes:
    """Return a proper one."""
    key = base64.b64encode(dice.randbytes(16)).decode()
    return _head(route, f"Sec-WebSocket-Key: {key}")


def bad_handshake(route: str, dice: Random) -> bytes:
    """Return one that is none, or one that is damaged."""
    good = good_handshake(route, dice).decode()
    return dice.choice(
        (
            good.replace("Version: 13", "Version: 99").encode(),
            good.replace("Version: 13", "Version: ").encode(),
            _head(route),
            _head(route, "Sec-WebSocket-Key: short"),
            _head(route, "Sec-WebSocket-Key: " + "=" * 24),
            good.replace("Upgrade: websocket", "Upgrade: chat").encode(),
            good.replace("Connection: Upgrade", "Connection: close").encode(),
            good.replace("GET", "POST").encode(),
            _head(route, "Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=99"),
            _head(route, "Sec-WebSocket-Protocol: \x01,,"),
            # Without its end it would only be waited for.
            mutated(good.encode()[:-4], dice).replace(b"\r\n\r\n", b"\r\n") + b"\r\n\r\n",
        )
    )


def _head(route: str, *lines: str) -> bytes:
    fixed = ("Host: localhost", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    return "\r\n".join([f"GET {route} HTTP/1.1", *fixed, *lines, "", ""]).encode()


def frame(
    opcode: int, payload: bytes, *, is_final: bool = True, is_masked: bool = True, reserved: int = 0, length: int = -1
) -> bytes:
    """Return one frame.

    Args:
        opcode: four bits.
        payload: its bytes.
        is_final: the last of its message.
        is_masked: as a client's frames must be; the mask is zeros, so that captures can be read.
        reserved: the three reserved bits.
        length: what the frame says of itself; -1 for the truth.
    """
    size = len(payload) if length < 0 else length
    first = (is_final << 7) | (reserved << 4) | opcode
    mask = is_masked << 7
    if size < 126:
        head = bytes([first, mask | size])
    elif size < 1 << 16:
        head = bytes([first, mask | 126]) + struct.pack(">H", size)
    else:
        head = bytes([first, mask | 127]) + struct.pack(">Q", size)
    return head + (bytes(4) if is_masked else b"") + payload


_ODD_TEXTS = (
    "", "null", "[]", "{}", "0", '"', "{", '{"type": null}', '{"type": 1}', '{"type": "no such event"}', "[" * 3000,
    '{"type": "session.update", "session": []}', "\0", "\U0001f600" * 100, "x" * 70_000, "1e999", '{"a": NaN}',
)  # fmt: skip


def _good(dice: Random, texts: Sequence[str]) -> bytes:
    """Return a proper message, whatever it may mean."""
    text = dice.choice([*texts, *_ODD_TEXTS]).encode()
    match dice.randrange(4):
        case 0:
            return frame(PING, text[:125])
        case 1 if len(text) > 1:
            half = len(text) // 2
            return frame(TEXT, text[:half], is_final=False) + frame(PING, b"") + frame(MORE, text[half:])
        case 2:
            return frame(BINARY, dice.randbytes(dice.randrange(200)))
        case _:
            return frame(TEXT, text)


def _bad(dice: Random, texts: Sequence[str]) -> bytes:
    """Return bytes that break the protocol, or a message that is damaged."""
    text = dice.choice([*texts, *_ODD_TEXTS]).encode()
    return dice.choice(
        (
            frame(TEXT, text, is_masked=False),
            frame(dice.choice((3, 4, 5, 6, 7, 11, 12, 13, 14, 15)), text[:100]),
            frame(TEXT, text, reserved=dice.randrange(1, 8)),
            frame(PING, b"x" * 126),
            frame(PING, b"", is_final=False),
            frame(MORE, text),
            frame(TEXT, b"a", is_final=False) + frame(TEXT, b"b"),
            frame(TEXT, b"\xff\xfe" + text),
            frame(TEXT, "\ud800".encode(errors="surrogatepass")),
            frame(CLOSE, b"\x03"),
            frame(CLOSE, struct.pack(">H", dice.choice((0, 999, 1004, 1005, 1006, 1015, 2999, 5000, 65535)))),
            frame(CLOSE, struct.pack(">H", 1000) + b"\xff"),
            frame(CLOSE, struct.pack(">H", 1000)) + frame(TEXT, text),
            frame(BINARY, b"", length=1 << 62),
            frame(BINARY, b"", length=(1 << 64) - 1),
            frame(TEXT, dice.randbytes(60), reserved=4),
            frame(TEXT, b"", is_final=False) * 500,
            mutated(frame(TEXT, text[:2000]), dice),
            dice.randbytes(dice.randrange(1, 100)),
        )
    )
