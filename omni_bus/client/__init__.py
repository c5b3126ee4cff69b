"""Clients: of the bus, and of the gateways' WebSockets with typed events.

::

    async with connect_realtime("http://127.0.0.1:8000", session={"output_modalities": ["text"]}) as live:
        await live.ask("What is the capital of France?")
        async for event in live:
            match event:
                case TextDelta():
                    print(event.delta, end="")
                case ResponseDone():
                    break

Nothing is loaded before it is asked for: who talks with a gateway needs no ZeroMQ, and who is on the bus no HTTP.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_bus.client.bus import BusClient, End, Item, Request, RequestEvent
    from omni_bus.client.duplex import Duplex, connect_duplex
    from omni_bus.client.failures import ClientError, ConnectFailed, ConnectionLost, EventRefused, ResumeFailed
    from omni_bus.client.playback import PlaybackClock
    from omni_bus.client.realtime import Realtime, connect_realtime
    from omni_bus.client.robot import Robot, connect_robot
    from omni_bus.client.speech_stream import SpeechStream, connect_speech_stream
    from omni_bus.client.video import LiveVideo, connect_video

__all__ = [
    "BusClient",
    "ClientError",
    "ConnectFailed",
    "ConnectionLost",
    "Duplex",
    "End",
    "EventRefused",
    "Item",
    "LiveVideo",
    "PlaybackClock",
    "Realtime",
    "Request",
    "RequestEvent",
    "ResumeFailed",
    "Robot",
    "SpeechStream",
    "connect_duplex",
    "connect_realtime",
    "connect_robot",
    "connect_speech_stream",
    "connect_video",
]

_MODULES = {
    "bus": ("BusClient", "End", "Item", "Request", "RequestEvent"),
    "duplex": ("Duplex", "connect_duplex"),
    "failures": ("ClientError", "ConnectFailed", "ConnectionLost", "EventRefused", "ResumeFailed"),
    "playback": ("PlaybackClock",),
    "realtime": ("Realtime", "connect_realtime"),
    "robot": ("Robot", "connect_robot"),
    "speech_stream": ("SpeechStream", "connect_speech_stream"),
    "video": ("LiveVideo", "connect_video"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
