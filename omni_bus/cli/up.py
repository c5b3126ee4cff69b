"""``omni-bus up``: start a deployment, show how its start goes, stay with it, and stop it in order."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import uvloop

from actors.operations import Operations
from actors.supervisor import Supervisor
from omni_bus.cli.deployment import add_config_arguments, insecurities, load_deployment, memory_ledger
from omni_bus.cli.display import make_display
from omni_bus.config import schema
from omni_bus.config.graph import warnings
from omni_bus.core.member import COORDINATOR
from omni_bus.errors import BadInput, StartFailed
from omni_bus.observe.log import LEVELS
from omni_bus.runtime import rundir
from omni_bus.runtime.control import ControlServer, control_path
from omni_bus.runtime.cores import available_cores, share
from omni_bus.runtime.deployment import Deployment, ipc_endpoint
from omni_bus.runtime.exposure import numeric_bind
from omni_bus.runtime.ports import bind_port
from omni_bus.runtime.process import EXIT_CUT, EXIT_START_FAILED
from omni_bus.runtime.signals import Stop

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from omni_bus.cli.display import Display
    from omni_bus.config.load import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--name", help="the deployment's name on this host (default: the file's name)")
    parser.add_argument(
        "--log-format",
        choices=("auto", "plain", "json"),
        default="auto",
        help="auto: a live table on a terminal, else plain lines; json: one object a line on standard output",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="INFO", help="of every process (default: INFO)")


def run(args: argparse.Namespace) -> int:
    """Start, serve until SIGTERM or Ctrl-C, drain; 0 after a clean end."""
    loaded = load_deployment(args)
    ledger = memory_ledger(loaded)
    name = _name(args.name) if args.name is not None else loaded.config.name
    # Until the loop takes signals over: an early SIGTERM must leave by the same door as everything else.
    signal.signal(signal.SIGTERM, _leave)
    try:
        directory = rundir.RunDir(rundir.root(os.environ), name)
    except StartFailed as error:
        print(f"omni-bus up: {error.message}", file=sys.stderr)
        return EXIT_START_FAILED
    try:
        sockets = {key: bind_port(key, entry.host, entry.port) for key, entry in loaded.config.gateways.items()}
        deployment = _deployment(loaded, directory, args.log_level)
        return uvloop.run(_up(deployment, directory, sockets, args, loaded, ledger.warnings))
    except StartFailed as error:
        print(f"omni-bus up: {error.message}", file=sys.stderr)
        return EXIT_START_FAILED
    finally:
        directory.remove()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def _name(text: str) -> str:
    """Return a deployment's name; it becomes a directory's."""
    try:
        return msgspec.convert(text, schema.Name)
    except msgspec.ValidationError:
        raise BadInput(f"--name {text}: not 1 to 64 letters, digits, '_' or '-'", field="--name") from None


def _deployment(loaded: Loaded, directory: rundir.RunDir, log_level: str) -> Deployment:
    """Write down what every process needs to know."""
    threads = share(loaded.config.stages, available_cores())
    bind, key_folder = numeric_bind(loaded.config.bind), loaded.config.security.key_folder
    cache_dir = rundir.cache(os.environ)
    cache_dir.mkdir(parents=True, exist_ok=True)
    deployment = Deployment(
        config=msgspec.structs.replace(loaded.config, bind=bind),
        pipelines=loaded.pipelines,
        run_dir=str(directory.path),
        cache_dir=str(cache_dir),
        state_dir=str(rundir.state(os.environ, directory.path.name)),
        threads=threads,
        served=loaded.served,
        coordinator_endpoint=(
            ipc_endpoint(str(directory.path), COORDINATOR)
            if bind == "ipc"
            else f"{bind}:{loaded.config.coordinator_port}"
        ),
        log_level=log_level,
        key_folder=os.path.abspath(key_folder) if key_folder else "",
    )
    deployment.write()
    return deployment


async def _up(
    deployment: Deployment,
    directory: rundir.RunDir,
    sockets: dict[str, socket.socket],
    args: argparse.Namespace,
    loaded: Loaded,
    tight: Sequence[str],
) -> int:
    stop = Stop(with_interrupt=True)
    display = make_display(args.log_format, sys.stdout)
    logging.getLogger().addHandler(display.handler("supervisor"))
    logging.getLogger().setLevel(args.log_level)
    for line in loaded.why:
        logging.getLogger(__name__).info(line)
    for hint in (*warnings(deployment.config.stages, available_cores()), *tight):
        logging.getLogger(__name__).warning(hint)
    urls = {name: _url(listener) for name, listener in sockets.items()}
    directory.announce(
        rundir.About(
            name=directory.path.name,
            pid=os.getpid(),
            config=str(args.config or args.model or "the default configuration"),
            coordinator_endpoint=deployment.coordinator_endpoint,
            gateways=urls,
        )
    )
    supervisor = Supervisor(deployment, sockets, os.environ, on_line=display.line, on_change=display.changed)
    operations = Operations(supervisor)
    control = ControlServer(control_path(deployment.run_dir), operations.carry_out)
    await control.start()
    display.begin(supervisor.processes)
    began_at = time.monotonic()
    starting = asyncio.create_task(supervisor.start())
    asking = asyncio.create_task(stop.requested.wait())
    try:
        await asyncio.wait({starting, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():  # asked to stop while it starts: nothing runs yet that could be drained
            starting.cancel()
            await asyncio.wait({starting})
            return 0
        starting.result()
        display.ready(deployment, urls, time.monotonic() - began_at)
        for line in insecurities(loaded):  # the last that is said, so that it is seen
            logging.getLogger(__name__).warning(line)
        await asyncio.wait({asking, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            raise supervisor.failed.result()
        operations.close()
        return await _stop(supervisor, control, stop, display)
    finally:
        operations.close()
        await control.close()
        await supervisor.kill()  # nobody is left after a stop; after an error, everybody is
        display.end()


async def _stop(supervisor: Supervisor, control: ControlServer, stop: Stop, display: Display) -> int:
    """Drain; a second signal cuts it short."""
    display.stopping()
    await control.close()
    stopping = asyncio.create_task(supervisor.stop())
    forcing = asyncio.create_task(stop.forced.wait())
    await asyncio.wait({stopping, forcing}, return_when=asyncio.FIRST_COMPLETED)
    forcing.cancel()
    if not stopping.done():
        await supervisor.kill()
        stopping.cancel()
        return EXIT_CUT
    return 0 if stopping.result() else EXIT_CUT


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
