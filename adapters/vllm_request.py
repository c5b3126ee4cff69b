"""Requests as vLLM takes them: sampling parameters and prompts, translated field by field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from adapters.chat import plain_messages, read_prompt, template_messages
from omni_bus.errors import BadInput
from omni_bus.wire.buffers import view
from omni_bus.wire.payloads import Audio, Image, Video
from omni_bus.wire.prompt import MEDIA_PORTS, Rendered

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from adapters.sampling import SamplingParams, Structure
    from adapters.token_bytes import TokenBytes
    from omni_bus.wire.payloads import Payload
    from omni_bus.wire.prompt import Prompt

HONOURED = frozenset(
    {
        "messages",
        "text",
        "token_ids",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "mm_processor_kwargs",
        *MEDIA_PORTS.values(),
    }
)
"""Fields of a `Prompt` that vLLM honours."""

MODALITIES = {"images": "image", "audio": "audio", "video": "video"}
"""Our media ports and vLLM's names of the same."""


@dataclass(slots=True)
class VllmPrompt:
    """A prompt on its way into vLLM."""

    token_ids: list[int]
    text: str
    media: dict[str, list[Any]] = field(default_factory=dict)
    """By vLLM's modality; empty for text alone."""
    processor_kwargs: dict[str, Any] = field(default_factory=dict)

    def engine_prompt(self, cache_salt: str | None) -> dict[str, Any]:
        """Return vLLM's ``TokensPrompt``."""
        prompt: dict[str, Any] = {"prompt_token_ids": self.token_ids}
        if self.media:
            prompt["multi_modal_data"] = self.media
        if self.processor_kwargs:
            prompt["mm_processor_kwargs"] = self.processor_kwargs
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        return prompt


def sampling_arguments(params: SamplingParams) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams``, all but `output_kind` and `structured_outputs`.

    Raises:
        BadInput: `min_tokens` is above `max_tokens`.
    """
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BadInput(
            f"min_tokens: {params.min_tokens} is above max_tokens (allowed: at most {params.max_tokens})",
            field="min_tokens",
        )
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "seed": params.seed,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {int(token): bias for token, bias in params.logit_bias.items()} or None,
        "bad_words": list(params.bad_words) or None,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "skip_special_tokens": params.skip_special_tokens,
        "include_stop_str_in_output": params.include_stop_str_in_output,
    }


def structure_arguments(structure: Structure) -> dict[str, Any]:
    """Return the arguments of ``vllm.sampling_params.StructuredOutputsParams``.

    Raises:
        BadInput: not exactly one field is set.
    """
    wanted: dict[str, Any] = {
        "json_object": structure.json_object or None,
        "json": {} if structure.json is True else structure.json,
        "regex": structure.regex,
        "choice": None if structure.choice is None else list(structure.choice),
        "grammar": structure.grammar,
    }
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if structure.json is False:
        raise BadInput("structure.json: false allows no text (allowed: a JSON Schema or true)", field="structure.json")
    if len(wanted) != 1:
        raise BadInput(
            f"structure: {' and '.join(wanted) or 'nothing'} came (allowed: one of json_object, json, regex, choice "
            "and grammar)",
            field="structure",
        )
    return wanted


def read_inputs(
    inputs: Mapping[str, Sequence[Payload]],
    adapter: str,
    honours: Collection[str],
    tokenizer: Any,
    *,
    template: str | None,
    may_bring_template: bool,
    modalities: Collection[str] | None = None,
) -> tuple[Prompt, VllmPrompt]:
    """Return a request's prompt, checked, and what it comes to with its media, which the model must be able to read.

    Raises:
        BadInput: it is not one prompt, or asks for what `adapter` does not honour; see also `render`.
    """
    payloads = inputs.get("prompt", [])
    if len(payloads) != 1:
        raise BadInput(f"prompt: {len(payloads)} payloads came (allowed: one)", field="prompt")
    asked = read_prompt(payloads[0], adapter, honours)
    for port, modality in MODALITIES.items():
        if inputs.get(port) and modalities is not None and modality not in modalities:
            read = ", ".join(other for other, name in MODALITIES.items() if name in modalities) or "none"
            raise BadInput(f"{port}: the model reads no {modality} (allowed: {read})", field=port)
    ids, text = render(asked, tokenizer, template=template, may_bring_template=may_bring_template)
    return asked, VllmPrompt(ids, text, media_of(asked, inputs), asked.mm_processor_kwargs)


def render(prompt: Prompt, tokenizer: Any, *, template: str | None, may_bring_template: bool) -> tuple[list[int], str]:
    """Return a prompt's tokens and its text, special tokens included.

    Args:
        prompt: as `adapters.chat.read_prompt` checked it.
        tokenizer: a tokenizer of transformers.
        template: the model's chat template where the tokenizer has none (a processor's).
        may_bring_template: whether the prompt's own template is used.

    Raises:
        BadInput: the chat template refuses the messages, or a template came that is not trusted.
    """
    if prompt.token_ids is not None:
        for i, token in enumerate(prompt.token_ids):
            if token >= len(tokenizer):
                raise BadInput(
                    f"token_ids[{i}]: {token} is not a token of the model (allowed: 0 to {len(tokenizer) - 1})",
                    field="token_ids",
                )
        return prompt.token_ids, tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    if prompt.text is not None:
        text, adds_special = prompt.text, prompt.add_special_tokens is not False
    else:
        text = _apply_template(prompt, tokenizer, template, may_bring_template=may_bring_template)
        adds_special = prompt.add_special_tokens is True
    ids = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
    return ids, (tokenizer.decode(ids, skip_special_tokens=False) if adds_special else text)


def _apply_template(prompt: Prompt, tokenizer: Any, template: str | None, *, may_bring_template: bool) -> str:
    import jinja2

    if prompt.chat_template is not None and not may_bring_template:
        raise BadInput(
            "chat_template: a template is a program (allowed: none, unless the stage sets trust_request_chat_template)",
            field="chat_template",
        )
    kwargs = dict(prompt.chat_template_kwargs)
    if prompt.reasoning_effort is not None:
        kwargs["reasoning_effort"] = prompt.reasoning_effort
    try:
        return tokenizer.apply_chat_template(
            _messages_of(prompt),
            tools=[_tool_of(tool) for tool in prompt.tools] or None,
            documents=prompt.documents or None,
            chat_template=prompt.chat_template or template,
            tokenize=False,
            add_generation_prompt=prompt.add_generation_prompt and not prompt.continue_final_message,
            continue_final_message=prompt.continue_final_message,
            **kwargs,
        )
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise BadInput(f"messages: the model's chat template refuses them: {error}", field="messages") from error


def _tool_of(tool: Any) -> dict[str, Any]:
    return msgspec.to_builtins(tool) | {"type": "function"}


def _messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """Return messages as templates read them: text as a string, unless there is media beside it."""
    has_media = any(
        part.type != "text"
        for message in prompt.messages
        if isinstance(message.content, list)
        for part in message.content
    )
    if has_media:
        return template_messages(prompt)
    plain = plain_messages(prompt)
    return [whole | {"content": flat["content"]} for whole, flat in zip(template_messages(prompt), plain, strict=True)]


def media_of(prompt: Prompt, inputs: Mapping[str, Sequence[Payload]]) -> dict[str, list[Any]]:
    """Return the media of a prompt by vLLM's modality, in reading order.

    Raises:
        BadInput: other payloads came than the messages have parts for.
    """
    parts = [part.type for message in prompt.messages if isinstance(message.content, list) for part in message.content]
    media: dict[str, list[Any]] = {}
    for port, modality in MODALITIES.items():
        payloads = inputs.get(port, ())
        # Text and token ids bring their own place holders.
        num_parts = parts.count(modality) if prompt.messages else len(payloads)
        if len(payloads) != num_parts:
            raise BadInput(
                f"{port}: {len(payloads)} payloads came for {num_parts} parts of type '{modality}' (allowed: one each)",
                field=port,
            )
        if payloads:
            media[modality] = [_medium_of(payload) for payload in payloads]
    return media


def _medium_of(payload: Payload) -> Any:
    match payload:
        case Image():
            return _picture_of(payload)
        case Audio():
            samples = view(payload)
            pcm = samples.astype(np.float32) / 32768 if payload.format == "s16" else np.asarray(samples, np.float32)
            pcm = pcm.reshape(-1, payload.channels).mean(axis=1)
            return pcm, payload.rate_hz
        case Video():
            return view(payload), _video_metadata(payload)
        case _:
            raise BadInput(f"media: {type(payload).__name__} came (allowed: image, audio, video)")


def _picture_of(image: Image) -> Any:
    from PIL.Image import fromarray

    pixels = view(image).reshape(image.height, image.width, image.channels)
    if image.channels == 1:
        pixels = pixels[:, :, 0]
    return fromarray(pixels).convert("RGB")


def _video_metadata(video: Video) -> dict[str, Any]:
    fps = video.time_base_den / video.time_base_num
    return {
        "fps": fps,
        "duration": video.num_frames / fps,
        "total_num_frames": video.num_frames,
        "frames_indices": list(range(video.num_frames)),
        "video_backend": "omni-bus",
        "do_sample_frames": False,
    }


def rendered_of(
    prompt: VllmPrompt, context_length: int, table: TokenBytes, logprobs: Sequence[Any] | None = None
) -> Rendered:
    """Return what a prompt came to.

    Args:
        prompt: the prompt; with media, the ids that vLLM expanded them to.
        context_length: of the model as it is served.
        table: the vocabulary.
        logprobs: vLLM's ``prompt_logprobs``, where they were asked for.
    """
    ids = prompt.token_ids
    return Rendered(
        token_ids=ids,
        text=prompt.text,
        token_strings=[table.spelling(id_) for id_ in ids],
        context_length=context_length,
        logprobs=None
        if logprobs is None
        else [
            None if place is None else candidates_of(id_, place, table)
            for id_, place in zip(ids, logprobs, strict=True)
        ],
    )


def candidates_of(chosen: int, place: Mapping[int, Any], table: TokenBytes) -> list[tuple[int, float, bytes]]:
    """Return one place of vLLM's log-probabilities: the chosen token, then the others, the most probable first."""
    ranked = sorted(place.items(), key=lambda item: (item[0] != chosen, -item[1].logprob))
    return [(id_, candidate.logprob, table.raw(id_)) for id_, candidate in ranked]
