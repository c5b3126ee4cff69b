"""A command's short visit to a running deployment's bus."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omni_bus.client import BusClient
from omni_bus.runtime import rundir
from omni_bus.runtime.deployment import DEPLOYMENT_FILE, Deployment, read_deployment

if TYPE_CHECKING:
    import argparse

WELCOME_S = 3.0
"""A coordinator that is alive answers within milliseconds."""


async def visit(args: argparse.Namespace) -> tuple[Deployment, BusClient]:
    """Join the deployment that ``--name`` says.

    Raises:
        BadInput: it is not running, or several are.
        Unavailable: its coordinator does not answer.
    """
    path, _ = rundir.find(rundir.root(os.environ), args.name)
    deployment = read_deployment(path / DEPLOYMENT_FILE)
    name = f"{args.command}-{os.getpid()}"
    client = await BusClient.connect(
        name, deployment.listen(name), deployment.coordinator_endpoint, timeout_s=WELCOME_S
    )
    return deployment, client
