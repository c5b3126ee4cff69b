"""The deployment that a command line names: shared by the sub-commands that take ``--config`` and ``-o``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import omni_bus
from adapters import ADAPTERS
from gateways import GATEWAYS
from omni_bus.config.layer import DEFAULT, Origin, Problem, show_path
from omni_bus.config.load import Loaded, load
from omni_bus.config.validate import show_problem
from omni_bus.engine import Engine
from omni_bus.errors import ConfigError
from omni_bus.registry import ADAPTER_GROUP, GATEWAY_GROUP, load_class
from omni_bus.runtime.exposure import exposures, security_problems

SHIPPED_CONFIGS = Path(omni_bus.__file__).parent.parent / "configs"
"""Beside the code, in a checkout and in an installed copy."""

DEFAULT_CONFIG = "voice_chat"
"""The deployment for those who name none."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``-o``."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"the deployment's TOML file, or the name of a shipped one (default: {DEFAULT_CONFIG})",
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
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let actors without keys and gateways without API keys listen off the loopback",
    )


def add_name_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--name``, for commands that visit a running deployment."""
    parser.add_argument("--name", help="which running deployment (default: the only one)")


def load_deployment(args: argparse.Namespace) -> Loaded:
    """Load what the arguments of `add_config_arguments` name, for this machine and environment.

    Raises:
        ConfigError: with every problem.
    """
    file = config_file(args.config or DEFAULT_CONFIG)
    try:
        loaded = load(
            file,
            args.overrides,
            environ=os.environ,
            platform=detect_platform(),
            adapter_class=adapter_class,
            gateway_class=gateway_class,
        )
    except ConfigError as error:
        if os.path.exists(file):
            raise
        shipped = ", ".join(shipped_configs())
        raise ConfigError(f"{problem} (shipped ones, by name: {shipped})" for problem in error.problems) from None
    problems = security_problems(loaded.config)
    if not is_insecure(args, loaded):
        problems += [exposure.problem for exposure in exposures(loaded.config, loaded.protocols)]
    if problems:
        raise ConfigError(show_problem(problem, _origin(loaded, problem)) for problem in problems)
    return loaded


def is_insecure(args: argparse.Namespace, loaded: Loaded) -> bool:
    """Whether it was said aloud that the deployment may be used by whoever reaches it."""
    return args.insecure or loaded.config.security.insecure


def insecurities(loaded: Loaded) -> list[str]:
    """Return a line for each thing that whoever reaches this machine could use."""
    found = exposures(loaded.config, loaded.protocols)
    return [f"INSECURE: {show_path(exposure.path)}: {exposure.what}" for exposure in found]


def _origin(loaded: Loaded, problem: Problem) -> Origin | str:
    """Return where the key of a problem was written; the file for a default."""
    origin = loaded.origin(show_path(problem.path))
    return loaded.path if origin == DEFAULT else origin


def shipped_configs() -> dict[str, Path]:
    """Return the deployments that come with omni-bus, by name."""
    return {file.stem: file for file in sorted(SHIPPED_CONFIGS.glob("*.toml"))}


def config_file(text: str) -> str:
    """Return the file that a ``--config`` means: the file of that path, else the shipped one of that name."""
    shipped = shipped_configs().get(text)
    return text if shipped is None or os.path.isfile(text) else os.path.relpath(shipped)


def detect_platform() -> str:
    """Return the platform whose overrides apply: which driver's device file is there."""
    if os.path.exists("/dev/nvidia0"):
        return "cuda"
    return "rocm" if os.path.exists("/dev/kfd") else "cpu"


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
