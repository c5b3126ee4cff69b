"""The items of a conversation, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.items import FunctionCall, FunctionCallOutput, InputAudio, InputImage, Item, Message

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = "root"
"""Stands for the place before the first item."""


class Conversation:
    """Items by id and by order; sound and pictures of the oldest are forgotten where all together are too large."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: dict[str, Item] = {}
        self._order: list[str] = []
        self._sizes: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._items

    @property
    def items(self) -> tuple[Item, ...]:
        """All of them, in order."""
        return tuple(self._items[name] for name in self._order)

    @property
    def last_id(self) -> str | None:
        """The last one."""
        return self._order[-1] if self._order else None

    def get(self, item_id: str, *, param: str = "item_id") -> Item:
        """Return an item.

        Raises:
            SessionError: there is none of that name.
        """
        if item_id not in self._items:
            raise SessionError(Code.ITEM_NOT_FOUND, f"{param}: no item {item_id!r} is here", param=param)
        return self._items[item_id]

    def previous_id(self, item_id: str) -> str | None:
        """Return the one before an item."""
        index = self._order.index(item_id)
        return self._order[index - 1] if index else None

    @property
    def images(self) -> tuple[int, int]:
        """How many pictures are here, and their bytes."""
        urls = [url for item in self._items.values() for url in image_urls(item)]
        return len(urls), sum(len(url) for url in urls)

    def check_room(self) -> None:
        """Refuse one more item.

        Raises:
            SessionError: there are as many as there may be.
        """
        if len(self._order) >= self._max_items:
            message = f"item: the conversation has {len(self._order)} items (allowed: {self._max_items}); delete some"
            raise SessionError(Code.INPUT_BACKPRESSURE, message, param="item")

    def check_new(self, item: Item, previous_item_id: str | None) -> None:
        """Refuse an item that has no place here.

        Raises:
            SessionError: its name is taken, its predecessor is unknown, or it answers a call that isn't open.
        """
        self.check_room()
        if item.id is not None and (item.id in self._items or item.id == ROOT):
            raise SessionError(Code.ITEM_EXISTS, f"item.id: {item.id!r} is taken", param="item.id")
        if previous_item_id not in {None, ROOT}:
            self.get(previous_item_id or "", param="previous_item_id")
        if isinstance(item, FunctionCallOutput):
            self._check_output(item)

    def insert(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Put an item, which `check_new` let through, at its place; return the one before it."""
        assert item.id is not None
        if previous_item_id is None:
            index = len(self._order)
        else:
            index = 0 if previous_item_id == ROOT else self._order.index(previous_item_id) + 1
        self._order.insert(index, item.id)
        self._put(item.id, item)
        return self.previous_id(item.id)

    def replace(self, item: Item) -> None:
        """Change an item that is here; one that was deleted stays so."""
        assert item.id is not None
        if item.id in self._items:
            self._put(item.id, item)

    def delete(self, item_id: str) -> Item:
        """Remove an item.

        Raises:
            SessionError: there is none of that name.
        """
        item = self.get(item_id)
        self._order.remove(item_id)
        del self._items[item_id]
        self.num_bytes -= self._sizes.pop(item_id)
        return item

    def _check_output(self, item: FunctionCallOutput) -> None:
        calls = [other for other in self._items.values() if isinstance(other, FunctionCall)]
        if item.call_id not in {call.call_id for call in calls}:
            message = f"item.call_id: no call {item.call_id!r} is here"
            raise SessionError(Code.INVALID_CALL_ID, message, param="item.call_id")
        outputs = [other for other in self._items.values() if isinstance(other, FunctionCallOutput)]
        if item.call_id in {output.call_id for output in outputs}:
            message = f"item.output: the call {item.call_id!r} has its output"
            raise SessionError(Code.INVALID_CALL_ID, message, param="item.output")

    def _put(self, item_id: str, item: Item) -> None:
        self._items[item_id] = item
        self.num_bytes += size_of(item) - self._sizes.get(item_id, 0)
        self._sizes[item_id] = size_of(item)
        self._forget(without_media, lambda: self.num_bytes <= self._max_bytes)

    def forget_images(self, max_images: int, max_bytes: int) -> None:
        """Of the oldest items, until there are no more and no larger ones than that."""

        def is_small() -> bool:
            num_images, num_bytes = self.images
            return num_images <= max_images and num_bytes <= max_bytes

        self._forget(without_images, is_small)

    def _forget(self, without: Callable[[Item], Item], is_enough: Callable[[], bool]) -> None:
        """From the oldest item on, until all is small enough; words are kept."""
        for name in self._order:
            if is_enough():
                return
            self._items[name] = item = without(self._items[name])
            self.num_bytes -= self._sizes[name] - size_of(item)
            self._sizes[name] = size_of(item)


def has_sound(item: object) -> bool:
    """Whether an item holds samples."""
    return isinstance(item, Message) and any(isinstance(part, InputAudio) and part.audio for part in item.content)


def image_urls(item: Item) -> list[str]:
    """Return an item's pictures."""
    parts = item.content if isinstance(item, Message) else ()
    return [part.image_url for part in parts if isinstance(part, InputImage) and part.image_url is not None]


def without_images(item: Item) -> Item:
    """Return an item whose pictures are forgotten."""
    if not isinstance(item, Message) or not image_urls(item):
        return item
    content = tuple(replace(part, image_url=None) if isinstance(part, InputImage) else part for part in item.content)
    return replace(item, content=content)


def without_media(item: Item) -> Item:
    """Return an item as events show it."""
    item = without_images(item)
    if not isinstance(item, Message) or not has_sound(item):
        return item
    content = tuple(replace(part, audio=None) if isinstance(part, InputAudio) else part for part in item.content)
    return replace(item, content=content)


def size_of(item: Item) -> int:
    """Return about how many bytes an item takes."""
    match item:
        case Message(content=content):
            return 64 + sum(_size_of_part(part) for part in content)
        case FunctionCall(arguments=arguments, name=name):
            return 64 + len(arguments) + len(name)
        case FunctionCallOutput(output=output):
            return 64 + len(output)


def _size_of_part(part: object) -> int:
    match part:
        case InputAudio(audio=audio, transcript=transcript):
            return len(audio or b"") + len(transcript or "")
        case InputImage(image_url=url):
            return len(url or "")
        case _:
            return len(getattr(part, "text", None) or getattr(part, "transcript", None) or "")
