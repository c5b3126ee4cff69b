"""Which of the shipped deployments serves a model, by what its checkpoint says of itself.

One rule for each pipeline; the files are in ``configs``. Third parties add theirs as entry points of the group
``omni_bus.models``, each a `ModelRule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters import smollm2
from adapters.diffusion.families import Family
from omni_bus.errors import BadInput
from omni_bus.resolution import INDEX, ModelRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.resolution import Checkpoint

ENCODERS = frozenset(
    {
        "BertModel",
        "DistilBertModel",
        "ModernBertModel",
        "MPNetModel",
        "NomicBertModel",
        "RobertaModel",
        "XLMRobertaModel",
    }
)
"""Architectures whose only use here is a text's vector."""

PICTURES = frozenset(
    {
        *("AuraFlowPipeline", "ChromaPipeline", "Lumina2Pipeline", "PixArtSigmaPipeline", "PRXPixelPipeline"),
        *("SanaPipeline", "FluxFillPipeline", "FluxKontextPipeline"),
        *(
            f"{name}{kind}Pipeline"
            for name in ("Flux", "QwenImage", "StableDiffusion", "StableDiffusion3", "StableDiffusionXL", "ZImage")
            for kind in ("", "Img2Img", "Inpaint")
        ),
    }
)
"""Diffusers' pipelines that make pictures and were run here."""

CLIPS = frozenset(
    {
        *("CogVideoXPipeline", "HunyuanVideoPipeline", "LTXPipeline", "LTX2Pipeline", "MochiPipeline", "WanPipeline"),
        *("CogVideoXVideoToVideoPipeline", "LTXImageToVideoPipeline", "WanImageToVideoPipeline"),
        "WanVideoToVideoPipeline",
    }
)
"""Those that make videos."""


def is_embedding(checkpoint: Checkpoint) -> bool:
    """Whether it was made for vectors: an encoder, or one that sentence-transformers saved."""
    return checkpoint.file("modules.json") is not None or not ENCODERS.isdisjoint(checkpoint.architectures)


def embedding_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return how vectors are made, as sentence-transformers writes it down.

    Raises:
        BadInput: the checkpoint wants a pooling that the adapter doesn't have.
    """
    said = checkpoint.table("1_Pooling/config.json")
    if not said:
        return {}
    modes = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "first"}
    wanted = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    if len(wanted) != 1 or wanted[0] not in modes:
        raise BadInput(
            f"model: '{checkpoint.model}' pools by {', '.join(wanted) or 'nothing'} (allowed: {', '.join(modes)})",
            field="model",
        )
    modules = checkpoint.file("modules.json") or []
    is_normalised = any(
        isinstance(module, dict) and str(module.get("type")).endswith("Normalize") for module in modules
    )
    return {"stages": {"embed": {"pooling": modes[wanted[0]], "is_normalised": is_normalised}}}


def sees(checkpoint: Checkpoint) -> bool:
    """Whether a model that writes text looks at pictures."""
    return "vision_config" in checkpoint.config


def speech_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return where the codec is: in a CSM's own folder, else where the processor says.

    Raises:
        BadInput: it says nothing.
    """
    if checkpoint.model_type == "csm":
        codec: Any = checkpoint.model
    else:
        said = checkpoint.table("processor_config.json").get("audio_tokenizer")
        codec = said.get("audio_tokenizer_name_or_path") if isinstance(said, dict) else None
        if not isinstance(codec, str) or not codec:
            raise BadInput(
                f"model: '{checkpoint.model}' names no codec (processor_config.json, audio_tokenizer)", field="model"
            )
    return {"stages": {"codec": {"model": codec}}}


def speaks(checkpoint: Checkpoint) -> bool:
    """Whether an omni model has a talker: some are published with the thinker alone."""
    return checkpoint.config.get("enable_audio_output") is not False


def diffusion_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the edges of what a pipeline of diffusers begins with besides a prompt, and of the sound of its videos.

    PRX in pixels has shapes to choose from at one size only, and refuses to choose at others.
    """
    family = Family(checkpoint.diffusers_class)
    is_video = "video" in family.media
    name = "video" if is_video else "picture"
    inputs = {"images": family.takes_image, "mask": family.needs_mask, "video": family.needs_video}
    ports = [port for port, is_needed in inputs.items() if is_needed]
    outputs = [*sorted(family.media, reverse=True), "progress", *(() if is_video else ("preview",))]
    edges = [f"in.{port} -> {name}.{port}" for port in ("prompt", *ports)]
    found: dict[str, Any] = {
        "pipelines": {name: {"edges": edges + [f"{name}.{port} -> out.{port}" for port in outputs]}}
    }
    if family.class_name == "PRXPixelPipeline" and checkpoint.table(INDEX).get("default_sample_size", 1024) != 1024:
        found["stages"] = {name: {"call": {"use_resolution_binning": False}}}
    return found


RULES: tuple[ModelRule, ...] = (
    ModelRule(
        name="transformers-chat",
        config="transformers_chat",
        reason="text chat on transformers",
        stages=("llm",),
        pipeline="chat",
        names=frozenset({smollm2.NAME}),
        architectures=frozenset({"*ForCausalLM", "*LMHeadModel"}),
    ),
    ModelRule(
        name="vllm-chat",
        config="vllm_chat",
        reason="text chat on vLLM",
        stages=("llm",),
        pipeline="chat",
        architectures=frozenset({"*ForCausalLM", "*LMHeadModel"}),
        priority=-1,
    ),
    ModelRule(
        name="transformers-image-text",
        config="transformers_vlm",
        reason="chat about pictures on transformers",
        stages=("vlm",),
        pipeline="look",
        architectures=frozenset({"*ForConditionalGeneration", "*ForCausalLM"}),
        predicate=sees,
        priority=1,
    ),
    ModelRule(
        name="transformers-embedding",
        config="transformers_embedding",
        reason="vectors of texts on transformers",
        stages=("embed",),
        pipeline="embed",
        architectures=ENCODERS | {"*ForCausalLM", "*Model"},
        predicate=is_embedding,
        settings=embedding_settings,
        priority=2,
    ),
    ModelRule(
        name="transformers-speech",
        config="transformers_speech",
        reason="a speech language model and its codec, a stage each",
        stages=("lm",),
        pipeline="speech",
        model_types=frozenset({"csm", "dia", "higgs_audio_v2"}),
        settings=speech_settings,
    ),
    ModelRule(
        name="transformers-vits",
        config="transformers_vits",
        reason="a VITS voice (MMS, VITS) on transformers",
        stages=("voice",),
        pipeline="speech",
        model_types=frozenset({"vits"}),
    ),
    ModelRule(
        name="transformers-whisper",
        config="transformers_whisper",
        reason="transcription by a Whisper on transformers",
        stages=("asr",),
        pipeline="transcription",
        model_types=frozenset({"whisper"}),
    ),
    ModelRule(
        name="moshi",
        config="moshi",
        reason="a conversation in which both sides may speak at once",
        stages=("moshi",),
        pipeline="moshi",
        model_types=frozenset({"moshi"}),
    ),
    ModelRule(
        name="qwen2.5-omni",
        config="qwen2_5_omni",
        reason="text and speech together, by a thinker, a talker and a vocoder",
        stages=("thinker", "talker", "token2wav"),
        pipeline="omni",
        model_types=frozenset({"qwen2_5_omni"}),
        predicate=speaks,
    ),
    ModelRule(
        name="qwen3-omni",
        config="qwen3_omni",
        reason="text and speech together, by a thinker, a talker and a vocoder",
        stages=("thinker", "talker", "code2wav"),
        pipeline="omni",
        model_types=frozenset({"qwen3_omni_moe"}),
        predicate=speaks,
    ),
    ModelRule(
        name="diffusers-image",
        config="diffusers_image",
        reason="pictures on diffusers",
        stages=("picture",),
        pipeline="picture",
        diffusers_classes=PICTURES,
        settings=diffusion_settings,
    ),
    ModelRule(
        name="diffusers-video",
        config="video",
        reason="videos on diffusers",
        stages=("video",),
        pipeline="video",
        diffusers_classes=CLIPS,
        settings=diffusion_settings,
    ),
    ModelRule(
        name="diffusers-audio",
        config="diffusers_audio",
        reason="sound and music from text on diffusers",
        stages=("sound",),
        pipeline="sound",
        diffusers_classes=frozenset(
            {
                "AceStepPipeline",
                "AudioLDM2Pipeline",
                "AudioLDMPipeline",
                "LongCatAudioDiTPipeline",
                "MusicLDMPipeline",
                "StableAudioPipeline",
            }
        ),
    ),
)
