"""The findings for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from kvferry.cli.doctor.finding import EXIT, Finding, Level, worst
from kvferry.layout.document import Struct

COLOURS: dict[Level, str] = {"green": "32", "yellow": "33", "red": "31"}


class Report(Struct, frozen=True):
    """A kvferry-doctor/1 document: `level` is that of the worst finding."""

    format: str
    level: str
    findings: tuple[Finding, ...]


def as_document(findings: Sequence[Finding]) -> Report:
    return Report("kvferry-doctor/1", worst(findings), tuple(findings))


def as_text(findings: Sequence[Finding], seconds: float, colour: bool) -> str:
    """Each area with its lines, then one line that sums up."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for area, some in groupby(findings, key=lambda finding: finding.area):
        lines.append(area)
        for finding in some:
            lines.append(f"  {_level(finding.level, colour)}  {finding.name.ljust(width)}  {finding.found}")
            if finding.cure:
                lines.append(f"  {' ' * 6}  {' ' * width}  → {finding.cure}")
    counts = Counter(finding.level for finding in findings)
    summary = ", ".join(f"{counts[level]} {level}" for level in sorted(EXIT, key=lambda one: -EXIT[one]))
    return "\n".join([*lines, "", f"{summary}; {seconds:.1f} s"])


def _level(level: Level, colour: bool) -> str:
    text = level.ljust(6)
    return f"\x1b[{COLOURS[level]}m{text}\x1b[0m" if colour else text
