"""A language-conditioned policy for seven Meta-World tasks, learnt from scripted demonstrations; runs on NumPy alone.

A multilayer perceptron with SiLU between its layers: (39 normalised state numbers, one per known word of the prompt)
-> a chunk of 8 actions of 4 numbers, in [-1, 1]. ``scripts/train_robot_policy`` makes its folder:

- ``policy.safetensors``: ``layers.{i}.weight`` (outputs, inputs) and ``layers.{i}.bias``, float32
- ``config.json``: words, tasks and the prompt of each, sizes
- ``norm_stats.json``: mean and standard deviation of the state, in OpenPI's form
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from adapters.packages import missing
from adapters.robot.policy import Policy
from adapters.robot.values import read_vector
from omni_bus.errors import BadInput, StartFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.robot.policy import Actions, Array, Observation, OnStep
    from omni_bus.engine import Report
    from omni_bus.errors import OmniBusError

INSTALL = "pip install 'safetensors>=0.4'"
FILES = ("policy.safetensors", "config.json", "norm_stats.json")
STATE_KEY = "observation/state"
MAX_STATE = 1e3
"""Nothing on the robot's table is a kilometre away: larger numbers are broken ones."""


class MetaworldConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``config.json`` of a policy's folder."""

    words: tuple[str, ...]
    """What the network knows of a prompt: one input for each."""
    tasks: dict[str, str]
    """Meta-World's name of each task that it was trained on, and the prompt of it."""
    state_dim: int
    action_dim: int
    action_horizon: int
    """Actions that one inference gives."""
    num_layers: int


class MetaworldOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy's keys of ``[stages.NAME.policy]``."""

    model: str = ""
    """A folder that ``scripts/train_robot_policy`` wrote; empty: the one that comes with omni-bus."""


class MetaworldPolicy(Policy):
    """Answers ``observation/state``, 39 numbers, and a prompt with `actions`, float32 (8, 4) in [-1, 1].

    A prompt without any word that the policy knows is refused; of another prompt the known words count.
    """

    Options: ClassVar[type[msgspec.Struct]] = MetaworldOptions

    @classmethod
    def check(cls, options: MetaworldOptions) -> list[str]:
        """Return what is missing."""
        folder = Path(options.model or shipped_folder())
        absent = [name for name in FILES if not (folder / name).is_file()]
        found = (
            [f"model: {folder} has no {', '.join(absent)} (scripts/train_robot_policy writes them)"] if absent else []
        )
        return found + missing("metaworld", {INSTALL: ("safetensors",)})

    def load(self, report: Report) -> None:
        """Read the folder.

        Raises:
            StartFailed: a file is missing or isn't what it should be.
        """
        report("weights", 0.0)
        folder = Path(self.options.model or shipped_folder())
        try:
            from safetensors import SafetensorError
            from safetensors.numpy import load_file
        except ImportError as error:
            raise StartFailed(f"the policy can't be loaded ({INSTALL}): {error}") from error
        try:
            self._config = msgspec.json.decode((folder / "config.json").read_bytes(), type=MetaworldConfig)
            stats: dict[str, Array] = {
                name: np.array(numbers, np.float32)
                for name, numbers in json.loads((folder / "norm_stats.json").read_bytes())["norm_stats"][
                    "state"
                ].items()
            }
            weights = load_file(str(folder / "policy.safetensors"))
            self._mean, self._std = stats["mean"], stats["std"]
            # As the product wants them: (inputs, outputs), contiguous.
            self._layers = [
                (np.ascontiguousarray(weights[f"layers.{i}.weight"].T), weights[f"layers.{i}.bias"])
                for i in range(self._config.num_layers)
            ]
        except (OSError, KeyError, ValueError, SafetensorError, msgspec.DecodeError) as error:
            raise StartFailed(f"model: {folder} is no policy of scripts/train_robot_policy: {error}") from error
        config = self._config
        self.metadata = {
            "policy": "metaworld",
            "action_horizon": config.action_horizon,
            "action_dim": config.action_dim,
            "state_dim": config.state_dim,
            "tasks": config.tasks,
        }
        report("weights", 1.0)

    def infer(
        self, observations: Sequence[Observation], *, deadline: float | None = None, on_step: OnStep | None = None
    ) -> Sequence[Actions | OmniBusError]:
        """Return a chunk for each observation, or why there is none."""
        config = self._config
        inputs = np.empty((len(observations), config.state_dim + len(config.words)), np.float32)
        refused: dict[int, BadInput] = {}
        for row, observation in enumerate(observations):
            try:
                inputs[row, : config.state_dim] = (self._state_of(observation) - self._mean) / self._std
                inputs[row, config.state_dim :] = self._prompt_of(observation)
            except BadInput as error:
                inputs[row] = 0
                refused[row] = error
        actions = self._run(inputs).reshape(len(observations), config.action_horizon, config.action_dim)
        np.clip(actions, -1, 1, out=actions)
        return [refused.get(row) or {"actions": chunk} for row, chunk in enumerate(actions)]

    def _run(self, hidden: Array) -> Array:
        for i, (weight, bias) in enumerate(self._layers):
            if i:
                with np.errstate(over="ignore"):  # far below zero, SiLU is 0: x / infinity
                    hidden = hidden / (1 + np.exp(-hidden))
            hidden = hidden @ weight + bias
        return hidden

    def _state_of(self, observation: Observation) -> Array:
        dim = self._config.state_dim
        state = read_vector(observation, STATE_KEY, dim, min_dim=dim)
        far = np.flatnonzero(np.abs(state) > MAX_STATE)
        if far.size:
            allowed = f"numbers in [-{MAX_STATE:g}, {MAX_STATE:g}]"
            raise BadInput(f"{STATE_KEY}[{far[0]}]: {state[far[0]]} came (allowed: {allowed})", field=STATE_KEY)
        return state

    def _prompt_of(self, observation: Observation) -> Array:
        prompt = observation.prompt
        encoded = encode_prompt(self._config.words, prompt or "")
        if not encoded.any():
            allowed = ", ".join(self._config.words)
            came = "none" if prompt is None else f"'{prompt[:80]}'"
            raise BadInput(f"prompt: {came} came (allowed: one with some of the words {allowed})", field="prompt")
        return encoded


def shipped_folder() -> str:
    """Return the folder of the policy that comes with omni-bus."""
    return str(Path(__file__).parents[2] / "configs" / "models" / "robot-metaworld")


def words_of(prompt: str) -> list[str]:
    """Return a prompt's words in lower case."""
    return re.findall(r"[a-z]+", prompt.lower())


def encode_prompt(words: Sequence[str], prompt: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return float32, (len(words),): 1 where a word is in the prompt. Other words of the prompt count for nothing."""
    said = set(words_of(prompt))
    return np.array([word in said for word in words], np.float32)
