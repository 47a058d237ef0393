"""The curve over run lengths as SVG text: per transport GB/s of per run and staged, and the wire as a line.

Both scales are logarithmic. The same rows always give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvferry.cli.bench_transfer.cases import CURVE, WIRE
from kvferry.cli.bench_transfer.measure import PER_RUN, STAGED, Row

WIDTH, HEIGHT = 300, 220
"""Of one panel's axes."""
LEFT, TOP, GAP = 52, 84, 62
LEGEND_WIDTH = 710
STYLES = {
    PER_RUN: ("#ff873f", "one descriptor per run, without kvferry"),
    STAGED: ("#3f6fb7", "kvferry, staged"),
    WIRE.key: ("#555", "wire: one piece, 1 MiB descriptors"),
}
KI = 1024


@dataclass(frozen=True)
class Scale:
    """Logarithmic: `low` at `start`, `high` at `stop` (pixels)."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)


def draw(rows: Sequence[Row], title: str) -> str:
    """An SVG document, one panel per transport that has a curve."""
    curve = [row for row in rows if row.case == CURVE]
    transports = list(dict.fromkeys(row.transport for row in curve))
    lengths = sorted({row.run_bytes for row in curve})
    shown = [row for row in rows if row.case in (CURVE, WIRE.key) and row.transport in transports]
    low = 10 ** math.floor(math.log10(min(row.gb_s for row in shown)))
    high = 10 ** math.ceil(math.log10(max(row.gb_s for row in shown)))
    columns = min(2, len(transports))
    width = max(LEFT + columns * WIDTH + (columns - 1) * GAP + 24, LEGEND_WIDTH)
    height = TOP + -(-len(transports) // columns) * (HEIGHT + GAP)
    panels: list[str] = []
    for number, transport in enumerate(transports):
        x = LEFT + number % columns * (WIDTH + GAP)
        y = TOP + number // columns * (HEIGHT + GAP)
        across = Scale(lengths[0], max(lengths[-1], 2 * lengths[0]), x, x + WIDTH)
        up = Scale(low, max(high, 10 * low), y + HEIGHT, y)
        panels += [
            *_axes(transport, across, up, lengths),
            *_curves([r for r in shown if r.transport == transport], across, up),
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="11" fill="#222">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(_description(curve, transports))}</desc>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="16" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
            *_legend(),
            *panels,
            "</svg>\n",
        ]
    )


def _legend() -> list[str]:
    lines, x = [], 16.0
    for name, (colour, text) in STYLES.items():
        lines.append(_line([(x, 44), (x + 24, 44)], colour, name == WIRE.key))
        lines.append(f'<text x="{x + 30:g}" y="48">{escape(text)}</text>')
        x += 52 + 6.2 * len(text)
    return lines


def _axes(transport: str, across: Scale, up: Scale, lengths: Sequence[int]) -> list[str]:
    lines = [
        f'<text x="{across.start:g}" y="{up.stop - 10:g}" font-size="13" font-weight="bold">{transport}</text>',
        f'<text x="{across.stop:g}" y="{up.stop - 10:g}" text-anchor="end">GB/s over run length</text>',
    ]
    for power in range(round(math.log10(up.low)), round(math.log10(up.high)) + 1):
        y = up.at(10.0**power)
        lines.append(_line([(across.start, y), (across.stop, y)], "#ddd"))
        lines.append(f'<text x="{across.start - 6:g}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    lines.append(_line([(across.start, up.stop), (across.start, up.start), (across.stop, up.start)], "#222"))
    for nbytes in lengths:
        x = across.at(nbytes)
        lines.append(_line([(x, up.start), (x, up.start + 4)], "#222"))
        lines.append(f'<text x="{x:.1f}" y="{up.start + 16:g}" text-anchor="middle">{_short(nbytes)}</text>')
    return lines


def _curves(rows: Sequence[Row], across: Scale, up: Scale) -> list[str]:
    lines = []
    for row in rows:
        if row.case == WIRE.key:
            y = up.at(row.gb_s)
            lines.append(_line([(across.start, y), (across.stop, y)], STYLES[WIRE.key][0], dashed=True))
    for way in (PER_RUN, STAGED):
        points = [
            (across.at(row.run_bytes), up.at(row.gb_s))
            for row in sorted(rows, key=lambda row: row.run_bytes)
            if row.case == CURVE and row.way == way
        ]
        lines.append(_line(points, STYLES[way][0]))
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{STYLES[way][0]}"/>' for x, y in points]
    return lines


def _line(points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'


def _description(curve: Sequence[Row], transports: Sequence[str]) -> str:
    each = []
    for transport in transports:
        for way in (PER_RUN, STAGED):
            mine = sorted((r for r in curve if r.transport == transport and r.way == way), key=lambda r: r.run_bytes)
            points = ", ".join(f"{row.gb_s:.2f} at {_short(row.run_bytes)}" for row in mine)
            each.append(f"{transport} {way}: {points}")
    return "GB/s by run length. " + "; ".join(each) + "."


def _short(nbytes: int) -> str:
    for unit, name in ((KI * KI, "M"), (KI, "K")):
        if nbytes >= unit:
            return f"{nbytes // unit}{name}"
    return str(nbytes)
