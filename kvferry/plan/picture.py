"""Draw who sends what: per target worker, a map of layers × heads coloured by source worker, as SVG text.

A group without a head axis is one column. Where several sources share a column (other tokens, or other indices of
another axis), the column is cut into strips. The same input always gives the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise, product
from math import ceil, sqrt

from kvferry.layout.document import Group, Instance
from kvferry.plan.explain import TrafficRow, cycle_text, ranges, slices
from kvferry.plan.route import shared_groups

# chosen far apart in a perceptual colour space; the rank is written on the map too, so colour is never the only sign
COLOURS = (
    "#3f6fb7", "#ff873f", "#3f870f", "#e76fb7", "#9f270f", "#3fe79f", "#6f276f", "#e7cf27",
    "#0fcfff", "#9f8787", "#b79fff", "#3f573f", "#0f9f9f", "#9f870f", "#9f57b7", "#9fb787",
)  # fmt: skip
HEAD = "head"
MAP_WIDTH, MAP_HEIGHT = 224, 176
HEAD_WIDTH, LAYER_HEIGHT = 14, 12  # where there is room
COLUMN_WIDTH = 22  # of a group without heads
MARGIN, GAP, TEXT = 16, 28, 11
LABEL_ROOM = 11  # least height of a line of text on the map


@dataclass(frozen=True)
class Field:
    """One map's contents: a group, or some of its parts where the parts come from different sources."""

    group: Group
    parts: tuple[str, ...]

    @property
    def layers(self) -> list[int]:
        return sorted(self.group.layers)

    @property
    def heads(self) -> int:
        return self.group.axes.get(HEAD, 1)

    @property
    def width(self) -> float:
        if HEAD not in self.group.axes:
            return COLUMN_WIDTH
        return min(MAP_WIDTH, max(COLUMN_WIDTH, HEAD_WIDTH * self.heads))

    @property
    def height(self) -> float:
        return min(MAP_HEIGHT, max(14, LAYER_HEIGHT * len(self.layers)))

    @property
    def name(self) -> str:
        return self.group.name if self.parts == self.group.parts else f"{self.group.name} {','.join(self.parts)}"


def draw(source: Instance, target: Instance, rows: Sequence[TrafficRow]) -> str:
    """An SVG document of `rows`, one panel per worker of `target`; the colours are those of the legend."""
    sources = sorted(worker.rank for worker in source.workers)
    colours = {rank: COLOURS[i % len(COLOURS)] for i, rank in enumerate(sources)}
    fields = _fields(source, target, rows)
    widths = [_room(field) for field in fields]
    panel_width = max(150.0, sum(widths) + GAP)
    panel_height = max([field.height for field in fields], default=0) + 78
    ranks = sorted(worker.rank for worker in target.workers)
    per_line = _per_line(len(ranks), panel_width, panel_height)
    width = max(2 * MARGIN + per_line * panel_width, 480)
    legend, top = _legend(sources, colours, rows, width, bool(_shared_columns(fields, rows)))
    panels = []
    for number, rank in enumerate(ranks):
        x = MARGIN + number % per_line * panel_width
        y = top + number // per_line * panel_height
        mine = [row for row in rows if row.target == rank]
        panels.append(_panel(rank, mine, fields, widths, colours, x, y))
    height = top + ceil(len(ranks) / per_line) * panel_height + MARGIN
    title = f"Who sends what: {source.instance} to {target.instance}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="title desc" '
            f'font-family="sans-serif" font-size="{TEXT}" fill="#222">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(_description(ranks, rows))}</desc>',
            f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 12}" font-size="15" font-weight="bold">{escape(title)}</text>',
            *legend,
            *(line for panel in panels for line in panel),
            "</svg>\n",
        ]
    )


def _per_line(count: int, width: float, height: float) -> int:
    """Panels side by side: all of them where that is narrow, else about as wide as a screen."""
    if count * width <= 1000:
        return max(1, count)
    return max(1, min(round(sqrt(count * height / width * 1.3)), int(1600 // width)))


def _description(ranks: Sequence[int], rows: Sequence[TrafficRow]) -> str:
    each = []
    for rank in ranks:
        senders = ranges({row.source for row in rows if row.target == rank})
        each.append(f"target worker {rank} receives from {f'source workers {senders}' if senders else 'nobody'}")
    return (
        "Per target worker a map of layers (down) and heads (across), coloured by source worker: "
        + "; ".join(each)
        + "."
    )


def _fields(source: Instance, target: Instance, rows: Sequence[TrafficRow]) -> list[Field]:
    fields = []
    for group in shared_groups(source, target):
        mine = [row for row in rows if row.group == group.name]
        if not mine:
            continue
        together = all(set(row.parts) == set(group.parts) for row in mine)
        fields += [Field(group, parts) for parts in ([group.parts] if together else [(part,) for part in group.parts])]
    return fields


def _room(field: Field) -> float:
    """Width of a map with its layer labels and its name."""
    return max(field.width, 6.5 * len(field.name)) + 34


def _legend(
    sources: Sequence[int], colours: dict[int, str], rows: Sequence[TrafficRow], width: float, strips: bool
) -> tuple[list[str], float]:
    """(lines, where the panels begin)."""
    texts = [_sent([row for row in rows if row.source == rank]) for rank in sources]
    step = max([len(text) for text in texts], default=0) * 6.4 + 90
    y, x = MARGIN + 34.0, float(MARGIN)
    lines = []
    for rank, text in zip(sources, texts):
        if x > MARGIN and x + step > width:
            x, y = MARGIN, y + 18
        lines.append(f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" fill="{colours[rank]}"/>')
        lines.append(f'<text x="{x + 17:g}" y="{y:g}">source {rank}: {text}</text>')
        x += step
    notes = ["grey: not held by this target worker"]
    if strips:
        notes += [
            "strips within a column: its sources, for other tokens or",
            "other indices of an axis that isn't drawn",
        ]
    for note in notes:
        y += 16
        lines.append(f'<text x="{MARGIN}" y="{y:g}" fill="#666">{note}</text>')
    return lines, y + 26


def _sent(rows: list[TrafficRow]) -> str:
    per_token = round(sum(row.mean_bytes_per_token for row in rows), 3)
    state = sum(row.bytes_per_token for row in rows if row.state)
    amounts = [f"{per_token:.12g} B/token"] if per_token else []
    return ", ".join(amounts + ([f"{state} B of state"] if state else [])) or "nothing"


def _panel(
    rank: int,
    rows: list[TrafficRow],
    fields: list[Field],
    widths: list[float],
    colours: dict[int, str],
    x: float,
    y: float,
) -> list[str]:
    senders = ranges({row.source for row in rows}) or "nobody"
    lines = [f'<text x="{x:g}" y="{y:g}" font-size="13" font-weight="bold">target {rank} from {senders}</text>']
    for field, width in zip(fields, widths):
        lines += _map(field, [row for row in rows if _shows(field, row)], colours, x + 28, y + 28)
        x += width
    return lines


def _shows(field: Field, row: TrafficRow) -> bool:
    return row.group == field.group.name and bool(set(row.parts) & set(field.parts))


def _map(field: Field, rows: list[TrafficRow], colours: dict[int, str], x: float, y: float) -> list[str]:
    """One map with its frame and labels; (x, y) is the map's upper left corner."""
    layers, heads = field.layers, field.heads
    row_height, head_width = field.height / max(1, len(layers)), field.width / heads
    lines = [
        f'<text x="{x:g}" y="{y - 8:g}">{escape(field.name)}</text>',
        f'<rect x="{x:g}" y="{y:g}" width="{field.width:g}" height="{field.height:g}" fill="#e4e4e4"/>',
    ]
    for first, last, low, high, cover in _areas(field, rows):
        top, height = y + first * row_height, (last - first) * row_height
        left, width = x + low * head_width, (high - low) * head_width
        strip = head_width / len(cover)
        if len(cover) == 1:
            lines += _block(cover[0], colours, left, top, width, height)
            lines += _label(cover[0].source, colours, left + width / 2, top + height / 2, width, height)
            continue
        for head, (i, row) in product(range(low, high), enumerate(cover)):
            lines += _block(row, colours, x + head * head_width + i * strip, top, strip, height)
        lines += _plates([row.source for row in cover], colours, left + width / 2, top + height / 2, width, height)
    if layers:
        lines.append(f'<text x="{x - 4:g}" y="{y + 9:g}" font-size="9" text-anchor="end">{layers[0]}</text>')
    if len(layers) > 1:
        bottom = y + field.height - 1
        lines.append(f'<text x="{x - 4:g}" y="{bottom:g}" font-size="9" text-anchor="end">{layers[-1]}</text>')
    below = f"heads 0-{heads - 1}" if heads > 1 else "head 0" if HEAD in field.group.axes else "no heads"
    lines.append(f'<text x="{x:g}" y="{y + field.height + 12:g}" font-size="9">{below}</text>')
    return lines


Area = tuple[int, int, int, int, tuple[TrafficRow, ...]]
"""(first layer, last + 1, first head, last + 1, the rows that cover it); layers by their place in the group."""


def _areas(field: Field, rows: list[TrafficRow]) -> list[Area]:
    """Rectangles in which the same rows cover every cell, as large as layers and heads allow."""
    edges = sorted({edge for row in rows for segment in _heads(row) for edge in segment})
    layers = field.layers
    found: list[Area] = []
    for low, high in pairwise(edges):
        covers = [
            tuple(row for row in rows if layer in row.layers and any(a <= low and high <= b for a, b in _heads(row)))
            for layer in layers
        ]
        start = 0
        for cover, same in groupby(covers, key=lambda cover: [id(row) for row in cover]):
            stop = start + sum(1 for _ in same)
            if cover:
                found.append((start, stop, low, high, covers[start]))
            start = stop
    return _widen(found)


def _widen(areas: list[Area]) -> list[Area]:
    """Join areas side by side that the same rows cover: several edges may belong to other layers."""
    joined: list[Area] = []
    for area in areas:
        first, last, low, high, cover = area
        for i, (f, n, a, b, c) in enumerate(joined):
            if (f, n, b) == (first, last, low) and [id(row) for row in c] == [id(row) for row in cover]:
                joined[i] = (f, n, a, high, c)
                break
        else:
            joined.append(area)
    return joined


def _heads(row: TrafficRow) -> tuple[tuple[int, int], ...]:
    return row.axes.get(HEAD, ((0, 1),))


def _shared_columns(fields: list[Field], rows: Sequence[TrafficRow]) -> bool:
    targets = {row.target for row in rows}
    return any(
        len(cover) > 1
        for field in fields
        for target in targets
        for *_, cover in _areas(field, [row for row in rows if row.target == target and _shows(field, row)])
    )


def _block(row: TrafficRow, colours: dict[int, str], x: float, y: float, width: float, height: float) -> list[str]:
    colour = colours[row.source]
    axes = " ".join(f"{axis} {slices(segments)}" for axis, segments in row.axes.items())
    tokens = "" if not row.cycles else f", tokens {cycle_text(row.cycles)}"
    tip = f"from source {row.source}: {row.group} layers {ranges(row.layers)}, {','.join(row.parts)}, {axes}{tokens}"
    return [
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}" stroke="#fff" '
        f'stroke-width="0.5"><title>{escape(tip)}</title></rect>'
    ]


def _label(
    rank: int, colours: dict[int, str], x: float, y: float, width: float, height: float, size: int = TEXT
) -> list[str]:
    """A rank in the middle of a block, upright if it fits, else turned, else left out."""
    long = 0.6 * size * len(str(rank)) + 2
    turn = ""
    if width < long or height < LABEL_ROOM:
        if height < long or width < LABEL_ROOM / 2:
            return []
        turn, size = f' transform="rotate(-90 {x:.2f} {y:.2f})"', min(size, int(width))
    return [
        f'<text x="{x:.2f}" y="{y + size * 0.36:.2f}" font-size="{size}" text-anchor="middle" '
        f'pointer-events="none" fill="{_ink(colours[rank])}"{turn}>{rank}</text>'
    ]


def _plates(ranks: list[int], colours: dict[int, str], x: float, y: float, width: float, height: float) -> list[str]:
    """The ranks of the strips of one area, as small plates around its middle: strips are too narrow to write on."""
    ranks = list(dict.fromkeys(ranks))
    plate = max(6.0 * len(str(rank)) for rank in ranks) + 4
    row, column = plate * len(ranks) <= width, LABEL_ROOM * len(ranks) <= height
    if not (row or column) or height < LABEL_ROOM:
        return []
    lines = []
    for i, rank in enumerate(ranks):
        shift = i - (len(ranks) - 1) / 2
        at_x, at_y = (x + shift * plate, y) if row else (x, y + shift * LABEL_ROOM)
        lines.append(
            f'<rect x="{at_x - plate / 2:.2f}" y="{at_y - LABEL_ROOM / 2:.2f}" width="{plate:.2f}" '
            f'height="{LABEL_ROOM}" fill="{colours[rank]}" stroke="#fff" stroke-width="0.5"/>'
        )
        lines += _label(rank, colours, at_x, at_y, plate, LABEL_ROOM, size=9)
    return lines


def _ink(colour: str) -> str:
    """Black or white, whichever stands out more (WCAG's relative luminance)."""

    def linear(channel: int) -> float:
        share = channel / 255
        return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)

    red, green, blue = (linear(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#fff"
