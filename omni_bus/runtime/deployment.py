"""What the supervisor tells every process that it starts: the checked configuration, and where things are."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import msgspec

from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.cuda_ipc import CudaLimits
from omni_bus.bus.curve import Curve
from omni_bus.bus.sockets import MAX_IPC_PATH_BYTES
from omni_bus.config.schema import DeploymentConfig
from omni_bus.core.administration import Arrangement
from omni_bus.core.pipeline import Pipeline
from omni_bus.runtime.rundir import write_privately

SUPERVISOR = "supervisor"

DEPLOYMENT_FILE = "deployment.json"
"""In the run directory."""


class Deployment(msgspec.Struct, frozen=True):
    """Written as JSON to `run_dir`, again with each change of it; read by each process at its start."""

    config: DeploymentConfig
    pipelines: dict[str, Pipeline]
    run_dir: str
    """Private to the user (mode 0700): inboxes, this file, the supervisor's lock."""
    cache_dir: str
    """Kept between starts: converted weights."""
    threads: dict[str, int]
    """Threads of each replica, by stage."""
    served: dict[str, tuple[str, ...]]
    """The pipelines of each gateway."""
    coordinator_endpoint: str
    """Where the coordinator listens, in every incarnation."""
    drained: frozenset[str] = frozenset()
    """Replicas that get no new requests, by actor name."""
    returning: frozenset[str] = frozenset()
    """Replicas that are being restarted, or asleep with requests that wait for them."""
    asleep: dict[str, int] = {}
    """Replicas whose engines sleep, by actor name, and the level of each."""
    log_level: str = "INFO"
    state_dir: str = ""
    """Kept between starts, and can't be made again: uploaded files. By default they go with `run_dir`."""
    key_folder: str = ""
    """Of the keys for TCP, absolute; empty for a deployment without."""
    supervisor_pid: int = msgspec.field(default_factory=os.getpid)
    """Who made this; a process that finds itself without this parent has no deployment any more."""

    @property
    def path(self) -> Path:
        """The file that holds this."""
        return Path(self.run_dir) / DEPLOYMENT_FILE

    def write(self) -> None:
        """Write it where children find it; it may hold API keys, so nobody else may read it."""
        write_privately(self.path, msgspec.json.encode(self))

    @property
    def arrangement(self) -> Arrangement:
        """What the coordinator needs to know of the stages."""
        wanted = {stage: config.replicas for stage, config in self.config.stages.items()}
        return Arrangement(wanted, self.drained, self.returning, self.asleep)

    @property
    def arena(self) -> ArenaLimits:
        """What each actor may lend through shared memory."""
        return ArenaLimits(self.config.arena_bytes, self.config.arena_threshold_bytes)

    @property
    def cuda(self) -> CudaLimits:
        """What each actor may lend of its devices' memory."""
        return CudaLimits(self.config.cuda_bytes)

    def curve(self) -> Curve | None:
        """Read the keys for TCP, if the deployment has any.

        Raises:
            BadInput: the folder is incomplete, or others may read the secret key.
        """
        return Curve(self.key_folder) if self.key_folder else None

    def listen(self, actor: str, pid: int | None = None) -> str:
        """Return the address that an actor's inbox binds; its pid keeps successors from what was sent to the dead."""
        if self.config.bind == "ipc":
            return ipc_endpoint(self.run_dir, f"{actor}-{os.getpid() if pid is None else pid}")
        return f"{self.config.bind}:0"


def ipc_endpoint(directory: str, name: str) -> str:
    """Return the address of a socket file; a name that is too long for its directory is replaced by a hash of it."""
    path = f"{directory}/{name}.sock"
    if len(path.encode()) > MAX_IPC_PATH_BYTES:
        path = f"{directory}/{base64.b32encode(hashlib.sha256(name.encode()).digest())[:11].decode().lower()}"
    return f"ipc://{path}"


def read_deployment(path: str | Path) -> Deployment:
    """Read what the supervisor wrote."""
    return msgspec.json.decode(Path(path).read_bytes(), type=Deployment)
