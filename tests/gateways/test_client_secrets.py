"""Keys of some minutes for live conversations: what they open and for whom, how they end, what can't be forged."""

from __future__ import annotations

import string
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import openai
import pytest
import websockets
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from gateways.keys import KeyRing, KeySource
from gateways.problems import Problem
from gateways.realtime import client_secrets
from gateways.realtime.client_secrets import KEY_BYTES, KEY_FILE, ClientSecret, ClientSecrets, opened, sealed
from tests.gateways.conversation import connected, deployed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running

MODEL = "synthetic-sessions"
KEYS = ("port = 0", 'port = 0\napi_keys = ["first", "second"]')


@pytest.fixture
async def deployment() -> AsyncIterator[Running]:
    async with deployed(KEYS) as deployment:
        yield deployment


@pytest.fixture
async def first(deployment: Running) -> AsyncIterator[AsyncOpenAI]:
    """The official client of one caller."""
    async with AsyncOpenAI(api_key="first", base_url=f"{deployment.url}/v1", max_retries=0) as client:
        yield client


async def refusal_of(deployment: Running, path: str, value: str) -> tuple[int, str]:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connected(deployment, path, additional_headers={"Authorization": f"Bearer {value}"}):
            pass
    return caught.value.response.status_code, (caught.value.response.body or b"").decode()


async def test_a_secret_opens_conversations_that_begin_as_it_says_and_nothing_else(
    deployment: Running, first: AsyncOpenAI
) -> None:
    session: Any = {
        "type": "realtime",
        "model": MODEL,
        "instructions": "Be brief",
        "output_modalities": ["text"],
        "audio": {"input": {"turn_detection": None}},
    }
    made = await first.realtime.client_secrets.create(session=session, expires_after={"seconds": 60})

    assert made.session.type == "realtime"
    assert made.session.instructions == "Be brief"
    browser = first.with_options(api_key=made.value)
    for _ in range(2):
        async with browser.realtime.connect(model=MODEL) as live:
            created: Any = await live.recv()
            assert created.session.instructions == "Be brief"
            assert created.session.output_modalities == ["text"]
            await live.session.update(session={"type": "realtime", "instructions": "Go on"})
            updated: Any = await live.recv()
            assert (updated.session.instructions, updated.session.output_modalities) == ("Go on", ["text"])
            content: Any = [{"type": "input_text", "text": "Hello"}]
            await live.conversation.item.create(item={"type": "message", "role": "user", "content": content})
            await live.response.create()
            while (event := await live.recv()).type != "response.done":
                assert event.type != "error", event
            assert event.response.status == "completed"
    with pytest.raises(openai.AuthenticationError):
        await browser.models.list()
    with pytest.raises(openai.AuthenticationError):
        await browser.realtime.client_secrets.create()
    status, _ = await refusal_of(deployment, "/v1/audio/speech/stream", made.value)
    assert status == 401
    offered: list[Any] = ["realtime", f"openai-insecure-api-key.{made.value}"]
    async with connected(deployment, subprotocols=offered) as client:
        assert (await client.hear())["session"]["instructions"] == "Be brief"
    async with connected(deployment, "/v1/duplex?autostart=1", subprotocols=offered) as client:
        await client.say("session.update", session={"output_modalities": ["audio"]})
        session = (await client.until("session.updated", "session.created"))["session"]
        assert session["instructions"] == "Be brief"


async def test_what_a_secret_opened_goes_on_when_its_time_is_over(
    deployment: Running, first: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await first.realtime.client_secrets.create()
    async with connected(deployment, additional_headers={"Authorization": f"Bearer {made.value}"}) as client:
        await client.until("session.created")
        monkeypatch.setattr(client_secrets, "time", SimpleNamespace(time=lambda: made.expires_at))
        status, said = await refusal_of(deployment, "/v1/realtime", made.value)
        assert (status, "its time is over" in said) == (401, True)
        await client.ask("Hello")
        await client.until("response.done")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"expires_after": {"seconds": 9}}, "expires_after.seconds"),
    ({"expires_after": {"seconds": 7201}}, "expires_after.seconds"),
    ({"expires_after": {"seconds": "60"}}, "expires_after.seconds"),
    ({"expires_after": {"anchor": "last_used"}}, "expires_after.anchor"),
    ({"expires_after": {"minutes": 1}}, "expires_after.minutes"),
    ({"expires_after": 60}, "expires_after"),
    ({"session": []}, "session"),
    ({"session": {"nonsense": 1}}, "session.nonsense"),
    ({"session": {"audio": {"output": {"speed": 9}}}}, "session.audio.output.speed"),
    ({"session": {"prompt": {"id": "pmpt_1"}}}, "session.prompt"),
    ({"session": {"instructions": "".join(map(chr, range(0x4E00, 0x5E00)))}}, "session"),
    (
        {"session": {"tools": [{"type": "function", "name": "f", "parameters": {"const": 2**70}}]}},
        "session.tools[0].parameters.const",
    ),
    ({"session": {"tracing": {"metadata": {"user": -(2**70)}}}}, "session.tracing.metadata.user"),
    ({"sessions": {}}, "sessions"),
]


async def test_bad_bodies_are_refused_by_name(first: AsyncOpenAI) -> None:
    for body, param in BAD:
        with pytest.raises(openai.BadRequestError) as caught:
            await first.realtime.client_secrets.create(extra_body=body)
        assert caught.value.param == param, body
    with pytest.raises(openai.NotFoundError):
        await first.realtime.client_secrets.create(session={"type": "realtime", "model": "another"})


async def test_where_no_key_is_needed_a_secret_still_brings_its_session_and_ends() -> None:
    async with deployed() as deployment, AsyncOpenAI(api_key="x", base_url=f"{deployment.url}/v1") as client:
        made = await client.realtime.client_secrets.create(session={"type": "realtime", "instructions": "Be brief"})
        auth = {"Authorization": f"Bearer {made.value}"}
        async with connected(deployment, additional_headers=auth) as live:
            assert (await live.hear())["session"]["instructions"] == "Be brief"
        status, said = await refusal_of(deployment, "/v1/realtime", "ek_somebody")
        assert (status, "none of this server's" in said) == (401, True)


KEY = bytes(range(KEY_BYTES))
SECRET = ClientSecret("ann", 2_000_000_000, {"type": "realtime", "instructions": "Be brief"})


@given(st.integers(0, len(sealed(SECRET, KEY)) - 4), st.characters(codec="ascii"))
def test_a_changed_secret_is_none(place: int, character: str) -> None:
    value = sealed(SECRET, KEY)
    changed = value[: place + 3] + character + value[place + 4 :]

    assert opened(value, KEY) == SECRET
    if changed != value:
        assert opened(changed, KEY) is None
    assert opened(value, bytes(KEY_BYTES)) is None


def test_a_secret_has_one_spelling() -> None:
    value = sealed(SECRET, KEY)
    letters = string.ascii_letters + string.digits + "-_"
    others = {value.replace("-", "+"), value.replace("_", "/"), f"{value}=", f"{value}\n"} - {value}

    assert [letter for letter in letters if opened(value[:-1] + letter, KEY)] == [value[-1]]
    assert [opened(other, KEY) for other in others] == [None] * len(others)


@given(st.text(max_size=40))
def test_any_text_is_no_secret(text: str) -> None:
    assert opened(f"ek_{text}", KEY) is None


def test_processes_of_a_gateway_share_a_key_that_nobody_else_reads(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    options: Any = None
    one, other = (ClientSecrets({}, options, folder, lambda _: True) for _ in range(2))
    assert (one._read_key(), other._read_key()) == (None, None)

    made = one._make_key()

    assert other._read_key() == made == other._make_key()
    assert len(made) == KEY_BYTES
    assert [path.name for path in folder.iterdir()] == [KEY_FILE]
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_secret_is_its_callers_as_long_as_that_one_has_a_key(tmp_path: Path) -> None:
    callers = {"ann"}
    options: Any = None
    route = ClientSecrets({}, options, tmp_path, callers.__contains__)
    value = sealed(SECRET, route._make_key())
    request = make_mocked_request("GET", "/v1/realtime", headers={"Authorization": f"Bearer {value}"})

    assert route.take(request) == SECRET
    callers.clear()
    with pytest.raises(Problem, match="none of this server's"):
        route.take(request)


def test_a_secret_of_before_keys_were_asked_for_is_none(tmp_path: Path) -> None:
    options: Any = None
    is_open, guarded = (
        ClientSecrets({}, options, tmp_path, KeyRing(keys).is_caller)
        for keys in ([], [KeySource("api_key", keys=("a",))])
    )
    secret = ClientSecret("", 2_000_000_000, {})
    value = sealed(secret, is_open._make_key())
    request = make_mocked_request("GET", "/v1/realtime", headers={"Authorization": f"Bearer {value}"})

    assert is_open.take(request) == secret
    with pytest.raises(Problem, match="none of this server's"):
        guarded.take(request)
