"""A whole deployment inside one event loop, for tests: real actors, sockets and engines, but no processes.

::

    async with running(TOML) as deployment:
        ... deployment.url, deployment.stages["llm.0"].stats ...
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from actors.coordinator import CoordinatorActor
from actors.gateway import GatewayActor
from actors.stage import StageActor
from adapters import ADAPTERS
from gateways import GATEWAYS
from omni_bus.bus.faulty import Faults, FaultyLink
from omni_bus.config.load import load
from omni_bus.registry import ADAPTER_GROUP, GATEWAY_GROUP, load_class
from omni_bus.runtime import driver
from omni_bus.runtime.deployment import Deployment
from omni_bus.runtime.ports import bind_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Running:
    """The parts of a deployment that runs in this loop."""

    def __init__(self, deployment: Deployment, coordinator: CoordinatorActor) -> None:
        self.deployment = deployment
        self.coordinator = coordinator
        self.stages: dict[str, StageActor] = {}
        """Replicas by actor name, ``llm.0``."""
        self.gateways: dict[str, GatewayActor] = {}
        """Gateways by their table's name."""
        self.ports: dict[str, int] = {}

    @property
    def gateway(self) -> GatewayActor:
        """The first gateway."""
        return next(iter(self.gateways.values()))

    @property
    def port(self) -> int:
        """Where the first gateway listens on 127.0.0.1."""
        return next(iter(self.ports.values()))

    async def until_ready(self) -> None:
        """Wait until the coordinator has heard that every replica is ready; ask it, round trip by round trip."""
        while self.gateways:
            rows = await self.gateway.client.admin("health")
            if sum(row["role"] == "stage" and row["is_ready"] for row in rows) == len(self.stages):
                return

    @property
    def url(self) -> str:
        """Address of the first gateway, without a path."""
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def running(toml: str, *, loads_stages: bool = True, faults: Faults | None = None) -> AsyncIterator[Running]:
    """Start a deployment in the running loop and stop it at the end.

    Args:
        toml: the deployment file's text; gateways get free ports.
        loads_stages: False leaves the stages as they are before their first engine is loaded.
        faults: what the links between the actors suffer.

    Raises:
        ConfigError: the text can't be served.
    """
    async with AsyncExitStack() as stack:
        if faults is not None:
            # For good: without faults that are installed when it is built, it is the link that it stands for.
            driver.Link = FaultyLink
            stack.enter_context(faults.installed())
        # Short, since a socket's path has at most 107 characters (unix(7)).
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="ob-"))
        path = Path(run_dir) / "deployment.toml"
        path.write_text(toml, encoding="utf-8")
        loaded = load(
            path,
            environ={},
            platform="cpu",
            adapter_class=lambda name: load_class("adapter", name, ADAPTERS, ADAPTER_GROUP),
            gateway_class=lambda name: load_class("gateway", name, GATEWAYS, GATEWAY_GROUP),
        )
        bind, key_folder = loaded.config.bind, loaded.config.security.key_folder
        deployment = Deployment(
            config=loaded.config,
            pipelines=loaded.pipelines,
            run_dir=run_dir,
            cache_dir=run_dir,
            state_dir=f"{run_dir}/state",
            threads=dict.fromkeys(loaded.config.stages, 1),
            served=loaded.served,
            supervisor_pid=os.getpid(),
            coordinator_endpoint=f"ipc://{run_dir}/coordinator.sock" if bind == "ipc" else f"{bind}:0",
            key_folder=key_folder,
        )
        coordinator = CoordinatorActor(deployment)
        stack.push_async_callback(coordinator.close)
        deployment = msgspec.structs.replace(deployment, coordinator_endpoint=coordinator.endpoint)
        found = Running(deployment, coordinator)
        for name, config in loaded.config.stages.items():
            for replica in range(config.replicas):
                stage = StageActor(deployment, name, replica)
                stack.push_async_callback(stage.close)
                found.stages[f"{name}.{replica}"] = stage
                if loads_stages:
                    await stage.load()
        for name, config in loaded.config.gateways.items():
            sock = bind_port(name, config.host, config.port)
            found.ports[name] = sock.getsockname()[1]
            gateway = await GatewayActor.start(deployment, name, 0, sock)
            stack.push_async_callback(gateway.close)
            stack.push_async_callback(gateway.drain, 0.0)
            found.gateways[name] = gateway
        if loads_stages:
            await found.until_ready()
        yield found
