from __future__ import annotations

import os
import socket

import pytest

from omni_bus.errors import StartFailed
from omni_bus.runtime.ports import bind_port


def test_port_zero_listens_on_a_free_one() -> None:
    with bind_port("openai", "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_address_with_colons_is_of_version_six() -> None:
    try:
        listener = bind_port("openai", "::1", 0)
    except StartFailed as error:
        pytest.skip(f"no IPv6 here: {error.message}")
    with listener:
        assert listener.family == socket.AF_INET6


def test_busy_port_names_the_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]

        with pytest.raises(StartFailed) as refused:
            bind_port("openai", "127.0.0.1", port)

    assert f"gateway 'openai' can't listen on 127.0.0.1:{port}: Address already in use" in refused.value.message
    assert f"(held by process {os.getpid()}: " in refused.value.message
    assert refused.value.field == "gateways.openai.port"


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_foreign_address_blames_the_host(host: str) -> None:
    with pytest.raises(StartFailed) as refused:
        bind_port("openai", host, 0)

    assert refused.value.field == "gateways.openai.host"
    assert "choose another with" not in refused.value.message
