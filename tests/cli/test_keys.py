from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest

from omni_bus.bus.curve import Curve
from omni_bus.cli import main
from omni_bus.cli.visit import visit
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_deployments_keys_and_what_to_do_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "here"]) == 0

    assert Curve("here").name == "deployment"
    said = capsys.readouterr().out
    assert 'key_folder = "here"' in said
    assert Curve("here").secret.decode() not in said


def test_a_clients_keys_and_what_to_do_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "here"]) == 0
    assert main(["keys", "here", "--client", "laptop"]) == 0

    assert Curve("here/clients/laptop").name == "laptop"
    said = capsys.readouterr().out
    assert "move here/clients/laptop there" in said
    assert "rm here/allowed/laptop.key" in said
    assert Curve("here/clients/laptop").secret.decode() not in said


def test_nothing_is_replaced_by_accident(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "here"]) == 0
    before = Curve("here").public

    assert main(["keys", "here"]) == 1
    assert Curve("here").public == before
    assert "here/deployment.key_secret exists; --force replaces it" in capsys.readouterr().err

    assert main(["keys", "here", "--force"]) == 0
    assert Curve("here").public != before


def visitor(**options: object) -> argparse.Namespace:
    given = {"command": "call", "name": None, "keys": None, "listen": None, "insecure": False, **options}
    return argparse.Namespace(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"connect": "10.0.0.1:7550"}, "--connect 10.0.0.1:7550: not an address (allowed: tcp://HOST:PORT)"),
        ({"connect": "tcp://10.0.0.1"}, "--connect tcp://10.0.0.1: not an address"),
        ({"connect": "tcp://10.0.0.1:0"}, "--connect tcp://10.0.0.1:0: not an address"),
        ({"connect": "tcp://10.0.0.1:x"}, "--connect tcp://10.0.0.1:x: not an address"),
        (
            {"connect": "tcp://10.0.0.1:7550"},
            "--connect tcp://10.0.0.1:7550: not the loopback (allowed: with --keys, or --insecure)",
        ),
        ({"connect": "tcp://127.0.0.1:7550", "keys": "nowhere"}, "nowhere: no such folder"),
        ({"connect": "tcp://a..b:7550", "insecure": True}, "--connect: a..b can't be reached"),
    ],
)
async def test_addresses_and_keys_that_can_not_be_used_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        async with visit(visitor(**options)):
            pass

    assert message in caught.value.message
