"""What a soak has found, for people and for programs; and what counts as a leak."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.cli.soak.soak import Outcome, Usage
from kvferry.layout.document import Struct

MIB = 1 << 20
MORE_DESCRIPTORS, MORE_THREADS, MORE_MEMORY_BYTES = 8, 4, 32 * MIB
"""A process may use that much more at its last quiet moment than at its first: caches fill, sockets close late."""


class Process(Struct, frozen=True):
    """A process that lived to the end. `slots`, `transfers`: held when it was last looked at."""

    name: str
    pid: int
    slots: int
    transfers: int
    descriptors: tuple[int, int]
    threads: tuple[int, int]
    memory_bytes: tuple[int, int]


class Report(Struct, frozen=True):
    """A kvferry-soak/1 document. `good`: no problem was seen; `keys`: whether keys were made for it."""

    format: str
    good: bool
    interrupted: bool
    seconds: float
    seed: int
    transport: str
    keys: bool
    requests: dict[str, int]
    faults: dict[str, int]
    restarts: int
    quiet_moments: int
    wrong_bytes: int
    hung: int
    unexplained: int
    pages_held: int
    slots_held: int
    processes: tuple[Process, ...]
    problems: tuple[str, ...]


def report_of(outcome: Outcome) -> Report:
    surviving = list(outcome.usage.values())
    leaks = [problem for usage in surviving for problem in leaks_of(usage)]
    if outcome.pages_held:
        leaks.append(f"{outcome.pages_held} pages are held at the end")
    problems = (*outcome.problems, *leaks)
    return Report(
        format="kvferry-soak/1",
        good=not problems and not outcome.wrong_bytes and not outcome.hung,
        interrupted=outcome.interrupted,
        seconds=round(outcome.seconds, 1),
        seed=outcome.settings.seed,
        transport=outcome.settings.transport,
        keys=outcome.settings.keys,
        requests=dict(outcome.requests.most_common()),
        faults=dict(sorted(outcome.faults.items())),
        restarts=outcome.restarts,
        quiet_moments=outcome.quiet_moments,
        wrong_bytes=outcome.wrong_bytes,
        hung=outcome.hung,
        unexplained=outcome.unexplained,
        pages_held=outcome.pages_held,
        slots_held=outcome.slots_held,
        processes=tuple(map(_process, surviving)),
        problems=problems,
    )


def leaks_of(usage: Usage) -> list[str]:
    """What a process uses more of than it may."""
    first, last, who = usage.first, usage.last, f"{usage.seat} (pid {usage.pid})"
    found = []
    for what, before, after, more in (
        ("descriptors", first.descriptors, last.descriptors, MORE_DESCRIPTORS),
        ("threads", first.threads, last.threads, MORE_THREADS),
        ("bytes of memory", first.memory_bytes, last.memory_bytes, MORE_MEMORY_BYTES),
    ):
        if after > before + more:
            found.append(f"{who}: {before:,} {what} at first, {after:,} at last, {more:,} more are allowed")
    return found


def _process(usage: Usage) -> Process:
    first, last, look = usage.first, usage.last, usage.look
    return Process(
        name=usage.seat,
        pid=usage.pid,
        slots=look.slots_held if look else 0,
        transfers=look.transfers if look else 0,
        descriptors=(first.descriptors, last.descriptors),
        threads=(first.threads, last.threads),
        memory_bytes=(first.memory_bytes, last.memory_bytes),
    )


def as_text(report: Report) -> str:
    processes = [("process", "slots", "transfers", "descriptors", "threads", "memory MiB")]
    for process in report.processes:
        memory = "{:.0f} → {:.0f}".format(*(nbytes / MIB for nbytes in process.memory_bytes))
        counts = ("{} → {}".format(*process.descriptors), "{} → {}".format(*process.threads))
        processes.append((process.name, str(process.slots), str(process.transfers), *counts, memory))
    lines = [
        *_table([("requests", str(sum(report.requests.values()))), *_counts(report.requests)]),
        "",
        *_table([("faults", str(sum(report.faults.values()))), *_counts(report.faults)]),
        f"restarts  {report.restarts}",
        "",
        *_table(processes),
        "used at the first and the last quiet moment of each process that lived to the end",
        "",
        f"wrong bytes {report.wrong_bytes}, hung {report.hung}, failed without a reason {report.unexplained}, "
        f"pages held {report.pages_held}, slots held {report.slots_held}",
        *(f"WRONG: {problem}" for problem in report.problems),
        f"{'good' if report.good else 'NOT GOOD'}{', interrupted' if report.interrupted else ''}: "
        f"{report.seconds:g} s, {report.quiet_moments} quiet moments, transport {report.transport}, "
        f"{'with keys, ' if report.keys else ''}seed {report.seed}",
    ]
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [(f"  {name}", str(count)) for name, count in counts.items()]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    first, *others = widths
    return [
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others))]) for row in rows
    ]
