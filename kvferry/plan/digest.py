"""A digest of cells that is the same whatever the TP, PP, CP, page size or layout of who computes it.

A cell is one (layer, part, token and index of every axis that some worker holds only a part of). Its hash is the upper
half of a multilinear hash of its 32-bit words; the digest of a layer is the sum, over its cells, of that hash times a
pseudo-random number drawn from the cell's name. So sources can each digest what they send, in any pieces, and the sums
add up to what the target digests from its pages. It finds errors, not forgers: who knows the key can make a match.

Everything here is modulo 2**64 on purpose; no number is an address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.layout.address import U64
from kvferry.layout.document import Group, Instance
from kvferry.plan.bind import token_runs
from kvferry.plan.dense import Chunk, chunk_bytes
from kvferry.plan.order import CANONICAL, Section, sections
from kvferry.plan.route import Box

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def whole_axes(group: Group, instances: Iterable[Instance]) -> int:
    """How many of the group's last axes every worker of these instances holds whole: they lie inside a cell."""
    axes = list(group.axes.items())
    count = 0
    for axis, extent in reversed(axes):
        pools = (pool for i in instances for worker in i.workers for pool in worker.pools if pool.group == group.name)
        if any(tuple(pool.segments(axis, extent)) != ((0, extent),) for pool in pools):
            break
        count += 1
    return count


def layer_digests(group: Group, chunk: Chunk, data: Bytes, key: bytes, whole: int) -> dict[int, int]:
    """The digest of each layer of a chunk, whose bytes `data` are in its order. `whole`: see `whole_axes`."""
    if chunk.order == CANONICAL:
        return _canonical_digests(group, chunk, data, key, whole)
    total = dict.fromkeys(chunk.box.layers, 0)
    for section in sections(chunk.order, chunk.tokens, len(_tokens(chunk))):
        part = Chunk(chunk.box, section.tokens)
        start = section.before * len(data) // len(_tokens(chunk))
        part_bytes = chunk_bytes(group, part)
        canonical = _in_canonical_order(group, chunk, section, data[start : start + part_bytes])
        for layer, digest in _canonical_digests(group, part, canonical, key, whole).items():
            total[layer] = (total[layer] + digest) & _MASK
    return total


def _in_canonical_order(group: Group, chunk: Chunk, section: Section, data: Bytes) -> Bytes:
    """The bytes of a section of the chunk, copied."""
    box = chunk.box
    own = [len(_indices(box, axis)) for axis in box.axes]
    extents = [len(box.layers), len(box.parts), -1, section.block_tokens, *own]
    axes = chunk.order.axes or range(len(extents))
    shaped = data.reshape([*(extents[axis] for axis in axes), group.item_bytes])
    return shaped.transpose([*np.argsort(axes).tolist(), len(extents)]).reshape(-1)


def _canonical_digests(group: Group, chunk: Chunk, data: Bytes, key: bytes, whole: int) -> dict[int, int]:
    box = chunk.box
    names = list(group.axes)
    outer = names[: len(names) - whole]
    cell_bytes = group.item_bytes * prod(group.axes[name] for name in names[len(outer) :])
    shape = (len(box.layers), len(box.parts), len(_tokens(chunk)), *(len(_indices(box, name)) for name in outer))
    cells = prod(shape)
    if not cells:
        return dict.fromkeys(box.layers, 0)
    words = _words(data, cells, cell_bytes)
    keys = _keys(key, b"words", words.shape[1] + 1)
    hashes = (np.einsum("ij,j->i", words, keys[1:]) + keys[0]) >> np.uint64(32)
    terms = hashes.reshape(shape) * _names(group, chunk, outer, key)
    sums = terms.reshape(shape[0], -1).sum(axis=1, dtype=np.uint64)
    return dict(zip(box.layers, sums.tolist()))


def add(total: dict[tuple[str, int], int], group: str, digests: dict[int, int]) -> None:
    """Add a chunk's digests to the sums by (group, layer)."""
    for layer, digest in digests.items():
        total[group, layer] = (total.get((group, layer), 0) + digest) & _MASK


def _words(data: Bytes, cells: int, cell_bytes: int) -> Words:
    """[cell, word], the last word of each cell filled up with zeros."""
    rows = data.reshape(cells, cell_bytes)
    if cell_bytes % 4:
        padded = np.zeros((cells, -(-cell_bytes // 4) * 4), np.uint8)
        padded[:, :cell_bytes] = rows
        rows = padded
    return rows.view(np.uint32)


def _names(group: Group, chunk: Chunk, outer: list[str], key: bytes) -> U64:
    """A pseudo-random odd number per cell, [layer, part, token, outer axes…], from global indices only."""
    box = chunk.box
    parts = np.array([group.parts.index(part) for part in box.parts], np.uint64)
    indices = [np.array(box.layers, np.uint64), parts, _tokens(chunk), *(_indices(box, name) for name in outer)]
    salts = _keys(key, group.name.encode(), len(indices))
    total: Any = np.uint64(0)
    for axis, (index, salt) in enumerate(zip(indices, salts)):
        shape = [1] * len(indices)
        shape[axis] = -1
        total = total + _mix(index + salt).reshape(shape)
    return _mix(total) | np.uint64(1)


def _tokens(chunk: Chunk) -> U64:
    starts, lengths = token_runs(chunk.tokens, chunk.box.cycles)
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return (first + np.arange(len(first))).astype(np.uint64)


def _indices(box: Box, axis: str) -> U64:
    return np.concatenate([np.empty(0, np.uint64), *(np.arange(a, b, dtype=np.uint64) for a, b in box.axes[axis])])


def _keys(key: bytes, purpose: bytes, count: int) -> U64:
    """`count` odd numbers, the same everywhere for one key and purpose."""
    seed = int.from_bytes(hashlib.blake2b(purpose, key=key, digest_size=8).digest(), "little")
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mix(steps + np.uint64(seed)) | np.uint64(1)


def _mix(values: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = values ^ (values >> np.uint64(31))
    return mixed
