from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from zmq.utils import z85

from omni_bus.bus.curve import Curve, make_client_keys, make_deployment_keys, may_speak_as
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_deployment_keys(tmp_path / "keys", may_replace=False)
    return tmp_path / "keys"


def as_bytes(key: bytes) -> bytes:
    return z85.decode(key)


def test_every_actor_of_a_deployment_has_its_one_pair(folder: Path) -> None:
    curve = Curve(folder)

    assert zmq.curve_public(curve.secret) == curve.public == curve.deployment
    assert curve.server_key("llm.0") == curve.server_key("coordinator") == curve.public
    assert curve.user_of(as_bytes(curve.public)) == "deployment"


def test_a_client_knows_the_deployment_and_is_known_to_it(folder: Path) -> None:
    own = make_client_keys(folder, "laptop", may_replace=False)

    deployment, client = Curve(folder), Curve(own)

    assert client.public != deployment.public
    assert client.server_key("llm.0") == deployment.public
    assert client.user_of(as_bytes(deployment.public)) == "deployment"
    assert deployment.server_key("client.laptop") == deployment.server_key("client.laptop.call-1") == client.public
    assert deployment.user_of(as_bytes(client.public)) == "client.laptop"


def test_a_client_believes_no_other_client(folder: Path) -> None:
    laptop = Curve(make_client_keys(folder, "laptop", may_replace=False))
    phone = Curve(make_client_keys(folder, "phone", may_replace=False))

    assert laptop.user_of(as_bytes(phone.public)) is None
    assert laptop.server_key("client.phone") is None


def test_a_key_that_nobody_allowed_is_nobodys(folder: Path) -> None:
    public, _ = zmq.curve_keypair()

    assert Curve(folder).user_of(as_bytes(public)) is None
    assert Curve(folder).server_key("client.laptop") is None


def test_the_list_is_read_again_when_a_key_comes_changes_or_goes(folder: Path) -> None:
    curve = Curve(folder)
    first = Curve(make_client_keys(folder, "laptop", may_replace=False))
    assert curve.user_of(as_bytes(first.public)) == "client.laptop"

    second = Curve(make_client_keys(folder, "laptop", may_replace=True))
    assert curve.user_of(as_bytes(first.public)) is None
    assert curve.user_of(as_bytes(second.public)) == "client.laptop"

    (folder / "allowed" / "laptop.key").unlink()
    assert curve.user_of(as_bytes(second.public)) is None


def test_a_key_that_is_written_over_in_place_counts(folder: Path) -> None:
    curve = Curve(folder)
    first = Curve(make_client_keys(folder, "laptop", may_replace=False))
    assert curve.user_of(as_bytes(first.public)) == "client.laptop"
    public, _ = zmq.curve_keypair()

    (folder / "allowed" / "laptop.key").write_text(f'curve\n    public-key = "{public.decode()}"\n\n')

    assert curve.user_of(as_bytes(first.public)) is None
    assert curve.user_of(as_bytes(public)) == "client.laptop"


def test_a_list_that_is_gone_allows_no_client(folder: Path) -> None:
    curve = Curve(folder)
    client = Curve(make_client_keys(folder, "laptop", may_replace=False))
    assert curve.user_of(as_bytes(client.public)) == "client.laptop"

    (folder / "allowed" / "laptop.key").unlink()
    (folder / "allowed").rmdir()

    assert curve.user_of(as_bytes(client.public)) is None
    assert curve.user_of(as_bytes(curve.public)) == "deployment"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken.key", "no key at all"),
        ("short.key", 'curve\n    public-key = "abc"\n'),
        ("odd.key", f'curve\n    public-key = "{"~" * 40}"\n'),
        ("high.key", f'curve\n    public-key = "{"#" * 40}"\n'),
        ("a.b.key", ""),
        ("deployment.key", ""),
    ],
)
def test_a_file_that_is_no_clients_key_is_left_out_and_named(
    folder: Path, name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    curve = Curve(folder)
    good = Curve(make_client_keys(folder, "laptop", may_replace=False))
    (folder / "allowed" / name).write_text(text or (folder / "allowed" / "laptop.key").read_text())

    assert curve.user_of(as_bytes(good.public)) == "client.laptop"

    assert curve.user_of(as_bytes(good.public)) == "client.laptop"
    assert [record.getMessage().count(name) for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("user", "actor", "may"),
    [
        ("deployment", "llm.0", True),
        ("deployment", "coordinator", True),
        ("deployment", "client.laptop", False),
        ("client.laptop", "client.laptop", True),
        ("client.laptop", "client.laptop.call-7", True),
        ("client.laptop", "client.laptop2", False),
        ("client.laptop", "client.phone", False),
        ("client.laptop", "coordinator", False),
        ("client.laptop", "llm.0", False),
        ("client.laptop", "client.", False),
    ],
)
def test_who_may_speak_as_whom(user: str, actor: str, may: Any) -> None:
    assert may_speak_as(user, actor) is may


def test_secret_keys_are_for_their_owner_only(folder: Path) -> None:
    own = make_client_keys(folder, "laptop", may_replace=False)

    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.key*")} == {
        "deployment.key": 0o644,
        "deployment.key_secret": 0o600,
        "laptop.key": 0o644,
        "laptop.key_secret": 0o600,
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "allowed", own)} == {0o700}


def test_nothing_but_keys_is_left_in_the_folder(folder: Path) -> None:
    make_client_keys(folder, "laptop", may_replace=False)
    make_client_keys(folder, "laptop", may_replace=True)

    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "allowed",
        "allowed/laptop.key",
        "clients",
        "clients/laptop",
        "clients/laptop/deployment.key",
        "clients/laptop/laptop.key",
        "clients/laptop/laptop.key_secret",
        "deployment.key",
        "deployment.key_secret",
    ]


def test_keys_that_are_there_are_kept_unless_told_otherwise(folder: Path) -> None:
    before = Curve(folder)

    with pytest.raises(BadInput, match=r"deployment\.key_secret exists; --force replaces it"):
        make_deployment_keys(folder, may_replace=False)

    assert Curve(folder).public == before.public
    make_deployment_keys(folder, may_replace=True)
    assert Curve(folder).public != before.public


def test_a_client_needs_a_deployment_and_a_name(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadInput, match=r"deployment\.key can't be read: no such file"):
        make_client_keys(tmp_path / "elsewhere", "laptop", may_replace=False)
    for name in ("", "a.b", "../x", "deployment", "é", "x" * 65):
        with pytest.raises(BadInput, match="is no name of a client"):
            make_client_keys(folder, name, may_replace=False)
    assert not (folder / "clients").exists()


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(BadInput, match=r"can't write keys to .*/file/keys: Not a directory"):
        make_deployment_keys(tmp_path / "file" / "keys", may_replace=False)


def test_a_secret_key_that_others_may_read_is_refused(folder: Path) -> None:
    (folder / "deployment.key_secret").chmod(0o640)

    with pytest.raises(BadInput, match=r"deployment\.key_secret has mode 0640, .* \(allowed: 0600\)"):
        Curve(folder)


def test_incomplete_folders_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere: no such folder \(`omni-bus keys .*nowhere` makes it\)"):
        Curve(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"one file \*\.key_secret is needed \(there: none\)"):
        Curve(tmp_path / "empty")
    own = make_client_keys(folder, "laptop", may_replace=False)
    (own / "deployment.key").unlink()
    with pytest.raises(BadInput, match=r"deployment\.key can't be read"):
        Curve(own)


@pytest.mark.parametrize("text", ["", 'public-key = "x"', 'curve\n    public-key = "{public}"\n'])
def test_a_secret_file_without_a_pair_is_refused(folder: Path, text: str) -> None:
    public, secret = zmq.curve_keypair()
    path = folder / "deployment.key_secret"
    path.write_text(text.format(public=public.decode()))

    with pytest.raises(BadInput, match=r"deployment\.key_secret holds no (CURVE key|pair of keys)"):
        Curve(folder)

    path.write_text(f'public-key = "{zmq.curve_keypair()[0].decode()}"\nsecret-key = "{secret.decode()}"\n')
    with pytest.raises(BadInput, match="holds no pair of keys"):
        Curve(folder)
