from __future__ import annotations

import msgspec
import pytest

from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.cuda_ipc import CudaLimits
from omni_bus.config.schema import DeploymentConfig, PipelineConfig, StageConfig
from omni_bus.runtime.deployment import Deployment, read_deployment


def deployment(run_dir: str, bind: str = "ipc") -> Deployment:
    config = DeploymentConfig(
        name="demo",
        stages={"s": StageConfig(adapter="a")},
        pipelines={"p": PipelineConfig(edges=("in.a -> s.a", "s.b -> out.b"))},
        bind=bind,
    )
    return Deployment(
        config=config,
        pipelines={},
        run_dir=run_dir,
        cache_dir="/nowhere",
        threads={"s": 1},
        served={},
        coordinator_endpoint="ipc:///nowhere",
    )


def test_children_read_what_was_written(tmp_path) -> None:
    written = deployment(str(tmp_path))

    written.write()

    assert read_deployment(written.path) == written


@pytest.mark.parametrize("letters", [5, 64])
def test_socket_paths_fit_into_their_address(letters: int) -> None:
    stage, name = "s" * letters, "n" * letters

    endpoint = deployment(f"/run/user/4294967295/omni-bus/{name}").listen(f"{stage}.0")

    assert len(endpoint.removeprefix("ipc://")) <= 107
    assert deployment("/run/x").listen("a.0") != deployment("/run/x").listen("a.1")


def test_address_takes_any_free_port() -> None:
    assert deployment("/run/x", bind="tcp://127.0.0.1").listen("s.0") == "tcp://127.0.0.1:0"


def test_actors_are_told_what_they_may_lend() -> None:
    config = msgspec.structs.replace(
        deployment("/run/x").config, arena_bytes=1 << 20, arena_threshold_bytes=8192, cuda_bytes=1 << 21
    )

    told = msgspec.structs.replace(deployment("/run/x"), config=config)

    assert told.arena == ArenaLimits(max_bytes=1 << 20, threshold_bytes=8192)
    assert told.cuda == CudaLimits(max_bytes=1 << 21)


def test_damaged_file_is_an_error(tmp_path) -> None:
    (tmp_path / "deployment.json").write_text("{}")

    with pytest.raises(msgspec.ValidationError):
        read_deployment(tmp_path / "deployment.json")
