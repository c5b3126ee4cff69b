"""What engines say, checked before anything relies on it: an engine is anybody's code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.engine import Failure, Finished, Output, Starved, StepEngine
from omni_bus.errors import OmniBusError
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import PAYLOAD_TYPES, check, kind_of
from omni_bus.wire.plain import check_plain

if TYPE_CHECKING:
    from omni_bus.engine import Engine, Event

MAX_COUNT = 2**63 - 1
"""Of tokens; what the wire can say."""


def checked(events: Any) -> list[Event]:
    """Return what a step returned as a list of events.

    Raises:
        TypeError: it is not a sequence of events.
    """
    listed = list(events)
    for event in listed:
        if not isinstance(event, Output | Finished | Starved | Failure):
            raise TypeError(f"a step returned a {type(event).__name__} among its events")
    return listed


def breach(event: Event, engine: Engine) -> Exception | None:
    """Return how an event breaks the engine's own contract; what passes can be sent and understood."""
    try:
        match event:
            case Output(port=port, payload=payload):
                _check_output(engine, port, payload)
            case Finished(finish=finish):
                _check_finish(finish)
            case Failure(error=error) if not isinstance(error, OmniBusError):  # pyright: ignore[reportUnnecessaryComparison] (an engine is anybody's code)
                raise TypeError(f"a Failure carries a {type(error).__name__}, not an OmniBusError")
            case Starved() if not (isinstance(engine, StepEngine) and engine.is_input_streamed):
                raise ValueError("it starved, although it had its whole input")
            case _:
                pass
    except Exception as error:  # noqa: BLE001 (whatever an engine made can't be trusted to be comparable or countable)
        return error
    return None


def _check_output(engine: Engine, port: Any, payload: Any) -> None:
    if port not in engine.emits:
        raise ValueError(f"it emitted on port {port!r} (allowed: {', '.join(engine.emits)})")
    kind = kind_of(payload) if isinstance(payload, PAYLOAD_TYPES) else None
    if kind != engine.emits[port]:
        came = kind or type(payload).__name__
        raise TypeError(f"it emitted a {came} on port '{port}' (allowed: {engine.emits[port]})")
    check(payload)


def _check_finish(finish: Any) -> None:
    if not isinstance(finish, Finish):
        raise TypeError(f"it finished with a {type(finish).__name__}, not a Finish")
    for name, count in msgspec.structs.asdict(finish.usage).items():
        if not isinstance(count, int) or not 0 <= count <= MAX_COUNT:
            raise ValueError(f"it finished with {name} {count!r} (allowed: 0 to {MAX_COUNT})")
    if not isinstance(finish.reason, str):  # pyright: ignore[reportUnnecessaryIsInstance] (an engine is anybody's code)
        raise TypeError(f"it finished with a {type(finish.reason).__name__} as the reason (allowed: text)")
    check_plain(finish.detail)
    msgspec.msgpack.encode(finish)
