"""The gateway for robots alone: OpenPI's sockets (`gateways.robot.route`), on a port of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from msgspec import Meta

from gateways.health import ActorRows, report
from gateways.http import HttpGateway, HttpOptions, json_response
from gateways.openai_models import can_act, models_of
from gateways.robot.route import PATH, ROOT, RobotRoute, RobotRouteOptions
from omni_bus.media.encode import EncodingPool

if TYPE_CHECKING:
    from omni_bus.core.pipeline import Pipeline

HEALTHZ = "/healthz"


class OpenPIOptions(HttpOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table with ``protocol = "openpi"``."""

    idle_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    """A client that sends nothing for so long after an answer is closed (1000); 0: never. Not on ``/``, whose clients
    never reconnect."""

    multi_session_per_connection: bool = False
    """Sessions that alternate on a socket keep their states; else each change of ``session_id`` begins anew."""


class OpenPIGateway(HttpGateway):
    """Robots over WebSockets."""

    Options = OpenPIOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.options, OpenPIOptions)
        self._health = ActorRows(self.client)
        self._pool = EncodingPool()
        options = RobotRouteOptions(
            idle_timeout_s=self.options.idle_timeout_s,
            is_multi_session=self.options.multi_session_per_connection,
            write_timeout_s=self.options.write_timeout_s,
        )
        models = models_of(self.pipelines.values())
        self._route = RobotRoute(self.client, models, self.draining, self._pool, options)

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        """Whether it turns observations into actions."""
        return can_act(pipeline)

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application(middlewares=[self.edge])
        app.router.add_get("/health", self._get_health)
        app.router.add_get(HEALTHZ, self._get_healthz)
        app.router.add_get(PATH, self._route.handle, allow_head=False)
        app.router.add_get(ROOT, self._route.handle, allow_head=False)
        return app

    def close(self) -> None:
        """End the threads."""
        super().close()
        self._pool.close()

    async def _get_health(self, request: web.Request) -> web.Response:
        document = report(await self._health.rows(), self.pipelines, is_draining=self.is_draining)
        document["status"] = "ok" if document["ready"] else document["status"]
        return json_response(document, status=200 if document["ready"] else 503)

    async def _get_healthz(self, request: web.Request) -> web.Response:
        document = report(await self._health.rows(), self.pipelines, is_draining=self.is_draining)
        return web.Response(text="OK\n") if document["ready"] else web.Response(text="not ready\n", status=503)
