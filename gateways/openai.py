"""The OpenAI gateway: which routes there are, and what they share."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

import omni_bus
from gateways import openai_answers as answers
from gateways import openai_chat, openai_chat_body, openai_files, openapi
from gateways.health import Health, report
from gateways.http import HttpGateway, HttpOptions, json_response
from gateways.load import load
from gateways.openai_chat_answer import AudioDelta
from gateways.openai_chat_body import find_model
from gateways.openai_files import FilesOptions, FilesRoutes, check_folder
from gateways.openapi import Answer, Operation
from omni_bus.media.encode import EncodingPool

if TYPE_CHECKING:
    from omni_bus.core.pipeline import Pipeline


class OpenAIOptions(FilesOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table with ``protocol = "openai"``."""

    audio_delta: AudioDelta = "content"
    """Where a stream's sound goes: ``content`` (delta.content, told by `modality`) or ``audio`` (delta.audio.data)."""


class OpenAIGateway(HttpGateway):
    """Health, models, chat completions and files."""

    Options = OpenAIOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.options, OpenAIOptions)
        self._models = models_of(self.pipelines.values())
        self._health = Health(self.client)
        self._documents: dict[bool, dict[str, Any]] = {}
        self._pool = EncodingPool()
        self._chat = openai_chat.ChatRoute(
            self.client, self._models, self._pool, self.options, self.options.audio_delta
        )
        self._files = FilesRoutes(self.options, self.state_dir)

    @classmethod
    def check(cls, options: HttpOptions) -> list[str]:
        """Return what is wrong with the sources of keys and the folder of files."""
        assert isinstance(options, OpenAIOptions)
        problem = check_folder(options.files_dir) if options.files_dir else ""
        return [*super().check(options), *([problem] if problem else [])]

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        """Whether some route can express the pipeline."""
        return openai_chat.can_serve(pipeline)

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application(middlewares=[self.edge])
        app.router.add_get("/health", self._get_health)
        app.router.add_route("*", "/ping", self._ping)
        app.router.add_get("/version", self._get_version)
        app.router.add_get("/openapi.json", self._get_openapi)
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_get("/v1/models/{model:.+}", self._get_model)
        app.router.add_post("/v1/chat/completions", self._chat.handle, expect_handler=self.expect)
        self._add_files(app)
        return app

    def _add_files(self, app: web.Application) -> None:
        files = self._files
        expect = functools.partial(self.expect, max_bytes=files.max_body_bytes)
        app.router.add_post("/v1/files", files.create, expect_handler=expect)
        app.router.add_get("/v1/files", files.list)
        app.router.add_get("/v1/files/{file_id}", files.retrieve)
        app.router.add_delete("/v1/files/{file_id}", files.delete)
        app.router.add_get("/v1/files/{file_id}/content", files.content)
        app.cleanup_ctx.append(files.lifetime)

    def close(self) -> None:
        """End the encoding threads."""
        super().close()
        self._pool.close()

    async def _report(self) -> dict[str, Any]:
        return report(await self._health.rows(), self.pipelines, is_draining=self.is_draining)

    async def _get_health(self, request: web.Request) -> web.Response:
        asked = load(self.client, self.pipelines, self.caller_of(request))
        document, found = await asyncio.gather(self._report(), asked)
        return json_response(document | found, status=200 if document["ready"] else 503)

    async def _ping(self, request: web.Request) -> web.Response:
        if request.method not in ("GET", "HEAD", "POST"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD", "POST"])
        return web.Response(status=200 if (await self._report())["ready"] else 503)

    async def _get_version(self, request: web.Request) -> web.Response:
        return json_response({"version": omni_bus.__version__})

    async def _get_openapi(self, request: web.Request) -> web.Response:
        has_keys = self._keys.is_guarded
        if has_keys not in self._documents:  # ten milliseconds of the loop, and anybody may ask
            schemas = {"ChatCompletionRequest": openai_chat_body.schema(self.pipelines.values())}
            self._documents[has_keys] = openapi.document(
                "omni-bus", omni_bus.__version__, operations(), schemas=schemas, has_keys=has_keys
            )
        return json_response(self._documents[has_keys])

    async def _get_models(self, request: web.Request) -> web.Response:
        cards = [model_card(name, pipeline) for name, pipeline in self._models.items()]
        return json_response({"object": "list", "data": cards})

    async def _get_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return json_response(model_card(name, find_model(name, self._models)))


def operations() -> list[Operation]:
    """Describe every route; a test compares this with the router."""
    ping = {status: Answer(description=words) for status, words in ((200, "it serves"), (503, "it does not"))}
    json = "application/json"
    return [
        Operation(
            method="get",
            path="/health",
            name="health",
            summary="Whether every stage of every served pipeline has a live and ready replica",
            answers={
                200: Answer(description="all have", content={json: answers.Health}),
                503: Answer(description="some have none", content={json: answers.Health}),
            },
        ),
        *(
            Operation(method=method, path="/ping", name=f"ping_{method}", summary="Health in one status", answers=ping)
            for method in ("get", "head", "post")
        ),
        Operation(
            method="get",
            path="/version",
            name="version",
            summary="The server's version",
            answers={200: Answer(description="the version", content={json: answers.Version})},
        ),
        Operation(
            method="get",
            path="/openapi.json",
            name="openapi",
            summary="This document",
            answers={200: Answer(description="OpenAPI 3.1", content={json: {"type": "object"}})},
        ),
        Operation(
            method="get",
            path="/v1/models",
            name="list_models",
            summary="The pipelines, by all their names",
            answers={200: Answer(description="the list", content={json: answers.ModelList})},
        ),
        Operation(
            method="get",
            path="/v1/models/{model}",
            name="retrieve_model",
            summary="One pipeline",
            parameters={"model": "a name that is served; it may contain slashes"},
            answers={200: Answer(description="the model", content={json: answers.Model})},
            errors=(404,),
        ),
        openai_chat.OPERATION,
        *openai_files.OPERATIONS,
    ]


def models_of(pipelines: Any) -> dict[str, Pipeline]:
    """Return pipelines by every name that clients may use: what each is served as first, then the aliases."""
    pipelines = list(pipelines)
    models = {pipeline.serve_as: pipeline for pipeline in pipelines}
    for pipeline in pipelines:
        for alias in pipeline.aliases:
            models.setdefault(alias, pipeline)
    return models


def model_card(name: str, pipeline: Pipeline) -> dict[str, Any]:
    """Return one entry of the list of models."""
    created = int(time.time())
    permission = {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": False,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "omni-bus",
        "root": pipeline.serve_as,
        "parent": None,
        "max_model_len": None,
        "permission": [permission],
    }
