"""Trains configs/models/emoji-t2v: words to 25 frames of a moving emoji, in the layout of diffusers' WanPipeline.

    python scripts/models/emoji_sprites.py SPRITES.npz
    python scripts/models/train_emoji_video.py SPRITES.npz FOLDER --vae-seconds 150 --seconds 380

Wan's causal video VAE (4 x in time, 4 x in space, 16 channels) first, then Wan's transformer together with a UMT5
encoder of words, by flow matching. Wants a GPU; a clip is drawn when it is needed, so there is no data to fetch. Prints
how many clips of prompts show what the prompt says, by `moving_emoji.judge`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emoji_sprites import BACKGROUNDS, OBJECTS
from moving_emoji import FRAMES, HELD_OUT, MOTIONS, SIZE, Painter, judge, random_clip
from torch.nn import functional

MAX_WORDS = 16
PAD, UNKNOWN = "<pad>", "<unk>"
SHIFT = 5.0
TRAINED = [name for name in OBJECTS if name not in HELD_OUT]


def make_tokenizer() -> Any:
    """Return a tokenizer that knows the words of the prompts."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word for name in (*OBJECTS, *MOTIONS) for word in name.split()}
    words |= {"a", "an", "on", "the", "background", "standing", "still", *BACKGROUNDS}
    vocabulary = {word: i for i, word in enumerate([PAD, UNKNOWN, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, padding_side="right",
        model_max_length=MAX_WORDS,
    )  # fmt: skip


def make_vae() -> Any:
    """Return the untrained VAE."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=24, z_dim=16, dim_mult=[1, 2, 3], num_res_blocks=1, temperal_downsample=[True, True],
        latents_mean=[0.0] * 16, latents_std=[1.0] * 16, scale_factor_temporal=4, scale_factor_spatial=4,
    )  # fmt: skip


def make_transformer_and_encoder(num_words: int) -> tuple[Any, Any]:
    """Return the untrained transformer and text encoder."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=num_words, d_model=96, d_kv=32, d_ff=256, num_layers=2, num_heads=3,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, pad_token_id=0,
    )  # fmt: skip
    encoder = UMT5EncoderModel(config)
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=6, attention_head_dim=32, in_channels=16, out_channels=16,
        text_dim=96, freq_dim=128, ffn_dim=640, num_layers=8,
    )  # fmt: skip
    return transformer, encoder


def rate(elapsed: float, seconds: float, step: int, peak: float) -> float:
    """Return the learning rate: a short climb, then half a cosine over the time that there is."""
    return peak * min(1.0, (step + 1) / 200) * (0.51 + 0.49 * math.cos(math.pi * min(1.0, elapsed / seconds)))


def train_vae(vae: Any, painter: Painter, seconds: float, batch: int, frames: int = 13) -> None:
    """Train for so many seconds: absolute and edge error of the picture, and a little pull to a normal latent."""
    random = np.random.default_rng(1)
    device = painter.device
    parameters = list(vae.parameters())
    optimiser = torch.optim.AdamW(parameters, 1e-3, betas=(0.9, 0.98), weight_decay=1e-4)
    started, step = time.monotonic(), 0
    while (elapsed := time.monotonic() - started) < seconds:
        optimiser.param_groups[0]["lr"] = rate(elapsed, seconds, step, 1.5e-3)
        clips = painter.paint([random_clip(random, TRAINED) for _ in range(batch)])
        first = int(random.integers(FRAMES - frames + 1))
        video = clips[:, :, first : first + frames] * 2 - 1
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            posterior = vae.encode(video).latent_dist
            latents = posterior.mean + posterior.std.float() * torch.randn_like(posterior.mean) * 0.5
            again = vae.decode(latents).sample.float()
        error = again - video
        edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
        pull = 0.5 * (posterior.mean.float().square() + posterior.var.float() - 1 - posterior.logvar.float()).mean()
        loss = error.abs().mean() + edges + 2e-4 * pull
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if step % 100 == 0:
            print(f"vae step {step}: error {error.abs().mean().item():.4f}, {elapsed:.0f} s", flush=True)
        step += 1
    print(f"vae: {step} steps", flush=True)


@torch.no_grad()
def encode_pool(vae: Any, painter: Painter, size: int, batch: int) -> tuple[list[str], torch.Tensor]:
    """Draw and encode clips: their prompts and latents (size, 16, 7, 16, 16); the VAE gets its mean and deviation."""
    random = np.random.default_rng(2)
    prompts: list[str] = []
    parts = []
    for _ in range(size // batch):
        clips = [random_clip(random, TRAINED) for _ in range(batch)]
        prompts += [clip.prompt for clip in clips]
        with torch.autocast(painter.device, torch.bfloat16, enabled=painter.device != "cpu"):
            parts.append(vae.encode(painter.paint(clips) * 2 - 1).latent_dist.mean.half())
    latents = torch.cat(parts)
    flat = latents[:4096].float().transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=flat.mean(1).tolist(), latents_std=flat.std(1).tolist())
    mean, std = (x.view(1, -1, 1, 1, 1) for x in (flat.mean(1), flat.std(1)))
    for i in range(0, len(latents), batch):
        latents[i : i + batch] = ((latents[i : i + batch].float() - mean) / std).half()
    return prompts, latents


def train_transformer(
    transformer: Any,
    encoder: Any,
    tokenizer: Any,
    prompts: list[str],
    latents: torch.Tensor,
    seconds: float,
    batch: int,
) -> None:
    """Train for so many seconds by flow matching; both models end as their moving averages."""
    device = latents.device.type
    words = tokenizer(prompts, padding="max_length", max_length=MAX_WORDS, truncation=True, return_tensors="pt")
    ids, masks = words.input_ids.to(device), words.attention_mask.to(device)
    parameters = [*transformer.parameters(), *encoder.parameters()]
    averages = [parameter.detach().clone() for parameter in parameters]
    optimiser = torch.optim.AdamW(parameters, 2e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=device != "cpu")
    forward = torch.compile(transformer) if device != "cpu" else transformer
    started, step = time.monotonic(), 0
    while (elapsed := time.monotonic() - started) < seconds:
        optimiser.param_groups[0]["lr"] = rate(elapsed, seconds, step, 1.5e-3)
        chosen = torch.randint(len(latents), (batch,), device=device)
        clean = latents[chosen].float()
        noise = torch.randn_like(clean)
        uniform = torch.rand(batch, device=device)
        sigma = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
        mixed = (1 - sigma.view(-1, 1, 1, 1, 1)) * clean + sigma.view(-1, 1, 1, 1, 1) * noise
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            text = encoder(ids[chosen], masks[chosen]).last_hidden_state
            # As the pipeline does: nothing behind the words, and nothing at all without a prompt.
            kept = masks[chosen] * (torch.rand(batch, 1, device=device) > 0.1)
            text = text * kept[..., None]
            flow = forward(mixed, sigma * 1000, text, return_dict=False)[0]
        loss = functional.mse_loss(flow.float(), noise - clean)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        with torch.no_grad():
            share = 1 - min(0.9995, (1 + step) / (10 + step))
            for average, parameter in zip(averages, parameters, strict=True):
                average.lerp_(parameter.detach(), share)
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {elapsed:.0f} s", flush=True)
        step += 1
    print(f"transformer: {step} steps", flush=True)
    with torch.no_grad():
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.copy_(average)


def evaluate(pipeline: Any, painter: Painter, folder: Path, count: int, steps: int, guidance: float) -> None:
    """Print how many clips show what their prompt says, and keep a sheet of some."""
    from PIL import Image

    random = np.random.default_rng(99)
    for what, names in (("new prompts", TRAINED), ("pairs never shown", sorted(HELD_OUT))):
        wanted = [random_clip(random, names) for _ in range(count)]
        made = make(pipeline, [clip.prompt for clip in wanted], steps, guidance)
        found = [judge(painter, clip) for clip in made]
        verdicts = [
            [seen is not None and getattr(seen, key) == getattr(clip, key) for key in ("name", "motion", "background")]
            for clip, seen in zip(wanted, found, strict=True)
        ]
        wrong = [
            f"{clip.prompt} -> {seen.prompt if seen else 'nothing'}"
            for clip, seen, verdict in zip(wanted, found, verdicts, strict=True)
            if not all(verdict)
        ]
        name, motion, background = np.array(verdicts).sum(0)
        print(
            f"{what}, {steps} steps, guidance {guidance}: object {name}/{count}, motion {motion}/{count}, "
            f"background {background}/{count}, all {count - len(wrong)}/{count}; wrong: {wrong[:8]}",
            flush=True,
        )
        rows = [np.concatenate(list(clip[:, ::4].permute(1, 2, 3, 0).cpu().numpy()), 1) for clip in made[:12]]
        sheet = (np.concatenate(rows) * 255).round().astype(np.uint8)
        Image.fromarray(sheet).save(folder / f"sheet_{what.split()[0]}_{steps}.png")


def make(pipeline: Any, prompts: list[str], steps: int, guidance: float) -> list[torch.Tensor]:
    """Return a clip (3, FRAMES, SIZE, SIZE) in 0..1 for each prompt."""
    made = []
    for i in range(0, len(prompts), 50):
        part = prompts[i : i + 50]
        frames = pipeline(
            part, height=SIZE, width=SIZE, num_frames=FRAMES, num_inference_steps=steps, guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(i + k) for k in range(len(part))],
            max_sequence_length=MAX_WORDS, output_type="pt",
        ).frames  # fmt: skip
        made += [clip.transpose(0, 1).float() for clip in frames]
    return made


def main() -> None:
    """Train and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sprites")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae-seconds", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=380)
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pool", type=int, default=65536)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)

    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    painter = Painter(given.sprites, device)
    tokenizer, vae = make_tokenizer(), make_vae().to(device)
    transformer, encoder = make_transformer_and_encoder(len(tokenizer))
    transformer, encoder = transformer.to(device), encoder.to(device)
    sizes = {"vae": vae, "transformer": transformer, "encoder": encoder}
    print({name: sum(p.numel() for p in model.parameters()) for name, model in sizes.items()}, flush=True)

    started = time.monotonic()
    train_vae(vae, painter, given.vae_seconds, given.vae_batch)
    prompts, latents = encode_pool(vae, painter, given.pool, min(given.batch, given.pool))
    print(f"pool of {len(prompts)}: {time.monotonic() - started:.0f} s", flush=True)
    train_transformer(transformer, encoder, tokenizer, prompts, latents, given.seconds, given.batch)

    pipeline = WanPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=vae, transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )  # fmt: skip
    for model in sizes.values():
        model.half()
    pipeline.save_pretrained(given.folder)
    for model in sizes.values():
        model.float()
    (given.folder / "vocabulary.json").write_text(
        json.dumps({"objects": OBJECTS, "motions": MOTIONS, "held_out": sorted(HELD_OUT)})
    )
    pipeline.set_progress_bar_config(disable=True)
    truth = [random_clip(np.random.default_rng(5 + i), TRAINED) for i in range(given.count)]
    seen = [judge(painter, clip) for clip in painter.paint(truth)]
    agreed = sum(b is not None and a.prompt == b.prompt for a, b in zip(truth, seen, strict=True))
    print(f"the judge on drawn clips: {agreed} of {len(truth)}", flush=True)
    for steps, guidance in ((12, 2.0), (20, 3.0)):
        evaluate(pipeline, painter, given.folder, given.count, steps, guidance)


if __name__ == "__main__":
    main()
