"""What stages take of the memory that there is, and what would fit."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest

from omni_bus.config.ledger import HOST, Capacity, Ledger, account
from omni_bus.config.schema import StageConfig
from omni_bus.engine import Engine, Memory

GB = 10**9


class Options(msgspec.Struct, frozen=True):
    device: str = "auto"
    dtype: str = "float32"
    max_num_seqs: int = 2
    max_resident: int = 10
    context_length: int = 1000


class Text(Engine):
    """4 GB of weights in float32, a gigabyte for each request of 1000 tokens, a gigabyte for a step."""

    Options: ClassVar = Options

    @classmethod
    def check(cls, options: Options) -> list[str]:
        return ["max_resident: too few"] if options.max_resident < options.max_num_seqs else []

    @classmethod
    def memory(cls, options: Options, *, has_accelerator: bool) -> Memory | None:
        number = 4 if options.dtype == "float32" else 2
        cache = options.max_resident * options.context_length * 250_000 * number
        return Memory(options.device, number * GB, cache, GB)


class Unknown(Text):
    @classmethod
    def memory(cls, options: Any, *, has_accelerator: bool) -> None:
        return None


def ledger(host: Capacity, *gpus: Capacity, replicas: int = 1, adapter: type[Any] = Text, **options: Any) -> Ledger:
    stages = {"llm": StageConfig(adapter="text", replicas=replicas, options=options)}
    found = {HOST: host} | {f"cuda:{index}": gpu for index, gpu in enumerate(gpus)}
    return account(stages, {"llm": adapter}, found)


def room(total: float, free: float | None = None) -> Capacity:
    return Capacity(int(total * GB), int((total if free is None else free) * GB))


def test_all_replicas_count() -> None:
    found = ledger(room(100), replicas=3)

    assert (found.entries[0].certain, found.entries[0].total) == (3 * 14 * GB, 3 * 15 * GB)
    assert found.taken(HOST) == 45 * GB
    assert (found.problems, found.warnings) == ((), ())


@pytest.mark.parametrize(
    ("device", "place"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", HOST)]
)
def test_device_is_the_one_that_the_options_mean(device: str, place: str) -> None:
    assert ledger(room(100), room(80), room(80), device=device).entries[0].device == place


def test_without_a_gpu_auto_is_the_host() -> None:
    assert ledger(room(100)).entries[0].device == HOST


def test_more_than_there_is_is_a_problem_that_says_what_would_fit() -> None:
    [problem] = ledger(room(100), room(12)).problems

    assert problem.path == ("stages", "llm")
    assert problem.message == (
        "cuda:0 has 12.0 GB, its stages take 14.0 GB (llm 15.0 GB); would fit: "
        'stages.llm.dtype = "bfloat16", or stages.llm.max_resident = 7, or stages.llm.context_length = 700'
    )


def test_more_than_is_free_or_estimated_is_a_warning() -> None:
    for host in (room(100, 12), room(14.5)):
        found = ledger(host)
        assert found.problems == ()
        assert len(found.warnings) == 1
        assert "would fit: " in found.warnings[0]


def test_advice_fits_as_it_stands() -> None:
    advised: list[dict[str, Any]] = [{"max_resident": 7}, {"context_length": 700}, {"dtype": "bfloat16"}]
    for advice in advised:
        found = ledger(room(12), **advice)
        assert (found.problems, found.warnings) == ((), ())
    assert ledger(room(12), max_resident=8).warnings
    assert ledger(room(12), context_length=701).warnings


def test_advice_is_allowed_by_the_adapter() -> None:
    [problem] = ledger(room(12), max_num_seqs=8).problems

    assert "max_resident" not in problem.message


def test_fewer_replicas_are_advised() -> None:
    [problem] = ledger(room(31), replicas=3).problems

    assert "would fit: stages.llm.replicas = 2" in problem.message


def test_where_nothing_helps_it_says_so() -> None:
    [problem] = ledger(room(1)).problems

    assert problem.message.endswith("; no smaller option of one stage would fit")


def test_stages_on_one_device_are_added_up() -> None:
    stages = {name: StageConfig(adapter="text") for name in ("a", "b")}
    found = account(stages, {"a": Text, "b": Text}, {HOST: room(20)})

    assert found.problems[0].message.startswith("host has 20.0 GB, its stages take 28.0 GB (a 15.0 GB, b 15.0 GB)")


def test_adapter_that_does_not_know_takes_nothing() -> None:
    found = ledger(room(1), adapter=Unknown)

    assert (found.taken(HOST), found.problems, found.entries[0].device) == (0, (), "")
