"""What a file is, by its bytes; and what a picture's header says, before any decoder sees it."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from samples import HEIGHT, WIDTH, images, png, png_chunk, sounds, videos, with_orientation

from omni_bus.media.sniff import CONTAINERS, HEAD_BYTES, IMAGES, MAX_SCANS, bare_png, image_header, kind_of

KINDS = {
    "m4a": "mp4",
    "mov": "mp4",
    "mkv": "webm",
}


@pytest.mark.parametrize("name", [*images(), *sounds(), *videos()])
def test_real_file_is_known_by_its_first_bytes(name: str) -> None:
    family = name.partition("-")[0]
    data = (images() | sounds() | videos())[name]

    assert kind_of(data[:HEAD_BYTES]) == KINDS.get(family, family)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"R",
        b"hello world",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"#EXTM3U\nhttp://127.0.0.1/x",
        b"ffconcat version 1.0\nfile /etc/passwd",
        b"%PDF-1.7",
        b"PK\x03\x04",
        b"RIFF\0\0\0\0XXXX",
        b"FORM\0\0\0\0XXXX",
        b"\xff\xff\xff\xff",
        b"\xff\xe8\xff\xff",
        b"BM" + b"\0" * 40,
        b"II*\0",
    ],
)
def test_anything_else_is_unknown(data: bytes) -> None:
    """Play lists above all, which make FFmpeg open what they name."""
    assert kind_of(data) is None


@given(st.binary(max_size=HEAD_BYTES))
def test_any_bytes_are_something_or_nothing(data: bytes) -> None:
    assert kind_of(data) in (None, *IMAGES, *CONTAINERS)


@pytest.mark.parametrize("name", [name for name in images() if name != "gif-animated"])
def test_header_tells_the_size(name: str) -> None:
    header = image_header(images()[name])

    assert (header.width, header.height) == (WIDTH, HEIGHT)
    assert header.kind == name.partition("-")[0]
    assert header.orientation == 1


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_read_from_exif(orientation: int, order: str) -> None:
    assert image_header(with_orientation(images()["jpeg"], orientation, order)).orientation == orientation


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientation_that_makes_no_sense_is_none(orientation: int) -> None:
    assert image_header(with_orientation(images()["jpeg"], orientation)).orientation == 1


@pytest.mark.parametrize("name", images())
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95])
def test_cut_off_picture_has_no_header_or_the_right_one(name: str, share: float) -> None:
    data = images()[name]
    try:
        header = image_header(data[: int(len(data) * share)])
    except ValueError as error:
        assert str(error) in {"it is none", "it is cut off"}
    else:
        assert header == image_header(data), "what lies behind the header is the decoder's business"


@given(st.sampled_from(sorted(images())), st.data())
def test_damaged_header_is_a_value_error(name: str, data: st.DataObject) -> None:
    damaged = bytearray(images()[name])
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, min(len(damaged), 200) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = image_header(bytes(damaged))
    except ValueError:
        return
    assert header.width > 0
    assert header.height > 0


@pytest.mark.parametrize("width", [0, 1, 2**31])
def test_size_is_what_the_header_says(width: int) -> None:
    data = bytearray(png(4, 4))
    data[16:20] = struct.pack(">I", width)
    if width:
        assert image_header(bytes(data)).width == width
    else:
        with pytest.raises(ValueError, match="no size"):
            image_header(bytes(data))


def test_picture_upside_down_has_a_size() -> None:
    data = bytearray(images()["bmp"])
    data[22:26] = struct.pack("<i", -HEIGHT)

    assert image_header(bytes(data)).height == HEIGHT


def test_jpeg_of_endless_scans_is_refused() -> None:
    data = images()["jpeg"]
    scan = data[data.index(b"\xff\xda") : -2]
    with pytest.raises(ValueError, match=rf"{MAX_SCANS + 1} scans"):
        image_header(data[:-2] + scan * MAX_SCANS + data[-2:])


def test_animated_webp_is_refused_by_name() -> None:
    body = b"WEBPVP8X" + struct.pack("<IB", 10, 0x02) + b"\0" * 9
    with pytest.raises(ValueError, match="animated"):
        image_header(b"RIFF" + struct.pack("<I", len(body)) + body)


def test_png_keeps_its_pixels_and_nothing_else() -> None:
    extras = [png_chunk(kind, b"x" * 100) for kind in (b"zTXt", b"iCCP", b"tEXt", b"acTL", b"fdAT", b"eXIf", b"abcd")]

    assert bare_png(png(4, 4, *extras)) == png(4, 4)
    assert bare_png(png(4, 4) + b"more") == png(4, 4)


@pytest.mark.parametrize("at", [20, 45, -20, -6])
def test_png_with_a_wrong_checksum_is_refused(at: int) -> None:
    data = bytearray(png(4, 4))
    data[at] ^= 1
    with pytest.raises(ValueError, match=r"checksum|cut off"):
        bare_png(bytes(data))
