"""gateways/README.md, tried: its gateway as ``module:Class`` of its deployment."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import aiohttp
import pytest

from actors.testing import running

README = (Path(__file__).parents[2] / "gateways" / "README.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(autouse=True)
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The README's module, importable for one test."""
    (tmp_path / "plain_text.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("plain_text", None)


async def say(url: str, pipeline: str, text: str) -> tuple[int, str]:
    async with aiohttp.ClientSession(url) as session, session.post(f"/v1/say/{pipeline}", data=text) as response:
        return response.status, await response.text()


async def test_example_deployment_serves_the_example() -> None:
    async with running(block("toml").replace("port = 8000", "port = 0")) as deployment:
        status, text = await say(deployment.url, "chat", "hello")
        assert (status, text.split()[:2]) == (200, ["hello:0", "hello:1"])

        status, refusal = await say(deployment.url, "chatt", "hello")
        assert status == 400
        assert "did you mean 'chat'? (known: chat)" in refusal


async def test_failure_within_the_answer_is_no_whole_answer(caplog) -> None:
    """The status is sent already; a second head inside the body would read as more of the answer."""
    # Several windows of 8 chunks on: a failure may overtake the first of them.
    fails = "[stages.llm]\nparams = { fail_at_step = 40, tokens = 100 }"
    toml = block("toml").replace("port = 8000", "port = 0").replace("[stages.llm]", fails)
    async with running(toml) as deployment:
        with caplog.at_level(logging.INFO, "gateways.http"), pytest.raises(aiohttp.ClientPayloadError):
            await say(deployment.url, "chat", "hello")
    assert [record.fields["outcome"] for record in caplog.records if record.message == "request ended"][-1:] == ["500"]
