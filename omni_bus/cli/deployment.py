"""The deployment that a command line names: shared by the sub-commands that take ``--config`` and ``-o``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import omni_bus
from adapters import ADAPTERS
from gateways import GATEWAYS
from omni_bus.cli.model import ModelDeployment, deploy
from omni_bus.config.layer import DEFAULT, Origin, Problem, show_path
from omni_bus.config.ledger import Ledger, account
from omni_bus.config.load import Loaded, load
from omni_bus.config.validate import show_problem
from omni_bus.engine import Engine
from omni_bus.errors import ConfigError
from omni_bus.registry import ADAPTER_GROUP, GATEWAY_GROUP, load_class
from omni_bus.runtime.exposure import exposures, security_problems
from omni_bus.runtime.memory import capacities

SHIPPED_CONFIGS = Path(omni_bus.__file__).parent.parent / "configs"
"""Beside the code, in a checkout and in an installed copy."""

DEFAULT_CONFIG = "voice_chat"
"""The deployment for those who name none."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``MODEL``, ``--pipeline``, ``--config`` and ``-o``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a model's folder, or its name on the hub, in the place of --config: served by the pipeline that fits it",
    )
    parser.add_argument("--pipeline", metavar="NAME", help="the pipeline that serves MODEL, whatever its files say")
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
    deployed = named_model(args)
    file = config_file(args.config or DEFAULT_CONFIG) if deployed is None else rule_file(deployed)
    try:
        loaded = load(
            file,
            args.overrides,
            environ=os.environ,
            platform=detect_platform(),
            adapter_class=adapter_class,
            gateway_class=gateway_class,
            of_model=None if deployed is None else deployed.layer,
            why=() if deployed is None else deployed.explain(),
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


def named_model(args: argparse.Namespace) -> ModelDeployment | None:
    """Return how the model of the command line is deployed; None if it names none.

    Raises:
        ConfigError: it names one that can't be, or a file as well.
    """
    if args.model is None:
        if args.pipeline is not None:
            raise ConfigError([f"--pipeline {args.pipeline}: it came without a model (allowed: with MODEL)"])
        return None
    if args.config is not None:
        raise ConfigError([f"--config {args.config}: it came with the model {args.model} (allowed: one of them)"])
    return deploy(args.model, args.pipeline)


def memory_ledger(loaded: Loaded) -> Ledger:
    """Return what the stages take of this machine's memory.

    Raises:
        ConfigError: more than there is.
    """
    ledger = account(loaded.config.stages, loaded.adapters, capacities(detect_platform()))
    if ledger.problems:
        raise ConfigError(show_problem(problem, _origin(loaded, problem)) for problem in ledger.problems)
    return ledger


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


def rule_file(deployed: ModelDeployment) -> str:
    """Return the deployment file of a model's rule: the shipped one of that name, wherever this runs, else the path."""
    name = deployed.resolution.chosen.rule.config
    shipped = shipped_configs().get(name)
    return name if shipped is None else os.path.relpath(shipped)


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
