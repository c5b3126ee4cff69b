"""pipecat's OpenAI Realtime service asks in writing and aloud.

``python pipecat_talk.py URL MODEL QUESTION.pcm``
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

RATE_HZ = 24_000
PIECE = RATE_HZ // 5


class Listener(FrameProcessor):
    """What comes out, answer by answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: asyncio.Queue[dict] = asyncio.Queue()
        self._text, self._bytes = "", 0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Count what is spoken."""
        await super().process_frame(frame, direction)
        match frame:
            case TTSAudioRawFrame():
                self._bytes += len(frame.audio)
            case TTSTextFrame():
                self._text += frame.text
            case LLMFullResponseEndFrame():
                self.answers.put_nowait({"text": self._text, "bytes": self._bytes})
                self._text, self._bytes = "", 0
            case ErrorFrame():
                sys.exit(str(frame))
        await self.push_frame(frame, direction)


async def main(url: str, model: str, sound: bytes) -> None:
    """Ask twice and print both answers."""
    service = OpenAIRealtimeLLMService(
        api_key="none", base_url=f"{url}/realtime", settings=OpenAIRealtimeLLMService.Settings(model=model)
    )
    listener = Listener()
    context = LLMContextAggregatorPair(LLMContext([{"role": "user", "content": "What is the capital of France?"}]))
    worker = PipelineWorker(Pipeline([context.user(), service, listener, context.assistant()]))
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await worker.queue_frames([LLMRunFrame()])
    answers = [await listener.answers.get()]
    pieces = [sound[start : start + PIECE] for start in range(0, len(sound), PIECE)]
    await worker.queue_frames([InputAudioRawFrame(audio=p, sample_rate=RATE_HZ, num_channels=1) for p in pieces])
    answers.append(await listener.answers.get())
    print(json.dumps(answers))
    await worker.cancel()
    await running


asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_bytes()))
