"""What one session may take, and when it ends by itself."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds; a time of None has no limit."""

    max_items: int = 2000
    max_item_bytes: int = 8 * 2**20
    """Of what a client puts into one item: text, pictures, sound."""
    max_conversation_bytes: int = 64 * 2**20
    """Of all items together; sound and pictures of the oldest are forgotten first, words are kept."""
    max_images: int = 8
    """Pictures in a duplex conversation, and frames of video that wait for a commit."""
    max_image_bytes: int = 4 * 2**20
    """Of these together."""
    max_buffer_bytes: int = 16 * 2**20
    """Of sound that waits for a commit: nine minutes."""
    max_pending_turns: int = 4
    """Turns that wait for an answer while another is given."""
    max_out_of_band: int = 4
    """Responses outside the conversation at once."""
    max_transcriptions: int = 8
    """Items that wait to be written down."""
    transcribes_pauses: bool = True
    """A turn is written down as soon as it pauses; what was not its end is work for nothing."""
    max_history_characters: int = 100_000
    """Of a prompt; a second of sound counts as 100."""
    journal_bytes: int = 8 * 2**20
    journal_ttl_s: float = 60.0
    grace_s: float = 30.0
    """A resumable session without an attachment lives so long."""
    idle_ttl_s: float | None = 300.0
    """Without a sign of life of its client or a model."""
    max_duration_s: float | None = 3600.0
