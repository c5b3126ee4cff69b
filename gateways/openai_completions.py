"""``POST /v1/completions``: texts that go on with prompts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateways import openapi
from gateways.event_stream import EventStream
from gateways.fan_out import Call, take_all
from gateways.http import REQUEST_ID, json_response, read_json, terms_of
from gateways.openai_answers import Completion as CompletionAnswer
from gateways.openai_answers import CompletionChunk
from gateways.openai_chat import HEADERS, collect
from gateways.openai_choice import Choice, Ends, read_rendered, usage_document
from gateways.openai_completions_body import Completion, parse
from gateways.openai_fields import for_choice
from gateways.openai_logprobs import completion_logprobs, finite, joined, prompt_logprobs, rendered_logprobs
from gateways.openai_metrics import stage_metrics
from gateways.openai_models import MESSAGES, inputs_for
from gateways.openai_refusals import PARAMS, renamed
from omni_bus.client import End, Item
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateways.http import HttpOptions
    from omni_bus.client import BusClient, RequestEvent
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.payloads import Token
    from omni_bus.wire.prompt import Rendered

OPERATION = openapi.Operation(
    method="post",
    path="/v1/completions",
    name="create_completion",
    summary="Texts that go on with prompts; in one piece or streamed",
    body={"$ref": "#/components/schemas/CompletionRequest"},
    answers={
        200: openapi.Answer(
            description="All texts, or with `stream` the events as they come. Each is `data: ` and a "
            "CompletionChunk, or an Error after which nothing follows; the last one is `data: [DONE]`.",
            content={"application/json": CompletionAnswer},
            events=CompletionChunk,
        )
    },
    errors=(404, 429, 504),
    headers=HEADERS,
)
"""For the OpenAPI document."""


class CompletionsRoute:
    """The route's handler and what it needs.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        options: limits of the gateway.
    """

    def __init__(self, client: BusClient, models: Mapping[str, Pipeline], options: HttpOptions) -> None:
        self._client = client
        self._models = models
        self._options = options

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. When its client goes, this is cancelled, and with it the requests on the bus."""
        asked = parse(await read_json(request, self._options), self._models)
        if "X-Request-Id" not in request.headers and asked.id_suffix is not None:
            request[REQUEST_ID] = asked.id_suffix
        calls = _calls(asked)
        answer_id = f"cmpl-{request[REQUEST_ID]}"
        try:
            if asked.is_streamed:
                return await self._stream(request, asked, calls, answer_id)
            choices = await collect(self._client, calls, terms_of(request), self._options.max_answer_bytes)
        except BadInput as error:
            names = {"structure": asked.structure_field, "text": "prompt", "messages": "prompt"}
            # Both a parameter of engines and a form of prompts have this name.
            names["token_ids"] = PARAMS["token_ids"] if asked.returns_token_ids else "prompt"
            raise renamed(error, asked.pipeline, names, prompt="prompt") from error
        return json_response(_document(asked, choices, answer_id))

    async def _stream(
        self, request: web.Request, asked: Completion, calls: list[Call], answer_id: str
    ) -> web.StreamResponse:
        stream = EventStream(request, self._options.write_timeout_s)
        async with stream.telling_failures():
            events = _CompletionStream(stream, asked, answer_id)
            await take_all(self._client, calls, terms_of(request), events)
            await events.end()
        return stream.response


def _calls(asked: Completion) -> list[Call]:
    ports = [port for port in inputs_for(asked.pipeline, asked.outputs) if port != MESSAGES]
    return [
        Call(
            pipeline=asked.pipeline.name,
            outputs=asked.outputs,
            params=for_choice(asked.params, i),
            inputs={MESSAGES: [Json(prompt)], **{port: [] for port in ports}},
            priority=asked.priority,
            session=asked.session,
            wants_metrics=asked.has_metrics,
        )
        for prompt in asked.prompts
        for i in range(asked.best_of)
    ]


# --- in one piece -------------------------------------------------------------------------------------------


def _document(asked: Completion, choices: list[Choice], answer_id: str) -> dict[str, Any]:
    by_prompt = [choices[i : i + asked.best_of] for i in range(0, len(choices), asked.best_of)]
    found = [
        _choice(asked, prompt, i * asked.n + j, choice)
        for i, (prompt, of_prompt) in enumerate(zip(asked.prompts, by_prompt, strict=True))
        for j, choice in enumerate(
            sorted(of_prompt, key=_mean_logprob, reverse=True)[: asked.n] if _ranks(asked) else of_prompt
        )
    ]
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.pipeline.serve_as,
        "choices": found,
        "system_fingerprint": None,
        "usage": usage_document([[_usage(choice) for choice in of_prompt] for of_prompt in by_prompt]),
        "metrics": stage_metrics(asked.pipeline, [c.ends for c in choices]) if asked.has_metrics else None,
    }


def _ranks(asked: Completion) -> bool:
    return asked.best_of > asked.n


def _mean_logprob(choice: Choice) -> float:
    """Return the log-probability of each token on average, by which OpenAI tells the best texts."""
    return sum(finite(token.logprob) for token in choice.tokens) / max(1, len(choice.tokens))


def _usage(choice: Choice) -> Any:
    usage, rendered = choice.ends.usage, choice.rendered
    if not usage.prompt_tokens and rendered is not None:
        return msgspec.structs.replace(usage, prompt_tokens=len(rendered.token_ids))
    return usage


def _choice(asked: Completion, prompt: dict[str, Any], index: int, choice: Choice) -> dict[str, Any]:
    echoed = _echoed(asked, prompt, choice.rendered)
    rendered = choice.rendered
    return {
        "index": index,
        "text": echoed + choice.text,
        "logprobs": _logprobs(asked, choice.tokens, rendered if asked.echo else None, len(echoed)),
        # Where nothing was to be generated its end is the limit.
        "finish_reason": choice.ends.reason if "text" in asked.outputs else "length",
        "stop_reason": choice.ends.stop_reason,
        "token_ids": [token.id for token in choice.tokens] if asked.returns_token_ids else None,
        "prompt_logprobs": prompt_logprobs(rendered) if asked.returns_prompt_logprobs else None,
        "prompt_token_ids": rendered.token_ids if rendered is not None and asked.returns_token_ids else None,
    }


def _echoed(asked: Completion, prompt: dict[str, Any], rendered: Rendered | None) -> str:
    """Return what the answer begins with: the prompt as it came, or what its tokens say."""
    if not asked.echo:
        return ""
    return prompt.get("text") or (rendered.text if rendered is not None else "")


def _logprobs(asked: Completion, tokens: list[Token], rendered: Rendered | None, offset: int) -> dict[str, Any] | None:
    if asked.logprobs is None:
        return None
    own = completion_logprobs(tokens, asked.logprobs, offset)
    return own if rendered is None else joined(rendered_logprobs(rendered, asked.logprobs), own)


# --- streamed -----------------------------------------------------------------------------------------------


class _CompletionStream:
    """The events of one streamed answer."""

    def __init__(self, stream: EventStream, asked: Completion, answer_id: str) -> None:
        self._stream = stream
        self._asked = asked
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.pipeline.serve_as,
        }
        num_choices = len(asked.prompts) * asked.n
        self._ends = [Ends(asked.outputs) for _ in range(num_choices)]
        self._offsets = [0] * num_choices
        self._echoed: set[int] = set()
        self._prompt_tokens = [0] * num_choices
        self._num_open = num_choices
        self._last: list[bytes] = []
        """The end of the last choice, which goes out with what comes after all of them."""

    def take_now(self, index: int, event: RequestEvent) -> bool:
        """Send a piece of text, if it is not the first and the client has room."""
        if type(event) is not Item or type(event.payload) is not Text or event.port != "text":
            return False
        text, num_tokens, tokens = event.payload.text, event.payload.num_tokens, event.payload.tokens
        if index not in self._echoed or not (text or tokens) or self._asked.stream_options.continuous_usage_stats:
            return False
        if not self._stream.try_send(self._text(index, text, tokens)):
            return False
        self._offsets[index] += len(text)
        self._ends[index].num_tokens += num_tokens
        return True

    async def take(self, index: int, event: RequestEvent) -> None:
        """Send what the client should know of an event."""
        match event:
            case Item(port="text", payload=Text(text=text, num_tokens=num_tokens, tokens=tokens)):
                self._ends[index].num_tokens += num_tokens
                await self._echo(index, None)
                if text or tokens:
                    chunk = self._text(index, text, tokens)
                    self._offsets[index] += len(text)
                    await self._stream.send(chunk)
            case Item(port="rendered", payload=Json() as payload):
                rendered = read_rendered(payload)
                self._prompt_tokens[index] = len(rendered.token_ids)
                await self._echo(index, rendered)
            case Item():
                pass
            case End(port=port, finish=finish):
                if self._ends[index].add(port, finish):
                    await self._finish(index)

    async def end(self) -> None:
        """Send what comes after all events, to the mark of the end."""
        if self._asked.stream_options.include_usage:
            usage = self._usage([ends.usage.prompt_tokens for ends in self._ends], [e.usage for e in self._ends])
            self._last.append(msgspec.json.encode(self._head | {"choices": [], "usage": usage}))
        await self._stream.send_last(*self._last, b"[DONE]")

    async def _echo(self, index: int, rendered: Rendered | None) -> None:
        """Send the prompt first, if it is to come back; told by its tokens or, without them, as it came."""
        asked = self._asked
        if index in self._echoed or (rendered is None and "rendered" in asked.outputs):
            return
        self._echoed.add(index)
        text = _echoed(asked, asked.prompts[index // asked.n], rendered)
        logprobs = None
        if rendered is not None and asked.logprobs is not None and asked.echo:
            logprobs = rendered_logprobs(rendered, asked.logprobs)
        extra = {"prompt_token_ids": rendered.token_ids} if rendered is not None and asked.returns_token_ids else {}
        if text or extra:
            self._offsets[index] = len(text)
            await self._send(index, text, logprobs, **extra)

    def _text(self, index: int, text: str, tokens: tuple[Token, ...]) -> bytes:
        logprobs = _logprobs(self._asked, list(tokens), None, self._offsets[index]) if tokens else None
        extra = {"token_ids": [token.id for token in tokens]} if self._asked.returns_token_ids else {}
        return self._chunk(index, text, logprobs, **extra)

    async def _finish(self, index: int) -> None:
        ends = self._ends[index]
        reason = ends.reason if "text" in self._asked.outputs else "length"
        await self._echo(index, None)
        chunk = self._chunk(index, "", None, finish_reason=reason, stop_reason=ends.stop_reason)
        self._num_open -= 1
        if self._num_open:
            await self._stream.send(chunk)
        else:
            self._last.append(chunk)

    async def _send(self, index: int, text: str, logprobs: dict[str, Any] | None, **extra: Any) -> None:
        await self._stream.send(self._chunk(index, text, logprobs, **extra))

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, **extra: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **extra}
        top: dict[str, Any] = {}
        if self._asked.stream_options.continuous_usage_stats:
            top["usage"] = self._usage(self._prompt_tokens, [ends.usage for ends in self._ends])
        if self._asked.has_metrics and "finish_reason" in extra:
            top["metrics"] = stage_metrics(self._asked.pipeline, [self._ends[index]])
        return msgspec.json.encode({**self._head, "choices": [choice], **top})

    def _usage(self, prompt_tokens: list[int], usages: list[Any]) -> dict[str, Any]:
        n = self._asked.n
        counted = [
            msgspec.structs.replace(usage, prompt_tokens=max(usage.prompt_tokens, tokens))
            for usage, tokens in zip(usages, prompt_tokens, strict=True)
        ]
        document = usage_document([counted[i : i + n] for i in range(0, len(counted), n)])
        return {name: value for name, value in document.items() if value is not None}
