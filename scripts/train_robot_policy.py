#!/usr/bin/env python3
"""Train the robot policy that omni-bus ships: behaviour cloning of Meta-World's scripted experts, on one CPU thread.

``scripts/train_robot_policy.py FOLDER [--seed N] [--demonstrations N] [--steps N]`` takes about two minutes and
writes ``policy.safetensors``, ``config.json`` and ``norm_stats.json`` (what is in them: `adapters.robot.metaworld`).
Nothing is downloaded and nothing rendered; needs ``pip install -e '.[robot,transformers]'``. On one machine the same
arguments give the same files, bit for bit.

An expert's own trajectories show only states that an expert comes to. So the demonstrator acts with noise, of another
strength in each episode, and each state that it comes to is labelled with what the expert would do there (noise
injection as in DART, https://arxiv.org/abs/1703.09327).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from adapters.robot.metaworld import encode_prompt, words_of
from loads.metaworld_tasks import MAX_STEPS, TASKS, make_environment

STATE_DIM = 39
ACTION_DIM = 4
HORIZON = 8
WIDTH = 384
NUM_LAYERS = 4
BATCH = 512
MAX_NOISE = 0.6
STEPS_AFTER_SUCCESS = 12
GRIPPER_NOISE = 0.1
"""The gripper's share of the noise: it lets go of things otherwise."""

Array = np.ndarray[Any, np.dtype[np.float32]]


def demonstrate(task: str, num: int, dice: np.random.Generator, seed: int) -> tuple[Array, Array]:
    """Return states, (steps, 39), and the next actions that the expert wants in each, (steps, horizon * 4)."""
    from metaworld.policies import ENV_POLICY_MAP

    environment = make_environment(task, seed)
    states: list[Any] = []
    chunks: list[Any] = []
    for _ in range(num):
        state, _ = environment.reset()
        expert = ENV_POLICY_MAP[task]()
        noise = dice.uniform(0, MAX_NOISE)
        wanted: list[Any] = []
        left = STEPS_AFTER_SUCCESS
        for _ in range(MAX_STEPS - 20):
            action = np.clip(expert.get_action(state), -1, 1)
            states.append(state)
            wanted.append(action)
            shaken = action + dice.normal(0, noise, ACTION_DIM) * np.array([1, 1, 1, GRIPPER_NOISE])
            state, _, _, _, info = environment.step(np.clip(shaken, -1, 1).astype(np.float32))
            left -= info["success"] > 0
            if left <= 0:
                break
        padded = np.array(wanted + [wanted[-1]] * HORIZON, np.float32)
        chunks += [padded[i : i + HORIZON].ravel() for i in range(len(wanted))]
    environment.close()
    return np.array(states, np.float32), np.array(chunks, np.float32)


def fit(inputs: Array, targets: Array, num_steps: int, seed: int) -> Any:
    """Return a network that was trained on normalised inputs, with an L1 loss."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    sides = [inputs.shape[1], *[WIDTH] * (NUM_LAYERS - 1), targets.shape[1]]
    layers: list[Any] = [nn.Linear(*pair) for pair in itertools.pairwise(sides)]
    network = nn.Sequential(*[part for layer in layers for part in (layer, nn.SiLU())][:-1])
    optimiser = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=1e-3)
    given, wanted = torch.from_numpy(inputs), torch.from_numpy(targets)
    for step in range(num_steps):
        optimiser.param_groups[0]["lr"] = 1e-3 * (0.02 + 0.98 * (1 - step / num_steps))
        chosen = torch.randint(len(given), (BATCH,))
        loss = (network(given[chosen]) - wanted[chosen]).abs().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 500 == 0 or step == num_steps - 1:
            print(f"step {step}: L1 {loss.item():.4f}", flush=True)
    return layers


def save(folder: Path, layers: Any, words: list[str], mean: Array, std: Array) -> None:
    """Write the three files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        weights |= {f"layers.{i}.weight": layer.weight.detach(), f"layers.{i}.bias": layer.bias.detach()}
    save_file(weights, str(folder / "policy.safetensors"))
    config = {
        "words": words,
        "tasks": TASKS,
        "state_dim": STATE_DIM,
        "action_dim": ACTION_DIM,
        "action_horizon": HORIZON,
        "num_layers": NUM_LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stats = {"norm_stats": {"state": {"mean": mean.tolist(), "std": std.tolist()}}}
    (folder / "norm_stats.json").write_text(json.dumps(stats, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=25, help="of each task")
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="gymnasium")
    started = time.monotonic()
    dice = np.random.default_rng(args.seed)
    words = sorted({word for prompt in TASKS.values() for word in words_of(prompt)})
    states, hints, chunks = [], [], []
    for task, prompt in TASKS.items():
        seen, wanted = demonstrate(task, args.demonstrations, dice, args.seed + 1)
        states.append(seen)
        chunks.append(wanted)
        hints.append(np.tile(encode_prompt(words, prompt), (len(seen), 1)))
        print(f"{task}: {len(seen)} steps", flush=True)
    state = np.concatenate(states)
    mean, std = state.mean(0), state.std(0) + 1e-2  # some numbers hardly ever change
    inputs = np.concatenate([(state - mean) / std, np.concatenate(hints)], 1)
    layers = fit(inputs, np.concatenate(chunks), args.steps, args.seed)
    save(args.folder, layers, words, mean, std)
    print(f"{len(state)} steps of demonstration, {time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
