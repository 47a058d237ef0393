"""The memory of one worker of the benchmark: filled with cells that all differ, and compared byte by byte afterwards.

Plain NumPy says where a cell lies; no code of the planner is used for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvferry.cli.bench_transfer.cases import Scenario, SideName
from kvferry.layout.address import Address
from kvferry.layout.document import Worker
from kvferry.layout.presets import memory_bytes
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import host_address
from kvferry.transport.staging import map_file

Cells = npt.NDArray[np.uint16]
GUARD_BYTES = 4096
UNTOUCHED = 0xA5
KEY_SHIFT = 997
"""Items between the contents of two (layer, part): no multiple of any cell, so no two of their cells are equal."""


class WorkerPool:
    """The memory is an anonymous file, so that another process can map it. Guards lie before and after it."""

    def __init__(self, scenario: Scenario, side: SideName, rank: int) -> None:
        self.scenario, self.side, self.rank = scenario, side, rank
        nbytes = memory_bytes(scenario.worker(side, rank, GUARD_BYTES))
        self.fd = os.memfd_create("kvferry-bench", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes + 2 * GUARD_BYTES)
            self.file = map_file(self.fd, nbytes + 2 * GUARD_BYTES)
        except BaseException:
            os.close(self.fd)
            raise
        self.bytes: Bytes = self.file[GUARD_BYTES : GUARD_BYTES + nbytes]
        self.address: Address = host_address(self.bytes)
        self.worker: Worker = scenario.worker(side, rank, self.address.value)
        self._contents = _contents(scenario)
        self._pages = np.array(scenario.page_list(side), np.int64)
        self.clear()

    def clear(self) -> None:
        self.file.fill(UNTOUCHED)

    def fill(self) -> None:
        """Put every cell of the request into its page."""
        for key, memory in self._buffers():
            self._write(key, memory)

    def wrong_bytes(self) -> int:
        """Bytes of all this memory, guards and pages of nobody included, that aren't as they must be after `fill`, or
        after a transfer of the same cells."""
        wrong = int(np.count_nonzero(self.file[:GUARD_BYTES] != UNTOUCHED))
        wrong += int(np.count_nonzero(self.file[GUARD_BYTES + self.bytes.nbytes :] != UNTOUCHED))
        for key, memory in self._buffers():
            expected = np.full(memory.nbytes, UNTOUCHED, np.uint8).view(np.uint16)
            self._write(key, expected)
            if not np.array_equal(memory, expected):
                wrong += int(np.count_nonzero(memory.view(np.uint8) != expected.view(np.uint8)))
        return wrong

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def _buffers(self) -> Iterator[tuple[int, Cells]]:
        """(number of the (layer, part), its memory)."""
        parts = self.scenario.group.parts
        for buffer in self.worker.pools[0].buffers:
            region = self.worker.regions[buffer.region]
            start = region.base.distance_from(self.address)
            key = buffer.layer * len(parts) + parts.index(buffer.part)
            yield key, self.bytes[start : start + region.bytes].view(np.uint16)

    def _write(self, key: int, memory: Cells) -> None:
        scenario, shape = self.scenario, self.scenario.shape(self.side)
        heads, tokens = scenario.heads_of(self.side, self.rank), shape.page_tokens
        inner = (len(heads), tokens) if shape.layout == "hnd" else (tokens, len(heads))
        pages = memory.reshape(-1, *inner, scenario.dim)
        by_token = pages.swapaxes(1, 2) if shape.layout == "hnd" else pages
        mine = np.arange(shape.place(self.rank)[2], scenario.tokens, shape.cp)  # the tokens of this context rank
        local = np.arange(len(mine))
        cells = self._contents[key * KEY_SHIFT :][: scenario.tokens * _row(scenario)]
        values = cells.reshape(scenario.tokens, -1, scenario.dim)[mine, heads.start : heads.stop]
        by_token[self._pages[local // tokens], local % tokens] = values


def _row(scenario: Scenario) -> int:
    """Items of one token of one part, over all heads."""
    return max(scenario.heads, 1) * scenario.dim


def _contents(scenario: Scenario) -> Cells:
    """Random items, the same in every process; the cells of a (layer, part) begin at its own place in them."""
    keys = scenario.layers * len(scenario.group.parts)
    count = scenario.tokens * _row(scenario) + keys * KEY_SHIFT
    return np.random.default_rng(3).integers(0, 1 << 16, count, np.uint16)
