"""Digests on real processes: a byte that is wrong anywhere on the way fails the transfer before it is committed."""

from __future__ import annotations

import pytest

from kvferry.errors import TransferCorrupted
from tests.session.crew import Crew, every, open_pair, start
from tests.session.pools import Shape
from tests.session.test_failures import error_of
from tests.transport.installed import TRANSPORTS

TOKENS = (0, 21)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("where", ["wire", "scatter"])
def test_a_wrong_byte_is_found_and_named(transport: str, where: str, crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=1), Shape(tp=2, page_tokens=6, order="hnd"), transport=transport)
    start(pair, "good", TOKENS)
    assert [report.bytes for report in every(pair.targets, "wait", "good")] == [21 * 3 * 2 * 2 * 16] * 2
    pair.targets[1]("damage", where)
    start(pair, "bad", TOKENS)
    errors = [error_of(member, "wait", "bad") for member in (*pair.targets, *pair.sources)]
    assert {error.kind for error in errors} == {TransferCorrupted}
    assert all("what lies in the pages is not what was sent: group attn, layers [" in error.text for error in errors)


def test_bytes_that_never_come_are_found(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1))
    pair.targets[0]("damage", "nothing")
    start(pair, "t", TOKENS)
    assert error_of(pair.targets[0], "wait", "t").kind is TransferCorrupted


def test_straight_moves_are_digested_too(crew: Crew, registry: str) -> None:
    for options in ({"gather": "never"}, {"landing": "pages"}):
        pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1), transport="process_vm", **options)
        start(pair, "good", TOKENS)
        every(pair.targets, "wait", "good")
        pair.sources[1]("damage", "runs")
        start(pair, "bad", TOKENS)
        assert error_of(pair.targets[0], "wait", "bad").kind is TransferCorrupted


def test_without_digests_the_same_damage_is_not_seen(crew: Crew, registry: str) -> None:
    """What the flag buys: this is why it is on in all other tests."""
    pair = open_pair(crew, registry, Shape(), Shape(), digest=False)
    pair.targets[0]("damage", "wire")
    start(pair, "t", TOKENS)
    every(pair.targets, "wait", "t")
