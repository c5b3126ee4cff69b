from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from gateways.openai import OpenAIGateway
from omni_bus.bus.curve import make_client_keys, make_deployment_keys
from omni_bus.config.schema import CallerConfig, DeploymentConfig, GatewayConfig, SecurityConfig
from omni_bus.runtime.exposure import exposures, is_loopback, numeric_bind, security_problems

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {"here.example": ["127.0.0.1", "::1"], "both.example": ["127.0.0.1", "10.0.0.1"], "six.example": ["fd00::1"]}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that knows these names and numeric addresses."""
    real = socket.getaddrinfo

    def resolve(host: str, port: Any, **options: Any) -> Any:
        found = NAMES.get(host)
        if found is None:
            return real(host, port, flags=socket.AI_NUMERICHOST, **options)
        return [entry for address in found for entry in real(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def found(bind: str = "ipc", host: str = "127.0.0.1", key_folder: str = "", **options: Any) -> dict[str, str]:
    config = DeploymentConfig(
        "d",
        {},
        {},
        gateways={"web": GatewayConfig(host=host, options=options)},
        bind=bind,
        security=SecurityConfig(key_folder),
    )
    return {".".join(map(str, e.path)): e.problem.message for e in exposures(config, {"web": OpenAIGateway})}


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.3.2.1", "127.1", "::1", "[::1]", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1", "here.example"],
)
def test_the_loopback_by_any_name(host: str) -> None:
    assert is_loopback(host)
    assert found(bind=f"tcp://{host}", host=host) == {}


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "0",
        "::",
        "[::]",
        "*",
        "10.0.0.1",
        "192.168.1.5",
        "169.254.1.1",
        "fd00::1",
        "fe80::1",
        "::ffff:10.0.0.1",
        "128.0.0.1",
        "both.example",
        "six.example",
        "nowhere.example",
        "127.0.0.1.example",
        "é..x",
    ],
)
def test_whatever_others_may_reach_needs_keys(host: str) -> None:
    assert not is_loopback(host)
    assert set(found(bind=f"tcp://{host}", host=host)) == {"bind", "gateways.web.host"}


def test_a_gateway_that_listens_everywhere_by_an_empty_host_needs_a_key() -> None:
    assert found(host="") == {
        "gateways.web.host": "the empty host is not the loopback, and the gateway has no API key: whoever reaches it "
        "can use it; allowed: 127.0.0.1, or a key: gateways.web.api_key_file, or callers with keys, or --insecure"
    }


@pytest.mark.parametrize("options", [{"api_keys": ("k",)}, {"api_key_env": "K"}, {"api_key_file": "f"}])
def test_a_gateway_with_a_key_may_listen_anywhere(options: dict[str, Any]) -> None:
    assert found(host="0.0.0.0", **options) == {}


@pytest.mark.parametrize("caller", [CallerConfig(keys=("k",)), CallerConfig(key_env="K"), CallerConfig(key_file="f")])
def test_keys_of_callers_guard_a_gateway_too(caller: CallerConfig) -> None:
    gateways = {"web": GatewayConfig(host="0.0.0.0")}
    config = DeploymentConfig("d", {}, {}, gateways=gateways, callers={"gold": caller})

    assert exposures(config, {"web": OpenAIGateway}) == []
    config = DeploymentConfig("d", {}, {}, gateways=gateways, callers={"gold": CallerConfig()})
    assert len(exposures(config, {"web": OpenAIGateway})) == 1


def test_actors_with_keys_may_listen_anywhere() -> None:
    assert found(bind="tcp://10.0.0.1", key_folder="keys") == {}


def test_both_ways_out_are_named() -> None:
    assert found(bind="tcp://10.0.0.1")["bind"] == (
        "tcp://10.0.0.1 is not the loopback, and the actors have no keys: whoever reaches them can read and send "
        'everything; allowed: 127.0.0.1, or keys: `omni-bus keys FOLDER`, then security.key_folder = "FOLDER", or '
        "--insecure"
    )


def test_a_gateway_that_knows_no_keys_is_not_guarded() -> None:
    class Bare:
        Options = OpenAIGateway.Options

    config = DeploymentConfig("d", {}, {}, gateways={"web": GatewayConfig(host="0.0.0.0")})

    assert [exposure.path for exposure in exposures(config, {"web": Bare})] == [("gateways", "web", "host")]


@pytest.mark.parametrize("bind", ["tcp://*", "tcp://0.0.0.0", "tcp://0", "tcp://[::]", "tcp://::"])
def test_actors_can_not_listen_on_all_addresses(bind: str) -> None:
    problems = security_problems(DeploymentConfig("d", {}, {}, bind=bind))

    assert [problem.path for problem in problems] == [("bind",)]
    assert "allowed: the address that others connect to" in problems[0].message


def test_keys_are_looked_at(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def problems(folder: Path) -> list[str]:
        config = DeploymentConfig("d", {}, {}, security=SecurityConfig(str(folder)))
        return [problem.message for problem in security_problems(config)]

    assert "no such folder" in problems(keys)[0]
    make_deployment_keys(keys, may_replace=False)
    assert problems(keys) == []
    client = make_client_keys(keys, "laptop", may_replace=False)
    assert problems(client) == [f"{client} is a client's folder; allowed: the deployment's"]


@pytest.mark.parametrize(
    ("bind", "numeric"),
    [
        ("ipc", "ipc"),
        ("tcp://10.0.0.1", "tcp://10.0.0.1"),
        ("tcp://here.example", "tcp://127.0.0.1"),
        ("tcp://six.example", "tcp://[fd00::1]"),
        ("tcp://::1", "tcp://[::1]"),
        ("tcp://[::1]", "tcp://[::1]"),
        ("tcp://eth7", "tcp://eth7"),
    ],
)
def test_names_are_looked_up_for_sockets_which_do_not(bind: str, numeric: str) -> None:
    assert numeric_bind(bind) == numeric
