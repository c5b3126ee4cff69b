"""π0 (https://arxiv.org/abs/2410.24164) with transformers' `PI0ForConditionalGeneration`: pictures, state, prompt in.

The model reads pictures and prompt once, then its action expert moves noise to actions along a velocity field, in Euler
steps over time from 1 to 0. Here each robot of a batch has its own number of steps and its own noise. Where a deadline
comes closer than the steps that are left, a robot takes the rest of the way in fewer, longer steps: its actions are
rougher, and in time. A robot that still executes its last chunk gets one that continues it (`guidance`).

Facts about transformers 5.24: the prompt is ``<image>`` for each token of each picture, the beginning-of-text token,
the text, a line break; pictures are in [-1, 1]; state and actions are padded with zeros to the model's widths.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from adapters.random_state import MAX_SEED
from adapters.robot.guidance import Guidance
from adapters.robot.pace import MAX_DENOISE_STEPS, Pace
from adapters.robot.policy import Policy, Previous
from adapters.robot.values import read_picture, read_vector
from adapters.transformers_model import ModelLoader, ModelOptions, check_model
from omni_bus.errors import BadInput, StartFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from adapters.robot.policy import Actions, Array, Observation, OnStep
    from omni_bus.engine import Report
    from omni_bus.errors import OmniBusError

NAME = "pi0"


class Pi0Options(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy's keys of ``[stages.NAME.policy]``."""

    images: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = (
        "observation/image",
        "observation/wrist_image",
    )
    """Keys of an observation's pictures, in the order in which the model was trained on them."""
    optional_images: tuple[str, ...] = ()
    """Those of `images` that a robot may leave out; the others must come."""
    state: str = "observation/state"
    """Key of the joints' or the gripper's numbers."""
    action_dim: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Columns of the model's actions that the robot has; all of them by default."""
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_DENOISE_STEPS)] | None = None
    """Denoise steps where a client asks for no number; the model's own by default."""
    max_prompt_tokens: Annotated[int, Meta(ge=1, le=4096)] = 256


class _Row(msgspec.Struct):
    """One robot's part of a batch."""

    pictures: list[Array | None]
    state: Array
    ids: list[int]
    num_steps: int
    noise: Any
    previous: Previous | None = None


class Pi0Policy(Policy):
    """Answers pictures, uint8 (side, side, 3), state and prompt with `actions`, float32 (chunk_size, action_dim)."""

    Options: ClassVar[type[msgspec.Struct]] = Pi0Options
    takes_previous: ClassVar[bool] = True

    _model: Any
    _tokenizer: Any

    @classmethod
    def check(cls, options: Pi0Options) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        problems = check_model(NAME, options, ("torch", "transformers"))
        unknown = [key for key in options.optional_images if key not in options.images]
        if unknown:
            problems.append(
                f"optional_images: '{unknown[0]}' is not among images (allowed: {', '.join(options.images)})"
            )
        return problems

    def load(self, report: Report) -> None:
        """Load, and infer once.

        Raises:
            StartFailed: the model isn't there, is no π0, or the options don't fit it.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        import transformers

        config = loader.part("loading configuration", transformers.AutoConfig)
        if config.model_type != "pi0":
            raise loader.refused(f"it is of type '{config.model_type}' (allowed: pi0)")
        width = config.max_action_dim
        if self.options.action_dim is not None and self.options.action_dim > width:
            raise StartFailed(
                f"action_dim: {self.options.action_dim} is set (allowed: 1 to {width})", field="action_dim"
            )
        self._action_dim = self.options.action_dim or width
        self._tokenizer = loader.part("loading tokenizer", transformers.AutoTokenizer)
        self._model = loader.weights(transformers.PI0ForConditionalGeneration, is_complete=True)
        self._model.requires_grad_(False)
        vision = config.vlm_config.vision_config
        self._side: int = vision.image_size
        self._tokens_per_image = (vision.image_size // vision.patch_size) ** 2
        self._image_token: int = config.vlm_config.image_token_id
        self._pace = Pace()
        self.metadata = {
            "policy": NAME,
            "action_horizon": config.chunk_size,
            "action_dim": self._action_dim,
            "state_dim": config.max_state_dim,
            "image_resolution": [self._side, self._side],
            "images": list(self.options.images),
        }
        report("warming up", 0.0)
        for _ in range(2):  # the first run makes what the second finds made: that one shows how long steps take
            self._run([self._blank()], None, None)
        report("warming up", 1.0)

    def close(self) -> None:
        """Let go of the model."""
        self._model = self._tokenizer = None

    def infer(
        self, observations: Sequence[Observation], *, deadline: float | None = None, on_step: OnStep | None = None
    ) -> Sequence[Actions | OmniBusError]:
        """Return a chunk for each observation, or why there is none; the longest robot of a batch sets its pace."""
        found: list[Actions | OmniBusError] = []
        rows: list[_Row] = []
        for observation in observations:
            try:
                rows.append(self._read(observation))
            except BadInput as error:
                found.append(error)
            else:
                found.append({})
        if rows:
            chunks = iter(self._run(rows, deadline, on_step))
            found = [{"actions": next(chunks)} if each == {} else each for each in found]
        return found

    # --- one observation ----------------------------------------------------------------------------------------

    def _read(self, observation: Observation) -> _Row:
        options: Pi0Options = self.options
        most = self._model.config.max_state_dim
        steps = observation.num_inference_steps
        if steps is not None and not 1 <= steps <= MAX_DENOISE_STEPS:
            raise BadInput(
                f"num_inference_steps: {steps} came (allowed: 1 to {MAX_DENOISE_STEPS})", field="num_inference_steps"
            )
        pictures = [
            None
            if key in options.optional_images and observation.values.get(key) is None
            else read_picture(observation, key, self._side, self._side)
            for key in options.images
        ]
        if all(picture is None for picture in pictures):
            raise BadInput(f"{options.images[0]}: no picture came (allowed: one at least)", field=options.images[0])
        state = np.zeros(most, np.float32)
        numbers = read_vector(observation, options.state, most)
        state[: len(numbers)] = numbers
        return _Row(
            pictures,
            state,
            self._ids(observation.prompt or "", sum(picture is not None for picture in pictures)),
            steps or options.num_inference_steps or self._model.config.num_inference_steps,
            self._noise(observation.seed),
            observation.previous,
        )

    def _ids(self, prompt: str, num_pictures: int) -> list[int]:
        text: list[int] = self._tokenizer(f"{prompt}\n", add_special_tokens=False)["input_ids"]
        if self._image_token in text:
            raise BadInput("prompt: it has the model's mark of a picture (allowed: plain text)", field="prompt")
        if len(text) > self.options.max_prompt_tokens:
            allowed = f"at most {self.options.max_prompt_tokens}"
            raise BadInput(f"prompt: {len(text)} tokens came (allowed: {allowed})", field="prompt")
        return [self._image_token] * (num_pictures * self._tokens_per_image) + [self._tokenizer.bos_token_id, *text]

    def _noise(self, seed: int | None) -> Any:
        """Return standard normal noise, (chunk_size, max_action_dim), the same for a seed in any company."""
        import torch

        if seed is not None and not 0 <= seed <= MAX_SEED:
            raise BadInput(f"seed: {seed} came (allowed: 0 to {MAX_SEED})", field="seed")
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return torch.randn(self._model.config.chunk_size, self._model.config.max_action_dim, generator=generator)

    def _blank(self) -> _Row:
        picture = np.zeros((self._side, self._side, 3), np.uint8)
        num = len(self.options.images)
        state = np.zeros(self._model.config.max_state_dim, np.float32)
        return _Row([picture] * num, state, self._ids("", num), 2, self._noise(0))

    # --- a batch ------------------------------------------------------------------------------------------------

    def _run(self, rows: list[_Row], deadline: float | None, on_step: OnStep | None) -> Array:
        """Return actions, float32 (rows, chunk_size, action_dim)."""
        import torch

        with torch.no_grad():  # not inference mode, whose tensors no gradient of `Guidance` could go through
            actions = self._denoise(self._inputs(rows), rows, deadline, on_step)
        return actions[..., : self._action_dim].float().cpu().numpy()

    def _inputs(self, rows: list[_Row]) -> dict[str, torch.Tensor]:
        import torch

        longest = max(len(row.ids) for row in rows)
        ids = np.full((len(rows), longest), self._tokenizer.pad_token_id or 0, np.int64)
        mask = np.zeros((len(rows), longest), np.int64)
        num = len(self.options.images)
        pixels = np.zeros((len(rows), num, self._side, self._side, 3), np.float32)
        seen = np.zeros((len(rows), num), bool)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = row.ids
            mask[i, : len(row.ids)] = 1
            for k, picture in enumerate(row.pictures):
                if picture is not None:
                    pixels[i, k] = picture / np.float32(127.5) - 1
                    seen[i, k] = True
        dtype = self._model.dtype
        inputs = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "pixel_values": torch.from_numpy(pixels).movedim(-1, -3).to(dtype),
            "pixel_attention_mask": torch.from_numpy(seen),
            "state": torch.from_numpy(np.stack([row.state for row in rows])).to(dtype),
        }
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}

    def _denoise(
        self, inputs: dict[str, torch.Tensor], rows: list[_Row], deadline: float | None, on_step: OnStep | None
    ) -> torch.Tensor:
        import torch

        model = self._model
        actions = torch.stack([row.noise for row in rows]).to(model.device)
        previous = [row.previous for row in rows]
        guidance = Guidance(previous, actions.shape, model.device) if any(previous) else None
        field = _Field(model, inputs)
        left = [row.num_steps for row in rows]
        at = [1.0] * len(rows)
        num_done = 0
        while any(left):
            started = time.monotonic()
            affordable = self._pace.affordable(len(rows), started, deadline, is_first=not num_done)
            left = [min(each, affordable) for each in left]
            field.at = torch.tensor(at, dtype=torch.float32, device=model.device)
            velocity = field(actions) if guidance is None else guidance.velocity(actions, field.at, field)
            strides = [t / n if n else 0.0 for t, n in zip(at, left, strict=True)]
            actions = actions - torch.tensor(strides, device=model.device)[:, None, None] * velocity
            at = [t - stride for t, stride in zip(at, strides, strict=True)]
            left = [max(each - 1, 0) for each in left]
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)  # what a step takes must be known before the next one is planned
            self._pace.note(len(rows), time.monotonic() - started, is_first=not num_done)
            num_done += 1
            if on_step is not None:
                on_step(num_done, num_done + max(left))
        return actions


class _Field:
    """The model's velocity at noisy actions, of one batch; pictures and prompts are read at the first call."""

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._inputs = inputs
        self._cache: Any = None
        self.at: Any = None
        """float32, (rows,): each robot's time."""

    def __call__(self, actions: torch.Tensor) -> torch.Tensor:
        inputs = self._inputs
        given = inputs if self._cache is None else {name: inputs[name] for name in ("state", "attention_mask")}
        out = self._model(**given, noise=actions.to(self._model.dtype), timestep=self.at, cache=self._cache)
        self._cache = out.cache
        self._cache.crop(-(out.cache.get_seq_length() - inputs["input_ids"].shape[1]))  # only what was read is kept
        for layer in self._cache.layers:  # and none of the way by which it was computed
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return out.logits.float()
