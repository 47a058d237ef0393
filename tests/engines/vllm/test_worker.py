"""The worker side of prefill and decode on two real endpoints, in this process: orders in, reports out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvferry.engines.vllm.layers import CachedLayer  # noqa: E402
from kvferry.engines.vllm.layout import merge_groups, read_groups, read_pieces, read_views, read_worker  # noqa: E402
from kvferry.engines.vllm.options import Options  # noqa: E402
from kvferry.engines.vllm.orders import LoadOrder, Orders, SendOrder  # noqa: E402
from kvferry.engines.vllm.scheduler import BlockTable  # noqa: E402
from kvferry.engines.vllm.states import Split  # noqa: E402
from kvferry.engines.vllm.worker import Ended, Moved, WorkerSide, open_endpoint  # noqa: E402
from kvferry.errors import DocumentError  # noqa: E402
from kvferry.layout.document import Instance  # noqa: E402
from kvferry.session.registry import RegistryServer  # noqa: E402
from kvferry.transport.memory import HostMemory, map_array  # noqa: E402

HEADS, DIM, TOKENS, WINDOW = 2, 4, 40, 16
OPTIONS = Options(lease_s=20.0, timeout_s=20.0, slots=2, slot_bytes=4096, unknown_s=0.5)


@dataclass
class Rank:
    """One worker with a layer of full attention and one with a window, each with a block table of its own."""

    name: str
    side: WorkerSide
    registry: str
    layers: list[CachedLayer]
    tensors: dict[str, Any]
    block_tokens: int

    def cells(self, table: int, part: str, blocks: tuple[int, ...]) -> Any:
        """[token, head, dim] of one layer, as these blocks hold it."""
        layer = self.layers[table]
        view = read_views(self.tensors[layer.name], layer, 16)[part]
        order = [view.axes.index(axis) for axis in ("page", "token", "head", "dim")]
        return view.tensor.permute(*order)[list(blocks)].reshape(-1, HEADS, DIM)


def make_rank(name: str, backend: str, block_tokens: int, options: Options, registry: str) -> Rank:
    layers = [
        CachedLayer(f"layers.{i}.attn", i, i, kind, backend, HEADS, DIM, DIM, block_tokens)
        for i, kind in enumerate(("full", f"window-{WINDOW}"))
    ]
    tensors = {c.name: torch.zeros(16, HEADS, block_tokens, 2 * DIM) for c in layers}
    pieces = read_pieces(layers, tensors, 16, Split(0, 1, HEADS))
    groups = merge_groups([read_groups(pieces)])
    worker = read_worker(0, pieces, groups)
    document = Instance("kvferry-instance/1", name, "model", tuple(groups.values()), (worker,))
    memory = HostMemory([map_array(tensor) for tensor in tensors.values()])
    endpoint = open_endpoint(document, 0, memory, 1, registry, options)
    tables = [BlockTable(c.kind, block_tokens) for c in layers]
    return Rank(name, WorkerSide(endpoint, groups, tables, options), registry, layers, tensors, block_tokens)


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    """Each instance has a registry of its own."""
    with RegistryServer() as one, RegistryServer() as other:
        prefill = make_rank("p", "CPU_ATTN", 8, OPTIONS, one.url)
        decode = make_rank("d", "FLASH_ATTN", 4, OPTIONS, other.url)
        yield prefill, decode
        decode.side.close()
        prefill.side.close()


def until(rank: Rank, done: Callable[[Ended], bool], finished: set[str] | None = None) -> Ended:
    """Reports of several steps, joined, until `done`."""
    total, end_s = Ended(), time.monotonic() + 10
    while time.monotonic() < end_s:
        ended = rank.side.collect(finished or set())
        for name in ("sent", "received", "failed", "failed_blocks"):
            assert not getattr(total, name) & getattr(ended, name), "reported twice"
            getattr(total, name).update(getattr(ended, name))
        if done(total):
            return total
        time.sleep(0.002)
    raise AssertionError(f"nothing more within 10 s; so far {total}")


SENT = (3, 1, 2, 9, 4)
"""Blocks of 8 tokens."""
FREED = (0, 0, 5, 6, 7)
"""A window of 16 tokens before token 40: the first 24 may be gone."""
INTO = tuple(range(15, 5, -1))
"""Blocks of 4 tokens."""
WINDOW_INTO = (0,) * 5 + (1, 2, 3, 4, 5)


def fill(prefill: Rank) -> None:
    for tensor in prefill.tensors.values():
        tensor.copy_(torch.rand(tensor.shape))


def send(prefill: Rank, request: str = "r") -> None:
    prefill.side.submit(Orders(sends=(SendOrder(request, f"p/{request}", TOKENS, (SENT, FREED)),)))


def load(prefill: Rank, start: int = 0, stop: int = TOKENS - 1, request: str = "d", **changed: Any) -> LoadOrder:
    order = LoadOrder(request, "p/r", "p", prefill.registry, start, stop, (INTO, WINDOW_INTO))
    return LoadOrder(**{**{name: getattr(order, name) for name in order.__dataclass_fields__}, **changed})


@pytest.mark.parametrize("start", [0, 12])
def test_tokens_arrive_in_the_other_layout_and_what_was_there_stays(pair: tuple[Rank, Rank], start: int) -> None:
    prefill, decode = pair
    fill(prefill)
    send(prefill)
    decode.side.submit(Orders(loads=(load(prefill, start),)))
    assert until(decode, lambda e: bool(e.received)) == Ended(received={"d"})
    assert until(prefill, lambda e: bool(e.sent)) == Ended(sent={"r"})
    for part in "kv":
        sent, got = prefill.cells(0, part, SENT), decode.cells(0, part, INTO)
        assert torch.equal(got[start : TOKENS - 1], sent[start : TOKENS - 1])
        assert not got[:start].any() and not got[TOKENS - 1 :].any()
        # token 39 is computed next, and sees the 16 tokens from 24 on
        sent, got = prefill.cells(1, part, FREED), decode.cells(1, part, WINDOW_INTO)
        assert torch.equal(got[24 : TOKENS - 1], sent[24 : TOKENS - 1])
        assert not got[20:24].any()
    assert not prefill.side.busy and not decode.side.busy
    sent, got = prefill.side.moved(), decode.side.moved()
    assert sent.sent_bytes == got.received_bytes == (TOKENS - 1 - start + 15) * 2 * HEADS * DIM * 4
    assert len(got.seconds) == 1 and got.copies > 0 and not got.failed_loads and not sent.unclaimed_prompts
    assert decode.side.moved() == Moved(), "each is told once"


def test_a_full_prefix_hit_ends_the_send_and_reports_nothing_on_decode(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    send(prefill)
    decode.side.submit(Orders(loads=(load(prefill, 0, 0, blocks=()),)))
    assert until(prefill, lambda e: bool(e.sent)) == Ended(sent={"r"})
    assert until(decode, lambda e: not decode.side.busy) == Ended()
    assert not any(tensor.any() for tensor in decode.tensors.values())


def test_a_lease_ends_and_then_the_load_fails(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    with RegistryServer() as registry:
        short = make_rank("q", "CPU_ATTN", 8, Options(lease_s=0.2, timeout_s=5.0), registry.url)
        try:
            short.side.submit(Orders(sends=(SendOrder("r", "q/r", TOKENS, (SENT, FREED)),)))
            assert until(short, lambda e: bool(e.sent)) == Ended(sent={"r"})
            order = load(prefill, transfer="q/r", source="q", registry=registry.url)
            decode.side.submit(Orders(loads=(order,)))
            assert until(decode, lambda e: bool(e.received)) == Ended(received={"d"}, failed={"d"})
        finally:
            short.side.close()


def test_an_unknown_request_fails_in_time_and_no_other(pair: tuple[Rank, Rank]) -> None:
    prefill, _ = pair
    fill(prefill)
    with RegistryServer() as registry:
        decode = make_rank("e", "FLASH_ATTN", 4, Options(timeout_s=5.0), registry.url)
        try:
            began_s = time.monotonic()
            decode.side.submit(Orders(loads=(load(prefill, transfer="p/nobody", request="x"),)))
            assert until(decode, lambda e: bool(e.received)) == Ended(received={"x"}, failed={"x"})
            assert time.monotonic() - began_s < 3, "prefill knows its own ids, so an unknown one need not wait for 5 s"
            decode.side.submit(Orders(loads=(load(prefill, source="nobody", transfer="n/r", request="y"),)))
            send(prefill)
            decode.side.submit(Orders(loads=(load(prefill),)))
            assert until(decode, lambda e: "d" in e.received) == Ended(received={"d"})
            assert until(decode, lambda e: "y" in e.received) == Ended(received={"y"}, failed={"y"})
        finally:
            decode.side.close()


def test_blocks_that_prefill_may_still_write_are_not_reported(pair: tuple[Rank, Rank]) -> None:
    """With landing="pages" a failed transfer holds its pages until the endpoint says that they are free."""
    prefill, decode = pair
    decode.side.submit(Orders(loads=(load(prefill),)))
    (transfer,) = decode.side._loads
    held = threading.Event()
    held.set = lambda: None  # type: ignore[method-assign]  # in doubt, whatever the endpoint says at its end
    transfer._pages_free = held
    assert until(decode, lambda e: bool(decode.side._held)) == Ended()
    assert decode.side.busy and decode.side.collect(set()) == Ended()
    transfer._pages_free = threading.Event()
    transfer._pages_free.set()
    assert until(decode, lambda e: bool(e.received)) == Ended(received={"d"}, failed={"d"})


def test_decode_may_ask_first_where_prefill_lets_it(pair: tuple[Rank, Rank]) -> None:
    _, decode = pair
    with RegistryServer() as registry:
        options = Options(lease_s=20.0, unknown_s=0.1, offer_first=True)
        prefill = make_rank("f", "CPU_ATTN", 8, options, registry.url)
        try:
            fill(prefill)
            decode.side.submit(Orders(loads=(load(prefill, transfer="f/both-7", source="f"),)))
            time.sleep(0.5)  # an id that is not known would have been refused by now
            prefill.side.submit(Orders(sends=(SendOrder("r", "f/both-7", TOKENS, (SENT, FREED)),)))
            assert until(decode, lambda e: bool(e.received)) == Ended(received={"d"})
            assert torch.equal(decode.cells(0, "k", INTO)[: TOKENS - 1], prefill.cells(0, "k", SENT)[: TOKENS - 1])
        finally:
            prefill.side.close()


def test_a_client_that_leaves_ends_both_sides(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.side.submit(Orders(loads=(load(prefill),)))
    time.sleep(0.5)  # prefill has heard of it by then
    assert decode.side.collect(set()) == Ended()
    # the request stays unreported, so that vLLM keeps its blocks, until the endpoint has let go of them
    assert until(decode, lambda e: bool(e.received), finished={"d"}) == Ended(received={"d"})
    send(prefill)
    assert until(prefill, lambda e: bool(e.sent)) == Ended(sent={"r"})


def test_an_order_that_can_not_be_started_fails_alone(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    fill(prefill)
    send(prefill)
    orders = (load(prefill, request="bad", problem="kv_transfer_params.remote_port: expected `int`"), load(prefill))
    decode.side.submit(Orders(loads=orders))
    assert decode.side.collect(set()) == Ended(received={"bad"}, failed={"bad"})
    assert until(decode, lambda e: bool(e.received)) == Ended(received={"d"})
    # the same cache once more: ids are unique
    decode.side.submit(Orders(loads=(load(prefill, request="again"),)))
    assert until(decode, lambda e: bool(e.received)) == Ended(received={"again"}, failed={"again"})


def test_failed_blocks_are_named_where_there_is_one_table(pair: tuple[Rank, Rank]) -> None:
    _, decode = pair
    side = WorkerSide(decode.side._endpoint, {}, [BlockTable("full", 4)], OPTIONS)
    order = LoadOrder("d", "", "", "", 8, 39, (INTO,), "no")
    side.submit(Orders(loads=(order,)))
    assert side.collect(set()) == Ended(received={"d"}, failed_blocks=set(INTO[2:]))


def test_an_unknown_transport_is_named() -> None:
    with RegistryServer() as registry, pytest.raises(DocumentError, match=r"^kv_connector_extra_config.transport: "):
        make_rank("p", "CPU_ATTN", 8, Options(transport="carrier-pigeon"), registry.url)
