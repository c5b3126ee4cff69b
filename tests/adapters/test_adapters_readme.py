"""adapters/README.md, tried: its adapter under `omni_bus.testing`, and as ``module:Class`` of its deployment."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actors.testing import running
from omni_bus.wire.payloads import check

README = (Path(__file__).parents[2] / "adapters" / "README.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The README's module, importable for one test."""
    (tmp_path / "redact.py").write_text(blocks("python")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("redact", None)


async def chat(url: str, content: str, **fields: object) -> tuple[int, dict]:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    async with aiohttp.ClientSession(url) as session, session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


def test_example_test_passes() -> None:
    exec(compile(blocks("python")[1], "adapters/README.md", "exec"), {})


def test_example_of_memory_makes_a_picture() -> None:
    made: dict[str, Any] = {}

    exec(compile(blocks("python")[2], "adapters/README.md", "exec"), made)

    check(made["image"])
    assert set(made["image"].data.view) == {128}


async def test_example_deployment_serves_the_example() -> None:
    toml = blocks("toml")[0].replace("port = 8000", "port = 0")
    async with running(toml) as deployment:
        params = [{"tokens": 2}, {"mark": "#"}]
        status, answer = await chat(deployment.url, "secret", sampling_params_list=params)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "######:0 ######:1")

        status, refusal = await chat(deployment.url, "secret", sampling_params_list=[{}, {"mark": 3}])
        assert (status, refusal["error"]["param"]) == (400, "mark")
