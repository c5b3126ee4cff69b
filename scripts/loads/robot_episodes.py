"""A simulated robot does Meta-World's tasks with a policy that it asks by the stock `openpi_client`.

``scripts/robot_episodes [--host HOST] [--port PORT] [--episodes N] [--task NAME …] [--seed N] [--video FILE]`` prints
how often each task was done, and writes one more episode as MP4, of the first task named, else of pick-place. The robot
executes four actions of each chunk and looks again. Exits with 1 if any episode failed. Needs
``pip install -e '.[robot]'`` and the stock client, which asks for NumPy 1 and works with 2:
``pip install --no-deps openpi-client==0.1.2``. Pictures are drawn without a display by EGL (``apt-get install libegl1
libgl1-mesa-dri``), or by OSMesa with ``MUJOCO_GL=osmesa``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from loads.metaworld_tasks import TASKS, make_environment, run_episode

FILMED = "pick-place-v3"
FRAMES_PER_S = 40  # half the speed of the simulated robot


class Client:
    """The stock client, and how long its answers took."""

    def __init__(self, host: str, port: int, api_key: str | None) -> None:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy

        self._policy = WebsocketClientPolicy(host, port, api_key)
        self.metadata: Any = self._policy.get_server_metadata()
        self.seconds: list[float] = []

    def infer(self, observation: dict[str, Any]) -> Any:
        """Return the server's answer."""
        started = time.perf_counter()
        answer = self._policy.infer(observation)
        self.seconds.append(time.perf_counter() - started)
        return answer


def write_video(file: Path, frames: list[np.ndarray[Any, Any]]) -> None:
    """Write pictures, uint8 (height, width, 3), as H.264."""
    import av

    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("libx264", rate=FRAMES_PER_S, options={"crf": "20"})
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
        container.mux(stream.encode())


def film(file: Path, client: Client, task: str, seed: int) -> None:
    """Write one more episode of a task as a video."""
    environment = make_environment(task, seed, is_seen=True)
    frames: list[np.ndarray[Any, Any]] = []
    is_done, _ = run_episode(environment, client.infer, TASKS[task], on_frame=frames.append)
    environment.close()
    write_video(file, frames + frames[-1:] * FRAMES_PER_S)  # the end stands still for a second
    print(f"wrote {file}: {task}, {len(frames)} steps, {'done' if is_done else 'not done'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key")
    parser.add_argument("--episodes", type=int, default=10, help="of each task")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="one of several; all by default")
    parser.add_argument("--seed", type=int, default=1000, help="of the places of things; not one of the training's")
    parser.add_argument("--video", type=Path, help="an MP4 file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="gymnasium")
    if args.video is not None and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is imported
    client = Client(args.host, args.port, args.api_key)
    tasks = args.task or list(TASKS)
    num_done = 0
    for task in tasks:
        environment = make_environment(task, args.seed)
        done = [run_episode(environment, client.infer, TASKS[task])[0] for _ in range(args.episodes)]
        environment.close()
        num_done += sum(done)
        print(f"{task:23} {TASKS[task]:41} {sum(done)}/{args.episodes}", flush=True)
    num_all = args.episodes * len(tasks)
    middle_ms = float(np.median(client.seconds or [0.0])) * 1e3
    print(
        f"{num_done} of {num_all} done, {len(client.seconds)} observations, answered within {middle_ms:.1f} ms (median)"
    )
    if args.video is not None:
        film(args.video, client, args.task[0] if args.task else FILMED, args.seed)
    return 0 if num_done == num_all else 1


if __name__ == "__main__":
    sys.exit(main())
