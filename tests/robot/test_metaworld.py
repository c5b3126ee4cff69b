"""The policy that ships: what it answers and refuses, that it does its tasks, and how it is made."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train_robot_policy
from adapters.robot.metaworld import MetaworldOptions, MetaworldPolicy, shipped_folder
from adapters.robot.policy import Observation
from loads.metaworld_tasks import TASKS, make_environment, run_episode
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import make_context


def loaded(folder: str = "") -> MetaworldPolicy:
    policy = MetaworldPolicy(MetaworldOptions(model=folder), make_context())
    policy.load(lambda phase, fraction: None)
    return policy


@pytest.fixture(scope="module")
def policy() -> MetaworldPolicy:
    return loaded()


def seen(number: int, prompt: str | None = "open the drawer", *, given: Any = ...) -> Observation:
    state = np.random.default_rng(number).standard_normal(39) if given is ... else given
    return Observation(str(number), True, {"observation/state": state}, prompt)


def answer(policy: MetaworldPolicy, observation: Observation) -> Any:
    [found] = policy.infer([observation])
    if isinstance(found, Exception):
        raise found
    return found


def test_metadata_names_the_tasks_that_can_be_told(policy: MetaworldPolicy) -> None:
    assert policy.metadata["tasks"] == TASKS
    assert (policy.metadata["action_horizon"], policy.metadata["action_dim"]) == (8, 4)


def test_robots_of_a_batch_get_what_they_would_get_alone(policy: MetaworldPolicy) -> None:
    robots = [seen(i, prompt) for i, prompt in enumerate(TASKS.values())]
    together = policy.infer(robots)

    for robot, found in zip(robots, together, strict=True):
        assert found["actions"].shape == (8, 4)  # type: ignore[index]
        assert found["actions"].dtype == np.float32  # type: ignore[index]
        np.testing.assert_allclose(found["actions"], answer(policy, robot)["actions"], atol=1e-5)  # type: ignore[index]


def test_actions_are_in_range_wherever_the_robot_is(policy: MetaworldPolicy) -> None:
    for scale in (1, 100, 1e3 / 5):
        state = np.random.default_rng(0).uniform(-1, 1, 39) * scale
        actions = answer(policy, seen(0, given=state))["actions"]
        assert np.isfinite(actions).all()
        assert np.abs(actions).max() <= 1


def test_prompt_is_read_by_its_words(policy: MetaworldPolicy) -> None:
    said = ("open the drawer", "Open the DRAWER, please!", "open the door")
    one, polite, other = [answer(policy, seen(1, prompt))["actions"] for prompt in said]

    assert (one == polite).all()
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize(
    ("observation", "field", "came"),
    [
        (seen(1, None), "prompt", "none"),
        (seen(1, "juggle"), "prompt", "'juggle'"),
        (seen(1, given=None), "observation/state", "nothing"),
        (seen(1, given=np.zeros(38)), "observation/state", "(38,)"),
        (seen(1, given=np.zeros((1, 39))), "observation/state", "(1, 39)"),
        (seen(1, given=np.full(39, np.inf)), "observation/state[0]", "inf"),
        (seen(1, given=np.full(39, 1e300)), "observation/state[0]", "inf"),
        (seen(1, given=np.full(39, 2e3)), "observation/state[0]", "2000"),
        (seen(1, given=["a"] * 39), "observation/state", "a list of 39"),
    ],
)
def test_bad_observation_is_refused_alone(
    policy: MetaworldPolicy, observation: Observation, field: str, came: str
) -> None:
    before, refused, after = policy.infer([seen(2), observation, seen(3)])

    assert isinstance(refused, BadInput)
    assert refused.message.startswith(f"{field}: ")
    assert came in refused.message
    assert "allowed: " in refused.message
    for found, robot in ((before, seen(2)), (after, seen(3))):
        np.testing.assert_allclose(found["actions"], answer(policy, robot)["actions"], atol=1e-5)  # type: ignore[index]


@pytest.mark.parametrize("name", ["policy.safetensors", "config.json", "norm_stats.json"])
@pytest.mark.parametrize("damage", ["absent", "cut", "other"])
def test_damaged_folder_is_refused_at_the_start(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(shipped_folder(), folder)
    if damage == "absent":
        (folder / name).unlink()
        assert name in MetaworldPolicy.check(MetaworldOptions(model=str(folder)))[0]
    elif damage == "cut":
        (folder / name).write_bytes((folder / name).read_bytes()[:100])
    else:
        (folder / name).write_text(json.dumps({"norm_stats": {}}))

    with pytest.raises(StartFailed, match="is no policy"):
        loaded(str(folder))


# --- in the simulated world ---------------------------------------------------------------------------------


def drive(policy: MetaworldPolicy, task: str, prompt: str, num_episodes: int) -> int:
    """Return the number of successes."""
    pytest.importorskip("metaworld")

    def infer(observation: dict[str, Any]) -> Any:
        return answer(policy, Observation("robot", False, observation, observation.pop("prompt")))

    environment = make_environment(task, 1000)
    done = [run_episode(environment, infer, prompt)[0] for _ in range(num_episodes)]
    environment.close()
    return sum(done)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
@pytest.mark.parametrize(("task", "prompt"), TASKS.items())
def test_task_is_done_when_it_is_asked_for(policy: MetaworldPolicy, task: str, prompt: str) -> None:
    assert drive(policy, task, prompt, 2) == 2


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
def test_task_is_not_done_when_another_is_asked_for(policy: MetaworldPolicy) -> None:
    """These two look alike, so that only the prompt tells which one is meant."""
    assert drive(policy, "pick-place-v3", "reach the goal", 2) == 0


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
@pytest.mark.filterwarnings("ignore:Constant.s. may be too high:UserWarning")
def test_same_training_gives_the_same_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("metaworld")
    monkeypatch.setattr(train_robot_policy, "TASKS", dict(list(TASKS.items())[:2]))
    made: list[dict[str, bytes]] = []
    for name in ("one", "other"):
        folder = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["train", str(folder), "--demonstrations", "1", "--steps", "20"])
        assert train_robot_policy.main() == 0
        made.append({file.name: file.read_bytes() for file in folder.iterdir()})

    assert made[0] == made[1]
    assert sorted(made[0]) == ["config.json", "norm_stats.json", "policy.safetensors"]
    assert answer(loaded(str(tmp_path / "one")), seen(1))["actions"].shape == (8, 4)
