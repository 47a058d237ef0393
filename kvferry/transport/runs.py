"""Where a chunk's bytes really lie in one process, as runs in the chunk's order; and two such lists cut to each other.

Used where bytes leave straight from pages, or land straight in them: then a transport gets one descriptor per run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.errors import TransportError
from kvferry.layout.address import U64, Address, Addresses

_WORD = np.dtype("<u8")
ROW_BYTES = 2 * _WORD.itemsize
"""Of one run, encoded."""


@dataclass(frozen=True)
class Runs:
    """Run i lies at `addresses[i]`, `lengths[i]` bytes, none empty; one after another they are the chunk."""

    addresses: Addresses
    lengths: U64

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum(dtype=np.uint64))

    def encode(self) -> bytes:
        """16 bytes per run: address and length as little-endian 64-bit numbers."""
        return np.stack([self.addresses.u64, self.lengths], axis=1).astype(_WORD).tobytes()


def decode_runs(data: bytes, nbytes: int) -> Runs:
    """TransportError for what is no list of runs of `nbytes` bytes together."""
    if len(data) % ROW_BYTES:
        raise TransportError(f"a list of runs has {ROW_BYTES} bytes each, got {len(data)}")
    rows = np.frombuffer(data, _WORD).astype(np.uint64).reshape(-1, 2)
    addresses, lengths = Addresses(rows[:, 0]), rows[:, 1]
    # each is checked alone first, so that the sum can't wrap
    if (lengths == 0).any() or (lengths > np.uint64(nbytes)).any() or len(lengths) > nbytes:
        raise TransportError(f"a run of 0 or of more than the {nbytes} bytes of its piece")
    if sum(lengths.tolist()) != nbytes:
        raise TransportError(f"the runs have {sum(lengths.tolist())} bytes together, {nbytes} were granted")
    if len(lengths):
        addresses.plus(lengths - np.uint64(1))  # AddressError where one passes 2**64
    return Runs(addresses, lengths)


def one_run(address: Address, nbytes: int) -> Runs:
    return Runs(Addresses([address]), np.array([nbytes], np.uint64))


def joined(addresses: Addresses, lengths: U64) -> Runs:
    """Runs in order, neighbours in memory made one."""
    some = np.flatnonzero(lengths)
    addresses, lengths = addresses.take(some), lengths[some]
    if len(lengths) < 2:
        return Runs(addresses, lengths)
    offsets = addresses.distances_from(addresses.lowest())
    touching = (offsets[1:] > offsets[:-1]) & (offsets[1:] - offsets[:-1] == lengths[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~touching]))
    return Runs(addresses.take(first), np.add.reduceat(lengths, first))


def cut_to_each_other(source: Runs, target: Runs) -> tuple[Addresses, Addresses, U64]:
    """(source, target, lengths): both lists cut at each other's borders. They have equally many bytes together."""
    if source.nbytes != target.nbytes:
        raise TransportError(f"{source.nbytes} bytes here, {target.nbytes} bytes there")
    ends = np.union1d(np.cumsum(source.lengths, dtype=np.uint64), np.cumsum(target.lengths, dtype=np.uint64))
    starts = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])[: len(ends)]
    return _at(source, starts), _at(target, starts), ends - starts


def _at(runs: Runs, offsets: U64) -> Addresses:
    """Where the bytes at `offsets` of the chunk lie."""
    ends = np.cumsum(runs.lengths, dtype=np.uint64)
    index = np.searchsorted(ends, offsets, side="right")
    return runs.addresses.take(index).plus(offsets - (ends - runs.lengths)[index])
