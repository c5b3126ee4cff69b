from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adapters.chat import read_prompt
from adapters.sampling import SamplingParams, Structure
from adapters.token_bytes import TokenBytes
from adapters.vllm_request import (
    HONOURED,
    VllmPrompt,
    candidates_of,
    media_of,
    render,
    rendered_of,
    sampling_arguments,
    structure_arguments,
)
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Audio, Blob, Image, Json, Payload, Text, Video
from omni_bus.wire.prompt import Prompt

pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{tool {{ t.function.name }}}{% endfor %}"
    "{% if documents %}{docs {{ documents | length }}}{% endif %}"
    "{% if reasoning_effort %}{effort {{ reasoning_effort }}}{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes as tokens, a beginning token that the tokenizer adds, and a template that shows all that it is given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: id_ for id_, letter in enumerate(letters)} | {"<s>": len(letters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(["<s>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(letters))])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def prompt_of(**fields: Any) -> Prompt:
    return read_prompt(Json(fields), "vllm", HONOURED)


def text_of(tokenizer: Any, *, template: str | None = None, trusts: bool = False, **fields: Any) -> str:
    return render(prompt_of(**fields), tokenizer, template=template, may_bring_template=trusts)[1]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# --- prompts --------------------------------------------------------------------------------------------------


def test_messages_are_rendered_without_tokens_of_the_tokenizer_s_own(tokenizer: Any) -> None:
    ids, text = render(prompt_of(messages=user("hi")), tokenizer, template=None, may_bring_template=False)

    assert text == "[user]hi[assistant]"
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_parts_of_text_alone_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert text_of(tokenizer, messages=user(parts)) == "[user]ab[assistant]"


def test_parts_stay_parts_beside_media(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "what is "}, {"type": "image"}]

    assert text_of(tokenizer, messages=user(parts)) == "[user]what is <image>[assistant]"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "{tool f}"),
        ({"documents": [{"title": "a"}, {"title": "b"}]}, "{docs 2}"),
        ({"reasoning_effort": "high"}, "{effort high}"),
        ({"chat_template_kwargs": {"shout": True}}, "!"),
    ],
)
def test_field_reaches_the_template(tokenizer: Any, fields: dict[str, Any], shown: str) -> None:
    assert text_of(tokenizer, messages=user("hi"), **fields) == f"[user]hi{shown}[assistant]"


def test_answer_may_go_on_in_the_last_message(tokenizer: Any) -> None:
    messages = [*user("hi"), {"role": "assistant", "content": "well"}]

    assert text_of(tokenizer, messages=messages, continue_final_message=True) == "[user]hi[assistant]well"
    assert text_of(tokenizer, messages=messages, add_generation_prompt=False) == "[user]hi[assistant]well"


def test_template_of_a_request_needs_trust(tokenizer: Any) -> None:
    fields = {"messages": user("hi"), "chat_template": "own {{ messages[0].content }}"}

    assert text_of(tokenizer, trusts=True, **fields) == "own hi"
    with pytest.raises(BadInput, match="trust_request_chat_template") as refusal:
        text_of(tokenizer, **fields)
    assert refusal.value.field == "chat_template"


def test_template_that_refuses_says_why(tokenizer: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadInput, match="roles must alternate"):
        text_of(tokenizer, trusts=True, messages=user("hi"), chat_template=template)


@pytest.mark.parametrize(("adds", "shown"), [(None, "<s>hi"), (True, "<s>hi"), (False, "hi")])
def test_text_gets_the_tokenizer_s_own_tokens_unless_told_not_to(tokenizer: Any, adds: Any, shown: str) -> None:
    assert text_of(tokenizer, text="hi", add_special_tokens=adds) == shown


def test_token_ids_are_taken_as_they_are(tokenizer: Any) -> None:
    ids = tokenizer("hi", add_special_tokens=False)["input_ids"]

    assert render(prompt_of(token_ids=ids), tokenizer, template=None, may_bring_template=False) == (ids, "hi")


def test_id_beyond_the_vocabulary_is_refused(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=rf"token_ids\[1\]: 999 .*allowed: 0 to {len(tokenizer) - 1}"):
        text_of(tokenizer, token_ids=[1, 999])


def test_engine_prompt_has_what_is_set_and_nothing_else() -> None:
    assert VllmPrompt([1], "a").engine_prompt(None) == {"prompt_token_ids": [1]}
    assert VllmPrompt([1], "a", {"image": ["p"]}, {"k": 1}).engine_prompt("salt") == {
        "prompt_token_ids": [1],
        "multi_modal_data": {"image": ["p"]},
        "mm_processor_kwargs": {"k": 1},
        "cache_salt": "salt",
    }


# --- media ----------------------------------------------------------------------------------------------------


def picture(value: int, channels: int = 3) -> Image:
    return Image(2, 4, channels, Blob(bytes([value]) * (8 * channels)))


def test_media_are_listed_in_reading_order() -> None:
    prompt = prompt_of(messages=user([{"type": "image"}, {"type": "text", "text": "?"}, {"type": "image"}]))
    media = media_of(prompt, {"images": [picture(1), picture(2)]})

    assert list(media) == ["image"]
    assert [np.asarray(image)[0, 0].tolist() for image in media["image"]] == [[1, 1, 1], [2, 2, 2]]
    assert [image.size for image in media["image"]] == [(4, 2), (4, 2)]


@pytest.mark.parametrize("channels", [1, 4])
def test_picture_of_other_channels_becomes_rgb(channels: int) -> None:
    [image] = media_of(prompt_of(messages=user([{"type": "image"}])), {"images": [picture(7, channels)]})["image"]

    assert image.mode == "RGB"
    assert np.asarray(image)[1, 3].tolist() == [7, 7, 7]


@pytest.mark.parametrize(("format_", "dtype", "left", "right"), [("s16", "<i2", 16384, 0), ("f32", "<f4", 0.5, 0.0)])
def test_sound_becomes_one_channel_of_floats(format_: Any, dtype: str, left: float, right: float) -> None:
    samples = np.array([[left, right]] * 10, dtype)
    clip = Audio(16000, 2, format_, Blob(samples.tobytes()))
    [(pcm, rate)] = media_of(prompt_of(messages=user([{"type": "audio"}])), {"audio": [clip]})["audio"]

    assert rate == 16000
    assert pcm.dtype == np.float32
    assert pcm.tolist() == [0.25] * 10


def test_video_tells_its_times() -> None:
    clip = Video(0, 6, 2, 4, 1, 3, Blob(bytes(6 * 2 * 4 * 3)))
    [(frames, told)] = media_of(prompt_of(messages=user([{"type": "video"}])), {"video": [clip]})["video"]

    assert frames.shape == (6, 2, 4, 3)
    assert (told["fps"], told["duration"], told["total_num_frames"]) == (3.0, 2.0, 6)


@pytest.mark.parametrize("payloads", [[], [picture(1), picture(2)]])
def test_parts_and_payloads_must_agree(payloads: list[Payload]) -> None:
    with pytest.raises(BadInput, match=rf"images: {len(payloads)} payloads came for 1 parts"):
        media_of(prompt_of(messages=user([{"type": "image"}])), {"images": payloads})


def test_text_brings_its_own_place_holders() -> None:
    assert len(media_of(prompt_of(text="<image>"), {"images": [picture(1)]})["image"]) == 1


def test_payload_that_is_no_medium_is_refused() -> None:
    with pytest.raises(BadInput, match="Text came"):
        media_of(prompt_of(messages=user([{"type": "image"}])), {"images": [Text("no picture")]})


# --- parameters -----------------------------------------------------------------------------------------------


def test_every_parameter_has_a_place() -> None:
    """One that is added to `SamplingParams` must be translated here, or in the adapter."""
    elsewhere = {"token_ids", "structure", "cache_salt", "lora"}

    assert set(sampling_arguments(SamplingParams())) == set(SamplingParams.__struct_fields__) - elsewhere


def test_parameters_come_through() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=-1, stop=("a", "b"), logit_bias={"7": -1.5}, bad_words=("x",), logprobs=3, seed=4
    )
    arguments = sampling_arguments(params)

    assert arguments["top_k"] == 0
    assert arguments["stop"] == ["a", "b"]
    assert arguments["logit_bias"] == {7: -1.5}
    assert arguments["bad_words"] == ["x"]
    assert (arguments["temperature"], arguments["logprobs"], arguments["seed"]) == (0.5, 3, 4)


def test_min_tokens_above_max_tokens_are_refused() -> None:
    with pytest.raises(BadInput, match="min_tokens: 3 is above max_tokens"):
        sampling_arguments(SamplingParams(min_tokens=3, max_tokens=2))


@pytest.mark.parametrize(
    ("structure", "arguments"),
    [
        (Structure(json_object=True), {"json_object": True}),
        (Structure(json={"type": "object"}), {"json": {"type": "object"}}),
        (Structure(json=True), {"json": {}}),
        (Structure(regex="a+"), {"regex": "a+"}),
        (Structure(choice=("a", "b")), {"choice": ["a", "b"]}),
        (Structure(grammar="root ::= x"), {"grammar": "root ::= x"}),
    ],
)
def test_structure_becomes_one_constraint(structure: Structure, arguments: dict[str, Any]) -> None:
    assert structure_arguments(structure) == arguments


@pytest.mark.parametrize("structure", [Structure(), Structure(regex="a", grammar="b"), Structure(json=False)])
def test_structure_of_none_or_two_is_refused(structure: Structure) -> None:
    with pytest.raises(BadInput) as refusal:
        structure_arguments(structure)
    assert refusal.value.field.startswith("structure")


# --- what a prompt came to ------------------------------------------------------------------------------------


def place(**logprobs: float) -> dict[int, Any]:
    ranked = sorted(logprobs.items(), key=lambda item: -item[1])
    return {int(token[1:]): SimpleNamespace(logprob=value, rank=rank + 1) for rank, (token, value) in enumerate(ranked)}


def test_candidates_begin_with_the_chosen_one(tokenizer: Any) -> None:
    found = candidates_of(3, place(t1=-1.0, t2=-0.5, t3=-4.0), TokenBytes(tokenizer))

    assert [(id_, logprob) for id_, logprob, _ in found] == [(3, -4.0), (2, -0.5), (1, -1.0)]


def test_rendered_tells_tokens_and_their_logprobs(tokenizer: Any) -> None:
    ids = tokenizer("hi", add_special_tokens=False)["input_ids"]
    rendered = rendered_of(VllmPrompt(ids, "hi"), 64, TokenBytes(tokenizer), [None, place(**{f"t{ids[1]}": -0.25})])

    assert (rendered.token_ids, rendered.text, rendered.token_strings) == (ids, "hi", ["h", "i"])
    assert rendered.context_length == 64
    assert rendered.logprobs == [None, [(ids[1], -0.25, b"i")]]
    assert rendered_of(VllmPrompt(ids, "hi"), 64, TokenBytes(tokenizer)).logprobs is None
