"""Marks in synthetic output: how the engines write them, and how tests and benches read them back.

Each payload kind has a writer and a reader that needs nothing but the payload (no NumPy, no engine), so whatever stands
at the far end of a pipeline can tell a gap, a repeat or a mix-up of requests from correct output.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import zlib
from array import array
from functools import cache
from typing import NamedTuple

from omni_bus.wire.payloads import Audio, Blob, Image, Tensor, Video

MAX_MARKER_CHARACTERS = 48
"""A longer marker is cut: with its frame it must fit into the smallest picture at one pixel a bit."""

NO_MARKER = "unmarked"
"""The marker of an input without a word in it."""


def marker_of(text: str) -> str:
    """Return the marker that a text stands for: its words joined with ``_``, at most 48 characters, never empty."""
    marker = "_".join(text.split())[:MAX_MARKER_CHARACTERS] or NO_MARKER
    # Half a surrogate pair, as JSON escapes allow it, can't be encoded.
    return marker.encode("utf-8", "replace").decode()


def marker_crc(marker: str) -> int:
    """Return the CRC-32 by which an action names its marker."""
    return zlib.crc32(marker.encode())


# --- text: "marker:0 marker:1 marker:2" ---------------------------------------------------------------------


class TextMark(NamedTuple):
    """One synthetic word."""

    marker: str
    number: int


def text_piece(marker: str, number: int, size_bytes: int = 0) -> str:
    """Return the `number`-th word, filled up with dots to `size_bytes`; a space goes before each but the first."""
    word = f"{marker}:{number}" if number == 0 else f" {marker}:{number}"
    return word + "." * (size_bytes - len(word.encode()))


def read_text(text: str) -> list[TextMark]:
    """Read all words of a synthetic text, in their order.

    Raises:
        ValueError: a word that no synthetic engine writes.
    """
    marks: list[TextMark] = []
    for word in text.split():
        marker, colon, digits = word.rstrip(".").rpartition(":")
        if not (colon and digits.isdecimal()):
            raise ValueError(f"'{word[:80]}' at word {len(marks)} is no synthetic word (marker:number)")
        marks.append(TextMark(marker, int(digits)))
    return marks


# --- audio: s16 samples that count up -----------------------------------------------------------------------

RAMP_PERIOD = 32768
"""The ramp counts 0 … 32767 and begins again: only values that s16 holds, none of them negative."""


class Break(NamedTuple):
    """A place where the ramp does not go on: `expected` should have been at `position` (in samples)."""

    position: int
    expected: int
    found: int


class Ramp(NamedTuple):
    """What a counting ramp looked like on arrival."""

    first: int
    num_samples: int
    breaks: tuple[Break, ...]

    @property
    def is_unbroken(self) -> bool:
        """True if no sample is missing, repeated or changed."""
        return not self.breaks


@cache
def _ramp_table() -> memoryview:
    """Two periods, so that any stretch of up to one period is one slice: little-endian s16."""
    samples = array("h", range(RAMP_PERIOD))
    if sys.byteorder == "big":
        samples.byteswap()
    return memoryview(samples.tobytes() * 2)


def ramp(first: int, num_samples: int) -> bytes | memoryview:
    """Return `num_samples` s16 samples of the ramp, little-endian, from its `first`-th on."""
    start = first % RAMP_PERIOD
    table = _ramp_table()
    if num_samples <= RAMP_PERIOD:
        return table[2 * start : 2 * (start + num_samples)]
    whole, rest = divmod(num_samples, RAMP_PERIOD)
    period = bytes(table[2 * start : 2 * (start + RAMP_PERIOD)])
    return period * whole + period[: 2 * rest]


def read_ramp(pcm: Audio | bytes | bytearray | memoryview) -> Ramp:
    """Check that s16 mono samples count up by one throughout, wherever they begin.

    Raises:
        ValueError: not one channel of whole s16 samples.
    """
    if isinstance(pcm, Audio):
        if pcm.format != "s16" or pcm.channels != 1:
            raise ValueError(f"the ramp is s16 mono, this is {pcm.format} with {pcm.channels} channels")
        pcm = pcm.data.view
    data = bytes(pcm)
    if len(data) % 2:
        raise ValueError(f"{len(data)} bytes are not whole s16 samples")
    samples = array("h", data)
    if sys.byteorder == "big":
        samples.byteswap()
    if not samples:
        return Ramp(0, 0, ())
    if data == bytes(ramp(samples[0], len(samples))) and samples[0] >= 0:
        return Ramp(samples[0], len(samples), ())
    breaks = [
        Break(i, (samples[i - 1] + 1) % RAMP_PERIOD, samples[i])
        for i in range(1, len(samples))
        if samples[i] != (samples[i - 1] + 1) % RAMP_PERIOD
    ]
    if samples[0] < 0:
        breaks.insert(0, Break(0, 0, samples[0]))
    return Ramp(samples[0], len(samples), tuple(breaks))


# --- pictures: squares of black and white, one a bit --------------------------------------------------------

MIN_SIDE = 48
"""Pixels: at one pixel a bit, the longest marker fits (48 x 48 bits = 288 bytes)."""

_SQUARE_SIDES = (16, 8, 4, 2, 1)
_MAGIC = b"OB"
_HEADER = struct.Struct("<2sIIB")
_CRC = struct.Struct("<I")
_DARK, _BRIGHT, _GREY = b"\x20", b"\xe0", b"\x80"
"""Within video range (16 … 235) and far from the threshold, so that lossy coding keeps them apart."""


class PictureMark(NamedTuple):
    """What a synthetic picture says of itself: step (or frame) `step` of `total`."""

    marker: str
    step: int
    total: int


def write_picture(mark: PictureMark, height: int, width: int, into: memoryview) -> None:
    """Write uint8 RGB pixels, (height, width, 3), that carry `mark` and a CRC-32, to so many bytes of `into`.

    Squares are as large as the picture allows: from 8 pixels a side on they survive JPEG and H.264 at usual quality.
    Below the squares a grey field brightens with the step.
    """
    marker = mark.marker[:MAX_MARKER_CHARACTERS].encode()
    body = _HEADER.pack(_MAGIC, mark.step, mark.total, len(marker)) + marker
    message = body + _CRC.pack(zlib.crc32(body))
    num_bits = 8 * len(message)
    side = next(side for side in _SQUARE_SIDES if (height // side) * (width // side) >= num_bits)
    columns = width // side
    bits = f"{int.from_bytes(message, 'big'):0{num_bits}b}"
    squares = {"0": _DARK * (3 * side), "1": _BRIGHT * (3 * side)}
    end = 0
    for start in range(0, num_bits, columns):
        line = b"".join([squares[bit] for bit in bits[start : start + columns]])
        rows = line.ljust(3 * width, _GREY) * side
        begin, end = end, end + len(rows)
        into[begin:end] = rows
    rest = 3 * width * height - end
    if rest:  # in place: the field is most of a large picture
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(into, end)), 64 + mark.step % 128, rest)


def picture_pixels(mark: PictureMark, height: int, width: int) -> bytes:
    """Return what `write_picture` writes."""
    pixels = bytearray(3 * width * height)
    write_picture(mark, height, width, memoryview(pixels))
    return bytes(pixels)


def read_picture(pixels: memoryview, height: int, width: int, channels: int = 3) -> PictureMark:
    """Read the mark of one picture: uint8, (height, width, channels).

    Raises:
        ValueError: no mark in it, or one whose CRC is wrong.
    """
    for side in _SQUARE_SIDES:
        columns = width // side
        num_bits = columns * (height // side)
        header = _read_bytes(pixels, width, channels, side, 0, _HEADER.size) if num_bits >= 8 * _HEADER.size else b""
        if header[: len(_MAGIC)] != _MAGIC:
            continue
        _, step, total, length = _HEADER.unpack(header)
        size = _HEADER.size + length + _CRC.size
        if num_bits < 8 * size:
            continue
        message = _read_bytes(pixels, width, channels, side, 0, size)
        if _CRC.unpack(message[-_CRC.size :])[0] == zlib.crc32(message[: -_CRC.size]):
            return PictureMark(message[_HEADER.size : -_CRC.size].decode(), step, total)
    raise ValueError(f"no readable mark in a picture of {width} x {height} pixels with {channels} channels")


def _read_bytes(pixels: memoryview, width: int, channels: int, side: int, first: int, count: int) -> bytes:
    """Read squares as bits; each is judged by the mean of up to four pixels around its middle, first channel."""
    columns = width // side
    offsets = (0,) if side == 1 else (-1, 0)
    half = side // 2
    number = 0
    for bit in range(8 * first, 8 * (first + count)):
        row, column = divmod(bit, columns)
        y, x = row * side + half, column * side + half
        total = sum(pixels[((y + dy) * width + x + dx) * channels] for dy in offsets for dx in offsets)
        number = number << 1 | (total > 128 * len(offsets) ** 2)
    return number.to_bytes(count, "big")


def read_image(image: Image) -> PictureMark:
    """Read the mark of an image; see `read_picture`."""
    return read_picture(image.data.view, image.height, image.width, image.channels)


def read_video(video: Video) -> list[PictureMark]:
    """Read the mark of each frame; see `read_picture`."""
    size = video.height * video.width * 3
    return [
        read_picture(video.data.view[i * size : (i + 1) * size], video.height, video.width)
        for i in range(video.num_frames)
    ]


# --- actions: each row names its chunk, its place in it and the marker --------------------------------------

MARK_COLUMNS = 4
"""Chunk index, row within the chunk, high and low half of the marker's CRC-32: integers that float32 holds exactly."""


class ActionMark(NamedTuple):
    """One row of a synthetic action array."""

    chunk: int
    row: int
    crc: int
    echo: tuple[float, ...]


def floats_of(tensor: Tensor) -> array[float]:
    """Return the elements of a float32 tensor.

    Raises:
        ValueError: another dtype.
    """
    if tensor.dtype != "float32":
        raise ValueError(f"dtype is {tensor.dtype}, allowed is float32")
    values = array("f", bytes(tensor.data.view))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def action_tensor(marker: str, chunk: int, horizon: int, dof: int, echo: tuple[float, ...] = ()) -> Tensor:
    """Return float32 actions, (horizon, dof), `dof` at least 4; columns from 4 on repeat `echo`, else zero."""
    crc = marker_crc(marker)
    rest = (*echo, *([0.0] * dof))[: dof - MARK_COLUMNS]
    values = array("f")
    for row in range(horizon):
        values.extend((chunk, row, crc >> 16, crc & 0xFFFF, *rest))
    if sys.byteorder == "big":
        values.byteswap()
    return Tensor("float32", (horizon, dof), Blob(values.tobytes()))


def read_actions(tensor: Tensor) -> list[ActionMark]:
    """Read the rows of an action array; compare `crc` with `marker_crc`.

    Raises:
        ValueError: not float32, or not (rows, at least 4 columns).
    """
    values = floats_of(tensor)
    if len(tensor.shape) != 2 or tensor.shape[1] < MARK_COLUMNS:
        raise ValueError(f"shape is {tensor.shape}, allowed is (rows, at least {MARK_COLUMNS} columns)")
    rows, dof = tensor.shape
    marks: list[ActionMark] = []
    for row in range(rows):
        chunk, place, high, low, *echo = values[row * dof : (row + 1) * dof]
        marks.append(ActionMark(int(chunk), int(place), int(high) << 16 | int(low), tuple(echo)))
    return marks
