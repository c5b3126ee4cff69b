"""Tiny random policies of LeRobot's own classes, saved by its `save_pretrained`: `scripts/nightly_policies` runs it."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("lerobot", exc_type=ImportError)

import torch
import transformers

from adapters.robot.lerobot import LerobotOptions, LerobotPolicy
from adapters.robot.policy import Observation
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import make_context

configs: Any = importlib.import_module("lerobot.configs")
factory: Any = importlib.import_module("lerobot.policies.factory")
FeatureType, PolicyFeature = configs.FeatureType, configs.PolicyFeature

pytestmark = [pytest.mark.model, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

SIDE = 96
CAMERA = "observation.images.top"
KINDS = ("act", "diffusion", "smolvla")
SIZES: dict[str, dict[str, Any]] = {
    "act": {
        "chunk_size": 8,
        "n_action_steps": 6,
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 64,
        "n_encoder_layers": 1,
        "n_vae_encoder_layers": 1,
        "latent_dim": 8,
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "n_obs_steps": 2,
        "horizon": 8,
        "n_action_steps": 6,
        "down_dims": (16, 32),
        "crop_shape": None,
        "spatial_softmax_num_keypoints": 4,
        "diffusion_step_embed_dim": 16,
        "n_groups": 4,
        "num_train_timesteps": 10,
        "pretrained_backbone_weights": None,
    },
    "smolvla": {
        "chunk_size": 8,
        "n_action_steps": 6,
        "max_state_dim": 8,
        "max_action_dim": 8,
        "resize_imgs_with_padding": (64, 64),
        "num_vlm_layers": 2,
        "num_steps": 4,
        "load_vlm_weights": False,
    },
}


def save_vlm(folder: Path) -> str:
    """A SmolVLM with two layers: its configuration, and a processor with a tokenizer of bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<bos>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
    )
    transformers.SmolVLMConfig(
        image_token_id=3,
        scale_factor=2,
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 16,
        },
    ).save_pretrained(folder)
    sampling: dict[str, Any] = {"video_sampling": {"max_frames": 1, "fps": 1}}
    sizes: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}}
    transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(**sizes),
        tokenizer,
        transformers.SmolVLMVideoProcessor(**sizes, **sampling),
        image_seq_len=4,
    ).save_pretrained(folder)
    return str(folder)


def save(kind: str, folder: Path, vlm: str) -> str:
    torch.manual_seed(0)
    features = {
        CAMERA: PolicyFeature(type=FeatureType.VISUAL, shape=(3, SIDE, SIDE)),
        "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(5,)),
    }
    sizes = SIZES[kind] | ({"vlm_model_name": vlm} if kind == "smolvla" else {})
    config: Any = factory.make_policy_config(
        kind,
        input_features=features,
        output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(3,))},
        device="cpu",
        **sizes,
    )
    policy = factory.get_policy_class(kind)(config)
    with torch.no_grad():
        for name, weight in policy.named_parameters():  # its own initial weights hardly look at their input
            if weight.dim() >= 2 and "backbone" not in name:
                weight.copy_(torch.randn_like(weight) / max(1, weight[0].numel()) ** 0.5)
    policy.save_pretrained(folder)
    stats = {
        "observation.state": {"mean": torch.arange(5.0), "std": torch.full((5,), 2.0)},
        "action": {"mean": torch.tensor([10.0, 20.0, 30.0]), "std": torch.tensor([1.0, 2.0, 3.0])},
        CAMERA: {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.25)},
    }
    for each in stats.values():
        each |= {"min": each["mean"] - each["std"], "max": each["mean"] + each["std"]}
    for processor in factory.make_pre_post_processors(config, dataset_stats=stats):
        processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("lerobot")
    vlm = save_vlm(root / "vlm")
    return {kind: save(kind, root / kind, vlm) for kind in KINDS}


def load(folder: str, **options: Any) -> LerobotPolicy:
    policy = LerobotPolicy(msgspec.convert({"model": folder, **options}, LerobotOptions), make_context())
    policy.load(lambda phase, fraction: None)
    return policy


@pytest.fixture(scope="module")
def policies(folders: dict[str, str]) -> dict[str, LerobotPolicy]:
    return {kind: load(folder) for kind, folder in folders.items()}


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, policies: dict[str, LerobotPolicy]) -> LerobotPolicy:
    return policies[request.param]


def seen(number: int, session: str = "", *, is_first: bool = True, prompt: str = "", **fields: Any) -> Observation:
    dice = np.random.default_rng(number)
    values: dict[str, Any] = {
        CAMERA: dice.integers(0, 256, (SIDE, SIDE, 3), np.uint8),
        "observation.state": (dice.standard_normal(5) * 3).astype(np.float32),
    }
    values |= fields.pop("values", {})
    named: dict[str, Any] = {"seed": number} | fields
    prompt = prompt or ("pick up the cup", "open", "put the red block on the other red block")[number % 3]
    return Observation(session or f"robot-{number}", is_first, values, prompt, **named)


def actions(policy: LerobotPolicy, *observations: Observation, **manner: Any) -> list[Any]:
    found = policy.infer(observations, **manner)
    assert all(isinstance(each, dict) for each in found), found
    return [each["actions"] for each in found]  # type: ignore[index] (just checked)


def by_lerobot(folder: str, *observations: Observation) -> Any:
    """What LeRobot's own loop gives for the last of one robot's observations, action by action."""
    kind = json.loads((Path(folder) / "config.json").read_text())["type"]
    own: Any = factory.get_policy_class(kind).from_pretrained(folder, strict=True)
    before, after = factory.make_pre_post_processors(own.config, folder)
    seed = observations[-1].seed or 0
    noise = {"noise": torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(seed))} if kind == "smolvla" else {}
    found: list[Any] = []
    for observation in observations:
        if hasattr(own, "_queues"):
            own._queues["action"].clear()  # so that it infers anew, with what it saw before
        torch.manual_seed(seed)
        values: Any = observation.values
        batch = before(
            {
                CAMERA: torch.from_numpy(values[CAMERA]).permute(2, 0, 1)[None].float() / 255,
                "observation.state": torch.from_numpy(values["observation.state"])[None],
                "task": [observation.prompt],
            }
        )
        found = [after(own.select_action(dict(batch), **noise))]
        found += [after(action) for action in (own._queues["action"] if hasattr(own, "_queues") else own._action_queue)]
    return torch.cat(found).numpy()


def test_actions_are_those_of_lerobots_own_loop(folders: dict[str, str], policies: dict[str, LerobotPolicy]) -> None:
    for kind in KINDS:
        [found] = actions(policies[kind], seen(1))
        assert found.shape == (6, 3), kind
        np.testing.assert_allclose(found, by_lerobot(folders[kind], seen(1)), atol=1e-4, err_msg=kind)


def test_history_is_the_sessions_own(folders: dict[str, str], policies: dict[str, LerobotPolicy]) -> None:
    policy = policies["diffusion"]
    actions(policy, seen(1, "a"), seen(3, "b"))
    [second] = actions(policy, seen(2, "a", is_first=False))

    np.testing.assert_allclose(second, by_lerobot(folders["diffusion"], seen(1), seen(2)), atol=1e-4)
    [anew] = actions(policy, seen(2, "a"))
    assert np.abs(anew - second).max() > 1e-4
    policy.forget("a")
    [forgotten] = actions(policy, seen(2, "a", is_first=False))
    np.testing.assert_allclose(forgotten, anew, atol=1e-4)


def test_robots_of_a_batch_get_what_they_would_get_alone(policy: LerobotPolicy) -> None:
    together = actions(policy, *(seen(i) for i in range(4)))

    for i, found in enumerate(together):
        np.testing.assert_allclose(found, actions(policy, seen(i))[0], atol=1e-4)
    assert np.abs(together[0] - together[1]).max() > 1e-3


def test_what_the_robot_says_matters(policies: dict[str, LerobotPolicy]) -> None:
    changes: dict[str, Any] = {
        "picture": {"values": {CAMERA: np.zeros((SIDE, SIDE, 3), np.uint8)}},
        "state": {"values": {"observation.state": np.zeros(5, np.float32)}},
        "seed": {"seed": 9},
        "steps": {"num_inference_steps": 2},
        "prompt": {"prompt": "open the drawer"},
    }
    ignored = {"act": {"seed", "steps", "prompt"}, "diffusion": {"prompt"}, "smolvla": set()}
    for kind, policy in policies.items():
        for name in changes.keys() - ignored[kind]:
            one, other = actions(policy, seen(1)), actions(policy, seen(1, **changes[name]))
            assert np.abs(one[0] - other[0]).max() > 1e-4, (kind, name)


def test_keys_may_have_slashes(policy: LerobotPolicy) -> None:
    observation = seen(1)
    slashed = {key.replace(".", "/"): value for key, value in observation.values.items()}
    [found] = actions(policy, Observation("a", True, slashed, observation.prompt, seed=1))

    np.testing.assert_allclose(found, actions(policy, observation)[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["diffusion", "smolvla"])
def test_steps_are_told_and_cut_to_meet_a_deadline(policies: dict[str, LerobotPolicy], kind: str) -> None:
    told: list[tuple[int, int]] = []

    def on_step(done: int, total: int) -> None:
        told.append((done, total))

    policy = policies[kind]
    actions(policy, seen(1, num_inference_steps=3), on_step=on_step)
    assert told == [(1, 3), (2, 3), (3, 3)]
    told.clear()
    actions(policy, seen(1, num_inference_steps=10), deadline=time.monotonic(), on_step=on_step)
    assert told == [(1, 1)]
    told.clear()
    actions(policy, seen(1), on_step=on_step)
    assert len(told) == {"diffusion": 10, "smolvla": 4}[kind]  # as many as it says itself


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"values": {CAMERA: None}}, CAMERA),
        ({"values": {CAMERA: np.zeros((3, SIDE, SIDE), np.uint8)}}, CAMERA),
        ({"values": {"observation.state": np.zeros(4, np.float32)}}, "observation.state"),
        ({"values": {"observation.state": np.full(5, np.nan)}}, "observation.state[0]"),
        ({"num_inference_steps": 100_000}, "num_inference_steps"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_observation_is_refused_alone(policy: LerobotPolicy, change: dict[str, Any], field: str) -> None:
    refused, answered = policy.infer([seen(1, **change), seen(2)])

    assert isinstance(refused, BadInput)
    assert refused.message.startswith(f"{field}: ")
    np.testing.assert_allclose(answered["actions"], actions(policy, seen(2))[0], atol=1e-4)  # type: ignore[index]


def test_other_kinds_and_folders_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"has no config.json"):
        load(str(tmp_path))
    for name in ("model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json"):
        (tmp_path / name).write_text("{}")
    features: dict[str, Any] = {"observation.state": PolicyFeature(type=FeatureType.STATE, shape=(5,))}
    factory.make_policy_config("tdmpc", input_features=features, device="cpu").save_pretrained(tmp_path)
    with pytest.raises(StartFailed, match=r"type 'tdmpc' \(allowed: act, diffusion, smolvla\)"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_bytes((Path(folders["act"]) / "config.json").read_bytes())
    with pytest.raises(StartFailed, match="can't be loaded"):
        load(str(tmp_path))
