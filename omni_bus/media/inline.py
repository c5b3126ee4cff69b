"""Media inside a request: ``data:`` URLs (RFC 2397) and plain base64, bounded before anything is decoded.

The type that a data URL claims is not even looked at: the bytes say what they are (`omni_bus.media.sniff`).
"""

from __future__ import annotations

import binascii
import urllib.parse

from omni_bus.errors import BadInput
from omni_bus.media.spool import too_large

_PIECE_CHARACTERS = 4 * 64 * 1024
"""Decoded at a time: `binascii` keeps the interpreter, and other threads want their turn."""

_BLANKS = b" \t\n\f\r"
"""What the WHATWG's forgiving base64 skips (https://infra.spec.whatwg.org/#forgiving-base64-decode)."""

_ALLOWED = "allowed: base64 of the alphabet A-Z a-z 0-9 + /"


def is_data_url(text: str) -> bool:
    """Whether a text is meant as a data URL."""
    return text[:64].lstrip()[:5].lower() == "data:"


def decode_data_url_blocking(url: str, *, field: str, max_bytes: int) -> bytes:
    """Return what a data URL holds.

    Raises:
        BadInput: it is none, or its base64 is damaged.
        MediaTooLarge: it holds more than `max_bytes`.
    """
    head, comma, data = url.partition(",")
    if not comma:
        raise BadInput(f"{field}: a data URL without a comma came (allowed: data:TYPE;base64,DATA)", field=field)
    if head.rpartition(";")[2].strip().lower() == "base64":
        if "%" in data:
            _check_length(len(data) // 3 * 3 // 4, field, max_bytes)  # were every character written as %XX
            data = urllib.parse.unquote_to_bytes(data)
        return decode_base64_blocking(data, field=field, max_bytes=max_bytes)
    _check_length(len(data) // 3, field, max_bytes)
    found = urllib.parse.unquote_to_bytes(data)
    _check_length(len(found), field, max_bytes)
    return found


def decode_base64_blocking(text: str | bytes, *, field: str, max_bytes: int) -> bytes:
    """Return what base64 holds; blanks are skipped and padding may be missing, nothing else is forgiven.

    Raises:
        BadInput: a character outside of the alphabet, or an impossible length.
        MediaTooLarge: it holds more than `max_bytes`.
    """
    try:
        data = text.encode("ascii") if isinstance(text, str) else text
    except UnicodeEncodeError:
        raise BadInput(f"{field}: another character came ({_ALLOWED})", field=field) from None
    if any(blank in data for blank in _BLANKS):
        data = data.translate(None, _BLANKS)
    num_padding = len(data) - len(data.rstrip(b"="))
    num_characters = len(data) - num_padding
    _check_length(num_characters * 3 // 4, field, max_bytes)
    if num_characters % 4 == 1 or num_padding not in (0, -num_characters % 4):
        raise BadInput(f"{field}: base64 of {len(data)} characters came, which is cut off or too long", field=field)
    if data.find(b"=", 0, num_characters) >= 0:  # at the end of a piece it would pass
        raise BadInput(f"{field}: padding within base64 came ({_ALLOWED})", field=field)
    padded = memoryview(data[:num_characters] + b"=" * (-num_characters % 4))
    pieces: list[bytes] = []
    try:
        for start in range(0, len(padded), _PIECE_CHARACTERS):
            piece = padded[start : start + _PIECE_CHARACTERS]
            pieces.append(binascii.a2b_base64(piece, strict_mode=True))
    except binascii.Error:
        raise BadInput(f"{field}: another character came ({_ALLOWED})", field=field) from None
    return b"".join(pieces)


def _check_length(num_bytes: int, field: str, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise too_large(field, f"{num_bytes}", max_bytes)
