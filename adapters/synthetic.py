"""Synthetic text, relay, speech and image: engines for load and fault tests, not models.

Each carries a marker from its input to its output, takes as many steps and as much time as it is told, and fails,
hangs, crashes or grows on request (`adapters.synthetic_work`). `adapters.synthetic_marks` reads the output back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from adapters import chat, synthetic_tokens
from adapters.sampling import EXTRAS, SamplingParams, refuse_unhonoured
from adapters.synthetic_marks import MIN_SIDE, PictureMark, marker_of, ramp, text_piece, write_picture
from adapters.synthetic_shapes import Progress, SyntheticSteps, SyntheticStream
from adapters.synthetic_work import (
    Amount,
    Bytes,
    CrashKind,
    Seconds,
    StepIndex,
    StepOptions,
    StreamingOptions,
    WorkParams,
    plan_of,
)
from omni_bus.engine import EngineRequest, Finished, Inputs, Output
from omni_bus.errors import BadInput, InputTooLarge
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Audio, Blob, Image, Json, Payload, Text, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from omni_bus.engine import Event
    from omni_bus.ids import RequestId
    from omni_bus.wire.payloads import Token
    from omni_bus.wire.prompt import Prompt

Side = Annotated[int, msgspec.Meta(ge=MIN_SIDE, le=4096)]
PieceBytes = Annotated[int, msgspec.Meta(ge=0, le=2**24)]


# --- text ---------------------------------------------------------------------------------------------------


class TextOptions(StepOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `SyntheticText`."""

    tokens: Amount = 16
    """Words of each answer."""
    tokens_per_step: Amount = 1
    """Words that one step makes; with `step_time_s` the token rate."""
    chunk_bytes: PieceBytes = 0
    """Bytes of each word, filled up with dots."""
    max_prompt_tokens: Amount = 1_000_000
    """Words that a prompt may have in all its messages."""


class TextParams(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may set on `SyntheticText`: its work, and the sampling parameters of chat protocols.

    `max_tokens`, `min_tokens` and `ignore_eos` set the length of the answer as they do on a model. What chooses the
    next token (temperature and its like) has nothing to choose here; what cuts or changes the text is refused.
    """

    # As in WorkParams: a Struct can't have two parents with fields.
    step_time_s: Seconds | None = None
    busy: bool | None = None
    fail_at_step: StepIndex | None = None
    hang_at_step: StepIndex | None = None
    crash_at_step: StepIndex | None = None
    crash_with: CrashKind | None = None
    grow_bytes_per_step: Bytes | None = None

    tokens: Amount | None = None
    tokens_per_step: Amount | None = None
    chunk_bytes: PieceBytes | None = None
    thoughts: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Words on the port ``reasoning`` before the answer, all in the first step."""


HONOURED = frozenset({*chat.PLAIN, "text", "token_ids", "tools", "tool_choice", "images", "audio", "video"})
"""Of a prompt."""

UNHONOURED = ("stop", "stop_token_ids", *(name for name in EXTRAS if "logprobs" not in name and name != "token_ids"))
"""Of sampling."""


class _TextState(msgspec.Struct):
    plan: TextOptions
    params: TextParams
    marker: str
    prompt_tokens: int
    num_tokens: int
    finish: str
    outputs: frozenset[str]
    prompt: Prompt | None
    text: str
    """All of the prompt, as it is rendered."""
    index: int = 0


class SyntheticText(SyntheticSteps):
    """Answers a prompt with ``marker:0 marker:1 …``; the marker is the prompt's, or its last user message's text.

    A tool that must be called, or that the marker names, is called with the marker and nothing is written. See
    `adapters.synthetic_tokens` for what comes on the other ports.
    """

    accepts: ClassVar[dict[str, str]] = {"prompt": "json", "images": "image", "audio": "audio", "video": "video"}
    optional_inputs = frozenset({"images", "audio", "video"})
    emits: ClassVar[dict[str, str]] = {
        "text": "text",
        "reasoning": "text",
        "tool_calls": "json",
        "rendered": "json",
        "embedding": "tensor",
    }
    Options = TextOptions
    Params = TextParams

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request with one prompt.

        Raises:
            BadInput: no prompt that can be read.
            InputTooLarge: more words than `max_prompt_tokens`.
        """
        params: TextParams = request.params
        refuse_unhonoured(params, UNHONOURED, "synthetic-text")
        plan: TextOptions = plan_of(self.options, params)
        prompt, marker, text = read_chat(inputs)
        prompt_tokens = len(text.split())
        if prompt_tokens > plan.max_prompt_tokens:
            raise InputTooLarge(
                f"prompt: {prompt_tokens} tokens came (allowed: {plan.max_prompt_tokens})", field="prompt"
            )
        num_tokens, finish = _length(plan, params)
        if request.outputs and request.outputs <= {"rendered", "embedding"}:
            num_tokens = 0
        state = _TextState(
            plan, params, marker_of(marker), prompt_tokens, num_tokens, finish, request.outputs, prompt, text
        )
        self._batch.add(request.id, state)

    def _advance(self, request: RequestId, live: _TextState) -> list[Event]:
        events = self._first(request, live) if live.index == 0 else []
        if events and isinstance(events[-1], Finished):
            return events
        first = live.index * live.plan.tokens_per_step
        end = min(first + live.plan.tokens_per_step, live.num_tokens)
        if "text" in live.outputs and end > first:
            pieces = [text_piece(live.marker, i, live.plan.chunk_bytes) for i in range(first, end)]
            events.append(Output(request, "text", Text("".join(pieces), end - first, _tokens(live, pieces, first))))
        if end >= live.num_tokens:
            usage = Usage(prompt_tokens=live.prompt_tokens, completion_tokens=end)
            events.append(Finished(request, Finish(live.finish, usage)))
        return events

    def _first(self, request: RequestId, live: _TextState) -> list[Event]:
        """Return what comes before the text, or instead of it."""
        events: list[Event] = []
        if "rendered" in live.outputs:
            found = synthetic_tokens.rendered(live.text, live.plan.max_prompt_tokens, live.params.prompt_logprobs)
            events.append(Output(request, "rendered", Json(synthetic_tokens.as_value(found))))
        if "embedding" in live.outputs:
            events.append(Output(request, "embedding", synthetic_tokens.embedding(live.text)))
        if "reasoning" in live.outputs:
            pieces = [text_piece(f"{live.marker}?", i) for i in range(live.params.thoughts)]
            events += [Output(request, "reasoning", Text(piece, 1)) for piece in pieces]
        if "tool_calls" in live.outputs and live.prompt is not None:
            deltas = synthetic_tokens.calls_of(live.prompt, live.marker)
            events += [Output(request, "tool_calls", Json(synthetic_tokens.as_value(delta))) for delta in deltas]
            if deltas:
                usage = Usage(prompt_tokens=live.prompt_tokens, completion_tokens=len(deltas))
                events.append(Finished(request, Finish("tool_calls", usage)))
        return events


def _tokens(live: _TextState, pieces: list[str], first: int) -> tuple[Token, ...]:
    """Return the tokens of a step's words, where ids or log-probabilities were asked for."""
    params = live.params
    if params.logprobs is None and not params.token_ids:
        return ()
    return tuple(
        synthetic_tokens.generated(piece.encode(), first + i, params.logprobs) for i, piece in enumerate(pieces)
    )


def _length(plan: TextOptions, params: TextParams) -> tuple[int, str]:
    """Return the number of tokens of an answer, and the reason with which it ends."""
    wanted = max(plan.tokens, params.min_tokens)
    if params.max_tokens is None:
        if params.ignore_eos:
            raise BadInput(
                "ignore_eos: true came without max_tokens (allowed: true with max_tokens)", field="ignore_eos"
            )
        return wanted, "stop"
    if params.ignore_eos or params.max_tokens < wanted:
        return params.max_tokens, "length"
    return wanted, "stop"


def read_chat(inputs: dict[str, list[Payload]]) -> tuple[Prompt | None, str, str]:
    """Return a prompt, the text that marks it, and all of its text with a word for each picture, sound and video.

    Raises:
        BadInput: no prompt that can be read; names the place.
    """
    payloads = inputs.get("prompt", [])
    if len(payloads) == 1 and not _is_marked(payloads[0]):
        prompt = chat.read_prompt(payloads[0], "synthetic-text", HONOURED)
        if prompt.token_ids is not None:
            text = marker = synthetic_tokens.decode(prompt.token_ids)
        elif prompt.text is not None:
            text = marker = prompt.text
        else:
            messages = chat.plain_messages(prompt)
            marker = _last_words(messages)
            text = " ".join(message["content"] for message in messages)
        media = [payload for port in ("images", "audio", "video") for payload in inputs.get(port, [])]
        return prompt, marker, " ".join([text, *synthetic_tokens.media_words(media)])
    marker, _ = read_prompt(payloads)
    return None, marker, marker


def _is_marked(payload: Payload) -> bool:
    return isinstance(payload, Json) and isinstance(payload.value, dict) and "marker" in payload.value


def _last_words(messages: list[dict[str, str]]) -> str:
    texts = [message["content"] for message in messages if message["role"] == "user"]
    return texts[-1] if texts else messages[-1]["content"]


def read_prompt(payloads: Sequence[Payload]) -> tuple[str, int]:
    """Return the text that marks a prompt, and the number of words in all of it.

    Args:
        payloads: one of kind json: ``{"marker": text}``, or ``{"messages": [...]}`` as in `adapters.chat`, of which the
            last user message is the marker.

    Raises:
        BadInput: anything else; names the place.
    """
    if len(payloads) != 1:
        raise BadInput(f"prompt: {len(payloads)} payloads came (allowed: one)", field="prompt")
    payload = payloads[0]
    if isinstance(payload, Json) and _is_marked(payload):
        if list(payload.value) != ["marker"] or not isinstance(payload.value["marker"], str):
            raise BadInput("marker: not a string, or with other fields beside it (allowed: one string)", field="marker")
        marker = payload.value["marker"]
        return marker, len(marker.split())
    messages = chat.plain_messages(chat.read_prompt(payload, "synthetic-text"))
    return _last_words(messages), sum(len(message["content"].split()) for message in messages)


# --- relay --------------------------------------------------------------------------------------------------


class RelayOptions(StreamingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `SyntheticRelay`."""

    steps_per_piece: Amount = 1
    """Steps of work before each piece is passed on; `step_time_s` and `busy` say what a step costs."""


class RelayParams(WorkParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may set on `SyntheticRelay`."""

    steps_per_piece: Amount | None = None


class SyntheticRelay(SyntheticStream):
    """Passes text on, piece by piece and unchanged, after the work that it is told to do."""

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    Options = RelayOptions
    Params = RelayParams

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Take a piece, work, pass it on."""
        plan: RelayOptions = plan_of(self.options, request.params)
        num_pieces = 0
        with Progress(self._workload, plan) as progress:
            async for piece in inputs.port("text"):
                if not isinstance(piece, Text):
                    raise BadInput(f"text: {kind_of(piece)} came (allowed: text)", field="text")
                for _ in range(plan.steps_per_piece):
                    await progress.step()
                num_pieces += 1
                if "text" in request.outputs:
                    yield "text", piece
        yield Finish(detail={"pieces": num_pieces})


# --- speech -------------------------------------------------------------------------------------------------


class SpeechOptions(StreamingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `SyntheticSpeech`."""

    samples_per_character: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 480
    """Samples that each character of the input makes."""
    rate_hz: Annotated[int, msgspec.Meta(ge=1000, le=192_000)] = 24_000
    """Sample rate."""
    chunk_bytes: Annotated[int, msgspec.Meta(ge=2, le=2**24)] = 9_600
    """Bytes (two a sample) of one chunk at most; a chunk is one step and never joins two input pieces."""
    pace: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.0
    """Seconds of sound made in a second, besides `step_time_s`; 0: no limit."""
    first_sample: Bytes = 0
    """Where the ramp begins; tells requests apart."""


class SpeechParams(WorkParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may set on `SyntheticSpeech`."""

    samples_per_character: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    rate_hz: Annotated[int, msgspec.Meta(ge=1000, le=192_000)] | None = None
    chunk_bytes: Annotated[int, msgspec.Meta(ge=2, le=2**24)] | None = None
    pace: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    first_sample: Bytes | None = None


class SyntheticSpeech(SyntheticStream):
    """Speaks a counting ramp (s16 mono), so many samples for each character, while the text still streams in."""

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    Options = SpeechOptions
    Params = SpeechParams

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Take a piece of text, speak all of it, take the next."""
        plan: SpeechOptions = plan_of(self.options, request.params)
        chunk_samples = plan.chunk_bytes // 2
        num_characters = num_samples = 0
        with Progress(self._workload, plan) as progress:
            async for piece in inputs.port("text"):
                if not isinstance(piece, Text):
                    raise BadInput(f"text: {kind_of(piece)} came (allowed: text)", field="text")
                num_characters += len(piece.text)
                end = num_characters * plan.samples_per_character
                while num_samples < end:
                    count = min(chunk_samples, end - num_samples)
                    await progress.step(count / (plan.rate_hz * plan.pace) if plan.pace else 0.0)
                    if "audio" in request.outputs:
                        data = Blob(ramp(plan.first_sample + num_samples, count))
                        yield "audio", Audio(plan.rate_hz, 1, "s16", data)
                    num_samples += count
        yield Finish(detail={"characters": num_characters, "samples": num_samples})


# --- image --------------------------------------------------------------------------------------------------


class ImageOptions(StepOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `SyntheticImage`."""

    steps: Amount = 8
    """Steps to a finished picture."""
    width: Side = 256
    """Pixels."""
    height: Side = 256
    """Pixels; a picture is width * height * 3 bytes."""


class ImageParams(WorkParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may set on `SyntheticImage`."""

    steps: Amount | None = None
    width: Side | None = None
    height: Side | None = None


class _ImageState(msgspec.Struct):
    plan: ImageOptions
    marker: str
    outputs: frozenset[str]
    index: int = 0


class SyntheticImage(SyntheticSteps):
    """Draws a picture that says its prompt and step, after as many steps as it is told.

    ``image`` gets the finished picture, ``preview`` (if wanted) one after each step.
    """

    accepts: ClassVar[dict[str, str]] = {"prompt": "text"}
    emits: ClassVar[dict[str, str]] = {"image": "image", "preview": "image"}
    Options = ImageOptions
    Params = ImageParams

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request; the pieces of the prompt are joined.

        Raises:
            BadInput: no prompt.
        """
        pieces = [payload.text for payload in inputs.get("prompt", []) if isinstance(payload, Text)]
        if not pieces:
            raise BadInput("prompt: nothing came (allowed: text)", field="prompt")
        plan: ImageOptions = plan_of(self.options, request.params)
        self._batch.add(request.id, _ImageState(plan, marker_of("".join(pieces)), request.outputs))

    def _advance(self, request: RequestId, live: _ImageState) -> list[Event]:
        plan = live.plan
        is_last = live.index + 1 == plan.steps
        ports = [port for port in ("preview", *(("image",) if is_last else ())) if port in live.outputs]
        events: list[Event] = []
        if ports:
            data = self.context.allocate(3 * plan.width * plan.height)
            write_picture(PictureMark(live.marker, live.index, plan.steps), plan.height, plan.width, data.view)
            events += [Output(request, port, Image(plan.height, plan.width, 3, data)) for port in ports]
        if is_last:
            events.append(Finished(request, Finish(detail={"steps": plan.steps})))
        return events
