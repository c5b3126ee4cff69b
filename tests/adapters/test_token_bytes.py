from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from adapters.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

pytest.importorskip("transformers")


def wrapped(tokenizer: Tokenizer, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def byte_level() -> Any:
    """A vocabulary of the 256 bytes and an end token, as GPT-2's begins."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id_ for id_, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """A vocabulary with byte fallback and U+2581 for a space, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁cat": 3, "s": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("text", ["plain words", "naïve café", "日本語", "🙂 and\ttabs\n", "\x00\x7f\xad"])
def test_bytes_of_a_text_s_tokens_concatenate_to_it(byte_level: Any, text: str) -> None:
    table = TokenBytes(byte_level)
    ids = byte_level(text)["input_ids"]

    assert b"".join(table.raw(id_) for id_ in ids) == text.encode()


def test_token_may_be_a_part_of_a_character(byte_level: Any) -> None:
    table = TokenBytes(byte_level)
    first, second = byte_level("é")["input_ids"]

    assert (table.raw(first), table.raw(second)) == (b"\xc3", b"\xa9")


def test_special_token_stands_for_its_spelling(byte_level: Any) -> None:
    assert TokenBytes(byte_level).raw(byte_level.eos_token_id) == b"<|end|>"


def test_byte_fallback_and_spaces_of_sentencepiece(sentencepiece: Any) -> None:
    table = TokenBytes(sentencepiece)

    assert [table.raw(id_) for id_ in range(1, 5)] == [b"\xc3", b"\xa9", b" cat", b"s"]


def test_spelling_is_the_vocabulary_s(sentencepiece: Any) -> None:
    table = TokenBytes(sentencepiece)

    assert table.spelling(3) == "▁cat"
    assert table.spelling(99) in {"", "<unk>"}
