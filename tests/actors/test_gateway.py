"""The gateway as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

from omni_bus.config.schema import CallerConfig, DeploymentConfig, GatewayConfig, PipelineConfig, StageConfig
from omni_bus.core.pipeline import Pipeline
from omni_bus.runtime.deployment import Deployment
from omni_bus.runtime.ports import bind_port
from omni_bus.wire.frames import RouteEdge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]


def deployment_in(run_dir: str, *, callers: dict[str, CallerConfig] | None = None, **options: Any) -> Deployment:
    edges = (
        RouteEdge("in", "messages", "llm", "prompt", "json", 8, 2**20),
        RouteEdge("llm", "text", "out", "text", "text", 8, 2**20),
    )
    config = DeploymentConfig(
        name="test",
        stages={"llm": StageConfig(adapter="synthetic-text")},
        pipelines={"chat": PipelineConfig(edges=("in.messages -> llm.prompt", "llm.text -> out.text"))},
        gateways={"front": GatewayConfig(protocol="openai", options=options)},
        callers=callers or {},
    )
    return Deployment(
        config=config,
        pipelines={"chat": Pipeline("chat", "chat", (), edges)},
        run_dir=run_dir,
        cache_dir=run_dir,
        threads={"llm": 1},
        served={"front": ("chat",)},
        supervisor_pid=os.getpid(),
        coordinator_endpoint=f"ipc://{run_dir}/coordinator.sock",
    )


@asynccontextmanager
async def gateway_process(deployment: Deployment) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start the process on a socket that listens already; yield it and its address."""
    deployment.write()
    with bind_port("front", "127.0.0.1", 0) as sock:
        fd = sock.fileno()
        arguments = ("-m", "actors.gateway", str(deployment.path), "front", "0", "--fd", str(fd))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=ROOT, pass_fds=(fd,), stderr=subprocess.PIPE
        )
        try:
            yield process, f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def status_and_maps(pid: int) -> tuple[str, str]:
    return Path(f"/proc/{pid}/status").read_text(), Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.processes
async def test_process_answers_before_any_other_actor_is_there(tmp_path: Path) -> None:
    """It is small, has loaded nothing heavy, says what is missing, and leaves when it is told to."""
    async with gateway_process(deployment_in(str(tmp_path))) as (process, url):
        async with aiohttp.ClientSession(url) as session:
            async with session.get("/v1/models") as response:
                assert [card["id"] for card in (await response.json())["data"]] == ["chat"]
            async with session.get("/health") as response:
                assert response.status == 503
                assert "coordinator does not answer" in (await response.json())["reason"]

        status, libraries = status_and_maps(process.pid)
        resident_kb = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        assert resident_kb < 100 * 1024
        assert not any(name in libraries for name in ("torch", "numpy", "/av/", "libav"))

        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
        events = [msgspec.json.decode(line) for line in errors.splitlines()]
        assert process.returncode == 0
        assert {event["actor"] for event in events} == {"gateway.front.0"}
        assert any({"phase": "ready", "fraction": 1.0}.items() <= event.items() for event in events)


@pytest.mark.processes
async def test_process_with_unusable_options_says_why_and_fails(tmp_path: Path) -> None:
    deployment = deployment_in(str(tmp_path), api_key_file=str(tmp_path / "none"))
    async with gateway_process(deployment) as (process, _):
        _, errors = await process.communicate()

    last = msgspec.json.decode(errors.splitlines()[-1])
    assert process.returncode == 2
    assert "gateways.front.api_key_file" in last["error"]
    assert "can't be read" in last["error"]


@pytest.mark.processes
async def test_process_with_unusable_keys_of_a_caller_says_why_and_fails(tmp_path: Path) -> None:
    deployment = deployment_in(str(tmp_path), callers={"gold": CallerConfig(key_file=str(tmp_path / "none"))})
    async with gateway_process(deployment) as (process, _):
        _, errors = await process.communicate()

    last = msgspec.json.decode(errors.splitlines()[-1])
    assert process.returncode == 2
    assert "callers.gold.key_file" in last["error"]
