"""The stock openpi-client, as robots have it, on a deployment of real processes: restarts, kills, chunks, resets."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from openpi_client import action_chunk_broker, msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from adapters.robot.metaworld import MetaworldOptions, MetaworldPolicy
from adapters.robot.policy import Observation
from omni_bus.testing import make_context
from tests.processes.conftest import environ, omni_bus, up  # noqa: F401 (fixtures)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes.conftest import Up

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    # The client's own way to call websockets.
    pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"),
]

packb: Any = msgpack_numpy.packb  # it has no types

TOML = """
[stages.policy]
adapter = "robot-policy"
policy = { name = "metaworld" }
policy_server_config = { needs_session_id = false }
[pipelines.robot]
edges = ["in.observation -> policy.observation", "policy.actions -> out.actions"]
[gateways.robot]
protocol = "openpi"
port = PORT
"""

PROMPTS = ("open the drawer", "press the button", "open the window")
NUM_INFERS = 1500
QUIET = ("--log-level", "WARNING")
"""No line for each socket: nobody reads them meanwhile."""


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def observation(i: int) -> dict[str, Any]:
    state = np.random.default_rng(i).random(39, np.float32)
    return {"observation/state": state, "prompt": PROMPTS[i % 3], "camera": np.zeros((32, 32, 3), np.uint8)}


def expected(numbers: range) -> list[Any]:
    """What the policy says when it is called in process, one observation at a time."""
    policy = MetaworldPolicy(MetaworldOptions(), make_context())
    policy.load(lambda phase, fraction: None)
    found: list[Any] = []
    for i in numbers:
        values = observation(i)
        values.pop("prompt")
        (answer,) = policy.infer([Observation("one", is_first=True, values=values, prompt=PROMPTS[i % 3])])
        assert isinstance(answer, dict)
        found.append(answer["actions"])
    return found


def served_again(client: WebsocketClientPolicy) -> dict[str, Any]:
    """Ask until the successor of a lost policy answers."""
    told: dict[str, Any] = client.infer(observation(0))
    while told.get("type") == "error":
        assert told["message"] == "Internal inference error"
        assert told["code"] in ("stage_lost", "unavailable", "link_broken"), told
        time.sleep(told.get("retry_after_s", 0.05))
        told = client.infer(observation(0))
    return told


def check_chunks_are_dealt_out(client: WebsocketClientPolicy, truth: Any) -> None:
    broker = action_chunk_broker.ActionChunkBroker(client, action_horizon=8)
    for row in truth:
        assert np.allclose(broker.infer(observation(0))["actions"], row, atol=1e-5)


def check_frames_are_the_clients_own_bytes(port: int) -> None:
    with connect(f"ws://127.0.0.1:{port}/v1/realtime/robot/openpi", compression=None) as raw:
        raw.recv()
        raw.send(packb(observation(0)))
        frame = raw.recv()
    assert frame == packb({"actions": msgpack_numpy.unpackb(frame)["actions"]})


def test_every_answer_is_the_policys_own_also_after_a_restart(up: Callable[..., Up], port: int) -> None:  # noqa: F811
    truth = expected(range(10))
    for name in ("first", "second"):
        deployment = up(TOML.replace("PORT", str(port)), *QUIET, file=name)
        deployment.wait_for("ready")
        client = WebsocketClientPolicy("127.0.0.1", port)
        assert client.get_server_metadata()["action_horizon"] == 8
        assert client.get_server_metadata()["needs_session_id"] is False
        for i in range(NUM_INFERS // 2):
            answer = client.infer(observation(i % 10))
            assert answer["actions"].dtype == np.float32
            assert np.allclose(answer["actions"], truth[i % 10], atol=1e-5)
            assert answer["server_timing"]["batch_size"] == 1
        check_chunks_are_dealt_out(client, truth[0])
        check_frames_are_the_clients_own_bytes(port)
        assert deployment.stop() == 0
        with pytest.raises(ConnectionClosed):
            client.infer(observation(0))


def test_killed_policy_is_told_and_the_same_socket_is_served_again(up: Callable[..., Up], port: int) -> None:  # noqa: F811
    deployment = up(TOML.replace("PORT", str(port)), *QUIET)
    deployment.wait_for("ready")
    client = WebsocketClientPolicy(f"ws://127.0.0.1:{port}/v1/realtime/robot/openpi")
    assert client.infer(observation(0))["actions"].shape == (8, 4)

    os.kill(deployment.pid_of("policy.0"), signal.SIGKILL)
    told = served_again(client)

    assert np.allclose(told["actions"], expected(range(1))[0], atol=1e-5)
    assert client.infer({"endpoint": "reset"}) == {"status": "reset successful"}
    assert deployment.stop() == 0


def test_no_infer_is_lost_while_replicas_come_and_go(
    up: Callable[..., Up],  # noqa: F811
    omni_bus: Callable[..., Any],  # noqa: F811
    port: int,
) -> None:
    truth = expected(range(10))
    deployment = up(TOML.replace("PORT", str(port)), *QUIET, "-o", "stages.policy.replicas=2")
    deployment.wait_for("ready")
    is_over = threading.Event()

    def drive() -> int:
        client = WebsocketClientPolicy("127.0.0.1", port)
        count = 0
        while not is_over.wait(0.02):
            assert np.allclose(client.infer(observation(count % 10))["actions"], truth[count % 10], atol=1e-5)
            count += 1
        return count

    def order(*words: str) -> None:
        done = omni_bus(*words)
        assert (done.returncode, done.stderr) == (0, "")

    with ThreadPoolExecutor(4) as robots:
        driven = [robots.submit(drive) for _ in range(4)]
        try:
            # One after the other, then one for good, then the only one that is left, for which they wait.
            for words in (("restart", "policy"), ("scale", "policy=1"), ("restart", "policy")):
                order(*words, "--timeout", "20")
        finally:
            is_over.set()
        assert all(robot.result() for robot in driven)

    client = WebsocketClientPolicy("127.0.0.1", port)
    order("drain", "policy.0", "--timeout", "20")  # it waits for no robot that stays connected
    with pytest.raises(RuntimeError, match=r"Internal inference error: .*policy\.0: drained"):
        client.infer(observation(0))
    order("drain", "--undo", "policy.0")
    assert np.allclose(WebsocketClientPolicy("127.0.0.1", port).infer(observation(0))["actions"], truth[0], atol=1e-5)
    assert deployment.stop() == 0


HANGING = """
import threading

from adapters.robot.metaworld import MetaworldPolicy


class Hanging(MetaworldPolicy):
    def infer(self, observations, *, deadline=None, on_step=None):
        if any("hang" in observation.values for observation in observations):
            threading.Event().wait()
        return super().infer(observations, deadline=deadline, on_step=on_step)
"""


def test_hung_policy_is_told_and_replaced_under_the_same_socket(
    up: Callable[..., Up],  # noqa: F811
    port: int,
    environ: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    environ["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environ.get("PYTHONPATH", "")))
    limits = "step_timeout_s = 1\npolicy_timeout_s = 0.5\n"
    toml = TOML.replace("PORT", str(port)).replace('"metaworld"', '"hanging:Hanging"')
    deployment = up(toml.replace("policy_server_config", limits + "policy_server_config"), *QUIET)
    deployment.wait_for("ready")
    client = WebsocketClientPolicy(f"ws://127.0.0.1:{port}/v1/realtime/robot/openpi")

    assert client.infer(observation(0) | {"hang": True})["code"] == "deadline_exceeded"
    told = served_again(client)

    assert np.allclose(told["actions"], expected(range(1))[0], atol=1e-5)
    assert deployment.stop() == 0
    told_of = [event for event in deployment.events if event.get("process") == "policy.0"]
    assert len({event["pid"] for event in told_of if "pid" in event}) == 2
