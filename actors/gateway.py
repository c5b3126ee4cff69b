"""A gateway's process: one protocol on one listening socket.

Run by the supervisor as ``python -m actors.gateway DEPLOYMENT_JSON GATEWAY INDEX --fd FD``; FD is a socket that is
bound and listens already. It answers from the first moment on: health says what the stages are doing. SIGTERM drains:
nothing new is accepted, open responses finish within the drain limit, then the process exits, 0 if none had to be cut
and 3 otherwise; a second SIGTERM ends it at once. Asked to retire (`omni_bus.runtime.signals`), it leaves the socket to
others and serves what is open for as long as that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import msgspec

from gateways import GATEWAYS
from omni_bus.client import BusClient
from omni_bus.errors import ConfigError
from omni_bus.gateway import Gateway, GatewayServer
from omni_bus.registry import GATEWAY_GROUP, load_class
from omni_bus.runtime.control import control_path
from omni_bus.runtime.process import EXIT_CUT, child_main, settle
from omni_bus.runtime.signals import Stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.runtime.deployment import Deployment

logger = logging.getLogger(__name__)


class GatewayActor:
    """A gateway on the running loop: on the bus and behind its socket from `start` on."""

    def __init__(self, client: BusClient, gateway: Gateway) -> None:
        self.client = client
        self.gateway = gateway
        self.server = GatewayServer(gateway)

    @classmethod
    async def start(cls, deployment: Deployment, name: str, index: int, sock: socket.socket) -> GatewayActor:
        """Serve the gateway `name` on a listening socket.

        Raises:
            BadInput: the protocol can't be loaded, or its options can't work.
        """
        config = deployment.config.gateways[name]
        kind: type[Gateway] = load_class("gateway", config.protocol or name, GATEWAYS, GATEWAY_GROUP)
        options = msgspec.convert(config.options, kind.Options)
        if problems := kind.check(options):
            raise ConfigError([f"gateways.{name}.{problem}" for problem in problems])
        actor_name = f"gateway.{name}.{index}"
        client = await BusClient.connect(
            actor_name,
            deployment.listen(actor_name),
            deployment.coordinator_endpoint,
            role="gateway",
            arena=deployment.arena,
            curve=deployment.curve(),
        )
        logger.info("listening", extra={"fields": client.address})
        pipelines = {served: deployment.pipelines[served] for served in deployment.served[name]}
        state_dir = f"{deployment.state_dir or deployment.run_dir}/gateways/{name}"
        callers = deployment.config.callers
        try:
            gateway = kind(
                *(options, client, pipelines),
                name=name,
                callers=callers,
                state_dir=state_dir,
                control=control_path(deployment.run_dir),
                host=config.host,
            )
        except BaseException:
            await client.close()
            raise
        actor = cls(client, gateway)
        await actor.server.start(sock)
        client.ready()
        return actor

    async def retire(self) -> None:
        """Leave new connections to others and wait until the open ones have ended."""
        await self.server.retire()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for open responses; True if all of them finished by themselves."""
        return await self.server.drain(timeout_s)

    async def close(self) -> None:
        """Leave the bus and give everything back; after `drain`."""
        self.gateway.close()
        await self.client.close()


async def run(deployment: Deployment, arguments: Sequence[str]) -> int:
    """Serve until SIGTERM, or until the coordinator refuses this actor."""
    stop = Stop()
    parser = argparse.ArgumentParser(prog="actors.gateway")
    parser.add_argument("name")
    parser.add_argument("index", type=int)
    parser.add_argument("--fd", type=int, required=True)
    given = parser.parse_args(arguments)
    actor = await GatewayActor.start(deployment, given.name, given.index, socket.socket(fileno=given.fd))
    settle()
    logger.info("phase", extra={"fields": {"phase": "ready", "fraction": 1.0}})
    stopping = asyncio.create_task(stop.requested.wait())
    await asyncio.wait({stopping, actor.client.leaving}, return_when=asyncio.FIRST_COMPLETED)
    if actor.client.leaving.done():
        raise actor.client.leaving.result()
    if stop.is_retiring:
        await stop.unless_ordered(actor.retire())
    is_clean = await stop.drained(actor.drain(deployment.config.drain_timeout_s))
    await actor.close()
    return 0 if is_clean else EXIT_CUT


if __name__ == "__main__":
    child_main("gateway", run)
