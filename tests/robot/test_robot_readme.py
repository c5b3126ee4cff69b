"""adapters/robot/README.md, tried: its policy, in its deployment, brings the stock client's robot to its goal."""

from __future__ import annotations

import asyncio
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from actors.testing import running
from adapters.robot.engine import policy_of
from adapters.robot.policy import POLICIES
from loads.metaworld_tasks import make_environment, run_episode

README = (Path(__file__).parents[2] / "adapters" / "robot" / "README.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context:DeprecationWarning")  # the stock client
async def test_example_policy_reaches_its_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("metaworld")
    (tmp_path / "reaching.py").write_text(blocks("python")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def drive(port: int) -> Any:
        client = WebsocketClientPolicy("127.0.0.1", port)
        environment = make_environment("reach-v3", 1000)
        try:
            return client.get_server_metadata(), [run_episode(environment, client.infer, "")[0] for _ in range(3)]
        finally:
            environment.close()
            client._ws.close()

    try:
        async with running(blocks("toml")[0].replace("port = 8000", "port = 0")) as deployment:
            metadata, done = await asyncio.to_thread(drive, deployment.port)
    finally:
        sys.modules.pop("reaching", None)

    assert metadata == {"action_horizon": 4, "action_dim": 4}
    assert done == [True] * 3


def test_options_of_the_examples_are_known() -> None:
    named: set[str] = set()
    for block in blocks("toml")[1:]:
        stage = tomllib.loads(block)["stages"]["policy"]
        policy_of(stage["policy"])
        named.add(stage["policy"]["name"])

    assert named == {"pi0", "lerobot", "openpi"}


def test_table_names_every_policy() -> None:
    rows = re.findall(r"^\| `([a-z0-9]+)` \| ", README, re.MULTILINE)

    assert rows == list(POLICIES)
