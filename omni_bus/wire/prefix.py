"""The beginning of a prompt as hashes, by which a coordinator that sees no prompts finds who has it cached."""

from __future__ import annotations

from hashlib import blake2b

BLOCK_BYTES = 256
MAX_BLOCKS = 128
"""Only the first 32 KiB of a prompt are looked at."""


def prefix_of(prompt: bytes, salt: str = "") -> tuple[int, ...]:
    """Return a hash of 64 bits for each whole block of a prompt; each stands for all bytes before it too.

    Two prompts have equal hashes as far as they have equal blocks, whatever process computes them.

    Args:
        prompt: in a form in which prompts with the same beginning have the same bytes.
        salt: what parts prompts that can't or must not share a cache: the model's adapter, a caller's own word.
    """
    state = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8)
    found: list[int] = []
    for end in range(BLOCK_BYTES, min(len(prompt), BLOCK_BYTES * MAX_BLOCKS) + 1, BLOCK_BYTES):
        state.update(prompt[end - BLOCK_BYTES : end])
        found.append(int.from_bytes(state.digest(), "little"))
    return tuple(found)
