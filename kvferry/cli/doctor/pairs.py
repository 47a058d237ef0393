"""Checks of the instances against each other: whether they cache the same thing, and all of it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, groupby, permutations

from kvferry.cli.doctor.finding import Finding
from kvferry.cli.doctor.inquiry import Answer
from kvferry.cli.doctor.units import speed
from kvferry.cli.doctor.workers import LOCAL, OFFERS
from kvferry.errors import IncompatibleError, PlanError
from kvferry.layout.document import Instance, decode_msgpack
from kvferry.plan.route import check_compatible, route
from kvferry.session.deaths import this_process
from kvferry.transport.base import Export

AREA = "pairs"


def compare(answers: Sequence[Answer], speeds: Mapping[str, float]) -> list[Finding]:
    """One line for each pair that can't talk although it serves one model, and one for each instance.

    `speeds`: bytes per second by transport, as measured between two processes of this machine.
    """
    found: list[Finding] = []
    whole: list[Instance] = []
    for name, some in groupby(answers, key=lambda answer: answer.entry.instance):
        workers = list(some)
        problem = _difference(workers)
        if problem:
            cure = f"start all workers of {name} with the same model and cache"
            found.append(Finding("red", AREA, name, problem, cure))
        elif all(a.card is not None for a in workers) and len(workers) == workers[0].entry.world:
            whole.append(_join(workers))
    names = [one.instance for one in whole]
    ways = {(a, b): _way(a, b, answers, speeds) for a, b in permutations(names, 2)}
    problems = {(one.instance, other.instance): _problem(one, other) for one, other in combinations(whole, 2)}
    for pair in [pair for pair in problems if not problems[pair][0] and not ways[pair]]:
        problems[pair] = "they offer no transport that both could use", "start both with the same one, or with auto"
    found += [
        Finding("red", AREA, f"{one.instance}, {other.instance}", *problems[one.instance, other.instance])
        for one, other in combinations(whole, 2)
        if one.model == other.model and problems[one.instance, other.instance][0]
    ]
    return found + [_partners(instance, whole, problems, ways) for instance in whole]


def _partners(
    one: Instance,
    whole: Sequence[Instance],
    problems: dict[tuple[str, str], tuple[str, str]],
    ways: dict[tuple[str, str], str],
) -> Finding:
    others = [other for other in whole if other is not one]

    def problem(other: Instance) -> tuple[str, str]:
        return problems.get((one.instance, other.instance)) or problems[other.instance, one.instance]

    fitting = [f"{other.instance} ({ways[one.instance, other.instance]})" for other in others if not problem(other)[0]]
    what = f"{one.model}, {len(one.workers)} worker(s)"
    if fitting:
        return Finding("green", AREA, one.instance, f"{what}, fits {', '.join(fitting)}")
    if not others:
        text = f"{what}: no other whole instance to compare it with"
        return Finding("yellow", AREA, one.instance, text, "start its partner, or mend it where a line above is red")
    text, cure = problem(others[0])
    return Finding("red", AREA, one.instance, f"fits no other instance; with {others[0].instance}: {text}", cure)


def _problem(one: Instance, other: Instance) -> tuple[str, str]:
    """What keeps the two apart and the cure, or nothing. Either may be the source."""
    try:
        check_compatible(one, other)
    except IncompatibleError as error:
        mine, theirs = f"{one.instance} has {error.source!r}", f"{other.instance} has {error.target!r}"
        cure = f"restart one of them: {error.field} must be the same on both"
        return f"{error.field}: {mine}, {theirs}", cure
    for source, target in ((one, other), (other, one)):
        try:
            for worker in target.workers:
                route(source, target, worker.rank)
        except PlanError as error:
            cure = f"restart {source.instance}: its workers don't hold all that {target.instance} wants"
            return f"{source.instance} to {target.instance}: {error}", cure
    return "", ""


def _way(one: str, other: str, answers: Sequence[Answer], speeds: Mapping[str, float]) -> str:
    """The transport that the workers of two instances would use, by what they offer and by whether they share a host;
    nothing where there is none.

    Only they themselves try it.
    """
    cards = [a.card for a in answers if a.card is not None and a.entry.instance in (one, other)]
    hosts = {card.process.namespace if card.process else card.address for card in cards}
    exports = [decode_msgpack(card.export, Export) for card in cards]
    for way in OFFERS:
        if all(getattr(export, way) is not None for export in exports) and (way not in LOCAL or len(hosts) == 1):
            here = this_process()
            known = way in speeds and here is not None and hosts == {here.namespace}
            return f"over {way}, {speed(speeds[way])} between two processes here" if known else f"over {way}"
    return ""


def _difference(workers: Sequence[Answer]) -> str:
    """Where the workers of one instance disagree, or nothing."""
    cards = [(worker.entry.rank, worker.card.instance) for worker in workers if worker.card is not None]
    for rank, card in cards[1:]:
        first_rank, first = cards[0]
        for field in ("model", "groups"):
            if getattr(card, field) != getattr(first, field):
                return (
                    f"its workers disagree about {field}: rank {first_rank} has {_short(getattr(first, field))}, rank "
                    f"{rank} has {_short(getattr(card, field))}"
                )
    return ""


def _join(workers: Sequence[Answer]) -> Instance:
    parts = [worker.card.instance for worker in workers if worker.card is not None]
    first = parts[0]
    joined = tuple(worker for part in parts for worker in part.workers)
    return Instance(first.format, first.instance, first.model, first.groups, joined)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} …"
