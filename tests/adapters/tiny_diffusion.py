"""Tiny diffusers pipelines with random weights, of the true classes: one line of `PIPELINES` each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)

T: Any = transformers
D: Any = importlib.import_module("diffusers")

SIDE = {"height": 64, "width": 64}
STEPS = {"num_inference_steps": 3}
PICTURE = SIDE | STEPS | {"guidance_scale": 2.0}
CLIP = PICTURE | {"num_frames": 9}


class Sample(msgspec.Struct, frozen=True):
    """How a pipeline is made, and a small call of it."""

    make: Callable[[], Any]
    call: dict[str, Any]
    inputs: tuple[str, ...] = ()
    """What it begins with: image, mask, video."""


def lively(pipeline: Any) -> Any:
    """Draw all weights anew, so that the output depends on the input."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            tiny.enliven(part, gain=0.7, head_gain=0.7)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# --- parts --------------------------------------------------------------------------------------------------


def tokens(longest: int = 64, **arguments: Any) -> Any:
    return tiny.byte_tokenizer(
        ("<pad>", "</s>", "<unk>", "<bos>"), "</s>", padding_side="right", model_max_length=longest, **arguments
    )


def t5(kind: str = "T5") -> Any:
    config = getattr(T, f"{kind}Config")(
        vocab_size=320, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return getattr(T, f"{kind}EncoderModel")(config)


def clip(*, has_projection: bool = False, longest: int = 64) -> Any:
    config = T.CLIPTextConfig(
        vocab_size=320, hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2,
        projection_dim=32, max_position_embeddings=longest, bos_token_id=3, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return T.CLIPTextModelWithProjection(config) if has_projection else T.CLIPTextModel(config)


def gemma2() -> Any:
    return T.Gemma2Model(T.Gemma2Config(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
    ))  # fmt: skip


def image_vae(channels: int, scale: int = 8, **arguments: Any) -> Any:
    blocks = {2: 2, 4: 3, 8: 4}[scale]
    return D.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * blocks, up_block_types=["UpDecoderBlock2D"] * blocks,
        block_out_channels=[8] * blocks, layers_per_block=1, norm_num_groups=4, latent_channels=channels,
        sample_size=64, **arguments,
    )  # fmt: skip


def plain_vae(channels: int) -> Any:
    return image_vae(
        channels, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159
    )


def flow(**arguments: Any) -> Any:
    return D.FlowMatchEulerDiscreteScheduler(shift=3.0, **arguments)


# --- pictures -----------------------------------------------------------------------------------------------


def zimage(name: str = "ZImagePipeline") -> Any:
    dit = D.ZImageTransformer2DModel(
        in_channels=16, dim=64, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=64,
        axes_dims=[8, 12, 12], axes_lens=[1024, 64, 64],
    )  # fmt: skip
    encoder = T.Qwen3Model(T.Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
    ))  # fmt: skip
    tokenizer = tokens(512)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    return getattr(D, name)(
        scheduler=flow(), vae=plain_vae(16), text_encoder=encoder, tokenizer=tokenizer, transformer=dit
    )


def qwen_image(name: str = "QwenImagePipeline") -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
    encoder = T.Qwen2_5_VLForConditionalGeneration(T.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope,
            "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
        image_token_id=2, video_token_id=2, vision_start_token_id=3, vision_end_token_id=3,
    ))  # fmt: skip
    dit = D.QwenImageTransformer2DModel(
        patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=64, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    vae = D.AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return getattr(D, name)(
        scheduler=flow(use_dynamic_shifting=True), vae=vae, text_encoder=encoder, tokenizer=tokens(1024),
        transformer=dit,
    )  # fmt: skip


def flux(name: str = "FluxPipeline", in_channels: int = 16) -> Any:
    dit = D.FluxTransformer2DModel(
        patch_size=1, in_channels=in_channels, out_channels=16, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return getattr(D, name)(
        scheduler=flow(use_dynamic_shifting=True), vae=plain_vae(4), text_encoder=clip(), tokenizer=tokens(),
        text_encoder_2=t5(), tokenizer_2=tokens(), transformer=dit,
    )  # fmt: skip


def chroma() -> Any:
    dit = D.ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1,
    )  # fmt: skip
    return D.ChromaPipeline(scheduler=flow(), vae=plain_vae(4), text_encoder=t5(), tokenizer=tokens(), transformer=dit)


def sd3(name: str = "StableDiffusion3Pipeline") -> Any:
    dit = D.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=64, caption_projection_dim=32, pooled_projection_dim=64,
    )  # fmt: skip
    text = {"text_encoder": clip(has_projection=True), "text_encoder_2": clip(has_projection=True)}
    encoder = T.T5EncoderModel(T.T5Config(vocab_size=320, d_model=64, d_kv=8, d_ff=64, num_layers=1, num_heads=4))
    return getattr(D, name)(
        scheduler=flow(), vae=plain_vae(16), **text, text_encoder_3=encoder, tokenizer=tokens(), tokenizer_2=tokens(),
        tokenizer_3=tokens(), transformer=dit,
    )  # fmt: skip


def unet(in_channels: int = 4, **arguments: Any) -> Any:
    return D.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, in_channels=in_channels, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **{"cross_attention_dim": 32, "attention_head_dim": 8} | arguments,
    )  # fmt: skip


def noise_steps() -> Any:
    return D.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)


def sd(name: str = "StableDiffusionPipeline") -> Any:
    return getattr(D, name)(
        scheduler=noise_steps(), vae=image_vae(4), text_encoder=clip(), tokenizer=tokens(), unet=unet(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sdxl(name: str = "StableDiffusionXLPipeline") -> Any:
    model = unet(
        addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80, cross_attention_dim=64, use_linear_projection=True,
        attention_head_dim=(2, 4),
    )  # fmt: skip
    scheduler = D.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return getattr(D, name)(
        scheduler=scheduler, vae=image_vae(4), text_encoder=clip(), tokenizer=tokens(),
        text_encoder_2=clip(has_projection=True), tokenizer_2=tokens(), unet=model, add_watermarker=False,
    )  # fmt: skip


def prx_pixel() -> Any:
    encoder = T.Qwen3Model(T.Qwen3Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    ))  # fmt: skip
    dit = D.PRXTransformer2DModel(
        in_channels=3, patch_size=4, context_in_dim=32, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2,
        axes_dim=[8, 8],
    )  # fmt: skip
    return D.PRXPixelPipeline(
        transformer=dit, scheduler=flow(), text_encoder=encoder, tokenizer=tokens(), default_sample_size=64,
        prompt_max_tokens=32,
    )  # fmt: skip


def pixart() -> Any:
    dit = D.PixArtTransformer2DModel(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=3, caption_channels=32,
        in_channels=4, cross_attention_dim=24, out_channels=8, norm_type="ada_norm_single",
        use_additional_conditions=False,
    )  # fmt: skip
    return D.PixArtSigmaPipeline(
        tokenizer=tokens(), text_encoder=t5(), vae=image_vae(4), transformer=dit, scheduler=noise_steps()
    )


def sana() -> Any:
    dit = D.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=32,
        sample_size=32,
    )  # fmt: skip
    vae = D.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=[1, 1], downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41,
    )  # fmt: skip
    return D.SanaPipeline(tokenizer=tokens(2048), text_encoder=gemma2(), vae=vae, transformer=dit, scheduler=flow())


def lumina2() -> Any:
    dit = D.Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, norm_eps=1e-5, scaling_factor=1.0,
        axes_dim_rope=(4, 2, 2), axes_lens=(512, 512, 512), cap_feat_dim=32,
    )  # fmt: skip
    return D.Lumina2Pipeline(
        transformer=dit, scheduler=flow(), vae=plain_vae(4), text_encoder=gemma2(), tokenizer=tokens(512)
    )


def aura_flow() -> Any:
    dit = D.AuraFlowTransformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, out_channels=4,
        pos_embed_max_size=256,
    )  # fmt: skip
    return D.AuraFlowPipeline(
        tokenizer=tokens(), text_encoder=t5("UMT5"), vae=image_vae(4), transformer=dit, scheduler=flow()
    )


# --- video and sound ----------------------------------------------------------------------------------------


def wan(name: str = "WanPipeline") -> Any:
    dit = D.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=32, freq_dim=32,
        ffn_dim=48, num_layers=2,
    )  # fmt: skip
    vae = D.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return getattr(D, name)(tokenizer=tokens(512), text_encoder=t5("UMT5"), vae=vae, scheduler=flow(), transformer=dit)


def ltx(name: str = "LTXPipeline") -> Any:
    dit = D.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=4, attention_head_dim=8,
        cross_attention_dim=32, num_layers=1, caption_channels=32,
    )  # fmt: skip
    vae = D.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1,) * 4,
        timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    return getattr(D, name)(scheduler=flow(), vae=vae, text_encoder=t5(), tokenizer=tokens(), transformer=dit)


def cogvideox(name: str = "CogVideoXPipeline") -> Any:
    dit = D.CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=32, num_layers=1, sample_width=8, sample_height=8, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=16,
    )  # fmt: skip
    vae = D.AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, down_block_types=("CogVideoXDownBlock3D",) * 4, layers_per_block=1,
        up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8), latent_channels=4,
        norm_num_groups=2, temporal_compression_ratio=4,
    )  # fmt: skip
    return getattr(D, name)(
        tokenizer=tokens(16), text_encoder=t5(), vae=vae, transformer=dit, scheduler=D.CogVideoXDDIMScheduler()
    )


def hunyuan_video() -> Any:
    dit = D.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
        pooled_projection_dim=32, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    vae = D.AutoencoderKLHunyuanVideo(
        in_channels=3, out_channels=3, latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, act_fn="silu", norm_num_groups=4, scaling_factor=0.476986,
        spatial_compression_ratio=8, temporal_compression_ratio=4, mid_block_add_attention=True,
    )  # fmt: skip
    llama = T.LlamaModel(T.LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=512, pad_token_id=0,
    ))  # fmt: skip
    return D.HunyuanVideoPipeline(
        text_encoder=llama, tokenizer=tokens(512), text_encoder_2=clip(longest=77), tokenizer_2=tokens(77),
        transformer=dit,
        vae=vae, scheduler=flow(),
    )  # fmt: skip


def mochi() -> Any:
    dit = D.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=12, qk_norm="rms_norm", text_embed_dim=32, time_embed_dim=4, activation_fn="swiglu",
        max_sequence_length=16,
    )  # fmt: skip
    vae = D.AutoencoderKLMochi(
        latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip
    return D.MochiPipeline(
        scheduler=D.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), vae=vae, text_encoder=t5(), tokenizer=tokens(),
        transformer=dit,
    )  # fmt: skip


def ltx2() -> Any:
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    text = {
        "vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 1024,
        "pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 1, "sliding_window": 64,
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    encoder = T.Gemma3ForConditionalGeneration(T.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=2, boi_token_index=2, eoi_token_index=2,
        mm_tokens_per_image=1,
    ))  # fmt: skip
    dit = D.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=2, caption_channels=16, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=3, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8, video_connector_num_layers=1,
        video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32, rope_double_precision=False,
        rope_type="split",
    )  # fmt: skip
    vae = D.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,), layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, False),
        downsample_type=("spatial",), upsample_residual=(False,), upsample_factor=(1,),
        upsample_type=("spatiotemporal",), patch_size=1,
    )  # fmt: skip
    sound_vae = D.AutoencoderKLLTX2Audio(
        base_channels=8, output_channels=2, ch_mult=(1, 1, 1), num_res_blocks=1, in_channels=2, resolution=32,
        latent_channels=2, norm_type="pixel", causality_axis="height", sample_rate=16000, mel_hop_length=160,
        mel_bins=16,
    )  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=32, hidden_channels=32, out_channels=2, upsample_kernel_sizes=[11, 8, 8, 4],
        upsample_factors=[5, 4, 4, 2], resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )  # fmt: skip
    return D.LTX2Pipeline(
        scheduler=flow(), vae=vae, audio_vae=sound_vae, text_encoder=encoder, tokenizer=tokens(1024),
        connectors=connectors, transformer=dit, vocoder=vocoder,
    )  # fmt: skip


IMAGE, MASKED, VIDEO = ("image",), ("image", "mask"), ("video",)
FROM_PICTURE = STEPS | {"guidance_scale": 2.0, "strength": 0.8}
QWEN = SIDE | STEPS | {"true_cfg_scale": 2.0, "negative_prompt": " "}
SHORT = {"max_sequence_length": 48}
WITHOUT_BINS = {"use_resolution_binning": False}

PIPELINES: dict[str, Sample] = {
    "ZImagePipeline": Sample(zimage, PICTURE),
    "ZImageImg2ImgPipeline": Sample(lambda: zimage("ZImageImg2ImgPipeline"), SIDE | FROM_PICTURE, IMAGE),
    "ZImageInpaintPipeline": Sample(lambda: zimage("ZImageInpaintPipeline"), SIDE | FROM_PICTURE, MASKED),
    "QwenImagePipeline": Sample(qwen_image, QWEN),
    "QwenImageImg2ImgPipeline": Sample(lambda: qwen_image("QwenImageImg2ImgPipeline"), QWEN | {"strength": 0.8}, IMAGE),
    "QwenImageInpaintPipeline": Sample(
        lambda: qwen_image("QwenImageInpaintPipeline"), QWEN | {"strength": 0.8}, MASKED
    ),
    "FluxPipeline": Sample(flux, PICTURE | SHORT),
    "FluxImg2ImgPipeline": Sample(lambda: flux("FluxImg2ImgPipeline"), SIDE | FROM_PICTURE | SHORT, IMAGE),
    "FluxInpaintPipeline": Sample(lambda: flux("FluxInpaintPipeline"), SIDE | FROM_PICTURE | SHORT, MASKED),
    "FluxFillPipeline": Sample(lambda: flux("FluxFillPipeline", 288), PICTURE | SHORT, MASKED),
    "FluxKontextPipeline": Sample(
        lambda: flux("FluxKontextPipeline"), PICTURE | SHORT | {"max_area": 4096, "_auto_resize": False}, IMAGE
    ),
    "ChromaPipeline": Sample(chroma, PICTURE | SHORT),
    "StableDiffusion3Pipeline": Sample(sd3, PICTURE | SHORT),
    "StableDiffusion3Img2ImgPipeline": Sample(
        lambda: sd3("StableDiffusion3Img2ImgPipeline"), SIDE | FROM_PICTURE | SHORT, IMAGE
    ),
    "StableDiffusion3InpaintPipeline": Sample(
        lambda: sd3("StableDiffusion3InpaintPipeline"), SIDE | FROM_PICTURE | SHORT, MASKED
    ),
    "StableDiffusionPipeline": Sample(sd, PICTURE),
    "StableDiffusionImg2ImgPipeline": Sample(lambda: sd("StableDiffusionImg2ImgPipeline"), FROM_PICTURE, IMAGE),
    "StableDiffusionInpaintPipeline": Sample(lambda: sd("StableDiffusionInpaintPipeline"), SIDE | FROM_PICTURE, MASKED),
    "StableDiffusionXLPipeline": Sample(sdxl, PICTURE),
    "StableDiffusionXLImg2ImgPipeline": Sample(lambda: sdxl("StableDiffusionXLImg2ImgPipeline"), FROM_PICTURE, IMAGE),
    "StableDiffusionXLInpaintPipeline": Sample(
        lambda: sdxl("StableDiffusionXLInpaintPipeline"), SIDE | FROM_PICTURE, MASKED
    ),
    "PRXPixelPipeline": Sample(prx_pixel, PICTURE | WITHOUT_BINS),
    "PixArtSigmaPipeline": Sample(pixart, PICTURE | WITHOUT_BINS | SHORT),
    "SanaPipeline": Sample(sana, PICTURE | WITHOUT_BINS),
    "Lumina2Pipeline": Sample(lumina2, PICTURE | SHORT),
    "AuraFlowPipeline": Sample(aura_flow, PICTURE | SHORT),
    "WanPipeline": Sample(wan, CLIP | SHORT),
    "WanVideoToVideoPipeline": Sample(lambda: wan("WanVideoToVideoPipeline"), SIDE | FROM_PICTURE | SHORT, VIDEO),
    "LTXPipeline": Sample(ltx, CLIP | SHORT),
    "LTXImageToVideoPipeline": Sample(lambda: ltx("LTXImageToVideoPipeline"), CLIP | SHORT, IMAGE),
    "CogVideoXPipeline": Sample(cogvideox, CLIP | {"max_sequence_length": 16}),
    "CogVideoXVideoToVideoPipeline": Sample(
        lambda: cogvideox("CogVideoXVideoToVideoPipeline"), SIDE | FROM_PICTURE | {"max_sequence_length": 16}, VIDEO
    ),
    "HunyuanVideoPipeline": Sample(hunyuan_video, CLIP),
    "MochiPipeline": Sample(mochi, CLIP | {"max_sequence_length": 16, "num_frames": 7}),
}
"""By their class names."""
