"""The diffusion engine beside its families: batches, cancels, bad input, adapters, caches, parts, sleep."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)
import tiny_diffusion  # type: ignore[import-not-found] (put on the path above)
from drawn import inputs_of, pixels_in, run  # type: ignore[import-not-found] (put on the path above)

from adapters.diffusion import media
from adapters.diffusion.engine import Diffusers
from adapters.diffusion.joining import ModelCall
from adapters.diffusion.options import DiffusionOptions, conflicts
from adapters.diffusion.params import DiffusionParams
from adapters.diffusion.stages import DiffusersDecoder, DiffusersDenoiser, DiffusersEncoder
from omni_bus.core.pipeline import Pipeline
from omni_bus.engine import EngineRequest
from omni_bus.errors import BadInput, ConfigError, OmniBusError, StageFailed, StartFailed
from omni_bus.testing import StepDriver, build_engine, check_report, make_context, make_engine
from omni_bus.wire.frames import RouteEdge
from omni_bus.wire.payloads import Blob, Image, Latents, Text

diffusers: Any = tiny_diffusion.D

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # Of diffusers, transformers and torch, at work on models of this size.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CALL = {"width": 64, "height": 64, "num_inference_steps": 3, "guidance_scale": 2.0}
RED = ("a red cube", {"seed": 7})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a tiny pipeline, made when it is first asked for."""
    made: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            tiny_diffusion.lively(tiny_diffusion.PIPELINES[name].make()).save_pretrained(folder)
            made[name] = str(folder)
        return made[name]

    return of


@pytest.fixture(scope="module")
def engine(folders: Any) -> Any:
    engine = make_engine(Diffusers, {"model": folders("ZImagePipeline"), "call": CALL})
    yield engine
    engine.close()


def engine_of(folders: Any, name: str, options: dict[str, Any] | None = None, kind: Any = Diffusers) -> Any:
    sample = tiny_diffusion.PIPELINES[name]
    given = {"model": folders(name), "call": sample.call, "warm_up": False}
    return make_engine(kind, given | (options or {}))


# --- what stays -------------------------------------------------------------------------------------------


def num_tensors() -> int:
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("name", ["WanPipeline", "ZImagePipeline"])
def test_no_tensor_of_a_request_waits_for_the_collector(folders: Any, name: str) -> None:
    """Wherever it ends: what piles up until the collector comes by is a leak to who looks at the process."""
    engine = engine_of(folders, name, {"max_cached_prompts": 0})
    params = DiffusionParams(seed=1, num_inference_steps=2, num_previews=1, width=32, height=32)

    def leave_after(num_units: int) -> bool:
        """Return whether it was over by then."""
        engine.add(EngineRequest("a", params, frozenset(engine.emits)), {"prompt": [Text("a cube")]})
        for _ in range(num_units):
            engine.step(["a"])
        is_over = "a" not in engine._live
        engine.abort("a")
        return is_over

    try:
        assert leave_after(100)  # what models make when they first run, stays
        gc.collect()
        gc.disable()
        before, num_units, is_over = num_tensors(), 0, False
        while not is_over:
            is_over = leave_after(num_units)
            assert num_tensors() == before, f"left after {num_units} units"
            num_units += 1
    finally:
        gc.enable()
        engine.close()


# --- batches ------------------------------------------------------------------------------------------------


def test_requests_at_different_steps_share_the_models_calls(engine: Diffusers, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    together = ModelCall.run_together

    def counted(calls: list[ModelCall]) -> None:
        sizes.append(len(calls))
        together(calls)

    monkeypatch.setattr(ModelCall, "run_together", staticmethod(counted))
    steps = [3, 5, 4, 6]
    results = run(engine, *((f"cube {n}", {"seed": n, "num_inference_steps": n}) for n in steps))

    assert sum(sizes) == sum(steps)
    assert max(sizes) == 4
    assert len(sizes) <= sum(steps) / 2
    assert len({pixels_in(result).tobytes() for result in results}) == 4


def test_sizes_and_guidance_are_not_mixed_and_nobody_starves(engine: Diffusers) -> None:
    small = ("a cube", {"seed": 1, "width": 32, "height": 32})
    plain = ("a cube", {"seed": 1, "guidance_scale": 0.0})
    apart = [run(engine, request)[0] for request in (RED, small, plain)]
    mixed = run(engine, RED, small, plain)

    for left, right in zip(apart, mixed, strict=True):
        assert np.array_equal(pixels_in(left), pixels_in(right))


def test_higher_priority_is_done_first(engine: Diffusers) -> None:
    def request(name: str, priority: int) -> EngineRequest:
        params = DiffusionParams(seed=1, width=32 if priority else 64)
        return EngineRequest(name, params, frozenset({"image"}), priority=priority)

    engine.add(request("low", 0), {"prompt": [Text("a cube")]})
    engine.step(["low"])
    engine.add(request("high", 1), {"prompt": [Text("a cube")]})
    while "high" in engine._live:
        engine.step(["low", "high"])
    low = engine._live["low"]

    assert low.num_steps_done == 0
    engine.abort("low")


def test_same_prompt_is_encoded_once(engine: Diffusers) -> None:
    run(engine, RED)
    before = engine._prompts.num_hits
    run(engine, RED, ("a red cube", {"seed": 8}))

    assert engine._prompts.num_hits == before + 2


def test_pictures_of_one_prompt_come_one_by_one(engine: Diffusers) -> None:
    [result] = run(engine, ("a red cube", {"seed": 7, "num_images": 3}))

    assert pixels_in(result).shape == (3, 64, 64, 3)
    assert len({pixels.tobytes() for pixels in pixels_in(result)}) == 3


def test_previews_change_nothing_and_end_in_the_picture(engine: Diffusers) -> None:
    params = {"seed": 7, "num_inference_steps": 4}
    [plain] = run(engine, ("a red cube", params))
    [few] = run(engine, ("a red cube", params | {"num_previews": 2}))
    [all_steps] = run(engine, ("a red cube", params | {"num_previews": 100}))
    previews = [bytes(preview.data.view) for preview in all_steps.port("preview")]

    assert np.array_equal(pixels_in(plain), pixels_in(all_steps))
    assert len(few.port("preview")) == 2
    assert len(set(previews)) == len(previews) == 4
    assert previews[-1] == pixels_in(plain).tobytes()


def test_cancel_leaves_no_step_and_no_thread_behind(engine: Diffusers) -> None:
    driver = StepDriver(engine)
    ids = [driver.add({"prompt": [Text("a cube")]}, {"num_inference_steps": 1000}) for _ in range(engine.max_resident)]
    for _ in range(40):
        driver.step()
    for request in ids:
        driver.abort(request)

    assert engine._live == {}
    run(engine, RED)  # all threads are free again, or this would wait for ever


def test_as_many_as_a_step_takes_may_be_under_way(folders: Any) -> None:
    """Each needs a thread, whatever `max_resident` says."""
    engine = engine_of(folders, "ZImagePipeline", {"max_num_seqs": 4, "max_resident": 1})
    results = run(engine, *(("a cube", {"seed": n, "num_inference_steps": 6}) for n in range(4)))
    engine.close()

    assert all(result.is_finished for result in results)


def test_failure_of_one_leaves_the_others(engine: Diffusers, monkeypatch: pytest.MonkeyPatch) -> None:
    [alone] = run(engine, RED)
    decode = diffusers.AutoencoderKL.decode

    def fails_for_small(self: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
        if z.shape[-1] == 4:
            raise ValueError("no")
        return decode(self, z, *args, **kwargs)

    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", fails_for_small)
    driver = StepDriver(engine)
    good = driver.add({"prompt": [Text("a red cube")]}, {"seed": 7})
    bad = driver.add({"prompt": [Text("a red cube")]}, {"width": 32, "height": 32})
    driver.run(good, bad)

    assert isinstance(driver.results[bad].error, StageFailed)
    assert np.array_equal(pixels_in(driver.results[good]), pixels_in(alone))


def test_joint_call_that_fails_is_tried_one_by_one(engine: Diffusers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a batch doesn't fit into the accelerator's memory."""
    forward = diffusers.ZImageTransformer2DModel.forward
    apart = [pixels_in(run(engine, (f"cube {n}", {"seed": n}))[0]) for n in range(2)]

    def only_small(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if len(x) > 2:
            raise torch.OutOfMemoryError("too large")
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(diffusers.ZImageTransformer2DModel, "forward", only_small)
    together = run(engine, *((f"cube {n}", {"seed": n}) for n in range(2)))

    assert [np.array_equal(pixels_in(r), a) for r, a in zip(together, apart, strict=True)] == [True, True]


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "params", "field"),
    [
        (" \n", {}, "prompt"),
        ("x" * 600, {}, "prompt"),
        ("x", {"negative_prompt": "x" * 600}, "negative_prompt"),
        ("x", {"negative_prompt": "noise", "guidance_scale": 1.0}, "negative_prompt"),
        ("x", {"width": 100}, "width"),
        ("x", {"width": 16384, "height": 16384}, "width"),
        ("x", {"num_frames": 9}, "num_frames"),
        ("x", {"fps": 24.0}, "fps"),
        ("x", {"strength": 0.5}, "strength"),
        ("x", {"audio_length": 1.0}, "audio_length"),
        ("x", {"lora": {"name": "ink"}}, "lora"),
        ("x", {"extra": {"cfg_normalisation": True}}, "extra"),
        ("x", {"extra": {"output_type": "latent"}}, "extra"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    engine: Diffusers, words: str, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput, match=rf"^{field}: .*\((allowed|known): ") as caught:
        run(engine, (words, params))

    assert caught.value.field == field
    assert engine._live == {}


def test_extra_arguments_reach_the_call(engine: Diffusers) -> None:
    [plain] = run(engine, RED)
    [normalised] = run(engine, ("a red cube", {"seed": 7, "extra": {"cfg_normalization": True}}))

    assert not np.array_equal(pixels_in(plain), pixels_in(normalised))


def test_inputs_that_the_model_has_no_use_for_are_refused(engine: Diffusers) -> None:
    with pytest.raises(BadInput, match=r"^images: the model has no such setting"):
        run(engine, RED, inputs=inputs_of(["image"]))


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("ZImageInpaintPipeline", (), "images"),
        ("ZImageInpaintPipeline", ("image",), "mask"),
        ("WanVideoToVideoPipeline", (), "video"),
    ],
)
def test_media_that_the_model_begins_with_must_come(
    folders: Any, name: str, given: tuple[str, ...], field: str
) -> None:
    engine = engine_of(folders, name)
    with pytest.raises(BadInput, match=f"^{field}: none came"):
        run(engine, RED, inputs=inputs_of(given))
    twice = {"images": inputs_of(["image"])["images"] * 2} if "ZImage" in name else {}
    if twice:
        with pytest.raises(BadInput, match=r"^images: 2 came \(allowed: 1\)"):
            run(engine, RED, inputs=twice)
    engine.close()


def test_one_side_alone_keeps_the_limit_of_pixels(folders: Any) -> None:
    engine = make_engine(Diffusers, {"model": folders("ZImagePipeline"), "warm_up": False})
    for side in ("width", "height"):
        with pytest.raises(BadInput, match=rf"^{side}: .* came \(allowed: at most 4194304 pixels\)"):
            run(engine, ("x", {side: 16384}))
    engine.close()


@pytest.mark.parametrize("name", ["ZImageImg2ImgPipeline", "StableDiffusionInpaintPipeline"])
def test_picture_to_begin_with_says_how_large_the_result_is(folders: Any, name: str) -> None:
    call = {key: value for key, value in tiny_diffusion.PIPELINES[name].call.items() if key not in ("width", "height")}
    engine = engine_of(folders, name, {"call": call})
    picture = Image(70, 101, 3, Blob(bytes(range(250)) * 84 + bytes(210)))
    inputs: Any = {"images": [picture]}
    if "Inpaint" in name:
        inputs["mask"] = [Image(70, 101, 1, Blob(b"\xff" * 7070))]
    [follows] = run(engine, RED, inputs=inputs)
    [told] = run(engine, ("a red cube", {"seed": 7, "width": 64, "height": 32}), inputs=inputs)

    height, width = pixels_in(follows).shape[-3:-1]
    assert (70 - height, 101 - width) < (16, 16)
    assert height % 8 == width % 8 == 0
    assert pixels_in(told).shape[-3:] == (32, 64, 3)
    engine.close()


def test_empty_picture_is_refused(folders: Any) -> None:
    engine = engine_of(folders, "ZImageImg2ImgPipeline")
    with pytest.raises(BadInput, match=r"^images: 0×0 came"):
        run(engine, RED, inputs={"images": [Image(0, 0, 3, Blob(b""))]})
    engine.close()


def test_edge_that_would_carry_nothing_is_refused_at_the_start(folders: Any) -> None:
    edges = (RouteEdge("test", "video", "out", "video", "video", 4, 1 << 20),)
    options = {"model": folders("ZImagePipeline"), "call": CALL}
    engine = build_engine(Diffusers, options)
    context = make_context()
    engine.context = type(context)(
        context.stage, 0, 1, context.cache_dir, pipelines={"clips": Pipeline("clips", "clips", (), edges)}
    )
    with pytest.raises(StartFailed, match=r"'test.video' carries nothing: ZImagePipeline makes image"):
        engine.load(check_report)


def test_folder_without_a_pipeline_is_found_by_the_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_index"):
        make_engine(Diffusers, {"model": str(tmp_path)})


def test_unknown_argument_of_the_call_is_refused_at_the_start(folders: Any) -> None:
    with pytest.raises(StartFailed, match=r"unknown argument 'guidance_scal'; did you mean 'guidance_scale'"):
        make_engine(Diffusers, {"model": folders("ZImagePipeline"), "call": {"guidance_scal": 2.0}})


def test_pixels_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(StageFailed, match="finite"):
        media.quantised(torch.full((3, 2, 2), float("nan")))


# --- adapters, caches, options ------------------------------------------------------------------------------


def test_adapters_are_a_requests_own(folders: Any, tmp_path: Path) -> None:
    """Plain requests beside those with an adapter are what they are without any, and two scales are two pictures."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folders("ZImagePipeline"))
    peft = pytest.importorskip("peft")
    pipeline.transformer.add_adapter(
        peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"]), adapter_name="ink"
    )
    state = peft.get_peft_model_state_dict(pipeline.transformer, adapter_name="ink")
    diffusers.ZImagePipeline.save_lora_weights(tmp_path, transformer_lora_layers=state)
    direct = diffusers.DiffusionPipeline.from_pretrained(folders("ZImagePipeline"))
    direct.set_progress_bar_config(disable=True)
    direct.load_lora_weights(tmp_path, adapter_name="ink")
    direct.set_adapters(["ink"], [0.7])
    expected = np.asarray(direct("a red cube", generator=torch.Generator().manual_seed(7), **CALL).images[0])

    [plain] = run(plain_engine := engine_of(folders, "ZImagePipeline"), RED)
    plain_engine.close()
    engine = engine_of(folders, "ZImagePipeline", {"loras": {"ink": str(tmp_path)}})
    inked = {"seed": 7, "lora": {"name": "ink", "scale": 0.7}}
    results = run(engine, RED, ("a red cube", inked), ("a red cube", inked | {"lora": {"name": "ink"}}))
    with pytest.raises(BadInput, match=r"^lora: unknown adapter 'inc'; did you mean 'ink'"):
        run(engine, ("a red cube", {"lora": {"name": "inc"}}))
    engine.close()
    fused = engine_of(folders, "ZImagePipeline", {"fused_loras": [{"path": str(tmp_path), "scale": 0.7}]})
    [always] = run(fused, RED)
    fused.close()

    assert np.array_equal(pixels_in(results[0]), pixels_in(plain))
    assert np.array_equal(pixels_in(results[1])[0], expected)
    assert not np.array_equal(pixels_in(results[1]), pixels_in(results[0]))
    assert not np.array_equal(pixels_in(results[2]), pixels_in(results[1]))
    assert np.abs(pixels_in(always)[0].astype(int) - expected).max() <= 1


def test_step_cache_has_a_history_for_each_request(folders: Any) -> None:
    """In company as alone, and as the pipeline with that cache; nothing of a request is kept."""
    name, cache = "WanPipeline", {"kind": "first_block", "threshold": 0.3}
    direct = diffusers.DiffusionPipeline.from_pretrained(folders(name))
    direct.set_progress_bar_config(disable=True)
    direct.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.3))
    call = tiny_diffusion.PIPELINES[name].call
    frames = direct(
        "a red cube", generator=torch.Generator().manual_seed(7), **call | {"num_inference_steps": 6}
    ).frames
    expected = (np.asarray(frames[0]) * 255).round().astype(np.uint8)

    engine = engine_of(folders, name, {"step_cache": cache})
    params = {"seed": 7, "num_inference_steps": 6}
    left, right = run(engine, ("a red cube", params), ("a whale", params | {"seed": 8}))
    [right_alone] = run(engine, ("a whale", params | {"seed": 8}))
    managers = [
        hook.state_manager
        for module in engine._pipeline.transformer.modules()
        if (registry := getattr(module, "_diffusers_hook", None)) is not None
        for hook in registry.hooks.values()
        if hasattr(hook, "state_manager")
    ]
    engine.close()

    assert np.array_equal(pixels_in(left), expected)
    assert np.array_equal(pixels_in(right), pixels_in(right_alone))
    assert managers
    assert all(not manager._state_cache for manager in managers)


@pytest.mark.parametrize(
    "options",
    [
        {"vae_tiling": True, "vae_slicing": True},
        {"attention_backend": "_native_math"},
        {"quantization": {"transformer": "fp8_storage"}},
        {"step_cache": {"kind": "taylor_seer", "cache_interval": 2, "disable_cache_before_step": 1}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_are_diffusers_own(folders: Any, options: dict[str, Any]) -> None:
    engine = engine_of(folders, "WanPipeline", options)
    [result] = run(engine, RED)
    engine.close()

    assert pixels_in(result).std() > 5


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"offload": "model", "device": "cpu"}, "offload"),
        ({"quantization": {"transformer": "bitsandbytes_4bit"}, "device": "cpu"}, "quantization"),
        ({"compile": "blocks", "offload": "group"}, "compile"),
        ({"compile": "whole", "loras": {"a": "b"}}, "compile"),
        ({"compile": "whole", "step_cache": {"kind": "first_block"}}, "step_cache"),
        ({"quantization": {"vae": "fp8_storage"}, "offload": "sequential"}, "quantization"),
        ({"quantization": {"transformer": "fp8_storage"}, "loras": {"a": "b"}}, "loras"),
        ({"quantization": {"transformer": "quanto_int8"}, "fused_loras": [{"path": "b"}]}, "fused_loras"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^{key}: .*\(allowed"):
        build_engine(Diffusers, {"model": "some/name"} | options)


def test_no_option_conflicts_with_the_defaults() -> None:
    assert [reason for reason, is_so in conflicts(DiffusionOptions(model="some/name")) if is_so] == []


def test_option_that_the_model_cannot_do_is_named(folders: Any) -> None:
    with pytest.raises(StartFailed, match=r"^attention_backend: the model can't do it"):
        engine_of(folders, "ZImagePipeline", {"attention_backend": "no such thing"})


# --- video, sound, parts, sleep -----------------------------------------------------------------------------


def test_frames_leave_while_the_rest_is_decoded(folders: Any) -> None:
    """Each group of frames is an event of a step of its own, and together they are the whole decode."""
    engine = engine_of(folders, "WanPipeline")
    driver = StepDriver(engine)
    request = driver.add({"prompt": [Text("a red cube")]}, {"seed": 7, "fps": 12.5})
    steps_with_frames = 0
    while driver.live:
        steps_with_frames += any(getattr(event, "port", "") == "video" for event in driver.step())
    pieces = driver.results[request].port("video")
    engine._work.publishes_frames = False
    [whole] = run(engine, RED)
    engine.close()

    assert [(piece.first_frame, piece.num_frames) for piece in pieces] == [(0, 1), (1, 4), (5, 4)]
    assert steps_with_frames == 3
    assert {(piece.time_base_num, piece.time_base_den) for piece in pieces} == {(2, 25)}
    assert np.array_equal(pixels_in(driver.results[request]), pixels_in(whole))


def test_sound_is_the_pipelines_own(tmp_path: Path) -> None:
    folder = tiny.longcat_audio(tmp_path)
    engine = make_engine(Diffusers, {"model": folder, "call": {"num_inference_steps": 3}})
    [result] = run(engine, ("rain", {"seed": 7, "audio_length": 1.5}))
    with pytest.raises(BadInput, match=r"^audio_start: .*\(allowed: 0\)"):
        run(engine, ("rain", {"audio_length": 0.5, "audio_start": 0.1}))
    with pytest.raises(BadInput, match=r"^audio_length: .*\(allowed: at most 30 s\)"):
        run(engine, ("rain", {"audio_length": 31.0}))
    engine.close()
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    sound = pipeline("rain", generator=torch.Generator().manual_seed(7), audio_duration_s=1.5, num_inference_steps=3)
    expected = (np.clip(np.asarray(sound.audios[0]).T, -1, 1) * 32767).round().astype("<i2")

    assert result.pcm == expected.tobytes()
    assert [piece.num_frames for piece in result.port("audio")] == [8000, 4000]


def test_sounds_at_different_steps_share_the_models_calls(tmp_path: Path) -> None:
    folder = tiny.stable_audio(tmp_path)
    engine = make_engine(Diffusers, {"model": folder, "call": {"num_inference_steps": 3}, "warm_up": False})
    requests = [("rain", {"seed": 1}), ("wind", {"seed": 2, "num_inference_steps": 5})]
    apart = [np.frombuffer(run(engine, request)[0].pcm, "<i2").astype(int) for request in requests]
    together = [np.frombuffer(result.pcm, "<i2").astype(int) for result in run(engine, *requests)]
    engine.close()

    assert max(np.abs(a - b).max() for a, b in zip(apart, together, strict=True)) <= 1
    assert min(sound.std() for sound in apart) > 1000


def test_video_and_its_sound_come_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tiny_diffusion.lively(tiny_diffusion.ltx2()).save_pretrained(tmp_path)
    call = {"width": 32, "height": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
    engine = make_engine(Diffusers, {"model": str(tmp_path), "call": call, "warm_up": False})
    [result] = run(engine, RED)
    engine.close()
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline("a red cube", generator=torch.Generator().manual_seed(7), output_type="np", **call)
    sound = (output.audio[0].float().clamp(-1, 1).T * 32767).round().numpy().astype("<i2")

    assert np.array_equal(pixels_in(result), (output.frames[0] * 255).round().astype(np.uint8))
    assert result.pcm == sound.tobytes()
    assert (result.port("audio")[0].rate_hz, result.port("audio")[0].channels) == (16_000, 2)
    assert sound.std() > 0


@pytest.mark.parametrize(
    "name",
    ["QwenImagePipeline", "StableDiffusionXLPipeline", "WanPipeline", "LTXPipeline"],
)
def test_three_stages_draw_what_one_does(folders: Any, name: str) -> None:
    """Embeddings and latents as payloads, each part of the weights in one stage only."""
    encoder, denoiser, decoder, whole = (
        engine_of(folders, name, kind=kind)
        for kind in (DiffusersEncoder, DiffusersDenoiser, DiffusersDecoder, Diffusers)
    )
    [expected] = run(whole, RED)
    [encoded] = run(encoder, ("a red cube", {}))
    driver = StepDriver(denoiser)
    ports = {port: encoded.port(port) for port in ("conditioning", "embeddings")}
    [denoised] = driver.run(driver.add(ports, {"seed": 7}))
    driver = StepDriver(decoder)
    [decoded] = driver.run(driver.add({"latents": denoised.port("latents")}))
    weights = [
        sum(
            p.numel()
            for part in e._pipeline.components.values()
            if isinstance(part, torch.nn.Module)
            for p in part.parameters()
        )
        for e in (encoder, denoiser, decoder, whole)
    ]
    for engine in (encoder, denoiser, decoder, whole):
        engine.close()

    assert np.array_equal(pixels_in(decoded), pixels_in(expected))
    assert sum(weights[:3]) == weights[3]


def test_encoder_and_denoiser_must_agree(folders: Any) -> None:
    encoder = engine_of(folders, "ZImagePipeline", kind=DiffusersEncoder)
    denoiser = engine_of(folders, "ZImagePipeline", kind=DiffusersDenoiser)
    [encoded] = run(encoder, ("a red cube", {"guidance_scale": 0.0}))
    driver = StepDriver(denoiser)
    [result] = driver.run(driver.add({port: encoded.port(port) for port in ("conditioning", "embeddings")}))
    encoder.close()
    denoiser.close()

    assert isinstance(result.error, BadInput)
    assert result.error.field == "guidance_scale"


def test_latents_of_another_model_are_refused(folders: Any) -> None:
    decoder = engine_of(folders, "ZImagePipeline", kind=DiffusersDecoder)
    driver = StepDriver(decoder)
    for shape in ((1, 4, 8, 8), (1, 16, 0, 8), (16,)):
        data = Blob(bytes(4 * int(np.prod(shape))))
        with pytest.raises(BadInput, match=r"^latents: "):
            driver.add({"latents": [Latents(0, 0, "float32", shape, data)]})
    decoder.close()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_and_wake_draws_the_same(folders: Any, level: int) -> None:
    engine = engine_of(folders, "ZImagePipeline")
    [before] = run(engine, RED)
    weight = weakref.ref(engine._pipeline.transformer)
    engine.sleep(level)
    gc.collect()

    assert (weight() is None) == (level == 2)
    engine.wake(check_report)
    [after] = run(engine, RED)
    engine.close()
    assert np.array_equal(pixels_in(before), pixels_in(after))


def test_load_refuses_a_broken_checkpoint(folders: Any, tmp_path: Path) -> None:
    source = Path(folders("ZImagePipeline"))
    for path in source.rglob("*"):
        if path.is_file():
            copied = tmp_path / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            copied.write_bytes(data[:1000] if path.parent.name == "vae" and path.suffix == ".safetensors" else data)

    with pytest.raises(OmniBusError, match=r"^model: "):
        make_engine(Diffusers, {"model": str(tmp_path)})
