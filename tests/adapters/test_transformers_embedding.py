from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from adapters import smollm2
from adapters.transformers_embedding import TransformersEmbedding
from omni_bus.errors import BadInput, Overloaded, StartFailed
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Json, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from omni_bus.wire.payloads import Payload

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

TEXTS = ("A cat sleeps on the sofa.", "A kitten naps on the couch.", "The bank raised its rates on loans again today.")


def text(words: str) -> dict[str, list[Payload]]:
    return {"prompt": [Json({"text": words})]}


def vectors_of(driver: StepDriver, *requests: str) -> list[np.ndarray]:
    vectors: list[np.ndarray] = []
    for result in driver.run(*requests):
        [payload] = result.port("embedding")
        assert isinstance(payload, Tensor)
        vectors.append(np.frombuffer(payload.data.view, np.float32).reshape(payload.shape))
    return vectors


@pytest.fixture(scope="module")
def loaded(cache: str) -> Iterator[TransformersEmbedding]:
    engine = make_engine(TransformersEmbedding, {"context_length": 64, "max_num_seqs": 4}, cache_dir=cache)
    yield engine
    engine.close()


@pytest.fixture
def driver(loaded: TransformersEmbedding) -> Iterator[StepDriver]:
    driver = StepDriver(loaded)
    yield driver
    for request in driver.live:
        driver.abort(request)


class Reference:
    """Hidden states as transformers itself gives them, one text at a time."""

    def __init__(self, folder: Path | str) -> None:
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)

    def states(self, words: str) -> np.ndarray:
        with torch.inference_mode():
            return self._model(**self._tokenizer(words, return_tensors="pt")).last_hidden_state[0].numpy()


def test_vectors_of_a_batch_are_those_of_each_text_alone(driver: StepDriver, cache: str) -> None:
    reference = Reference(smollm2.folder_for(cache))
    vectors = vectors_of(driver, *(driver.add(text(words)) for words in TEXTS))

    for words, vector in zip(TEXTS, vectors, strict=True):
        expected = reference.states(words).mean(axis=0)
        assert vector.shape == (576,)
        assert np.allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)


def test_one_step_serves_several_texts(driver: StepDriver, loaded: TransformersEmbedding) -> None:
    requests = [driver.add(text(words)) for words in TEXTS]
    driver.step()

    assert all(driver.results[request].is_finished for request in requests)
    used = driver.results[requests[0]].finish.usage.prompt_tokens
    assert used == len(loaded._tokenizer(TEXTS[0])["input_ids"])


def test_token_ids_are_a_text(driver: StepDriver, loaded: TransformersEmbedding) -> None:
    ids = loaded._tokenizer(TEXTS[0])["input_ids"]
    by_text, by_ids = vectors_of(driver, driver.add(text(TEXTS[0])), driver.add({"prompt": [Json({"token_ids": ids})]}))

    assert np.allclose(by_text, by_ids, atol=1e-6)


@pytest.fixture(scope="module")
def tiny(save_tiny: Callable[[Any, Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4
    )
    return save_tiny(config, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
def test_pooling_is_an_option(tiny: str, pooling: str) -> None:
    engine = make_engine(TransformersEmbedding, {"model": tiny, "pooling": pooling, "is_normalised": False})
    driver = StepDriver(engine)
    vectors = vectors_of(driver, *(driver.add(text(words)) for words in TEXTS))

    reference = Reference(tiny)
    for words, vector in zip(TEXTS, vectors, strict=True):
        states = reference.states(words)
        expected = {"mean": states.mean(axis=0), "last": states[-1], "first": states[0]}[pooling]
        assert np.allclose(vector, expected, atol=1e-5)


def test_step_takes_no_more_than_its_tokens(tiny: str) -> None:
    engine = make_engine(TransformersEmbedding, {"model": tiny, "max_batch_tokens": 20})
    driver = StepDriver(engine)
    requests = [driver.add(text(words)) for words in TEXTS]
    finished: list[int] = []
    while driver.live:
        driver.step()
        finished.append(sum(driver.results[request].is_finished for request in requests))

    assert finished == [2, 3]


def test_encoder_is_served(cache: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=49152, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4
    )
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(smollm2.folder_for(cache)).save_pretrained(tmp_path)
    driver = StepDriver(make_engine(TransformersEmbedding, {"model": str(tmp_path)}))

    assert [
        vector.shape for vector in vectors_of(driver, driver.add(text("one")), driver.add(text("two or three")))
    ] == [
        (32,),
        (32,),
    ]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"text": ""}, "text"),
        ({"text": "word " * 65}, "text"),
        ({"text": "a" * 100_000}, "text"),
        ({"token_ids": [49152]}, "token_ids"),
        ({"text": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_is_no_text_is_refused_by_name(driver: StepDriver, prompt: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field}: .*allowed") as caught:
        driver.add({"prompt": [Json(prompt)]})

    assert caught.value.field == field
    assert driver.live == []


def test_more_texts_than_places_are_refused(driver: StepDriver) -> None:
    for _ in range(4):
        driver.add(text("a"))

    with pytest.raises(Overloaded, match="4 texts"):
        driver.add(text("a"))


def test_model_that_needs_more_than_tokens_is_refused(tmp_path: Path, cache: str) -> None:
    config = transformers.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=1, intermediate_size=48, num_attention_heads=4, image_size=16, patch_size=8
    )
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(smollm2.folder_for(cache)).save_pretrained(tmp_path)

    with pytest.raises(StartFailed, match=r"^model: .* can't be served"):
        make_engine(TransformersEmbedding, {"model": str(tmp_path)})
