"""The whole text contract on a tiny model with random weights, against transformers' own `generate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import transformers

from adapters.transformers_text import TransformersText
from omni_bus.errors import BadInput
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Json, Text
from omni_bus.wire.prompt import Rendered, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from omni_bus.testing import Collected

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NUM_TOKENS = 12
WORDS = "The quick brown fox"
CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
    "max_position_embeddings": 1024,
    # Weights of the usual size give logits so flat that every prompt looks alike.
    "initializer_range": 0.4,
}


class Tiny:
    """The engine, and the same model as transformers has it."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engine = make_engine(TransformersText, {"model": folder, "max_num_seqs": 4, "max_resident": 4, **options})

    def ask(self, prompt: dict[str, Any], params: dict[str, Any] | None = None, *outputs: str) -> Collected:
        """Run one request to its end."""
        driver = StepDriver(self.engine)
        request = driver.add({"prompt": [Json(prompt)]}, _greedy(params), outputs=outputs or ["text"])
        return driver.run(request)[0]

    def generate(self, text: str, **arguments: Any) -> tuple[list[int], torch.Tensor]:
        """Return transformers' greedy continuation and the logits behind each of its tokens."""
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        found = self.model.generate(
            **ids,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
            **arguments,
        )
        return found.sequences[0, ids["input_ids"].shape[1] :].tolist(), torch.cat(found.logits)


def _greedy(params: dict[str, Any] | None) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": NUM_TOKENS, **(params or {})}


@pytest.fixture(scope="module")
def folder(save_tiny: Callable[[Any, Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(transformers.LlamaConfig(**CONFIG), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: str) -> Iterator[Tiny]:
    tiny = Tiny(folder)
    yield tiny
    tiny.engine.close()


@pytest.fixture(scope="module")
def thinker(folder: str) -> Iterator[Tiny]:
    """One that reads reasoning, and trusts requests with templates."""
    thinker = Tiny(folder, reasoning_parser="think", trust_request_chat_template=True)
    yield thinker
    thinker.engine.close()


@pytest.fixture(autouse=True)
def _no_slot_left(tiny: Tiny) -> Iterator[None]:
    yield
    assert tiny.engine.statistics().num_free_slots == 4


def ids_of(result: Collected) -> list[int]:
    return [token.id for payload in result.port("text") for token in payload.tokens]


def arguments_of(result: Collected) -> list[tuple[str | None, str]]:
    """Return each call's name and arguments."""
    calls: dict[int, tuple[str | None, str]] = {}
    for payload in result.port("tool_calls"):
        delta = msgspec.convert(payload.value, ToolCallDelta)
        name, arguments = calls.get(delta.index, (delta.name, ""))
        calls[delta.index] = (name, arguments + delta.arguments)
    return [calls[index] for index in sorted(calls)]


# --- prompts ------------------------------------------------------------------------------------------------


def test_prompt_that_begins_as_another_goes_on_from_there(tiny: Tiny) -> None:
    """A step reads 64 tokens, so that is what is shared; the answer is the same, and only the same salt shares."""
    texts = [f"{WORDS} " * 18 + last for last in ("jumps", "sleeps")]
    expected = [tiny.generate(text)[0] for text in texts]
    assert expected[0] != expected[1]

    def ask(index: int, **params: Any) -> tuple[bool, int]:
        found = tiny.ask({"text": texts[index], "add_special_tokens": False}, {"token_ids": True, **params})
        return ids_of(found) == expected[index], found.finish.usage.cached_tokens

    assert ask(0) == (True, 0)
    assert ask(1) == (True, 64)
    assert ask(1, cache_salt="a") == (True, 0)
    assert ask(0, cache_salt="a") == (True, 64)


def test_every_form_of_a_prompt_comes_to_the_same(tiny: Tiny) -> None:
    messages = [{"role": "user", "content": WORDS}]
    text = tiny.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    forms = (
        {"messages": messages},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]},
        {"text": text},
        {"token_ids": tiny.tokenizer(text, add_special_tokens=False)["input_ids"]},
    )
    expected, _ = tiny.generate(text)

    assert [ids_of(tiny.ask(form, {"token_ids": True})) for form in forms] == [expected] * 4


def test_final_message_is_continued(tiny: Tiny) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, I"}]
    result = tiny.ask({"messages": messages, "continue_final_message": True}, None, "rendered")

    assert result.port("rendered")[0].value["text"].endswith("assistant\nWell, I")


def test_rendered_alone_generates_nothing(tiny: Tiny) -> None:
    result = tiny.ask({"text": WORDS}, None, "rendered")

    rendered = msgspec.convert(result.port("rendered")[0].value, Rendered)
    assert (rendered.text, rendered.context_length, rendered.logprobs) == (WORDS, 1024, None)
    assert rendered.token_ids == tiny.tokenizer(WORDS)["input_ids"]
    assert rendered.token_strings == tiny.tokenizer.tokenize(WORDS)
    assert (result.finish.usage.prompt_tokens, result.finish.usage.completion_tokens) == (4, 0)


def test_rendered_comes_first_beside_text(tiny: Tiny) -> None:
    result = tiny.ask({"text": WORDS}, {"prompt_logprobs": 0}, "rendered", "text")

    assert [port for port, _ in result.outputs][:2] == ["rendered", "text"]
    assert len(result.port("rendered")) == 1


@pytest.mark.parametrize("num_words", [1, 2, 100])
def test_prompt_logprobs_are_the_models_own(tiny: Tiny, num_words: int) -> None:
    """The longest is read in several pieces."""
    ids = tiny.tokenizer(" ".join(["word"] * num_words))["input_ids"][:200]
    result = tiny.ask({"token_ids": ids}, {"prompt_logprobs": 3}, "rendered")

    found = msgspec.convert(result.port("rendered")[0].value, Rendered).logprobs
    with torch.inference_mode():
        logs = tiny.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found is not None
    assert found[0] is None
    assert len(found) == len(ids)
    for position, row in enumerate(found[1:]):
        assert row is not None
        assert row[0][0] == ids[position + 1]
        best = logs[position].topk(3)
        assert [id_ for id_, _, _ in row[1:]] == [id_ for id_ in best.indices.tolist() if id_ != row[0][0]]
        for id_, logprob, raw in row:
            assert logprob == pytest.approx(logs[position, id_].item(), abs=1e-3)
            assert raw.decode() == tiny.tokenizer.decode([id_])


def test_tools_of_a_template_without_them_are_described(tiny: Tiny) -> None:
    result = tiny.ask(
        {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "tool_choice": "auto"}, None, "rendered"
    )

    assert '"name": "add"' in result.port("rendered")[0].value["text"]


def test_tools_that_must_not_be_called_are_not_described(tiny: Tiny) -> None:
    result = tiny.ask({"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}, None, "rendered")

    assert "add" not in result.port("rendered")[0].value["text"]


# --- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{}, {"temperature": 0.7, "top_p": 0.5, "seed": 1, "repetition_penalty": 1.3}])
def test_logprobs_are_of_the_unmodified_distribution(tiny: Tiny, changed: dict[str, Any]) -> None:
    result = tiny.ask({"text": WORDS}, {"logprobs": 2, "ignore_eos": True, **changed})

    ids = tiny.tokenizer(WORDS)["input_ids"]
    tokens = [token for payload in result.port("text") for token in payload.tokens]
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([ids + [token.id for token in tokens]])).logits[0, len(ids) - 1 :]
    logs = logits.log_softmax(-1)
    assert len(tokens) == result.finish.usage.completion_tokens == NUM_TOKENS
    for token, row in zip(tokens, logs, strict=False):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-3)
        assert [candidate.id for candidate in token.candidates] == row.topk(2).indices.tolist()
    assert sum(payload.num_tokens for payload in result.port("text")) == NUM_TOKENS


def test_bytes_of_tokens_make_up_the_text(tiny: Tiny) -> None:
    result = tiny.ask(
        {"text": "你好 🌍"}, {"token_ids": True, "temperature": 2.0, "seed": 3, "skip_special_tokens": False}
    )

    raw = b"".join(token.raw for payload in result.port("text") for token in payload.tokens)
    assert raw.decode(errors="replace") == result.text


def test_tokens_come_only_when_asked_for(tiny: Tiny) -> None:
    assert ids_of(tiny.ask({"text": WORDS})) == []


# --- the choice of tokens -----------------------------------------------------------------------------------


def test_logit_bias_equals_generates(tiny: Tiny) -> None:
    plain, _ = tiny.generate(WORDS)
    bias = {plain[0]: -100.0, 500: 3.5}
    expected, _ = tiny.generate(WORDS, sequence_bias=[[[id_], value] for id_, value in bias.items()])

    result = tiny.ask({"text": WORDS}, {"token_ids": True, "logit_bias": {str(id_): b for id_, b in bias.items()}})

    assert ids_of(result) == expected != plain


def test_bad_words_equal_generates(tiny: Tiny) -> None:
    plain, _ = tiny.generate(WORDS)
    word = tiny.tokenizer.decode(plain[2:4])
    spellings = [tiny.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (word, " " + word.lstrip())]
    expected, _ = tiny.generate(WORDS, bad_words_ids=spellings)

    assert ids_of(tiny.ask({"text": WORDS}, {"token_ids": True, "bad_words": [word]})) == expected


def test_seed_repeats_with_every_extra(tiny: Tiny) -> None:
    extras: dict[str, Any] = {
        "seed": 7,
        "temperature": 1.0,
        "token_ids": True,
        "logprobs": 1,
        "logit_bias": {"500": 2.0},
        "structure": {"regex": "[a-z ]{40}"},
    }
    alone = tiny.ask({"text": WORDS}, extras)
    driver = StepDriver(tiny.engine)
    requests = [driver.add({"prompt": [Json({"text": WORDS})]}, _greedy(extras), outputs=["text"]) for _ in range(2)]
    requests.append(driver.add({"prompt": [Json({"text": "Other"})]}, _greedy({}), outputs=["text"]))
    company = driver.run(*requests)

    assert ids_of(company[0]) == ids_of(company[1]) == ids_of(alone)


# --- the end ------------------------------------------------------------------------------------------------


def test_stop_string_is_part_of_the_text_when_asked_for(tiny: Tiny) -> None:
    text = tiny.ask({"text": WORDS}).text
    stop = text[4:7]
    without = tiny.ask({"text": WORDS}, {"stop": [stop]})
    result = tiny.ask({"text": WORDS}, {"stop": [stop], "include_stop_str_in_output": True})

    assert result.text == without.text + stop == text[: text.index(stop) + 3]
    assert result.finish.detail == {"stop_reason": stop}


def test_special_end_is_part_of_the_text_when_asked_for(tiny: Tiny) -> None:
    bias = {"logit_bias": {"2": 100.0}, "min_tokens": 2}
    ends = [
        tiny.ask({"text": WORDS}, bias | {"skip_special_tokens": skip, "include_stop_str_in_output": include}).text
        for skip, include in ((True, True), (False, False), (False, True))
    ]

    assert [text.count("<|im_end|>") for text in ends] == [0, 0, 1]


# --- structures ---------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_json_schema_holds_even_random_weights_to_it(tiny: Tiny, seed: int) -> None:
    params = {"structure": {"json": SCHEMA}, "temperature": 1.0, "seed": seed, "max_tokens": 200}
    result = tiny.ask({"text": WORDS}, params)

    value = json.loads(result.text)
    assert set(value) == {"name", "n"}
    assert len(value["name"]) <= 5
    assert result.finish.reason == "stop"


@pytest.mark.parametrize(
    ("structure", "allowed"),
    [
        ({"choice": ["yes", "no", "é\n"]}, {"yes", "no", "é\n"}),
        ({"regex": "(ab|cd){2}"}, {"abab", "abcd", "cdab", "cdcd"}),
        ({"grammar": 'root ::= "x" ("y" | "z")'}, {"xy", "xz"}),
        ({"grammar": 'start: "x" ("y" | "z")'}, {"xy", "xz"}),
        ({"json": {"enum": [1, None]}}, {"1", "null"}),
    ],
)
def test_text_is_of_the_structure(tiny: Tiny, structure: dict[str, Any], allowed: set[str]) -> None:
    result = tiny.ask({"text": WORDS}, {"structure": structure})

    assert result.text in allowed
    assert result.finish.reason == "stop"


def test_json_object_begins_one(tiny: Tiny) -> None:
    assert tiny.ask({"text": WORDS}, {"structure": {"json_object": True}}).text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("structure", "field"),
    [
        ({"json": {"type": "nonsense"}}, "structure.json"),
        ({"json": {"$ref": "#/$defs/missing"}}, "structure.json"),
        ({"json": False}, "structure.json"),
        ({"regex": "a(b"}, "structure.regex"),
        ({"grammar": "@@"}, "structure.grammar"),
        ({}, "structure"),
        ({"regex": "a", "choice": ["b"]}, "structure"),
    ],
)
def test_structure_that_is_none_is_refused_by_name(tiny: Tiny, structure: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}: .*allowed") as caught:
        tiny.ask({"text": WORDS}, {"structure": structure})

    assert caught.value.field == field


def test_structure_that_bad_words_forbid_fails_by_name(tiny: Tiny) -> None:
    result = tiny.ask({"text": WORDS}, {"structure": {"choice": ["a"]}, "bad_words": ["a"]})

    assert isinstance(result.error, BadInput)
    assert result.error.field == "structure"


# --- tools and reasoning ------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"n": {"$ref": "#/$defs/digit"}},
                "required": ["n"],
                "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def tool_prompt(choice: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "tool_choice": choice, **fields}


def test_named_tool_is_called(tiny: Tiny) -> None:
    result = tiny.ask(tool_prompt("function:add"), {"max_tokens": 200}, "text", "tool_calls")

    [(name, arguments)] = arguments_of(result)
    assert name == "add"
    assert 0 <= json.loads(arguments)["n"] <= 9
    assert result.finish.reason == "tool_calls"
    assert result.text == ""


def test_some_tool_is_called_when_one_is_required(tiny: Tiny) -> None:
    params = {"max_tokens": 200, "token_ids": True}
    result = tiny.ask(tool_prompt("required", parallel_tool_calls=False), params, "text", "tool_calls")

    [(name, arguments)] = arguments_of(result)
    assert len(ids_of(result)) == result.finish.usage.completion_tokens
    assert name in {"add", "stop"}
    assert isinstance(json.loads(arguments), dict)


def test_call_that_the_model_writes_by_itself_is_found(tiny: Tiny) -> None:
    """A grammar stands for the model's own wish."""
    written = 'Sure.<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    result = tiny.ask(tool_prompt("auto"), {"structure": {"choice": [written]}, "max_tokens": 60}, "text", "tool_calls")

    assert arguments_of(result) == [("stop", "{}")]
    assert (result.text, result.finish.reason) == ("Sure.", "tool_calls")


def test_earlier_calls_and_results_are_read(tiny: Tiny) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"n": 1}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "seven"},
    ]
    text = tiny.ask({"messages": messages}, None, "rendered").port("rendered")[0].value["text"]

    assert '{"name": "add", "arguments": {"n": 1}}' in text
    assert "seven" in text


def test_reasoning_goes_to_its_own_port(thinker: Tiny) -> None:
    params = {"structure": {"choice": ["<think>so</think>Yes."]}, "max_tokens": 40, "token_ids": True}
    result = thinker.ask({"text": WORDS}, params, "text", "reasoning")

    assert "".join(payload.text for payload in result.port("reasoning")) == "so"
    assert "".join(payload.text for payload in result.port("text")) == "Yes."
    every = [token for _, payload in result.outputs if isinstance(payload, Text) for token in payload.tokens]
    assert b"".join(token.raw for token in every) == b"<think>so</think>Yes."
    assert thinker.ask({"text": WORDS}, params).text == "Yes."


def test_structure_begins_after_reasoning_that_the_prompt_began(thinker: Tiny) -> None:
    result = thinker.ask({"text": "<think>"}, {"structure": {"choice": ["Yes."]}}, "text", "reasoning")

    assert result.port("text") == []
    assert "".join(payload.text for payload in result.port("reasoning"))
    assert result.finish.reason == "length"


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ({"text": WORDS}, {"logit_bias": {"49152": 1.0}}, "logit_bias"),
        ({"text": WORDS}, {"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"text": WORDS}, {"lora": "a"}, "lora"),
        ({"text": WORDS}, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"text": ""}, {}, "text"),
        ({"text": WORDS, "tools": TOOLS}, {}, "tools"),
        ({"text": WORDS, "continue_final_message": True}, {}, "continue_final_message"),
        ({"token_ids": [49152]}, {}, "token_ids"),
        ({"text": WORDS, "mm_processor_kwargs": {"a": 1}}, {}, "mm_processor_kwargs"),
        (tool_prompt("function:nobody"), {}, "tool_choice"),
        (tool_prompt("required"), {"structure": {"regex": "a"}}, "structure"),
        (tool_prompt("auto", chat_template="{{ messages }}"), {}, "chat_template"),
        (tool_prompt("auto", chat_template_kwargs={"thinking": True}), {}, "chat_template_kwargs.thinking"),
        (tool_prompt("auto", chat_template_kwargs={"tokenize": True}), {}, "chat_template_kwargs.tokenize"),
        (tool_prompt("auto", reasoning_effort="low"), {}, "reasoning_effort"),
        (tool_prompt("auto", documents=[{"text": "a"}]), {}, "documents"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "auto"}, {}, "tool_choice"),
    ],
)
def test_what_does_nothing_is_refused_by_name(
    tiny: Tiny, prompt: dict[str, Any], params: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput, match=rf"^{field}: .*allowed") as caught:
        tiny.ask(prompt, params)

    assert caught.value.field == field


def test_request_may_bring_a_template_where_that_is_allowed(thinker: Tiny) -> None:
    prompt = {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template": "{{ mood }}: {{ messages[0].content }}",
        "chat_template_kwargs": {"mood": "glad"},
    }

    assert thinker.ask(prompt, None, "rendered").port("rendered")[0].value["text"] == "glad: Hi"
