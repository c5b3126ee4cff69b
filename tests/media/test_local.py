"""No spelling of a path leads out of the allowed folder."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from omni_bus.errors import BadInput, MediaTooLarge
from omni_bus.media.local import is_file_url, read_file_url_blocking

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with files, beside a secret."""
    (tmp_path / "secret").write_bytes(b"secret")
    found = tmp_path / "media"
    (found / "sub").mkdir(parents=True)
    (found / "a.png").write_bytes(b"picture")
    (found / "sub" / "b c.wav").write_bytes(b"sound")
    (tmp_path / "media-evil").mkdir()
    (tmp_path / "media-evil" / "x").write_bytes(b"secret")
    return found


def read(url: str, root: Path | str, max_bytes: int = 1000) -> bytes:
    return read_file_url_blocking(url, root=str(root), field="image_url.url", max_bytes=max_bytes)


def test_files_below_the_folder_are_read(root: Path) -> None:
    assert read(f"file://{root}/a.png", root) == b"picture"
    assert read(f"FILE://localhost{root}/a.png", root) == b"picture"
    assert read(f"file://{root}/sub/b%20c.wav", root) == b"sound"
    assert read(f"file://{root}/a.png", f"{root}/") == b"picture"


def test_folder_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)

    assert read(f"file://{root}/a.png", tmp_path / "link") == b"picture"


@pytest.mark.parametrize(
    "path",
    [
        "{root}/../secret",
        "{root}/sub/../../secret",
        "{root}/%2e%2e/secret",
        "{root}/%2e%2e%2fsecret",
        "{root}/..%2fsecret",
        "{root}/sub/..%2f..%2fsecret",
        "{root}/%252e%252e/secret",
        "{root}//secret",
        "{root}/./a.png",
        "{root}//{root}/../secret",
        "{root}",
        "{root}/",
        "{root}/sub",
        "{root}-evil/x",
        "{outer}/secret",
        "/etc/passwd",
        "/proc/self/environ",
        "{root}/a.png%00.png",
        "{root}/a.png?x",
        "{root}/a.png#x",
        "{root}/%ff",
        "{root}/none",
        "{root}/" + "x" * 5000,
        "relative",
        "",
    ],
)
def test_nothing_else_is_read(root: Path, tmp_path: Path, path: str) -> None:
    url = f"file://{path.format(root=root, outer=tmp_path)}"
    with pytest.raises(BadInput) as caught:
        read(url, root)

    assert caught.value.message.startswith("image_url.url: no file came that may be read")
    assert str(tmp_path) not in caught.value.message


def test_other_hosts_are_none_of_ours(root: Path) -> None:
    with pytest.raises(BadInput):
        read(f"file://elsewhere{root}/a.png", root)
    with pytest.raises(BadInput):
        read(f"file:////elsewhere{root}/a.png", root)


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "inner").symlink_to(root / "a.png")
    (root / "up").symlink_to("..")
    (root / "loop").symlink_to("loop")

    for name in ("link", "inner", "up/secret", "up/media/a.png", "loop"):
        with pytest.raises(BadInput):
            read(f"file://{root}/{name}", root)


def test_folder_swapped_for_a_link_meanwhile_leads_nowhere(root: Path, tmp_path: Path) -> None:
    """Whichever of the two is seen, the secret is not."""
    outer = tmp_path / "outer"
    outer.mkdir()
    (outer / "b c.wav").write_bytes(b"secret")
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            (root / "sub").rename(root / "aside")
            (root / "sub").symlink_to(outer)
            (root / "sub").unlink()
            (root / "aside").rename(root / "sub")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(2000):
            try:
                assert read(f"file://{root}/sub/b%20c.wav", root) == b"sound"
            except BadInput:
                continue
    finally:
        is_over.set()
        swapper.join()


def test_what_is_no_regular_file_is_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "pipe")

    with pytest.raises(BadInput):
        read(f"file://{root}/pipe", root)
    for device in ("/dev/zero", "/dev/stdin"):
        with pytest.raises(BadInput):
            read(f"file://{device}", "/dev")


def test_size_is_refused_before_it_is_read(root: Path) -> None:
    with (root / "large").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(MediaTooLarge, match=r"1099511627776 bytes came \(allowed: at most 1000\)"):
        read(f"file://{root}/large", root)


def test_without_a_folder_nothing_is_read(root: Path) -> None:
    with pytest.raises(BadInput, match="reads none"):
        read(f"file://{root}/a.png", "")
    assert is_file_url("file:///x")
    assert not is_file_url("http://x/file:")
