from __future__ import annotations

from omni_bus.config.schema import StageConfig
from omni_bus.runtime.cores import SPIN_COUNT, environment, share


def test_what_is_left_is_shared_evenly() -> None:
    stages = {
        "fixed": StageConfig(adapter="a", threads=3, replicas=2),
        "one": StageConfig(adapter="a"),
        "two": StageConfig(adapter="a", replicas=3),
    }

    assert share(stages, 16) == {"fixed": 3, "one": 2, "two": 2}


def test_everybody_has_at_least_one_thread() -> None:
    assert share({"a": StageConfig(adapter="a", replicas=8)}, 2) == {"a": 1}
    assert share({"a": StageConfig(adapter="a", threads=9), "b": StageConfig(adapter="a")}, 4) == {"a": 9, "b": 1}


def test_users_waiting_policy_stands_and_threads_do_not() -> None:
    found = environment({"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "64", "HOME": "/x"}, 3)

    assert (found["OMP_WAIT_POLICY"], found["OMP_NUM_THREADS"], found["HOME"]) == ("ACTIVE", "3", "/x")
    assert environment({}, 1)["OMP_WAIT_POLICY"] == "PASSIVE"


def test_threads_share_pools_of_memory_unless_the_user_says_how_many() -> None:
    assert environment({}, 1)["MALLOC_ARENA_MAX"] == "2"
    assert environment({"MALLOC_ARENA_MAX": "5"}, 2)["MALLOC_ARENA_MAX"] == "5"


def test_threads_that_work_together_spin_briefly() -> None:
    assert environment({}, 1)["GOMP_SPINCOUNT"] == "0"
    assert environment({}, 2)["GOMP_SPINCOUNT"] == SPIN_COUNT
    assert environment({"GOMP_SPINCOUNT": "7"}, 2)["GOMP_SPINCOUNT"] == "7"
