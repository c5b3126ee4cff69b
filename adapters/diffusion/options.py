"""Keys of a diffusion stage's table, and which of them exclude each other."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from adapters.diffusion.params import Argument, Seconds
from adapters.packages import missing
from adapters.transformers_model import ModelOptions

INSTALL_ENGINE = 'pip install "omni-bus[diffusers]"'

Fraction = Annotated[float, Meta(ge=0, le=1)]


class FirstBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="first_block", tag_field="kind"):
    """Skips a step's other blocks where the first one changed less than `threshold` since the last whole step."""

    threshold: Annotated[float, Meta(gt=0, le=10)] = 0.05


class TaylorSeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="taylor_seer", tag_field="kind"):
    """Extrapolates each layer's output from its last ones, and computes it every `cache_interval` steps."""

    cache_interval: Annotated[int, Meta(ge=1, le=100)] = 5
    disable_cache_before_step: Annotated[int, Meta(ge=1, le=1000)] = 3
    max_order: Annotated[int, Meta(ge=0, le=8)] = 1


class PyramidAttention(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pyramid_attention", tag_field="kind"
):
    """Uses an attention's output again for a few steps."""

    spatial_attention_block_skip_range: Annotated[int, Meta(ge=1, le=100)] = 2
    spatial_attention_timestep_skip_range: tuple[int, int] = (100, 800)


class MagCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mag", tag_field="kind"):
    """Skips steps whose outputs are known to grow by about `mag_ratios`, which were measured for the model."""

    mag_ratios: tuple[float, ...]
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] = 28
    threshold: Annotated[float, Meta(gt=0, le=10)] = 0.06
    max_skip_steps: Annotated[int, Meta(ge=1, le=100)] = 3
    retention_ratio: Fraction = 0.2


StepCache: TypeAlias = FirstBlock | TaylorSeer | PyramidAttention | MagCache


class FusedLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that becomes part of the weights at the start."""

    path: str
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0


Quantization: TypeAlias = Literal[
    "fp8_storage", "bitsandbytes_8bit", "bitsandbytes_4bit", "quanto_int8", "torchao_int8"
]
"""``fp8_storage`` keeps weights in 8 bits and computes in `dtype`; the others come from the package that they name."""

NEEDS: dict[str, str] = {
    "bitsandbytes_8bit": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "quanto_int8": "optimum.quanto",
    "torchao_int8": "torchao",
}


class DiffusionOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a stage's table."""

    call: dict[str, Argument] = msgspec.field(default_factory=dict)
    """Arguments of the pipeline's call that each request has unless it says otherwise, by their names in diffusers."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=64)] = 8
    """Requests whose model calls may run as one."""
    max_resident: Annotated[int, Meta(ge=1, le=256)] = 16
    """Requests that hold latents at once; each has a thread, only one of which computes at a time."""
    max_passed_over: Annotated[int, Meta(ge=1, le=1000)] = 24
    """Units of others (a denoising step, say) after which a request goes first, whatever its size or priority."""
    max_pixels: Annotated[int, Meta(ge=256, le=2**28)] = 4 * 1024 * 1024
    """Width times height that a request may ask for or send."""
    max_num_frames: Annotated[int, Meta(ge=1, le=10_000)] = 1024
    """Frames that a request may ask for or send."""
    max_audio_length: Seconds = 300.0
    """Seconds that a request may ask for; less where the model can do less."""
    max_cached_prompts: Annotated[int, Meta(ge=0, le=10_000)] = 32
    """Prompts whose encodings are kept."""
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    """Frames a second of videos whose request doesn't say; None takes the model's."""
    loras: dict[str, str] = msgspec.field(default_factory=dict)
    """Adapters that a request may name: the name, and a file or folder."""
    fused_loras: tuple[FusedLora, ...] = ()
    """Adapters that every request has; they cost nothing afterwards."""
    offload: Literal["none", "model", "sequential", "group"] = "none"
    """What waits in host memory while it isn't needed: whole models, single layers, or groups of layers."""
    quantization: dict[str, Quantization] = msgspec.field(default_factory=dict)
    """By part of the pipeline, as in ``{ transformer = "fp8_storage" }``."""
    step_cache: StepCache | None = None
    """Saves work between the steps of a request; model calls are not joined then, since each has its own history."""
    attention_backend: Annotated[str, Meta(min_length=1)] | None = None
    """One of diffusers' names, as ``flash`` or ``_native_cudnn``."""
    vae_tiling: bool = False
    """Decodes in tiles, which takes less memory and leaves faint seams."""
    vae_slicing: bool = False
    """Decodes the pictures of a request one by one."""
    compile: Literal["none", "blocks", "whole"] = "none"
    """torch.compile: the repeated blocks (short), or the whole denoiser (minutes, and again for each new size)."""
    warm_up: bool = True
    """Run two steps with `call` before the stage is ready."""


def problems_of(adapter: str, options: DiffusionOptions) -> list[str]:
    """Return what is wrong with the options and can be seen without loading."""
    problems = missing(adapter, {INSTALL_ENGINE: ("torch", "diffusers", "transformers")})
    path = Path(options.model).expanduser()
    is_path = path.is_absolute() or options.model.startswith(("./", "../", "~"))
    if is_path and not (path / "model_index.json").is_file():
        problems.append(
            f"model: '{options.model}' is not the folder of a diffusers pipeline: it has no model_index.json"
        )
    if (options.loras or options.fused_loras) and importlib.util.find_spec("peft") is None:
        problems.append("loras: they need peft (pip install peft)")
    problems += [
        f"quantization: {part} = '{kind}' needs {package} (pip install {package.replace('.', '-')})"
        for part, kind in options.quantization.items()
        if (package := NEEDS.get(kind)) and not _is_installed(package)
    ]
    problems += [
        f"loras: there is no file or folder '{lora}'"
        for lora in (*options.loras.values(), *(fused.path for fused in options.fused_loras))
        if re.match(r"[./~]", lora) and not Path(lora).expanduser().exists()
    ]
    return problems + [reason for reason, is_so in conflicts(options) if is_so]


def conflicts(options: DiffusionOptions) -> list[tuple[str, bool]]:
    """Return each pair of options that exclude each other, and whether both are set."""
    on_cpu = options.device == "cpu"
    is_offloaded = options.offload != "none"
    is_compiled = options.compile != "none"
    is_packed = any(kind != "fp8_storage" for kind in options.quantization.values())
    has_fp8 = "fp8_storage" in options.quantization.values()
    return [
        (f"offload: '{options.offload}' moves weights to an accelerator (allowed with device 'cpu': none)",
         is_offloaded and on_cpu),
        ("quantization: bitsandbytes computes on an accelerator only (allowed with device 'cpu': the others)",
         on_cpu and any(kind.startswith("bitsandbytes") for kind in options.quantization.values())),
        (f"compile: '{options.compile}' can't follow weights that move (allowed with offload: none)",
         is_compiled and options.offload in {"sequential", "group"}),
        ("quantization: fp8_storage can't follow weights that move (allowed with it: offload none or model)",
         has_fp8 and options.offload in {"sequential", "group"}),
        ("quantization: quantized weights can't be moved layer by layer (allowed with them: offload none or model)",
         is_packed and options.offload == "sequential"),
        (f"compile: '{options.compile}' would compile again at each change of adapter (allowed with loras: none)",
         is_compiled and bool(options.loras)),
        ("fused_loras: they can't become part of quantized weights (allowed with quantization: loras)",
         bool(options.fused_loras) and bool(options.quantization)),
        ("loras: adapters compute in 8 bits with fp8_storage (allowed with it: fused_loras is not either, so none)",
         bool(options.loras) and has_fp8),
        ("step_cache: it decides from values at each step (allowed with compile 'whole': none; 'blocks' goes with it)",
         options.step_cache is not None and options.compile == "whole"),
    ]  # fmt: skip


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent isn't there
        return False


def cache_config(cache: StepCache) -> Any:
    """Return diffusers' configuration of a step cache."""
    diffusers: Any = importlib.import_module("diffusers")

    match cache:
        case FirstBlock():
            return diffusers.FirstBlockCacheConfig(threshold=cache.threshold)
        case TaylorSeer():
            return diffusers.TaylorSeerCacheConfig(**msgspec.structs.asdict(cache))
        case PyramidAttention():
            return diffusers.PyramidAttentionBroadcastConfig(**msgspec.structs.asdict(cache))
        case MagCache():
            return diffusers.MagCacheConfig(**msgspec.structs.asdict(cache) | {"mag_ratios": list(cache.mag_ratios)})
