"""Seven Meta-World tasks as a robot: episodes that any policy can drive, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

TASKS = {
    "reach-v3": "reach the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and place it at the goal",
    "drawer-open-v3": "open the drawer",
    "door-open-v3": "open the door",
    "window-open-v3": "open the window",
    "button-press-topdown-v3": "press the button",
}
"""Meta-World's names, and what the robot is told."""

MAX_STEPS = 200
CAMERA = {"camera_name": "corner4", "width": 320, "height": 240}

Infer: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]
"""An observation in, a map with `actions`, float32 (horizon, 4), out: `WebsocketClientPolicy.infer`, for example."""

OnFrame: TypeAlias = Callable[[np.ndarray[Any, Any]], None]
"""Takes a picture, uint8 (240, 320, 3)."""


def make_environment(task: str, seed: int, *, is_seen: bool = False) -> Any:
    """Return a task; rendering it (`is_seen`) needs MUJOCO_GL=egl or osmesa where there is no display."""
    import gymnasium
    import metaworld  # noqa: F401 (registers its environments)

    seen: dict[str, Any] = {"render_mode": "rgb_array", **CAMERA} if is_seen else {}
    return gymnasium.make(
        "Meta-World/MT1", env_name=task, seed=seed, max_episode_steps=MAX_STEPS, disable_env_checker=True, **seen
    )


def run_episode(
    environment: Any, infer: Infer, prompt: str, *, num_executed: int = 4, on_frame: OnFrame | None = None
) -> tuple[bool, int]:
    """Drive one episode from its reset to the first success, or to its end.

    Args:
        environment: of `make_environment`.
        infer: the policy.
        prompt: what the robot is told.
        num_executed: actions of each chunk that are executed before the next observation.
        on_frame: called with a picture of each step.

    Returns:
        Whether the task was done, and how often the policy was asked.
    """
    state, _ = environment.reset()
    num_calls = 0
    for _ in range(MAX_STEPS // num_executed):
        actions = infer({"observation/state": state.astype(np.float32), "prompt": prompt})["actions"]
        num_calls += 1
        for action in actions[:num_executed]:
            if on_frame is not None:
                on_frame(environment.render()[::-1, ::-1])  # this camera hangs upside down
            state, _, _, _, info = environment.step(np.clip(action, -1, 1))
            if info["success"] > 0:
                return True, num_calls
    return False, num_calls
