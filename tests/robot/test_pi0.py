"""π0 with tiny random weights of the true classes: what the engine relies on; parity with the class's own sampler."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from openpi_client.websocket_client_policy import WebsocketClientPolicy

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import tiny  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running
from adapters.robot.pi0 import Pi0Options, Pi0Policy
from adapters.robot.policy import Observation, Previous
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import make_context

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

IMAGES = ("observation/image", "observation/wrist_image")
PROMPTS = ("pick up the cup", "open", "put the red block on the other red block, please")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.pi0(tmp_path_factory.mktemp("pi0"))


def loaded(folder: str, **options: Any) -> Pi0Policy:
    policy = Pi0Policy(msgspec.convert({"model": folder, "device": "cpu", **options}, Pi0Options), make_context())
    policy.load(lambda phase, fraction: None)
    return policy


@pytest.fixture(scope="module")
def policy(folder: str) -> Pi0Policy:
    return loaded(folder, optional_images=[IMAGES[1]])


def seen(number: int, prompt: str = "", **fields: Any) -> Observation:
    dice = np.random.default_rng(number)
    values: dict[str, Any] = {key: dice.integers(0, 256, (56, 56, 3), np.uint8) for key in IMAGES}
    values["observation/state"] = dice.standard_normal(8).astype(np.float32)
    values |= fields.pop("values", {})
    defaults: dict[str, Any] = {"seed": number} | fields
    return Observation(f"robot-{number}", True, values, prompt or PROMPTS[number % 3], **defaults)


def actions(policy: Pi0Policy, *observations: Observation, **manner: Any) -> list[Any]:
    found = policy.infer(observations, **manner)
    assert all(isinstance(each, dict) for each in found), found
    return [each["actions"] for each in found]  # type: ignore[index] (just checked)


def sampled(folder: str, observation: Observation, num_steps: int) -> Any:
    """What the class itself makes of an observation."""
    model: Any = transformers.PI0ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    pictures: list[Any] = [observation.values[key] for key in IMAGES if key in observation.values]
    text = "<image>" * (16 * len(pictures)) + f"<bos>{observation.prompt}\n"
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)[None].float() / 127.5 - 1
    noise = torch.randn(1, 10, 7, generator=torch.Generator().manual_seed(observation.seed or 0))
    return model.sample_actions(
        state=torch.from_numpy(observation.values["observation/state"])[None],  # type: ignore[arg-type]
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        pixel_values=pixels,
        pixel_attention_mask=torch.ones(1, len(pictures), dtype=torch.bool),
        noise=noise,
        num_steps=num_steps,
    )[0].numpy()


@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_actions_are_those_of_the_class(folder: str, policy: Pi0Policy, num_steps: int) -> None:
    observation = seen(1, num_inference_steps=num_steps)
    [found] = actions(policy, observation)

    assert found.dtype == np.float32
    np.testing.assert_allclose(found, sampled(folder, observation, num_steps), atol=2e-5)


def test_one_camera_less_is_as_if_there_was_none(folder: str, policy: Pi0Policy) -> None:
    blind = seen(1, values={IMAGES[1]: None})
    del blind.values[IMAGES[1]]
    both, one = actions(policy, seen(1), blind)

    np.testing.assert_allclose(one, sampled(folder, blind, 4), atol=2e-5)
    assert np.abs(both - one).max() > 1e-3


def test_robots_of_a_batch_get_what_they_would_get_alone(policy: Pi0Policy) -> None:
    robots = [seen(i, num_inference_steps=steps) for i, steps in enumerate([4, 2, 7, None])]
    together = actions(policy, *robots)

    for robot, found in zip(robots, together, strict=True):
        np.testing.assert_allclose(found, actions(policy, robot)[0], atol=2e-5)
    assert np.abs(together[0] - together[3]).max() > 1e-2


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "open the drawer"},
        {"seed": 9},
        {"num_inference_steps": 2},
        {"values": {"observation/state": np.zeros(8, np.float32)}},
        {"values": {IMAGES[1]: np.zeros((56, 56, 3), np.uint8)}},
    ],
)
def test_everything_that_a_robot_says_matters(policy: Pi0Policy, change: dict[str, Any]) -> None:
    one, other = actions(policy, seen(1), seen(1, **change))

    assert np.abs(one - other).max() > 1e-3


def test_without_a_seed_noise_is_fresh(policy: Pi0Policy) -> None:
    one, other = actions(policy, seen(1, seed=None), seen(1, seed=None))

    assert np.abs(one - other).max() > 1e-2


def test_steps_are_told_as_they_are_done(policy: Pi0Policy) -> None:
    told: list[tuple[int, int]] = []
    policy.infer(
        [seen(1, num_inference_steps=3), seen(2, num_inference_steps=5)], on_step=lambda *step: told.append(step)
    )

    assert told == [(i, 5) for i in (1, 2, 3, 4, 5)]


def test_deadline_cuts_steps(policy: Pi0Policy) -> None:
    told: list[tuple[int, int]] = []
    [late] = actions(
        policy,
        seen(1, num_inference_steps=50),
        deadline=time.monotonic(),
        on_step=lambda *step: told.append(step),
    )

    assert told == [(1, 1)]
    # The whole way in one step is what one step from the start gives.
    np.testing.assert_allclose(late, actions(policy, seen(1, num_inference_steps=1))[0], atol=2e-5)


def test_deadline_that_comes_nearer_lengthens_the_last_steps(
    policy: Pi0Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of the test's own, each step takes a second: of ten, four fit."""
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 0.5  # asked twice in each step
        return now

    told: list[tuple[int, int]] = []
    monkeypatch.setattr("adapters.robot.pi0.time", SimpleNamespace(monotonic=tick))
    policy.infer([seen(1, num_inference_steps=2)])
    now = 0.0
    cut = policy.infer([seen(1, num_inference_steps=10)], deadline=2.6, on_step=lambda *step: told.append(step))

    assert told[-1][0] == told[-1][1] < 10
    assert len(told) == told[-1][0] > 1
    assert np.isfinite(cut[0]["actions"]).all()  # type: ignore[index]


def test_action_columns_are_the_robots(folder: str) -> None:
    narrow = loaded(folder, action_dim=3)

    assert actions(narrow, seen(1))[0].shape == (10, 3)
    assert narrow.metadata["action_dim"] == 3


def by_the_paper(folder: str, observation: Observation, previous: Previous, num_steps: int) -> Any:
    """Real-time chunking as arXiv 2506.07339 writes it, in the paper's time, one robot, on the class's own forward."""
    model: Any = transformers.PI0ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = "<image>" * 32 + f"<bos>{observation.prompt}\n"
    pictures: list[Any] = [observation.values[key] for key in IMAGES]
    state: Any = observation.values["observation/state"]
    inputs = {
        **tokenizer(text, return_tensors="pt", add_special_tokens=False),
        "pixel_values": torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)[None].float() / 127.5 - 1,
        "pixel_attention_mask": torch.ones(1, 2, dtype=torch.bool),
        "state": torch.from_numpy(state)[None],
    }
    horizon, overlap, delay, beta = 10, len(previous.actions), previous.delay_steps, 5.0
    mask = torch.zeros(horizon)
    for i in range(horizon):
        c = (overlap - i) / (overlap - delay + 1)
        mask[i] = 1.0 if i < delay else c * (np.exp(c) - 1) / (np.exp(1) - 1) if i < overlap else 0.0
    wanted = torch.zeros(horizon, 7)
    wanted[:overlap] = torch.from_numpy(previous.actions)
    x = torch.randn(10, 7, generator=torch.Generator().manual_seed(observation.seed or 0))
    for k in range(num_steps):
        tau = k / num_steps
        x = x.detach().requires_grad_()
        v = -model(**inputs, noise=x[None], timestep=torch.tensor([1 - tau])).logits[0]
        clean = x + (1 - tau) * v
        (pull,) = torch.autograd.grad((((wanted - clean.detach()) * mask[:, None]) * clean).sum(), x)
        r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        x = x + (v + (min(beta, (1 - tau) / (tau * r2)) if tau else beta) * pull) / num_steps
    return x.detach().numpy()


def test_chunk_continues_the_one_that_the_robot_has(folder: str, policy: Pi0Policy) -> None:
    left = Previous(np.random.default_rng(5).standard_normal((7, 7)).astype(np.float32), 3)
    free, bound, company = actions(policy, seen(1), seen(1, previous=left), seen(2))

    np.testing.assert_allclose(bound, by_the_paper(folder, seen(1), left, 4), atol=1e-4)
    # What the robot will have executed is nearer to what it executes; the other robots of the batch are left alone.
    assert np.abs(bound[:3] - left.actions[:3]).mean() < 0.5 * np.abs(free[:3] - left.actions[:3]).mean()
    np.testing.assert_allclose(free, actions(policy, seen(1))[0], atol=2e-5)
    np.testing.assert_allclose(company, actions(policy, seen(2))[0], atol=2e-5)


def test_chunk_of_fewer_columns_is_continued_in_them(policy: Pi0Policy) -> None:
    left = Previous(np.full((4, 2), 3.0, np.float32), 2)
    free, bound = actions(policy, seen(1), seen(1, previous=left, num_inference_steps=20))

    assert np.abs(bound[:2, :2] - 3).mean() < np.abs(free[:2, :2] - 3).mean()


@pytest.mark.parametrize(
    ("change", "field", "came"),
    [
        ({"values": {IMAGES[0]: None}}, IMAGES[0], "nothing"),
        ({"values": {IMAGES[0]: np.zeros((3, 56, 56), np.uint8)}}, IMAGES[0], "(3, 56, 56)"),
        ({"values": {IMAGES[0]: np.zeros((56, 56, 3), np.float32)}}, IMAGES[0], "float32"),
        ({"values": {"observation/state": np.zeros(9, np.float32)}}, "observation/state", "(9,)"),
        ({"values": {"observation/state": np.full(8, np.nan)}}, "observation/state[0]", "nan"),
        ({"values": {"observation/state": "up"}}, "observation/state", "str"),
        ({"values": {"observation/state": [[1], [1, 2]]}}, "observation/state", "list"),
        ({"prompt": "a <image> of a cup"}, "prompt", "picture"),
        ({"prompt": "x" * 300}, "prompt", "301 tokens"),
        ({"num_inference_steps": 0}, "num_inference_steps", "0"),
        ({"num_inference_steps": 10**6}, "num_inference_steps", "1000000"),
        ({"seed": -1}, "seed", "-1"),
    ],
)
def test_bad_observation_is_refused_alone(policy: Pi0Policy, change: dict[str, Any], field: str, came: str) -> None:
    refused, answered = policy.infer([seen(1, **change), seen(2)])

    assert isinstance(refused, BadInput)
    assert refused.message.startswith(f"{field}: ")
    assert came in refused.message
    assert "allowed: " in refused.message
    np.testing.assert_allclose(answered["actions"], actions(policy, seen(2))[0], atol=2e-5)  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"action_dim": 8}, "action_dim: 8"), ({"optional_images": ["left"]}, "'left' is not among images")],
)
def test_options_that_do_not_fit_are_refused(folder: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StartFailed, match=said):
        loaded(folder, **options)


def test_other_models_are_refused(tmp_path: Path) -> None:
    transformers.GemmaConfig().save_pretrained(tmp_path)

    with pytest.raises(StartFailed, match="of type 'gemma'"):
        loaded(str(tmp_path))


# --- behind the gateway ---------------------------------------------------------------------------------------

TOML = """
[stages.policy]
adapter = "robot-policy"
policy = { name = "pi0", model = "FOLDER", device = "cpu", optional_images = ["observation/wrist_image"] }
max_batch_wait_s = 0.0
action_dim = 6
[stages.policy.images."observation/image"]
size = [56, 56]
[stages.policy.images."observation/wrist_image"]
size = [56, 56]
is_required = false
[pipelines.policy]
edges = ["in.observation -> policy.observation", "policy.actions -> out.actions"]
[gateways.robot]
protocol = "openpi"
"""


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context:DeprecationWarning")  # the stock client
async def test_robots_with_cameras_of_any_size_are_served(folder: str, policy: Pi0Policy) -> None:
    plain = {key: np.full((56, 56, 3), 60 + 90 * i, np.uint8) for i, key in enumerate(IMAGES)}  # resized, the same
    large = {key: np.full((224, 224, 3), picture[0, 0], np.uint8) for key, picture in plain.items()}

    def ask(port: int) -> list[Any]:
        client = WebsocketClientPolicy("127.0.0.1", port)
        try:
            assert client.get_server_metadata()["image_resolution"] == [56, 56]
            whole = {**seen(1).values, "prompt": PROMPTS[1], "seed": 1, "sampling_params": {"num_inference_steps": 3}}
            return [client.infer({**whole, **pictures}) for pictures in ({}, plain, large)]
        finally:
            client._ws.close()

    async with running(TOML.replace("FOLDER", folder)) as deployment:
        answers = await asyncio.to_thread(ask, deployment.port)
    alone = actions(policy, *(seen(1, num_inference_steps=3, values=pictures) for pictures in ({}, plain, plain)))

    for answer, wanted in zip(answers, alone, strict=True):
        assert answer["actions"].shape == (10, 6)
        assert answer["server_timing"]["num_steps"] == 3
        np.testing.assert_allclose(answer["actions"], wanted[:, :6], atol=1e-4)


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context:DeprecationWarning")  # the stock client
async def test_answer_is_rougher_rather_than_late(folder: str) -> None:
    """A thousand steps take longer than the second that is left."""

    def ask(port: int) -> Any:
        client = WebsocketClientPolicy("127.0.0.1", port)
        try:
            whole = {**seen(1).values, "prompt": "open", "sampling_params": {"num_inference_steps": 1000}}
            return client.infer(whole)
        finally:
            client._ws.close()

    toml = TOML.replace("FOLDER", folder).replace("max_batch_wait_s", "deadline_s = 1.0\nmax_batch_wait_s")
    async with running(toml) as deployment:
        answer = await asyncio.to_thread(ask, deployment.port)

    assert answer["actions"].shape == (10, 6)
    assert 1 <= answer["server_timing"]["num_steps"] < 1000


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context:DeprecationWarning")  # the stock client
async def test_stage_has_chunks_continued(folder: str, policy: Pi0Policy) -> None:
    smoothing = 'smoothing = { method = "real-time", latency_budget_s = 0.1 }\ncontrol_hz = 20.0\nstep_key = "step"\n'

    def ask(port: int) -> list[Any]:
        client = WebsocketClientPolicy("127.0.0.1", port)
        try:
            whole = [{**seen(i).values, "prompt": PROMPTS[i], "seed": i, "step": step} for i, step in ((1, 0), (2, 4))]
            return [client.infer(observation)["actions"] for observation in whole]
        finally:
            client._ws.close()

    toml = TOML.replace("FOLDER", folder).replace("max_batch_wait_s", f"{smoothing}max_batch_wait_s")
    async with running(toml) as deployment:
        first, second = await asyncio.to_thread(ask, deployment.port)
    [free] = actions(policy, seen(2))

    assert np.abs(second[:2] - first[4:6]).mean() < 0.7 * np.abs(free[:2, :6] - first[4:6]).mean()
