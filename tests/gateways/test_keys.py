"""Whose a key is, and what becomes of keys when their files change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from actors.testing import Running, running
from gateways.keys import MAX_FILE_BYTES, KeyRing, KeySource, sources_of
from omni_bus.config.schema import CallerConfig
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = KeySource("api_key")


def test_keys_come_from_all_sources(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "keys").write_text("c\n\nd \n")
    monkeypatch.setenv("OB_KEYS", "b, e")

    assert KeySource("api_key", "", ("a",), "OB_KEYS", str(tmp_path / "keys")).read() == ["a", "b", "e", "c", "d"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (KeySource("api_key", env="OB_KEYS"), "api_key_env: the environment has no key in OB_KEYS"),
        (KeySource("callers.gold.key", "gold", file="none"), "callers.gold.key_file: none can't be read: No such file"),
        (KeySource("api_key", file="empty"), "api_key_file: empty holds no key"),
        (KeySource("api_key", file="latin"), "api_key_file: latin can't be read: not UTF-8 text"),
        (KeySource("api_key", file="large"), f"api_key_file: large is larger than {MAX_FILE_BYTES} bytes"),
        (KeySource("api_key", file="."), "api_key_file: . can't be read: Is a directory"),
    ],
)
def test_named_source_without_a_key_is_refused(source, words, tmp_path: Path, monkeypatch) -> None:
    """A gateway that was meant to be closed never comes up open."""
    monkeypatch.delenv("OB_KEYS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"k\xe9y\n")
    (tmp_path / "large").write_bytes(b"k\n" * MAX_FILE_BYTES)

    with pytest.raises(BadInput) as caught:
        KeyRing([source])
    assert words in caught.value.message


def test_owner_is_a_caller_or_the_key_itself() -> None:
    callers = {"gold": CallerConfig(keys=("g1", "g2")), "free": CallerConfig(keys=("f",))}
    ring = KeyRing(sources_of(KeySource("api_key", keys=("a", "b")), callers))

    assert [ring.owner(key) for key in ("g1", "g2", "f", "", "g", "g11")] == ["gold", "gold", "free", None, None, None]
    own = [ring.owner(key) for key in "ab"]
    assert len({*own}) == 2, "each of nobody's keys is a caller of its own"
    assert all(name is not None and name.startswith("key-") and len(name) == 16 for name in own)
    assert [KeyRing([KeySource("api_key", keys=("b",))]).owner("b")] == own[1:], "by the key, not by its place"


def test_no_source_means_no_guard() -> None:
    assert not KeyRing(sources_of(NOBODY, {})).is_guarded
    assert KeyRing(sources_of(NOBODY, {"gold": CallerConfig(keys=("g",))})).is_guarded


def test_nameless_callers_are_those_who_need_no_key() -> None:
    guarded, is_open = KeyRing(sources_of(NOBODY, {"gold": CallerConfig(keys=("g",))})), KeyRing([])

    assert [guarded.is_caller(name) for name in ("gold", "free", "")] == [True, False, False]
    assert [is_open.is_caller(name) for name in ("gold", "")] == [False, True]


def test_key_of_two_callers_is_refused() -> None:
    callers = {"gold": CallerConfig(keys=("g", "same")), "free": CallerConfig(keys=("same",))}

    with pytest.raises(BadInput, match=r"callers\.free\.key: one of its keys is another caller's too") as caught:
        KeyRing(sources_of(NOBODY, callers))
    assert "same" not in caught.value.message


def test_bad_new_file_keeps_the_old_keys(tmp_path: Path, caplog) -> None:
    file = tmp_path / "keys"
    file.write_text("a\n")
    ring = KeyRing([KeySource("api_key", file=str(file)), KeySource("callers.gold.key", "gold", keys=("g",))])

    for bad in (b"\xff", b"g\n", None):
        caplog.clear()
        file.unlink() if bad is None else file.write_bytes(bad)
        ring.reload()
        assert (ring.owner("a") is not None, ring.owner("g")) == (True, "gold")
        assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_emptied_file_takes_its_keys_away_and_leaves_the_guard(tmp_path: Path, caplog) -> None:
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    ring = KeyRing([KeySource("api_key", file=str(file))])
    file.write_text("b\n")
    ring.reload()
    assert (ring.owner("a"), ring.owner("b") is None) == (None, False)

    file.write_text("")
    ring.reload()

    assert (ring.owner("b"), ring.is_guarded, len(ring)) == (None, True, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a" not in [record.getMessage() for record in caplog.records]


# --- in a running gateway -----------------------------------------------------------------------------------

TOML = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
api_key_file = "{folder}/own"
[callers.gold]
key_file = "{folder}/gold"
"""


class Guarded:
    """A running gateway, and word of each time that it has read its keys again."""

    def __init__(self, deployment: Running, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.ring = deployment.gateway.gateway._keys  # type: ignore[attr-defined] (every HTTP gateway has them)
        self.has_read = asyncio.Event()
        watch = deployment.gateway.gateway._watch  # type: ignore[attr-defined]
        on_change = watch._on_change

        def noted() -> None:
            on_change()
            self.has_read.set()

        watch._on_change = noted

    async def statuses(self, *keys: str) -> list[int]:
        found = []
        for key in keys:
            async with self.session.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                found.append(response.status)
        return found


@contextlib.asynccontextmanager
async def guarded(folder: Path):
    (folder / "own").write_text("a\nb\n")
    (folder / "gold").write_text("g\n")
    async with (
        running(TOML.format(folder=folder)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        yield Guarded(deployment, session)


def rewrite(file: Path, text: str) -> None:
    file.write_text(text)


def replace(file: Path, text: str) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


def relink(file: Path, text: str) -> None:
    """As Kubernetes mounts a secret: the file is a link through a link that moves."""
    folder = file.parent / f"..{len(list(file.parent.iterdir()))}"
    folder.mkdir()
    (folder / file.name).write_text(text)
    (file.parent / "..new").symlink_to(folder.name)
    (file.parent / "..new").replace(file.parent / "..data")
    if not file.is_symlink():
        (file.parent / "link").symlink_to(f"..data/{file.name}")
        (file.parent / "link").replace(file)


@pytest.mark.parametrize("change", [rewrite, replace, relink])
async def test_changed_file_counts_from_then_on(tmp_path: Path, change: Any) -> None:
    async with guarded(tmp_path) as gateway:
        assert await gateway.statuses("a", "b", "c", "g") == [200, 200, 401, 200]

        for text, wanted in (("b\nc\n", [401, 200, 200, 200]), ("a\n", [200, 401, 401, 200])):
            gateway.has_read.clear()
            change(tmp_path / "own", text)
            while await gateway.statuses("a", "b", "c", "g") != wanted:
                await gateway.has_read.wait()
                gateway.has_read.clear()


async def test_key_taken_away_ends_no_request_that_runs(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 200}
        headers = {"Authorization": "Bearer a"}
        async with gateway.session.post("/v1/chat/completions", json=body, headers=headers) as response:
            await response.content.readline()
            (tmp_path / "own").write_text("")
            await gateway.has_read.wait()
            assert await gateway.statuses("a", "b", "g") == [401, 401, 200]
            assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_bad_file_keeps_the_gateway_as_it_was(tmp_path: Path, caplog) -> None:
    async with guarded(tmp_path) as gateway:
        (tmp_path / "own").write_bytes(b"\xff\xfe")
        await gateway.has_read.wait()

        assert await gateway.statuses("a", "b", "g") == [200, 200, 200]
        assert "the former ones stay" in caplog.text

        shutil.rmtree(tmp_path)
        assert await gateway.statuses("a", "b", "g") == [200, 200, 200]


async def test_gateway_that_cannot_watch_says_so_and_serves(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr("gateways.http.FileWatch", refuse)
    (tmp_path / "own").write_text("a\n")
    (tmp_path / "gold").write_text("g\n")
    async with (
        running(TOML.format(folder=tmp_path)) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.get("/v1/models", headers={"Authorization": "Bearer a"}) as response,
    ):
        assert response.status == 200
    assert "changes need a restart" in caplog.text
