"""A deployment whose actors talk over TCP with keys, and who may join it."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

import pytest

from omni_bus.bus.curve import Curve
from omni_bus.client import BusClient

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

TEXT = """
bind = "{bind}"
coordinator_port = {port}
[security]
key_folder = "{keys}"
[stages.llm]
adapter = "synthetic-text"
tokens = 4
[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def keys(tmp_path: Path, omni_bus) -> Path:
    assert omni_bus("keys", str(tmp_path / "keys")).returncode == 0
    assert omni_bus("keys", str(tmp_path / "keys"), "--client", "laptop").returncode == 0
    return tmp_path / "keys"


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1", "tcp://localhost", "tcp://[::1]"])
def test_actors_and_visitors_talk_with_keys(up, omni_bus, keys: Path, port: int, bind: str) -> None:
    deployment = up(TEXT.format(bind=bind, port=port, keys=keys))
    deployment.wait_for("ready")
    host = "[::1]" if "::1" in bind else "127.0.0.1"
    elsewhere = ("--connect", f"tcp://{host}:{port}", "--keys", str(keys / "clients" / "laptop"))

    for visitor in ((), elsewhere):
        said = omni_bus("call", "hello", *visitor)
        assert (said.returncode, said.stdout, said.stderr) == (0, "hello:0 hello:1 hello:2 hello:3\n", "")
        status = omni_bus("status", "--json", *visitor)
        assert {row["actor"] for row in json.loads(status.stdout)["actors"]} == {"gateway.openai.0", "llm.0"}

    assert deployment.stop() == 0
    assert deployment.errors == ""


def test_who_has_no_allowed_key_is_told_so_and_the_operator_too(up, omni_bus, keys: Path, port: int) -> None:
    deployment = up(TEXT.format(bind="tcp://127.0.0.1", port=port, keys=keys))
    deployment.wait_for("ready")
    connect = ("--connect", f"tcp://127.0.0.1:{port}")
    laptop = (*connect, "--keys", str(keys / "clients" / "laptop"))
    assert omni_bus("call", "hello", *laptop).returncode == 0

    bare = omni_bus("call", "hello", *connect)
    assert (bare.returncode, bare.stdout) == (1, "")
    assert f"coordinator at tcp://127.0.0.1:{port} takes no connection of ours: it wants keys" in bare.stderr

    (keys / "allowed" / "laptop.key").unlink()
    for _ in range(3):
        removed = omni_bus("call", "hello", *laptop)
        assert (removed.returncode, removed.stdout) == (1, "")
        assert "takes no connection of ours: it does not allow our key" in removed.stderr

    assert omni_bus("call", "hello").returncode == 0  # the deployment's own go on
    assert deployment.stop() == 0
    lines = [event["event"] for event in deployment.events if "refused a connection" in event["event"]]
    assert len(lines) == len({line.partition(":")[0] for line in lines}) in {1, 2}


async def test_an_open_connection_ends_with_its_key(up, keys: Path, port: int) -> None:
    deployment = up(TEXT.format(bind="tcp://127.0.0.1", port=port, keys=keys))
    await deployment.told("ready")
    anywhere, coordinator = "tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}"
    own = [Curve(folder) for folder in (keys / "clients" / "laptop", keys)]
    async with (
        await BusClient.connect("client.laptop", anywhere, coordinator, timeout_s=20, curve=own[0]) as laptop,
        await BusClient.connect("visitor", anywhere, coordinator, timeout_s=20, curve=own[1]) as visitor,
    ):
        assert (await laptop.admin("status"))["actors"]

        (keys / "allowed" / "laptop.key").unlink()

        assert "takes no connection of ours: it does not allow our key" in (await laptop.leaving).message
        assert (await visitor.admin("status"))["actors"], "the deployment's own go on"
    assert await asyncio.to_thread(deployment.stop) == 0


def test_a_start_off_the_loopback_without_keys_is_refused(up) -> None:
    toml = TEXT.format(bind="tcp://192.0.2.1", port=7550, keys="") + 'host = "0.0.0.0"\n'
    deployment = up(toml)

    assert deployment.end() == 1
    assert deployment.events == []
    first, second = deployment.errors.splitlines()
    assert ":2: bind: tcp://192.0.2.1 is not the loopback" in first
    assert ":12: gateways.openai.host: 0.0.0.0 is not the loopback" in second
    assert all(line.endswith("or --insecure") for line in (first, second))


def test_a_start_that_is_insecure_says_so_last(up, omni_bus) -> None:
    deployment = up(TEXT.replace("{bind}", "ipc").format(port=7550, keys="") + 'host = "0.0.0.0"\n', "--insecure")
    deployment.wait_for("ready")

    what = "0.0.0.0 is not the loopback, and the gateway has no API key: whoever reaches it can use it"
    line = deployment.wait_for(f"INSECURE: gateways.openai.host: {what}")

    assert line["level"] == "WARNING"
    assert deployment.stop() == 0
