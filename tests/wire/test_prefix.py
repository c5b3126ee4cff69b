from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from omni_bus.wire.prefix import BLOCK_BYTES, MAX_BLOCKS, prefix_of


def test_whole_blocks_only() -> None:
    prompt = os.urandom(3 * BLOCK_BYTES)

    assert [len(prefix_of(prompt[:n])) for n in (0, 255, 256, 511, 768)] == [0, 0, 1, 1, 3]
    assert len(prefix_of(bytes(2 * BLOCK_BYTES * MAX_BLOCKS))) == MAX_BLOCKS


@given(st.integers(0, 10 * BLOCK_BYTES), st.integers(0, 10 * BLOCK_BYTES))
def test_prompts_agree_as_far_as_their_blocks_do(shared: int, rest: int) -> None:
    begin = b"a" * shared
    one, other = prefix_of(begin + b"x" * rest), prefix_of(begin + b"y" * rest)
    same = shared // BLOCK_BYTES

    assert one[:same] == other[:same]
    assert not set(one[same:]) & set(other[same:])


def test_salt_parts_and_processes_agree() -> None:
    prompt = b"p" * BLOCK_BYTES

    assert prefix_of(prompt, "a") != prefix_of(prompt, "b")
    assert prefix_of(prompt) == (0x045F703FA293CF02,)  # from another interpreter
