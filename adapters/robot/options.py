"""What a deployment file says of a policy's stage besides the policy itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Side = Annotated[int, Meta(ge=1, le=8192)]


class ImageKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One camera: a table ``[stages.NAME.images."observation/image"]`` by the client's key."""

    to: str = ""
    """The policy's key; the client's if empty."""
    size: tuple[Side, Side] | None = None
    """Height and width for the policy: resized with its proportions kept, the rest filled with black."""
    layout: Literal["hwc", "chw"] = "hwc"
    """What the policy wants; the client sends (height, width, 3)."""
    dtype: Literal["uint8", "float32"] = "uint8"
    """What the policy wants; float32 in [0, 1]. The client sends uint8, or floats in [0, 1]."""
    is_required: bool = True
    """Without it the observation is refused."""


class VectorKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One vector of numbers: a table ``[stages.NAME.states."observation/state"]`` by the client's key."""

    to: str = ""
    """The policy's key; the client's if empty."""
    dim: Count | None = None
    """Its length; any if not given."""
    pad_to: Count | None = None
    """Zeros are added up to this length, after it was normalised."""
    statistics: str = ""
    """Its name in the file `statistics`; not normalised if empty."""
    is_required: bool = True
    """Without it the observation is refused."""


class Ensembling(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="ensemble"
):
    """Each row of a chunk averaged with what earlier chunks said of its step (ACT)."""

    coefficient: Annotated[float, Meta(ge=-10, le=10)] = 0.01
    """Weights are exp(-coefficient * age rank), 0 the oldest."""


class RealTime(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method", tag="real-time"
):
    """Each chunk continues the last one, which the robot goes on with while it waits (real-time chunking, RTC)."""

    latency_budget_s: Seconds = 0.1
    """What an answer may take: so many rows of the last chunk are taken as executed when it arrives. It is raised to
    what answers do take."""


class RobotOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `RobotPolicy`."""

    policy: dict[str, Any]
    """``name``, a short name or ``module:Class``, and the policy's own options."""
    policy_server_config: dict[str, Any] = {}
    """What clients are told at first, besides what the policy says of itself; this wins."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Connections that are open at once."""
    max_batch_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Observations of one call to the policy."""
    max_batch_wait_s: Annotated[float, Meta(ge=0, le=10)] = 0.01
    """What an observation waits for others that are expected, at most; 0: it never waits while the policy is free."""
    deadline_s: Seconds | None = None
    """An observation that isn't answered so long after it reached the gateway gets an error; the policy takes fewer
    denoise steps where it can, to be in time. None: as long as it takes."""
    policy_timeout_s: Seconds = 30.0
    """A policy that takes so long over one call hangs: its robots are told, and no more is taken until it returns or,
    after the stage's `step_timeout_s`, the replica is restarted."""
    max_age_s: Seconds | None = None
    """Older observations are refused: by `timestamp_key`, and by what they waited here."""
    timestamp_key: str = ""
    """The observation's key with the moment of its making, in Unix seconds."""
    sequence_key: str = ""
    """The observation's key with its number: one that does not grow within a session is refused."""
    max_rate_hz: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    """Observations of one session a second; more are refused."""
    burst: Count = 2
    """Observations that may come at once all the same."""
    images: dict[str, ImageKey] = {}
    states: dict[str, VectorKey] = {}
    prompt_key: str = "prompt"
    """The observation's key with the instruction."""
    default_prompt: str | None = None
    """The instruction of observations without one."""
    is_prompt_required: bool = False
    statistics: str = ""
    """A JSON file with ``mean`` and ``std``, or ``q01`` and ``q99``, by names; openpi's ``norm_stats.json`` is one."""
    normalisation: Literal["mean_std", "quantiles"] = "mean_std"
    """Of states and of actions."""
    action_statistics: str = ""
    """The actions' name in the file `statistics`: the policy's are brought back to the robot's units by it."""
    action_dim: Count | None = None
    """Columns that the robot is sent; the policy may give more."""
    n_action_steps: Count | None = None
    """Rows that the robot is sent; the policy may give more."""
    action_low: tuple[float, ...] = ()
    """Least value of each dimension, or one for all: a chunk with less is not sent."""
    action_high: tuple[float, ...] = ()
    """Greatest value."""
    smoothing: Ensembling | RealTime | None = None
    control_hz: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    """Actions that a robot executes a second, for `smoothing`, where observations don't have a `step_key`."""
    step_key: str = ""
    """The observation's key with the actions that the robot has executed since its session began."""


class RobotParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a connection may set."""

    deadline_s: Seconds | None = None
    """As in the options; the nearer one holds."""


def faults_of(options: RobotOptions) -> list[str]:
    """Return what is wrong with the options, without loading anything."""
    faults: list[str] = []
    names = [key.statistics for key in options.states.values() if key.statistics]
    if (names or options.action_statistics) and not options.statistics:
        faults.append("statistics: none is named, though states or actions are to be normalised (allowed: a JSON file)")
    if options.smoothing is not None and options.control_hz is None and not options.step_key:
        faults.append("smoothing: it needs 'control_hz' or 'step_key', to know which step an observation is of")
    if options.max_age_s is None and options.timestamp_key:
        faults.append("timestamp_key: it needs 'max_age_s'")
    for low, high in zip(options.action_low, options.action_high, strict=False):
        if low > high:
            faults.append(f"action_low: {low:g} is above action_high's {high:g}")
    return faults
