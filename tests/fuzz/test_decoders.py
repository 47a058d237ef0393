"""Every decoder refuses broken input with its typed error, soon and without remembering it.

`FUZZ_INPUTS` inputs are spread over the decoders: a few thousand by default, see `make test-fuzz`.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import REFUSALS, Decoder, all_decoders
from tests.fuzz.mutate import broken

INPUTS = int(os.environ.get("FUZZ_INPUTS", "4000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
INPUT_S = 0.05
"""Processor time of one input at most."""
MEMORY_KIB = 256 << 10
"""What the process may grow by over all inputs of one decoder."""
DECODERS = list(all_decoders())
SHARES = sum(decoder.share for decoder in DECODERS)


def attempt(decoder: Decoder, data: bytes, seen: Counter[str]) -> None:
    began_s = time.thread_time()
    try:
        decoder.take(data)
        seen["accepted"] += 1
    except REFUSALS as error:
        seen[type(error).__name__] += 1
        str(error).encode("utf-8", "backslashreplace")
    except BaseException as error:
        raise AssertionError(
            f"{decoder.name}: {type(error).__name__} for {data[:2000]!r} ({len(data)} bytes)"
        ) from error
    spent_s = time.thread_time() - began_s
    if spent_s > INPUT_S:  # once more: the first time may have compiled or imported something
        began_s = time.thread_time()
        try:
            decoder.take(data)
        except REFUSALS:
            pass
        spent_s = min(spent_s, time.thread_time() - began_s)
    assert spent_s <= INPUT_S, f"{decoder.name}: {spent_s:.3f} s for {data[:2000]!r} ({len(data)} bytes)"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_broken_input_is_refused(decoder: Decoder, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(f"{SEED} {decoder.name}")
    count, seen = -(-INPUTS * decoder.share // SHARES), Counter[str]()
    for data in decoder.corpus:
        decoder.take(data)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        attempt(decoder, broken(rng, decoder.corpus, decoder.codec), seen)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < MEMORY_KIB
    assert seen.total() == count and seen.total() > seen["accepted"], "nothing was refused: the inputs are too tame"
    with capsys.disabled():
        print(
            f"\n{decoder.name}: {count} inputs, " + ", ".join(f"{n} {kind}" for kind, n in sorted(seen.items())), end=""
        )


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=max(100, INPUTS // 100), deadline=None)
@given(number=st.integers(0, len(DECODERS) - 1), value=VALUES, raw=st.binary(max_size=64), whole=st.booleans())
def test_anything_at_all_is_refused(number: int, value: object, raw: bytes, whole: bool) -> None:
    data = msgspec.msgpack.encode(value) if whole else raw
    attempt(DECODERS[number], data, Counter())
    try:
        attempt(DECODERS[number], msgspec.json.encode(value), Counter())
    except (TypeError, ValueError):  # a key that JSON has not
        pass


def test_a_decoder_that_lets_an_error_through_is_found() -> None:
    def careless(data: bytes) -> object:
        return msgspec.msgpack.decode(data)

    good = DECODERS[1]
    decoder = Decoder("careless", good.corpus, good.codec, careless)
    rng = random.Random(0)
    with pytest.raises(AssertionError, match="careless: DecodeError"):
        for _ in range(200):
            attempt(decoder, broken(rng, decoder.corpus, decoder.codec), Counter())


def test_a_decoder_that_takes_too_long_is_found() -> None:
    def slow(data: bytes) -> None:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 2 * INPUT_S:
            pass

    with pytest.raises(AssertionError, match=r"slow: 0\.1"):
        attempt(Decoder("slow", [b""], None, slow), b"", Counter())
