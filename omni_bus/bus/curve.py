"""CURVE keys: who we are on a TCP socket, whose keys we demand of others, and who may connect to us.

A deployment has one key pair that all of its actors share, and a list of clients that may connect from elsewhere. Its
folder, as ``omni-bus keys`` makes it, holds::

    deployment.key          public, for whoever connects
    deployment.key_secret   for the hosts of the deployment only
    allowed/laptop.key      the public key of the client 'laptop'

and the folder of a client holds ``deployment.key``, ``laptop.key`` and ``laptop.key_secret``.

Each end proves its key to the other: an actor sends only to holders of the deployment's secret key, or, for an actor
called ``client.laptop…``, of the key 'laptop'; and it takes messages of ``client.laptop…`` from that key only. So a
client may submit requests, but can't speak for a stage or the coordinator. (CurveZMQ is ZeroMQ's RFC 26; the files are
those of zmq.auth.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from omni_bus.errors import BadInput
from omni_bus.ids import CLIENT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

DEPLOYMENT = "deployment"
"""The pair of the actors, and what their connections are known as."""

ALLOWED = "allowed"
CLIENTS = "clients"
PUBLIC, SECRET = ".key", ".key_secret"

KEY_BYTES = 40
"""Of a key as text (Z85, ZeroMQ's RFC 32)."""

_CLIENT = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Curve:
    """The keys of one process, of a deployment's folder or a client's.

    Raises:
        BadInput: the folder is incomplete, holds something that is no key, or others may read the secret one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise BadInput(f"{folder}: no such folder (`omni-bus keys {folder}` makes it)", field="key_folder")
        secrets = sorted(self._folder.glob(f"*{SECRET}"))
        if len(secrets) != 1:
            names = ", ".join(path.name for path in secrets) or "none"
            raise BadInput(f"{folder}: one file *{SECRET} is needed (there: {names})", field="key_folder")
        self.name = secrets[0].name.removesuffix(SECRET)
        self.public, self.secret = _read_pair(secrets[0])
        self.deployment = (
            self.public if self.name == DEPLOYMENT else _read_public(self._folder / f"{DEPLOYMENT}{PUBLIC}")
        )
        self._allowed: dict[bytes, str] = {}
        self._seen: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def is_client(self) -> bool:
        """Whether these are a client's keys, and not the deployment's own."""
        return self.name != DEPLOYMENT

    def server_key(self, actor: str) -> bytes | None:
        """Return the key that the inbox of `actor` must have; None for a client that is not allowed."""
        if not actor.startswith(CLIENT_PREFIX):
            return self.deployment
        client = actor.removeprefix(CLIENT_PREFIX).partition(".")[0]
        return next((key for key, name in self._clients().items() if name == client), None)

    @property
    def allowed_folder(self) -> str:
        """Where the keys of allowed clients lie; a client's own folder has none."""
        return str(self._folder / ALLOWED)

    def may_stay(self, user: str, key: bytes) -> bool:
        """Whether a connection that was let in as `user` still would be, as of the last look at the folder."""
        return user == DEPLOYMENT or self._allowed.get(z85.encode(key)) == user.removeprefix(CLIENT_PREFIX)

    def user_of(self, key: bytes) -> str | None:
        """Return whose connection this is: `DEPLOYMENT` or ``client.NAME``; None for a key that may not connect.

        Args:
            key: public, in the 32 bytes that handshakes have.
        """
        text = z85.encode(key)
        if text == self.deployment:
            return DEPLOYMENT
        name = self._clients().get(text)
        return None if name is None else f"{CLIENT_PREFIX}{name}"

    def refresh(self) -> None:
        """Look at the folder."""
        self._clients()

    def _clients(self) -> dict[bytes, str]:
        """Return the allowed clients' names by key, read again whenever the folder or a file in it was changed.

        It is looked at for each new connection, so nothing has to watch it. A client's own folder has no such list.
        """
        folder = self._folder / ALLOWED
        seen = tuple(_listing(folder))
        if seen != self._seen:
            self._seen = seen
            self._allowed = {}
            for name, *_ in seen:
                try:
                    self._allowed[_read_public(folder / name)] = _client_name(
                        name.removesuffix(PUBLIC), f"{folder}/{name}"
                    )
                except BadInput as error:
                    logger.warning("a client's key is left out: %s", error.message)
        return self._allowed


def may_speak_as(user: str, actor: str) -> bool:
    """Whether messages of an actor of this name may come over a connection of `user` (`Curve.user_of`)."""
    if user == DEPLOYMENT:
        return not actor.startswith(CLIENT_PREFIX)
    return actor == user or actor.startswith(f"{user}.")


def make_deployment_keys(folder: Path, *, may_replace: bool) -> None:
    """Write a deployment's key pair and an empty list of clients.

    Raises:
        BadInput: there are keys already, or the folder can't be written.
    """
    with _writing(folder):
        for part in (folder, folder / ALLOWED):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_pair(folder, DEPLOYMENT, may_replace=may_replace)


def make_client_keys(folder: Path, client: str, *, may_replace: bool) -> Path:
    """Write a client's folder below the deployment's, and allow its key.

    Returns:
        The client's folder.

    Raises:
        BadInput: the name is not allowed or has keys already, there is no deployment key, or nothing can be written.
    """
    _client_name(client, f"--client {client}")
    _read_public(folder / f"{DEPLOYMENT}{PUBLIC}")
    own = folder / CLIENTS / client
    with _writing(folder):
        for part in (folder / CLIENTS, own, folder / ALLOWED):
            part.mkdir(mode=0o700, exist_ok=True)
        _make_pair(own, client, may_replace=may_replace)
        shutil.copyfile(folder / f"{DEPLOYMENT}{PUBLIC}", own / f"{DEPLOYMENT}{PUBLIC}")
        _copy_whole(own / f"{client}{PUBLIC}", folder / ALLOWED / f"{client}{PUBLIC}")
    return own


def _client_name(name: str, place: str) -> str:
    """Return the name; one with a dot in it could speak as another client's actor."""
    if not _CLIENT.fullmatch(name) or name == DEPLOYMENT:
        allowed = f"1 to 64 letters, digits, '_' or '-', and not '{DEPLOYMENT}'"
        raise BadInput(f"{place}: '{name}' is no name of a client (allowed: {allowed})", field="--client")
    return name


def _make_pair(folder: Path, name: str, *, may_replace: bool) -> None:
    """Write a pair beside its place and move it there whole, so that nobody reads half a key or another's mode."""
    for suffix in (SECRET, PUBLIC):
        path = folder / f"{name}{suffix}"
        if path.exists() and not may_replace:
            raise BadInput(f"{path} exists; --force replaces it, and what has the old key can't connect any more")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as draft:  # mode 0700
        create_certificates(draft, name)
        (Path(draft) / f"{name}{SECRET}").chmod(0o600)
        (Path(draft) / f"{name}{PUBLIC}").chmod(0o644)
        for suffix in (SECRET, PUBLIC):
            (Path(draft) / f"{name}{suffix}").rename(folder / f"{name}{suffix}")


def _copy_whole(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, draft)
    draft.rename(target)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"can't write keys to {folder}: {error.strerror}", field="FOLDER") from error


def _listing(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entry.name for entry in entries if entry.name.endswith(PUBLIC) and entry.name[0] != ".")
        for name in found:
            status = (folder / name).stat()
            yield name, status.st_mtime_ns, status.st_ino, status.st_size
    except OSError:  # no such folder, or it changes right now: whoever connects tries again
        return


def _read_public(path: Path) -> bytes:
    public, _ = _read(path)
    return public


def _read_pair(path: Path) -> tuple[bytes, bytes]:
    """Read a secret key's file, which holds both.

    Raises:
        BadInput: others may read it, or it is incomplete.
    """
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise BadInput(f"{path} has mode {mode:04o}, so others may use the key (allowed: 0600)", field="key_folder")
    public, secret = _read(path)
    if secret is None or zmq.curve_public(secret) != public:
        raise BadInput(f"{path} holds no pair of keys", field="key_folder")
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
        for key in (public, secret):
            if key is not None and (len(key) != KEY_BYTES or len(z85.decode(key)) != 32):
                raise ValueError
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error.strerror or 'no such file'}", field="key_folder") from error
    except (ValueError, KeyError, struct.error) as error:
        raise BadInput(f"{path} holds no CURVE key", field="key_folder") from error
    return public, secret
