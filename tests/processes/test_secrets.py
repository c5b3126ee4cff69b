"""A planted API key is looked for in everything that a deployment, its commands and its answers say."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_bus.runtime import rundir

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.processes

PLANTED = "planted-hush"
TOML = f"""
[stages.llm]
adapter = "synthetic-text"
tokens = 2
[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
api_keys = ["{PLANTED}-1", "{PLANTED}-2"]
[callers.gold]
keys = ["{PLANTED}-6"]
"""
CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


def exchange(url: str, key: str, data: bytes | None = None) -> tuple[int, str]:
    """Send a request; return the status, and all of the answer."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as response:
            return response.status, f"{response.headers}{response.read().decode()}"
    except urllib.error.HTTPError as error:
        return error.code, f"{error.headers}{error.read().decode()}"


def test_keys_of_a_running_deployment_show_nowhere(up, omni_bus, environ: dict[str, str], tmp_path: Path) -> None:
    environ["OB_TEST_KEYS"] = f"{PLANTED}-3"
    (tmp_path / "keys.txt").write_text(f"{PLANTED}-4\n")
    sources = f'api_key_env = "OB_TEST_KEYS"\napi_key_file = "{tmp_path}/keys.txt"\n'
    deployment = up(
        TOML.replace("[callers", f"{sources}[callers"),
        "--log-level",
        "DEBUG",
        "-o",
        f'gateways.openai.api_keys=["{PLANTED}-5"]',
    )
    url = deployment.wait_for("ready")["gateways"]["openai"]

    said: list[str] = []
    for key, path, data, status in [
        (f"{PLANTED}-3", "/v1/chat/completions", CHAT, 200),
        (f"{PLANTED}-4", "/v1/chat/completions", b"{", 400),
        (f"{PLANTED}-5", "/v1/models", None, 200),
        (f"{PLANTED}-6", "/v1/models", None, 200),
        (f"{PLANTED}-wrong", "/v1/chat/completions", CHAT, 401),
        (f"{PLANTED}-5", "/health", None, 200),
        (f"{PLANTED}-5", "/nowhere", None, 404),
    ]:
        came, answer = exchange(f"{url}{path}", key, data)
        assert came == status, path
        said.append(answer)
    commands = [("status",), ("status", "--json"), ("call", "hi")]
    said += [done.stdout + done.stderr for done in (omni_bus(*command) for command in commands)]
    modes = dict(private_files(rundir.root(environ) / "demo"))

    assert deployment.stop() == 0
    said += [deployment.errors, json.dumps(deployment.events)]
    assert [text for text in said if PLANTED in text] == []
    assert modes["deployment.json"] == 0o600
    assert {mode for name, mode in modes.items() if not name.endswith(".sock")} == {0o600}


def private_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Return what lies in a run directory, and who may use it; nobody else may even enter it."""
    for parent in (folder, folder.parent):
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    for path in folder.iterdir():
        yield path.name, stat.S_IMODE(path.stat().st_mode)


SHOWN = [
    ("check",),
    ("check", "--json"),
    ("check", "--explain", "gateways.openai"),
    ("check", "--explain", "gateways.openai.api_keys"),
    ("check", "--explain", "callers"),
    ("check", "--json", "--explain", "gateways.openai.api_keys"),
]
REFUSED = [
    ("check", "-o", f'gateways.openai.api_keys="{PLANTED}"'),
    ("check", "-o", f"gateways.openai.api_keys=[{{ a = '{PLANTED}' }}]"),
    ("check", "-o", f"gateways.openai.api_keys={{ a = '{PLANTED}' }}"),
    ("check", "-o", f"gateways.openai.api_keys {PLANTED}"),
    ("check", "-o", f"gateways.openai.api_keys.x={PLANTED}"),
    ("check", "-o", f"gateways.openai.api_keys:{PLANTED}"),
    ("check", "-o", f"gateways.openai.api_key={PLANTED}"),
    ("check", "-o", f"stages.llm.api_key={PLANTED}"),
    ("check", "-o", f"callers.gold.keys={PLANTED}"),
    ("check", "-o", f"callers.gold.key={PLANTED}"),
    ("check", "-o", f"base.api_key={PLANTED}"),
    ("check", "--json", "-o", f"gateways.opensi.api_keys={PLANTED}"),
    ("up", "-o", f"gateways.openai.api_keys={PLANTED}"),
]
BROKEN = [
    f'api_keys = ["{PLANTED}", "{PLANTED}\n',
    f'api_keys = [\n  "{PLANTED}",\n  "{PLANTED}\n]',
    f'api_keys = ["{PLANTED}" "{PLANTED}"]',
    f"api_keys = {PLANTED}",
    f'api_keys "{PLANTED}"',
    f'api_keys = ["{PLANTED}"]\napi_keys = ["{PLANTED}"]',
    f'[callers.gold]\nkeys = ["{PLANTED}',
]


@pytest.mark.parametrize("command", SHOWN)
def test_commands_that_show_a_configuration_hide_its_keys(omni_bus, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "d.toml").write_text(TOML)

    done = omni_bus(*command, "--config", str(tmp_path / "d.toml"))

    assert done.returncode == 0
    assert "***" in done.stdout
    assert PLANTED not in done.stdout + done.stderr


@pytest.mark.parametrize("command", REFUSED)
def test_commands_that_refuse_a_setting_hide_its_keys(omni_bus, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "d.toml").write_text(TOML)

    done = omni_bus(*command, "--config", str(tmp_path / "d.toml"))

    assert done.returncode == 1
    assert PLANTED not in done.stdout + done.stderr


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_can_not_be_read_is_quoted_without_its_keys(omni_bus, tmp_path: Path, text: str) -> None:
    (tmp_path / "d.toml").write_text(f"{TOML.partition('api_keys')[0]}{text}\n")

    done = omni_bus("check", "--config", str(tmp_path / "d.toml"))

    assert (done.returncode, "d.toml:" in done.stderr) == (1, True)
    assert PLANTED not in done.stdout + done.stderr
