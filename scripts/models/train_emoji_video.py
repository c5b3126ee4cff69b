"""Trains a text-to-video model: words to 25 frames of a moving emoji, in the layout of diffusers' WanPipeline.

    python scripts/models/train_emoji_video.py SPRITES.npz FOLDER --vae-seconds 300 --seconds 600

Wan's causal video VAE (4 x in time, 4 x in space, 16 channels) first, then Wan's transformer together with a UMT5
encoder of words. Wants a GPU; there is no data to fetch: SPRITES.npz is `sprites.npz` beside this file. Prints how many
clips of prompts show what the prompt says, by `moving_emoji.judge`. On an H200 it begins after 50 s; a step of the
decoder with 32 clips takes 0.1 s, one of the transformer with 256 0.06 s.

`--from` goes on from a folder's weights. Its decoder and its transformer may do so at once, on two GPUs, since neither
changes the latents; what isn't in FOLDER yet comes from the other folder in the end. Each part is saved every minute:

    python scripts/models/train_emoji_video.py SPRITES.npz FOLDER --from OLD --only decoder --vae-seconds 420
    python scripts/models/train_emoji_video.py SPRITES.npz FOLDER --from OLD --only transformer --seconds 420
    python scripts/models/train_emoji_video.py SPRITES.npz FOLDER --from OLD --only evaluate
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emoji_sprites import BACKGROUNDS, OBJECTS
from moving_emoji import FRAMES, HELD_OUT, MOTIONS, SIZE, Painter, judge, random_clip
from wan_at_once import difference
from wan_training import MAX_WORDS, SHIFT, TRAINED, draw_pool, encode_pool, lay_out, train_transformer, train_vae

PAD, UNKNOWN = "<pad>", "<unk>"
MODELS = ("vae", "transformer", "text_encoder")


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


def new_pipeline() -> Any:
    """Return the untrained pipeline."""
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    tokenizer = make_tokenizer()
    transformer, encoder = make_transformer_and_encoder(len(tokenizer))
    return WanPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=make_vae(), transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )  # fmt: skip


def old_pipeline(folder: Path, newer: Path | None = None) -> Any:
    """Return the pipeline of a folder, with the parts that the newer one has."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from transformers import UMT5EncoderModel

    classes = {"vae": AutoencoderKLWan, "transformer": WanTransformer3DModel, "text_encoder": UMT5EncoderModel}
    parts = {
        name: kind.from_pretrained(newer / name, dtype=torch.float32)
        for name, kind in classes.items()
        if newer is not None and (newer / name).is_dir()
    }
    if newer is not None and not parts:
        raise SystemExit(f"{newer}: there is no part of a model (wanted: {', '.join(classes)})")
    print(f"from {folder}: {[name for name in classes if name not in parts]}, from {newer}: {list(parts)}", flush=True)
    return WanPipeline.from_pretrained(folder, dtype=torch.float32, **parts)


def keep(pipeline: Any, folder: Path, *names: str) -> None:
    """Save these models of it in float16."""
    for name in names:
        model = copy.deepcopy(getattr(pipeline, name)).half()
        lay_out(model, torch.contiguous_format)
        model.save_pretrained(folder / name)


def keep_whole(pipeline: Any, folder: Path) -> None:
    """Save all of it in float16; it goes on with what was saved."""
    for name in MODELS:
        getattr(pipeline, name).half()
    pipeline.save_pretrained(folder)
    for name in MODELS:
        getattr(pipeline, name).float()


def train(pipeline: Any, painter: Painter, given: argparse.Namespace) -> None:
    """Train what is wanted of the pipeline."""
    started = time.monotonic()
    pool = draw_pool(painter, given.pool, 256)
    print(f"pool of {given.pool}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"all frames at once or one by one: {difference(pipeline.vae, pool.video(slice(2)))}", flush=True)
    is_new = given.start is None

    def save_vae() -> None:
        keep(pipeline, given.folder, "vae")

    if is_new:
        train_vae(pipeline.vae, pool, given.vae_seconds, given.vae_batch, save_vae)
    latents = encode_pool(pipeline.vae, pool, 128, is_new=is_new)
    print(f"its latents: {time.monotonic() - started:.0f} s", flush=True)
    if given.only == "decoder":
        train_vae(pipeline.vae, pool, given.vae_seconds, given.vae_batch, save_vae, latents)
    else:
        train_transformer(
            pipeline.transformer, pipeline.text_encoder, pipeline.tokenizer, pool.prompts, latents, given.seconds,
            given.batch, lambda: keep(pipeline, given.folder, "transformer", "text_encoder"),
        )  # fmt: skip


def main() -> None:
    """Train and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sprites")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", dest="start", type=Path)
    parser.add_argument("--only", choices=["decoder", "transformer", "evaluate"])
    parser.add_argument("--vae-seconds", type=float, default=300)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--vae-batch", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pool", type=int, default=65536)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    if given.only and given.start is None:
        parser.error("--only wants --from")
    given.folder.mkdir(parents=True, exist_ok=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    painter = Painter(given.sprites, device)
    if given.start is None:
        pipeline = new_pipeline()
    else:
        pipeline = old_pipeline(given.start, given.folder if given.only == "evaluate" else None)
    pipeline.to(device)
    if given.only != "evaluate":
        train(pipeline, painter, given)
    if given.only in (None, "evaluate"):
        keep_whole(pipeline, given.folder)
        pipeline.set_progress_bar_config(disable=True)
        for steps, guidance in ((12, 2.0), (20, 3.0)):
            evaluate(pipeline, painter, given.folder, given.count, steps, guidance)


if __name__ == "__main__":
    main()
