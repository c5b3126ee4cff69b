"""Tiny models with random weights, of the true classes: for tests of engines whose weights nobody can ship.

A library's own initial weights (normal, 0.02) make logits flat and sound silent, so that all inputs look alike and a
test proves nothing; `enliven` gives every layer a gain near one instead.
"""

from __future__ import annotations

import importlib
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
