"""Checks of the workers that the registry knows: what they say of themselves, and which way leads to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from kvferry.cli.doctor.finding import Check, Finding, run_checks
from kvferry.cli.doctor.inquiry import Answer, ask_workers
from kvferry.cli.doctor.units import milliseconds, speed
from kvferry.errors import DocumentError, KVFerryError, MissingExtra, TransportUnavailable
from kvferry.layout.document import decode_msgpack
from kvferry.layout.validate import check_instance
from kvferry.session.keys import Access
from kvferry.session.registry import Entry
from kvferry.transport.base import Export, Transport, open_transport
from kvferry.transport.staging import Staging

AREA = "workers"
WAY_S = 15.0
"""To find the way to one worker; NIXL alone is given 10 s for its connection."""
OFFERS = ("shm", "process_vm", "nixl", "tcp")
"""In the order of preference."""
LOCAL = ("shm", "process_vm")
PROBE_BYTES = 4096


def ask(
    entries: Sequence[Entry], at: Access, transport: str, speeds: Mapping[str, float]
) -> tuple[list[Finding], list[Answer]]:
    """One line for each worker, and what they answered. `speeds`: bytes per second by transport, as measured here."""
    answers = [_checked(answer) for answer in ask_workers(entries, at)]
    with ExitStack() as opened:
        staging = Staging(1, PROBE_BYTES)
        opened.callback(staging.close)
        try:
            own = open_transport(transport, staging, at.host)
        except MissingExtra as error:
            return [_way_missing(answer, error) for answer in answers], answers
        opened.callback(own.close)
        checks = [
            Check(AREA, name_of(answer), lambda answer=answer: [_finding(answer, own, speeds)], WAY_S)  # type: ignore[misc]  # bound now
            for answer in answers
        ]
        return run_checks(checks), answers


def name_of(answer: Answer) -> str:
    return f"{answer.entry.instance} rank {answer.entry.rank}"


def _checked(answer: Answer) -> Answer:
    """Without the card, and with the reason, where it contradicts itself or the registry."""
    if answer.card is None:
        return answer
    entry, card = answer.entry, answer.card
    ranks = [worker.rank for worker in card.instance.workers]
    problem = ""
    if (card.instance.instance, ranks, card.world) != (entry.instance, [entry.rank], entry.world):
        problem = f"it says it is rank(s) {ranks} of {card.instance.instance!r} in a world of {card.world}"
    try:
        check_instance(card.instance)
        decode_msgpack(card.export, Export).slots.check()
    except (DocumentError, RecursionError) as error:
        problem = f"it describes itself wrongly: {error}"
    cure = "run the same release of kvferry on both sides, and restart that worker"
    return Answer(entry, problem=problem, cure=cure) if problem else answer


def _finding(answer: Answer, own: Transport, speeds: Mapping[str, float]) -> Finding:
    """Connecting tries the way for real, by the header of the worker's landing memory, which holds no data."""
    if answer.card is None:
        return Finding("red", AREA, name_of(answer), answer.problem, answer.cure)
    offered = decode_msgpack(answer.card.export, Export)
    ways = ", ".join(way for way in OFFERS if getattr(offered, way) is not None)
    text = f"answers within {milliseconds(answer.ping_s)}, offers {ways or 'no transport'}"
    try:
        peer = own.connect(answer.card.export)
    except TransportUnavailable as error:
        return Finding("red", AREA, name_of(answer), f"{text}; {error}", _way_cure(str(error)))
    except KVFerryError as error:
        return Finding("red", AREA, name_of(answer), f"{text}; {error}", "restart that worker")
    peer.close()
    return Finding("green", AREA, name_of(answer), f"{text}; {peer.name} from here{_speed(peer.name, speeds)}")


def _speed(way: str, speeds: Mapping[str, float]) -> str:
    if way in LOCAL:
        return f", {speed(speeds[way])} between two processes here" if way in speeds else ""
    return "; its speed between hosts is measured by `kvferry verify`"


def _way_missing(answer: Answer, error: MissingExtra) -> Finding:
    if answer.card is None:
        return Finding("red", AREA, name_of(answer), answer.problem, answer.cure)
    return Finding("red", AREA, name_of(answer), f"answers, but no way leads there from here: {error}", str(error))


def _way_cure(problem: str) -> str:
    if "is not installed" in problem:
        return "install the package that is named there, on this side"
    if "not offered by the peer" in problem:
        return "start both sides with the same transport, or with auto"
    return "use a transport that both sides can: between hosts tcp or nixl, and open its ports"
