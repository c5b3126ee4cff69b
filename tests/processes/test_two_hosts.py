"""Two network namespaces as two hosts: a deployment on one, its clients on the other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
TEXT = """
bind = "tcp://10.77.0.1"
coordinator_port = 7550
[security]
key_folder = "{keys}"
[stages.llm]
adapter = "synthetic-text"
tokens = 4
[stages.voice]
adapter = "synthetic-speech"
[pipelines.voice]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
host = "10.77.0.1"
port = 8000
api_keys = ["open-sesame"]
"""
CURL = """
import sys, urllib.request
request = urllib.request.Request("http://10.77.0.1:8000/v1/chat/completions", sys.stdin.buffer.read(),
    {"Authorization": f"Bearer {sys.argv[1]}", "Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=30).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, ...]]]:
    """Commands that run others on the server's host and on the client's."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command 'ip' (iproute2)")
    names = [f"ob{os.getpid()}{end}" for end in "sc"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, (SERVER, CLIENT), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [("ip", "netns", "exec", name) for name in names]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def test_clients_on_another_host_come_with_keys(up, omni_bus, hosts, tmp_path: Path) -> None:
    server, client = hosts
    keys = tmp_path / "keys"
    assert omni_bus("keys", str(keys)).returncode == 0
    assert omni_bus("keys", str(keys), "--client", "laptop").returncode == 0
    (keys / "clients" / "laptop").rename(tmp_path / "laptop")
    deployment = up(TEXT.format(keys=keys), within=server)
    deployment.wait_for("ready")
    connect = ("--connect", f"tcp://{SERVER}:7550")

    wav = tmp_path / "answer.wav"
    laptop = (*connect, "--keys", str(tmp_path / "laptop"))
    said = omni_bus("call", "hello", *laptop, "--audio-out", str(wav), within=client)
    assert (said.returncode, said.stdout) == (0, "hello:0 hello:1 hello:2 hello:3\n")
    assert wav.stat().st_size > 44

    bare = omni_bus("call", "hello", *connect, within=client)
    assert "not the loopback (allowed: with --keys, or --insecure)" in bare.stderr
    refused = omni_bus("call", "hello", *connect, "--insecure", within=client)
    assert (refused.returncode, "it wants keys" in refused.stderr) == (1, True)

    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "modalities": ["text"]})
    answers = [
        subprocess.run(
            [*client, sys.executable, "-c", CURL, key],
            input=body,
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        ).stdout
        for key in ("open-sesame", "guess")
    ]
    assert json.loads(answers[0])["choices"][0]["message"]["content"].startswith("hi:0")
    assert answers[1] == "401\n"

    assert deployment.stop() == 0
    lines = [event["event"] for event in deployment.events if "refused a connection" in event["event"]]
    assert [line for line in lines if CLIENT in line or "an address that was gone" in line] == lines != []
