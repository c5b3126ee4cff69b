"""Tiny omni models with random weights, of the true classes: every part, small; what matters is wired as published."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tiny  # type: ignore[import-not-found] (its folder is on the path)
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% elif c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|audio_start|><|audio_pad|><|audio_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
"""The sections add up to half a head."""

CODES = 128
PAD, BEGIN, END, MASK = CODES, CODES + 1, CODES + 2, CODES + 3
"""Qwen2.5's codes, and the special ones right behind them."""

VOICES = ("Chelsie", "Ethan")


def tokenizer() -> Any:
    """Return a tokenizer of bytes, whose roles are tokens of their own."""
    found = tiny.byte_tokenizer(SPECIALS, "<|im_end|>", padding_side="left", chat_template=TEMPLATE)
    found.add_tokens(["system", "user", "assistant"])
    return found


def _save_processors(folder: Path, patch_size: int, feature_size: int) -> None:
    """Both in one file, as published."""
    side = patch_size * 2
    values = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "size": {"shortest_edge": side * side, "longest_edge": 16 * side * side},
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "feature_size": feature_size,
        "chunk_length": 10,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "return_attention_mask": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")


def qwen2_5(folder: Path, *, embedding_size: int = 64, larger: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Save a Qwen2.5-Omni: 50 codes a second, 2 spectrogram frames a code, 240 samples a frame.

    `larger` changes sizes of its parts (``text``, ``audio``, ``vision``, ``talker``, ``flow``, ``vocoder``); such a
    model keeps transformers' own random weights, in bfloat16.
    """
    larger = larger or {}
    torch.manual_seed(0)
    words = tokenizer()
    id_of: Any = words.convert_tokens_to_ids
    ids = {
        "audio_token_index": id_of("<|audio_pad|>"),
        "image_token_index": id_of("<|image_pad|>"),
        "video_token_index": id_of("<|video_pad|>"),
        "audio_start_token_id": id_of("<|audio_start|>"),
        "audio_end_token_id": id_of("<|audio_end|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
    }
    text = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": id_of("<|im_end|>"),
        "pad_token_id": id_of("<|endoftext|>"),
    }
    audio = {
        "num_mel_bins": 80,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "output_dim": 64,
        "n_window": 50,
        "max_source_positions": 1500,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }
    talker = {
        "vocab_size": CODES + 8,
        "embedding_size": embedding_size,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": ROPE,
        "max_position_embeddings": 4096,
        "tts_text_start_token_id": id_of("<tts_text_bos>"),
        "tts_text_end_token_id": id_of("<tts_text_eod>"),
        "tts_text_pad_token_id": id_of("<tts_pad>"),
        "tts_codec_pad_token_id": PAD,
        "tts_codec_start_token_id": BEGIN,
        "tts_codec_end_token_id": END,
        "tts_codec_mask_token_id": MASK,
        **ids,
    }
    flow = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "emb_dim": 32,
        "num_embeds": CODES + 9,
        "mel_dim": 80,
        "block_size": 24,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "enc_emb_dim": 16,
        "enc_dim": 16,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "max_position_embeddings": 4096,
    }
    parts = {"text": text, "audio": audio, "vision": vision, "talker": talker, "flow": flow}
    for name, part in parts.items():
        part.update(larger.get(name, {}))
    vocoder = {"mel_dim": 80, "upsample_initial_channel": 64, **larger.get("vocoder", {})}
    config = transformers.Qwen2_5OmniConfig(
        thinker_config={
            "audio_config": audio,
            "vision_config": vision,
            "text_config": text,
            "user_token_id": id_of("user"),
            **ids,
        },
        talker_config=talker,
        token2wav_config={"dit_config": flow, "bigvgan_config": vocoder},
        enable_audio_output=True,
    )
    model: Any = transformers.Qwen2_5OmniForConditionalGeneration(config)
    if larger:
        model = model.to(torch.bfloat16)
    else:
        tiny.enliven(model.thinker)
        tiny.enliven(model.talker)
        tiny.enliven(model.talker.thinker_to_talker_proj, gain=3.0)
        tiny.enliven(model.token2wav.code2wav_dit_model)
        tiny.enliven(model.token2wav.code2wav_bigvgan_model, gain=0.75)
    model.thinker.generation_config.eos_token_id = id_of("<|im_end|>")
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    _save_processors(folder, 14, 80)
    generator = torch.Generator().manual_seed(0)
    speakers = {
        name: {
            "bos_token": id_of("<tts_text_bos>") - i,
            "cond": torch.randn(1, 16, generator=generator),
            "ref_mel": torch.randn(1, 40, 80, generator=generator),
        }
        for i, name in enumerate(VOICES)
    }
    torch.save(speakers, folder / "spk_dict.pt")
    return str(folder)


CODES_3, GROUPS_3 = 64, 16
"""Qwen3's codes, and how many a frame has."""


def qwen3(folder: Path, *, thinker_hidden_size: int = 64) -> str:
    """Save a Qwen3-Omni: 16 codes a frame, 12.5 frames a second, 1920 samples a frame."""
    torch.manual_seed(0)
    words = tokenizer()
    id_of: Any = words.convert_tokens_to_ids
    rope = ROPE | {"mrope_interleaved": True}
    ids = {
        "audio_token_id": id_of("<|audio_pad|>"),
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "audio_start_token_id": id_of("<|audio_start|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
    }
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    audio = {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "output_dim": 64,
        "n_window": 50,
        "n_window_infer": 200,
        "downsample_hidden_size": 16,
        "max_source_positions": 1500,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    text = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": rope,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": id_of("<|im_end|>"),
        "pad_token_id": id_of("<|endoftext|>"),
        **experts,
    }
    small = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    talker = {
        "text_config": {
            "vocab_size": CODES_3 + 1024,
            "num_hidden_layers": 2,
            "rope_parameters": rope,
            "shared_expert_intermediate_size": 32,
            "max_position_embeddings": 4096,
            **small,
            **experts,
        },
        "code_predictor_config": {
            "vocab_size": CODES_3,
            "num_hidden_layers": 1,
            "num_code_groups": GROUPS_3,
            **small,
        },
        "num_code_groups": GROUPS_3,
        "thinker_hidden_size": thinker_hidden_size,
        "accept_hidden_layer": 2,
        "codec_eos_token_id": CODES_3 + 1,
        "codec_nothink_id": CODES_3 + 2,
        "codec_think_bos_id": CODES_3 + 3,
        "codec_think_eos_id": CODES_3 + 4,
        "codec_pad_id": CODES_3 + 5,
        "codec_bos_id": CODES_3 + 6,
        "speaker_id": {"ethan": CODES_3 + 7, "chelsie": CODES_3 + 8},
        "spatial_merge_size": 2,
        **ids,
    }
    code2wav = {
        "codebook_size": CODES_3,
        "num_quantizers": GROUPS_3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 12,
        "decoder_dim": 32,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config={
            "audio_config": audio,
            "vision_config": vision,
            "text_config": text,
            "user_token_id": id_of("user"),
            "audio_end_token_id": id_of("<|audio_end|>"),
            "vision_end_token_id": id_of("<|vision_end|>"),
            **ids,
        },
        talker_config=talker,
        code2wav_config=code2wav,
        enable_audio_output=True,
        im_start_token_id=id_of("<|im_start|>"),
        im_end_token_id=id_of("<|im_end|>"),
        tts_pad_token_id=id_of("<tts_pad>"),
        tts_bos_token_id=id_of("<tts_text_bos>"),
        tts_eos_token_id=id_of("<tts_text_eod>"),
        system_token_id=id_of("system"),
        user_token_id=id_of("user"),
        assistant_token_id=id_of("assistant"),
    )
    model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    tiny.enliven(model.thinker)
    tiny.enliven(model.talker)
    tiny.enliven(model.code2wav)
    tiny.enliven(model.code2wav.decoder, gain=0.75)
    model.generation_config.eos_token_id = id_of("<|im_end|>")
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    _save_processors(folder, 16, 128)
    return str(folder)
