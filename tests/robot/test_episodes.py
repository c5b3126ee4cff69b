"""The shipped deployment and the stock client: what a robot does through the socket is what it does without one."""

from __future__ import annotations

import asyncio
import ctypes.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest

pytest.importorskip("metaworld")
pytest.importorskip("openpi_client")

from openpi_client.websocket_client_policy import WebsocketClientPolicy

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from actors.testing import running
from adapters.robot.metaworld import MetaworldOptions, MetaworldPolicy
from adapters.robot.policy import Observation
from loads.metaworld_tasks import TASKS, make_environment, run_episode
from omni_bus.testing import make_context

if TYPE_CHECKING:
    from loads.metaworld_tasks import Infer

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning:gymnasium"),
    pytest.mark.filterwarnings("ignore:connect.. must be used as a context:DeprecationWarning"),  # the stock client
]

ROOT = Path(__file__).parents[2]
SHIPPED = (ROOT / "configs" / "robot.toml").read_text()
FAR = """
[stages.far]
adapter = "robot-policy"
policy = { name = "openpi", url = "URL", dialect = "vllm-omni" }
[pipelines.far]
edges = ["in.observation -> far.observation", "far.actions -> out.actions"]
[gateways.robot]
protocol = "openpi"
"""
SEED = 77


class Tape:
    """What a robot heard in each of its episodes."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        self.actions: list[Any] = []

    def infer(self, observation: dict[str, Any]) -> Any:
        answer = self._infer(observation)
        self.actions.append(np.array(answer["actions"]))
        return answer


def alone() -> Infer:
    policy = MetaworldPolicy(MetaworldOptions(), make_context())
    policy.load(lambda phase, fraction: None)

    def infer(observation: dict[str, Any]) -> Any:
        values = dict(observation)
        [found] = policy.infer([Observation("robot", False, values, values.pop("prompt"))])
        return found

    return infer


def drive(infer: Infer, tasks: tuple[str, ...]) -> tuple[dict[str, bool], list[Any]]:
    tape = Tape(infer)
    done: dict[str, bool] = {}
    for task in tasks:
        environment = make_environment(task, SEED)
        done[task], _ = run_episode(environment, tape.infer, TASKS[task])
        environment.close()
    return done, tape.actions


def at_stock_client(port: int, tasks: tuple[str, ...]) -> tuple[dict[str, bool], list[Any]]:
    client = WebsocketClientPolicy("127.0.0.1", port)
    try:
        assert client.get_server_metadata()["tasks"] == TASKS
        return drive(client.infer, tasks)
    finally:
        client._ws.close()


@pytest.mark.slow
async def test_robot_does_the_same_through_the_socket() -> None:
    tasks = ("reach-v3", "pick-place-v3", "drawer-open-v3", "button-press-topdown-v3")
    done, actions = await asyncio.to_thread(drive, alone(), tasks)
    async with running(SHIPPED.replace("port = 8000", "port = 0")) as deployment:
        found, heard = await asyncio.to_thread(at_stock_client, deployment.port, tasks)

    assert found == done == dict.fromkeys(tasks, True)
    assert len(heard) == len(actions)
    for one, other in zip(heard, actions, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


async def test_robot_does_the_same_through_two_servers() -> None:
    """The stock client, our gateway, a stage that is a client, our other gateway, the policy."""
    tasks = ("pick-place-v3",)
    async with running(SHIPPED.replace("port = 8000", "port = 0")) as near:
        url = f"ws://127.0.0.1:{near.port}/v1/realtime/robot/openpi"
        async with running(FAR.replace("URL", url)) as deployment:
            found, heard = await asyncio.to_thread(at_stock_client, deployment.port, tasks)
    done, actions = await asyncio.to_thread(drive, alone(), tasks)

    assert found == done == {"pick-place-v3": True}
    np.testing.assert_array_equal(heard, actions)


async def test_refusal_of_the_far_policy_reaches_the_robot() -> None:
    async with running(SHIPPED.replace("port = 8000", "port = 0")) as near:
        url = f"ws://127.0.0.1:{near.port}/v1/realtime/robot/openpi"
        async with running(FAR.replace("URL", url)) as deployment:
            port = deployment.port

            def ask() -> list[Any]:
                client = WebsocketClientPolicy(f"ws://127.0.0.1:{port}/v1/realtime/robot/openpi")
                asked = [
                    {"observation/state": np.zeros(38, np.float32), "prompt": "open the door"},
                    {"observation/state": np.zeros(39, np.float32), "prompt": "juggle"},
                    {"observation/state": np.zeros(39, np.float32), "prompt": "open the door"},
                ]
                try:
                    return [client.infer(observation) for observation in asked]
                finally:
                    client._ws.close()

            short, unknown, fine = await asyncio.to_thread(ask)

    for refusal, words in ((short, "observation/state: "), (unknown, "'juggle' came")):
        assert (refusal["type"], refusal["code"]) == ("error", "bad_input")
        assert words in refusal["detail"]
    actions = fine["actions"] if isinstance(fine, dict) else fine
    assert actions.shape == (8, 4)


@pytest.mark.slow
@pytest.mark.skipif(
    ctypes.util.find_library("EGL") is None, reason="nothing draws pictures here: apt-get install libegl1"
)
async def test_readmes_command_counts_and_films(tmp_path: Path) -> None:
    video = tmp_path / "episode.mp4"
    async with running(SHIPPED.replace("port = 8000", "port = 0")) as deployment:
        command = [ROOT / "scripts" / "robot_episodes", "--port", str(deployment.port), "--video", video]
        command += ["--episodes", "1", "--task", "reach-v3"]
        environ = {key: value for key, value in os.environ.items() if key not in {"DISPLAY", "MUJOCO_GL"}}
        script = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ | {"PYTHONPATH": str(ROOT)},
        )
        out, err = await script.communicate()

    said = out.decode().splitlines()
    assert script.returncode == 0, err.decode()
    assert re.fullmatch(r"reach-v3 +reach the goal +1/1", said[0])
    assert re.fullmatch(r"1 of 1 done, \d+ observations, answered within [\d.]+ ms \(median\)", said[1])
    assert re.fullmatch(rf"wrote {video}: reach-v3, \d+ steps, done", said[2])
    with av.open(str(video)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    first, last = frames[0].astype(float), frames[-1].astype(float)
    assert first.shape == (240, 320, 3)
    assert first.std() > 20  # there is something to be seen
    moved = np.abs(first - last).max(axis=2) > 60  # the arm, and what it covered
    assert 200 < moved.sum() < moved.size / 2
