"""What synthetic output says of itself is read back, and damage to it shows."""

from __future__ import annotations

from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.synthetic_marks import (
    MAX_MARKER_CHARACTERS,
    MIN_SIDE,
    NO_MARKER,
    RAMP_PERIOD,
    Break,
    PictureMark,
    TextMark,
    action_tensor,
    marker_crc,
    marker_of,
    picture_pixels,
    ramp,
    read_actions,
    read_image,
    read_picture,
    read_ramp,
    read_text,
    read_video,
    text_piece,
)
from omni_bus.wire.payloads import Audio, Blob, Image, Tensor, Video, check

# --- text


@given(st.text(), st.integers(1, 20), st.integers(0, 100))
def test_any_text_marks_its_words(text: str, count: int, size_bytes: int) -> None:
    marker = marker_of(text)
    written = "".join(text_piece(marker, i, size_bytes) for i in range(count))

    assert read_text(written) == [TextMark(marker, i) for i in range(count)]


def test_marker_is_never_empty() -> None:
    assert marker_of(" \n\t") == NO_MARKER


def test_half_surrogate_pair_is_replaced() -> None:
    assert marker_of("a\ud800b") == "a?b"


def test_piece_has_the_size_asked_for() -> None:
    assert len(text_piece("ü", 3, 40).encode()) == 40


@pytest.mark.parametrize("text", ["m:0 m:", "m:0 m", "m:0 m:x", "hello there"])
def test_foreign_word_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no synthetic word"):
        read_text(text)


# --- audio


@pytest.mark.parametrize("first", [0, 1, RAMP_PERIOD - 1, RAMP_PERIOD * 3 + 7])
@pytest.mark.parametrize("count", [0, 1, 5, RAMP_PERIOD, RAMP_PERIOD + 1, 3 * RAMP_PERIOD + 11])
def test_ramp_counts_without_break(first: int, count: int) -> None:
    samples = array("h", bytes(ramp(first, count)))

    assert samples == array("h", ((first + i) % RAMP_PERIOD for i in range(count)))
    assert read_ramp(samples.tobytes()).is_unbroken
    assert read_ramp(samples.tobytes()).num_samples == count


def test_pieces_of_a_ramp_join_unbroken() -> None:
    joined = b"".join(bytes(ramp(i * 777, 777)) for i in range(100))

    assert read_ramp(joined) == (0, 77_700, ())


def test_gap_shows_where_it_is() -> None:
    assert read_ramp(bytes(ramp(0, 10)) + bytes(ramp(15, 5))).breaks == (Break(10, 10, 15),)


def test_repeat_shows_where_it_is() -> None:
    assert read_ramp(bytes(ramp(0, 10)) + bytes(ramp(8, 5))).breaks == (Break(10, 10, 8),)


def test_changed_sample_shows_twice() -> None:
    samples = array("h", bytes(ramp(0, 10)))
    samples[4] = -5

    assert [spot.position for spot in read_ramp(samples.tobytes()).breaks] == [4, 5]


def test_negative_first_sample_is_a_break() -> None:
    assert not read_ramp(array("h", [-1, 0, 1]).tobytes()).is_unbroken


def test_other_sample_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="s16 mono"):
        read_ramp(Audio(24_000, 1, "f32", Blob(bytes(8))))
    with pytest.raises(ValueError, match="whole s16"):
        read_ramp(b"\0")


# --- pictures


@given(st.text(), st.integers(0, 2**32 - 1), st.integers(MIN_SIDE, 300), st.integers(MIN_SIDE, 300))
def test_picture_of_any_size_says_its_mark(text: str, step: int, height: int, width: int) -> None:
    mark = PictureMark(marker_of(text), step, 2**32 - 1)
    pixels = picture_pixels(mark, height, width)

    assert len(pixels) == height * width * 3
    assert read_picture(memoryview(pixels), height, width) == mark


def test_longest_marker_fits_the_smallest_picture() -> None:
    mark = PictureMark("\U0001f600" * MAX_MARKER_CHARACTERS, 1, 2)

    assert read_picture(memoryview(picture_pixels(mark, MIN_SIDE, MIN_SIDE)), MIN_SIDE, MIN_SIDE) == mark


def test_picture_with_alpha_is_read() -> None:
    mark = PictureMark("cat", 7, 8)
    rgb = picture_pixels(mark, 64, 64)
    rgba = b"".join(rgb[i : i + 3] + b"\xff" for i in range(0, len(rgb), 3))

    assert read_image(Image(64, 64, 4, Blob(rgba))) == mark


def test_steps_of_a_picture_differ() -> None:
    first, second = (picture_pixels(PictureMark("cat", step, 8), 64, 64) for step in (0, 1))

    assert first != second


def test_damaged_picture_is_refused() -> None:
    """One square is turned: the CRC no longer fits."""
    pixels = bytearray(picture_pixels(PictureMark("cat", 7, 8), 256, 256))
    side = 16
    line = 3 * 256
    for y in range(5 * side, 6 * side):
        spot = y * line + 3 * side * 2
        pixels[spot : spot + 3 * side] = bytes(255 - value for value in pixels[spot : spot + 3 * side])

    with pytest.raises(ValueError, match="no readable mark"):
        read_picture(memoryview(bytes(pixels)), 256, 256)


@pytest.mark.parametrize("pixels", [bytes(64 * 64 * 3), b"\xff" * (64 * 64 * 3)])
def test_picture_without_mark_is_refused(pixels: bytes) -> None:
    with pytest.raises(ValueError, match="no readable mark"):
        read_image(Image(64, 64, 3, Blob(pixels)))


@pytest.mark.parametrize("codec", ["mjpeg", "libx264"])
def test_mark_survives_lossy_coding(codec: str) -> None:
    av = pytest.importorskip("av")
    numpy = pytest.importorskip("numpy")
    marks = [PictureMark("a_red_cat", i, 4) for i in range(4)]
    encoder = av.CodecContext.create(codec, "w")
    encoder.width, encoder.height, encoder.time_base = 256, 256, Fraction(1, 24)
    encoder.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    packets = []
    for i, mark in enumerate(marks):
        pixels = numpy.frombuffer(picture_pixels(mark, 256, 256), numpy.uint8).reshape(256, 256, 3)
        frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
        frame.pts = i
        packets += encoder.encode(frame)
    packets += encoder.encode(None)
    decoder = av.CodecContext.create("mjpeg" if codec == "mjpeg" else "h264", "r")
    frames = [frame for packet in [*packets, None] for frame in decoder.decode(packet)]

    decoded = [Image(256, 256, 3, Blob(frame.to_ndarray(format="rgb24").tobytes())) for frame in frames]
    assert [read_image(image) for image in decoded] == marks


def test_each_frame_of_a_video_is_read() -> None:
    marks = [PictureMark("cat", i, 3) for i in range(3)]
    data = b"".join(picture_pixels(mark, 48, 64) for mark in marks)

    assert read_video(Video(0, 3, 48, 64, 1, 24, Blob(data))) == marks


# --- actions


@given(st.text(), st.integers(0, 2**24), st.integers(1, 40), st.integers(4, 12))
def test_every_row_names_chunk_and_marker(text: str, chunk: int, horizon: int, dof: int) -> None:
    marker = marker_of(text)
    tensor = action_tensor(marker, chunk, horizon, dof, (0.5, -2.0))
    check(tensor)

    marks = read_actions(tensor)

    assert [(mark.chunk, mark.row, mark.crc) for mark in marks] == [
        (chunk, row, marker_crc(marker)) for row in range(horizon)
    ]
    assert all(mark.echo == (0.5, -2.0, *([0.0] * dof))[: dof - 4] for mark in marks)


@pytest.mark.parametrize("tensor", [Tensor("float32", (4,), Blob(bytes(16))), Tensor("int32", (1, 4), Blob(bytes(16)))])
def test_other_tensors_are_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        read_actions(tensor)
