"""``metrics`` of an answer: what each stage did for it, by vLLM-Omni's names. A figure that nobody knows is absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateways.openai_models import IMAGE, MESSAGES, SOUND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateways.openai_choice import Ends
    from omni_bus.core.pipeline import Pipeline


def stage_metrics(pipeline: Pipeline, ends: Sequence[Ends]) -> dict[str, Any]:
    """Return the accounts of an answer's stages, summed over its choices; times are those of the slowest one.

    Args:
        pipeline: whose stages they are; their places in it are their ids.
        ends: of every choice.
    """
    stages = pipeline.stages
    found: dict[str, Any] = {}
    for stage_id, stage in enumerate(stages):
        accounts = [end.metrics[stage] for end in ends if stage in end.metrics]
        if accounts:
            found[str(stage_id)] = _stage(stage_id, stage, pipeline, accounts, ends)
    readers = pipeline.readers_of(MESSAGES)
    main = next((account for account in found.values() if account["stage_name"] in readers), None)
    top: dict[str, Any] = {"stage_metrics": found}
    if main is not None:
        top |= {name: main[name] for name in ("stage_id", "final_output_type", "num_tokens_in", "num_tokens_out")}
    return top


def _stage(
    stage_id: int, stage: str, pipeline: Pipeline, accounts: list[dict[str, Any]], ends: Sequence[Ends]
) -> dict[str, Any]:
    makes_sound = stage in pipeline.sources_of(SOUND)
    total_s = max(account["total_s"] for account in accounts)
    first_s = max(account["first_output_s"] for account in accounts)
    num_tokens = sum(account["completion_tokens"] for account in accounts)
    num_chunks = sum(account["chunks_out"] for account in accounts)
    found: dict[str, Any] = {
        "stage_id": stage_id,
        "stage_name": stage,
        "final_output_type": "audio" if makes_sound else "image" if stage in pipeline.sources_of(IMAGE) else "text",
        "finish_reason": accounts[0]["finish_reason"],
        "num_tokens_in": max(account["prompt_tokens"] for account in accounts),
        "num_tokens_out": num_tokens,
        "stage_gen_time_ms": 1000 * total_s,
        "serving_time_to_first_output_ms": 1000 * first_s,
        "output_unit_type": "token" if num_tokens else "chunk",
        "output_unit_count": num_tokens or num_chunks,
    }
    if count := found["output_unit_count"]:
        found["time_per_output_unit_ms"] = 1000 * total_s / count
    if num_tokens:
        found["vllm_ttft_ms"] = 1000 * first_s
        longest = max(account["completion_tokens"] for account in accounts)
        if longest > 1:
            found["vllm_tpot_ms"] = 1000 * (total_s - first_s) / (longest - 1)
    if makes_sound and (rate_hz := max(end.rate_hz for end in ends)):
        num_frames = sum(end.num_frames for end in ends)
        found |= {
            "audio_frames": num_frames,
            "audio_sample_rate": rate_hz,
            "audio_duration_s": num_frames / rate_hz,
        }
    return found
