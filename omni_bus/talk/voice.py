"""Where the user's sound comes from and the answer goes to: files in real time, or microphone and speaker."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from omni_bus.errors import BadInput
from omni_bus.talk.piece import PIECE_BYTES, PIECE_S, RATE_HZ, SILENCE

if TYPE_CHECKING:
    from omni_bus.talk.script import Script

MAX_LATE_PIECES = 50
"""A second of the microphone waits at most for a loop that is busy; what comes then is lost."""


class Voice(Protocol):
    """Sound in and out in step, 20 ms at a time."""

    async def piece(self, at: float) -> bytes | None:
        """Wait for the 20 ms that end the piece from `at`, in seconds, and return them; None at the end."""
        ...

    def play(self, sound: bytes) -> None:
        """Let the next 20 ms be heard."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class FileVoice:
    """Speaks a script as fast as a person would: pieces are due on a grid, so that a late one delays no other."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()

    async def piece(self, at: float) -> bytes | None:
        """Return the script's next piece, not before it is spoken."""
        piece = self._script.piece(at)
        if piece is not None:
            await asyncio.sleep(self._began_at + at + PIECE_S - self._loop.time())
        return piece

    def play(self, sound: bytes) -> None:
        """Nobody listens."""

    def close(self) -> None:
        """Nothing is held."""


def require_device() -> Any:
    """Return the package `sounddevice`.

    Raises:
        BadInput: it is missing, or the library that it needs.
    """
    try:
        import sounddevice
    except (ImportError, OSError) as error:  # OSError: the package is there, PortAudio is not
        raise BadInput(
            f"microphone and speaker need the package sounddevice and PortAudio: {error} (pip install "
            "'omni-bus[talk]'; on Debian and Ubuntu also apt-get install libportaudio2), or speak files with --input",
            field="--input",
        ) from error
    return sounddevice


class DeviceVoice:
    """The default microphone and speaker.

    Raises:
        BadInput: there is none, or it can't be opened.
    """

    def __init__(self) -> None:
        device = require_device()
        self._loop = asyncio.get_running_loop()
        self._spoken: asyncio.Queue[bytes] = asyncio.Queue(MAX_LATE_PIECES)
        # Crosses from the loop to PortAudio's thread; a deque may be used by both. Two pieces bridge the loop's delays.
        self._heard: deque[bytes] = deque([SILENCE] * 2, maxlen=8)
        try:
            self._stream = device.RawStream(
                samplerate=RATE_HZ, blocksize=PIECE_BYTES // 2, channels=1, dtype="int16", callback=self._on_sound
            )
            self._stream.start()
        except device.PortAudioError as error:
            raise BadInput(f"microphone and speaker can't be opened: {error} (or speak files with --input)") from error

    def _on_sound(self, spoken: Any, heard: Any, _frames: int, _time: Any, _status: Any) -> None:
        """Called in PortAudio's thread each 20 ms."""
        heard[:] = self._heard.popleft() if self._heard else SILENCE
        self._loop.call_soon_threadsafe(self._take, bytes(spoken))

    def _take(self, spoken: bytes) -> None:
        if not self._spoken.full():
            self._spoken.put_nowait(spoken)

    async def piece(self, at: float) -> bytes | None:
        """Return what the microphone heard next; the device has its own clock."""
        return await self._spoken.get()

    def play(self, sound: bytes) -> None:
        """Let it be heard after what waits."""
        self._heard.append(sound)

    def close(self) -> None:
        """Stop the device."""
        self._stream.close()
