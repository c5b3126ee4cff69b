"""A remote policy behind openpi's own kind of server, made of the stock library's parts, in all its moods."""

from __future__ import annotations

import threading
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from openpi_client import msgpack_numpy
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from adapters.robot.openpi import OpenPIOptions, OpenPIPolicy
from adapters.robot.policy import Observation
from omni_bus.errors import BadInput, DeadlineExceeded, StageFailed, StartFailed, Unavailable
from omni_bus.testing import make_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Answer = Any


class Server:
    """Metadata first, then an answer for each observation; an exception is sent as its traceback, and the end."""

    def __init__(self, answer: Callable[[Server, dict[str, Any]], Answer], port: int = 0, metadata: Any = None) -> None:
        self.seen: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.num_connections = 0
        self.idle_s: float | None = None
        self._answer = answer
        default = {"policy": "echo", "action_dim": np.int64(3), "scale": np.ones(2)}
        self._metadata = msgpack_numpy.packb(default) if metadata is None else metadata
        self.server = serve(self._handle, "127.0.0.1", port, compression=None, max_size=None)
        self.port = self.server.socket.getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}"
        self._sockets: list[Any] = []
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def _handle(self, socket: Any) -> None:
        self.num_connections += 1
        self._sockets.append(socket)
        self.headers.append(socket.request.headers)
        socket.send(self._metadata)
        while True:
            try:
                observation = msgpack_numpy.unpackb(socket.recv(self.idle_s))
            except TimeoutError:
                socket.close(1000, "idle")
                return
            except ConnectionClosed:
                return
            self.seen.append(observation)
            try:
                answer = self._answer(self, observation)
            except (RuntimeError, TypeError, ValueError):
                socket.send(traceback.format_exc())
                socket.close(1011, "Internal server error. Traceback included in previous frame.")
                return
            if answer is not None:
                socket.send(answer if isinstance(answer, bytes | str) else msgpack_numpy.packb(answer))

    def stop(self) -> None:
        self.server.shutdown()
        for socket in self._sockets:
            socket.close()
        self._thread.join()


def echo(server: Server, observation: dict[str, Any]) -> Answer:
    """The state, as five actions."""
    state = np.asarray(observation["observation/state"], np.float32)
    return {
        "actions": np.tile(state, (5, 1)),
        "confidence": np.arange(5),
        "server_timing": {"infer_ms": 1.0},
        "frame": np.zeros(3),
    }


@contextmanager
def serving(answer: Any = echo, port: int = 0, metadata: Any = None) -> Iterator[Server]:
    server = Server(answer, port, metadata)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def policy_of(url: str, **options: Any) -> Iterator[OpenPIPolicy]:
    policy = OpenPIPolicy(msgspec.convert({"url": url, **options}, OpenPIOptions), make_context())
    policy.load(lambda phase, fraction: None)
    try:
        yield policy
    finally:
        policy.close()


def seen(number: int = 0, session: str = "a", *, is_first: bool = False, **fields: Any) -> Observation:
    values: dict[str, Any] = {
        "observation/state": np.full(3, number, np.float64),
        "observation/image": np.full((4, 6, 3), number, np.uint8),
    }
    named: dict[str, Any] = {"prompt": "go"} | fields
    return Observation(session, is_first, values, **named)


def infer(policy: OpenPIPolicy, *observations: Observation, **manner: Any) -> Any:
    return policy.infer(observations, **manner)


def test_what_is_seen_arrives_and_what_is_answered_comes_back() -> None:
    with serving() as server, policy_of(server.url) as policy:
        [found] = infer(policy, seen(7, seed=3))

    assert policy.metadata == {"policy": "echo", "action_dim": 3, "scale": [1.0, 1.0]}
    [observation] = server.seen
    assert sorted(observation) == ["observation/image", "observation/state", "prompt"]
    assert observation["observation/image"].dtype == np.uint8
    assert (observation["observation/image"] == 7).all()
    assert observation["prompt"] == "go"
    assert sorted(found) == ["actions", "confidence"]  # what has no row for each action isn't one
    assert (found["actions"] == np.full((5, 3), 7, np.float32)).all()


def test_bare_array_is_the_actions() -> None:
    with serving(lambda *_: np.ones((2, 3), np.float32)) as server, policy_of(server.url) as policy:
        [found] = infer(policy, seen())

    assert found["actions"].shape == (2, 3)


def test_batch_travels_at_once_on_a_connection_for_each_session() -> None:
    together = threading.Barrier(3, timeout=20)

    def answer(server: Server, observation: dict[str, Any]) -> Answer:
        together.wait()  # nobody is answered before all have asked
        return echo(server, observation)

    with serving(answer) as server, policy_of(server.url) as policy:
        for _ in range(2):
            found = infer(policy, *(seen(i, f"robot-{i}") for i in range(3)))
            assert [each["actions"][0, 0] for each in found] == [0, 1, 2]

    assert server.num_connections == 1 + 3  # the first one asked for metadata


def test_session_that_begins_anew_gets_a_new_connection() -> None:
    with serving() as server, policy_of(server.url) as policy:
        for is_first in (True, False, True, False):
            infer(policy, seen(is_first=is_first))
        policy.forget("a")
        policy.forget("unknown")
        infer(policy, seen())

    assert server.num_connections == 1 + 3


def test_dialect_with_sessions_sends_them() -> None:
    with serving() as server, policy_of(server.url, dialect="vllm-omni") as policy:
        infer(policy, seen(session="b", seed=5, num_inference_steps=2))

    assert {key: server.seen[0][key] for key in ("session_id", "seed", "sampling_params")} == {
        "session_id": "b",
        "seed": 5,
        "sampling_params": {"num_inference_steps": 2},
    }


def test_key_is_sent_as_the_stock_client_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_KEY", "secret")
    with serving() as server, policy_of(server.url, api_key_env="POLICY_KEY") as policy:
        infer(policy, seen())

    assert [headers["Authorization"] for headers in server.headers] == ["Api-Key secret"] * 2


# --- servers that fail ----------------------------------------------------------------------------------------


def fails_once(server: Server, observation: dict[str, Any]) -> Answer:
    if observation["observation/state"][0] == 13:
        raise RuntimeError("a secret path: /home/user/weights")
    return echo(server, observation)


def test_failure_of_the_server_is_one_robots_and_quotes_no_traceback() -> None:
    with serving(fails_once) as server, policy_of(server.url) as policy:
        failed, fine = infer(policy, seen(13, "a"), seen(2, "b"))
        [again] = infer(policy, seen(3, "a"))

    assert isinstance(failed, StageFailed)
    assert "secret" not in failed.message
    assert fine["actions"][0, 0] == 2
    assert again["actions"][0, 0] == 3


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ({"type": "error", "message": "Internal inference error"}, StageFailed, "Internal inference error"),
        (
            {"type": "error", "message": "Invalid", "detail": "state: 3 came", "code": "bad_input", "field": "state"},
            BadInput,
            "state: 3 came",
        ),
        ({"status": "reset successful"}, StageFailed, "no actions"),
        ({"actions": [1, 2]}, StageFailed, "list"),
        (np.zeros(3), StageFailed, r"shape \(3,\)"),
        (b"\xc1", StageFailed, "something else than MessagePack"),
        (b"", StageFailed, "something else than MessagePack"),
        (
            {"actions": {b"__ndarray__": True, b"data": b"1", b"dtype": "<f4", b"shape": [9, 9]}},
            StageFailed,
            "than Mess",
        ),
    ],
)
def test_answer_that_is_none_is_an_error(answer: Any, kind: type[Exception], said: str) -> None:
    with serving(lambda *_: answer) as server, policy_of(server.url) as policy:
        [found] = infer(policy, seen())

    assert type(found) is kind
    assert msgspec.json.encode(str(found))
    with pytest.raises(kind, match=said):
        raise found


def test_words_that_are_no_traceback_are_passed_on() -> None:
    with serving(lambda *_: "no room") as server, policy_of(server.url) as policy:
        [found] = infer(policy, seen())

    assert isinstance(found, StageFailed)
    assert "no room" in found.message


def test_server_without_a_policy_is_refused_at_the_start() -> None:
    """What vLLM-Omni says where another model is loaded."""
    said = '{"type":"error","error":"Robot policy not available","code":"unsupported"}'

    with (
        serving(metadata=said) as server,
        pytest.raises(StartFailed, match="policy not available"),
        policy_of(server.url),
    ):
        pass


@pytest.mark.parametrize("value", [np.array([None]), np.zeros(2, np.complex64), 1 << 70, object()])
def test_value_that_can_not_be_sent_is_refused_alone(value: Any) -> None:
    with serving() as server, policy_of(server.url) as policy:
        odd = seen(1)
        odd.values["odd"] = value
        refused, fine = infer(policy, odd, seen(2, "b"))

    assert isinstance(refused, BadInput)
    assert fine["actions"][0, 0] == 2


def test_server_that_answers_no_pings_is_waited_for() -> None:
    """As openpi's own, whose policy computes on the sockets' loop."""
    with serving() as server, policy_of(server.url) as policy:
        infer(policy, seen(1))
        [socket] = policy._sockets.values()

    assert socket.ping_timeout is None


def test_silent_server_is_given_up_and_its_late_answer_never_read() -> None:
    go_on = threading.Event()

    def answer(server: Server, observation: dict[str, Any]) -> Answer:
        if observation["observation/state"][0] == 1:
            go_on.wait(20)
        return echo(server, observation)

    with serving(answer) as server, policy_of(server.url, timeout_s=0.3) as policy:
        [silent] = infer(policy, seen(1))
        [late] = infer(policy, seen(1, "b"), deadline=time.monotonic() + 0.1)
        go_on.set()
        [found] = infer(policy, seen(2))

    assert isinstance(silent, StageFailed)
    assert "within 0.3 s" in silent.message
    assert isinstance(late, DeadlineExceeded)
    assert found["actions"][0, 0] == 2


def test_deadline_that_is_over_asks_nobody() -> None:
    with serving() as server, policy_of(server.url) as policy:
        [found] = infer(policy, seen(), deadline=time.monotonic() - 1)

    assert isinstance(found, DeadlineExceeded)
    assert server.seen == []


def test_connection_that_the_server_closed_is_opened_again() -> None:
    with serving() as server, policy_of(server.url) as policy:
        server.idle_s = 0.05
        infer(policy, seen(1))
        for socket in server._sockets[1:]:
            socket.recv_events_thread.join(20)  # it has said goodbye
        server.idle_s = None
        [found] = infer(policy, seen(2))

    assert found["actions"][0, 0] == 2
    assert server.num_connections == 3


def test_server_that_comes_back_is_found_again() -> None:
    with serving() as server, policy_of(server.url) as policy:
        infer(policy, seen(1))
        server.stop()
        [gone] = infer(policy, seen(2))
        with serving(port=server.port):
            [found] = infer(policy, seen(3))

    assert isinstance(gone, Unavailable)
    assert found["actions"][0, 0] == 3


def test_start_without_a_server_is_refused() -> None:
    with serving() as server:
        pass

    with pytest.raises(StartFailed, match=f"url: ws://127.0.0.1:{server.port} does not answer"), policy_of(server.url):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [({"url": "http://x"}, "url"), ({"timeout_s": 0}, "timeout_s"), ({"dialect": "x"}, "dialect"), ({"a": 1}, "`a`")],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert({"url": "ws://x", **options}, OpenPIOptions)


def test_key_that_is_not_set_is_told_before_the_start() -> None:
    assert "NO_SUCH_KEY is not set" in OpenPIPolicy.check(OpenPIOptions(url="ws://x", api_key_env="NO_SUCH_KEY"))[0]
