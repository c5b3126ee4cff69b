"""The deployment that a command line names: shared by the sub-commands that take ``--config`` and ``-o``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import omni_bus
from adapters import ADAPTERS
from gateways import GATEWAYS
from omni_bus.config.load import Loaded, load
from omni_bus.engine import Engine
from omni_bus.registry import ADAPTER_GROUP, GATEWAY_GROUP, load_class

DEFAULT_CONFIG = Path(omni_bus.__file__).parent.parent / "configs" / "voice_chat.toml"
"""The deployment for those who name none."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``-o``."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the deployment's TOML file (default: the shipped configs/voice_chat.toml)",
    )
    parser.add_argument(
        "-o",
        "--override",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set one key, as in -o stages.llm.replicas=2; may be given several times",
    )


def add_name_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--name``, for commands that visit a running deployment."""
    parser.add_argument("--name", help="which running deployment (default: the only one)")


def load_deployment(args: argparse.Namespace) -> Loaded:
    """Load what the arguments of `add_config_arguments` name, for this machine and environment.

    Raises:
        ConfigError: with every problem.
    """
    return load(
        args.config or os.path.relpath(DEFAULT_CONFIG),
        args.overrides,
        environ=os.environ,
        platform=detect_platform(),
        adapter_class=adapter_class,
        gateway_class=gateway_class,
    )


def detect_platform() -> str:
    """Return the platform whose overrides apply: which driver's device file is there."""
    if os.path.exists("/dev/nvidia0"):
        return "cuda"
    return "rocm" if os.path.exists("/dev/kfd") else "cpu"


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def adapter_class(name: str) -> type[Engine]:
    """Return an adapter's class.

    Raises:
        BadInput: no such adapter, or it can't be imported.
    """
    return load_class("adapter", name, ADAPTERS, ADAPTER_GROUP)


def gateway_class(name: str) -> type[Any]:
    """Return a gateway's class.

    Raises:
        BadInput: no such protocol, or it can't be imported.
    """
    return load_class("gateway", name, GATEWAYS, GATEWAY_GROUP)
