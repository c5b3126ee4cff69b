"""A server with OpenAI's API as one stage of a pipeline: chat messages, pictures and sound out, streamed text in.

The official client does the protocol, the retries (connection refused, 408, 409, 429 and 5xx, before anything was
received; with its own backoff, and as long as ``Retry-After`` says) and the time limits. A request that is cancelled
here closes its connection, at which servers stop generating; a request without credit is not read, so that TCP holds
the server back.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from adapters.chat import PLAIN, read_prompt
from adapters.packages import missing
from adapters.sampling import SamplingParams, refuse_unhonoured
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, Overloaded, StageFailed, StartFailed, Unavailable
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Audio, Candidate, Image, Json, Payload, Text, Token
from omni_bus.wire.prompt import Message, Part, Prompt, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from omni_bus.engine import Context, Report

INSTALL_CLIENT = "pip install 'omni-bus[openai]'"

_OPENAI_PROMPTS = PLAIN | {"text", "tools", "tool_choice", "reasoning_effort", "images", "audio"}
_VLLM_PROMPTS = frozenset(Prompt.__struct_fields__) | {"images", "audio"}
_NOWHERE = ("prompt_logprobs", "token_ids")
_VLLM_ONLY = (
    "top_k",
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "cache_salt",
)

UNKNOWN_ID = -1
"""Of tokens whose text alone the server tells."""

_DEFAULTS = SamplingParams()

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    base_url: str
    """Where the API is, as OpenAI's client takes it: ``http://host:8000/v1``."""

    model: str | None = None
    """The name to ask for; None takes the server's first one."""

    api_key_env: str = ""
    """The environment variable that has the key."""

    api_key_file: str = ""
    """The file that has the key, instead."""

    dialect: Literal["openai", "vllm"] = "openai"
    """``vllm``: the server knows vLLM's fields too (`top_k`, `min_p`, token ids as prompts …)."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Requests that are sent at once; others wait in the stage."""

    max_retries: Annotated[int, Meta(ge=0, le=10)] = 2
    """How often a request is sent again that got no answer, or one that asks for it."""

    connect_timeout_s: Seconds = 5.0
    """Seconds that a connection may take."""

    idle_timeout_s: Seconds = 120.0
    """Seconds without a byte from the server after which a request has failed."""

    extra_body: dict[str, Any] = {}
    """Fields that every request is sent with."""


class RemoteOpenAI(StreamingEngine):
    """Chat messages (or a text to go on with) in, streamed text, reasoning and tool calls out.

    Params: `SamplingParams`. A field that a request leaves at its default is not sent, so that the server's own default
    holds; `lora` is sent as the model's name.
    """

    accepts: ClassVar[dict[str, str]] = {"prompt": "json", "images": "image", "audio": "audio"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"images", "audio"})
    emits: ClassVar[dict[str, str]] = {"text": "text", "reasoning": "text", "tool_calls": "json"}
    Options: ClassVar[type[msgspec.Struct]] = RemoteOptions
    Params: ClassVar[type[msgspec.Struct]] = SamplingParams

    def __init__(self, options: RemoteOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._model = options.model or ""
        self._client: Any = None
        self._num_chunks = 0
        self._num_open = 0

    @classmethod
    def check(cls, options: RemoteOptions) -> list[str]:
        """Return what is wrong with the address or the key, or that the client is missing."""
        problems = missing("openai", {INSTALL_CLIENT: ("openai",)})
        try:
            url = urlsplit(options.base_url)
            is_address = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
        except ValueError:
            is_address = False
        if not is_address:
            problems.append(f"base_url: '{options.base_url}' came (allowed: http://HOST:PORT/v1 or https://…)")
        if options.api_key_env and options.api_key_file:
            problems.append("api_key_file: came beside api_key_env (allowed: one of them)")
        try:
            _key(options)
        except BadInput as error:
            problems.append(error.message)
        return problems

    def load(self, report: Report) -> None:
        """Ask the server which models it has.

        Raises:
            StartFailed: it doesn't answer, refuses the key, or doesn't serve `model`.
        """
        report("import", 0.0)
        import openai

        options: RemoteOptions = self.options
        report("connecting", 0.0)
        try:
            with openai.OpenAI(**self._client_options()) as client:
                served = [card.id for card in client.models.list().data]
        except openai.OpenAIError as error:
            raise StartFailed(
                f"base_url: {options.base_url} doesn't list its models: {_words(error)}", field="base_url"
            ) from error
        if options.model is None:
            if not served:
                raise StartFailed(f"base_url: {options.base_url} serves no model", field="base_url")
            self._model = served[0]
        elif options.model not in served:
            raise StartFailed(
                f"model: '{options.model}' is not served at {options.base_url} (allowed: {', '.join(served)})",
                field="model",
            )
        report("connecting", 1.0)

    def _client_options(self) -> dict[str, Any]:
        import openai

        options: RemoteOptions = self.options
        return {
            "base_url": options.base_url,
            "api_key": _key(options) or "none",  # the client wants one; servers without keys don't look
            "max_retries": options.max_retries,
            "timeout": openai.Timeout(options.idle_timeout_s, connect=options.connect_timeout_s),
        }

    async def aclose(self) -> None:
        """Close the connections that are kept for the next request."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    @property
    def num_steps(self) -> int:
        """Chunks received."""
        return self._num_chunks

    @property
    def num_active(self) -> int:
        """Connections that carry a request now."""
        return self._num_open

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Send one request and yield what comes.

        Raises:
            BadInput: what can't be sent, or what the server refuses as the caller's fault.
            Overloaded: the server has no room, after all retries.
            Unavailable: it can't be reached or fails before an answer begins, after all retries.
            StageFailed: it refuses us, or the answer broke off.
        """
        import openai

        params: SamplingParams = request.params
        options: RemoteOptions = self.options
        refuse_unhonoured(params, (*_NOWHERE, *(_VLLM_ONLY if options.dialect == "openai" else ())), "openai")
        prompt = await self._read_prompt(inputs)
        body = self._body(params) | options.extra_body
        media = {kind: [item async for item in inputs.port(kind)] for kind in ("images", "audio")}
        if self._client is None:  # its connections belong to the loop that runs requests
            self._client = openai.AsyncOpenAI(**self._client_options())
        has_begun = False
        self._num_open += 1
        try:
            answer = _Answer(request.outputs)
            stream = await self._open(prompt, body, media)
            try:
                async for chunk in stream:
                    has_begun = True
                    self._num_chunks += 1
                    for port, payload in answer.read(chunk):
                        yield port, payload
            finally:
                await stream.close()
            yield answer.finish
        except openai.OpenAIError as error:
            raise _error_of(error, has_begun=has_begun) from error
        finally:
            self._num_open -= 1

    async def _read_prompt(self, inputs: Inputs) -> Prompt:
        prompts = [payload async for payload in inputs.port("prompt")]
        if len(prompts) != 1:
            raise BadInput(f"prompt: {len(prompts)} payloads came (allowed: one)", field="prompt")
        honours = _VLLM_PROMPTS if self.options.dialect == "vllm" else _OPENAI_PROMPTS
        return read_prompt(prompts[0], "openai", honours)

    async def _open(self, prompt: Prompt, body: dict[str, Any], media: dict[str, list[Any]]) -> Any:
        common: dict[str, Any] = {"model": body.pop("model", self._model), "stream": True}
        common |= {"stream_options": {"include_usage": True}}
        if not prompt.messages:
            if "logprobs" in body:
                body["logprobs"] = body.pop("top_logprobs")
            text = prompt.text if prompt.token_ids is None else prompt.token_ids
            return await self._client.completions.create(prompt=text, extra_body=body, **common)
        parts = {"images": [], "audio": []}
        for image in media["images"]:
            parts["images"].append(await asyncio.to_thread(_image_part_blocking, image))
        for sound in media["audio"]:
            parts["audio"].append(await asyncio.to_thread(_audio_part_blocking, sound))
        messages = _messages(prompt.messages, parts)
        body |= _template_fields(prompt)
        return await self._client.chat.completions.create(messages=messages, extra_body=body, **common)

    def _body(self, params: SamplingParams) -> dict[str, Any]:
        is_vllm = self.options.dialect == "vllm"
        body = {name: value for name, value in msgspec.to_builtins(params).items() if value != getattr(_DEFAULTS, name)}
        for name in ("stop", "stop_token_ids", "bad_words"):  # to_builtins has lists where the defaults are tuples
            if not body.get(name, True):
                del body[name]
        if "max_tokens" in body and not is_vllm:
            body["max_completion_tokens"] = body.pop("max_tokens")
        if "lora" in body:
            body["model"] = body.pop("lora")
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        if params.structure is not None:
            del body["structure"]
            structure = {name: value for name, value in msgspec.to_builtins(params.structure).items() if value}
            if structure == {"json_object": True}:
                body["response_format"] = {"type": "json_object"}
            elif "json" in structure:
                schema = {"name": "answer", "schema": structure["json"], "strict": True}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            elif is_vllm:
                body["structured_outputs"] = structure
            else:
                raise BadInput(
                    f"structure: {', '.join(structure)} can't be honoured by openai (allowed: json, json_object)",
                    field="structure",
                )
        return body


def _key(options: RemoteOptions) -> str:
    """Return the key, empty for none.

    Raises:
        BadInput: it isn't where it should be.
    """
    if options.api_key_env:
        if not (key := os.environ.get(options.api_key_env, "")):
            raise BadInput(f"api_key_env: {options.api_key_env} is not set (allowed: a variable with the key)")
        return key
    if options.api_key_file:
        try:
            key = Path(options.api_key_file).expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"api_key_file: {options.api_key_file} can't be read: {error}") from error
        if not key:
            raise BadInput(f"api_key_file: {options.api_key_file} is empty (allowed: a file with the key)")
        return key
    return ""


# --- what is sent -------------------------------------------------------------------------------------------


def _messages(messages: list[Message], media: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return messages as the API has them; media parts take the next picture or clip."""
    remaining = {"image": iter(media["images"]), "audio": iter(media["audio"])}
    found: list[dict[str, Any]] = []
    for message in messages:
        written: dict[str, Any] = msgspec.to_builtins(message)
        if isinstance(message.content, list):
            written["content"] = [_part(part, remaining) for part in message.content]
        elif message.content is None:
            written["content"] = None
        if message.tool_calls:
            written["tool_calls"] = [{"type": "function", **call} for call in written["tool_calls"]]
        found.append(written)
    for kind, rest in remaining.items():
        if next(rest, None) is not None:
            raise BadInput(f"{kind}: more came than the messages have parts (allowed: one for each)", field="messages")
    return found


def _part(part: Part, remaining: dict[str, Any]) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    found = next(remaining[part.type], None) if part.type in remaining else None
    if found is None:
        raise BadInput(f"messages: an {part.type} part has no {part.type} (allowed: one for each)", field="messages")
    return found


def _template_fields(prompt: Prompt) -> dict[str, Any]:
    fields = msgspec.to_builtins(prompt)
    for name in ("messages", "text", "token_ids"):
        fields.pop(name, None)
    if prompt.tools:
        kind, _, name = prompt.tool_choice.partition(":")
        named = {"type": "function", "function": {"name": name}}
        fields["tools"] = [{"type": "function", **tool} for tool in fields["tools"]]
        fields["tool_choice"] = named if kind == "function" else kind
    return fields


def _image_part_blocking(image: Image) -> dict[str, Any]:
    import PIL.Image

    mode = {1: "L", 3: "RGB", 4: "RGBA"}[image.channels]
    file = io.BytesIO()
    PIL.Image.frombytes(mode, (image.width, image.height), bytes(image.data.view)).save(file, "PNG", compress_level=1)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _audio_part_blocking(sound: Audio) -> dict[str, Any]:
    import wave

    import numpy as np

    samples = bytes(sound.data.view)
    if sound.format == "f32":
        floats = np.frombuffer(samples, np.float32)
        samples = (np.clip(floats, -1, 1) * 32767).round().astype("<i2").tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(sound.channels)
        writer.setsampwidth(2)
        writer.setframerate(sound.rate_hz)
        writer.writeframes(samples)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


# --- what comes back ----------------------------------------------------------------------------------------


class _Answer:
    """Reads the chunks of one answer, of chat and of plain completions alike."""

    def __init__(self, outputs: frozenset[str]) -> None:
        self._outputs = outputs
        self._reason = "stop"
        self._usage = Usage()
        self._detail: dict[str, Any] = {}

    @property
    def finish(self) -> Finish:
        return Finish(self._reason, self._usage, self._detail)

    def read(self, chunk: Any) -> list[tuple[str, Payload]]:
        if chunk.usage is not None:
            details = getattr(chunk.usage, "prompt_tokens_details", None)
            cached = (details.cached_tokens or 0) if details is not None else 0
            self._usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached)
        found: list[tuple[str, Payload]] = []
        for choice in chunk.choices:
            self._reason = choice.finish_reason or self._reason
            if (stop := getattr(choice, "stop_reason", None)) is not None:
                self._detail = {"stop_reason": stop}
            delta = getattr(choice, "delta", None)
            text = choice.text if delta is None else delta.content
            thought = getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None)
            if thought:
                found.append(("reasoning", Text(thought)))
            tokens = _tokens(choice.logprobs)
            if text or tokens:
                found.append(("text", Text(text or "", len(tokens), tokens)))
            found.extend(("tool_calls", Json(_call(call))) for call in getattr(delta, "tool_calls", None) or ())
        return [(port, payload) for port, payload in found if port in self._outputs]


def _call(call: Any) -> dict[str, Any]:
    function = call.function
    delta = ToolCallDelta(
        index=call.index,
        id=call.id or None,
        name=(function.name or None) if function else None,
        arguments=(function.arguments or "") if function else "",
    )
    return msgspec.to_builtins(delta)


def _tokens(logprobs: Any) -> tuple[Token, ...]:
    content = getattr(logprobs, "content", None)
    if content:
        return tuple(
            Token(
                UNKNOWN_ID,
                _raw(entry),
                entry.logprob,
                tuple(Candidate(UNKNOWN_ID, other.logprob, _raw(other)) for other in entry.top_logprobs or ()),
            )
            for entry in content
        )
    words = getattr(logprobs, "tokens", None)  # the form of plain completions
    if not words:
        return ()
    tops = logprobs.top_logprobs or [None] * len(words)
    return tuple(
        Token(
            UNKNOWN_ID,
            word.encode(),
            logprob,
            tuple(Candidate(UNKNOWN_ID, value, other.encode()) for other, value in (top or {}).items()),
        )
        for word, logprob, top in zip(words, logprobs.token_logprobs, tops, strict=True)
    )


def _raw(entry: Any) -> bytes:
    return bytes(entry.bytes) if entry.bytes is not None else entry.token.encode()


def _error_of(error: Any, *, has_begun: bool) -> Exception:
    """Return what an error of the client is here: whose fault, and whether to try again."""
    import openai

    match error:
        case openai.BadRequestError() | openai.UnprocessableEntityError():
            return BadInput(_words(error), field=str(error.param or "messages"))
        case openai.RateLimitError():
            after = error.response.headers.get("retry-after", "")
            return Overloaded(
                f"the server has no room: {_words(error)}", retry_after_s=float(after) if after.isdecimal() else 1.0
            )
        case openai.AuthenticationError() | openai.PermissionDeniedError() | openai.NotFoundError():
            return StageFailed(f"the server refuses this stage: {_words(error)}")
        case openai.APITimeoutError():
            return StageFailed("the server was silent for too long", is_retry_safe=not has_begun)
        case openai.APIConnectionError() | openai.InternalServerError() if not has_begun:
            return Unavailable(f"the server does not answer: {_words(error)}", retry_after_s=1.0)
        case _:
            return StageFailed(f"the answer broke off: {_words(error)}", is_retry_safe=not has_begun)


def _words(error: Any) -> str:
    """Return what an error says, without what the client wraps around it."""
    body = getattr(error, "body", None)
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return body["message"][:500]
    return str(error)[:500]
