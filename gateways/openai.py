"""The OpenAI gateway: which routes there are, and what they share."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from aiohttp import web

import omni_bus
from gateways import openai_answers as answers
from gateways import (
    openai_chat,
    openai_chat_batch,
    openai_chat_body,
    openai_completions,
    openai_completions_body,
    openai_embeddings,
    openai_files,
    openai_models,
    openai_sound,
    openai_speech,
    openai_speech_batch,
    openai_speech_body,
    openai_tokenize,
    openai_transcriptions,
    openai_transcriptions_body,
    openai_voices,
    openapi,
    sleep,
    speech_stream,
)
from gateways.health import ActorRows, report
from gateways.http import HttpGateway, HttpOptions, json_response
from gateways.images import body as images_body
from gateways.images import route as images
from gateways.images.chat import PictureChats
from gateways.load import context_lengths, load, server_load
from gateways.media import MediaReader
from gateways.metrics import OPERATION as METRICS
from gateways.metrics import metrics_response
from gateways.openai_chat_answer import AudioDelta
from gateways.openai_files import FilesRoutes, check_folder
from gateways.openai_media import MessageMedia
from gateways.openai_models import find_model, model_card, models_of
from gateways.openai_voices import VoicesRoutes, built_in
from gateways.openapi import Answer, Operation
from gateways.realtime import client_secrets
from gateways.realtime import route as realtime
from gateways.realtime.turn import TurnAudioEvents
from gateways.robot import route as robots
from gateways.robot.route import RobotRoute, RobotRouteOptions
from gateways.videos import body as videos_body
from gateways.videos import describe as videos_describe
from gateways.videos import live as videos_live
from gateways.videos.form import Reader as VideoReader
from gateways.videos.routes import PATH as VIDEOS
from gateways.videos.routes import SYNC_PATH, VideosOptions, VideosRoutes, settings_of
from gateways.voices import Voices
from omni_bus.errors import Unavailable
from omni_bus.media.encode import EncodingPool
from omni_bus.media.video_pool import VideoPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from omni_bus.core.pipeline import Pipeline


Seconds = Annotated[float, msgspec.Meta(gt=0)]


class OpenAIOptions(VideosOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table with ``protocol = "openai"``."""

    audio_delta: AudioDelta = "content"
    """Where a stream's sound goes: ``content`` (delta.content, told by `modality`) or ``audio`` (delta.audio.data)."""

    trust_request_chat_template: bool = False
    """Requests may bring a chat template of their own: a program that the stage runs."""

    max_speech_chars: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = openai_speech_body.MAX_SPEECH_CHARS
    """A longer text is not read aloud."""

    turn_audio_events: TurnAudioEvents = "both"
    """Names of sound in vLLM's turn dialect: ``seed`` is response.audio.*, ``ga`` is response.output_audio.*."""

    default_realtime: Literal["turn", "duplex"] = "turn"
    """What a connection to ``/v1/realtime`` without ``duplex`` in its query is."""

    realtime_first_event_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """A client of a duplex dialect may take so long to say its first word."""

    robot_idle_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """A robot that sends nothing for so long after an answer is closed; 0: never."""

    robot_multi_session_per_connection: bool = False
    """Sessions of robots that alternate on a socket keep their states; else each change begins anew."""

    speech_config_timeout_s: Seconds = 10.0
    """A client of ``/v1/audio/speech/stream`` may take so long to say what it wants."""

    speech_idle_timeout_s: Seconds = 30.0
    """Such a client may say nothing for so long while nothing is spoken."""


class OpenAIGateway(HttpGateway):
    """Health, models, completions, tokens, embeddings, sound, pictures, videos, files, live talks and clips, robots."""

    Options = OpenAIOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.options, OpenAIOptions)
        self._models = models_of(self.pipelines.values())
        self._health = ActorRows(self.client)
        self._measures = ActorRows(self.client, "metrics")
        self._documents: dict[bool, dict[str, Any]] = {}
        self._pool = EncodingPool()
        self._files = FilesRoutes(self.options, self.state_dir)
        self._media = MediaReader(self.options)
        media = MessageMedia(self._media, self._files, self.options)
        trusts = self.options.trust_request_chat_template
        self._chat = openai_chat.ChatRoute(
            self.client,
            self._models,
            self._pool,
            media,
            self.options,
            PictureChats(self.client, self._models, self._pool, media, self.options),
            audio_delta=self.options.audio_delta,
            trusts_templates=trusts,
        )
        self._batch = openai_chat_batch.ChatBatchRoute(self.client, self._chat, self.options)
        self._completions = openai_completions.CompletionsRoute(self.client, self._models, self.options)
        self._tokens = openai_tokenize.TokenRoutes(
            self.client, self._models, media, self.options, trusts_templates=trusts
        )
        voices = Voices(
            self._files.store, self.options.max_caller_voices, self.options.voice_policy, built_in(self._models)
        )
        self._voices = VoicesRoutes(voices, self._models, self._media, self.options)
        self._sound = openai_sound.SoundRoute(self.client, self._models, self._pool, self.options)
        self._images = images.ImageRoutes(self.client, self._models, self._pool, self._media, self.options)
        self._sleep = sleep.SleepRoutes(self.control, self.pipelines, self._origins)
        self._speech = openai_speech.SpeechRoute(
            self.client, self._models, self._pool, self._media, self.options, self.options.max_speech_chars, voices
        )
        self._speech_stream = speech_stream.SpeechStreamRoute(
            self._speech,
            self.draining,
            config_timeout_s=self.options.speech_config_timeout_s,
            idle_timeout_s=self.options.speech_idle_timeout_s,
            write_timeout_s=self.options.write_timeout_s,
            max_file_bytes=self.options.max_answer_bytes,
        )
        self._speech_batch = openai_speech_batch.SpeechBatchRoute(self._speech, self._pool, self.options)
        self._robots = RobotRoute(
            self.client,
            self._models,
            self.draining,
            self._pool,
            RobotRouteOptions(
                idle_timeout_s=self.options.robot_idle_timeout_s,
                is_multi_session=self.options.robot_multi_session_per_connection,
                write_timeout_s=self.options.write_timeout_s,
            ),
        )
        self._embeddings = openai_embeddings.EmbeddingsRoute(self.client, self._models, self.options)
        self._transcriptions = openai_transcriptions.TranscriptionRoutes(
            self.client, self._models, self._media, self.options
        )
        self._video_pool = VideoPool()
        reader = VideoReader(self.client, self._models, self._media, media, self.options, settings_of(self.options))
        self._videos = VideosRoutes(self.client, reader, self._video_pool, self.options, self.state_dir)
        self._live_video = videos_live.LiveVideoRoute(self.client, reader, self._video_pool, self.options)
        self._client_secrets = client_secrets.ClientSecrets(
            self._models, self.options, Path(self.state_dir), self._keys.is_caller
        )
        self._realtime = realtime.RealtimeRoute(
            self.client,
            self._models,
            self._media,
            self.draining,
            self.retiring,
            realtime.RealtimeOptions(
                turn_audio_events=self.options.turn_audio_events,
                is_duplex=self.options.default_realtime == "duplex",
                first_event_timeout_s=self.options.realtime_first_event_timeout_s,
                write_timeout_s=self.options.write_timeout_s,
            ),
        )

    @classmethod
    def check(cls, options: HttpOptions) -> list[str]:
        """Return what is wrong with the sources of keys and the folder of files."""
        assert isinstance(options, OpenAIOptions)
        problem = check_folder(options.files_dir) if options.files_dir else ""
        return [*super().check(options), *([problem] if problem else [])]

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        """Whether some route can express the pipeline."""
        return openai_models.can_serve(pipeline)

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application(middlewares=[self.edge])
        app.router.add_get("/health", self._get_health)
        app.router.add_route("*", "/ping", self._ping)
        app.router.add_get("/version", self._get_version)
        app.router.add_get("/openapi.json", self._get_openapi)
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_get("/v1/models/{model:.+}", self._get_model)
        app.router.add_get("/load", self._get_load)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/is_sleeping", self._get_is_sleeping)
        app.router.add_post("/sleep", self._sleep.sleep)
        app.router.add_post("/wake_up", self._sleep.wake_up)
        for path, handler in (
            ("/v1/chat/completions", self._chat.handle),
            ("/v1/chat/completions/batch", self._batch.handle),
            ("/v1/completions", self._completions.handle),
            ("/tokenize", self._tokens.tokenize),
            ("/detokenize", self._tokens.detokenize),
            ("/v1/embeddings", self._embeddings.handle),
            ("/v1/audio/generate", self._sound.handle),
            (images.GENERATIONS, self._images.generate),
            ("/v1/audio/speech", self._speech.handle),
            ("/v1/audio/speech/batch", self._speech_batch.handle),
            (client_secrets.PATH, self._client_secrets.create),
        ):
            app.router.add_post(path, handler, expect_handler=self.expect)
        for path in realtime.PATHS:
            app.router.add_get(path, self._realtime.handle, allow_head=False)
        app.router.add_get(robots.PATH, self._robots.handle, allow_head=False)
        if self._robots.is_served:  # robots' stock client knows a host and a port, and no path
            app.router.add_get(robots.ROOT, self._robots.handle, allow_head=False)
        app.router.add_get(speech_stream.PATH, self._speech_stream.handle, allow_head=False)
        self._add_files(app)
        self._add_voices(app)
        self._add_forms(app)
        self._add_videos(app)
        app.cleanup_ctx.append(self._reading)
        return app

    async def _reading(self, app: web.Application) -> AsyncIterator[None]:
        """Read media as long as the application runs."""
        yield
        await self._media.close()

    def _add_files(self, app: web.Application) -> None:
        files = self._files
        expect = functools.partial(self.expect, max_bytes=files.max_body_bytes)
        app.router.add_post("/v1/files", files.create, expect_handler=expect)
        app.router.add_get("/v1/files", files.list)
        app.router.add_get("/v1/files/{file_id}", files.retrieve)
        app.router.add_delete("/v1/files/{file_id}", files.delete)
        app.router.add_get("/v1/files/{file_id}/content", files.content)
        app.cleanup_ctx.append(files.lifetime)

    def _add_voices(self, app: web.Application) -> None:
        expect = functools.partial(self.expect, max_bytes=self._voices.max_body_bytes)
        app.router.add_post(openai_voices.PATH, self._voices.create, expect_handler=expect)
        app.router.add_get(openai_voices.PATH, self._voices.list)
        app.router.add_delete(f"{openai_voices.PATH}/{{name}}", self._voices.delete)

    def _add_forms(self, app: web.Application) -> None:
        assert isinstance(self.options, OpenAIOptions)
        max_bytes = openai_transcriptions_body.max_body_bytes(self.options)
        expect = functools.partial(self.expect, max_bytes=max_bytes)
        paths, routes = openai_transcriptions.PATHS, self._transcriptions
        app.router.add_post(paths["transcribe"], routes.transcribe, expect_handler=expect)
        app.router.add_post(paths["translate"], routes.translate, expect_handler=expect)
        expect_edit = functools.partial(self.expect, max_bytes=self._images.max_body_bytes)
        app.router.add_post(images.EDITS, self._images.edit, expect_handler=expect_edit)

    def _add_videos(self, app: web.Application) -> None:
        videos = self._videos
        expect = functools.partial(self.expect, max_bytes=videos.max_body_bytes)
        app.router.add_post(VIDEOS, videos.create, expect_handler=expect)
        app.router.add_post(SYNC_PATH, videos.sync, expect_handler=expect)
        app.router.add_get(VIDEOS, videos.list)
        job = f"{VIDEOS}/{{video_id:(?!sync$)[^/]+}}"
        app.router.add_get(job, videos.retrieve)
        app.router.add_delete(job, videos.delete)
        app.router.add_get(f"{VIDEOS}/{{video_id}}/content", videos.content)
        app.router.add_get(videos_live.PATH, self._live_video.handle, allow_head=False)
        app.cleanup_ctx.append(videos.lifetime)

    def caller_of(self, request: web.Request) -> str | None:
        """Return who sends a request; one that opens a live conversation may come with a client secret.

        It is noted on the request (`CLIENT_SECRET`), for the conversation to begin as it says.
        """
        caller = super().caller_of(request)
        if caller or request.path not in realtime.PATHS:
            return caller
        secret = self._client_secrets.take(request)
        if secret is None:
            return caller
        request[client_secrets.CLIENT_SECRET] = secret
        return secret.caller if caller is None else caller

    async def idle(self) -> None:
        """Return when no video is being made that its caller left to us."""
        await self._videos.board.idle()

    def close(self) -> None:
        """End the encoding threads."""
        super().close()
        self._pool.close()
        self._video_pool.close()

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

    async def _get_load(self, request: web.Request) -> web.Response:
        return json_response({"server_load": await server_load(self.client, self.pipelines)})

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return await metrics_response(self.client, self._measures, self.pipelines, self._counts)

    async def _get_is_sleeping(self, request: web.Request) -> web.Response:
        rows = await self._health.rows()
        if rows is None:
            raise Unavailable("the coordinator does not answer")
        return self._sleep.is_sleeping(rows)

    async def _get_openapi(self, request: web.Request) -> web.Response:
        has_keys = self._keys.is_guarded
        if has_keys not in self._documents:  # ten milliseconds of the loop, and anybody may ask
            schemas = body_schemas(self.pipelines.values())
            self._documents[has_keys] = openapi.document(
                "omni-bus", omni_bus.__version__, operations(), schemas=schemas, has_keys=has_keys
            )
        return json_response(self._documents[has_keys])

    async def _get_models(self, request: web.Request) -> web.Response:
        lengths = await context_lengths(self.client)
        cards = [model_card(name, pipeline, lengths) for name, pipeline in self._models.items()]
        return json_response({"object": "list", "data": cards})

    async def _get_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        pipeline = find_model(name, self._models)
        return json_response(model_card(name, pipeline, await context_lengths(self.client)))


def body_schemas(pipelines: Iterable[Pipeline]) -> dict[str, Any]:
    """Return the schemas of bodies that depend on what is served, or are read from several Structs."""
    pipelines = list(pipelines)
    return {
        schema["title"]: schema
        for schema in (
            openai_chat_body.schema(pipelines),
            openai_chat_batch.schema(pipelines),
            openai_completions_body.schema(),
            openai_tokenize.tokenize_schema(pipelines),
            openai_tokenize.detokenize_schema(),
            openai_embeddings.schema(),
            openai_sound.schema(),
            images_body.schema(),
            openai_speech_body.schema(),
            openai_speech_batch.schema(),
            videos_body.schema(),
            *openai_transcriptions.schemas(),
        )
    }


def operations() -> list[Operation]:
    """Describe every route; a test compares this with the router."""
    health = "Whether every stage of every served pipeline has a live and ready replica"
    ping = {status: Answer(description=words) for status, words in ((200, "it serves"), (503, "it does not"))}
    model = {"model": "a name that is served; it may contain slashes"}
    return [
        _told("/health", "health", health, answers.Health, statuses=(200, 503)),
        *(
            Operation(method=method, path="/ping", name=f"ping_{method}", summary="Health in one status", answers=ping)
            for method in ("get", "head", "post")
        ),
        _told("/version", "version", "The server's version", answers.Version),
        _told("/openapi.json", "openapi", "This document, OpenAPI 3.1", {"type": "object"}),
        _told("/v1/models", "list_models", "The pipelines, by all their names", answers.ModelList),
        _told("/v1/models/{model}", "retrieve_model", "One pipeline", answers.Model, parameters=model, errors=(404,)),
        _told("/load", "load", "How many requests are under way", answers.ServerLoad),
        METRICS,
        *sleep.OPERATIONS,
        openai_chat.OPERATION,
        openai_chat_batch.OPERATION,
        openai_completions.OPERATION,
        *openai_tokenize.OPERATIONS,
        openai_embeddings.OPERATION,
        client_secrets.OPERATION,
        openai_sound.OPERATION,
        *images.OPERATIONS,
        openai_speech.OPERATION,
        openai_speech_batch.OPERATION,
        *openai_voices.OPERATIONS,
        *openai_transcriptions.OPERATIONS,
        *openai_files.OPERATIONS,
        *videos_describe.OPERATIONS,
    ]


def _told(
    path: str, name: str, summary: str, schema: Any, *, statuses: tuple[int, ...] = (200,), **more: Any
) -> Operation:
    """Describe a route that tells something as JSON."""
    answer = Answer(description=summary, content={"application/json": schema})
    return Operation(
        method="get", path=path, name=name, summary=summary, answers=dict.fromkeys(statuses, answer), **more
    )
