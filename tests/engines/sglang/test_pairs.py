"""Every pair of tensor-parallel sizes through the plugin's own classes, each byte and guard of each pool compared.

Prints a table beside what SGLang's own NIXL backend would send, found by its own functions (`stock`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)]
pytest.importorskip("sglang", reason="sglang is not importable")

from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402

from tests.engines.sglang.rig import (  # noqa: E402
    UNTOUCHED,
    Rank,
    Request,
    Rig,
    open_rig,
    open_server,
    start_side,
    wait_for,
    write_config,
)
from tests.engines.sglang.servers import free_ports  # noqa: E402
from tests.engines.sglang.shapes import SLOTS, Shape  # noqa: E402
from tests.engines.sglang.stock import verdict  # noqa: E402

LONG = pytest.mark.long
HEADS = (pytest.param(1, marks=LONG), 2, 4, pytest.param(8, marks=LONG))
SIZES = (1, 2, 4, 8, 16)
ODD = ((12, 3, 2), (12, 4, 3), (12, 6, 4), (12, 2, 3), (4, 8, 16), (2, 4, 8), (2, 4, 16))
"""(heads, prefill, decode): sizes that don't divide (F16), and fewer heads than prefill ranks (F13)."""


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SLOT_BYTES", str(256 << 10))


def page_ids(page: int, tokens: int, seed: int, slots: int = SLOTS) -> list[int]:
    """In a shuffled order, never SGLang's padding page 0."""
    return (1 + np.random.default_rng(seed).permutation(slots // page - 1)[: -(-tokens // page)]).tolist()


def cover(ranks: list[Rank], start: int, tokens: int, other_page: int) -> range:
    """What moves: whole pages as far as both sides have them."""
    page = ranks[0].page
    return range(start, min(-(-tokens // page) * page, -(-tokens // other_page) * other_page))


def check(rig: Rig, decode: list[Rank], request: Request, moved: range) -> int:
    """Wrong bytes on both sides after a request, guards and padding included."""
    wrong = 0
    page = decode[0].page
    for ranks, pages, tokens, row in (
        (rig.prefill, request.source_pages, held_by_prefill(rig, request), request.rows[0]),
        (decode, request.target_pages[request.prefix // page :], moved, request.rows[1]),
    ):
        for rank in ranks:
            found = rank.arena.bytes.copy()
            rank.fill(pages, tokens, row)
            wrong += int(np.count_nonzero(found != rank.arena.bytes))
    return wrong


def held_by_prefill(rig: Rig, request: Request) -> range:
    page = rig.prefill[0].page
    return range(-(-request.tokens // page) * page)


def one_request(rig: Rig, decode: list[Rank], room: int, tokens: int, prefix: int = 0) -> int:
    """Move one prompt of whole and broken pages; the number of wrong bytes, or -1 where a side failed."""
    source_page, target_page = rig.prefill[0].page, decode[0].page
    request = Request(
        room, tokens, page_ids(source_page, tokens, room), page_ids(target_page, tokens, room + 1000), prefix=prefix
    )
    for rank in rig.prefill:
        rank.fill(request.source_pages, held_by_prefill(rig, request), request.rows[0])
    for rank in decode:
        rank.arena.bytes[:] = UNTOUCHED
    receivers = rig.receive(request, decode)
    senders = rig.send(request)
    both = [*senders, *receivers]
    wait_for(lambda: {side.poll() for side in both} <= {KVPoll.Success, KVPoll.Failed}, 60.0)
    states = {side.poll() for side in both}
    for side in both:
        side.clear()
    if states != {KVPoll.Success}:
        return -1
    return check(rig, decode, request, cover(decode, prefix, tokens, source_page))


@pytest.fixture
def ports() -> Iterator[int]:
    return iter(free_ports(24))


@pytest.mark.parametrize("heads", HEADS)
def test_power_of_two_pairs(model: Path, tmp_path: Path, ports: Iterator[int], heads: int) -> None:
    """F10–F15: all of TP 1 … 16 on both sides. Each prefill instance serves all five decode instances (F17)."""
    shape = Shape(heads=heads, layers=2, dim=8)
    config = write_config(model, tmp_path / "tiny-llama", num_attention_heads=16, num_key_value_heads=heads,
                          num_hidden_layers=2)  # fmt: skip
    found: dict[tuple[int, int], int] = {}
    start_s = time.monotonic()
    with ExitStack() as opened:
        decodes: dict[int, list[Rank]] = {}
        for tp in SIZES:
            decodes[tp] = []
            opened.callback(lambda ranks=decodes[tp]: [rank.close() for rank in ranks])
            start_side(decodes[tp], config, DisaggregationMode.DECODE, tp, 16, next(ports), shape)
        for prefill_tp in SIZES:
            port = next(ports)
            with open_server(port):
                rig = Rig(f"127.0.0.1:{port}", [], [])
                try:
                    start_side(rig.prefill, config, DisaggregationMode.PREFILL, prefill_tp, 16, port, shape)
                    for room, (tp, decode) in enumerate(decodes.items()):
                        found[prefill_tp, tp] = one_request(rig, decode, room, 41)
                finally:
                    rig.close()
    show(f"{heads} KV heads, {time.monotonic() - start_s:.0f} s", heads, found)
    assert set(found.values()) == {0}


def show(title: str, heads: int, found: dict[tuple[int, int], int]) -> None:
    print(f"\n{title}: wrong bytes with kvferry | SGLang's own backend")
    targets = sorted({decode for _, decode in found})
    print("  prefill  " + "".join(f"decode {tp:<9}" for tp in targets))
    for prefill in sorted({prefill for prefill, _ in found}):
        theirs = ["right" if prefill == tp else verdict(heads, prefill, tp) for tp in targets]
        cells = zip((found[prefill, tp] for tp in targets), theirs)
        print(f"  {prefill:<9}" + "".join(f"{wrong:>4} | {other:<9}" for wrong, other in cells))


@pytest.mark.parametrize(("heads", "prefill", "decode"), ODD)
def test_odd_pairs(model: Path, tmp_path: Path, ports: Iterator[int], heads: int, prefill: int, decode: int) -> None:
    """F13, F16: sizes that don't divide each other, and fewer heads than ranks on both sides."""
    shape = Shape(heads=heads, layers=2, dim=8)
    sizes = {"num_attention_heads": 48, "num_key_value_heads": heads, "hidden_size": 768, "num_hidden_layers": 2}
    config = write_config(model, tmp_path / "tiny-llama", **sizes)
    with open_rig(config, prefill, decode, 16, next(ports), shape=shape) as rig:
        found = {(prefill, decode): one_request(rig, rig.decode, 0, 41)}
    show(f"{heads} KV heads", heads, found)
    assert set(found.values()) == {0}


PAGES = ((1, 16), (16, 1), (16, 32), (32, 16), (6, 4), (4, 6), (1, 1))


@pytest.mark.parametrize(("source_page", "target_page"), PAGES)
def test_pages_of_unequal_size(model: Path, ports: Iterator[int], source_page: int, target_page: int) -> None:
    """F30, F36: in both directions, also when not multiples; prompts that break both sides' pages, and a prefix hit."""
    with open_rig(model, 2, 1, source_page, next(ports), decode_page=target_page) as rig:
        for room, tokens in enumerate((1, 5, 41, 64, 95)):
            assert one_request(rig, rig.decode, room, tokens) == 0, f"{tokens} tokens"
        assert one_request(rig, rig.decode, 99, 95, prefix=2 * target_page) == 0


@pytest.mark.parametrize("stages", [(3, 1), (1, 2, 1)])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
def test_uneven_pipeline_into_one_stage(
    model: Path, ports: Iterator[int], stages: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    """F20, F21: each stage sends its own layers, and the last one the metadata row."""
    with open_rig(model, *sizes, 16, next(ports), stages=stages) as rig:
        assert one_request(rig, rig.decode, 0, 41) == 0
        assert one_request(rig, rig.decode, 1, 96) == 0


def test_two_decode_instances_at_once(model: Path, ports: Iterator[int]) -> None:
    """F17: of other sizes, with requests of both under way at the same time."""
    port = next(ports)
    with open_rig(model, 2, 1, 16, port) as rig:
        wide: list[Rank] = []
        try:
            start_side(wide, model, DisaggregationMode.DECODE, 4, 16, next(ports))
            requests = [
                Request(room, 41, page_ids(16, 41, 7), page_ids(16, 41, room), rows=(2, row))
                for room, row in ((0, 3), (1, 6))
            ]
            for rank in [*rig.prefill, *rig.decode, *wide]:
                rank.arena.bytes[:] = UNTOUCHED
            for rank in rig.prefill:
                rank.fill(requests[0].source_pages, range(48), 2)
            receivers = [rig.receive(request, side) for request, side in zip(requests, (rig.decode, wide))]
            senders = [rig.send(request) for request in requests]
            both = [side for sides in (*receivers, *senders) for side in sides]
            wait_for(lambda: {side.poll() for side in both} <= {KVPoll.Success, KVPoll.Failed})
            assert {side.poll() for side in both} == {KVPoll.Success}
            for request, side in zip(requests, (rig.decode, wide)):
                assert check(rig, side, request, range(48)) == 0
        finally:
            for rank in wide:
                rank.close()
