"""The robots' client on our gateway, and on a server that is not ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpi_client import msgpack_numpy
from websockets.asyncio.server import ServerConnection, serve

sys.path.insert(0, str(Path(__file__).parents[1] / "robot"))

from fake import FakePolicy  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running
from omni_bus.client import ConnectFailed, ConnectionLost, EventRefused, connect_robot
from omni_bus.errors import BadInput

packb: Any = msgpack_numpy.packb  # it has no types

TOML = """
[stages.policy]
adapter = "robot-policy"
policy = { name = "fake:FakePolicy" }
[pipelines.robot]
edges = ["in.observation -> policy.observation", "policy.actions -> out.actions"]
MORE
[gateways.robot]
protocol = "openpi"
api_keys = ["k"]
"""


async def test_observations_become_actions_and_errors_exceptions() -> None:
    async with running(TOML.replace("MORE", "")) as deployment:
        await deployment.until_ready()
        async with connect_robot(deployment.url, model="robot", api_key="k") as robot:
            assert robot.metadata == {"action_horizon": 4, "action_dim": 4}
            first = await robot.infer({"state": np.array([1, 2], np.float32), "image": np.zeros((2, 2, 3), np.uint8)})
            assert first["actions"].shape == (4, 4)
            first["actions"][:] = 0
            with pytest.raises(EventRefused, match="state: NaN or infinity") as refused:
                await robot.infer({"state": np.array([np.nan])})
            assert (refused.value.code, refused.value.param) == ("bad_input", "state")
            with pytest.raises(EventRefused, match="the policy failed: RuntimeError"):
                await robot.infer({"state": np.array([FakePolicy.RAISES])})
            with pytest.raises(BadInput, match=r"observation: .*no objects"):
                await robot.infer({"state": np.array([object()])})
            assert (await robot.infer({}))["actions"][0, 0] == 3
            await robot.reset()
            assert (await robot.infer({}))["actions"][0, 0] == 1


async def test_what_is_not_to_be_had_is_told_at_once() -> None:
    async with running(TOML.replace("MORE", "max_in_flight = 1\nmax_queued = 0")) as deployment:
        await deployment.until_ready()
        with pytest.raises(ConnectFailed, match="401"):
            async with connect_robot(deployment.url):
                pass
        async with connect_robot(deployment.url, api_key="k"):
            with pytest.raises(ConnectFailed, match="Robot policy not available"):
                async with connect_robot(deployment.url, api_key="k"):
                    pass


async def test_other_servers_arrays_errors_and_ends_are_understood() -> None:
    answers = [np.ones((2, 3), np.float32), "Traceback: it broke", b"\xc1"]

    async def answer(link: ServerConnection) -> None:
        await link.send(packb({"name": "theirs"}))
        for each in answers:
            await link.recv()
            await link.send(each if isinstance(each, str | bytes) else packb(each))
        await link.recv()

    async with serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect_robot(f"http://127.0.0.1:{port}") as robot:
            assert robot.metadata == {"name": "theirs"}
            assert (await robot.infer({"x": 1}))["actions"].tolist() == [[1.0] * 3] * 2
            with pytest.raises(EventRefused, match="it broke"):
                await robot.infer({"x": 1})
            with pytest.raises(ConnectionLost, match="can't be read"):
                await robot.infer({"x": 1})
            with pytest.raises(ConnectionLost, match="closed before it answered"):
                await robot.infer({"x": 1})
