"""What bytes are, by the bytes themselves: labels, names and endings are a stranger's claims.

Headers of pictures are read here, in Python, so that a picture that would unfold to gigabytes is refused before any
decoder sees it. Every reader raises ValueError for what is damaged or cut off.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec

IMAGES: Final = ("png", "jpeg", "webp", "gif", "bmp")
CONTAINERS: Final = ("wav", "mp3", "flac", "ogg", "aac", "aiff", "mp4", "webm", "avi")
"""Sound and video; ``mp4`` stands for its whole family (mov, m4a, 3gp), ``webm`` for all Matroska."""

HEAD_BYTES = 64
"""`kind_of` needs no more than this."""

MAX_SCANS = 100
"""Of a progressive JPEG: each passes over the whole picture, so that a small file may cost minutes. Ten are usual."""

_CUT_OFF = "it is cut off"


class ImageHeader(msgspec.Struct, frozen=True):
    """What a picture's header says."""

    kind: str
    width: int
    height: int
    orientation: int = 1
    """How to turn it, from 1 (as it is) to 8 (Exif 2.3, tag 0x0112)."""


def kind_of(head: bytes) -> str | None:
    """Return what a file that begins so is, one of `IMAGES` or `CONTAINERS`; None for anything else."""
    match head[:4], head[8:12]:
        case b"\x89PNG", _ if head[:8] == b"\x89PNG\r\n\x1a\n":
            return "png"
        case b"GIF8", _ if head[4:6] in (b"7a", b"9a"):
            return "gif"
        case b"RIFF" | b"RF64", b"WAVE":
            return "wav"
        case b"RIFF", b"WEBP":
            return "webp"
        case b"RIFF", b"AVI ":
            return "avi"
        case b"FORM", b"AIFF" | b"AIFC":
            return "aiff"
        case b"fLaC", _:
            return "flac"
        case b"OggS", _:
            return "ogg"
        case b"\x1aE\xdf\xa3", _:
            return "webm"
        case _ if head[:3] == b"\xff\xd8\xff":
            return "jpeg"
        case _ if (
            head[:2] == b"BM" and len(head) >= 26 and head[14:18] in (b"\x0c\0\0\0", b"\x28\0\0\0", b"\x7c\0\0\0")
        ):
            return "bmp"
        case _ if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
            return "mp4"
        case _ if head[:3] == b"ID3":
            return "mp3"
        case _ if len(head) >= 4 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
            return _kind_of_frame(head)
        case _:
            return None


def _kind_of_frame(head: bytes) -> str | None:
    """Tell bare AAC (ISO/IEC 13818-7, layer always 0) from MPEG audio (ISO/IEC 11172-3, layer never 0)."""
    if head[1] & 0xF6 == 0xF0:
        return "aac"
    has_layer = head[1] & 0x06 != 0
    has_version = head[1] & 0x18 != 0x08
    has_rate = head[2] & 0xF0 != 0xF0 and head[2] & 0x0C != 0x0C
    return "mp3" if has_layer and has_version and has_rate else None


def image_header(data: bytes) -> ImageHeader:
    """Return what a picture's header says.

    Raises:
        ValueError: it is no picture of `IMAGES`, or damaged, or cut off.
    """
    kind = kind_of(data[:HEAD_BYTES])
    readers = {"png": _png, "jpeg": _jpeg, "webp": _webp, "gif": _gif, "bmp": _bmp}
    if kind not in readers:
        raise ValueError("it is none")
    try:
        header = readers[kind](data)
    except (IndexError, struct.error):
        raise ValueError(_CUT_OFF) from None
    if header.width < 1 or header.height < 1:
        raise ValueError("its header gives it no size")
    return header


# --- PNG (ISO/IEC 15948) --------------------------------------------------------------------------------------

_PNG_NEEDED = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


def _png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise ValueError("its header is damaged")
    width, height = struct.unpack_from(">II", data, 16)
    return ImageHeader("png", width, height)


def bare_png(data: bytes) -> bytes:
    """Return a PNG with nothing but what its pixels need.

    Compressed texts and colour profiles are left out: FFmpeg unfolds them whole, a few hundred kilobytes to gigabytes.
    So are further frames of an animation.

    Raises:
        ValueError: a chunk is damaged or missing.
    """
    view = memoryview(data)
    kept: list[bytes | memoryview] = [view[:8]]
    at = 8
    kind = b""
    while kind != b"IEND":
        if at + 12 > len(data):
            raise ValueError(_CUT_OFF)
        (length,) = struct.unpack_from(">I", data, at)
        kind, end = data[at + 4 : at + 8], at + 12 + length
        if end > len(data):
            raise ValueError(_CUT_OFF)
        if kind in _PNG_NEEDED:
            if zlib.crc32(view[at + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
                raise ValueError("a checksum of it is wrong")
            kept.append(view[at:end])
        at = end
    return b"".join(kept)


# --- JPEG (ITU-T T.81, annex B) ---------------------------------------------------------------------------------

_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a length."""


def _jpeg(data: bytes) -> ImageHeader:
    at, size, orientation = 2, None, 1
    while True:
        while data[at] == 0xFF and data[at + 1] == 0xFF:
            at += 1
        if data[at] != 0xFF:
            raise ValueError("its header is damaged")
        marker = data[at + 1]
        if marker in _BARE:
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker in _SOF:
            height, width = struct.unpack_from(">HH", data, at + 5)
            size = (width, height)
        elif marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = _orientation(data[at + 10 : at + 2 + length])
        elif marker == 0xDA:
            break
        elif marker == 0xD9:
            raise ValueError("it holds no picture")
        at += 2 + length
    if size is None:
        raise ValueError("its header gives it no size")
    num_scans = data.count(b"\xff\xda", at)
    if num_scans > MAX_SCANS:
        raise ValueError(f"it has {num_scans} scans, at most {MAX_SCANS} are read")
    if data.find(b"\xff\xd9", at) < 0:
        raise ValueError(_CUT_OFF)
    return ImageHeader("jpeg", *size, orientation)


def _orientation(exif: bytes) -> int:
    """Return the orientation of TIFF data, 1 where there is none or none that makes sense."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (offset,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", exif, offset)
        for i in range(num_entries):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, offset + 2 + 12 * i)
            if tag == 0x0112 and kind == 3:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


# --- WebP (RFC 9649), GIF89a, BMP -------------------------------------------------------------------------------


def _webp(data: bytes) -> ImageHeader:
    if struct.unpack_from("<I", data, 4)[0] + 8 > len(data) + 1:  # an odd size may lack its padding
        raise ValueError(_CUT_OFF)
    match data[12:16]:
        case b"VP8X":
            if data[20] & 0x02:
                raise ValueError("it is animated, still ones are read")
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
        case _:
            raise ValueError("its header is damaged")
    return ImageHeader("webp", width, height)


def _gif(data: bytes) -> ImageHeader:
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[at] == 0x21:  # extensions before the first picture
        at = _after_blocks(data, at + 2)
    if data[at] != 0x2C:
        raise ValueError("it holds no picture")
    flags = data[at + 9]
    at += 10 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    _after_blocks(data, at + 1)  # FFmpeg takes half a picture for a whole one
    return ImageHeader("gif", width, height)


def _after_blocks(data: bytes, at: int) -> int:
    while data[at]:
        at += 1 + data[at]
    return at + 1


def _bmp(data: bytes) -> ImageHeader:
    if data[14] == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return ImageHeader("bmp", width, abs(height))  # a negative height: rows from the top
