"""Texts spoken and recognised: before a run, for sounds to send; after it, for the word errors of its answers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from omni_bus.bench.audio_dialects import Speech, Transcription
from omni_bus.bench.record import EMPTY, Record, one_line
from omni_bus.bench.word_errors import WordErrors, count, total
from omni_bus.errors import Unavailable
from omni_bus.media.encoder import wav_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_bus.bench.client import Server
    from omni_bus.bench.dataset import Prompt
    from omni_bus.bench.dialects import Wishes

AT_ONCE = 2
"""Requests that are under way while nothing is measured."""

NUM_EXAMPLES = 3


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What a recogniser made of answers, or of the sounds that were sent to it."""

    errors: WordErrors
    num_texts: int
    """That were compared."""
    failures: tuple[str, ...] = ()
    """Of the recogniser; their texts are not in the errors."""
    worst: tuple[tuple[str, str], ...] = ()
    """Texts with the most errors: what was said and what was heard."""


def compared(pairs: Iterable[tuple[str, str]], failures: Sequence[str] = ()) -> Heard:
    """Return the errors of texts that were said and heard."""
    found = [(count(said, heard), said, heard) for said, heard in pairs]
    wrong = sorted((one for one in found if one[0].errors), key=lambda one: -one[0].errors)
    return Heard(
        errors=total(errors for errors, _, _ in found),
        num_texts=len(found),
        failures=tuple(failures),
        worst=tuple((one_line(said), one_line(heard)) for _, said, heard in wrong[:NUM_EXAMPLES]),
    )


async def recognise(records: Sequence[Record], prompts: Sequence[Prompt], recogniser: Server, wishes: Wishes) -> Heard:
    """Send what was spoken to a recogniser.

    Args:
        records: of the answers; those without kept sound are left out.
        prompts: what each of them was to say.
        recogniser: a server that transcribes.
        wishes: for its requests.
    """
    kept = [(prompts[record.index].as_text(), record) for record in records if record.is_complete and record.pcm]
    turns = asyncio.Semaphore(AT_ONCE)

    async def hear(spoken: Record) -> Record:
        sound = msgspec.structs.replace(prompts[spoken.index], sound=_wav(spoken), sound_name="speech.wav")
        async with turns:
            return await _ask(recogniser, Transcription(), sound, wishes)

    heard = await asyncio.gather(*(hear(record) for _, record in kept))
    pairs: list[tuple[str, str]] = []
    failures: list[str] = []
    for (said, _), record in zip(kept, heard, strict=True):
        # Where nothing was heard there is no text, which is no failure of the recogniser.
        if record.failure and record.failure != EMPTY:
            failures.append(f"{record.failure}: {record.message}")
        else:
            pairs.append((said, "".join(record.answer)))
    return compared(pairs, failures)


async def spoken(prompts: Sequence[Prompt], voice: Server, wishes: Wishes) -> list[Prompt]:
    """Return prompts with their texts spoken; each text once.

    Raises:
        Unavailable: one of them can't be spoken.
    """
    turns = asyncio.Semaphore(AT_ONCE)
    texts = list(dict.fromkeys(prompt.as_text() for prompt in prompts))

    async def speak(text: str) -> Record:
        async with turns:
            found = await _ask(voice, Speech(), msgspec.structs.replace(prompts[0], text=text, messages=()), wishes)
        if found.failure:
            message = f"the sounds to send could not be spoken first: {found.failure}: {found.message}"
            raise Unavailable(f"{message} (allowed: --dataset-name custom_audio with files)")
        return found

    records = dict(zip(texts, await asyncio.gather(*map(speak, texts)), strict=True))
    return [_with_sound(prompt, records[prompt.as_text()]) for prompt in prompts]


def _with_sound(prompt: Prompt, record: Record) -> Prompt:
    seconds = sum(length_s for _, length_s in record.sounds)
    return msgspec.structs.replace(prompt, sound=_wav(record), sound_name="speech.wav", sound_s=seconds)


async def _ask(server: Server, dialect: Speech | Transcription, prompt: Prompt, wishes: Wishes) -> Record:
    record = Record(index=0, intended_at=0.0)
    await server.ask(record, dialect.body(prompt, wishes), time.perf_counter, keeps_answer=True)
    return record


def _wav(record: Record) -> bytes:
    data = b"".join(record.pcm)
    return wav_header(record.rate_hz, record.channels, len(data)) + data
