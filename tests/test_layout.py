"""The tree and what pyproject.toml says of it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CODE = {"omni_bus", "actors", "adapters", "gateways"}
TOP_LEVEL = CODE | {
    "configs",
    "tests",
    "scripts",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
}

pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())


def project_files() -> list[Path]:
    """Return all files that are tracked or would be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listing.split("\0") if name and (ROOT / name).exists()]


def test_top_level_is_the_designs() -> None:
    assert {file.parts[0] for file in project_files() if not file.parts[0].startswith(".")} == TOP_LEVEL


def test_distribution_lists_every_package() -> None:
    packages = {".".join(file.parent.parts) for file in project_files() if file.name == "__init__.py"}

    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(packages | {"configs"})


def test_every_module_is_in_a_package() -> None:
    modules = [file for file in project_files() if file.suffix == ".py" and file.parts[0] in CODE]

    assert [file for file in modules if not (ROOT / file.parent / "__init__.py").exists()] == []


def test_configs_are_toml_only() -> None:
    """But for the weights of small models of our own, each in a folder that says how they were made."""
    files = [file for file in project_files() if file.parts[0] == "configs"]
    models = [file for file in files if file.parts[1] == "models"]

    assert {file.suffix for file in files if file not in models} == {".toml"}
    assert {file.suffix for file in models} <= {".jinja", ".json", ".md", ".safetensors"}
    assert {file.parts[:3] for file in models} == {file.parts[:3] for file in models if file.name == "README.md"}
    assert all((ROOT / file).stat().st_size < 12_000_000 for file in models)
    # Package data names each depth of folders.
    assert all(4 <= len(file.parts) <= 5 for file in models)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a text."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_documents_lead_somewhere() -> None:
    lost: list[str] = []
    for file in (file for file in project_files() if file.suffix == ".md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / file).read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (ROOT / file.parent / path).resolve() if path else ROOT / file
            if ":" in path:
                continue
            if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
                lost.append(f"{file}: {link}")

    assert lost == []


def pins() -> dict[str, str]:
    lines = (ROOT / "scripts" / "constraints-cpu.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("extra", ["", "dev", "llamacpp", "media", "openai", "robot", "transformers", "voice"])
def test_pins_satisfy_what_scripts_install(extra: str) -> None:
    project = pyproject["project"]
    requirements = [
        Requirement(text) for text in (project["optional-dependencies"][extra] if extra else project["dependencies"])
    ]
    pinned = pins()

    unmet = [
        str(needed) for needed in requirements if not needed.specifier.contains(pinned[canonicalize_name(needed.name)])
    ]

    assert unmet == []
