from __future__ import annotations

import json
import random
import wave
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.dataset import (
    SENTENCES,
    Lengths,
    Prompt,
    draw,
    random_prompts,
    read_custom,
    read_custom_audio,
    read_sharegpt,
    sentence_prompts,
)
from omni_bus.errors import BadInput


@given(st.integers(1, 30), st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 9))
def test_random_prompts_have_the_wanted_lengths(count: int, words: int, tokens: int, ratio: float, prefix: int) -> None:
    lengths = Lengths(input_len=words, output_len=tokens, range_ratio=ratio, prefix_len=prefix)
    found = random_prompts(count, lengths, random.Random(7))

    assert found == random_prompts(count, lengths, random.Random(7))
    assert len({prompt.text.split()[prefix] for prompt in found}) == count
    assert len({tuple(prompt.text.split()[:prefix]) for prompt in found}) == 1
    for prompt in found:
        num_words = len(prompt.text.split()) - prefix
        assert max(1, round(words * (1 - ratio))) <= num_words <= max(1, round(words * (1 + ratio)))
        assert prompt.output_len is not None
        assert max(1, round(tokens * (1 - ratio))) <= prompt.output_len <= max(1, round(tokens * (1 + ratio)))


def test_custom_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "Hi", "output_tokens": 5, "note": 1}\n\n{"messages": [{"role": "user", "content": "Yo"}]}\n'
    )

    hi, yo = read_custom(str(path), None)

    assert (hi.as_messages(), hi.output_len) == ([{"role": "user", "content": "Hi"}], 5)
    assert (yo.as_messages(), yo.output_len) == ([{"role": "user", "content": "Yo"}], None)
    assert [prompt.output_len for prompt in read_custom(str(path), 9)] == [9, 9]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no line with a prompt"),
        ("\n \n", "has no line with a prompt"),
        ('{"prompt": "a"}\n{"prompt":', "line 2: Input data was truncated"),
        ('{"prompt": "a"}\n\n{"prompt": 3}', "line 3: Expected `str | null`, got `int` - at `$.prompt`"),
        ("[1]", "line 1: Expected `object`, got `array`"),
        ("{}", "line 1: neither of 'prompt' and 'messages' came (allowed: exactly one of them)"),
        ('{"prompt": "a", "messages": [{}]}', "line 1: both of 'prompt' and 'messages' came"),
        ('{"prompt": ""}', "line 1: an empty prompt came"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens 0 came (allowed: an integer, at least 1)"),
    ],
)
def test_bad_line_is_named_by_its_number(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)

    with pytest.raises(BadInput) as refused:
        read_custom(str(path), None)

    assert refused.value.message.startswith(f"--dataset-path {path}: {words}")
    assert "(allowed: " in refused.value.message


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere.jsonl: No such file or directory \(allowed: "):
        read_custom(str(tmp_path / "nowhere.jsonl"), None)


def test_sharegpt_asks_the_first_question(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    turns = [
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "It is so."},
        {"from": "human", "value": "Ah"},
    ]
    path.write_text(json.dumps([{"id": "x", "conversations": turns}, {"conversations": turns[:1]}, {}]))

    assert read_sharegpt(str(path), None) == [Prompt(text="Why?", output_len=4)]
    assert read_sharegpt(str(path), 99) == [Prompt(text="Why?", output_len=99)]


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"conversations": 3}]', '[{"conversations": [{"value": "a"}]}]'])
def test_sharegpt_without_a_conversation_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)

    with pytest.raises(BadInput, match=r"\(allowed: a list as"):
        read_sharegpt(str(path), None)


def test_file_is_taken_again_where_it_is_too_short() -> None:
    prompts = [Prompt(text=text) for text in "abc"]

    assert [p.text for p in draw(prompts, 5, random.Random(0), is_shuffled=False)] == ["a", "b", "c", "a", "b"]
    shuffled = draw(prompts, 300, random.Random(0), is_shuffled=True)
    assert sorted(p.text for p in shuffled) == ["a"] * 100 + ["b"] * 100 + ["c"] * 100


def test_every_sentence_is_said_before_one_comes_again() -> None:
    known = SENTENCES.read_text(encoding="utf-8").splitlines()
    found = sentence_prompts(20, 5, random.Random(0))

    assert len(set(known)) == 50
    said = " ".join(prompt.text for prompt in found)
    assert {said.count(sentence) for sentence in known} == {2}
    assert {said[: len(said) // 2].count(sentence) for sentence in known} <= {0, 1}
    assert found == sentence_prompts(20, 5, random.Random(0)) != sentence_prompts(20, 5, random.Random(1))


def test_sounds_are_read_beside_their_list(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8000))
    (tmp_path / "b.mp3").write_bytes(b"ID3")
    listing = tmp_path / "list.jsonl"
    listing.write_text('{"audio": "a.wav", "text": "Hi", "speaker": "x"}\n\n{"audio": "b.mp3"}\n')

    one, other = read_custom_audio(str(listing))

    assert (one.text, one.sound_name, one.sound_s, len(one.sound)) == ("Hi", "a.wav", 0.5, 8044)
    assert (other.text, other.sound_name, other.sound_s, other.sound) == ("", "b.mp3", None, b"ID3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no line with a sound (allowed: a JSON object as"),
        ("{}", "line 1: Object missing required field `audio`"),
        ('{"audio": 3}', "line 1: Expected `str`, got `int`"),
        ('\n{"audio": "nowhere.wav"}', "nowhere.wav: No such file or directory (allowed: a file that can be read)"),
    ],
)
def test_bad_list_of_sounds_is_refused(tmp_path: Path, text: str, words: str) -> None:
    listing = tmp_path / "list.jsonl"
    listing.write_text(text)

    with pytest.raises(BadInput) as refused:
        read_custom_audio(str(listing))

    assert words in refused.value.message
