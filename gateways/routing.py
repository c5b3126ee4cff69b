"""What the coordinator chooses a replica by: how much a request is, how its prompt begins, whose session it is."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from gateways.openai_models import MESSAGES, TEXT
from omni_bus.wire.payloads import Blob, Json, Text
from omni_bus.wire.prefix import BLOCK_BYTES, MAX_BLOCKS, prefix_of
from omni_bus.wire.prompt import MEDIA_PORTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gateways.fan_out import Call
    from omni_bus.wire.payloads import Payload

BYTES_PER_TOKEN = 4
"""Of English text; what other text makes more of is the same for all replicas."""

ANSWER_TOKENS = 256
"""What an answer counts whose limit the request leaves to the stage."""

MAX_ANSWER_TOKENS = 4096
"""A higher limit says that there is none; few answers come so far."""

MAX_BYTES = BLOCK_BYTES * MAX_BLOCKS
"""Of a prompt, what `prefix_of` looks at."""

MEDIUM_BYTES = 65_536
"""Of a picture, a sound or a clip, what tells it from others here."""

_WRITES = frozenset({"text", "reasoning", "tool_calls", "audio"})
"""Output ports for which a prompt is computed into a cache and tokens follow it."""

_ENDING = frozenset(
    {"messages", "text", "token_ids", "tool_choice", "parallel_tool_calls", "add_generation_prompt"}
    | {"continue_final_message"}
)
"""Fields of a `Prompt` that say nothing of how it begins, or are looked at by themselves."""


class Routing(TypedDict):
    """For `BusClient.submit`."""

    tokens: int
    prefix: tuple[int, ...]


def routing_of(call: Call) -> Routing:
    """Return what a request may come to and how its prompt begins; nothing of a prompt that no model writes to."""
    if spoken := call.inputs.get(TEXT, ()):
        num_characters = sum(len(piece.text) for piece in spoken if isinstance(piece, Text))
        return Routing(tokens=max(1, num_characters // BYTES_PER_TOKEN), prefix=())
    payloads = call.inputs.get(MESSAGES, ())
    prompt = payloads[0].value if payloads and isinstance(payloads[0], Json) else None
    if not isinstance(prompt, dict):
        return Routing(tokens=0, prefix=())
    num_tokens = _num_bytes(prompt) // BYTES_PER_TOKEN
    if _WRITES.isdisjoint(call.outputs):
        return Routing(tokens=max(1, num_tokens), prefix=())
    prefix = prefix_of(beginning_of(prompt, call.inputs), _salt(call.params))
    return Routing(tokens=max(1, num_tokens) + _answer_tokens(call.params), prefix=prefix)


def beginning_of(prompt: dict[str, Any], media: Mapping[str, Sequence[Payload]]) -> bytes:
    """Return a prompt's first `MAX_BYTES` in a form in which equal beginnings of conversations have equal bytes.

    What templates put before the first message (tools, documents) comes first; then the messages, with a digest in the
    place of each medium. Text and token ids stand for themselves, four bytes for each id.

    Args:
        prompt: as a `omni_bus.wire.prompt.Prompt` has it.
        media: payloads by input port.
    """
    if (ids := prompt.get("token_ids")) is not None:
        return array("I", ids[: MAX_BYTES // 4]).tobytes()
    if (text := prompt.get("text")) is not None:
        return _encoded(text)
    found = bytearray()
    head = {name: value for name, value in prompt.items() if name not in _ENDING}
    if head:
        found += msgspec.json.encode(head, order="deterministic")
    places = {part: iter(media.get(port, ())) for part, port in MEDIA_PORTS.items()}
    for message in prompt.get("messages", ()):
        if len(found) >= MAX_BYTES:
            break
        for name in sorted(message, key=lambda name: (name != "role", name)):
            found += b"\x00" + name.encode() + b"\x00"
            for piece in _pieces(message[name], places):
                found += piece
    return bytes(found[:MAX_BYTES])


def _pieces(value: Any, places: Mapping[str, Iterator[Payload]]) -> Iterator[bytes]:
    """Yield a message's field as bytes: of a list of parts what each says or shows."""
    if isinstance(value, str):
        yield _encoded(value)
    elif isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value):
        for part in value:
            if isinstance(part.get("text"), str):
                yield _encoded(part["text"])
            elif part["type"] in places:
                payload = next(places[part["type"]], None)
                yield b"" if payload is None else _digest(payload)
            else:
                yield msgspec.json.encode(part, order="deterministic")
    else:
        yield msgspec.json.encode(value, order="deterministic")


def _encoded(text: str) -> bytes:
    return text[:MAX_BYTES].encode("utf-8", "surrogatepass")


def _digest(payload: Payload) -> bytes:
    """Return what tells a medium from others: its form, and a digest of its size and first bytes."""
    fields = [getattr(payload, name) for name in payload.__struct_fields__]
    state = blake2b(digest_size=16)
    for field in fields:
        if isinstance(field, Blob):
            state.update(len(field).to_bytes(8, "little"))
            state.update(field.view[:MEDIUM_BYTES])
        else:
            state.update(repr(field).encode())
    return state.digest()


def _num_bytes(prompt: dict[str, Any]) -> int:
    """Return about how long a prompt's words are; characters of ASCII are bytes."""
    if (ids := prompt.get("token_ids")) is not None:
        return len(ids) * BYTES_PER_TOKEN
    if (text := prompt.get("text")) is not None:
        return len(text)
    contents = [message.get("content") for message in prompt.get("messages", ())]
    parts = [part.get("text") for content in contents if isinstance(content, list) for part in content]
    return sum(len(words) for words in (*contents, *parts) if isinstance(words, str))


def _salt(params: Mapping[str, Mapping[str, Any]]) -> str:
    said = [(stage, own.get("lora"), own.get("cache_salt")) for stage, own in sorted(params.items())]
    return repr([each for each in said if each[1] is not None or each[2] is not None])


def _answer_tokens(params: Mapping[str, Mapping[str, Any]]) -> int:
    limits = [own["max_tokens"] for own in params.values() if isinstance(own.get("max_tokens"), int)]
    return max(1, min(max(limits, default=ANSWER_TOKENS), MAX_ANSWER_TOKENS))
