"""Moshi and its codec Mimi, both of transformers, frame by frame for many conversations at once.

What transformers' `generate` does with one prompt, silence after it and the whole sound at the end, happens here with
what the user says meanwhile. Of each stream the first codebook is a frame ahead of the others: at position p the model
reads its own text token p, the first code of frame p - 1 and the others of frame p - 2, of the user's stream and of its
own; position 0 is a beginning that is the same for all. So once a frame of the user has come, a frame of the model is
complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.lockstep import ConvStreams, GrowingCache, RingCache
from adapters.recorded import Recorded

if TYPE_CHECKING:
    import torch

MAX_TOP_K = 500
"""Candidates of a choice. Noise is drawn for so many, so that what a conversation draws depends on nobody else."""

DEFAULTS: dict[str, float] = {"text_temperature": 0.7, "text_topk": 25, "audio_temperature": 0.8, "audio_topk": 250}
"""Of Kyutai's own server (moshi 0.2.13, `LMGen`)."""


class MimiStreams:
    """Sound to codes and codes to sound, a frame of every row in a call."""

    def __init__(self, codec: Any, num_codebooks: int, num_rows: int) -> None:
        import torch

        config, device = codec.config, codec.device
        encoder, decoder = codec.encoder, codec.decoder
        self._codec = codec
        self._num_codebooks = num_codebooks
        self._stride = int(config.latent_stride)
        self._down = ConvStreams(encoder.encoder_seanet.layers, num_rows)
        self._downsample = ConvStreams([encoder.downsample], num_rows)
        self._upsample = ConvStreams([decoder.upsample], num_rows)
        self._up = ConvStreams(decoder.decoder_seanet.layers, num_rows)
        self._heard = RingCache(num_rows, config.sliding_window, self._stride, device)
        self._said = RingCache(num_rows, config.sliding_window, self._stride, device)
        self._num_heard = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._num_said = torch.zeros(num_rows, dtype=torch.long, device=device)

    def reset(self, row: int) -> None:
        """Begin both streams of a row."""
        for chain in (self._down, self._downsample, self._upsample, self._up):
            chain.reset(row)
        self._num_heard[row] = self._num_said[row] = 0

    def encode(self, sound: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Return the codes, (rows, codebooks), of a frame of sound, (rows, 1, samples)."""
        fresh = self._num_heard == 0
        values = self._down(sound, active, fresh)
        values = _attended(self._codec.encoder.encoder_transformer, values, self._heard, self._num_heard)
        latents = self._downsample(values, active, fresh)
        self._num_heard += self._stride * active
        return self._codec.quantizer.encode(latents, self._num_codebooks)[:, :, 0].transpose(0, 1)

    def decode(self, codes: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Return the sound, (rows, samples), of a frame of codes, (rows, codebooks)."""
        fresh = self._num_said == 0
        values = self._upsample(self._codec.quantizer.decode(codes[:, :, None]), active, fresh)
        values = _attended(self._codec.decoder.decoder_transformer, values, self._said, self._num_said)
        self._num_said += self._stride * active
        return self._up(values, active, fresh)[:, 0]


def _attended(transformer: Any, values: torch.Tensor, ring: RingCache, first: torch.Tensor) -> torch.Tensor:
    ring.begin(first)
    output = transformer(
        values.transpose(1, 2), attention_mask=ring.mask, position_ids=ring.positions, cache=ring, use_cache=True
    )
    return output.last_hidden_state.transpose(1, 2)


class MoshiStreams:
    """The language model: codes of what the user says in, text tokens and codes of what the model says out.

    Args:
        model: a `MoshiForConditionalGeneration`.
        num_rows: conversations.
    """

    def __init__(self, model: Any, num_rows: int) -> None:
        import torch

        config, device = model.config, model.device
        self._model = model
        self._num_codebooks = int(config.num_codebooks)
        self._bos_text, self._bos_code = int(config.vocab_size), int(config.audio_vocab_size)
        window = int(config.sliding_window or config.max_position_embeddings)
        self._ring = RingCache(num_rows, window, 1, device)
        self.longest_prompt = window // 2
        """Frames that may have been said before a conversation: the other half is left for it."""
        longs = {"dtype": torch.long, "device": device}
        self._num_read = torch.zeros(num_rows, **longs)
        self._hidden = torch.zeros((num_rows, config.hidden_size), dtype=model.dtype, device=device)
        self._logits = torch.zeros((num_rows, config.vocab_size), dtype=model.dtype, device=device)
        self._text = torch.zeros(num_rows, **longs)
        self._codes = torch.zeros((num_rows, self._num_codebooks), **longs)
        """The first code of the model's next frame, and the others of its last one."""
        self._late = torch.zeros((num_rows, self._num_codebooks - 1), **longs)
        """Codes of the user's last frame that are read with the next one."""
        self._settings = torch.zeros((num_rows, 4), device=device)
        self._only = torch.eye(num_rows, dtype=torch.bool, device=device)
        self._nobody = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._reads, self._speaks = Recorded(self._read), Recorded(self._speak)

    def record(self) -> None:
        """Have a GPU remember what `begin`, `prime` and `start` do."""
        frame = self._codes
        self._reads.record(self._text, frame[:, :1], frame, self._nobody)
        self._speaks.record(self._nobody, self.silent_noise())

    def silent_noise(self) -> torch.Tensor:
        """Return noise for rows that draw nothing, (rows, 1 + codebooks, candidates)."""
        return self._settings.new_zeros((len(self._only), 1 + self._num_codebooks, MAX_TOP_K))

    def noise(self, generator: torch.Generator) -> torch.Tensor:
        """Draw what a conversation needs for one frame: (1 + codebooks, candidates) uniform numbers."""
        import torch

        return torch.rand((1 + self._num_codebooks, MAX_TOP_K), generator=generator)

    def begin(self, row: int, settings: dict[str, float]) -> None:
        """Begin a conversation in a row; `prime` may follow, then `start`.

        Args:
            row: a free one.
            settings: the keys of `DEFAULTS`.
        """
        import torch

        self._settings[row] = torch.tensor([settings[name] for name in DEFAULTS], device=self._settings.device)
        self._num_read[row] = 0
        self._late[row] = self._codes[row] = self._bos_code
        frame = torch.full_like(self._codes, self._bos_code)
        self._reads(torch.full_like(self._text, self._bos_text), frame[:, :1], frame, self._only[row])

    def prime(self, text: torch.Tensor, said: torch.Tensor, heard: torch.Tensor, active: torch.Tensor) -> None:
        """Read a frame as if it had been said and heard, before `start`.

        Args:
            text: its text tokens, (rows,).
            said: the model's codes, (rows, codebooks).
            heard: the user's codes, (rows, codebooks).
            active: rows that this is about, bool, (rows,).
        """
        import torch

        self._reads(text, said[:, :1], heard, active)
        self._codes.copy_(torch.where(active[:, None], said, self._codes))

    def start(self, row: int, noise: torch.Tensor) -> int:
        """Begin to speak, after what was primed; returns the first text token.

        Args:
            row: of the conversation.
            noise: of `noise`.
        """
        others = self._codes[row, 1:].clone()
        self._speaks(self._only[row], noise.to(self._settings.device).expand(len(self._only), -1, -1))
        self._codes[row, 1:] = others  # of a frame that is over, or of none
        return int(self._text[row])

    def step(self, heard: torch.Tensor, active: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a frame of the user and go on speaking.

        Args:
            heard: the frame's codes, (rows, codebooks).
            active: rows that go on, bool, (rows,).
            noise: of `noise` for each row, (rows, 1 + codebooks, candidates).

        Returns:
            The next text tokens, (rows,), and the codes of the frame that is complete, (rows, codebooks); for active
            rows only.
        """
        import torch

        first = self._codes[:, :1].clone()
        self._read(self._text, first, heard, active)
        self._speak(active, noise)
        codes = torch.cat([first, self._codes[:, 1:]], dim=1)
        return self._text.clone(), codes * active[:, None]  # others may hold what no codec knows

    def _read(
        self, text: torch.Tensor, first: torch.Tensor, heard: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the main model over one position of each row."""
        import torch

        codes = torch.cat([first, self._codes[:, 1:], heard[:, :1], self._late], dim=1)
        embedded: Any = sum(embed(codes[:, k]) for k, embed in enumerate(self._model.embed_tokens))
        embedded = embedded + self._model.decoder.model.embed_tokens(text)
        self._ring.begin(self._num_read)
        output = self._model.decoder.model(
            inputs_embeds=embedded[:, None],
            attention_mask=self._ring.mask,
            position_ids=self._ring.positions,
            cache=self._ring,
            use_cache=True,
        )
        hidden = output.last_hidden_state[:, 0]
        self._hidden.copy_(torch.where(active[:, None], hidden, self._hidden))
        self._logits.copy_(torch.where(active[:, None], self._model.decoder.lm_head(hidden), self._logits))
        self._late.copy_(torch.where(active[:, None], heard[:, 1:], self._late))
        self._num_read += active
        return ()

    def _speak(self, active: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Choose the next text token and with the depth decoder, code by code, what goes with it."""
        import torch

        depth = self._model.depth_decoder
        text = token = _chosen(self._logits, self._settings[:, :2], noise[:, 0])
        cache = GrowingCache(int(depth.config.sliding_window))
        codes: list[torch.Tensor] = []
        for k, embed in enumerate([depth.text_embed_tokens, *depth.embed_tokens]):
            output = depth(
                input_ids=token[:, None],  # for their number; it would wait for the device to embed them itself
                inputs_embeds=embed(token[:, None]),
                last_hidden_state=self._hidden[:, None],
                cache=cache,
                use_cache=True,
            )
            token = _chosen(output.logits[:, 0], self._settings[:, 2:], noise[:, 1 + k])
            codes.append(token)
        self._text.copy_(torch.where(active, text, self._text))
        self._codes.copy_(torch.where(active[:, None], torch.stack(codes, dim=1), self._codes))
        return ()


def _chosen(logits: torch.Tensor, settings: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Choose a token of each row by the Gumbel-max trick, which is the same as sampling.

    Args:
        logits: (rows, vocabulary).
        settings: (rows, 2): temperature, 0 for the likeliest, and how many candidates there are.
        noise: (rows, `MAX_TOP_K`), uniform in [0, 1).
    """
    import torch

    num_candidates = min(MAX_TOP_K, logits.shape[1])
    values, tokens = logits.float().topk(num_candidates, dim=1)
    temperature, top_k = settings[:, :1], settings[:, 1:]
    gumbel = -torch.log(-torch.log(noise[:, :num_candidates].clamp(1e-10, 1 - 1e-7)))
    scores = values / temperature.clamp(min=1e-6) + gumbel * (temperature > 0)
    is_out = torch.arange(num_candidates, device=logits.device)[None] >= top_k
    return tokens.gather(1, scores.masked_fill(is_out, -torch.inf).argmax(dim=1, keepdim=True))[:, 0]
