"""What robots say, to be sent whole and damaged: observations with arrays, the older form of arrays, resets."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from omni_bus.media.numpy_frames import encode
from omni_bus.wire.records import pack

ROUTE = "/v1/realtime/robot/openpi"

TOML = """
[stages.policy]
adapter = "robot-policy"
policy = { name = "metaworld" }
[stages.policy.images.camera]
is_required = false
size = [8, 8]
[stages.policy.states."observation/state"]
dim = 39

[pipelines.robot]
max_queued = 1000
edges = ["in.observation -> policy.observation", "policy.actions -> out.actions"]
"""


def corpus() -> list[bytes]:
    """Return messages that mean something."""
    state = np.linspace(0, 1, 39, dtype=np.float32)
    whole: dict[str, Any] = {"observation/state": state, "prompt": "open the drawer"}
    odd = [
        whole,
        whole | {"camera": np.zeros((9, 7, 3), np.uint8), "session_id": "a", "seed": 3},
        whole | {"camera": np.zeros((3, 9, 7), np.float16), "session_id": 7},
        whole | {"sampling_params": {"num_inference_steps": 3}, "endpoint": "infer"},
        {"endpoint": "reset"},
        {"observation/state": np.full(39, np.nan), "prompt": "open the drawer"},
        {"observation/state": list(map(float, state)), "prompt": np.str_("open the drawer")},
        {"observation/state": state.astype(">f8"), "prompt": "open the drawer", "more": [{"a": [None, True, b"x"]}]},
    ]
    older = {"nd": True, "type": "<f4", "kind": "f", "shape": [39], "data": state.tobytes()}
    return [*map(encode, map(pack, odd)), msgspec.msgpack.encode(whole | {"observation/state": older})]
