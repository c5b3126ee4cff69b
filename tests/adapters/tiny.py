"""Tiny models with random weights, of the true classes: for tests of engines whose weights nobody can ship.

A library's own initial weights (normal, 0.02) make logits flat and sound silent, so that all inputs look alike and a
test proves nothing; `enliven` gives every layer a gain near one instead.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@torch.no_grad()
def enliven(model: Any, *, seed: int = 0, gain: float = 1.0, head_gain: float = 3.0) -> Any:
    """Draw every weight of two or more axes from N(0, gain / sqrt(fan-in)); heads' weights are larger."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() >= 2 and weight.is_floating_point():
            own = head_gain if "head" in name else gain
            weight.copy_(torch.randn(weight.shape, generator=generator) * (own / max(1, weight[0].numel()) ** 0.5))
    return model


def byte_tokenizer(specials: tuple[str, ...], eos: str, **arguments: Any) -> Any:
    """Return a tokenizer with one token for each byte of UTF-8, after the special ones."""
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        pad_token=specials[0],
        clean_up_tokenization_spaces=False,
        **arguments,
    )


def stable_audio(folder: Path) -> str:
    """Save a Stable Audio pipeline: T5, a DiT of two layers, a VAE of 8 kHz stereo; about 1 s at most."""
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(("<pad>", "</s>", "<unk>"), "</s>", padding_side="right", model_max_length=64)
    encoder = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )
    pipeline = diffusers.StableAudioPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        projection_model=diffusers.StableAudioProjectionModel(32, 16, min_value=0, max_value=32),
        transformer=diffusers.StableAudioDiTModel(
            sample_size=256,
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_attention_heads=2,
            cross_attention_dim=16,
            cross_attention_input_dim=16,
            global_states_input_dim=32,  # twice the projection's
            time_proj_dim=16,
        ),
        vae=diffusers.AutoencoderOobleck(
            encoder_hidden_size=8,
            downsampling_ratios=[2, 4, 4],
            channel_multiples=[1, 2, 4],
            decoder_channels=8,
            decoder_input_channels=8,
            audio_channels=2,
            sampling_rate=8000,
        ),
        # The scheduler of the published model; its noise comes from torchsde.
        scheduler=diffusers.CosineDPMSolverMultistepScheduler(solver_order=2, sigma_data=1.0),
    )
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            enliven(part, gain=0.7, head_gain=0.7)
    pipeline.save_pretrained(folder)
    return str(folder)


def zimage(folder: Path) -> str:
    """Save a Z-Image pipeline: Qwen3, a DiT of two layers, a VAE of 8 pixels by 8."""
    pipelines: Any = importlib.import_module("tiny_diffusion")
    torch.manual_seed(0)
    pipelines.lively(pipelines.zimage()).save_pretrained(folder)
    return str(folder)


def longcat_audio(folder: Path) -> str:
    """Save a LongCat pipeline: UMT5, a DiT of one layer, a VAE of 8 kHz mono."""
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(("<pad>", "</s>", "<unk>"), "</s>", padding_side="right", model_max_length=64)
    encoder = transformers.UMT5EncoderModel(
        transformers.UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )
    pipeline = diffusers.LongCatAudioDiTPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        transformer=diffusers.LongCatAudioDiTTransformer(
            dit_dim=32, dit_depth=1, dit_heads=2, dit_text_dim=32, latent_dim=8
        ),
        vae=diffusers.LongCatAudioDiTVae(
            channels=8,
            c_mults=[1, 2],
            strides=[4, 4],
            latent_dim=8,
            encoder_latent_dim=16,
            downsampling_ratio=16,
            sample_rate=8000,
        ),
    )
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            enliven(part, gain=0.7, head_gain=0.7)
    pipeline.save_pretrained(folder)
    return str(folder)


def _mimi(codebook_size: int, num_codebooks: int) -> Any:
    """Return the configuration of a Mimi codec: few filters, and a transformer that looks back 12 frames."""
    return transformers.MimiConfig(
        hidden_size=32,
        num_filters=4,
        codebook_size=codebook_size,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=num_codebooks,
        upsample_groups=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        sliding_window=24,
        layer_scale_initial_scale=0.5,
    )


@torch.no_grad()
def _fill_codebooks(model: Any) -> None:
    """Codebooks are buffers (Mimi's vectors are quotients of two); without training all of them are zero."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith(("embed_sum", "codebook.embed")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


CSM_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}<|end|>{% else %}<|AUDIO|><|audio_eos|>{% endif %}"
    "{% endfor %}{% endfor %}"
)


def csm(folder: Path) -> str:
    """Save a CSM with its Mimi: four codebooks of 32 codes."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(("<pad>", "<|end|>", "<|AUDIO|>", "<|audio_eos|>"), "<|end|>")
    config = transformers.CsmConfig(
        num_codebooks=4,
        vocab_size=32,
        codebook_pad_token_id=31,
        codebook_eos_token_id=0,
        text_vocab_size=len(tokenizer),
        audio_token_id=2,
        audio_eos_token_id=3,
        pad_token_id=0,
        bos_token_id=None,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        depth_decoder_config={
            "num_codebooks": 4,
            "backbone_hidden_size": 32,
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 5,
        },
        codec_config=_mimi(32, 4).to_dict(),
    )
    model = transformers.CsmForConditionalGeneration(config)
    enliven(model)
    _fill_codebooks(model)
    model.generation_config.max_new_tokens = 24
    model.save_pretrained(folder)
    transformers.CsmProcessor(
        transformers.EncodecFeatureExtractor(), tokenizer, chat_template=CSM_TEMPLATE
    ).save_pretrained(folder)
    return str(folder)


def moshi(folder: Path, *, sliding_window: int = 12) -> str:
    """Save a Moshi with its Mimi: four codebooks of 32 codes, a main model that looks back so many frames."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(("<unk>", "<s>", "</s>", "<pad>"), "</s>")
    config = transformers.MoshiConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        sliding_window=sliding_window,
        ffn_dim=64,
        num_codebooks=4,
        audio_encoder_config=_mimi(32, 4).to_dict(),
        depth_decoder_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "max_position_embeddings": 5,
        },
    )
    model = enliven(transformers.MoshiForConditionalGeneration(config))
    model.audio_encoder.encoder.downsample.conv.weight.data *= 6.0  # so that different sound has different codes
    _fill_codebooks(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def dac(folder: Path) -> str:
    """Save a Dac codec: four codebooks of 24 codes, 8 kHz, 250 frames a second."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "sampling_rate": 8000,
        "encoder_hidden_size": 4,
        "downsampling_ratios": [2, 4, 4],
        "upsampling_ratios": [4, 4, 2],
        "decoder_hidden_size": 32,
        "hidden_size": 16,
        "codebook_size": 32,
        "codebook_dim": 4,
        "n_codebooks": 4,
    }
    config = transformers.DacConfig(**sizes)
    enliven(transformers.DacModel(config), gain=0.7).save_pretrained(folder)
    return str(folder)


def dia(folder: Path) -> str:
    """Save a Dia with its Dac in a folder beside it."""
    codec = dac(folder / "codec")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    delays = [0, 2, 3, 4]
    config = transformers.DiaConfig(
        encoder_config={
            "max_position_embeddings": 128,
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            **heads,
        },
        decoder_config={
            "max_position_embeddings": 256,
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "vocab_size": 36,
            "num_channels": 4,
            "cross_num_attention_heads": 2,
            "cross_num_key_value_heads": 2,
            "cross_head_dim": 16,
            "cross_hidden_size": 32,
            "eos_token_id": 32,
            "pad_token_id": 33,
            "bos_token_id": 34,
            **heads,
        },
        delay_pattern=delays,
    )
    model = enliven(transformers.DiaForConditionalGeneration(config))
    generation = model.generation_config
    generation.do_sample, generation.guidance_scale, generation.temperature = True, 3.0, 1.5
    generation.top_k, generation.max_new_tokens = 20, 40
    generation.bos_token_id, generation.eos_token_id, generation.pad_token_id = 34, 32, 33
    generation.decoder_start_token_id = 34
    model.save_pretrained(folder)
    processor = transformers.DiaProcessor(
        transformers.DacFeatureExtractor(sampling_rate=8000, hop_length=32),
        transformers.DiaTokenizer(max_length=128),
        transformers.AutoModel.from_pretrained(codec),
    )
    processor.save_pretrained(folder)
    return str(folder)


HIGGS_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% for c in m['content'] %}{{ c['text'] }}{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<|audio_out_bos|>{% endif %}"
)


def higgs(folder: Path) -> str:
    """Save a Higgs Audio v2: four codebooks of 32 codes at 250 frames a second, as X-Codec below reads them."""
    torch.manual_seed(0)
    names = ("<pad>", "<|eot|>", "<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|audio_eos|>", "<|reserved_special_token_6|>")
    tokenizer = byte_tokenizer(names, "<|eot|>")
    tokenizer.chat_template = HIGGS_TEMPLATE
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(names)), strict=True))
    config = transformers.HiggsAudioV2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_codebooks=4,
        codebook_size=34,
        audio_stream_bos_id=32,
        audio_stream_eos_id=33,
        audio_token_id=ids["<|AUDIO_OUT|>"],
        audio_bos_token_id=ids["<|audio_out_bos|>"],
        audio_delay_token_id=ids["<|reserved_special_token_6|>"],
        eos_token_id=ids["<|audio_eos|>"],
        pad_token_id=ids["<pad>"],
        bos_token_id=None,
    )
    model = enliven(transformers.HiggsAudioV2ForConditionalGeneration(config))
    model.audio_lm_head.weight.data[33::34] *= 0.5  # ends are rare, as after training
    generation = model.generation_config
    generation.do_sample, generation.temperature, generation.top_k, generation.max_new_tokens = True, 1.0, 8, 40
    generation.ras_win_len, generation.ras_win_max_num_repeat = 7, 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.DacFeatureExtractor(sampling_rate=8000, hop_length=32).save_pretrained(folder)
    return str(folder)


def xcodec(folder: Path, model_type: str = "xcodec") -> str:
    """Save an X-Codec, or its like: four codebooks of 32 codes, 8 kHz, 250 frames a second."""
    torch.manual_seed(0)
    semantic = {
        "model_type": "hubert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "conv_dim": [8],
        "conv_stride": [20],
        "conv_kernel": [20],
        "num_feat_extract_layers": 1,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }
    acoustic = {
        "model_type": "dac",
        "encoder_hidden_size": 4,
        "downsampling_ratios": [4, 4, 2],
        "upsampling_ratios": [4, 4, 2],
        "decoder_hidden_size": 32,
        "hidden_size": 16,
    }
    config: Any = transformers.AutoConfig.for_model(
        model_type,
        sample_rate=8000,
        codebook_size=32,
        codebook_dim=32 if model_type == "xcodec" else 8,
        target_bandwidths=[5.0],  # kbit/s: four codebooks of five bits, 250 times a second
        acoustic_model_config=acoustic,
        semantic_model_config=semantic,
    )
    model = enliven(transformers.AutoModel.from_config(config), gain=0.7)
    _fill_codebooks(model)
    model.save_pretrained(folder)
    return str(folder)


def vits(folder: Path) -> str:
    """Save a VITS that reads small letters, with three speakers, at 8 kHz."""
    torch.manual_seed(0)
    letters = {letter: i for i, letter in enumerate("_abcdefghijklmnopqrstuvwxyz '-")} | {"<unk>": 30}
    (folder / "vocab.json").write_text(json.dumps(letters), encoding="utf-8")
    config = transformers.VitsConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        flow_size=16,
        spectrogram_bins=9,
        num_speakers=3,
        speaker_embedding_size=8,
        use_stochastic_duration_prediction=False,
        duration_predictor_filter_channels=16,
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        upsample_initial_channel=32,
        upsample_rates=[8, 4],
        upsample_kernel_sizes=[16, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        sampling_rate=8000,
    )
    model = enliven(transformers.VitsModel(config), gain=0.7, head_gain=0.7)
    model.duration_predictor.proj.bias.data.fill_(1.0)
    model.save_pretrained(folder)
    transformers.VitsTokenizer(str(folder / "vocab.json"), pad_token="_", phonemize=False).save_pretrained(folder)
    return str(folder)


def pi0(folder: Path) -> str:
    """Save a π0: pictures of 56 pixels as 16 tokens each, states of up to 8 numbers, chunks of 10 actions of 7."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(("<pad>", "<bos>", "<eos>", "<image>"), "<eos>", bos_token="<bos>")
    shared: dict[str, Any] = {
        "model_type": "gemma",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = transformers.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {**shared, "hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokenizer)},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "projection_dim": 64,
            "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        },
        dit_config={**shared, "hidden_size": 48, "intermediate_size": 96},
        chunk_size=10,
        max_state_dim=8,
        max_action_dim=7,
        num_inference_steps=4,
    )
    enliven(transformers.PI0ForConditionalGeneration(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
