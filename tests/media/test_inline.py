"""Every honest spelling gives the same bytes; anything else is refused before it is decoded."""

from __future__ import annotations

import base64
import tracemalloc
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.errors import BadInput, MediaTooLarge
from omni_bus.media import inline
from omni_bus.media.inline import decode_base64_blocking, decode_data_url_blocking, is_data_url

DATA = bytes(range(256)) * 4 + b"\xff"
CODE = base64.b64encode(DATA).decode()


def of_url(url: str, max_bytes: int = 10_000) -> bytes:
    return decode_data_url_blocking(url, field="image_url.url", max_bytes=max_bytes)


def of_base64(text: str | bytes, max_bytes: int = 10_000_000) -> bytes:
    return decode_base64_blocking(text, field="data", max_bytes=max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        f"data:audio/wav;base64,{CODE}",
        f"DATA:Audio/X-Wav;BASE64,{CODE}",
        f"data:;base64,{CODE}",
        f"data:audio/vnd.some+thing;codecs=opus;base64,{CODE}",
        f'data:audio/wav;name="a b";base64,{CODE}',
        f"data:audio/wav; base64 ,{CODE}",
        f"data:audio/wav;base64,{CODE.rstrip('=')}",
        f"data:audio/wav;base64,{urllib.parse.quote(CODE, safe='')}",
        f"data:audio/wav;base64,\n{CODE[:76]}\r\n{CODE[76:]}\n",
        f"data:audio/wav,{urllib.parse.quote_from_bytes(DATA)}",
        f"data:,{urllib.parse.quote_from_bytes(DATA, safe='')}",
    ],
)
def test_spellings_of_one_file_are_the_same(url: str) -> None:
    assert is_data_url(url)
    assert of_url(url) == DATA


@given(st.binary(max_size=1000))
def test_base64_is_read_with_and_without_padding(data: bytes) -> None:
    code = base64.b64encode(data)

    assert of_base64(code) == data
    assert of_base64(code.rstrip(b"=").decode()) == data


def test_long_base64_is_the_sum_of_its_pieces() -> None:
    data = DATA * 1000

    assert len(data) > 3 * inline._PIECE_CHARACTERS
    assert of_base64(base64.b64encode(data)) == data


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "abcde",
        "ab=c",
        "ab==cd==",
        "abc=d",
        "=",
        "====",
        "abc==",
        "ab===",
        "ab=",
        "a-b_",
        "ab\xe9d",
        "ab\0d",
        "abc*",
        "漢字",
    ],
)
def test_what_is_no_base64_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadInput, match=r"^data: ") as caught:
        of_base64(text)
    assert caught.value.field == "data"


def test_padding_between_two_pieces_is_refused() -> None:
    """Each piece alone would be good."""
    piece = "A" * (inline._PIECE_CHARACTERS - 2) + "=="

    with pytest.raises(BadInput):
        of_base64(piece + piece)


@given(st.text(max_size=200))
def test_any_text_is_decoded_or_refused(text: str) -> None:
    for decode in (of_base64, lambda text: of_url(f"data:{text}")):
        try:
            assert isinstance(decode(text), bytes)
        except BadInput as error:
            assert error.field


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64," + "A" * 4_000_000,
        "data:;base64," + "%41" * 1_400_000,
        "data:," + "x" * 4_000_000,
    ],
    ids=["base64", "escaped base64", "plain"],
)
def test_size_is_refused_before_it_is_decoded(url: str) -> None:
    tracemalloc.start()
    with pytest.raises(MediaTooLarge, match=r"image_url\.url: \d+ bytes came \(allowed: at most 1000\)"):
        of_url(url, max_bytes=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 3 * len(url), "no more than the text's own copies"


def test_size_is_refused_by_the_byte() -> None:
    assert len(of_url(f"data:;base64,{CODE}", max_bytes=len(DATA))) == len(DATA)
    with pytest.raises(MediaTooLarge):
        of_url(f"data:;base64,{CODE}", max_bytes=len(DATA) - 1)
    assert of_url("data:,%41%41", max_bytes=2) == b"AA"
    with pytest.raises(MediaTooLarge):
        of_url("data:,%41%41A", max_bytes=2)


def test_url_without_data_is_refused() -> None:
    with pytest.raises(BadInput, match="without a comma"):
        of_url("data:image/png;base64")
    assert not is_data_url("http://example.com/data:")
