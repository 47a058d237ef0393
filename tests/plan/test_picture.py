"""The SVG map: what it says, and that it is well formed and always the same."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

from msgspec.structs import replace

from kvferry.layout.address import Address
from kvferry.layout.document import Buffer, Group, Instance, Mode, Pool, Region, Worker
from kvferry.plan.explain import who_sends_what
from kvferry.plan.picture import COLOURS, draw
from tests.plan.build import instance

SVG = "{http://www.w3.org/2000/svg}"
GREY = "#e4e4e4"


def drawn(source: Instance, target: Instance) -> ET.Element:
    return ET.fromstring(draw(source, target, who_sends_what(source, target)))


def blocks(root: ET.Element) -> list[tuple[str, str]]:
    """(colour, tip) of every coloured block."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            found.append((rect.attrib["fill"], tip.text or ""))
    return found


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_panels_blocks_and_legend() -> None:
    source = instance("prefill", tp=4, heads=12, stages=(tuple(range(4)),))
    target = instance("decode", tp=3, heads=12, stages=(tuple(range(4)),))
    root = drawn(source, target)
    assert root.attrib["role"] == "img" and root.attrib["aria-labelledby"] == "title desc"
    assert root.findtext(f"{SVG}title") == "Who sends what: prefill to decode"
    assert "target worker 1 receives from source workers 1-2" in (root.findtext(f"{SVG}desc") or "")
    assert {"target 0 from 0-1", "target 1 from 1-2", "target 2 from 2-3", "source 3: 192 B/token"} <= set(texts(root))
    assert [(COLOURS.index(colour), tip[:13], tip[-19:]) for colour, tip in blocks(root)] == [
        (0, "from source 0", "k,v, head 0:3 dim 0:4"[-19:]),
        (1, "from source 1", "k,v, head 3:4 dim 0:4"[-19:]),
        (1, "from source 1", "k,v, head 4:6 dim 0:4"[-19:]),
        (2, "from source 2", "k,v, head 6:8 dim 0:4"[-19:]),
        (2, "from source 2", "k,v, head 8:9 dim 0:4"[-19:]),
        (3, "from source 3", "k,v, head 9:12 dim 0:4"[-19:]),
    ]


def test_blocks_cover_the_heads_and_layers_that_travel() -> None:
    """Widths and heights, in heads and layers, add up: pipeline stages 2 → 1, 64 heads on 16 target workers."""
    layers = tuple(range(80))
    source = instance("a", tp=2, heads=64, stages=(layers[:30], layers[30:]))
    root = drawn(source, instance("b", tp=16, heads=64, stages=(layers,)))
    fields = [rect for rect in root.iter(f"{SVG}rect") if rect.attrib["fill"] == GREY]
    assert len(fields) == 16
    area = float(fields[0].attrib["width"]) * float(fields[0].attrib["height"])
    tipped = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    covered = sum(float(rect.attrib["width"]) * float(rect.attrib["height"]) for rect in tipped)
    assert len(tipped) == 32 and abs(covered - area) < area * 0.001


def test_sixteen_by_sixteen_says_every_rank() -> None:
    sixteen = instance("a", tp=16, heads=16, stages=(tuple(range(80)),))
    root = drawn(sixteen, replace(sixteen, instance="b"))
    assert {colour for colour, _ in blocks(root)} == set(COLOURS)
    assert {str(rank) for rank in range(16)} <= set(texts(root))


def test_context_parallel_sources_share_a_column_as_strips() -> None:
    root = drawn(
        instance("a", heads=2, stages=((0,),), cycles=((0, 2, 4), (1, 2, 4))), instance("b", heads=2, stages=((0,),))
    )
    found = blocks(root)
    assert [colour for colour, _ in found] == [COLOURS[0], COLOURS[1]] * 2
    assert found[1][1].endswith("tokens t//4%2=1")
    assert {"0", "1"} <= set(texts(root))
    assert any(text.startswith("strips within a column") for text in texts(root))


def latent(name: str, tp: int) -> Instance:
    group = Group("latent <kv> & more", "token", "bfloat16", (0, 2), ("kv",), {"dim": 8})
    pool = Pool(
        group.name,
        4,
        64,
        (Mode("token", 4, 16), Mode("dim", 8, 2)),
        (Buffer(0, "kv", 0, 0, 4), Buffer(2, "kv", 0, 256, 4)),
    )
    workers = tuple(Worker(rank, (Region(Address(rank << 20), 512),), (pool,)) for rank in range(tp))
    return Instance("kvferry-instance/1", name, "m", (group,), workers)


def test_a_group_without_heads_is_one_column_and_names_are_escaped() -> None:
    root = drawn(latent("a", 2), latent("b", 4))
    assert {"latent <kv> & more", "no heads"} <= set(texts(root))
    assert [colour for colour, _ in blocks(root)] == [COLOURS[0]] * 2 + [COLOURS[1]] * 2
    assert len({rect.attrib["x"] for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None}) == 4


def test_the_same_input_gives_the_same_text() -> None:
    source, target = instance("a", tp=3, heads=6), instance("b", tp=4, heads=6)
    assert draw(source, target, who_sends_what(source, target)) == draw(source, target, who_sends_what(source, target))


def test_no_rows_are_a_picture_too() -> None:
    source, target = instance("a"), instance("b")
    assert "from nobody" in draw(source, target, [])


def test_colours_are_far_apart() -> None:
    """Distance in OKLab; 0.02 is about what is just noticed side by side."""
    assert len(COLOURS) == 16
    for one, other in itertools.combinations(COLOURS, 2):
        assert sum((a - b) ** 2 for a, b in zip(oklab(one), oklab(other))) ** 0.5 > 0.1, (one, other)


def oklab(colour: str) -> tuple[float, float, float]:
    r, g, b = ((int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5))
    long = (0.4122 * r + 0.5363 * g + 0.0514 * b) ** (1 / 3)
    middle = (0.2119 * r + 0.6807 * g + 0.1074 * b) ** (1 / 3)
    short = (0.0883 * r + 0.2817 * g + 0.6300 * b) ** (1 / 3)
    return (
        0.2105 * long + 0.7936 * middle - 0.0041 * short,
        1.9780 * long - 2.4286 * middle + 0.4506 * short,
        0.0259 * long + 0.7828 * middle - 0.8087 * short,
    )
