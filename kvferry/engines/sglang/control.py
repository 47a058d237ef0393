"""What decode tells prefill beside the transfer itself: that it has pages for a room, or wants nothing any more.

SGLang names a request by its bootstrap room, and rooms repeat. So each attempt has an id of its own, drawn up by decode
and told to prefill here, over the socket that SGLang's shared classes open for it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Union

import msgspec

from kvferry.errors import DocumentError
from kvferry.layout.document import decode_msgpack, encode_msgpack

MAX_BYTES = 4096
MAX_ROOMS = 65_536
KEEP_S = 3600.0

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="ask"):
    """Decode has pages for this room and has offered them under this id."""

    room: int
    transfer: Id


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="cancel"):
    """Decode has given up this attempt."""

    room: int
    transfer: Id
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


Word = Union[Ask, Cancel]


def encode(word: Word) -> bytes:
    return encode_msgpack(word)


def decode(frames: list[bytes]) -> Word:
    """DocumentError for anything else than one frame that is one of the messages."""
    if len(frames) != 1 or len(frames[0]) > MAX_BYTES:
        raise DocumentError("", f"a message is 1 frame of at most {MAX_BYTES} bytes, got {len(frames)} frames")
    return decode_msgpack(frames[0], Word)  # type: ignore[arg-type]  # a union is a type to msgspec


@dataclass(frozen=True)
class _Heard:
    word: Word
    at_s: float


class Rooms:
    """The last word about each room. Bounded in number and time; used by two threads."""

    def __init__(self) -> None:
        self._heard: OrderedDict[int, _Heard] = OrderedDict()
        self._lock = threading.Lock()

    def hear(self, word: Word) -> None:
        """A later attempt replaces an earlier one; a Cancel only says something about its own attempt."""
        with self._lock:
            old = self._heard.get(word.room)
            if isinstance(word, Cancel) and old is not None and old.word.transfer != word.transfer:
                return
            self._heard[word.room] = _Heard(word, time.monotonic())
            self._heard.move_to_end(word.room)
            while len(self._heard) > MAX_ROOMS or next(iter(self._heard.values())).at_s < time.monotonic() - KEEP_S:
                self._heard.popitem(last=False)

    def last(self, room: int) -> Word | None:
        with self._lock:
            heard = self._heard.get(room)
        return heard.word if heard is not None and heard.at_s >= time.monotonic() - KEEP_S else None

    def forget(self, room: int) -> None:
        with self._lock:
            self._heard.pop(room, None)


class Attempts:
    """Numbers the attempts of each room. Every rank of a decode instance sees the same requests in the same order, so
    they all arrive at the same number.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int], int] = OrderedDict()

    def next(self, source: str, room: int) -> int:
        key = (source, room)
        self._seen[key] = self._seen.pop(key, -1) + 1
        if len(self._seen) > MAX_ROOMS:
            self._seen.popitem(last=False)
        return self._seen[key]
