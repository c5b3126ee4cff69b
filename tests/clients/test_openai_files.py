"""Files by the official client, asynchronous and not."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import openai
import pytest
from openai.types import FileObject

from actors.testing import Running, running

TOML = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
api_keys = ["one", "two"]
{gateway}
"""


def client_of(deployment: Running, key: str = "one") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key=key, max_retries=0)


async def test_file_comes_back_as_it_was_sent() -> None:
    data = os.urandom(3_000_000)
    async with running(TOML.format(gateway="")) as deployment, client_of(deployment) as client:
        made = await client.files.create(file=("größe.wav", data), purpose="user_data")
        FileObject.model_validate(made.model_dump(), strict=True)

        assert (made.bytes, made.filename, made.purpose) == (len(data), "größe.wav", "user_data")
        assert made.status == "processed"
        assert made.expires_at is None
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == data
        assert await client.files.wait_for_processing(made.id) == made
        deleted = await client.files.delete(made.id)
        assert (deleted.id, deleted.deleted) == (made.id, True)
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await gone(made.id)


async def test_every_way_to_name_a_file_works(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n")
    async with running(TOML.format(gateway="")) as deployment, client_of(deployment) as client:
        for file in (path, io.BytesIO(b"{}\n"), ("b.bin", io.BytesIO(b"{}\n")), ("c", b"{}\n", "image/png")):
            made = await client.files.create(
                file=file, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
            )
            assert made.bytes == 3
            assert made.expires_at == made.created_at + 3600


async def test_pages_hold_every_file_once_in_order() -> None:
    async with running(TOML.format(gateway="")) as deployment, client_of(deployment) as client:
        made = [
            await client.files.create(file=(f"{i}.txt", b"x"), purpose="vision" if i % 2 else "evals") for i in range(7)
        ]
        ids = [file.id for file in made]

        assert [file.id async for file in client.files.list(limit=3)] == ids[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
        assert [file.id async for file in client.files.list(limit=1, purpose="vision")] == ids[1::2][::-1]
        page = await client.files.list(limit=7)
        assert not page.has_more
        await client.files.delete(ids[3])
        assert [file.id async for file in client.files.list(after=ids[4], order="desc")] == [ids[2], ids[1], ids[0]]


async def test_files_of_one_key_are_invisible_to_another() -> None:
    async with (
        running(TOML.format(gateway="")) as deployment,
        client_of(deployment) as mine,
        client_of(deployment, "two") as yours,
    ):
        made = await mine.files.create(file=("a.txt", b"mine"), purpose="user_data")
        unknown = made.id[:-4] + "0000"

        assert [file.id async for file in yours.files.list()] == []
        for call in (yours.files.retrieve, yours.files.content, yours.files.delete):
            with pytest.raises(openai.NotFoundError) as theirs:
                await call(made.id)
            with pytest.raises(openai.NotFoundError) as none:
                await call(unknown)
            assert theirs.value.message.replace(made.id, "") == none.value.message.replace(unknown, "")
            assert theirs.value.body == {**none.value.body, "message": theirs.value.body["message"]}  # type: ignore[dict-item]
        with pytest.raises(openai.BadRequestError, match="no such file"):
            await yours.files.list(after=made.id)
        assert (await mine.files.content(made.id)).content == b"mine"


async def test_files_belong_to_a_caller_whatever_its_keys_are(tmp_path: Path) -> None:
    """Not to a key's place in a list: after keys came and went, everybody has what was theirs."""
    kept = TOML.format(gateway=f'files_dir = "{tmp_path}/kept"')
    named = '[callers.gold]\nkeys = ["gold-1", "gold-2"]\n'
    async with running(named + kept) as deployment:
        ids = {}
        for key in ("gold-1", "one", "two"):
            async with client_of(deployment, key) as client:
                ids[key] = (await client.files.create(file=("a", key.encode()), purpose="user_data")).id
    async with running(named.replace("gold-1", "gold-3") + kept.replace('["one", "two"]', '["two"]')) as deployment:
        for key, expected in (("gold-2", ["gold-1"]), ("gold-3", ["gold-1"]), ("two", ["two"])):
            async with client_of(deployment, key) as client:
                assert [file.id async for file in client.files.list()] == [ids[key] for key in expected]


async def test_refusals_are_the_clients_own_error_classes() -> None:
    gateway = "max_file_bytes = 1000\nmax_caller_bytes = 1500\nmax_caller_files = 2"
    async with running(TOML.format(gateway=gateway)) as deployment, client_of(deployment) as client:
        create = client.files.create
        with pytest.raises(openai.BadRequestError, match="allowed: assistants, batch") as bad:
            await create(file=("a", b"x"), purpose="world-domination")  # type: ignore[arg-type]
        assert bad.value.param == "purpose"
        with pytest.raises(openai.BadRequestError, match="from 3600 to 2592000") as bad:
            await create(file=("a", b"x"), purpose="vision", expires_after={"anchor": "created_at", "seconds": 5})
        assert bad.value.param == "expires_after[seconds]"
        with pytest.raises(openai.BadRequestError, match="an empty file came"):
            await create(file=("a", b""), purpose="vision")
        with pytest.raises(openai.APIStatusError, match="more than 1000 bytes came") as large:
            await create(file=("a", b"x" * 1001), purpose="vision")
        assert large.value.status_code == 413
        await create(file=("a", b"x" * 1000), purpose="vision")
        with pytest.raises(openai.BadRequestError, match="delete some"):
            await create(file=("a", b"x" * 501), purpose="vision")
        await create(file=("a", b"x" * 500), purpose="vision")
        with pytest.raises(openai.BadRequestError, match="3 files of"):
            await create(file=("a", b"x"), purpose="vision")


async def test_blocking_client_works_alike() -> None:
    def use(url: str) -> bytes:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="one") as client:
            made = client.files.create(file=("a.txt", b"hello" * 100_000), purpose="user_data")
            with client.files.with_streaming_response.content(made.id) as response:
                return b"".join(response.iter_bytes())

    async with running(TOML.format(gateway="")) as deployment:
        assert await asyncio.to_thread(use, deployment.url) == b"hello" * 100_000


async def test_files_outlive_the_gateway(tmp_path: Path) -> None:
    toml = TOML.format(gateway=f'files_dir = "{tmp_path}/kept"')
    async with running(toml) as deployment, client_of(deployment) as client:
        made = await client.files.create(file=("a.txt", b"stays"), purpose="user_data")
    async with running(toml) as deployment, client_of(deployment) as client:
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == b"stays"
