"""What a gateway and a policy's stage say to each other: records on the ports ``observation`` and ``actions``.

To the stage, by their ``kind``:

- ``open``: a connection begins. Answered with ``{"metadata": {…}, "deadline_s": …}``, of each observation, or null.
- ``infer``: ``session``, ``is_first``, ``seed``, ``num_inference_steps``, ``forget`` (sessions that are over) and
  ``values``, the observation itself, which was with the gateway for `waited_s`. Answered with ``{"actions": {…},
  "timing": {…}}`` or ``{"error": {…}}``.
- ``reset``: every session of the connection is over. Not answered.

One connection is one request on the bus, so its messages and answers keep their order. A stage that is to get nothing
new ends it between two messages; what it has not answered by then it has not taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_bus.errors import BadInput, OmniBusError

MAX_SESSION_CHARACTERS = 256
MAX_STEPS = 1000
MAX_SEED = 2**63 - 1


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message to the stage."""

    kind: Literal["open", "infer", "reset"]
    session: Annotated[str, Meta(max_length=MAX_SESSION_CHARACTERS)] = ""
    is_first: bool = False
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    forget: list[str] = []
    waited_s: Annotated[float, Meta(ge=0)] = 0.0
    values: dict[str, Any] = {}


def message_of(value: Any) -> Message:
    """Read a message.

    Raises:
        BadInput: it is none.
    """
    try:
        return msgspec.convert(value, Message)
    except msgspec.ValidationError as error:
        raise BadInput(f"observation: {error}", field="observation") from error


def error_value(error: OmniBusError) -> dict[str, Any]:
    """Return what an answer says of an error."""
    return {"error": msgspec.to_builtins(msgspec.structs.asdict(error.to_info()))}
