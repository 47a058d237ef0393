"""A worker whose memory is made up: it fills pages with a pattern, sends or receives them, and checks every byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.cli.verify.cases import Case
from kvferry.cli.verify.cells import Cells, Ints, cells_of, pattern, slots_of
from kvferry.cli.verify.memory import SparseMemory
from kvferry.errors import TransferError
from kvferry.layout.document import Buffer, Group, Instance, Pool, Struct, Worker
from kvferry.layout.request import Side
from kvferry.plan.route import Box
from kvferry.session.endpoint import Endpoint

JUNK = 0xEE
"""In the source's pages beside the cells: never zero, and in no pattern on purpose."""
NOBODY = -1
MOST_STRAY = 1 << 20


class Share(Struct, frozen=True):
    """What one source worker brings to a target worker."""

    source: int
    box: Box


class Fault(Struct, frozen=True):
    """The first wrong cell: where it is, what is there and what should be, in hexadecimal."""

    layer: int
    part: str
    token: int
    axes: dict[str, int]
    found: str
    expected: str


class Checked(Struct, frozen=True):
    """One group of one case at a target worker, as far as source worker `source` was to bring it."""

    group: str
    source: int
    bytes: int
    wrong_bytes: int
    fault: Fault | None = None


class Guards(Struct, frozen=True):
    """Bytes written where nothing was wanted. `where`: what the first of them is near to."""

    stray_bytes: int = 0
    where: str = ""


class Outcome(Struct, frozen=True):
    """How a case ended for one worker; `problem` is empty where the transfer was done."""

    problem: str = ""
    seconds: float = 0.0
    links: dict[str, str] = {}  # noqa: RUF012  (msgspec copies defaults)
    checked: tuple[Checked, ...] = ()
    guards: Guards = Guards()


@dataclass
class _Count:
    bytes: int = 0
    wrong: int = 0
    fault: Fault | None = None


@dataclass
class Synthetic:
    """`truth` is where this worker's cells really lie, the same as what its endpoint says unless it lies."""

    instance: Instance
    rank: int
    memory: SparseMemory
    endpoint: Endpoint
    truth: Worker
    shares: tuple[Share, ...] = ()

    def fill(self, case: Case) -> None:
        """As a source: the wanted cells, with junk all around them."""
        self.memory.clear()
        for pool, group, buffer in self._buffers(case):
            table = case.source.table(self.rank, pool.table_name)
            pages = {page + step for page in (table.pages if table else ()) if page is not None for step in (-1, 0, 1)}
            near = sorted(page for page in pages if 0 <= page < buffer.pages)
            self._write(buffer, slots_of(pool, group, near), JUNK, group)
        for pool, group, buffer in self._buffers(case):
            cells = self._cells(case, case.source, pool, group)
            self._write(buffer, cells.offsets, pattern(group, buffer.layer, buffer.part, cells, case.seed), group)

    def send(self, case: Case, transfer: str, timeout_s: float) -> Outcome:
        try:
            sent = self.endpoint.send(transfer, case.wanted, case.source, timeout_s=timeout_s)
            self.endpoint.wait(sent)
        except TransferError as error:
            return Outcome(str(error))
        return Outcome(links=self.endpoint.links())

    def receive(self, case: Case, transfer: str, source: str, timeout_s: float) -> Outcome:
        """Into memory that is all zero, and is again when its bytes have been checked."""
        started_s = time.monotonic()
        try:
            taken = self.endpoint.receive(transfer, source, case.wanted, case.target, timeout_s=timeout_s)
            self.endpoint.wait(taken)
        except TransferError as error:
            self.memory.clear()
            return Outcome(str(error))
        seconds = time.monotonic() - started_s
        return Outcome("", seconds, {}, self._check(case), self._guards())

    def _check(self, case: Case) -> tuple[Checked, ...]:
        """Compare every wanted cell, and clear it."""
        counts: dict[tuple[str, int], _Count] = {}
        for pool, group, buffer in self._buffers(case):
            cells = self._cells(case, case.target, pool, group)
            if not cells.offsets.size:
                continue
            offsets = cells.offsets + buffer.offset_bytes
            found = self.memory.read(buffer.region, offsets, group.item_bytes)
            expected = pattern(group, buffer.layer, buffer.part, cells, case.seed)
            self.memory.write(buffer.region, offsets, 0, group.item_bytes)
            wrong = found != expected
            brought = self._brought_by(group, buffer, cells)
            for source in np.unique(brought).tolist():
                count = counts.setdefault((group.name, source), _Count())
                mine = brought == source
                count.bytes += int(mine.sum()) * group.item_bytes
                bad = wrong.any(axis=-1) & mine
                count.wrong += int(wrong[bad].sum())
                if count.fault is None and bad.any():
                    count.fault = _fault(group, buffer, cells, np.argwhere(bad)[0], found, expected)
        return tuple(
            Checked(group, source, count.bytes, count.wrong, count.fault) for (group, source), count in counts.items()
        )

    def _brought_by(self, group: Group, buffer: Buffer, cells: Cells) -> npt.NDArray[np.int64]:
        """[token, *axes]: the rank of the source worker that was to bring each cell."""
        brought = np.full(cells.offsets.shape, NOBODY, np.int64)
        for share in self.shares:
            box = share.box
            if box.group != group.name or buffer.layer not in box.layers or buffer.part not in box.parts:
                continue
            tokens = np.ones(len(cells.tokens), bool)
            for rank, size, block in box.cycles:
                tokens &= cells.tokens // block % size == rank
            axes = [_among(held, box.axes[axis]) for held, axis in zip(cells.indices, group.axes)]
            brought[np.ix_(tokens, *axes)] = share.source
        return brought

    def _guards(self) -> Guards:
        """What is not zero after every wanted cell has been cleared; then all of it is cleared."""
        stray = 0
        where = ""
        for region, offset in self.memory.stray():
            where = where or _near(self.truth, region, offset)
            stray += 1
            if stray == MOST_STRAY:
                break
        if stray:
            self.memory.clear()
        return Guards(stray, where)

    def _buffers(self, case: Case) -> Iterator[tuple[Pool, Group, Buffer]]:
        """Of what the case moves."""
        for pool in self.truth.pools:
            wanted = case.wanted.get(pool.group)
            if wanted is not None and wanted.token_range[0] < wanted.token_range[1]:
                group = self.instance.group(pool.group)
                for buffer in pool.buffers:
                    yield pool, group, buffer

    def _cells(self, case: Case, side: Side, pool: Pool, group: Group) -> Cells:
        table = side.table(self.rank, pool.table_name)
        assert table is not None, f"every case has a table {pool.table_name}"
        return cells_of(pool, group, table, case.wanted[group.name].token_range)

    def _write(self, buffer: Buffer, offsets: Ints, values: npt.NDArray[np.uint8] | int, group: Group) -> None:
        self.memory.write(buffer.region, offsets + buffer.offset_bytes, values, group.item_bytes)

    def close(self) -> None:
        self.endpoint.close()
        self.memory.close()


def _among(held: Ints, segments: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    inside = np.zeros(len(held), bool)
    for start, stop in segments:
        inside |= (held >= start) & (held < stop)
    return inside


def _fault(
    group: Group,
    buffer: Buffer,
    cells: Cells,
    at: Ints,
    found: npt.NDArray[np.uint8],
    expected: npt.NDArray[np.uint8],
) -> Fault:
    place = tuple(at.tolist())
    axes = {axis: int(held[i]) for axis, held, i in zip(group.axes, cells.indices, place[1:])}
    token = int(cells.tokens[place[0]])
    return Fault(buffer.layer, buffer.part, token, axes, bytes(found[place]).hex(), bytes(expected[place]).hex())


def _near(worker: Worker, region: int, offset: int) -> str:
    """The buffer and page that a byte of a region is in, or comes after."""
    before = [
        (buffer.offset_bytes, pool, buffer)
        for pool in worker.pools
        for buffer in pool.buffers
        if buffer.region == region and buffer.offset_bytes <= offset
    ]
    if not before:
        return f"region {region}, byte {offset}"
    start, pool, buffer = max(before, key=lambda one: one[0])
    page = min((offset - start) // pool.page_bytes, buffer.pages - 1)
    return f"group {pool.group}, layer {buffer.layer}, part {buffer.part}, page {page} (region {region}, byte {offset})"
