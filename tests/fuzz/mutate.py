"""Broken inputs from valid ones, by a seeded generator: bytes that were damaged, and documents that say mad things."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

NUMBERS: list[Any] = [
    0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
    0.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None,
]  # fmt: skip
TEXTS: list[Any] = [
    "", "x" * 300, "x" * 5000, "\0", "\n", "../../etc/passwd", "tcp://0.0.0.0:1", "tcp://127.0.0.1:0", "source",
    "attn", "token", "0x" + "f" * 16, "0x" + "f" * 17, "-1", "1e999", "é" * 20, "\u202e", "p/1/0", b"", b"\xff" * 16,
    b"\0" * 15,
]  # fmt: skip
NESTED: list[Callable[[], Any]] = [lambda: deep(100), lambda: deep(2_000), list, dict, lambda: [[]] * 50]
MOST_NODES = 400


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@dataclass(frozen=True)
class Codec:
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


def _write_json(value: Any) -> bytes:
    """NaN and lone surrogates included, which JSON writers of other languages let through."""
    text = json.dumps(value, default=lambda other: other.decode("latin-1") if isinstance(other, bytes) else str(other))
    return text.encode("utf-8", "surrogatepass")


MSGPACK = Codec(msgspec.msgpack.decode, msgspec.msgpack.encode)
JSON = Codec(msgspec.json.decode, _write_json)


def broken(rng: random.Random, corpus: Sequence[bytes], codec: Codec | None) -> bytes:
    """One input; now and then it may still be valid."""
    data = rng.choice(corpus)
    kind = rng.random()
    if codec is not None and kind < 0.6:
        return _rewritten(rng, data, corpus, codec)
    if kind < 0.65:
        return rng.randbytes(rng.choice((0, 1, 3, 17, 120)))
    if kind < 0.75:
        return data[: rng.randrange(len(data) + 1)]
    if kind < 0.85:
        other = rng.choice(corpus)
        return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    return _flipped(rng, data)


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _rewritten(rng: random.Random, data: bytes, corpus: Sequence[bytes], codec: Codec) -> bytes:
    document = codec.read(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = change(rng, document, lambda: codec.read(rng.choice(corpus)))
    try:
        return codec.write(document)
    except (ValueError, TypeError, OverflowError, RecursionError):  # what this format can't say
        return _flipped(rng, data)


def change(rng: random.Random, document: Any, another: Callable[[], Any]) -> Any:
    """It with one node changed, left out, doubled or added."""
    root = [document]
    holder, key = rng.choice(_nodes(root))
    old, kind = holder[key], rng.random()
    if kind < 0.55 or holder is root:
        holder[key] = _instead(rng, old, another)
    elif kind < 0.7:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, old if kind < 0.85 else _instead(rng, old, another))
    else:
        holder[rng.choice(("extra", "type", "format", f"{key} ", "__class__"))] = old
    return root[0]


def _instead(rng: random.Random, old: Any, another: Callable[[], Any]) -> Any:
    kind = rng.random()
    if kind < 0.35 and isinstance(old, (int, float)) and not isinstance(old, bool):
        return rng.choice((old + 1, old - 1, -old, old * 2, old * 1_000_003, float(old)))
    if kind < 0.6:
        return rng.choice(NUMBERS)
    if kind < 0.85:
        return rng.choice(TEXTS)
    if kind < 0.95:
        return rng.choice(NESTED)()
    return rng.choice(_nodes([another()]))[0]


def _nodes(root: list[Any]) -> list[tuple[Any, Any]]:
    """(holder, key) of nodes all over a document, the first ones level by level."""
    found: list[tuple[Any, Any]] = [(root, 0)]
    for holder, key in found:
        value = holder[key]
        if isinstance(value, dict):
            found += [(value, k) for k in value]
        elif isinstance(value, list):
            found += [(value, i) for i in range(len(value))]
        if len(found) > MOST_NODES:
            break
    return found
