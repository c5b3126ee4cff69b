"""``WS /v1/realtime`` and ``WS /v1/duplex``: live conversations, in the dialect that the client speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gateways import websockets
from gateways.http import terms_of
from gateways.openai_models import can_converse, find_model
from gateways.problems import Problem
from gateways.realtime.attachment import BETA_PROTOCOL, DUPLEX_PATH, Attachment
from gateways.realtime.reading import MAX_EVENT_BYTES
from gateways.realtime.turn import TurnAudioEvents
from omni_bus.core.session.codes import Code, SessionError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from aiohttp import web

    from gateways.media import MediaReader
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline

PATH = "/v1/realtime"
PATHS = (PATH, DUPLEX_PATH)

PROTOCOLS = ("realtime", BETA_PROTOCOL)


class RealtimeOptions(msgspec.Struct, frozen=True):
    """What an operator may choose.

    Args:
        turn_audio_events: under which names the turn dialect sends sound.
        is_duplex: a bare connection to ``/v1/realtime`` is duplex.
        first_event_timeout_s: a client of a duplex dialect may take so long to say its first word.
        write_timeout_s: a client may take nothing for so long.
    """

    turn_audio_events: TurnAudioEvents
    is_duplex: bool
    first_event_timeout_s: float
    write_timeout_s: float


class RealtimeRoute:
    """The handler of both paths.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        media: decodes pictures.
        draining: set when the server is about to stop.
        retiring: set when a successor serves on the same address.
        options: see there.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        media: MediaReader,
        draining: asyncio.Event,
        retiring: asyncio.Event,
        options: RealtimeOptions,
    ) -> None:
        self.client = client
        self.models = models
        self.media = media
        self.draining = draining
        self.retiring = retiring
        self.options = options

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one socket; when its client goes, this is cancelled, and the session is told so."""
        terms = terms_of(request)
        socket = await websockets.upgrade(
            request, max_message_bytes=2 * MAX_EVENT_BYTES, protocols=PROTOCOLS, may_compress=False
        )
        await Attachment(self, request, socket, terms).serve()
        return socket

    def has_sessions(self) -> bool:
        """Whether any pipeline holds conversations."""
        return any(can_converse(pipeline) for pipeline in self.models.values())

    def find(self, model: str | None) -> Pipeline:
        """Return the pipeline that a client names.

        Raises:
            SessionError: there is none.
        """
        try:
            return find_model(model, self.models, can_converse, "holds live conversations")
        except Problem as problem:
            raise SessionError(Code.MODEL_NOT_FOUND, problem.message, param="model") from None
