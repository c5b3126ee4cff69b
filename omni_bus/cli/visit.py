"""A command's short visit to a running deployment's bus."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from omni_bus.client import BusClient
from omni_bus.errors import Unavailable
from omni_bus.runtime import rundir
from omni_bus.runtime.deployment import DEPLOYMENT_FILE, Deployment, read_deployment

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Generator

WELCOME_S = 3.0
"""A coordinator that is alive answers within milliseconds."""


@contextlib.asynccontextmanager
async def visit(args: argparse.Namespace) -> AsyncGenerator[tuple[Deployment, BusClient]]:
    """Join the deployment that ``--name`` says; leave it at the end.

    Raises:
        BadInput: it is not running, or several are.
        Unavailable: its coordinator does not answer, or it ended in the meantime.
    """
    path, about = rundir.find(rundir.root(os.environ), args.name)
    deployment = read_deployment(path / DEPLOYMENT_FILE)
    name = f"{args.command}-{os.getpid()}"
    with _while_it_lives(about):
        client = await BusClient.connect(
            name,
            deployment.listen(name),
            deployment.coordinator_endpoint,
            timeout_s=WELCOME_S,
            curve=deployment.curve(),
        )
        async with client:
            yield deployment, client


@contextlib.contextmanager
def _while_it_lives(about: rundir.About) -> Generator[None]:
    """Cut short what is done inside when the supervisor ends: nobody is left then who could tell of an end.

    Raises:
        Unavailable: it ended.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        has_ended = True
        loop.remove_reader(supervisor)
        task.cancel()

    gone = f"the deployment '{about.name}' has ended"
    try:
        supervisor = os.pidfd_open(about.pid)
    except ProcessLookupError:
        raise Unavailable(gone) from None
    loop.add_reader(supervisor, end)
    try:
        yield
    except asyncio.CancelledError:
        if has_ended and task.uncancel() == 0:
            raise Unavailable(gone) from None
        raise
    finally:
        loop.remove_reader(supervisor)
        os.close(supervisor)
