"""One request's story: what all endpoints that took part say of it, joined and put in order. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvferry.layout.document import Struct
from kvferry.observe.clocks import Clock, common_clock
from kvferry.observe.records import Flow, Log, Record, Value, Wait, short

_ENDS = ("done", "failed")
_MANY = ("grants sent", "grants heard", "written", "done heard", "scattered")
PAUSE_S = 0.25
"""What happens piece by piece is told as one event, until it pauses for so long."""


class Event(Struct, frozen=True):
    """A record as the story tells it. `at_s` counts from the story's first event."""

    at_s: float
    worker: str
    event: str
    peer: str = ""
    phase: str = ""
    bytes: int = 0
    count: int = 1
    span_s: float = 0.0
    values: dict[str, Value] = {}  # noqa: RUF012  (msgspec copies defaults)


class Side(Struct, frozen=True):
    """One worker's part: `state` is running, done, failed, or unknown where its log doesn't say.

    `repeated`: messages about this transfer that it had to say again. `left_s`: until its deadline, while it runs.
    """

    worker: str
    role: str
    state: str
    phase: str
    seconds: float
    problem: str = ""
    left_s: float | None = None
    repeated: int = 0
    flows: tuple[Flow, ...] = ()
    waits: tuple[Wait, ...] = ()


class Story(Struct, frozen=True):
    """`clocks`: how the clocks of hosts beside the first were put onto its."""

    transfer: str
    requests: tuple[str, ...]
    sides: tuple[Side, ...]
    events: tuple[Event, ...]
    clocks: tuple[Clock, ...] = ()


@dataclass(frozen=True)
class _Mine:
    """What one endpoint's logs say of one transfer in one role."""

    log: Log
    role: str
    records: tuple[Record, ...]


def find(logs: Sequence[Log], wanted: str) -> list[str]:
    """Ids of the transfers that `wanted` names: one that is called so, else those that begin so, else those in which
    it occurs. A transfer is also called by the requests of its callers.
    """
    names: dict[str, set[str]] = {}
    for log in logs:
        for record in log.records:
            if record.transfer:
                names.setdefault(record.transfer, {record.transfer}).add(
                    str(record.values.get("request", record.transfer))
                )
        for state in log.states:
            names.setdefault(state.transfer, {state.transfer}).add(state.request or state.transfer)
    for fits in (str.__eq__, str.startswith, str.__contains__):
        found = [transfer for transfer, called in names.items() if any(fits(name, wanted) for name in called)]
        if found:
            return sorted(found)
    return []


def tell(logs: Sequence[Log], transfer: str) -> Story:
    """Everything about one transfer, over all workers."""
    merged = _merge(logs)
    clocks = common_clock(merged, transfer)
    mine = [part for log in merged for part in _parts(log, transfer)]
    times = [clocks.time(part.log, record) for part in mine for record in part.records]
    start_s = min(times, default=0.0)
    events = [_event(part, record, clocks.time(part.log, record) - start_s) for part in mine for record in part.records]
    requests = {str(r.values["request"]) for part in mine for r in part.records if "request" in r.values}
    requests |= {
        state.request for log in merged for state in log.states if state.transfer == transfer and state.request
    }
    sides = sorted((_side(part, transfer) for part in mine), key=lambda side: (side.role, side.worker))
    order = sorted(events, key=lambda event: event.at_s)
    return Story(transfer, tuple(sorted(requests)), tuple(sides), tuple(order), clocks.hosts)


def briefly(events: Iterable[Event]) -> list[Event]:
    """The same events, those that come with every piece told together as long as they go on."""
    told: list[Event] = []
    going: dict[tuple[str, ...], int] = {}  # where in `told`
    for event in events:
        key = (event.worker, event.event, event.peer, event.phase)
        place = going.get(key)
        if event.event in _MANY and place is not None:
            first = told[place]
            if event.at_s - (first.at_s + first.span_s) < PAUSE_S:
                more = (first.bytes + event.bytes, first.count + event.count, event.at_s + event.span_s - first.at_s)
                told[place] = Event(first.at_s, *key, *more, first.values)
                continue
        going[key] = len(told)
        told.append(event)
    return told


def _merge(logs: Iterable[Log]) -> list[Log]:
    """One log per endpoint: live answers and files say the same records twice, the later word counts."""
    by_worker: dict[str, list[Log]] = {}
    for log in logs:
        by_worker.setdefault(log.head.worker, []).append(log)
    merged = []
    for same in by_worker.values():
        same.sort(key=lambda log: log.head.mono_s)
        records = {record.number: record for log in same for record in log.records}
        last = same[-1]
        # what ran when an older file was written has ended, or is in the last log
        merged.append(Log(last.head, last.states, last.samples, tuple(records[number] for number in sorted(records))))
    return merged


def _parts(log: Log, transfer: str) -> list[_Mine]:
    roles = dict.fromkeys(record.role for record in log.records if record.transfer == transfer)
    roles |= dict.fromkeys(state.role for state in log.states if state.transfer == transfer)
    return [
        _Mine(log, role, tuple(r for r in log.records if r.transfer == transfer and r.role == role)) for role in roles
    ]


def _side(part: _Mine, transfer: str) -> Side:
    log, records = part.log, part.records
    worker = short(log.head.worker)
    repeated = sum(record.count for record in records if record.event.endswith(" repeated"))
    for state in log.states:
        if state.transfer == transfer and state.role == part.role:
            more = (repeated, state.flows, state.waits)
            return Side(worker, part.role, "running", state.phase, state.age_s, "", state.left_s, *more)
    end = next((record for record in reversed(records) if record.event in _ENDS), None)
    last = end or records[-1]
    seconds = last.last_s - records[0].mono_s
    problem = str(last.values.get("problem", "")) if end else "its log does not tell the end"
    state_name = end.event if end else "unknown"
    return Side(worker, part.role, state_name, last.phase, seconds, problem, None, repeated, _flows(part.role, records))


def _flows(role: str, records: Sequence[Record]) -> tuple[Flow, ...]:
    """From the records alone, once the machine has forgotten the transfer."""
    offer, moved = ("offer heard", "written") if role == "source" else ("offer sent", "scattered")
    flows = []
    by_peer = sorted((r for r in records if r.peer), key=lambda record: record.peer)
    for peer, same in groupby(by_peer, key=lambda record: record.peer):
        of_peer = list(same)
        asked = next((r for r in of_peer if r.event == offer), None)
        if asked is None:
            continue
        arrived = [r for r in of_peer if r.event == moved]
        if role == "target" and not arrived:  # landed straight in the pages
            arrived = [r for r in of_peer if r.event == "done heard"]
        pieces = int(asked.values.get("pieces", 0))
        flows.append(Flow(peer, asked.bytes, sum(r.bytes for r in arrived), 0, pieces, sum(r.count for r in arrived)))
    return tuple(flows)


def _event(part: _Mine, record: Record, at_s: float) -> Event:
    span_s = max(0.0, record.last_s - record.mono_s)
    where = (short(part.log.head.worker), record.event, short(record.peer), record.phase)
    return Event(at_s, *where, record.bytes, record.count, span_s, record.values)
