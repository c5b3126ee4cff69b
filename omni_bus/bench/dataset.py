"""What is asked: prompts of wanted lengths, or those of a file."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

NAMES = ("random", "sentences", "custom", "custom_audio", "sharegpt")

SENTENCES = Path(__file__).with_name("sentences.txt")
"""Fifty plain English sentences of six to eleven words."""

_COMMON = (
    "the of and to in is that for it as was with on be by at this have from or had not are but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words called just where most know"
)
"""Most tokenisers have one token for each of these with the space before it."""
_WORDS = tuple(_COMMON.split())


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to ask."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    """In place of the text, for chat."""
    output_len: int | None = None
    """Tokens to make at most; None leaves it to the server."""
    sound: bytes = b""
    """A file in which the text is said, for routes that transcribe."""
    sound_name: str = ""
    """Of the file; some servers go by its ending."""
    sound_s: float | None = None
    """How long it is, where that is known."""

    def as_text(self) -> str:
        """For routes without turns: messages are joined."""
        return self.text or "\n".join(str(message.get("content", "")) for message in self.messages)

    def as_messages(self) -> list[dict[str, Any]]:
        """For chat."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Of synthetic prompts, in words, and of their answers, in tokens."""

    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths vary evenly between ``1 - ratio`` and ``1 + ratio`` of themselves."""
    prefix_len: int = 0
    """Words that begin every prompt."""


def random_prompts(count: int, lengths: Lengths, dice: random.Random, *, mark: str = "") -> list[Prompt]:
    """Return prompts of common words; after the shared prefix no two begin alike, so that no cache serves them.

    Args:
        count: how many.
        lengths: of prompts and answers.
        dice: decides words and lengths.
        mark: tells prompts apart that are the same otherwise.
    """
    prefix = dice.choices(_WORDS, k=lengths.prefix_len)
    found: list[Prompt] = []
    for number in range(count):
        num_words = _vary(lengths.input_len, lengths.range_ratio, dice)
        words = [*prefix, f"{mark}{dice.getrandbits(32):08x}{number}", *dice.choices(_WORDS, k=num_words - 1)]
        output_len = _vary(lengths.output_len, lengths.range_ratio, dice)
        found.append(Prompt(text=" ".join(words), output_len=output_len))
    return found


def _vary(length: int, ratio: float, dice: random.Random) -> int:
    low, high = max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))
    return dice.randint(low, high)


def sentence_prompts(count: int, num_sentences: int, dice: random.Random) -> list[Prompt]:
    """Return texts to speak: each of so many sentences, all of which are used before one comes again.

    Args:
        count: how many texts.
        num_sentences: in each.
        dice: decides the order.
    """
    known = SENTENCES.read_text(encoding="utf-8").splitlines()
    deck: list[str] = []
    while len(deck) < count * num_sentences:
        deck += dice.sample(known, len(known))
    places = range(0, count * num_sentences, num_sentences)
    return [Prompt(text=" ".join(deck[place : place + num_sentences])) for place in places]


class _Line(msgspec.Struct):
    """One line of a custom file; the other keys of a line are its author's own."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    output_tokens: int | None = None


def read_custom(path: str, output_len: int | None) -> list[Prompt]:
    """Return the prompts of a JSONL file: ``prompt`` or ``messages`` in each line, and ``output_tokens`` if wanted.

    Args:
        path: of the file.
        output_len: tokens to make; None for each line's own `output_tokens`.

    Raises:
        BadInput: an unreadable or empty file, or a line that is none of this, by its number.
    """
    found = [_prompt(path, number, line, output_len) for number, line in _lines(path)]
    if not found:
        raise _unreadable(path, "has no line with a prompt", 'one JSON object in each line, as {"prompt": "Hello"}')
    return found


def _prompt(path: str, number: int, line: bytes, output_len: int | None) -> Prompt:
    where = f"line {number}"
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise _unreadable(
            path, f"{where}: {error}", 'a JSON object as {"prompt": "Hello", "output_tokens": 128}'
        ) from error
    if (read.prompt is None) == (read.messages is None):
        came = "neither" if read.prompt is None else "both"
        raise _unreadable(path, f"{where}: {came} of 'prompt' and 'messages' came", "exactly one of them")
    if read.prompt == "" or read.messages == []:
        raise _unreadable(path, f"{where}: an empty prompt came", "at least one character or message")
    if read.output_tokens is not None and read.output_tokens < 1:
        raise _unreadable(path, f"{where}: output_tokens {read.output_tokens} came", "an integer, at least 1")
    wanted = output_len if output_len is not None else read.output_tokens
    return Prompt(text=read.prompt or "", messages=tuple(read.messages or ()), output_len=wanted)


class _AudioLine(msgspec.Struct):
    """One line of a custom file of sounds."""

    audio: str
    text: str = ""


def read_custom_audio(path: str) -> list[Prompt]:
    """Return the sounds of a JSONL file: ``audio``, a file, in each line, and ``text`` if it is known what is said.

    Args:
        path: of the file; those in it are relative to its folder.

    Raises:
        BadInput: an unreadable or empty file, or a line that is none of this, or whose sound can't be read.
    """
    shape = 'a JSON object as {"audio": "hello.wav", "text": "Hello"}'
    found: list[Prompt] = []
    for number, line in _lines(path):
        try:
            read = msgspec.json.decode(line, type=_AudioLine)
        except msgspec.DecodeError as error:
            raise _unreadable(path, f"line {number}: {error}", shape) from error
        file = Path(path).parent / read.audio
        try:
            sound = file.read_bytes()
        except OSError as error:
            raise _unreadable(path, f"line {number}: {file}: {error.strerror}", "a file that can be read") from error
        found.append(Prompt(text=read.text, sound=sound, sound_name=file.name, sound_s=_seconds(sound)))
    if not found:
        raise _unreadable(path, "has no line with a sound", shape)
    return found


def _seconds(sound: bytes) -> float | None:
    """Return how long a WAV file is; None for others, of which the server may tell it."""
    try:
        with wave.open(io.BytesIO(sound)) as file:
            return file.getnframes() / file.getframerate()
    except (wave.Error, EOFError):
        return None


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(path: str, output_len: int | None) -> list[Prompt]:
    """Return the first question of each conversation of a ShareGPT file: a JSON list of ``conversations``.

    Args:
        path: of the file.
        output_len: tokens to make; None for about as many as the first answer's words come to.

    Raises:
        BadInput: an unreadable file, or one without a conversation of two turns.
    """
    shape = 'a list as [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}]'
    try:
        read = msgspec.json.decode(_read(path), type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise _unreadable(path, str(error), shape) from error
    found: list[Prompt] = []
    for conversation in read:
        if len(conversation.conversations) >= 2 and conversation.conversations[0].value:
            question, answer = (turn.value for turn in conversation.conversations[:2])
            wanted = output_len or max(1, round(len(answer.split()) * 4 / 3))  # English has about 3 words for 4 tokens
            found.append(Prompt(text=question, output_len=wanted))
    if not found:
        raise _unreadable(path, "has no conversation of two turns", shape)
    return found


def draw(prompts: list[Prompt], count: int, dice: random.Random, *, is_shuffled: bool) -> list[Prompt]:
    """Return so many of a file's prompts, in its order or another; from the start again if there are fewer."""
    chosen = list(prompts)
    if is_shuffled:
        dice.shuffle(chosen)
    return [chosen[number % len(chosen)] for number in range(count)]


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            yield number, line


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error), "a file that can be read") from error


def _unreadable(path: str, what: str, allowed: str) -> BadInput:
    return BadInput(f"--dataset-path {path}: {what} (allowed: {allowed})", field="--dataset-path")
