"""One continuous Ogg/Opus stream each way, piece by piece (sphn, the codec of Moshi's own client and server).

Everything named ``_blocking`` belongs on an `EncodingPool`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.float32]

RATE_HZ = 24_000

INSTALL_SPHN = 'pip install "omni-bus[moshi]"'


def missing_package() -> str:
    """Return what to install; empty if it is there."""
    return "" if importlib.util.find_spec("sphn") else f"Ogg/Opus streams need sphn ({INSTALL_SPHN})"


class OpusReader:
    """Bytes of a stream, cut anywhere, to samples at 24 kHz, mono."""

    def __init__(self) -> None:
        import sphn

        self._reader = sphn.OpusStreamReader(RATE_HZ)

    def feed_blocking(self, data: bytes) -> Samples:
        """Return the samples that are complete, (samples,) float32.

        Raises:
            BadInput: it is no Ogg/Opus; the stream can't go on.
        """
        try:
            return self._reader.append_bytes(data)
        except BaseException as error:  # a panic in Rust is no Exception, and the thread is not this client's alone
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise BadInput(f"audio: it can't be decoded: {error} (allowed: Ogg/Opus)", field="audio") from error


class OpusWriter:
    """Samples at 24 kHz, mono, to a stream with a page for every 40 ms; the head comes with the first."""

    def __init__(self) -> None:
        import sphn

        self._writer = sphn.OpusStreamWriter(RATE_HZ)

    def feed_blocking(self, samples: Samples) -> bytes:
        """Return the pages that are complete, often none, of (samples,) float32 in [-1, 1]."""
        return bytes(self._writer.append_pcm(samples))
