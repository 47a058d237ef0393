"""Real worker processes on synthetic pools. Every byte of every target pool is compared with its logical cells."""

from __future__ import annotations

import pytest

from kvferry.layout.address import Address
from kvferry.session.registry import RegistryServer
from tests.session.crew import Crew, Pair, RemoteError, every, open_all, open_pair, start
from tests.session.pools import DIM, HIGH_BASE, Shape
from tests.transport.installed import NIXL, TRANSPORTS

STAGING_BASE = Address(0xFFFF_8000_0000_0000)


def cross(pair: Pair, tokens: tuple[int, int] = (0, 21), transfer: str = "t", **options: object) -> None:
    """One transfer; every byte of the target checked."""
    pages = start(pair, transfer, tokens, **options)  # type: ignore[arg-type]
    received = every(pair.targets, "wait", transfer)
    sent = every(pair.sources, "wait", transfer)
    shape, count = pair.target_shape, tokens[1] - tokens[0]
    for rank, report in enumerate(received):
        cells = count * len(shape.rank_layers(rank)) * 2 * len(shape.rank_heads(rank)) * DIM
        assert report.bytes == cells * 4
        # what is proved as a whole is moved in pieces, which may cut its runs
        assert report.proof is not None and report.proof.bytes == report.bytes and report.proof.copies <= report.copies
    assert sum(report.bytes for report in sent) == sum(report.bytes for report in received)
    assert every(pair.targets, "wrong_words", pages, tokens[0], tokens) == [0] * shape.world
    for stats in every(pair.sources + pair.targets, "stats"):
        assert (stats["slots_used"], stats["slots_quarantined"], stats["refused_messages"]) == (0, 0, 0)


SHAPES = {
    "tp1-tp2": (Shape(tp=1), Shape(tp=2)),
    "tp2-tp1": (Shape(tp=2), Shape(tp=1)),
    "tp2-tp3": (Shape(tp=2, heads=6), Shape(tp=3, heads=6)),
    "F10 tp1-tp8 heads 4": (Shape(tp=1), Shape(tp=8)),
    "F11 F14 tp8-tp1 heads 4": (Shape(tp=8), Shape(tp=1)),
    "F13 tp4-tp2 heads 2": (Shape(tp=4, heads=2), Shape(tp=2, heads=2)),
    "F13 tp2-tp4 heads 2": (Shape(tp=2, heads=2), Shape(tp=4, heads=2)),
    "F20 pp2-pp1": (Shape(pp=2), Shape(pp=1)),
    "F20 pp1-pp2": (Shape(pp=1), Shape(pp=2)),
    "pp2tp2-tp4": (Shape(tp=2, pp=2), Shape(tp=4)),
    "F30 page 6-page 4": (Shape(tp=1, page_tokens=6), Shape(tp=2, page_tokens=4)),
    "F32 nhd-hnd": (Shape(tp=2, order="nhd"), Shape(tp=1, order="hnd")),
    "F32 hnd-nhd": (Shape(tp=1, order="hnd"), Shape(tp=2, order="nhd")),
}


@pytest.mark.parametrize("case", SHAPES)
def test_every_byte_lands_where_its_cell_belongs(case: str, crew: Crew, registry: str) -> None:
    cross(open_pair(crew, registry, *SHAPES[case]))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("target_tp", [1, 2], ids=["F1 equal TP", "F2 mismatched TP"])
def test_addresses_with_bit_63_set(transport: str, target_tp: int, crew: Crew, registry: str) -> None:
    """F1, F2: pools and landing memory in an emulated device address space."""
    shapes = Shape(tp=1, base=HIGH_BASE), Shape(tp=target_tp, base=HIGH_BASE)
    cross(open_pair(crew, registry, *shapes, transport=transport, staging_base=STAGING_BASE))


@pytest.mark.parametrize("transport", ["local", *TRANSPORTS])
def test_every_transport(transport: str, crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(tp=2, order="hnd"), Shape(tp=1, page_tokens=6), transport=transport)
    cross(pair)
    (link,) = pair.sources[0]("links").values()
    assert link.partition(":")[0] == {"local": "shm"}.get(transport, transport)


@pytest.mark.parametrize("transport", ["process_vm", NIXL])
@pytest.mark.parametrize(
    "options",
    [{"gather": "never", "digest": False}, {"landing": "pages", "digest": False}],
    ids=["straight from the pages", "straight into the pages"],
)
@pytest.mark.parametrize(
    "shapes",
    [
        (Shape(tp=1, base=HIGH_BASE), Shape(tp=1, base=HIGH_BASE)),
        (Shape(tp=1, base=HIGH_BASE), Shape(tp=2, page_tokens=6, order="hnd")),
        (Shape(tp=2, pp=2, order="hnd"), Shape(tp=1, base=HIGH_BASE)),
    ],
    ids=["F1 equal TP", "F2 mismatched TP", "pp2tp2-tp1"],
)
def test_nothing_is_gathered_or_scattered(
    transport: str, options: dict[str, object], shapes: tuple[Shape, Shape], crew: Crew, registry: str
) -> None:
    pair = open_pair(crew, registry, *shapes, transport=transport, **options)
    for member in pair.sources:
        member("forbid", "gather")
    if "landing" in options:
        for member in pair.targets:
            member("forbid", "scatter")
    cross(pair, (8, 8), "nothing", sent=(0, 8))
    cross(pair, (12, 33), sent=(0, 33))


def test_pages_are_only_opened_to_ways_that_can_write_them(crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape(tp=2), landing="pages")  # auto: shm would be first
    cross(pair)
    (link, _) = pair.sources[0]("links").values()
    assert link.startswith("process_vm: shm: not offered by the peer")
    for transport in ("shm", "tcp"):
        with pytest.raises(RemoteError, match=r"landing: pages can't be written over .*; use nixl or process_vm"):
            open_pair(crew, registry, Shape(), Shape(), landing="pages", transport=transport)


@pytest.mark.parametrize("field", ["gather", "landing"])
def test_an_unknown_choice_is_refused(field: str, crew: Crew, registry: str) -> None:
    with pytest.raises(RemoteError, match=rf"{field}: must be one of .*, got 'perhaps'"):
        open_pair(crew, registry, Shape(), Shape(), **{field: "perhaps"})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_idle_endpoint_leaves_the_core_alone(transport: str, crew: Crew, registry: str) -> None:
    """Under 3 % of one core on either side, connected and after a transfer."""
    pair = open_pair(crew, registry, Shape(), Shape(), transport=transport)
    cross(pair)
    assert max(every(pair.sources + pair.targets, "cpu_while_idle", 2.0)) < 0.03


def test_f36_prefix_and_order_and_many_transfers_on_one_pair(crew: Crew, registry: str) -> None:
    """A decode-side prefix hit, receive before send, and requests much larger than the landing memory."""
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1), slots=2, slot_bytes=256)
    cross(pair, (8, 29), "prefix", receive_first=True)
    cross(open_pair(crew, registry, Shape(tp=1), Shape(tp=2), slots=1, slot_bytes=64), (0, 40), "one small slot")


def test_many_transfers_at_once(crew: Crew, registry: str) -> None:
    pair = open_pair(
        crew, registry, Shape(tp=2, pages=64), Shape(tp=2, page_tokens=6, pages=64), slots=3, slot_bytes=256
    )
    for i in range(12):
        pages = [2 * i, 2 * i + 1]
        every(pair.sources, "fill", pages, 0, (0, 8))
        every(pair.targets, "receive", f"t{i}", pair.source, pages, 0, (0, 8), 30.0)
    for i in reversed(range(12)):
        every(pair.sources, "send", f"t{i}", [2 * i, 2 * i + 1], 0, (0, 8), 30.0)
    for i in range(12):
        every(pair.sources + pair.targets, "wait", f"t{i}")
    fills = [([2 * i, 2 * i + 1], 0, (0, 8)) for i in range(12)]
    assert every(pair.targets, "wrong_words_of", fills) == [0, 0]
    assert [sorted(ended) for ended in every(pair.targets, "poll")] == [
        sorted((f"t{i}", "done") for i in range(12))
    ] * 2
    assert every(pair.targets, "poll") == [[], []]
    for member in pair.targets:
        assert member("stats")["slots_free"] == 3


def test_nothing_wanted_still_ends_on_every_side(crew: Crew, registry: str) -> None:
    cross(open_pair(crew, registry, Shape(tp=4, heads=2), Shape(tp=2, heads=2)), (8, 8), sent=(0, 8))


def test_each_instance_has_a_registry_of_its_own(crew: Crew, registry: str) -> None:
    """A request says where the prefill instance is known; nothing is shared."""
    pair = open_pair(crew, registry, Shape(tp=2), Shape(tp=1))
    every(pair.sources, "close")
    with RegistryServer() as own:
        open_all(pair.sources, pair.source, pair.source_shape, own.url, slots=4, slot_bytes=1024)
        cross(pair, registry=own.url)
        cross(pair, transfer="t2", receive_first=True, registry=own.url)


@pytest.mark.parametrize("url", ["nonsense", "http://example.org:80"])
def test_a_registry_out_of_reach_is_refused_by_the_call(url: str, crew: Crew, registry: str) -> None:
    pair = open_pair(crew, registry, Shape(), Shape())
    with pytest.raises(RemoteError, match=r"RegistryError: .*expected a URL|KeysError: .*only one on loopback"):
        start(pair, "t", (0, 5), registry=url)
