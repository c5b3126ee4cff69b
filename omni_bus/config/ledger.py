"""The memory of a deployment before anything is loaded: what each stage takes, whether it fits, and what would.

Pure: what there is and what an engine will take is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from omni_bus.config.layer import Problem
from omni_bus.config.schema import StageConfig
from omni_bus.engine import Engine, Memory

HOST = "host"

_NARROWER = "bfloat16"
_SMALLER = ("max_resident", "max_num_seqs", "context_length")
"""Options that memory grows with, in the order in which smaller ones are looked for."""


class Capacity(msgspec.Struct, frozen=True):
    """Memory of a device, in bytes."""

    total: int
    free: int


class Entry(msgspec.Struct, frozen=True):
    """One stage's memory."""

    stage: str
    replicas: int
    device: str
    """`HOST` or ``cuda:N``; empty where the adapter doesn't know what it takes."""
    memory: Memory | None
    """Of each replica."""

    @property
    def certain(self) -> int:
        """Bytes of all replicas that follow from files and options."""
        return 0 if self.memory is None else self.replicas * (self.memory.weights + self.memory.cache)

    @property
    def total(self) -> int:
        """The same and what one step takes, which is an estimate."""
        return 0 if self.memory is None else self.certain + self.replicas * self.memory.activations


class Ledger(msgspec.Struct, frozen=True):
    """All stages' memory, and what that comes to."""

    entries: tuple[Entry, ...]
    capacities: Mapping[str, Capacity]
    """By device: `HOST`, ``cuda:N``."""
    problems: tuple[Problem, ...]
    """Devices that are too small whatever else they do."""
    warnings: tuple[str, ...]
    """Devices that are too full now, or by an estimate."""

    def taken(self, device: str) -> int:
        """Return the bytes of all stages on a device."""
        return sum(entry.total for entry in self.entries if entry.device == device)


def account(
    stages: Mapping[str, StageConfig], adapters: Mapping[str, type[Engine]], capacities: Mapping[str, Capacity]
) -> Ledger:
    """Add up what stages take.

    Args:
        stages: each stage's table, faultless.
        adapters: each stage's adapter class.
        capacities: what there is, by device.
    """
    entries = tuple(_entry(name, stage, adapters[name], stage.options, capacities) for name, stage in stages.items())
    problems: list[Problem] = []
    warnings: list[str] = []
    for device, capacity in capacities.items():
        here = [entry for entry in entries if entry.device == device]
        certain, total = sum(entry.certain for entry in here), sum(entry.total for entry in here)
        shares = ", ".join(f"{entry.stage} {show_bytes(entry.total)}" for entry in here)
        fitting = ""
        if total > capacity.free:
            found = [
                advice
                for entry in here
                for advice in _advice(
                    stages[entry.stage], entry, adapters[entry.stage], total - capacity.free, capacities
                )
            ]
            fitting = f"would fit: {', or '.join(found)}" if found else "no smaller option of one stage would fit"
        if certain > capacity.total:
            largest = max(here, key=lambda entry: entry.certain).stage
            what = f"{device} has {show_bytes(capacity.total)}, its stages take {show_bytes(certain)}"
            problems.append(Problem(("stages", largest), f"{what} ({shares}); {fitting}"))
        elif total > capacity.free:
            what = f"{device} has {show_bytes(capacity.free)} free, its stages take about {show_bytes(total)}"
            warnings.append(f"{what} ({shares}); {fitting}")
    return Ledger(entries, capacities, tuple(problems), tuple(warnings))


def show_bytes(number: int) -> str:
    """Write bytes as a person reads them."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1000:.1f} kB"


def _entry(
    name: str,
    stage: StageConfig,
    adapter: type[Engine],
    options: Mapping[str, Any],
    capacities: Mapping[str, Capacity],
) -> Entry:
    has_accelerator = any(device != HOST for device in capacities)
    memory = adapter.memory(msgspec.convert(options, adapter.Options), has_accelerator=has_accelerator)
    return Entry(name, stage.replicas, "" if memory is None else _device(memory.device, capacities), memory)


def _device(name: str, capacities: Mapping[str, Capacity]) -> str:
    first = next((device for device in capacities if device != HOST), HOST)
    return {"cpu": HOST, "auto": first, "cuda": "cuda:0"}.get(name, name)


def _advice(
    stage: StageConfig, entry: Entry, adapter: type[Engine], excess: int, capacities: Mapping[str, Capacity]
) -> Iterator[str]:
    """Yield what to set in one stage so that everything fits, the largest value of each option."""
    key = f"stages.{entry.stage}"
    options = stage.options

    def fits(changes: Mapping[str, Any]) -> bool:
        found = _entry(entry.stage, stage, adapter, {**options, **changes}, capacities)
        return found.memory is not None and entry.total - found.total >= excess

    def is_allowed(changes: Mapping[str, Any]) -> bool:
        return not adapter.check(msgspec.convert({**options, **changes}, adapter.Options))

    for replicas in range(stage.replicas - 1, 0, -1):
        if entry.total - entry.total // stage.replicas * replicas >= excess:
            yield f"{key}.replicas = {replicas}"
            break
    known = {field.encode_name: field.default for field in msgspec.structs.fields(adapter.Options)}
    if "dtype" in known and fits({"dtype": _NARROWER}):
        yield f'{key}.dtype = "{_NARROWER}"'
    for name in _SMALLER:
        best = _largest(name, options.get(name, known[name]), fits) if name in known else None
        if best is not None and is_allowed({name: best}):
            yield f"{key}.{name} = {best}"


def _largest(name: str, now: Any, fits: Callable[[Mapping[str, Any]], bool]) -> int | None:
    """Return the largest value below the present one that fits, None if none does; an unset one is 4096 at most."""
    low, high = 1 if name != "context_length" else 8, (now if isinstance(now, int) else 4096) - 1
    best = None
    while low <= high:
        middle = (low + high) // 2
        if fits({name: middle}):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best
