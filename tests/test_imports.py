"""What importing costs, seen in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pkgutil import walk_packages

import pytest

PACKAGES = ("omni_bus", "actors", "adapters", "gateways")
ENGINES = ("accelerate", "diffusers", "gguf", "hibari", "ray", "torch", "transformers", "vllm", "xllamacpp")

IMPORT_AND_REPORT = """
import importlib, json, sys
watched, modules = json.loads(sys.argv[1])
found = {}
for module in modules:
    importlib.import_module(module)
    new = [name for name in watched if name in sys.modules and not any(name in names for names in found.values())]
    if new:
        found[module] = new
print(json.dumps(found))
"""


def modules_of(*packages: str) -> list[str]:
    found = list(packages)
    for package in packages:
        found += [module.name for module in walk_packages(import_module(package).__path__, f"{package}.")]
    return [name for name in found if not name.endswith("__main__")]


def imported_by(modules: list[str], watched: tuple[str, ...]) -> dict[str, list[str]]:
    """Import `modules` in order in a fresh interpreter, warnings as errors; return who brought which of `watched`."""
    command = [sys.executable, "-W", "error", "-c", IMPORT_AND_REPORT, json.dumps([watched, modules])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_module_imports_an_engine() -> None:
    modules = modules_of(*PACKAGES)

    assert len(modules) > len(PACKAGES)
    assert imported_by(modules, ENGINES) == {}


def test_watching_sees_what_is_imported() -> None:
    assert imported_by(["json", "sqlite3.dbapi2", "decimal"], ("sqlite3", "decimal")) == {
        "sqlite3.dbapi2": ["sqlite3"],
        "decimal": ["decimal"],
    }


@pytest.mark.parametrize("package", ["gateways", "omni_bus.core", "omni_bus.wire"])
def test_passing_frames_on_needs_no_numpy(package: str) -> None:
    """Coordinator and gateway start in well under a second and stay small."""
    assert imported_by(modules_of(package), ("numpy", "ml_dtypes", "scipy", "av")) == {}


def test_coordinator_needs_no_numpy() -> None:
    coordinators = [name for name in modules_of("actors") if name == "actors.coordinator"]

    assert imported_by(["actors", *coordinators], ("numpy", "ml_dtypes", "scipy", "av")) == {}
