"""Loads a pipeline and sets it up as the options say, with diffusers' own means."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from adapters.diffusion.interposed import DENOISERS, ConfigOnly
from adapters.diffusion.options import DiffusionOptions, Quantization, cache_config
from adapters.transformers_model import ModelLoader
from omni_bus.errors import StartFailed


def load_pipeline(loader: ModelLoader, options: DiffusionOptions, without: Container[str] = ()) -> Any:
    """Return a pipeline where it computes, with all that the options ask for.

    Args:
        loader: of its folder or name.
        options: of the stage.
        without: parts that are in other stages; models of diffusers' own keep their configuration.

    Raises:
        StartFailed: it isn't there, or can't do something of that; names the option.
    """
    import torch
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float32 if options.dtype == "auto" and loader.on_cpu else None
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    absent = _absent(loader, without, dtype)
    arguments: dict[str, Any] = dict(absent) if dtype is None else absent | {"dtype": dtype}
    packed: dict[str, Quantization] = {
        part: kind for part, kind in options.quantization.items() if kind != "fp8_storage"
    }
    if packed:
        arguments["quantization_config"] = _packing(packed, dtype or torch.bfloat16)
    try:
        pipeline: Any = loader.part("loading weights", DiffusionPipeline, **arguments)
    except (AttributeError, TypeError) as error:  # a class that this diffusers doesn't know, or other parts
        raise loader.refused(f"{type(error).__name__}: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    for name, part in absent.items():
        if part is not None:
            vars(pipeline)[name] = ConfigOnly(part, loader.device)
    _set_up(pipeline, options, loader)
    return pipeline


def _absent(loader: ModelLoader, names: Container[str], dtype: Any) -> dict[str, Any]:
    """Return what stands for parts that aren't loaded: models without weights, or nothing."""
    diffusers: Any = importlib.import_module("diffusers")
    import torch
    from accelerate import init_empty_weights

    found: dict[str, Any] = {}
    for part, kind in loader.part("reading the index", _Index).items():
        if part not in names or not isinstance(kind, (list, tuple)) or kind[0] is None:
            continue
        component = getattr(diffusers, kind[1], None) if kind[0] == "diffusers" else None
        if component is None:
            found[part] = None
            continue
        with init_empty_weights():
            model = component.from_config(component.load_config(loader.folder, subfolder=part))
        # Past diffusers' own `to`, which warns of layers that keep their precision; these have no numbers.
        found[part] = model if dtype is None else torch.nn.Module.to(model, dtype)
    return found


class _Index:
    """A pipeline's table of parts, as something that is loaded."""

    @staticmethod
    def from_pretrained(folder: str) -> dict[str, Any]:
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        index: Any = DiffusionPipeline.load_config(folder)
        return dict(index)


def _set_up(pipeline: Any, options: DiffusionOptions, loader: ModelLoader) -> None:
    """Apply the options, in the order in which they build on each other."""
    import torch

    found = [getattr(pipeline, name, None) for name in DENOISERS]
    denoisers: list[Any] = [part for part in found if isinstance(part, torch.nn.Module)]
    for fused in options.fused_loras:
        _try("fused_loras", lambda fused=fused: _fuse(pipeline, fused.path, fused.scale))
    for name, path in options.loras.items():
        folder = str(Path(path).expanduser())
        _try("loras", lambda name=name, folder=folder: pipeline.load_lora_weights(folder, adapter_name=name))
    if options.loras:
        pipeline.disable_lora()
    for part, kind in options.quantization.items():
        if kind == "fp8_storage":
            _try("quantization", lambda part=part: _store_in_8_bits(getattr(pipeline, part)))
    if (backend := options.attention_backend) is not None:
        for denoiser in denoisers:
            _try("attention_backend", lambda denoiser=denoiser: denoiser.set_attention_backend(backend))
    if (cache := options.step_cache) is not None:
        for denoiser in denoisers:
            _try("step_cache", lambda denoiser=denoiser: denoiser.enable_cache(cache_config(cache)))
    if options.vae_tiling:
        _try("vae_tiling", pipeline.vae.enable_tiling)
    if options.vae_slicing:
        _try("vae_slicing", pipeline.vae.enable_slicing)
    _move(pipeline, options, loader)
    for denoiser in denoisers if options.compile != "none" else ():
        compiled = denoiser.compile if options.compile == "whole" else denoiser.compile_repeated_blocks
        # Batches change their size at every step.
        _try("compile", lambda compiled=compiled: compiled(dynamic=True))


def _try(option: str, apply: Callable[[], object]) -> None:
    try:
        apply()
    except Exception as error:
        # Whatever a library raises here: the option can't be had with this model, and the person must hear of it.
        raise StartFailed(
            f"{option}: the model can't do it: {type(error).__name__}: {str(error)[:300]}", field=option
        ) from error


def _move(pipeline: Any, options: DiffusionOptions, loader: ModelLoader) -> None:
    match options.offload:
        case "none":
            pipeline.to(loader.device)
        case _ if loader.on_cpu:
            raise StartFailed("offload: there is no accelerator here (allowed: none)", field="offload")
        case "model":
            _try("offload", lambda: pipeline.enable_model_cpu_offload(device=loader.device))
        case "sequential":
            _try("offload", lambda: pipeline.enable_sequential_cpu_offload(device=loader.device))
        case "group":
            _try("offload", lambda: pipeline.enable_group_offload(loader.device, offload_type="leaf_level"))


def _fuse(pipeline: Any, path: str, scale: float) -> None:
    pipeline.load_lora_weights(str(Path(path).expanduser()))
    pipeline.fuse_lora(lora_scale=scale)
    pipeline.unload_lora_weights()


def _store_in_8_bits(part: Any) -> None:
    import torch

    part.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=part.dtype)


def _packing(kinds: Mapping[str, Quantization], dtype: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")

    made: dict[str, Callable[[], Any]] = {
        "bitsandbytes_8bit": lambda: diffusers.BitsAndBytesConfig(load_in_8bit=True),
        "bitsandbytes_4bit": lambda: diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype),
        "quanto_int8": lambda: diffusers.QuantoConfig(weights_dtype="int8"),
        "torchao_int8": lambda: diffusers.TorchAoConfig("int8wo"),
    }
    return diffusers.PipelineQuantizationConfig(quant_mapping={part: made[kind]() for part, kind in kinds.items()})
