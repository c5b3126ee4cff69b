"""Policies of LeRobot: ACT, Diffusion and SmolVLA, from a folder that `save_pretrained` wrote.

LeRobot's own processors (``policy_preprocessor.json`` and its counterpart in the folder) normalise, tokenise and bring
actions back to the robot's units. Its `select_action` keeps queues for one robot; here each session has its history and
gets whole chunks.

Facts about lerobot 0.6.1: it wants Python 3.12, torch below 2.12 and torchvision. Building ACT or Diffusion fetches
ResNet weights that the checkpoint then replaces, unless its configuration says otherwise; SmolVLA reads the
configuration and the tokenizer of its language model from ``vlm_model_name``.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from adapters.packages import missing
from adapters.random_state import MAX_SEED, RandomState
from adapters.robot.pace import MAX_DENOISE_STEPS, Pace
from adapters.robot.policy import Observation, Policy
from adapters.robot.values import read_picture, read_vector
from omni_bus.errors import BadInput, StartFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.robot.policy import Actions, OnStep
    from omni_bus.engine import Context, Report
    from omni_bus.errors import OmniBusError

INSTALL = "Python 3.12 and pip install 'lerobot[diffusion,smolvla]>=0.6,<0.7'"
KINDS = ("act", "diffusion", "smolvla")
FILES = ("config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json")


class LerobotOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy's keys of ``[stages.NAME.policy]``."""

    model: str
    """The policy's folder."""
    vlm: str = ""
    """SmolVLA: the folder of its language model's configuration and tokenizer; by default where the policy says."""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_DENOISE_STEPS)] | None = None
    """Denoise steps where a client asks for no number; the policy's own by default."""


class LerobotPolicy(Policy):
    """Answers the policy's own features, such as ``observation.state``, with `actions`, float32 (steps, action_dim).

    Keys may have slashes for dots. Pictures are uint8 (height, width, 3), of the size that the policy was trained on.
    """

    Options: ClassVar[type[msgspec.Struct]] = LerobotOptions

    _policy: Any
    _before: Any
    _after: Any

    def __init__(self, options: LerobotOptions, context: Context) -> None:
        super().__init__(options, context)
        self._histories: dict[str, deque[dict[str, Any]]] = {}
        """What each session saw last, processed; only of policies that look back."""

    @classmethod
    def check(cls, options: LerobotOptions) -> list[str]:
        """Return what is missing."""
        folder = Path(options.model).expanduser()
        absent = [name for name in FILES if not (folder / name).is_file()]
        problems = [f"model: {folder} has no {', '.join(absent)} (allowed: what LeRobot saved)"] if absent else []
        return problems + missing("lerobot", {INSTALL: ("lerobot", "torch", "torchvision")})

    def load(self, report: Report) -> None:
        """Load the policy and its processors, and infer once.

        Raises:
            StartFailed: it isn't there, is of another kind, or lacks weights.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        report("importing lerobot", 0.0)
        import torch
        from safetensors import SafetensorError

        configs: Any = importlib.import_module("lerobot.configs")
        factory: Any = importlib.import_module("lerobot.policies.factory")

        torch.set_num_threads(self.context.num_threads)
        folder = str(Path(self.options.model).expanduser())
        report("loading weights", 0.0)
        try:
            config = configs.PreTrainedConfig.from_pretrained(folder)
            if config.type not in KINDS:
                raise StartFailed(f"model: it is of type '{config.type}' (allowed: {', '.join(KINDS)})", field="model")
            config.device = self.options.device
            if config.type == "smolvla":
                config.load_vlm_weights = False  # they are in the checkpoint
                config.vlm_model_name = self.options.vlm or config.vlm_model_name
            else:
                config.pretrained_backbone_weights = None
            self._policy = factory.get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
            overrides: dict[str, Any] = {"device_processor": {"device": self.options.device}}
            if config.type == "smolvla":
                overrides["tokenizer_processor"] = {"tokenizer_name": config.vlm_model_name}
            self._before, self._after = factory.make_pre_post_processors(
                config, folder, preprocessor_overrides=overrides
            )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
            raise StartFailed(f"model: {folder} can't be loaded: {str(error)[:2000]}", field="model") from error
        self._config = config
        visual = [key for key, feature in config.input_features.items() if feature.type is configs.FeatureType.VISUAL]
        self._pictures = {key: tuple(config.input_features[key].shape[1:]) for key in visual}
        self._vectors = {key: f.shape[0] for key, f in config.input_features.items() if key not in self._pictures}
        own_steps = {"smolvla": "num_steps", "diffusion": "num_inference_steps"}.get(config.type, "")
        self._own_steps: int = self.options.num_inference_steps or getattr(config, own_steps, 0) or self._most_steps()
        self._pace = Pace()
        self._on_step: OnStep | None = None
        self._watch_steps()
        report("warming up", 0.0)
        self._warm_up()
        report("warming up", 1.0)

    def close(self) -> None:
        """Let go of the policy."""
        self._policy = self._before = self._after = None
        self._histories.clear()

    def forget(self, session: str) -> None:
        """Drop what the session saw."""
        self._histories.pop(session, None)

    def infer(
        self, observations: Sequence[Observation], *, deadline: float | None = None, on_step: OnStep | None = None
    ) -> Sequence[Actions | OmniBusError]:
        """Return a chunk for each observation, or why there is none."""
        found: dict[int, Actions | OmniBusError] = {}
        values: dict[int, dict[str, Any]] = {}
        for i, observation in enumerate(observations):
            try:
                values[i] = self._read(observation)
            except BadInput as error:
                found[i] = error
        self._on_step = on_step
        for numbers in self._groups(observations, values):
            group = [observations[i] for i in numbers]
            chunks = self._infer_group(group, [values[i] for i in numbers], deadline)
            found |= {i: {"actions": chunk} for i, chunk in zip(numbers, chunks, strict=True)}
        return [found[i] for i in range(len(observations))]

    # --- one observation ------------------------------------------------------------------------------------------

    def _read(self, observation: Observation) -> dict[str, Any]:
        steps = observation.num_inference_steps
        if steps is not None and self._config.type == "act":
            raise BadInput("num_inference_steps: ACT has no denoise steps (allowed: null)", field="num_inference_steps")
        if steps is not None and not 1 <= steps <= self._most_steps():
            raise BadInput(
                f"num_inference_steps: {steps} came (allowed: 1 to {self._most_steps()})", field="num_inference_steps"
            )
        if observation.seed is not None and not 0 <= observation.seed <= MAX_SEED:
            raise BadInput(f"seed: {observation.seed} came (allowed: 0 to {MAX_SEED})", field="seed")
        if self._config.type == "smolvla" and not observation.prompt:
            raise BadInput("prompt: none came (allowed: text)", field="prompt")
        named = {name: self._key_in(observation, name) for name in (*self._pictures, *self._vectors)}
        values: dict[str, Any] = {"task": observation.prompt or ""}
        for name, (height, width) in self._pictures.items():
            picture = read_picture(observation, named[name], height, width)
            values[name] = np.moveaxis(picture, -1, 0).astype(np.float32) / np.float32(255)
        for name, dim in self._vectors.items():
            values[name] = read_vector(observation, named[name], dim, min_dim=dim)
        return values

    @staticmethod
    def _key_in(observation: Observation, name: str) -> str:
        slashed = name.replace(".", "/")
        return slashed if name not in observation.values and slashed in observation.values else name

    def _most_steps(self) -> int:
        if self._config.type == "diffusion":
            return int(self._policy.diffusion.noise_scheduler.config.num_train_timesteps)
        return MAX_DENOISE_STEPS

    # --- a batch --------------------------------------------------------------------------------------------------

    def _groups(self, observations: Sequence[Observation], values: dict[int, dict[str, Any]]) -> list[list[int]]:
        """Return which observations can be computed together: those with one number of steps.

        A diffusion policy draws noise in each step from torch's own generator: with a seed it computes alone.
        """
        groups: dict[Any, list[int]] = {}
        for i in values:
            steps = observations[i].num_inference_steps
            alone = self._config.type == "diffusion" and observations[i].seed is not None
            groups.setdefault((steps, i if alone else None), []).append(i)
        return list(groups.values())

    def _infer_group(
        self, observations: list[Observation], values: list[dict[str, Any]], deadline: float | None
    ) -> list[Any]:
        import torch

        batch: dict[str, Any] = {
            name: torch.from_numpy(np.stack([each[name] for each in values]))
            for name in (*self._pictures, *self._vectors)
        }
        batch["task"] = [each["task"] for each in values]
        batch = self._before(batch)
        if self._config.n_obs_steps > 1:
            self._look_back(observations, batch)
        kind = self._config.type
        given: dict[str, Any] = {}
        if kind != "act":
            self._plan(len(values), observations[0].num_inference_steps or self._own_steps, deadline)
        if kind == "smolvla":
            given["noise"] = torch.stack([self._noise(observation.seed) for observation in observations])
        started = time.monotonic()
        device = torch.device(self.options.device)
        with torch.inference_mode(), RandomState(observations[0].seed if kind == "diffusion" else None, device):
            actions = self._policy.predict_action_chunk(batch, **given)
            actions = self._after(actions).float().cpu().numpy()
        if kind != "act":
            self._pace.note(len(values), (time.monotonic() - started) / self._planned, is_first=False)
        return list(actions[:, : self._config.n_action_steps])

    def _look_back(self, observations: list[Observation], batch: dict[str, Any]) -> None:
        """Give each feature what its session saw before, oldest first: (rows, n_obs_steps, …)."""
        import torch

        features = (*self._pictures, *self._vectors)
        num = self._config.n_obs_steps
        for row, observation in enumerate(observations):
            if observation.is_first or observation.session not in self._histories:
                self._histories[observation.session] = deque(maxlen=num)
            history = self._histories[observation.session]
            seen = {name: batch[name][row] for name in features}
            history.extend([seen] * (1 if history else num))  # at first, what is seen was always so
        rows = [self._histories[observation.session] for observation in observations]
        for name in features:
            batch[name] = torch.stack([torch.stack([seen[name] for seen in history]) for history in rows])

    def _noise(self, seed: int | None) -> Any:
        import torch

        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        shape = (self._config.chunk_size, self._config.max_action_dim)
        return torch.randn(*shape, generator=generator).to(self.options.device)

    def _plan(self, num_rows: int, wanted: int, deadline: float | None) -> None:
        """Have the policy take so many steps, or fewer where a deadline is near."""
        self._planned = min(wanted, self._pace.affordable(num_rows, time.monotonic(), deadline, is_first=False))
        self._num_done = 0
        if self._config.type == "smolvla":
            self._config.num_steps = self._planned
        else:
            self._policy.diffusion.num_inference_steps = self._planned

    def _watch_steps(self) -> None:
        """Have `_stepped` called after each denoise step."""
        if self._config.type == "diffusion":
            self._policy.diffusion.unet.register_forward_hook(lambda *_: self._stepped())
        elif self._config.type == "smolvla":
            model = self._policy.model
            step = model.denoise_step

            def watched(*arguments: Any, **named: Any) -> Any:
                velocity = step(*arguments, **named)
                self._stepped()
                return velocity

            model.denoise_step = watched

    def _stepped(self) -> None:
        self._num_done += 1
        if self._on_step is not None:
            self._on_step(self._num_done, self._planned)

    def _warm_up(self) -> None:
        blank: dict[str, Any] = {key: np.zeros((*size, 3), np.uint8) for key, size in self._pictures.items()}
        blank |= {key: np.zeros(dim, np.float32) for key, dim in self._vectors.items()}
        steps = None if self._config.type == "act" else 2
        [found] = self.infer([Observation("", True, blank, "go", num_inference_steps=steps)])
        self.forget("")
        if isinstance(found, Exception):
            raise StartFailed(f"model: it can't infer: {found}", field="model")
        rows, columns = found["actions"].shape
        self.metadata = {
            "policy": self._config.type,
            "action_horizon": rows,
            "action_dim": columns,
            "images": {key: list(size) for key, size in self._pictures.items()},
            "states": self._vectors,
        }
