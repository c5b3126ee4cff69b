"""What a robot's client says, as a policy's stage is told it, and back: records in, records and frames out.

What the two say to each other is in `adapters.robot.messages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gateways.problems import scrub
from omni_bus.errors import BadInput, ErrorInfo, OmniBusError, StageFailed, from_info
from omni_bus.media.numpy_frames import encode
from omni_bus.wire.payloads import Blob, Record

if TYPE_CHECKING:
    from gateways.robot.sessions import Sessions

OPEN = Record({"kind": "open"}, (), Blob(b""))
RESET = Record({"kind": "reset"}, (), Blob(b""))
RESET_ANSWER = msgspec.msgpack.encode({"status": "reset successful"})

INVALID, FAILED = "Invalid request payload", "Internal inference error"

UNAVAILABLE = '{"type":"error","error":"Robot policy not available","code":"unsupported"}'
"""Sent as text, before the metadata would be."""

CONTROLS = ("endpoint", "session_id", "seed", "sampling_params")
"""Keys of an observation that aren't the policy's."""

MAX_SESSION_CHARACTERS = 256
MAX_STEPS = 1000
MAX_SEED = 2**63 - 1


def is_reset(observation: Record) -> bool:
    """Whether the client asks for a new beginning; any other endpoint, or none, is an inference.

    Raises:
        BadInput: the endpoint is no text.
    """
    endpoint = observation.value.get("endpoint")
    if endpoint is not None and not isinstance(endpoint, str):
        raise BadInput(f"endpoint: a {type(endpoint).__name__} came (allowed: text)", field="endpoint")
    return endpoint == "reset"


def observation_of(received: Record, sessions: Sessions, waited_s: float) -> Record:
    """Return an observation as the stage is told it; its session begins or goes on by this.

    Args:
        received: what the client sent.
        sessions: its socket's.
        waited_s: how long ago that was.

    Raises:
        BadInput: a session, seed or number of steps that is none.
    """
    value = dict(received.value)
    for leaf in received.arrays:
        if leaf.path[0] in CONTROLS and leaf.shape is not None:
            raise BadInput(f"{leaf.path[0]}: an array came (allowed: a plain value)", field=str(leaf.path[0]))
    name = _session(value.pop("session_id", None))
    seed = _whole("seed", value.pop("seed", None), 0, MAX_SEED)
    num_steps = _num_steps(value.pop("sampling_params", None))
    value.pop("endpoint", None)
    turn = sessions.infer(name)
    message = {
        "kind": "infer",
        "session": turn.session,
        "is_first": turn.is_first,
        "forget": list(turn.forget),
        "seed": seed,
        "num_inference_steps": num_steps,
        "waited_s": waited_s,
        "values": value,
    }
    arrays = tuple(
        msgspec.structs.replace(leaf, path=("values", *leaf.path))
        for leaf in received.arrays
        if leaf.path[0] not in CONTROLS
    )
    return Record(message, arrays, received.data)


def _session(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadInput(f"session_id: a {type(value).__name__} came (allowed: text)", field="session_id")
    name = str(value)
    if len(name) > MAX_SESSION_CHARACTERS:
        allowed = f"at most {MAX_SESSION_CHARACTERS}"
        raise BadInput(f"session_id: {len(name)} characters came (allowed: {allowed})", field="session_id")
    return name


def _num_steps(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) - {"num_inference_steps"}:
        came = ", ".join(map(str, value)) if isinstance(value, dict) else f"a {type(value).__name__}"
        raise BadInput(
            f"sampling_params: {came[:200]} came (allowed: a map with num_inference_steps)", field="sampling_params"
        )
    return _whole("sampling_params.num_inference_steps", value.get("num_inference_steps"), 1, MAX_STEPS)


def _whole(field: str, value: Any, low: int, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadInput(f"{field}: {str(value)[:40]} came (allowed: a whole number from {low} to {high})", field=field)
    return value


class Answer(msgspec.Struct, frozen=True, eq=False):
    """What a stage answered to an observation."""

    actions: Record
    timing: dict[str, Any]


def answer_of(payload: Any) -> Answer:
    """Read an answer.

    Raises:
        OmniBusError: what the stage says instead of actions.
        StageFailed: it is none.
    """
    value = payload.value if isinstance(payload, Record) else None
    if isinstance(value, dict) and "error" in value:
        raise from_info(ErrorInfo(**value["error"]))
    if not isinstance(value, dict) or not isinstance(value.get("actions"), dict):
        raise StageFailed("the stage answered with something else than actions")
    arrays = tuple(
        msgspec.structs.replace(leaf, path=leaf.path[1:]) for leaf in payload.arrays if leaf.path[0] == "actions"
    )
    return Answer(Record(value["actions"], arrays, payload.data), value.get("timing") or {})


def welcome_of(payload: Any) -> tuple[bytes, float | None]:
    """Return the first frame of a socket, what the policy says of itself, and the deadline of each observation.

    Raises:
        OmniBusError: the stage said something else.
    """
    value = payload.value if isinstance(payload, Record) else None
    if not isinstance(value, dict) or "metadata" not in value:
        raise StageFailed("the stage began with something else than metadata")
    arrays = tuple(
        msgspec.structs.replace(leaf, path=leaf.path[1:]) for leaf in payload.arrays if leaf.path[0] == "metadata"
    )
    return encode(Record(value["metadata"], arrays, payload.data)), value.get("deadline_s")


def actions_frame(answer: Answer, *, is_bare: bool, server_timing: dict[str, Any] | None) -> bytes:
    """Return the frame with a robot's actions.

    Args:
        answer: the stage's.
        is_bare: an array alone, where there is nothing but actions.
        server_timing: milliseconds and counts, beside the arrays.
    """
    actions = answer.actions
    if is_bare and list(actions.value) == ["actions"]:
        arrays = tuple(msgspec.structs.replace(leaf, path=leaf.path[1:]) for leaf in actions.arrays)
        return encode(Record(None, arrays, actions.data))
    value = dict(actions.value)
    if server_timing is not None:
        value["server_timing"] = server_timing
    return encode(Record(value, actions.arrays, actions.data))


def message_of(error: OmniBusError) -> str:
    """Return the protocol's own word for an error."""
    return INVALID if isinstance(error, BadInput) else FAILED


def error_frame(error: OmniBusError) -> bytes:
    """Return an error as a MessagePack frame: the protocol's word, and what exactly is wrong."""
    document: dict[str, Any] = {
        "type": "error",
        "message": message_of(error),
        "code": error.code,
        "detail": scrub(error.message),
    }
    if error.field:
        document["field"] = error.field
    if error.retry_after_s:
        document["retry_after_s"] = error.retry_after_s
    return msgspec.msgpack.encode(document)


def error_text(error: OmniBusError) -> str:
    """Return an error as the text frame that openpi-client raises."""
    return f"{message_of(error)}: {scrub(error.message)}"
