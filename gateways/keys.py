"""API keys: where they come from, whose each is, and reading their files again."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_bus.config.schema import CallerConfig

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024
"""Of one key file: more than any caller has."""


class KeySource(msgspec.Struct, frozen=True):
    """Where some keys come from."""

    place: str
    """How its settings begin: ``api_key`` of a gateway, ``callers.gold.key`` of a caller."""
    caller: str = ""
    """Whose they are; each of nobody's keys stands for a caller of its own."""
    keys: tuple[str, ...] = ()
    env: str = ""
    file: str = ""

    def read(self, *, may_be_empty: bool = False) -> list[str]:
        """Return all its keys.

        Args:
            may_be_empty: a file without a key is one whose keys were taken away.

        Raises:
            BadInput: the variable or the file is not there, can't be read, or holds no key.
        """
        keys = list(self.keys)
        if self.env:
            found = [key.strip() for key in os.environ.get(self.env, "").split(",") if key.strip()]
            if not found:
                raise self._fault("env", f"the environment has no key in {self.env}")
            keys += found
        if self.file:
            found = [line.strip() for line in self._text().splitlines() if line.strip()]
            if not found and not may_be_empty:
                raise self._fault("file", f"{self.file} holds no key")
            keys += found
        return keys

    def _text(self) -> str:
        try:
            with Path(self.file).open("rb") as stream:
                raw = stream.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise self._fault("file", f"{self.file} is larger than {MAX_FILE_BYTES} bytes")
            return raw.decode()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise self._fault("file", f"{self.file} can't be read: {reason}") from error

    def _fault(self, setting: str, reason: str) -> BadInput:
        field = f"{self.place}_{setting}"
        return BadInput(f"{field}: {reason}", field=field)


def sources_of(own: KeySource, callers: Mapping[str, CallerConfig]) -> list[KeySource]:
    """Return a gateway's own source, if it says anything, and those of the deployment's callers."""
    named = [
        KeySource(f"callers.{name}.key", name, caller.keys, caller.key_env, caller.key_file)
        for name, caller in callers.items()
    ]
    return [own, *named] if own.keys or own.env or own.file else named


class KeyRing:
    """The keys of some sources, as digests.

    Raises:
        BadInput: a source is not there or holds no key, or two callers have the same key.
    """

    def __init__(self, sources: Sequence[KeySource]) -> None:
        self._sources = tuple(sources)
        self._owners = self._read(may_be_empty=False)

    @property
    def is_guarded(self) -> bool:
        """Whether a key is needed at all; once it is, it stays so, even if every key is taken away."""
        return bool(self._sources)

    @property
    def files(self) -> list[str]:
        """Files whose change `reload` takes notice of."""
        return [source.file for source in self._sources if source.file]

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, key: str) -> str | None:
        """Return whose a key is; None if it is nobody's."""
        digest = _digest(key)
        owner = None
        # Every key is compared, so that the time tells nothing of which one came close.
        for known, caller in self._owners:
            if hmac.compare_digest(digest, known):
                owner = caller
        return owner

    def is_caller(self, name: str) -> bool:
        """Whether somebody of this name has a key; without a name, whether no key is needed."""
        return any(caller == name for _, caller in self._owners) if name else not self.is_guarded

    def reload(self) -> None:
        """Read everything again: all of it counts from now on, or, if something is wrong, what was there before."""
        owners, fault = self._owners, ""
        try:
            owners = self._read(may_be_empty=True)
        except BadInput as error:
            fault = error.message
        if fault:
            logger.error("API keys can't be read again, the former ones stay", extra={"fields": {"why": fault}})
        elif owners != self._owners:
            fields = {"keys": len(owners), "before": len(self._owners)}
            logger.log(logging.INFO if owners else logging.WARNING, "API keys read again", extra={"fields": fields})
            self._owners = owners

    def _read(self, *, may_be_empty: bool) -> list[tuple[bytes, str]]:
        owners: dict[bytes, str] = {}
        for source in self._sources:
            for key in source.read(may_be_empty=may_be_empty):
                digest = _digest(key)
                caller = source.caller or f"key-{digest.hex()[:12]}"
                if owners.setdefault(digest, caller) != caller:
                    raise BadInput(f"{source.place}: one of its keys is another caller's too", field=source.place)
        return list(owners.items())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
