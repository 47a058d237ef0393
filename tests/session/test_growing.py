"""Prefill sends what it has and adds to it: token by token or layer by layer. Real processes, every byte compared."""

from __future__ import annotations

import time

import pytest

from kvferry.errors import TransferTimeout
from tests.session.crew import Crew, Pair, every, open_pair
from tests.session.pools import Shape, page_list
from tests.session.test_failures import error_of, until

TOKENS = 21


def begin(crew: Crew, registry: str, piece_tokens: int = 4) -> tuple[Pair, list[int], list[int]]:
    """Both sides' pages; the target already waits."""
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1, page_tokens=6))
    ours = page_list(pair.source_shape, (0, TOKENS), 0, seed=1)
    theirs = page_list(pair.target_shape, (0, TOKENS), 0, seed=2)
    every(pair.targets, "receive", "t", pair.source, theirs, 0, (0, TOKENS), 20.0, "", piece_tokens)
    return pair, ours, theirs


def landed(pair: Pair) -> int:
    """Pieces whose bytes are in the target's pages."""
    return int(pair.targets[0]("landed", "t"))


def finish(pair: Pair, theirs: list[int]) -> None:
    reports = every(pair.sources + pair.targets, "wait", "t")
    assert sum(report.bytes for report in reports) == 2 * TOKENS * 3 * 2 * 4 * 4 * 4
    assert every(pair.targets, "wrong_words", theirs, 0, (0, TOKENS)) == [0]


def test_what_is_there_moves_while_the_rest_is_computed(crew: Crew, registry: str) -> None:
    pair, ours, theirs = begin(crew, registry)
    for tokens in (8, 9, 16):
        every(pair.sources, "send_part", "t", ours[: -(-tokens // 4)], (0, tokens), False)
    until(lambda: landed(pair) == 2 * 4)  # of 6 pieces from each source, cut at 3, 7, 10, 14, 17, these lie below 16
    time.sleep(0.2)
    assert landed(pair) == 2 * 4
    assert every(pair.sources + pair.targets, "poll") == [[], [], []]
    every(pair.sources, "send_part", "t", ours, (0, TOKENS), True)
    finish(pair, theirs)


def test_f50_layer_by_layer_and_never_before_the_fence(crew: Crew, registry: str) -> None:
    pair, ours, theirs = begin(crew, registry, piece_tokens=0)
    for layer in (1, 0, 2):
        every(pair.sources, "send_part", "t", ours, (0, TOKENS), layer == 2, [layer])
    finish(pair, theirs)


def test_a_last_part_that_leaves_a_hole_is_refused(crew: Crew, registry: str) -> None:
    for name, (layers, tokens) in {"layer": ([0, 1], TOKENS), "tokens": (None, TOKENS - 1)}.items():
        pair, ours, _ = begin(crew, registry)
        every(pair.sources, "send_part", "t", ours, (0, tokens), True, layers)
        for member in pair.sources + pair.targets:
            error = error_of(member, "wait", "t")
            assert "refused" in error.text or "asked for" in error.text or "asks for" in error.text, name
            assert error.kind.__name__ == "TransferRefused"


def test_a_source_that_never_says_last_is_named_at_the_deadline(crew: Crew, registry: str) -> None:
    pair, ours, _ = begin(crew, registry)
    every(pair.sources, "send_part", "t", ours, (0, TOKENS), False, None, 1.0)
    error = error_of(pair.sources[0], "wait", "t")
    assert error.kind is TransferTimeout
    assert "extend() was never called with last=True" in error.text


def test_extending_what_has_ended_does_nothing(crew: Crew, registry: str) -> None:
    pair, ours, theirs = begin(crew, registry)
    every(pair.sources, "send_part", "t", ours, (0, TOKENS), True)
    finish(pair, theirs)
    every(pair.sources, "send_part", "t", ours, (0, TOKENS), True)
    assert every(pair.sources, "poll") == [[("t", "done")]] * 2


@pytest.mark.parametrize("piece_tokens", [-1])
def test_bad_piece_sizes_are_refused(piece_tokens: int, crew: Crew, registry: str) -> None:
    with pytest.raises(Exception, match="piece_tokens: must be ≥ 0, got -1"):
        begin(crew, registry, piece_tokens)
