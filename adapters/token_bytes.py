"""What each token of a vocabulary stands for: its spelling, and its bytes, which may be a part of a character."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A single byte in vocabularies of SentencePiece with byte fallback."""


@cache
def _byte_letters() -> dict[str, int]:
    """Return the letter that byte-level vocabularies write for each byte (GPT-2's table).

    Printable Latin-1 stands for itself, the other bytes for the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """Looks tokens of a transformers tokenizer up."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None else json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._is_byte_level = '"ByteLevel"' in decoder
        self._raw: dict[int, bytes] = {}

    def spelling(self, token: int) -> str:
        """Return the token as the vocabulary spells it; empty for an id that it doesn't have."""
        return self._tokenizer.convert_ids_to_tokens(token) or ""

    def raw(self, token: int) -> bytes:
        """Return the bytes of the text that the token stands for."""
        found = self._raw.get(token)
        if found is None:
            found = self._raw[token] = self._find(token)
        return found

    def _find(self, token: int) -> bytes:
        spelling = self.spelling(token)
        if token in self._special:
            return spelling.encode()
        if self._is_byte_level:
            letters = _byte_letters()
            if all(letter in letters for letter in spelling):
                return bytes(letters[letter] for letter in spelling)
            return spelling.encode()  # an added token, which is written as it is
        if found := _BYTE_TOKEN.fullmatch(spelling):
            return bytes([int(found[1], 16)])
        return spelling.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
