"""Trains Wan's video VAE and its transformer, which a UMT5 encoder of words leads, on clips that are drawn once.

The VAE learns by absolute and edge error, the transformer and the encoder together by flow matching. All end as their
moving averages.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from emoji_sprites import OBJECTS
from moving_emoji import FRAMES, HELD_OUT, SIZE, random_clip
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn
from wan_at_once import decode_at_once, encode_at_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from moving_emoji import Painter

MAX_WORDS = 16
"""Tokens of a prompt."""
SHIFT = 5.0
"""The scheduler's shift of noise levels, in training as in drawing."""
TRAINED = [name for name in OBJECTS if name not in HELD_OUT]
SAVE_EVERY_S = 60.0
NOISE = 0.2
"""How much noise, at most, latents have from which the decoder learns; theirs has deviation 1."""


def rate(elapsed: float, seconds: float, step: int, peak: float) -> float:
    """Return the learning rate: a short climb, then half a cosine over the time that there is."""
    return peak * min(1.0, (step + 1) / 200) * (0.51 + 0.49 * math.cos(math.pi * min(1.0, elapsed / seconds)))


class Averages:
    """Moving averages of a model's parameters, which draw better than the last ones."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after this step."""
        average = get_ema_multi_avg_fn(min(0.9995, (1 + step) / (10 + step)))
        average(self._averages, [parameter.detach() for parameter in self._parameters], step)

    @torch.no_grad()
    def swap(self) -> None:
        """Let them be the parameters, and the parameters be kept here; once more, and all is as it was."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            last = parameter.clone()
            parameter.copy_(average)
            average.copy_(last)


class Watch:
    """How long a training has gone on, and whether it is time to save; a machine may be gone before the end."""

    def __init__(self, seconds: float, averages: Averages, save: Callable[[], None]) -> None:
        self._seconds = seconds
        self._averages = averages
        self._save = save
        self._started = self._saved = time.monotonic()
        self.elapsed = 0.0

    def goes_on(self) -> bool:
        """Return whether there is time left; saves the averages every minute, and leaves them in place at the end."""
        now = time.monotonic()
        self.elapsed = now - self._started
        is_over = self.elapsed >= self._seconds
        if is_over or now - self._saved > SAVE_EVERY_S:
            self._averages.swap()
            self._save()
            self._saved = now
            if not is_over:
                self._averages.swap()
        return not is_over


@dataclass(frozen=True)
class Pool:
    """Clips that were drawn once and stay on the device."""

    prompts: list[str]
    pixels: torch.Tensor
    """(clips, 3, FRAMES, SIZE, SIZE), uint8."""

    def video(self, chosen: torch.Tensor | slice) -> torch.Tensor:
        """Return these clips in -1..1."""
        return self.pixels[chosen].float() / 127.5 - 1


@torch.no_grad()
def draw_pool(painter: Painter, size: int, batch: int) -> Pool:
    """Draw clips of what training shows."""
    random = np.random.default_rng(2)
    pixels = torch.empty(size, 3, FRAMES, SIZE, SIZE, dtype=torch.uint8, device=painter.device)
    prompts: list[str] = []
    for i in range(0, size, batch):
        clips = [random_clip(random, TRAINED) for _ in range(min(batch, size - i))]
        prompts += [clip.prompt for clip in clips]
        pixels[i : i + batch] = (painter.paint(clips) * 255).round().byte()
    return Pool(prompts, pixels)


@torch.no_grad()
def encode_pool(vae: Any, pool: Pool, batch: int, *, is_new: bool) -> torch.Tensor:
    """Return the latents (clips, 16, 7, 16, 16), float16, of mean 0 and deviation 1 by the VAE's own numbers.

    A new VAE gets its numbers from them.
    """
    device = pool.pixels.device.type
    parts = []
    for i in range(0, len(pool.pixels), batch):
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            moments = encode_at_once(vae, pool.video(slice(i, i + batch)))
        parts.append(moments[:, : vae.config.z_dim].half())
    latents = torch.cat(parts)
    if is_new:
        flat = latents[:4096].float().transpose(0, 1).flatten(1)
        vae.register_to_config(latents_mean=flat.mean(1).tolist(), latents_std=flat.std(1).tolist())
    mean, std = scale_of(vae, device)
    for i in range(0, len(latents), batch):
        latents[i : i + batch] = ((latents[i : i + batch].float() - mean) / std).half()
    return latents


def scale_of(vae: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents' mean and deviation, (1, channels, 1, 1, 1)."""
    mean, std = (
        torch.tensor(x, device=device).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def vae_loss(vae: Any, video: torch.Tensor, latents: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is to become less, and the mean error of a pixel in -1..1.

    That is the absolute and the edges' error of the picture, and a little pull to a normal latent. With latents (of
    mean 0 and deviation 1) the decoder starts from these with some noise, since a transformer's aren't perfect either.
    """
    device = video.device.type
    pull = torch.zeros((), device=device)
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        if latents is None:
            centre, log_variance = encode_at_once(vae, video).float().chunk(2, 1)
            log_variance = log_variance.clamp(-30, 20)
            pull = 0.5 * (centre.square() + log_variance.exp() - 1 - log_variance).mean()
            start = centre + 0.5 * torch.exp(0.5 * log_variance) * torch.randn_like(centre)
        else:
            mean, std = scale_of(vae, device)
            spread = NOISE * torch.rand(len(latents), 1, 1, 1, 1, device=device)
            start = (latents + spread * torch.randn_like(latents)) * std + mean
        again = decode_at_once(vae, start).float()
    # Cut to what a picture can hold, as the VAE does, but past the cut the gradient still says which way back.
    error = again + (again.clamp(-1, 1) - again).detach() - video
    # Each latent frame counts as much as the next, though the first one is one frame and the others four.
    weights = torch.ones(video.shape[2], device=device)
    weights[0] = 4
    weighted = error * (weights / weights.mean()).view(1, 1, -1, 1, 1)
    edges = weighted.diff(dim=-1).abs().mean() + weighted.diff(dim=-2).abs().mean()
    return weighted.abs().mean() + edges + 2e-4 * pull, error.detach().abs().mean()


def take_fastest_layout(vae: Any, video: torch.Tensor, latents: torch.Tensor | None) -> None:
    """Lay out the weights as a few steps of training are fastest, which depends on the GPU and cuDNN."""
    synchronize = torch.cuda.synchronize if video.is_cuda else lambda: None
    seconds = {}
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        lay_out(vae, layout)
        for _ in range(3):
            vae_loss(vae, video, latents)[0].backward()
        synchronize()
        started = time.monotonic()
        for _ in range(5):
            vae_loss(vae, video, latents)[0].backward()
        synchronize()
        seconds[layout] = (time.monotonic() - started) / 5
        vae.zero_grad(set_to_none=True)
    print(f"seconds a step by layout: {seconds}", flush=True)
    lay_out(vae, min(seconds, key=lambda layout: seconds[layout]))


def lay_out(vae: Any, layout: torch.memory_format) -> None:
    """Lay out the weights of three-dimensional convolutions; `Module.to` fails at those of others."""
    for parameter in vae.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.contiguous(memory_format=layout)


def train_vae(
    vae: Any,
    pool: Pool,
    seconds: float,
    batch: int,
    save: Callable[[], None],
    latents: torch.Tensor | None = None,
) -> None:
    """Train for so many seconds; with the clips' latents the decoder only, so that latents stay as they are."""
    device = pool.pixels.device.type
    vae.requires_grad_(latents is None)
    for part in (vae.post_quant_conv, vae.decoder):
        part.requires_grad_()

    def some() -> tuple[torch.Tensor, torch.Tensor | None]:
        chosen = torch.randint(len(pool.pixels), (batch,), device=device)
        return pool.video(chosen), None if latents is None else latents[chosen].float()

    take_fastest_layout(vae, *some())
    parameters = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    averages = Averages(parameters)
    optimiser = torch.optim.AdamW(parameters, 1e-3, betas=(0.9, 0.98), weight_decay=1e-4, fused=device != "cpu")
    watch, step = Watch(seconds, averages, save), 0
    while watch.goes_on():
        optimiser.param_groups[0]["lr"] = rate(watch.elapsed, seconds, step, 1.5e-3)
        loss, error = vae_loss(vae, *some())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        averages.update(step)
        if step % 100 == 0:
            print(f"vae step {step}: error {error.item():.4f}, {watch.elapsed:.0f} s", flush=True)
        step += 1
    print(f"vae: {step} steps", flush=True)
    lay_out(vae, torch.contiguous_format)


def train_transformer(
    transformer: Any,
    encoder: Any,
    tokenizer: Any,
    prompts: list[str],
    latents: torch.Tensor,
    seconds: float,
    batch: int,
    save: Callable[[], None],
    peak: float = 1.5e-3,
) -> None:
    """Train for so many seconds by flow matching; `peak` is the largest learning rate."""
    device = latents.device.type
    words = tokenizer(prompts, padding="max_length", max_length=MAX_WORDS, truncation=True, return_tensors="pt")
    ids, masks = words.input_ids.to(device), words.attention_mask.to(device)
    parameters = [*transformer.parameters(), *encoder.parameters()]
    averages = Averages(parameters)
    optimiser = torch.optim.AdamW(parameters, peak, betas=(0.9, 0.98), weight_decay=0.01, fused=device != "cpu")
    forward = torch.compile(transformer) if device != "cpu" else transformer
    watch, step = Watch(seconds, averages, save), 0
    while watch.goes_on():
        optimiser.param_groups[0]["lr"] = rate(watch.elapsed, seconds, step, peak)
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
        averages.update(step)
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {watch.elapsed:.0f} s", flush=True)
        step += 1
    print(f"transformer: {step} steps", flush=True)
