"""Text to speech with flite (CMU, BSD-like licence): small built-in voices, English, no weights to fetch.

A system program (Debian's package ``flite``), run once for each sentence. Facts about flite 2.2, measured: a sentence
of five seconds takes 0.1 s on one core. It reads text from its standard input, where no other process sees it; it
writes a wav file and goes back in it, so that a pipe won't do. It speaks with its default voice if it doesn't know the
one that is asked for, and takes no characters beyond ASCII. Numbers it reads out itself; dates, times and units it
doesn't, so they are written out before.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import unicodedata
import wave
from typing import TYPE_CHECKING, Annotated, BinaryIO, ClassVar

import msgspec
from msgspec import Meta

from adapters.packages import missing
from adapters.sentences import sentences_of, written_out
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import StageFailed, StartFailed, unknown_name
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Blob, Payload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from omni_bus.engine import Context, Report

PROGRAM = "flite"
INSTALL_PROGRAM = "apt-get install flite"
INSTALL_PACKAGES = "pip install 'omni-bus[voice]'"

PIECES_PER_S = 4
"""Audio leaves in pieces of a quarter of a second, so that credit and cancels are finer than a sentence."""

LIST_TIMEOUT_S = 10.0

_NO_VOICES = frozenset({"awb_time"})
"""It can only tell the time."""

_VOICES = re.compile(r"^Voices available:(.*)$", re.MULTILINE)


class FliteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    voice: str = "slt"
    """The voice of requests that name none."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that are open at once; as many sentences as the stage has threads are spoken at a time."""


class FliteParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    voice: str | None = None
    """One of the program's voices; None takes the stage's."""

    speed: Annotated[float, Meta(ge=0.5, le=2)] = 1.0
    """2 is twice as fast."""


class FliteVoice(StreamingEngine):
    """Text in, as pieces that concatenate; PCM out: mono, s16, 16 kHz (8 kHz for the voice ``kal``).

    Nothing is synthesised before all audio of the sentence before it was taken, and no text is taken meanwhile. The
    same text gives the same samples.
    """

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    Options: ClassVar[type[msgspec.Struct]] = FliteOptions
    Params: ClassVar[type[msgspec.Struct]] = FliteParams

    def __init__(self, options: FliteOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._turns = asyncio.Semaphore(context.num_threads)
        self._voices: tuple[str, ...] = ()

    @classmethod
    def check(cls, options: FliteOptions) -> list[str]:
        """Return what is missing: the program, a package, or the voice."""
        if shutil.which(PROGRAM) is None:
            return [f"adapter: flite needs the program {PROGRAM} ({INSTALL_PROGRAM})"]
        if problems := missing("flite", {INSTALL_PACKAGES: ("anyascii", "hibari", "sentencex")}):
            return problems
        known = _voices_blocking()
        return [] if options.voice in known else [f"voice: {unknown_name('voice', options.voice, known).message}"]

    @classmethod
    def voices(cls, options: FliteOptions) -> tuple[str, ...]:
        """Return the program's voices."""
        return _voices_blocking()

    def load(self, report: Report) -> None:
        """Ask the program for its voices, and load what texts are prepared with.

        Raises:
            StartFailed: the program, a package or the voice is not there; says how to get it.
        """
        report("voices", 0.0)
        if problems := self.check(self.options):
            raise StartFailed(problems[0])
        self._voices = _voices_blocking()
        report("voices", 1.0)
        report("warm-up", 0.0)
        import sentencex  # noqa: F401

        plain("Warm up 3 km.")
        report("warm-up", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Speak one text; text without anything to speak gives no audio and still finishes.

        Raises:
            UnknownName: a voice that the program doesn't have; lists those that it has.
            BadInput: input that isn't text.
            StageFailed: the program failed.
        """
        params: FliteParams = request.params
        voice = params.voice or self.options.voice
        if voice not in self._voices:
            raise unknown_name("voice", voice, self._voices, field="voice")
        seconds = 0.0
        async for sentence in sentences_of(inputs):
            if text := plain(sentence):
                async with self._turns:
                    sound = await _speak(text, voice, params.speed)
                seconds += sound.num_frames / sound.rate_hz
                for piece in _pieces(sound):
                    yield "audio", piece
        yield Finish(detail={"seconds": seconds})


def plain(text: str) -> str:
    """Return a text in ASCII, written out, other letters by what sounds like them; empty if nothing can be spoken."""
    from anyascii import anyascii

    # First "10 °C", whose sign would get lost; then "GBP20", which "£20" becomes.
    spelt = written_out(anyascii(written_out(unicodedata.normalize("NFC", text))))
    found = "".join(char for char in spelt if char.isprintable())
    return found if any(char.isalnum() for char in found) else ""


async def _speak(text: str, voice: str, speed: float) -> Audio:
    """Run the program on one sentence; a cancel kills it.

    Raises:
        StageFailed: it failed.
    """
    with _memory() as written, _memory() as spoken:
        written.write(f"{text}\n".encode())
        written.seek(0)
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("-voice", voice, "--setf", f"duration_stretch={1 / speed:.6f}"),
            *("-o", f"/proc/self/fd/{spoken.fileno()}"),
            stdin=written,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(spoken.fileno(),),
        )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode or not spoken.seek(0, os.SEEK_END):
            raise StageFailed(f"flite ended with {process.returncode} and without sound")
        spoken.seek(0)
        with wave.open(spoken, "rb") as sound:
            data = sound.readframes(sound.getnframes())
            return Audio(sound.getframerate(), sound.getnchannels(), "s16", Blob(data))


def _memory() -> BinaryIO:
    """Return a file that is nowhere on a disk."""
    return open(os.memfd_create("omni-bus-flite", os.MFD_CLOEXEC), "w+b", buffering=0)


def _pieces(sound: Audio) -> list[Audio]:
    view, step = sound.data.view, sound.rate_hz // PIECES_PER_S * sound.channels * 2
    starts = range(0, len(view), step)
    return [Audio(sound.rate_hz, sound.channels, "s16", Blob(view[start : start + step])) for start in starts]


def _voices_blocking() -> tuple[str, ...]:
    """Ask the program for its voices."""
    done = subprocess.run([PROGRAM, "-lv"], capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=False)
    found = _VOICES.search(done.stdout)
    names = found[1].split() if found is not None else []
    return tuple(dict.fromkeys(name for name in names if name not in _NO_VOICES))
