"""What is particular to each of transformers' speech models: its prompt, and which codec frames its tokens are.

All of them write frames of codec codes, one code of every codebook a frame, by `generate`. A model's class here says
what `generate` is called with, and a `Frames` turns the tokens that it hands to a streamer into frames.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    Waveform = npt.NDArray[np.float32]
    Column = list[int]


class Frames(ABC):
    """Codec frames of one request, as its tokens come."""

    @abstractmethod
    def add(self, tokens: Column) -> list[Column]:
        """Take one step's tokens, one of every codebook; return the frames that they complete."""


class UntilEnd(Frames):
    """Each step is a frame; one of nothing but end tokens ends the sound (CSM)."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._is_over = False

    def add(self, tokens: Column) -> list[Column]:
        """Return the step's frame, until the end."""
        self._is_over = self._is_over or all(token == self._end for token in tokens)
        return [] if self._is_over else [tokens]


class Delayed(Frames):
    """Codebook k of a frame comes `delays[k]` steps late; the first codebook's end token ends the sound (Dia)."""

    def __init__(self, delays: list[int], end: int) -> None:
        self._delays = delays
        self._end = end
        self._columns: list[Column] = []
        """The last steps, as many as the longest delay wants."""
        self._num_left: int | None = None
        """Frames that are still to come, once the end is known."""

    def add(self, tokens: Column) -> list[Column]:
        """Return the frame whose last codebook this step brings."""
        longest = max(self._delays)
        self._columns.append(tokens)
        if self._num_left is None and tokens[0] == self._end:
            self._num_left = min(longest, len(self._columns) - 1)
        if len(self._columns) <= longest or self._num_left == 0:
            return []
        frame = [self._columns[delay][k] for k, delay in enumerate(self._delays)]
        self._columns.pop(0)
        if self._num_left is not None:
            self._num_left -= 1
        return [frame]


class Staircase(Frames):
    """Codebook k comes k steps late, after a frame of begin tokens; one of end tokens alone ends the sound (Higgs).

    Args:
        num_codebooks: codes of a frame.
        begin: the token of which the last frame before the sound is made.
        end: the token of which the first step after it is made.
    """

    def __init__(self, num_codebooks: int, begin: int, end: int) -> None:
        self._num_codebooks = num_codebooks
        self._begin = begin
        self._end = end
        self._columns: list[Column] = []
        self._is_over = False

    def add(self, tokens: Column) -> list[Column]:
        """Return the frame whose last codebook this step has.

        A code that is none, as a begin or end token that was drawn too early, becomes the last one, as in the model's
        own processor.
        """
        if all(token == self._begin for token in tokens):
            self._columns = []
            return []
        self._is_over = self._is_over or all(token == self._end for token in tokens)
        if self._is_over:
            return []
        self._columns.append(tokens)
        if len(self._columns) < self._num_codebooks:
            return []
        frame = [min(column[k], self._begin - 1) for k, column in enumerate(self._columns)]
        self._columns.pop(0)
        return [frame]


class SpeechModel(ABC):
    """One loaded model.

    Args:
        model: the model.
        processor: its processor.
    """

    auto_class: ClassVar[str]
    """The class of transformers that loads it."""
    processor_class: ClassVar[str] = "AutoProcessor"
    """The class of transformers that makes its prompts."""
    takes_reference: ClassVar[bool] = True
    """Whether it can speak with a voice that it hears."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.processor = processor

    @property
    @abstractmethod
    def num_codebooks(self) -> int:
        """Codes of one frame."""

    @property
    @abstractmethod
    def frame_rate_hz(self) -> float:
        """Frames of one second."""

    @property
    def rate_hz(self) -> int:
        """Of the sound that it takes."""
        return int(self.processor.feature_extractor.sampling_rate)

    @property
    def max_tokens(self) -> int:
        """Steps that `generate` may take, the prompt's included where both share a context."""
        return int(self.model.config.max_position_embeddings)

    @property
    def num_late_steps(self) -> int:
        """Steps that a sound takes beyond one for each frame."""
        return 0

    @abstractmethod
    def prompt(self, text: str, voice: str | None, reference: Waveform | None, reference_text: str) -> dict[str, Any]:
        """Return what `generate` is called with.

        Raises:
            BadInput: they can't be honoured.
        """

    @abstractmethod
    def num_prompt_tokens(self, prompt: Mapping[str, Any]) -> int:
        """Return how much of `max_tokens` a prompt takes."""

    @abstractmethod
    def frames(self) -> Frames:
        """Return a reader of one request's tokens."""

    def generate(self, module: Any, arguments: dict[str, Any], put: Callable[[Column], None]) -> None:
        """Call `generate`, and hand over each step's tokens.

        Args:
            module: the model, or a copy of it that shares its weights.
            arguments: of the call.
            put: takes a step's tokens, one of every codebook; returns when the next step may begin.
        """
        module.generate(**arguments, streamer=_Streamer(put))

    def settings(self, temperature: float | None) -> dict[str, Any]:
        """Return how tokens are chosen, as arguments of `generate`; None leaves that to the model.

        Raises:
            BadInput: the model can't.
        """
        if temperature is None:
            return {}
        return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


class Csm(SpeechModel):
    """CSM: a language model for the first codebook of each frame, a small one for the others; Mimi's codes."""

    auto_class = "CsmForConditionalGeneration"

    @property
    def num_codebooks(self) -> int:
        """Codes of one frame."""
        return int(self.model.config.num_codebooks)

    @property
    def frame_rate_hz(self) -> float:
        """Frames of one second."""
        return float(self.model.config.codec_config.frame_rate)

    def prompt(self, text: str, voice: str | None, reference: Waveform | None, reference_text: str) -> dict[str, Any]:
        """Return a conversation whose earlier turn is the reference; a voice is a speaker's number."""
        voice = "0" if voice is None else voice
        if not (voice.isascii() and voice.isdigit() and len(voice) <= 2):
            raise BadInput("voice: it is no speaker of the model (allowed: a number from 0 to 99)", field="voice")
        turns = []
        if reference is not None:
            heard = [{"type": "text", "text": reference_text}, {"type": "audio", "path": reference}]
            turns.append({"role": voice, "content": heard})
        turns.append({"role": voice, "content": [{"type": "text", "text": text}]})
        return dict(self.processor.apply_chat_template(turns, tokenize=True, return_dict=True))

    def num_prompt_tokens(self, prompt: Mapping[str, Any]) -> int:
        """Return the prompt's length: text, and a position for each frame of the reference."""
        return int(prompt["input_ids"].shape[1])

    def frames(self) -> Frames:
        """Return a reader of one request's tokens."""
        return UntilEnd(int(self.model.config.codebook_eos_token_id))

    def settings(self, temperature: float | None) -> dict[str, Any]:
        """Return the same settings for both of its language models."""
        own = super().settings(temperature)
        return own | {f"depth_decoder_{name}": value for name, value in own.items()}


class Dia(SpeechModel):
    """Dia: an encoder of text, a decoder that writes all codebooks at once, some later than others; Dac's codes."""

    auto_class = "DiaForConditionalGeneration"

    @property
    def num_codebooks(self) -> int:
        """Codes of one frame."""
        return int(self.model.config.decoder_config.num_channels)

    @property
    def frame_rate_hz(self) -> float:
        """Frames of one second."""
        return self.rate_hz / float(self.processor.feature_extractor.hop_length)

    @property
    def max_tokens(self) -> int:
        """Steps of the decoder."""
        return int(self.model.config.decoder_config.max_position_embeddings)

    @property
    def num_late_steps(self) -> int:
        """Steps that wait for the last codebook of the last frame, and the end token."""
        return max(self.model.config.delay_pattern) + 1

    def prompt(self, text: str, voice: str | None, reference: Waveform | None, reference_text: str) -> dict[str, Any]:
        """Return the text after what the reference says; speakers stand in the text, as ``[S1]`` and ``[S2]``."""
        if voice is not None:
            raise BadInput(
                "voice: the model has none (allowed: null; [S1] and [S2] in the text part speakers)", field="voice"
            )
        said = f"{reference_text} {text}" if reference is not None else text
        longest = int(self.model.config.encoder_config.max_position_embeddings)
        if len(said.encode()) > longest:
            raise BadInput(f"text: it has more than {longest} bytes (allowed: at most {longest})", field="text")
        config = self.model.config
        # The processor's own are those of the published model.
        audio = {
            "delay_pattern": list(config.delay_pattern),
            "bos_token_id": config.decoder_config.bos_token_id,
            "eos_token_id": config.decoder_config.eos_token_id,
            "pad_token_id": config.decoder_config.pad_token_id,
            "sampling_rate": self.rate_hz,
        }
        return dict(self.processor(text=[said], audio=reference, text_kwargs={"padding": False}, audio_kwargs=audio))

    def num_prompt_tokens(self, prompt: Mapping[str, Any]) -> int:
        """Return the reference's length in the decoder."""
        return int(prompt["decoder_attention_mask"].shape[1]) - max(self.model.config.delay_pattern)

    def frames(self) -> Frames:
        """Return a reader of one request's tokens."""
        config = self.model.config
        return Delayed(list(config.delay_pattern), int(config.decoder_config.eos_token_id))

    def settings(self, temperature: float | None) -> dict[str, Any]:
        """Return them; the model samples at 1 and above, or not at all."""
        if temperature is not None and 0 < temperature < 1:
            raise BadInput(f"temperature: {temperature:g} came (allowed: 0, or 1 to 2)", field="temperature")
        return super().settings(temperature)


class Higgs(SpeechModel):
    """Higgs Audio v2: a Llama with layers of its own for sound, which writes all codebooks at once, each a step later.

    Voices that it would have to hear are refused: transformers encodes them with torchaudio, which doesn't come for
    each torch.
    """

    auto_class = "HiggsAudioV2ForConditionalGeneration"
    processor_class = "AutoTokenizer"
    takes_reference = False

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        from transformers import AutoFeatureExtractor

        self._sound: Any = AutoFeatureExtractor.from_pretrained(model.config.name_or_path)

    @property
    def num_codebooks(self) -> int:
        """Codes of one frame."""
        return int(self.model.config.num_codebooks)

    @property
    def frame_rate_hz(self) -> float:
        """Frames of one second."""
        return self.rate_hz / float(self._sound.hop_length)

    @property
    def rate_hz(self) -> int:
        """Of the sound that it makes."""
        return int(self._sound.sampling_rate)

    @property
    def num_late_steps(self) -> int:
        """The frame of begin tokens, and the steps that wait for the last codebook."""
        return self.num_codebooks

    def prompt(self, text: str, voice: str | None, reference: Waveform | None, reference_text: str) -> dict[str, Any]:
        """Return the conversation that the model was trained with."""
        if voice is not None:
            raise BadInput("voice: the model has none (allowed: null)", field="voice")
        turns = [
            {"role": "system", "content": [{"type": "text", "text": "Generate audio following instruction."}]},
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]
        found = self.processor.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return dict(found)

    def num_prompt_tokens(self, prompt: Mapping[str, Any]) -> int:
        """Return the prompt's length."""
        return int(prompt["input_ids"].shape[1])

    def frames(self) -> Frames:
        """Return a reader of one request's tokens."""
        config = self.model.config
        return Staircase(self.num_codebooks, int(config.audio_stream_bos_id), int(config.audio_stream_eos_id))

    def generate(self, module: Any, arguments: dict[str, Any], put: Callable[[Column], None]) -> None:
        """Call `generate`; its streamer is told nothing of codes, but each step is called with those of the last."""

        def before_step(module: Any, positional: Any, named: dict[str, Any]) -> None:
            del module, positional
            if (codes := named.get("audio_input_ids")) is not None:
                put(codes[0, -1].tolist())

        hook = module.register_forward_pre_hook(before_step, with_kwargs=True)
        try:
            found = module.generate(**arguments)
        finally:
            hook.remove()
        codes = getattr(found, "audio_sequences", found)
        put(codes[0, -1].tolist())


SPEECH_MODELS: dict[str, type[SpeechModel]] = {"csm": Csm, "dia": Dia, "higgs_audio_v2": Higgs}
"""By ``model_type`` of a checkpoint's ``config.json``."""


class _Streamer:
    """What `generate` hands its tokens to: first the prompt, then each step's."""

    def __init__(self, put: Callable[[Column], None]) -> None:
        self._put = put
        self._is_prompt = True

    def put(self, tokens: Any) -> None:
        """Take tokens; returns when the request's next step begins."""
        if self._is_prompt:
            self._is_prompt = False
        else:
            self._put(tokens.flatten().tolist())

    def end(self) -> None:
        """Nothing more comes; the end of the call says that too."""
