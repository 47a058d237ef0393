"""What an engine registered and the layout that was read from it, for people: `kvferry layout --from-dump`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvferry.engines.dump import Dump, DumpedTensor
from kvferry.layout.document import Group, Pool


def dump_text(dumps: Sequence[Dump]) -> str:
    """One block per worker: the engine's tensors first, then each pool as it was understood."""
    first = dumps[0]
    lines = [f"{first.layout.instance}: {first.engine} {first.version}, model {first.layout.model}"]
    for group in first.layout.groups:
        axes = " × ".join(f"{axis} {extent}" for axis, extent in group.axes.items())
        lines.append(
            f"group {group.name}: {group.dtype}, layers {_span(group.layers)}, {'/'.join(group.parts)}, {axes}"
        )
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        lines += ["", f"worker {dump.rank}", "  registered by the engine:"]
        lines += [f"    {line}" for line in _tensors(dump.tensors)]
        lines.append("  read as:")
        lines += [f"    {line}" for pool in dump.layout.workers[0].pools for line in _pool(pool, dump.layout.groups)]
    return "\n".join(lines)


def _tensors(tensors: Iterable[DumpedTensor]) -> list[str]:
    """Tensors of one shape in a row are one line."""
    lines = []
    for (shape, strides, dtype), some in itertools.groupby(tensors, lambda t: (t.shape, t.strides, t.dtype)):
        names = [tensor.name for tensor in some]
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        lines.append(f"{name}: {dtype} {list(shape)}, strides {list(strides)}")
    return lines


def _pool(pool: Pool, groups: Sequence[Group]) -> list[str]:
    group = next(group for group in groups if group.name == pool.group)
    layers = sorted({buffer.layer for buffer in pool.buffers})
    parts = [part for part in group.parts if any(buffer.part == part for buffer in pool.buffers)]
    pages = sorted({buffer.pages for buffer in pool.buffers})
    owned = ", ".join(
        f"{axis} {' + '.join(f'[{a}, {b})' for a, b in pool.segments(axis, extent))}"
        for axis, extent in group.axes.items()
        if axis in pool.owned
    )
    sizes = f"{pages[0]}" if len(pages) == 1 else f"{pages[0]}–{pages[-1]}"
    head = f"{pool.group}, layers {_span(layers)}, {'/'.join(parts)}: {sizes} pages of {pool.page_tokens} tokens"
    order = " > ".join(f"{mode.axis} × {mode.extent} every {mode.stride_bytes} B" for mode in pool.modes)
    lines = [f"{head}, {pool.page_bytes} B apart, table {pool.table_name}", f"  in a page: {order}"]
    return [*lines, f"  owns {owned}"] if owned else lines


def _span(numbers: Sequence[int]) -> str:
    """0–3, 8: runs of consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
