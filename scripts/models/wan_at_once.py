"""Wan's causal VAE over all frames of a clip in one call of each layer, for training.

diffusers goes latent frame by latent frame with a cache of features, which is the same sum: each layer sees two frames
of the past, nothing before the first, and layers that change the number of frames leave the first one alone. Layers
over a whole clip keep a GPU busy; `difference` says how far the two ways are apart.
"""

from __future__ import annotations

from typing import Any

import torch


def encode_at_once(vae: Any, video: torch.Tensor) -> torch.Tensor:
    """Return the moments (clips, 2 x channels, 1 + n, height, width) of (clips, 3, 1 + 4n, height, width) in -1..1."""
    encoder = vae.encoder
    x = encoder.conv_in(video)
    for layer in encoder.down_blocks:
        x = layer(x)
        if getattr(layer, "mode", "") == "downsample3d":
            x = torch.cat([x[:, :, :1], layer.time_conv(x)], 2)
    x = encoder.mid_block(x)
    return vae.quant_conv(encoder.conv_out(encoder.nonlinearity(encoder.norm_out(x))))


def decode_at_once(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return the video in about -1..1, not cut to it, of latents (clips, channels, 1 + n, height, width)."""
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = resnet(x)
        for layer in block.upsamplers or ():
            if layer.mode == "upsample3d":
                pairs = layer.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))
                later = pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
                x = torch.cat([x[:, :, :1], later], 2)
            x = layer(x)
    return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))


@torch.no_grad()
def difference(vae: Any, video: torch.Tensor) -> float:
    """Return the largest difference of moments and pixels between diffusers' way and this one."""
    expected = vae.encode(video).latent_dist
    moments = encode_at_once(vae, video)
    again = decode_at_once(vae, expected.mean).clamp(-1, 1)
    return max(
        (moments - expected.parameters).abs().max().item(),
        (again - vae.decode(expected.mean).sample).abs().max().item(),
    )
