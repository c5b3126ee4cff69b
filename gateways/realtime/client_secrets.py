"""``POST /v1/realtime/client_secrets``: keys of some minutes for a caller's own users, for live conversations only.

A secret holds what it allows, sealed with a key that all processes of the gateway share: none of them keeps a list, and
each knows the others' secrets. Who takes a caller's last API key away takes its secrets away as well, and who has keys
asked for those that were given out while none was.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import os
import secrets
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from gateways import openapi
from gateways.fields import names_of, read_fields, refuse_unknown
from gateways.http import KEY_NAME, json_response, keys_of, read_json
from gateways.openai_answers import RealtimeClientSecret
from gateways.openai_models import can_converse, find_model
from gateways.problems import Problem
from gateways.realtime.reading import with_plain_numbers
from gateways.realtime.session import READ_ONLY, ga_session, session_patch
from omni_bus.core.session.checks import check_prompt
from omni_bus.core.session.codes import SessionError
from omni_bus.core.session.config import SessionConfig, merged
from omni_bus.core.session.server_events import Capabilities, SessionView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateways.http import HttpOptions
    from omni_bus.core.pipeline import Pipeline

PATH = "/v1/realtime/client_secrets"

PREFIX = "ek_"

MIN_LIFE_S, MAX_LIFE_S, LIFE_S = 10, 7200, 600
"""OpenAI's."""

MAX_CHARACTERS = 6000
"""Of a secret: browsers send it in one line of a request's head, which may have 8190 bytes."""

KEY_FILE = "client_secrets.key"
KEY_BYTES = 32

OPERATION = openapi.Operation(
    method="post",
    path=PATH,
    name="create_realtime_client_secret",
    summary="A key of a few minutes that opens live conversations and nothing else",
    body={
        "type": "object",
        "properties": {
            "expires_after": {
                "type": "object",
                "properties": {
                    "anchor": {"enum": ["created_at"]},
                    "seconds": {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S},
                },
                "additionalProperties": False,
            },
            "session": {"type": "object", "description": "a session object, as in session.update"},
        },
        "additionalProperties": False,
    },
    answers={200: openapi.Answer(description="the secret", content={"application/json": RealtimeClientSecret})},
    errors=(404,),
)
"""For the OpenAPI document."""


class ClientSecret(msgspec.Struct, frozen=True, array_like=True):
    """What a secret allows."""

    caller: str
    """Whose requests its conversations are; empty where no key is needed."""
    expires_at: int
    """Seconds of the epoch; conversations that were opened before go on."""
    session: dict[str, Any]
    """The session object that they begin with."""


CLIENT_SECRET = web.RequestKey("client_secret", ClientSecret)
"""Of a request that came with one."""


class ExpiresAfter(msgspec.Struct, frozen=True):
    """How long a secret opens conversations."""

    anchor: Annotated[Literal["created_at"], Meta(description="created_at")] = "created_at"
    seconds: Annotated[
        Annotated[int, Meta(ge=MIN_LIFE_S, le=MAX_LIFE_S)],
        Meta(description=f"an integer from {MIN_LIFE_S} to {MAX_LIFE_S}"),
    ] = LIFE_S


class ClientSecretFields(msgspec.Struct, frozen=True):
    """All fields of a body."""

    expires_after: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    session: Annotated[dict[str, Any], Meta(description="a session object")] | None = None


# --- sealing ----------------------------------------------------------------------------------------------------


def sealed(secret: ClientSecret, key: bytes) -> str:
    """Return a secret's value."""
    packed = zlib.compress(msgspec.msgpack.encode(secret))
    mark = hmac.digest(key, packed, "sha256")
    return PREFIX + _text_of(mark + packed)


def _text_of(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def opened(value: str, key: bytes) -> ClientSecret | None:
    """Return what a value allows; None if it was not sealed with this key."""
    text = value.removeprefix(PREFIX)
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return None
    if _text_of(data) != text:  # base64 can be read in other spellings, and each value has one
        return None
    mark, packed = data[:KEY_BYTES], data[KEY_BYTES:]
    if not hmac.compare_digest(mark, hmac.digest(key, packed, "sha256")):
        return None
    return msgspec.msgpack.decode(zlib.decompress(packed), type=ClientSecret)


# --- the route --------------------------------------------------------------------------------------------------


class ClientSecrets:
    """Gives secrets out and takes them.

    Args:
        models: pipelines by every name that clients may use.
        options: limits of the gateway.
        folder: where the key is, which all processes of the gateway share.
        is_caller: whether there is still such a caller; an empty name is everybody, where no key is needed.
    """

    def __init__(
        self, models: Mapping[str, Pipeline], options: HttpOptions, folder: Path, is_caller: Callable[[str], bool]
    ) -> None:
        self._models = models
        self._options = options
        self._file = folder / KEY_FILE
        self._is_caller = is_caller
        self._key: bytes | None = None

    async def create(self, request: web.Request) -> web.Response:
        """Give one out.

        Raises:
            BadInput: a field has a value that is not allowed.
            Problem: 400, the session is none or too large; 404, there is no such model.
        """
        body = await read_json(request, self._options)
        refuse_unknown(body, names_of(ClientSecretFields))
        fields = read_fields(ClientSecretFields, body)
        given = fields.expires_after or {}
        refuse_unknown(given, names_of(ExpiresAfter), prefix="expires_after.")
        expires_at = int(time.time()) + read_fields(ExpiresAfter, given, prefix="expires_after.").seconds
        session = _plain(fields.session or {})
        shown = self._shown(session)
        value = sealed(ClientSecret(request[KEY_NAME], expires_at, session), self._read_key() or self._make_key())
        if len(value) > MAX_CHARACTERS:
            message = f"session: it makes a secret of {len(value)} characters (allowed: {MAX_CHARACTERS})"
            raise Problem(400, message, param="session")
        return json_response({"value": value, "expires_at": expires_at, "session": shown})

    def _shown(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return the session that conversations begin with, as clients are shown it.

        Raises:
            Problem: it is none, or there is no such model.
        """
        try:
            patch = session_patch(session)
            config = merged(SessionConfig(), patch)
            check_prompt(config.prompt, "session")
        except SessionError as error:
            raise Problem(400, error.message, param=error.param) from None
        model = find_model(patch.get("model"), self._models, can_converse, "holds live conversations").serve_as
        config = msgspec.structs.replace(config, model=patch.get("model") or model)
        name = f"sess_{secrets.token_hex(12)}"
        view = SessionView(id=name, config=config, capabilities=Capabilities(), created_at=0, expires_at=None)
        return ga_session(view)

    def take(self, request: web.Request) -> ClientSecret | None:
        """Return the secret that a request came with; None without one.

        Raises:
            Problem: 401, it is not good any more, or never was.
        """
        value = next((key for key in keys_of(request) if key.startswith(PREFIX)), None)
        if value is None:
            return None
        key = self._read_key()
        secret = None if key is None else opened(value, key)
        if secret is None or not self._is_caller(secret.caller):
            raise _refused("it is none of this server's")
        if secret.expires_at <= time.time():
            raise _refused("its time is over")
        return secret

    def _read_key(self) -> bytes | None:
        if self._key is None:
            with contextlib.suppress(FileNotFoundError):
                self._key = self._file.read_bytes()
        return self._key

    def _make_key(self) -> bytes:
        """Make the key; where another process is faster, its key counts."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(f"{KEY_FILE}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._file)
        draft.unlink()
        self._key = self._file.read_bytes()
        return self._key


def _plain(session: dict[str, Any]) -> dict[str, Any]:
    """Return what of a session object a client may say, as events say it.

    Raises:
        Problem: 400, it holds an integer of more than 64 bits, or nests too deep.
    """
    said = {name: value for name, value in session.items() if name not in READ_ONLY}
    try:
        return with_plain_numbers({"session": said})["session"]
    except SessionError as error:
        raise Problem(400, error.message, param=error.param) from None


def _refused(why: str) -> Problem:
    return Problem(401, f"client secret: {why}", headers={"WWW-Authenticate": "Bearer"})
