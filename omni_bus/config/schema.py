"""Everything that a deployment file may say, as frozen Structs.

Field docstrings are what ``omni-bus check --explain`` prints. Adapters and gateways add their own keys to a stage's or
a gateway's table; those are validated by the adapter's or gateway's `Options`. What a default stands for (a pipeline's
name, a gateway's protocol) is filled in on loading.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from omni_bus.core.binding import Routing
from omni_bus.core.quota import Quota
from omni_bus.core.restart import MAX_DELAY_S

Count = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="1 to 64 letters, digits, '_' or '-'")]
ModelName = Annotated[str, msgspec.Meta(pattern=r"^\S{0,256}$", description="text without blanks")]
Key = Annotated[str, msgspec.Meta(pattern=r"^\S{1,1024}$", description="text without blanks")]
Bind = Annotated[str, msgspec.Meta(pattern=r"^(ipc|tcp://[^\s/]+)$", description='"ipc" or "tcp://ADDRESS"')]
CudaBytes = Annotated[
    int, msgspec.Meta(ge=0, le=1 << 40, multiple_of=4096, description="0 or a multiple of 4096 up to 1 TiB")
]


class StageConfig(msgspec.Struct, frozen=True):
    """One ``[stages.NAME]`` table without the adapter's own keys, which are in `options`."""

    adapter: str
    """A name from the adapter table, an entry point, or ``module:Class``."""
    replicas: Count = 1
    """Processes that serve this stage."""
    threads: Count | None = None
    """Threads of each replica; by default the cores are shared out evenly over all replicas of all stages."""
    max_input_bytes: Count = 256 * 1024 * 1024
    """Input that one request may hold in the stage before it is refused."""
    step_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 60.0
    """An engine that makes no progress for so long, in a step or with a request that has all it needs, is stuck: the
    replica is restarted. 0 lets it take for ever. Loading is not meant; that has `start_timeout_s`."""
    while_asleep: Literal["refuse", "queue"] = "refuse"
    """What becomes of requests while all replicas sleep: they are refused at once, or wait within the pipeline's limits
    and their own."""
    params: dict[str, Any] = {}
    """The adapter's parameters of each request that does not set them itself, such as ``{ temperature = 0.2 }``."""
    options: dict[str, Any] = {}


class PipelineConfig(msgspec.Struct, frozen=True):
    """One ``[pipelines.NAME]`` table."""

    edges: Annotated[tuple[str, ...], msgspec.Meta(description='a list of "source.port -> target.port"')]
    """``"source.port -> target.port"``; ``in`` and ``out`` are the client's side."""
    serve_as: ModelName = ""
    """The model name that clients use; by default the pipeline's own name."""
    aliases: tuple[ModelName, ...] = ()
    """Further model names for the same pipeline."""
    max_in_flight: Count = 64
    """Requests that run at once."""
    max_queued: NonNegative = 256
    """Requests that wait to run. One more is refused at once, or the newest of the caller that has most of them for its
    weight, if the newcomer's has fewer."""
    max_queued_bytes: NonNegative = 256 * 1024 * 1024
    """Input that gateways hold for requests that wait to run."""
    timeout_s: Seconds | None = None
    """Time limit of a request whose client gives none."""
    routing: Routing = "prefix"
    """Which replica of a stage a request gets: ``prefix`` the one with the fewest outstanding tokens, less those of a
    prompt that it has seen the beginning of; ``least_tokens`` without looking at prompts; ``round_robin``."""
    window_chunks: Count | None = None
    """Chunks that an edge's receiver grants ahead; by default 16 of text, which comes token by token, and 8 of
    everything else."""
    window_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 16 * 1024 * 1024
    """Bytes that an edge's receiver grants ahead."""


class GatewayConfig(msgspec.Struct, frozen=True):
    """One ``[gateways.NAME]`` table without the gateway's own keys, which are in `options`."""

    protocol: str = ""
    """A name from the gateway table or ``module:Class``; by default the table's own name."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port to listen on; 0 takes a free one and prints it."""
    processes: Count = 1
    """Gateway processes that share the port."""
    pipelines: tuple[str, ...] | None = None
    """Pipelines that this gateway serves; by default each one that it can."""
    options: dict[str, Any] = {}


class CallerConfig(msgspec.Struct, frozen=True):
    """One ``[callers.NAME]`` table: who has these API keys, and what they may use.

    Its limits count for each pipeline by itself. Callers without a table have weight 1 and only the pipelines' limits.
    """

    keys: tuple[Key, ...] = ()
    """The caller's API keys."""
    key_env: str = ""
    """Name of an environment variable with one more key, or several with commas between."""
    key_file: str = ""
    """File with more keys, one a line; gateways read it again when it changes."""
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    """Share of the pipeline, relative to other callers, while more requests wait than can run."""
    max_in_flight: Count | None = None
    """Requests that run at once; more wait."""
    max_queued: NonNegative | None = None
    """Requests that wait to run; one more is refused with 429."""
    requests_per_minute: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Rate of requests; faster ones are refused with 429."""
    burst: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    """Requests that `requests_per_minute` lets through at once; by default those of six seconds, at least one."""
    max_priority: int | None = None
    """Highest priority that the caller may ask for, 0 being everybody's; HTTP, like vLLM, writes 2 levels up as -2."""

    @property
    def quota(self) -> Quota:
        """The limits without the keys."""
        return Quota(
            self.weight,
            self.max_in_flight,
            self.max_queued,
            self.requests_per_minute,
            self.burst,
            self.max_priority,
        )


class SecurityConfig(msgspec.Struct, frozen=True):
    """The ``[security]`` table."""

    key_folder: str = ""
    """Folder with the deployment's keys, as ``omni-bus keys`` makes it; TCP between actors is encrypted with them."""
    insecure: bool = False
    """Lets actors without keys and gateways without API keys listen off the loopback, as ``--insecure`` does."""


class DeploymentConfig(msgspec.Struct, frozen=True):
    """The whole file, merged and validated."""

    name: Name
    """Name of the deployment on this host; by default the file's name without its ending."""
    stages: dict[str, StageConfig]
    pipelines: dict[str, PipelineConfig]
    gateways: dict[str, GatewayConfig] = {}
    callers: dict[str, CallerConfig] = {}
    bind: Bind = "ipc"
    """Where actors listen: ``ipc`` (one host) or ``tcp://ADDRESS``, which needs keys off the loopback."""
    coordinator_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 7550
    """Where the coordinator listens when `bind` is an address; unused with ``ipc``."""
    start_timeout_s: Seconds = 120.0
    """A start is given up after so long without progress."""
    drain_timeout_s: Seconds = 30.0
    """Running requests may take so long to finish after SIGTERM."""
    arena_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 36, description="0 or up to 64 GiB")] = 256 * 1024 * 1024
    """Shared memory that each actor may lend to others on its host at a time; 0 sends everything in messages."""
    arena_threshold_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 64 * 1024
    """Payloads from this length on go through shared memory to actors on the same host."""
    cuda_bytes: CudaBytes = 256 * 1024 * 1024
    """Memory that each actor may lend to others on its host at a time, on each GPU that it sends from; 0 sends through
    the host."""
    heartbeat_s: Seconds = 1.0
    """Actors report so often; one that misses five is lost."""
    max_restarts: NonNegative = 5
    """Restarts of one process within ten minutes before its stage is degraded."""
    max_restart_delay_s: Seconds = MAX_DELAY_S
    """The wait before a restart doubles with each death within ten minutes, from half a second up to this."""
    security: SecurityConfig = SecurityConfig()
