"""The coordinator's process: its core on a socket.

Run by the supervisor as ``python -m actors.coordinator DEPLOYMENT_JSON``. SIGTERM drains: nothing is admitted any more,
running requests finish within the drain limit, then the process exits, 0 if none had to be cut and 3 otherwise. Asked
to retire it leaves at once: what runs goes on without it, and what waits is submitted again to its successor, which is
told with ``--awaits`` who served before, and with ``--awaits-client`` who may have had requests.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from typing import TYPE_CHECKING

from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.member import COORDINATOR
from omni_bus.runtime.deployment import Deployment
from omni_bus.runtime.driver import Driver
from omni_bus.runtime.process import EXIT_CUT, child_main, settle
from omni_bus.runtime.signals import Stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.core.effects import Common, TimerKey
    from omni_bus.ids import Peer, Sender
    from omni_bus.wire.frames import AnyFrame

logger = logging.getLogger(__name__)

CUT_S = 2.0
"""Gateways get so long to pass on that requests were cut, and to leave."""


class CoordinatorActor:
    """The coordinator on the running loop; listens from construction on."""

    def __init__(self, deployment: Deployment, awaited: Sequence[str] = (), clients: Sequence[str] = ()) -> None:
        self._idle = asyncio.Event()
        self._is_draining = False
        self._driver = Driver(
            COORDINATOR,
            deployment.coordinator_endpoint,
            on_frame=self._on_frame,
            on_timer=self._on_timer,
            on_broken=self._on_broken,
            curve=deployment.curve(),
        )
        config = deployment.config
        self._core = CoordinatorCore(
            self._driver.me,
            deployment.pipelines,
            config.heartbeat_s,
            {name: caller.quota for name, caller in config.callers.items()},
            deployment.arrangement,
            awaited,
            clients,
        )
        self._perform(self._core.start(self._driver.now))
        logger.info("listening", extra={"fields": self._driver.address})
        logger.info("phase", extra={"fields": {"phase": "ready", "fraction": 1.0}})

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return self._driver.me.endpoint

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing more and wait until requests have ended and gateways have left.

        Returns:
            True if no request had to be cut.
        """
        self._is_draining = True
        self._perform(self._core.drain(self._driver.now))
        if await self._is_idle_within(timeout_s):
            return True
        cut = self._core.cut(self._driver.now)
        self._perform(cut)
        await self._is_idle_within(CUT_S)
        return not cut

    async def close(self) -> None:
        """Close the sockets."""
        await self._driver.close()

    async def _is_idle_within(self, timeout_s: float) -> bool:
        if self._core.is_idle:
            return True
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _on_frame(self, sender: Sender, frame: AnyFrame, now: float) -> None:
        self._perform(self._core.on_frame(sender, frame, now))

    def _on_broken(self, peer: Peer) -> None:
        self._perform(self._core.on_link_broken(peer, self._driver.now))

    def _on_timer(self, key: TimerKey, now: float) -> None:
        self._perform(self._core.on_timer(key, now))

    def _perform(self, effects: Sequence[Common]) -> None:
        self._driver.perform(effects)
        if self._is_draining and self._core.is_idle:
            self._idle.set()


async def run(deployment: Deployment, arguments: Sequence[str]) -> int:
    """Serve until SIGTERM, then drain; a second one ends at once."""
    stop = Stop()
    parser = argparse.ArgumentParser(prog="actors.coordinator")
    parser.add_argument("--awaits", metavar="REPLICA", action="append", default=[])
    parser.add_argument("--awaits-client", metavar="ACTOR", action="append", default=[])
    given = parser.parse_args(arguments)
    actor = CoordinatorActor(deployment, given.awaits, given.awaits_client)
    settle()
    await stop.requested.wait()
    if stop.is_retiring:
        await actor.close()
        return 0
    is_clean = await stop.drained(actor.drain(deployment.config.drain_timeout_s))
    await actor.close()
    return 0 if is_clean else EXIT_CUT


if __name__ == "__main__":
    child_main(COORDINATOR, run)
