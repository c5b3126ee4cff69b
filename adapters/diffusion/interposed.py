"""A pipeline of a request's own: the shared weights, its own state, and our word at each call of a model.

diffusers' pipelines keep the state of a call in themselves, in their scheduler and in some VAEs. A shallow copy with
its own ones can wait at any model call while others run. Its code is the library's, to the last operation, so what
comes out is what the pipeline gives that is called directly; only the models' `forward` is ours, which hands the call
to the engine.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

from adapters.diffusion.joining import History, ModelCall
from adapters.diffusion.media import QuantisingProcessor


class ConfigOnly:
    """Stands in for a part that is in another stage: knows its configuration and has no weights."""

    def __init__(self, module: Any, device: Any) -> None:
        self._module = module
        self.device = device
        """Where it would compute: pipelines move what they are about to hand to it there."""

    def parameters(self) -> Iterator[Any]:
        """Return an empty tensor there, by which pipelines, too, find out where that is."""
        import torch

        yield torch.empty(0, device=self.device, dtype=self._module.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in {"_module", "_hf_hook"}:
            raise AttributeError(name)
        return getattr(self._module, name)


DENOISERS = ("transformer", "transformer_2", "transformer_3", "unet", "dit")
"""What pipelines call the models of their loop."""


class Prompts:
    """Encoded prompts, the last used ones."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.num_hits = 0

    def get(self, key: Hashable, encode: Callable[[], Any]) -> Any:
        """Return what `encode` returned for an equal key."""
        if key in self._kept:
            self.num_hits += 1
            self._kept.move_to_end(key)
            return self._kept[key]
        found = encode()
        if self._max_kept:
            self._kept[key] = found
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        return found

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


class Interposed:
    """A pipeline's copy for one request; at the end of its context the copies are empty.

    Args:
        pipeline: whose weights it shares.
        name: the request's.
        call_model: takes a call, and returns when it has a result or an error.
    """

    def __init__(self, pipeline: Any, name: str, call_model: Callable[[ModelCall], None]) -> None:
        self.pipeline = copy.copy(pipeline)
        self._name = name
        self._call_model = call_model
        self._own: dict[str, Any] = vars(
            self.pipeline
        )  # past its __setattr__, which would write into its configuration
        self.last_result: Any = None
        """What the last model call returned."""
        self.denoisers = [part for part in DENOISERS if _is_module(getattr(pipeline, part, None))]
        copies: dict[str, Any] = {part: self._denoiser(getattr(pipeline, part)) for part in self.denoisers}
        for part, component in pipeline.components.items():
            if part.endswith("scheduler") and component is not None:
                copies[part] = copy.deepcopy(component)
        if getattr(pipeline, "vae", None) is not None:
            copies["vae"] = copy.copy(pipeline.vae)
        self._own.update(copies)
        self._copies = list(copies.values())
        # It would reset the step caches of all requests, and move models that others are using.
        self._own["maybe_free_model_hooks"] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Break the rings between the copies and our functions: what they hold goes now, not when it is collected."""
        for copied in (*self._copies, self.pipeline):
            vars(copied).clear()
        self.last_result = None

    def _denoiser(self, shared: Any) -> Any:
        own = copy.copy(shared)
        has_cache = bool(getattr(shared, "is_cache_enabled", False))
        current: list[History] = []

        @contextmanager
        def cache_context(name: str, **arguments: Any) -> Iterator[None]:
            current.append(History(f"{self._name}/{name}", arguments))
            try:
                yield
            finally:
                current.pop()

        def forward(*args: Any, **kwargs: Any) -> Any:
            history = (current[-1] if current else History(self._name, {})) if has_cache else None
            call = ModelCall(shared, args, kwargs, history)
            self._call_model(call)
            if call.error is not None:
                raise call.error
            self.last_result = call.result
            return call.result

        vars(own).update(forward=forward, cache_context=cache_context, _compiled_call_impl=None)
        return own

    def quantise(self) -> None:
        """Let its pictures come out as uint8; one that has a safety checker, which looks at them, keeps its own way."""
        if getattr(self.pipeline, "safety_checker", None) is not None:
            return
        for name in ("image_processor", "video_processor"):
            if (processor := getattr(self.pipeline, name, None)) is not None:
                self._own[name] = QuantisingProcessor(processor)

    def remember(self, prompts: Prompts, lora: Hashable) -> None:
        """Encode no prompt twice; what else decides about an encoding is part of the key."""
        encode = getattr(self.pipeline, "encode_prompt", None)
        if encode is None:
            return
        signature = inspect.signature(encode)

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            key = _plain(arguments)
            if key is None:
                return encode(*args, **kwargs)
            return prompts.get((key, lora), lambda: encode(*args, **kwargs))

        self._own["encode_prompt"] = encode_prompt

    def replace(self, method: str, function: Callable[..., Any]) -> None:
        """Let a method of the pipeline be another function."""
        self._own[method] = function

    def before_decode(self, say: Callable[[], None]) -> None:
        """Let `say` be called before its VAE decodes."""
        vae = self._own.get("vae")
        if vae is None or not hasattr(vae, "decode"):
            return
        decode = vae.decode

        def say_and_decode(*args: Any, **kwargs: Any) -> Any:
            say()
            return decode(*args, **kwargs)

        vars(vae)["decode"] = say_and_decode

    def publish_frames(self, publish: Callable[[Any], None]) -> None:
        """Let `publish` have each group of frames as the VAE decodes it, uint8 (frames, height, width, channels).

        Call it after `quantise`. For Wan's VAE, whose decoder is called for one latent frame after the other and never
        changes what it gave. The clip as a whole is not converted then.
        """
        import torch
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        vae, processor = self._own["vae"], self.pipeline.video_processor
        decoder = copy.copy(vae.decoder)
        decode = vae.decoder.forward
        patch_size = vae.config.patch_size

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = decode(*args, **kwargs)
            frames = found if patch_size is None else unpatchify(found, patch_size=patch_size)
            publish(processor.postprocess_video(torch.clamp(frames, min=-1.0, max=1.0))[0])
            return found

        vars(decoder)["forward"] = forward
        vars(vae)["_modules"] = {**vars(vae)["_modules"], "decoder": decoder}
        self._own["video_processor"] = _AlreadyPublished(processor)

    def after_scheduler_step(self, look: Callable[[Any], None]) -> None:
        """Let `look` have, after each step of the scheduler, what the sample would be at the end by now."""
        scheduler = self.pipeline.scheduler
        step = scheduler.step

        def step_and_look(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            found = step(model_output, timestep, sample, *args, **kwargs)
            look(_end_of(scheduler, model_output, found[0]))
            return found

        vars(scheduler)["step"] = step_and_look

    def only_decode(self, model_result: Any) -> None:
        """Let its loop change nothing: models return `model_result`, the scheduler returns the sample as it is."""
        scheduler = self.pipeline.scheduler

        def step(model_output: Any, timestep: Any, sample: Any, **kwargs: Any) -> Any:
            return (sample,) if kwargs.get("return_dict") is False else SimpleNamespace(prev_sample=sample)

        vars(scheduler)["step"] = step
        vars(scheduler)["scale_model_input"] = lambda sample, *args, **kwargs: sample
        vars(scheduler)["init_noise_sigma"] = 1.0
        for part in self.denoisers:
            vars(self._own[part])["forward"] = lambda *args, **kwargs: model_result


class _AlreadyPublished:
    """A video processor for a clip whose frames went out while it was decoded."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def postprocess_video(self, video: Any, *args: Any, **kwargs: Any) -> Any:
        return [None]


def _is_module(component: Any) -> bool:
    import torch

    return isinstance(component, torch.nn.Module)


def _end_of(scheduler: Any, model_output: Any, previous: Any) -> Any:
    """Return the sample at noise 0 along the model's last direction: ``x - sigma v`` for flow matching."""
    if type(scheduler).__name__ != "FlowMatchEulerDiscreteScheduler":
        return previous
    sigma = scheduler.sigmas[scheduler.step_index].to(previous.device)
    return (previous.float() - sigma * model_output.float()).to(previous.dtype)


def _plain(value: Any) -> Hashable | None:
    """Return arguments as something with a hash; None where there is more than texts, numbers, devices and types."""
    import torch

    if value is None:
        return "none"
    if isinstance(value, (str, int, float, bool, torch.device, torch.dtype)):
        return (type(value).__name__, value)
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if isinstance(value, (list, tuple)):
        parts = [_plain(item) for item in value]
        return None if None in parts else tuple(parts)
    return None


def forget_history(model: Any, name: str) -> None:
    """Drop what step caches keep for a request."""
    from diffusers.hooks.hooks import StateManager

    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            for manager in vars(hook).values():
                if isinstance(manager, StateManager):
                    kept = manager._state_cache  # noqa: SLF001 (diffusers drops all requests')
                    for context in [key for key in kept if key.split("/")[0] == name]:
                        del kept[context]
