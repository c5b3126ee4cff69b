"""What vLLM measures of itself, as its own loggers count it for Prometheus."""

# vLLM, and prometheus_client with it, is not installed where the types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from omni_bus.wire.metrics import Metric, Sample

PREFIX = "vllm:"
KINDS = ("counter", "gauge", "histogram")


def engine_metrics(engine: Any) -> tuple[Metric, ...]:
    """Return what a ``vllm.v1.engine.llm_engine.LLMEngine`` has counted in this process; nothing if it doesn't count.

    vLLM labels them with its name of the model, which may be a folder's and is left out here, and its engine's number.
    """
    if engine is None or not engine.log_stats:
        return ()
    from prometheus_client import REGISTRY

    # What runs and waits is set at the end of a step, and an abort since then is no step.
    scheduler = engine.engine_core.engine_core.scheduler
    engine.logger_manager.record(scheduler_stats=scheduler.make_stats(), iteration_stats=None)

    return tuple(
        Metric(
            family.name,
            family.type if family.type in KINDS else "unknown",
            family.documentation,
            tuple(
                Sample(sample.name, sample.value, {k: v for k, v in sample.labels.items() if k != "model_name"})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ),
        )
        for family in REGISTRY.collect()
        if family.name.startswith(PREFIX)
    )
