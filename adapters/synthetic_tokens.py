"""Tokens, calls and vectors of `adapters.synthetic.SyntheticText`: marks that a test can foretell, no model's.

The vocabulary of prompts is pieces of at most three bytes; an id says its bytes, so that any tokens can be turned back
into text anywhere. Usage goes on counting words.
"""

from __future__ import annotations

import math
import struct
import zlib
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Audio, Blob, Candidate, Image, Tensor, Token, Video
from omni_bus.wire.prompt import Rendered, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_bus.wire.payloads import Payload
    from omni_bus.wire.prompt import Prompt

PIECE_BYTES = 3
WIDTH = 8
"""Numbers of an embedding."""


def encode(text: str) -> list[int]:
    """Return a text's tokens."""
    raw = text.encode("utf-8", "replace")
    return [int.from_bytes(b"\1" + raw[i : i + PIECE_BYTES]) for i in range(0, len(raw), PIECE_BYTES)]


def piece_of(token: int) -> bytes:
    """Return a token's bytes.

    Raises:
        BadInput: no token of this vocabulary.
    """
    raw = token.to_bytes(4).lstrip(b"\0")
    if len(raw) < 2 or raw[0] != 1:
        raise BadInput(
            f"token_ids: {token} is no token of this vocabulary (allowed: those of a text)", field="token_ids"
        )
    return raw[1:]


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens.

    Raises:
        BadInput: one of them is none.
    """
    return b"".join(map(piece_of, tokens)).decode("utf-8", "replace")


def media_words(payloads: Iterable[Payload]) -> list[str]:
    """Return a word for each picture, sound and video, which says its size and the checksum of its samples."""
    words: list[str] = []
    for payload in payloads:
        match payload:
            case Image(height=height, width=width, data=data):
                words.append(f"<image:{width}x{height}:{zlib.crc32(data.view):08x}>")
            case Audio(rate_hz=rate_hz, num_frames=num_frames):
                words.append(f"<audio:{num_frames}@{rate_hz}>")
            case Video(num_frames=num_frames, height=height, width=width):
                words.append(f"<video:{num_frames}x{width}x{height}>")
            case _:
                raise BadInput("media: another payload came (allowed: image, audio, video)", field="messages")
    return words


def rendered(text: str, context_length: int, num_candidates: int | None) -> Rendered:
    """Return what a prompt's text comes to; with candidates its log-probabilities too."""
    tokens = encode(text)
    logprobs: list[list[tuple[int, float, bytes]] | None] | None = None
    if num_candidates is not None:
        own = [generated(piece_of(token), i, num_candidates) for i, token in enumerate(tokens)]
        logprobs = [
            None
            if i == 0
            else [(tokens[i], token.logprob or 0.0, token.raw)]
            + [(each.id, each.logprob, each.raw) for each in token.candidates if each.raw != token.raw]
            for i, token in enumerate(own)
        ]
    return Rendered(
        token_ids=tokens,
        text=text,
        token_strings=[piece_of(token).decode("utf-8", "replace") for token in tokens],
        context_length=context_length,
        logprobs=logprobs,
    )


def generated(raw: bytes, number: int, num_candidates: int | None) -> Token:
    """Return the `number`-th token of an answer; its log-probability is minus a tenth of the number's last digit."""
    token = zlib.crc32(raw) & 0x7FFFFFFF
    if num_candidates is None:
        return Token(token, raw)
    logprob = -(number % 10) / 10
    others = [Candidate((token + i) & 0x7FFFFFFF, logprob - i, raw + b"~%d" % i) for i in range(1, num_candidates)]
    own = [Candidate(token, logprob, raw)] if num_candidates else []
    return Token(token, raw, logprob, (*own, *others))


def calls_of(prompt: Prompt, marker: str) -> list[ToolCallDelta]:
    """Return the calls that a prompt makes, in pieces: the tool that must be called, or those that the marker names."""
    names = [tool.function.name for tool in prompt.tools]
    kind, _, name = prompt.tool_choice.partition(":")
    if kind == "function":
        called = [name]
    elif kind == "required":
        called = [each for each in names if each in marker] or names[:1]
    else:
        called = [each for each in names if kind == "auto" and each in marker]
    if not prompt.parallel_tool_calls:
        called = called[:1]
    pieces: list[ToolCallDelta] = []
    for i, each in enumerate(called):
        arguments = msgspec.json.encode({"marker": marker}).decode()
        half = len(arguments) // 2
        pieces.append(ToolCallDelta(index=i, id=f"call_{marker}_{i}", name=each))
        pieces += [ToolCallDelta(index=i, arguments=piece) for piece in (arguments[:half], arguments[half:])]
    return pieces


def embedding(text: str) -> Tensor:
    """Return a vector of length one, the same for the same text."""
    source = Random(zlib.crc32(text.encode("utf-8", "replace")))
    drawn = [source.gauss() for _ in range(WIDTH)]
    norm = math.hypot(*drawn)
    return Tensor("float32", (WIDTH,), Blob(struct.pack(f"<{WIDTH}f", *(number / norm for number in drawn))))


def as_value(struct: msgspec.Struct) -> Any:
    """Return a Struct as the value of a `Json` payload, which has no bytes: they become base64."""
    return msgspec.to_builtins(struct)
