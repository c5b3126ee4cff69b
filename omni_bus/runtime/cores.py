"""Cores are shared out like device memory: engines that each take all of them slow one another down many times over.

Measured on two cores: two engines with two spinning threads each fell to a fifteenth of their speed; with one thread
each and passive waiting they kept nearly all of it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.config.schema import StageConfig

PASSIVE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Idle threads of OpenMP runtimes sleep instead of spinning."""

MEMORY = {"MALLOC_ARENA_MAX": "2"}
"""Pools of the C library's allocator. It would make one for each thread, up to eight a core, and keep what each has had
in it: threads that compute by turns, as requests of a stage do, would together keep many times what one needs.
"""

SPIN_COUNT = "2000"
"""Rounds for which threads that work together wait for one another before they sleep (libgomp; about ten microseconds).

A step of a small model has hundreds of parallel regions. Woken for each, the second thread was as good as none: 26 ms
for a token of SmolLM2 on two cores, as on one; with this 21 ms. It is over between two steps, so that others get the
core; with libgomp's own 300,000 it is not.
"""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(stages: Mapping[str, StageConfig], num_cores: int) -> dict[str, int]:
    """Return the threads of each stage's replicas: what its configuration says, else an even share of what is left."""
    fixed = sum(stage.threads * stage.replicas for stage in stages.values() if stage.threads is not None)
    sharers = sum(stage.replicas for stage in stages.values() if stage.threads is None)
    each = max(1, (num_cores - fixed) // sharers) if sharers else 1
    return {name: stage.threads if stage.threads is not None else each for name, stage in stages.items()}


def environment(environ: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Return a child's environment: its threads; few pools of memory, no long spinning unless the user asked for it."""
    threads = str(num_threads)
    defaults = PASSIVE | MEMORY
    if num_threads > 1:
        defaults["GOMP_SPINCOUNT"] = SPIN_COUNT
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    return {**defaults, **environ, **counts}
