"""Speech to text with PocketSphinx (BSD; its English models are inside the package), word by word while sound comes.

Facts about pocketsphinx 5.1.1, measured: two to ten times as fast as speech on one core; it wants clean speech of the
full band, and writes lower case without punctuation. Words that have settled are put out while the speaker goes on. A
word is settled when it ended a second ago and three looks found it the same; what is younger may still change.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.handover import on_thread
from adapters.packages import missing
from adapters.speech_input import INSTALL_SOXR, RATE_HZ, speech_of
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StartFailed
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from adapters.speech_input import Samples
    from omni_bus.engine import Context, Report
    from omni_bus.wire.payloads import Payload

INSTALL_ENGINE = "pip install 'pocketsphinx>=5.1'"

LOOK = RATE_HZ // 4
"""Samples between two looks at what was understood; a cancel waits for one."""

_FRAMES_PER_S = 100
_SETTLED_FRAMES = 100
_NUM_LOOKS = 3
_PAUSE_FRAMES = 100
"""So long a silence ends an utterance."""
_LONGEST_FRAMES = 30 * _FRAMES_PER_S
"""So does this: what is searched grows with the utterance."""


class PocketSphinxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=64)] = 4
    """Requests that are open at once, each with a decoder of its own (some 60 MB); they take turns on one thread."""


class PocketSphinxParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    language: str | None = None
    """``en``."""


class Word(msgspec.Struct, frozen=True):
    """A word and its place in the utterance, in frames of 10 ms."""

    text: str
    start: int
    end: int


class PocketSphinx(StreamingEngine):
    """Sound in, of any rate; out come the text, in settled words, and each utterance with its times."""

    accepts: ClassVar[dict[str, str]] = {"audio": "audio"}
    emits: ClassVar[dict[str, str]] = {"text": "text", "segments": "json"}
    Options: ClassVar[type[msgspec.Struct]] = PocketSphinxOptions
    Params: ClassVar[type[msgspec.Struct]] = PocketSphinxParams

    def __init__(self, options: PocketSphinxOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pocketsphinx")
        self._idle: list[Any] = []
        """Decoders that no request has."""
        self._cepstral_mean = ""

    @classmethod
    def check(cls, options: PocketSphinxOptions) -> list[str]:
        """Return what is missing."""
        return missing("pocketsphinx", {INSTALL_ENGINE: ("pocketsphinx",), INSTALL_SOXR: ("soxr",)})

    def load(self, report: Report) -> None:
        """Load the models once.

        Raises:
            StartFailed: a package is not there; says how to get it.
        """
        report("import", 0.0)
        try:
            import pocketsphinx  # noqa: F401
            import soxr  # noqa: F401
        except ImportError as error:
            message = f"pocketsphinx can't be imported ({INSTALL_ENGINE}, {INSTALL_SOXR}): {error}"
            raise StartFailed(message) from error
        report("weights", 0.0)
        decoder = self._thread.submit(_decoder_blocking).result()
        self._cepstral_mean = decoder.get_cmn()
        self._idle.append(decoder)
        report("weights", 1.0)

    def close(self) -> None:
        """Give the decoders and the thread back."""
        self._thread.shutdown()
        self._idle.clear()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Write down one sound; one without speech gives no text and still finishes.

        Raises:
            BadInput: input that isn't sound, or another language than English.
        """
        language = request.params.language
        if language not in (None, "en"):
            raise BadInput(f"language: {language[:40]!r} came (allowed: en)", field="language")
        decoder = self._idle.pop() if self._idle else await on_thread(self._thread, _decoder_blocking)
        decoder.set_cmn(self._cepstral_mean)  # what it learnt of another speaker's channel
        heard, num_samples = _Heard(decoder), 0
        try:
            async with aclosing(speech_of(inputs)) as speech:
                async for samples in speech:
                    num_samples += len(samples)
                    for start in range(0, len(samples), LOOK):
                        await on_thread(self._thread, heard.feed_blocking, samples[start : start + LOOK])
                        for output in heard.take(request.outputs):
                            yield output
            await on_thread(self._thread, heard.end_blocking)
            for output in heard.take(request.outputs):
                yield output
        finally:
            await on_thread(self._thread, heard.close_blocking)
            self._idle.append(decoder)
        yield Finish(detail={"seconds": num_samples / RATE_HZ, "language": "en"})


class _Heard:
    """One request's utterances, one after the other."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._is_open = False
        self._words = SettledWords()
        self._said: list[Word] = []
        """Of this utterance."""
        self._offset = 0
        """Samples before this utterance."""
        self._num_samples = 0
        self._num_segments = 0
        self._has_text = False
        self._outputs: list[tuple[str, Payload]] = []

    def feed_blocking(self, samples: Samples) -> None:
        """Take a quarter of a second."""
        if not self._is_open:
            self._decoder.start_utt()
            self._is_open = True
        self._decoder.process_raw(_pcm(samples))
        self._num_samples += len(samples)
        words, frames = words_of(self._decoder), self._decoder.n_frames()
        self._say(self._words.look(words, frames))
        pause = frames - words[-1].end if words else 0
        if pause > _PAUSE_FRAMES or frames > _LONGEST_FRAMES:
            self.end_blocking()

    def end_blocking(self) -> None:
        """End the utterance; all of it is settled."""
        if not self._is_open:
            return
        self.close_blocking()
        self._say(self._words.end(words_of(self._decoder)))
        if self._said:
            offset_s = self._offset / RATE_HZ
            segment = {
                "id": self._num_segments,
                "start": round(offset_s + self._said[0].start / _FRAMES_PER_S, 3),
                "end": round(offset_s + self._said[-1].end / _FRAMES_PER_S, 3),
                "text": " " + " ".join(word.text for word in self._said),
            }
            self._outputs.append(("segments", Json(segment)))
            self._num_segments += 1
        self._offset = self._num_samples
        self._said = []
        self._words = SettledWords()

    def close_blocking(self) -> None:
        """Let the decoder be ready for another utterance."""
        if self._is_open:
            self._is_open = False
            self._decoder.end_utt()

    def take(self, wanted: frozenset[str]) -> Iterator[tuple[str, Payload]]:
        """Yield what came of it since the last time, on these ports."""
        outputs, self._outputs = self._outputs, []
        return (output for output in outputs if output[0] in wanted)

    def _say(self, words: Sequence[Word]) -> None:
        for word in words:
            self._said.append(word)
            self._outputs.append(("text", Text(f" {word.text}" if self._has_text else word.text)))
            self._has_text = True


class SettledWords:
    """Which words of an utterance are certain, look by look; pure."""

    def __init__(self) -> None:
        self._before: list[list[Word]] = []
        """What the last looks found."""
        self._until = 0
        """Frame where the words that were put out end."""

    def look(self, words: list[Word], num_frames: int) -> list[Word]:
        """Return the words that settled since the last look.

        Args:
            words: all of the utterance, as they are understood now.
            num_frames: how much of it was heard.
        """
        self._before = [*self._before, words][-_NUM_LOOKS:]
        if len(self._before) < _NUM_LOOKS:
            return []
        settled: list[Word] = []
        for word in words:
            if word.start < self._until:
                continue
            if word.end > num_frames - _SETTLED_FRAMES or not all(word in look for look in self._before):
                break
            settled.append(word)
        if settled:
            self._until = settled[-1].end
        return settled

    def end(self, words: list[Word]) -> list[Word]:
        """Return the rest: what begins after the words that were put out, whatever these are understood as now."""
        return [word for word in words if word.start >= self._until]


def words_of(decoder: Any) -> list[Word]:
    """Return what a decoder understands, without silence, noises and marks of variants."""
    found: list[Word] = []
    for segment in decoder.seg() or ():
        text = segment.word.partition("(")[0]
        if text and text[0] not in "<[+":
            found.append(Word(text, segment.start_frame, segment.end_frame))
    return found


def _pcm(samples: Samples) -> bytes:
    import numpy as np

    return (np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def _decoder_blocking() -> Any:
    from pocketsphinx import Decoder

    return Decoder(samprate=RATE_HZ, loglevel="FATAL")
