"""The verdict for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.cli.doctor.units import size, speed
from kvferry.cli.verify.drive import Pair, Verdict

COLUMNS = ("group", "from", "to", "by", "transfers", "bytes", "wrong", "verdict")
RED, GREEN = "31", "32"


def as_document(verdict: Verdict) -> dict[str, object]:
    """A kvferry-verify/1 document, for the JSON encoder."""
    return {
        "format": "kvferry-verify/1",
        "good": verdict.good,
        "source": verdict.source.instance,
        "target": verdict.target.instance,
        "transfers": verdict.cases,
        "pairs": list(verdict.pairs.values()),
        "guards": list(verdict.fences.values()),
        "speed": verdict.speed,
    }


def as_text(verdict: Verdict, colour: bool) -> str:
    """One line per group and pair of workers, one per fault, the guards, the speed, and the verdict in one word."""
    rows = [_row(pair) for pair in verdict.pairs.values()]
    lines = [*_table(rows, colour), "", *_faults(verdict), *_guards(verdict)]
    if verdict.speed is not None:
        took = verdict.speed
        rate = speed(took.bytes / took.seconds)
        lines.append(f"{size(took.bytes)} in {took.seconds * 1e3:.1f} ms, from receive to commit: {rate}")
    good = sum(pair.good for pair in verdict.pairs.values())
    summary = f"{good} of {len(rows)} right, {verdict.cases} transfers"
    word = "good" if verdict.good else "WRONG: let no traffic in"
    return "\n".join([*lines, f"{_paint(word, GREEN if verdict.good else RED, colour)}: {summary}"])


def _row(pair: Pair) -> tuple[str, ...]:
    source = "nobody" if pair.source < 0 else str(pair.source)
    word = "ok" if pair.good else "failed" if pair.problem else "wrong" if pair.wrong_bytes else "not moved"
    counts = (str(pair.cases), str(pair.bytes), str(pair.wrong_bytes))
    return (pair.group, source, str(pair.target), pair.via or "-", *counts, word)


def _faults(verdict: Verdict) -> Iterator[str]:
    for pair in verdict.pairs.values():
        where = f"group {pair.group}, source rank {pair.source} to target rank {pair.target}"
        if pair.first is not None:
            fault = pair.first.fault
            axes = "".join(f", {axis} {index}" for axis, index in fault.axes.items())
            yield (
                f"{where}: first wrong in layer {fault.layer}, part {fault.part}, token {fault.token}{axes}: found "
                f"0x{fault.found}, expected 0x{fault.expected} ({pair.first.case})"
            )
        if pair.problem:
            yield f"{where}: {pair.problem}"


def _guards(verdict: Verdict) -> Iterator[str]:
    for fence in verdict.fences.values():
        if fence.stray_bytes:
            count = f"{fence.stray_bytes} bytes that nobody wanted"
            yield f"guards of target rank {fence.target}: {count}, the first by {fence.where}"
    if not any(fence.stray_bytes for fence in verdict.fences.values()):
        yield "guards: nothing was written beside what was wanted"


def _table(rows: Sequence[Sequence[str]], colour: bool) -> list[str]:
    lines = [COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return [text if text.endswith((" ok", "verdict")) else _paint(text, RED, colour) for text in texts]


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text
