"""The OpenPI gateway over real sockets and a real stage, with a policy whose answers show what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from openpi_client import msgpack_numpy
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

sys.path.insert(0, str(Path(__file__).parent))

from fake import FakePolicy  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running
from omni_bus.client import BusClient
from omni_bus.errors import ConfigError
from omni_bus.media.numpy_frames import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from websockets.asyncio.client import ClientConnection

    from actors.testing import Running

packb: Any = msgpack_numpy.packb  # it has no types

ROUTE = "/v1/realtime/robot/openpi"
TOML = """
[stages.policy]
adapter = "robot-policy"
policy = { name = "fake:FakePolicy", horizon = 3 }
policy_server_config = { image_resolution = [180, 320], needs_session_id = true }
max_batch_wait_s = 0.0
STAGE
[stages.policy.images.image]
is_required = false
[stages.policy.states.state]
is_required = false
[pipelines.robot]
edges = ["in.observation -> policy.observation", "policy.actions -> out.actions"]
PIPELINE
[gateways.robot]
protocol = "openpi"
GATEWAY
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    FakePolicy.seen.clear()
    FakePolicy.batches.clear()
    FakePolicy.forgotten.clear()
    FakePolicy.gate.clear()
    yield
    FakePolicy.gate.set()


@asynccontextmanager
async def serving(stage: str = "", gateway: str = "", pipeline: str = "") -> AsyncIterator[Running]:
    toml = TOML.replace("STAGE", stage).replace("GATEWAY", gateway).replace("PIPELINE", pipeline)
    async with running(toml) as deployment:
        await deployment.until_ready()
        yield deployment


class Robot:
    """A client that shows every frame."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def ask(self, message: Any) -> Any:
        await self.socket.send(message if isinstance(message, bytes | str) else packb(message))
        return await self.hear()

    async def hear(self) -> Any:
        frame = await self.socket.recv()
        return frame if isinstance(frame, str) else msgpack_numpy.unpackb(frame)

    async def infer(self, number: float = 1.0, **values: Any) -> Any:
        answer = await self.ask(observation(number, **values))
        assert "actions" in answer, answer
        return answer["actions"]

    async def closed(self) -> tuple[int, str]:
        with pytest.raises(ConnectionClosed) as closed:
            await self.socket.recv()
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason


@asynccontextmanager
async def robot(deployment: Running, path: str = ROUTE, **headers: str) -> AsyncIterator[Robot]:
    address = f"ws://127.0.0.1:{deployment.port}{path}"
    async with connect(address, compression=None, max_size=None, additional_headers=headers) as socket:
        found = Robot(socket)
        assert "action_horizon" in await found.hear()
        yield found


async def until(holds: Callable[[], Any]) -> None:
    """Let the loop turn until something holds that nobody tells of; the test's time limit ends it otherwise."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


def waiting(deployment: Running) -> Any:
    """What waits in the stage for the policy."""
    engine: Any = deployment.stages["policy.0"].engine
    return engine._dispatcher._batcher


def observation(number: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"state": np.array([number, 2.0], np.float32), "prompt": "pick"} | more


# --- what a robot is served --------------------------------------------------------------------------------


async def test_metadata_comes_first_with_the_deployments_own_keys() -> None:
    async with serving() as deployment, connect(f"ws://127.0.0.1:{deployment.port}{ROUTE}") as socket:
        frame = await socket.recv()

    expected = {
        "action_horizon": 3,
        "action_dim": 4,
        "image_resolution": [180, 320],
        "needs_session_id": True,
    }
    assert frame == packb(expected)


async def test_observation_reaches_the_policy_whole_and_its_actions_come_back() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    extra = {"seed": 5, "sampling_params": {"num_inference_steps": 3}, "observation/x": [1, {"y": np.float64(2)}]}
    async with serving() as deployment, robot(deployment) as client:
        actions = await client.infer(image=pixels, session_id="s", endpoint="other", raw=b"jpg", **extra)

    assert actions.dtype == np.float32
    assert actions.tolist() == [[1, 3, 5.5, row] for row in range(3)]
    (seen,) = FakePolicy.seen
    values: Any = seen.values
    assert (seen.prompt, seen.seed, seen.num_inference_steps, seen.is_first) == ("pick", 5, 3, True)
    assert seen.session.endswith("/s")
    assert values.keys() == {"state", "image", "observation/x", "raw"}
    assert values["observation/x"] == [1, {"y": 2.0}]
    assert values["raw"] == b"jpg"
    assert np.array_equal(values["image"], pixels)
    assert all(values[key].flags.writeable for key in ("image", "state"))


async def test_floats_are_sent_as_float32_and_bare_where_asked() -> None:
    async with serving("", "") as deployment:
        async with robot(deployment, f"{ROUTE}?wrap=0") as client:
            bare = await client.ask(observation())
            assert isinstance(bare, np.ndarray)
            assert bare.shape == (3, 4)
        async with robot(deployment, f"{ROUTE}?timing=1") as client:
            first, second = await client.ask(observation()), await client.ask(observation())

    assert first.keys() == {"actions", "server_timing"}
    assert {"infer_ms", "policy_ms", "queue_ms"} <= first["server_timing"].keys()
    assert first["server_timing"]["batch_size"] == 1
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] > 0


async def test_each_change_of_session_begins_anew_and_reset_does() -> None:
    async with serving() as deployment, robot(deployment) as client:
        counts = [(await client.infer(session_id=name))[0, 0] for name in "aabaa"]
        assert await client.ask({"endpoint": "reset", "more": 1}) == {"status": "reset successful"}
        counts.append((await client.infer(session_id="a"))[0, 0])
        counts.append((await client.infer())[0, 0])

    assert counts == [1, 2, 1, 1, 2, 1, 2]
    assert sorted(name.partition("/")[2] for name in FakePolicy.forgotten) == ["a", "a", "a", "b"]


async def test_two_robots_on_one_socket_keep_their_states_where_that_is_set() -> None:
    async with serving(gateway="multi_session_per_connection = true") as deployment, robot(deployment) as client:
        counts = [(await client.infer(session_id=name))[0, 0] for name in "ababa"]

    assert counts == [1, 1, 2, 2, 3]


async def test_same_session_name_on_two_sockets_is_two_sessions() -> None:
    async with serving() as deployment, robot(deployment) as one, robot(deployment) as two:
        counts = [(await each.infer(session_id="x"))[0, 0] for each in (one, two, one, two)]

    assert counts == [1, 1, 2, 2]
    assert len(FakePolicy.forgotten) == 2


@pytest.mark.parametrize("endpoint", ["infer", "unknown", "Reset", "", None])
async def test_any_endpoint_but_reset_is_an_inference(endpoint: str | None) -> None:
    async with serving() as deployment, robot(deployment) as client:
        counts = [(await client.infer(endpoint=endpoint))[0, 0] for _ in range(2)]

    assert counts == [1, 2]
    assert "endpoint" not in FakePolicy.seen[0].values


async def test_robots_that_ask_at_once_share_a_call_of_the_policy() -> None:
    async with serving() as deployment:
        sockets = [connect(f"ws://127.0.0.1:{deployment.port}{ROUTE}") for _ in range(5)]
        robots = [Robot(await socket) for socket in sockets]
        for each in robots:
            await each.hear()
        blocker = asyncio.ensure_future(robots[0].infer(FakePolicy.HANGS))
        await until(lambda: FakePolicy.batches)
        asked = [asyncio.ensure_future(each.infer(float(i))) for i, each in enumerate(robots[1:])]
        await until(lambda: len(waiting(deployment)) == 4)
        FakePolicy.gate.set()
        await blocker
        answers = [await each for each in asked]
        for each in robots:
            await each.socket.close()

    assert FakePolicy.batches == [1, 4]
    assert [answer[0, 1] for answer in answers] == [2.0, 3.0, 4.0, 5.0]


async def test_server_answers_pings_while_the_policy_runs() -> None:
    async with serving() as deployment, robot(deployment) as client:
        await client.socket.send(packb(observation(FakePolicy.HANGS)))
        await until(lambda: FakePolicy.batches)
        await (await client.socket.ping())
        FakePolicy.gate.set()
        assert "actions" in await client.hear()


async def test_message_that_comes_while_the_policy_runs_is_answered_after_it() -> None:
    async with serving() as deployment, robot(deployment) as client:
        for number in (FakePolicy.HANGS, 7.0, 8.0):
            await client.socket.send(packb(observation(number)))
        FakePolicy.gate.set()
        sums = [(await client.hear())["actions"][0, 1] for _ in range(3)]

    assert sums == [907.0, 9.0, 10.0]


async def test_ensembling_averages_what_several_chunks_say_of_a_step() -> None:
    stage = 'step_key = "t"\nsmoothing = { method = "ensemble", coefficient = 0.0 }'
    async with serving(stage) as deployment, robot(deployment) as client:
        first, second = await client.infer(t=0), await client.infer(t=1)
        again = await client.infer(t=0, session_id="next")
        told = await client.ask(observation(t=-1))

    assert first[:, 0].tolist() == [1, 1, 1]
    assert second[:, 0].tolist() == [1.5, 1.5, 2]
    assert second[:, 3].tolist() == [0.5, 1.5, 2]  # rows 1 and 2 of the first, with 0 and 1 of the second
    assert again[:, 0].tolist() == [1, 1, 1]
    assert told["detail"] == "t: -1 came (allowed: whole numbers that don't fall, at least 0)"


async def test_real_time_chunks_go_on_where_the_last_one_is() -> None:
    stage = """
step_key = "t"
control_hz = 10.0
smoothing = { method = "real-time", latency_budget_s = 0.1 }
"""
    async with serving(stage) as deployment, robot(deployment) as client:
        first, second = await client.infer(t=0), await client.infer(t=1)

    assert first[:, 3].tolist() == [0, 1, 2]
    assert second[0].tolist() == first[1].tolist()  # a row is executed until the answer is there
    assert 1 < second[1, 0] < 2
    assert second[2].tolist() == [2, 3, 0, 2]


async def test_actions_are_as_many_and_as_wide_as_the_robot_wants() -> None:
    async with serving("n_action_steps = 2\naction_dim = 3") as deployment, robot(deployment) as client:
        assert (await client.infer()).shape == (2, 3)


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ('smoothing = { method = "ensemble" }', "smoothing: it needs 'control_hz' or 'step_key'"),
        ('timestamp_key = "t"', "timestamp_key: it needs 'max_age_s'"),
        ('action_statistics = "a"', "statistics: none is named"),
        ("action_low = [2.0]\naction_high = [1.0]", "action_low: 2 is above action_high's 1"),
    ],
)
async def test_options_that_contradict_each_other_are_refused_before_the_start(stage: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        async with serving(stage):
            pass


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ('{ name = "fake:FakePolicy", horizn = 3 }', "policy: Object contains unknown field `horizn`"),
        ('{ name = "none" }', "unknown policy 'none'"),
        ('{ name = "fake:Nothing" }', "policy.name: 'fake:Nothing' can't be loaded"),
        ('{ name = "fake:FakeOptions" }', "is no subclass of adapters.robot.policy.Policy"),
        ("{ horizon = 3 }", "policy.name: it is missing"),
    ],
)
async def test_policy_that_is_none_is_refused_before_the_start(policy: str, why: str) -> None:
    toml = TOML.replace('{ name = "fake:FakePolicy", horizon = 3 }', policy)
    for word in ("STAGE", "PIPELINE", "GATEWAY"):
        toml = toml.replace(word, "")
    with pytest.raises(ConfigError, match=why):
        async with running(toml):
            pass


async def test_policy_that_hangs_is_given_up_and_no_more_is_taken() -> None:
    async with serving("policy_timeout_s = 0.05") as deployment, robot(deployment) as client:
        answer = await client.ask(observation(FakePolicy.HANGS))
        assert answer["code"] == "deadline_exceeded"
        await client.socket.send(packb(observation()))
        await (await client.socket.ping())
        assert len(FakePolicy.seen) == 1
        FakePolicy.gate.set()
        assert (await client.hear())["actions"][0, 1] == 3.0


# --- what is refused ---------------------------------------------------------------------------------------


def _array(dtype: str, shape: Any, data: bytes = b"\0" * 8) -> bytes:
    marker = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    return packb({"state": marker})


BAD: list[tuple[Any, str]] = [
    ("hello", "message: text or nothing came"),
    (b"", "message: text or nothing came"),
    (b"\x81\xa1x", "message: it ends too early, after 3 bytes"),
    (b"\x8f\xa1x", "message: 30 values are announced at 1 where fewer bytes are left"),
    (b"\xc1", "message: an extension"),
    (packb([1]), "message: something else than a map came"),
    (_array("|O8", [1]), "message: dtype '|O8' came"),
    (_array("<c8", [1]), "message: dtype '<c8' came"),
    (_array("|V8", [1]), "message: dtype '|V8' came"),
    (_array("<f4", [3]), "message: an array of shape [3] and type <f4 has 8 bytes (allowed: 12)"),
    (_array("<f4", [-2]), "message: an array of shape [-2] (allowed: sides of 0 or more)"),
    (_array("<U999999999", [0], b""), "message: dtype '<U999999999' came"),
    (_array("<U2", [1], b"\0\0\x11\0" * 2), "state: text came that is none (allowed: Unicode)"),
    ({"state": np.array([np.nan], np.float32)}, "state: NaN or infinity came (allowed: finite numbers)"),
    ({"state": np.zeros((2, 2))}, "state: shape (2, 2) of type float64 came (allowed: a vector of any number"),
    ({"state": "x"}, "state: shape () of type <U1 came"),
    ({"image": np.zeros((3, 8, 8), np.uint8)}, "image: shape (3, 8, 8) came (allowed: a picture of shape (height"),
    ({"image": np.zeros((8, 8, 3), np.int64)}, "image: type int64 came"),
    ({"image": b"\xff\xd8"}, "image: a bytes came"),
    ({"prompt": 5}, "prompt: a int came (allowed: text)"),
    ({"prompt": "x" * 16_385}, "prompt: 16385 characters came (allowed: at most 16384)"),
    ({"session_id": [1]}, "session_id: a list came (allowed: text)"),
    ({"session_id": "x" * 257}, "session_id: 257 characters came (allowed: at most 256)"),
    ({"session_id": np.zeros(2)}, "session_id: an array came (allowed: a plain value)"),
    ({"endpoint": 5}, "endpoint: a int came (allowed: text)"),
    ({"endpoint": np.zeros(2)}, "endpoint: an array came (allowed: a plain value)"),
    ({"seed": "x"}, "seed: x came (allowed: a whole number from 0"),
    ({"seed": -1}, "seed: -1 came"),
    ({"seed": True}, "seed: True came"),
    ({"sampling_params": {"num_inference_steps": 0}}, "sampling_params.num_inference_steps: 0 came (allowed: a whole"),
    ({"sampling_params": {"temperature": 1}}, "sampling_params: temperature came (allowed: a map with"),
    ({"sampling_params": 3}, "sampling_params: a int came"),
]


async def test_bad_input_is_told_and_the_socket_and_its_session_go_on() -> None:
    async with serving() as deployment, robot(deployment) as client:
        await client.infer()
        for message, why in BAD:
            answer = await client.ask(message)
            assert answer["type"] == "error", message
            assert answer["message"] == "Invalid request payload"
            assert answer["detail"].startswith(why), answer
            assert answer["code"] in ("bad_input", "input_too_large")
        assert len(FakePolicy.seen) == 1
        assert (await client.infer())[0, 0] == 2


async def test_message_of_65_mib_is_refused_and_a_larger_one_closes_the_socket() -> None:
    async with serving() as deployment:
        async with robot(deployment) as client:
            answer = await client.ask(packb({"x": bytes(65 * 1024 * 1024)}))
            assert answer["message"] == "Invalid request payload"
            assert f"allowed: at most {MAX_FRAME_BYTES}" in answer["detail"]
            await client.infer()
        async with robot(deployment) as client:
            with contextlib.suppress(ConnectionClosed):  # the server says so before all has come
                await client.socket.send(bytes(67 * 1024 * 1024))
            assert (await client.closed())[0] == 1009
        async with robot(deployment) as client:
            big = np.ones((60, 1024, 1024), np.uint8)
            assert (await client.infer(rest=big))[0, 0] == 1
            assert np.array_equal(np.asarray(FakePolicy.seen[-1].values["rest"]), big)


@pytest.mark.parametrize(
    ("number", "message", "detail", "code"),
    [
        (FakePolicy.RAISES, "Internal inference error", "the policy failed: RuntimeError", "stage_failed"),
        (FakePolicy.NAN, "Internal inference error", "the policy gave NaN or infinity in 'actions': not sent", "stage"),
        (FakePolicy.BAD, "Invalid request payload", "state: this one is not for me", "bad_input"),
        (500.0, "Internal inference error", "the policy gave 502 for dimension 1 of step 0, above 100", "stage_failed"),
    ],
)
async def test_what_goes_wrong_in_the_policy_is_told_without_its_secrets(
    number: float, message: str, detail: str, code: str
) -> None:
    async with serving("action_high = [100.0]") as deployment, robot(deployment) as client:
        answer = await client.ask(observation(number))
        assert (answer["type"], answer["message"]) == ("error", message)
        assert answer["detail"].startswith(detail)
        assert answer["code"].startswith(code)
        assert "secret" not in str(answer)
        assert "Traceback" not in str(answer)
        await client.infer()


async def test_missed_deadline_is_told_while_the_policy_computes() -> None:
    async with serving() as deployment, robot(deployment, f"{ROUTE}?deadline_ms=20") as client:
        answer = await client.ask(observation(FakePolicy.HANGS))
        assert answer["code"] == "deadline_exceeded"
        assert "the policy missed its deadline: no actions within 0.020 s, hold or stop" in answer["detail"]
        FakePolicy.gate.set()
        while (answer := await client.ask(observation())).get("type") == "error":
            assert answer["code"] == "deadline_exceeded"

    assert answer["actions"][0, 1] == 3.0


async def test_stale_and_too_frequent_observations_are_refused() -> None:
    stage = 'sequence_key = "n"\nmax_rate_hz = 0.001\nburst = 4'
    async with serving(stage) as deployment, robot(deployment) as client:
        await client.infer(n=5)
        stale = await client.ask(observation(n=5))
        assert stale["detail"] == "n: a stale observation, number 5 came after 5"
        await client.infer(n=6)
        await client.ask({"endpoint": "reset"})
        await client.infer(n=1)
        refused = await client.ask(observation(n=2))

    assert refused["code"] == "quota_exceeded"
    assert refused["retry_after_s"] > 0
    assert [seen.values["n"] for seen in FakePolicy.seen] == [5, 6, 1]


# --- profiles, addresses and keys --------------------------------------------------------------------------


async def test_root_is_the_stock_server() -> None:
    async with serving() as deployment:
        async with aiohttp.ClientSession() as http, http.get(f"{deployment.url}/healthz") as response:
            assert (response.status, await response.text()) == (200, "OK\n")
        async with robot(deployment, "/") as client:
            answer = await client.ask(observation())
            assert answer.keys() == {"actions", "server_timing"}
            told = await client.ask(observation(FakePolicy.RAISES))
            assert told == "Internal inference error: the policy failed: RuntimeError"
            assert await client.closed() == (1011, "Internal inference error")
        async with robot(deployment, f"{ROUTE}?errors=text") as client:
            assert (await client.ask(b"\xc1")).startswith("Invalid request payload: message: an extension")
            await client.infer()


async def test_openai_gateway_serves_robots_beside_its_other_models() -> None:
    toml = TOML.replace('protocol = "openpi"', 'protocol = "openai"\nrobot_idle_timeout_s = 0.2')
    for word in ("STAGE", "PIPELINE", "GATEWAY"):
        toml = toml.replace(word, "")
    async with running(toml) as deployment:
        await deployment.until_ready()
        async with robot(deployment, f"{ROUTE}?model=robot") as client:
            await client.infer()
            assert (await client.closed())[0] == 1000
        async with robot(deployment, "/") as client:
            assert "server_timing" in await client.ask(observation())


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"{ROUTE}?errors=x", "errors: 'x' came (allowed: msgpack, text)"),
        (f"{ROUTE}?wrap=yes", "wrap: 'yes' came (allowed: 0, 1)"),
        (f"{ROUTE}?model=x", "unknown model 'x'"),
        (f"{ROUTE}?modl=x", "unknown query 'modl'; did you mean 'model'?"),
        (f"{ROUTE}?deadline_ms=nan", "deadline_ms: 'nan' came (allowed: 1 to 3600000)"),
    ],
)
async def test_address_that_is_wrong_is_refused_before_the_upgrade(path: str, why: str) -> None:
    async with serving() as deployment:
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{deployment.port}{path}")
        assert refused.value.response.status_code in (400, 404)
        assert why.encode() in refused.value.response.body
        async with aiohttp.ClientSession() as http, http.get(f"{deployment.url}{ROUTE}") as response:
            assert response.status == 400


async def test_key_opens_the_gateway_in_both_schemes() -> None:
    async with serving(gateway='api_keys = ["k"]') as deployment:
        for scheme in ("Api-Key", "Bearer"):
            async with robot(deployment, Authorization=f"{scheme} k") as client:
                await client.infer()
        for headers in ({}, {"Authorization": "Api-Key x"}):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://127.0.0.1:{deployment.port}/", additional_headers=headers)
            assert refused.value.response.status_code == 401


async def test_compression_is_not_agreed_on() -> None:
    async with serving() as deployment, connect(f"ws://127.0.0.1:{deployment.port}{ROUTE}") as socket:
        assert socket.request is not None
        assert socket.response is not None
        assert "permessage-deflate" in socket.request.headers["Sec-WebSocket-Extensions"]
        assert "Sec-WebSocket-Extensions" not in socket.response.headers


# --- ends --------------------------------------------------------------------------------------------------


async def test_idle_client_is_closed_with_a_reason_and_pings_are_no_activity() -> None:
    async with serving(gateway="idle_timeout_s = 0.2") as deployment:
        async with robot(deployment) as client:
            await client.infer()
            await (await client.socket.ping())
            code, reason = await client.closed()
        assert code == 1000
        assert reason == "idle: no message within 0.2 s (setting idle_timeout_s)"


async def test_computing_is_not_idling() -> None:
    async with serving(gateway="idle_timeout_s = 0.1") as deployment, robot(deployment) as client:
        await client.socket.send(packb(observation(FakePolicy.HANGS)))
        asyncio.get_running_loop().call_later(0.3, FakePolicy.gate.set)
        assert "actions" in await client.hear()


async def test_beyond_capacity_the_client_is_told_and_closed_until_one_is_free() -> None:
    async with serving(pipeline="max_in_flight = 1\nmax_queued = 0") as deployment:
        async with robot(deployment) as client:
            await client.infer()
            async with connect(f"ws://127.0.0.1:{deployment.port}{ROUTE}") as second:
                told = await second.recv()
                assert told == '{"type":"error","error":"Robot policy not available","code":"unsupported"}'
                code, _ = await Robot(second).closed()
                assert code == 1013
        await until(lambda: not deployment.gateway.client.requests)
        async with robot(deployment) as client:
            await client.infer()


async def test_client_that_waits_for_a_place_is_heard_meanwhile() -> None:
    async with serving(pipeline="max_in_flight = 1") as deployment:
        address = f"ws://127.0.0.1:{deployment.port}{ROUTE}"
        requests = deployment.gateway.client.requests
        async with robot(deployment):
            async with connect(address) as second:
                await (await second.ping())
                await until(lambda: len(requests) == 2)
            await until(lambda: len(requests) == 1)  # who leaves gives up the wait
            third = await connect(address)
            await until(lambda: len(requests) == 2)
        assert "action_horizon" in await Robot(third).hear()
        async with connect(address) as fourth:
            await until(lambda: len(requests) == 2)
            deployment.gateway.gateway.draining.set()
            assert await Robot(fourth).closed() == (1013, "the server is stopping")
        await third.close()


async def test_client_that_leaves_while_the_policy_runs_frees_its_place() -> None:
    async with serving() as deployment:
        async with robot(deployment) as client:
            await client.socket.send(packb(observation(FakePolicy.HANGS)))
            await until(lambda: FakePolicy.batches)
            client.socket.transport.abort()
            await until(lambda: not deployment.gateway.client.requests)
        FakePolicy.gate.set()
        async with robot(deployment) as client:
            assert (await client.infer())[0, 0] == 1


async def test_draining_gateway_answers_what_it_was_asked() -> None:
    async with serving() as deployment, robot(deployment) as client:
        asked = asyncio.create_task(client.infer(FakePolicy.HANGS))
        await until(lambda: FakePolicy.batches)
        deployment.gateway.gateway.draining.set()
        FakePolicy.gate.set()
        assert (await asked)[0, 0] == 1
        assert await client.closed() == (1013, "the server is stopping")


async def test_draining_gateway_closes_sockets_that_wait() -> None:
    async with serving() as deployment, robot(deployment) as client:
        await client.infer()
        deployment.gateway.gateway.draining.set()
        code, reason = await client.closed()

    assert (code, reason) == (1013, "the server is stopping")


# --- replicas that are to go -------------------------------------------------------------------------------


@asynccontextmanager
async def supervised(deployment: Running) -> AsyncIterator[BusClient]:
    """Be the supervisor, which takes replicas out of service with ``arrange``."""
    about = deployment.deployment
    connection = BusClient.connect(
        "supervisor", about.listen("supervisor"), about.coordinator_endpoint, role="supervisor", timeout_s=20
    )
    async with await connection as supervisor:
        yield supervisor


def num_robots(deployment: Running) -> list[int]:
    """How many each replica has."""
    return [len(stage._core.running) for _, stage in sorted(deployment.stages.items())]


async def test_robots_of_a_drained_replica_go_on_with_another_as_new_sessions() -> None:
    async with (
        serving("replicas = 2") as deployment,
        supervised(deployment) as supervisor,
        robot(deployment, f"{ROUTE}?timing=1") as idle,
        robot(deployment) as other,
        robot(deployment) as busy,
    ):
        await idle.infer(session_id="a")
        going_on = await idle.ask(observation())
        await other.infer()
        asked = asyncio.create_task(busy.infer(FakePolicy.HANGS))
        await until(lambda: len(FakePolicy.batches) == 4)
        assert sorted(num_robots(deployment)) == [1, 2]
        drained = num_robots(deployment).index(2)

        await supervisor.admin("arrange", drained=[f"policy.{drained}"])
        await until(lambda: num_robots(deployment)[drained] == 1)  # of two, the one that is being answered stays
        FakePolicy.gate.set()
        assert (await asked)[0, 0] == 1
        await until(lambda: num_robots(deployment)[drained] == 0)

        moved = await idle.ask(observation())
        assert [told["actions"][0, 0] for told in (going_on, moved)] == [2, 1]
        assert [told["server_timing"]["is_first"] for told in (going_on, moved)] == [False, True]
        assert FakePolicy.seen[-1].session.endswith("/a")
        assert (await busy.infer())[0, 0] == 1
        assert num_robots(deployment)[drained] == 0


async def test_no_observation_is_lost_or_served_twice_while_replicas_are_drained_in_turn() -> None:
    full = "max_in_flight = 4\nmax_queued = 0"  # a robot that moves needs the place that it leaves
    async with serving("replicas = 2", pipeline=full) as deployment, supervised(deployment) as supervisor:
        is_over = asyncio.Event()

        async def ask(number: int) -> int:
            """Ask until the drains are over; returns how often."""
            count = 0
            async with robot(deployment) as client:
                while not is_over.is_set():
                    count += 1
                    assert (await client.infer(float(number)))[0, 1] == number + 2
            return count

        asking = [asyncio.create_task(ask(number)) for number in range(4)]
        for turn in range(20):
            await supervisor.admin("arrange", drained=[f"policy.{turn % 2}"])
            await until(lambda turn=turn: num_robots(deployment)[turn % 2] == 0)
        is_over.set()
        asked = sum(await asyncio.gather(*asking))

    assert len(FakePolicy.seen) == asked


async def test_robot_whose_only_replica_is_drained_is_told_until_it_is_back() -> None:
    async with serving() as deployment, supervised(deployment) as supervisor, robot(deployment) as client:
        await client.infer()
        async with robot(deployment, "/") as stock:
            await supervisor.admin("arrange", drained=["policy.0"])
            await until(lambda: num_robots(deployment) == [0])
            for _ in range(2):
                told = await client.ask(observation())
                assert (told["message"], told["code"]) == ("Internal inference error", "unavailable")
                assert told["detail"] == "stage 'policy' has no replica that can serve (policy.0: drained)"
            assert (await stock.ask(observation())).startswith("Internal inference error: ")
            assert (await stock.closed())[0] == 1011
        async with connect(f"ws://127.0.0.1:{deployment.port}/") as refused:
            assert "Robot policy not available" in await Robot(refused).hear()
            assert (await Robot(refused).closed())[0] == 1013

        await supervisor.admin("arrange", drained=[])
        assert (await client.infer())[0, 0] == 1
        async with robot(deployment, "/") as stock:
            await stock.infer()


async def test_observation_that_waited_too_long_for_a_replica_is_not_served() -> None:
    """It waits for one that restarts, and what it shows is the past by then."""
    async with (
        serving("max_age_s = 0.001", pipeline="max_queued = 0") as deployment,
        supervised(deployment) as supervisor,
        robot(deployment) as client,
    ):
        requests = deployment.gateway.client.requests
        await supervisor.admin("arrange", drained=["policy.0"], returning=["policy.0"])
        await until(lambda: not requests)
        asked = asyncio.create_task(client.ask(observation()))
        await until(lambda: requests)
        await asyncio.sleep(0.002)
        await supervisor.admin("arrange", drained=[])
        told = await asked

    assert told["detail"].startswith("observation: a stale observation, ")
    assert FakePolicy.seen == []


async def test_missed_deadline_is_told_while_a_replica_restarts() -> None:
    async with (
        serving() as deployment,
        supervised(deployment) as supervisor,
        robot(deployment, f"{ROUTE}?deadline_ms=20") as client,
    ):
        requests = deployment.gateway.client.requests
        await supervisor.admin("arrange", drained=["policy.0"], returning=["policy.0"])
        await until(lambda: not requests)
        told = await client.ask(observation())
        assert told["code"] == "deadline_exceeded"
        assert "no policy was to be had within 0.020 s, hold or stop the robot" in told["detail"]
        assert not requests
        await supervisor.admin("arrange", drained=[])
        while (answer := await client.ask(observation())).get("type") == "error":
            assert answer["code"] == "deadline_exceeded"

    assert answer["actions"][0, 0] == 1
