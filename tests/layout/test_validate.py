"""Every fault of a document is refused with its exact path; what is legal, however odd, is not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from kvferry.errors import DocumentError
from kvferry.layout.document import Instance, encode_json
from kvferry.layout.validate import check_instance, parse_instance, parse_request

Json = dict[str, Any]


def instance() -> Json:
    """Two workers with half the heads each (one in NHD, one in HND), a state group beside attention."""
    attn = {"name": "attn", "growth": "token", "dtype": "float16", "layers": [0, 2], "parts": ["k", "v"]}
    conv = {
        "name": "conv",
        "growth": "state",
        "dtype": "float32",
        "layers": [1],
        "parts": ["conv"],
        "axes": {"channel": 4},
    }

    def worker(rank: int, modes: list[list[Any]]) -> Json:
        buffers = [[0, "k", 0, 0, 8], [0, "v", 0, 512, 8], [2, "k", 1, 0, 8], [2, "v", 1, 512, 8]]
        pool = {
            "group": "attn", "page_tokens": 4, "page_bytes": 64, "modes": modes,
            "owned": {"head": [[2 * rank, 2 * rank + 2]], "token": [0, 1, 1]}, "buffers": buffers,
        }  # fmt: skip
        state = {
            "group": "conv",
            "page_tokens": 1,
            "page_bytes": 16,
            "modes": [["channel", 4, 4]],
            "buffers": [[1, "conv", 2, 0, 3]],
        }
        regions = [
            {"base": "0xffff81ab54e01000", "bytes": 1024, "memory": "device", "device": 1},
            {"base": hex(2**64 - 1024), "bytes": 1024},
            {"base": "0x1000", "bytes": 48},
        ]
        return {"rank": rank, "regions": regions, "pools": [pool, state]}

    return {
        "format": "kvferry-instance/1", "instance": "p", "model": "m",
        "groups": [{**attn, "axes": {"head": 4, "dim": 4}}, conv],
        "workers": [
            worker(0, [["token", 4, 16], ["head", 2, 8], ["dim", 4, 2]]),
            worker(1, [["head", 2, 32], ["token", 4, 8], ["dim", 4, 2]]),
        ],
    }  # fmt: skip


def request() -> Json:
    return {
        "format": "kvferry-request/1", "groups": {"attn": {"tokens": [2, 9]}, "conv": {"position": 9}},
        "source": {"tables": {"attn": {"pages": [5, None, 1]}, "conv": {"pages": [0]}}},
        "target": {"tables": {"attn": {"pages": [1, 2], "start": 2}, "conv": {"pages": [2]}}, "workers": {}},
    }  # fmt: skip


REMOVE = object()


def changed(document: Json, path: str, value: object) -> bytes:
    """The document as JSON with one field changed or removed; the path is written as `a.0.b`."""
    document = copy.deepcopy(document)
    *way, last = ["groups", "a.b"] if path == "groups.a.b" else path.split(".")
    place: Any = document
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is REMOVE:
        del place[last]
    elif isinstance(place, list) and int(last) == len(place):
        place.append(value)
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(document).encode()


POOL = "workers.1.pools.0"
GROUP = "groups.0"
BAD_INSTANCES: list[tuple[str, object, str, str]] = [
    # types, unknown and missing fields
    ("format", "kvferry-instance/2", "format", "kvferry-instance/2"),
    ("typo", 1, "", "unknown field"),
    ("model", REMOVE, "", "model"),
    ("workers.0.rank", "0", "workers[0].rank", "expected int"),
    ("workers.0.rank", 0.5, "workers[0].rank", "expected int"),
    (f"{POOL}.page_token", 1, "workers[1].pools[0]", "unknown field"),
    (f"{POOL}.modes.1.2", 8.0, "workers[1].pools[0].modes[1][2]", "expected int"),
    (f"{POOL}.modes.1", ["token", 4], "workers[1].pools[0].modes[1]", "length 3"),
    (f"{POOL}.modes.1", ["token", 4, 8, 9], "workers[1].pools[0].modes[1]", "length 3"),
    ("workers.0.regions.0.base", 4096, "workers[0].regions[0].base", "hex string"),
    ("workers.0.regions.0.base", "4096", "workers[0].regions[0].base", "hex string"),
    ("workers.0.regions.0.base", "0x1" + "0" * 16, "workers[0].regions[0].base", "past the last address"),
    ("workers.0.regions.0.base", "-0x10", "workers[0].regions[0].base", "hex string"),
    ("workers.0.regions.0.memory", "disk", "workers[0].regions[0].memory", "disk"),
    # the instance and its groups
    ("groups.0.axes.dim", "4", "groups[0].axes.dim", "expected int"),
    ("workers.0.pools.0.owned.head", 3, "workers[0].pools[0].owned.head", "expected array"),
    (f"{POOL}.buffers.3", [2, "v", 1, 512, 8, 1], "workers[1].pools[0].buffers[3]", "length 5, got 6"),
    ("instance", "", "instance", "empty"),
    ("groups", [], "groups", "empty"),
    ("workers", [], "workers", "empty"),
    ("groups.1.name", "attn", "groups[1].name", "already"),
    (f"{GROUP}.name", "", "groups[0].name", "empty"),
    (f"{GROUP}.growth", "page", "groups[0].growth", "page"),
    (f"{GROUP}.dtype", "int4", "groups[0].dtype", "expected one of float32"),
    (f"{GROUP}.encoding", "mxfp4", "groups[0].encoding", "uint8"),
    (f"{GROUP}.encoding", "", "groups[0].encoding", "empty"),
    (f"{GROUP}.layers", [], "groups[0].layers", "empty"),
    (f"{GROUP}.layers.1", 0, "groups[0].layers[1]", "already"),
    (f"{GROUP}.layers.1", -2, "groups[0].layers[1]", "layer must be ≥ 0, got -2"),
    (f"{GROUP}.layers.1", 2**63, "groups[0].layers[1]", "below 2**63"),
    (f"{GROUP}.parts", [], "groups[0].parts", "empty"),
    (f"{GROUP}.parts.1", "k", "groups[0].parts[1]", "already"),
    (f"{GROUP}.parts.1", "", "groups[0].parts[1]", "empty"),
    (f"{GROUP}.axes.head", 0, "groups[0].axes.head", "size must be ≥ 1, got 0"),
    (f"{GROUP}.axes.dim", -1, "groups[0].axes.dim", "size must be ≥ 1, got -1"),
    (f"{GROUP}.axes.token", 4, "groups[0].axes.token", "token axis"),
    # workers and regions
    ("workers.1.rank", 0, "workers[1].rank", "already"),
    ("workers.0.rank", -1, "workers[0].rank", "rank must be ≥ 0, got -1"),
    ("workers.0.regions.0.bytes", 0, "workers[0].regions[0].bytes", "size must be ≥ 1, got 0"),
    ("workers.0.regions.0.bytes", 2**63, "workers[0].regions[0].bytes", "below 2**63"),
    ("workers.0.regions.1.bytes", 1025, "workers[0].regions[1].bytes", "passes 2**64"),
    ("workers.0.regions.0.device", -1, "workers[0].regions[0].device", "device must be ≥ 0"),
    # pools
    (f"{POOL}.group", "atn", "workers[1].pools[0].group", "expected one of attn, conv"),
    (f"{POOL}.table", "", "workers[1].pools[0].table", "empty"),
    (f"{POOL}.page_tokens", 0, "workers[1].pools[0].page_tokens", "page_tokens must be ≥ 1, got 0"),
    (f"{POOL}.page_tokens", 8, "workers[1].pools[0].modes", "'token' multiply to 4, but page_tokens is 8"),
    ("workers.0.pools.1.page_tokens", 2, "workers[0].pools[1].page_tokens", "must be 1"),
    (f"{POOL}.page_bytes", 0, "workers[1].pools[0].page_bytes", "page_bytes must be ≥ 1, got 0"),
    (f"{POOL}.page_bytes", -64, "workers[1].pools[0].page_bytes", "page_bytes must be ≥ 1, got -64"),
    (f"{POOL}.modes.1.0", "tokens", "workers[1].pools[0].modes[1][0]", "no axis 'tokens'"),
    (f"{POOL}.modes.1.1", 0, "workers[1].pools[0].modes[1][1]", "extent must be ≥ 1, got 0"),
    (f"{POOL}.modes.1.1", -4, "workers[1].pools[0].modes[1][1]", "extent must be ≥ 1, got -4"),
    (f"{POOL}.modes.1.2", 0, "workers[1].pools[0].modes[1][2]", "stride must be ≥ 1, got 0"),
    (f"{POOL}.modes.1.2", -8, "workers[1].pools[0].modes[1][2]", "stride must be ≥ 1, got -8"),
    (f"{POOL}.modes.1.2", 2**63, "workers[1].pools[0].modes[1][2]", "below 2**63"),
    (f"{POOL}.modes.0.1", 3, "workers[1].pools[0].modes", "'head' multiply to 3, but the worker owns 2"),
    (f"{POOL}.modes", [["token", 4, 8], ["dim", 4, 2]], "workers[1].pools[0].modes", "'head' multiply to 1"),
    (f"{POOL}.modes.3", ["dim", 2, 2], "workers[1].pools[0].modes", "'dim' multiply to 8"),
    # ownership
    (f"{POOL}.owned.heads", [[0, 2]], "workers[1].pools[0].owned.heads", "no axis 'heads'"),
    (f"{POOL}.owned.head", [[2, 2]], "workers[1].pools[0].owned.head[0][1]", "stop must be above start 2, got 2"),
    (f"{POOL}.owned.head", [[3, 5]], "workers[1].pools[0].owned.head[0][1]", "stop must be ≤ 4"),
    (f"{POOL}.owned.head", [[-1, 1]], "workers[1].pools[0].owned.head[0][0]", "start must be ≥ 0, got -1"),
    (f"{POOL}.owned.head", [[1, 2], [1, 2]], "workers[1].pools[0].owned.head[1]", "overlaps segment [0]"),
    (f"{POOL}.owned.head", [[2, 4], [0, 3]], "workers[1].pools[0].owned.head[1]", "overlaps segment [0]"),
    (f"{POOL}.owned.head", [0, 2], "workers[1].pools[0].owned.head[0]", "expected [start, stop], got 0"),
    (f"{POOL}.owned.head", [[0, 1, 2]], "workers[1].pools[0].owned.head[0]", "expected [start, stop], got [0, 1, 2]"),
    (f"{POOL}.owned.head", [], "workers[1].pools[0].modes", "'head' multiply to 2, but the worker owns 0"),
    (f"{POOL}.owned.token", [0, 1], "workers[1].pools[0].owned.token", "expected [rank, size, block], got [0, 1]"),
    (f"{POOL}.owned.token", [[0, 1]], "workers[1].pools[0].owned.token", "expected [rank, size, block]"),
    (f"{POOL}.owned.token", [2, 2, 1], "workers[1].pools[0].owned.token[0]", "below size 2, got 2"),
    (f"{POOL}.owned.token", [-1, 2, 1], "workers[1].pools[0].owned.token[0]", "rank must be ≥ 0, got -1"),
    (f"{POOL}.owned.token", [0, 0, 1], "workers[1].pools[0].owned.token[1]", "size must be ≥ 1, got 0"),
    (f"{POOL}.owned.token", [0, 2, 0], "workers[1].pools[0].owned.token[2]", "block must be ≥ 1, got 0"),
    ("workers.0.pools.1.owned", {"token": [0, 2, 1]}, "workers[0].pools[1].owned.token", "state"),
    # buffers
    (f"{POOL}.buffers.1.0", 1, "workers[1].pools[0].buffers[1][0]", "no layer 1"),
    (f"{POOL}.buffers.1.1", "w", "workers[1].pools[0].buffers[1][1]", "no part 'w'"),
    (f"{POOL}.buffers.1.1", "k", "workers[1].pools[0].buffers[1]", "already workers[1].pools[0].buffers[0]"),
    (f"{POOL}.buffers.1.2", 3, "workers[1].pools[0].buffers[1][2]", "below 3, got 3"),
    (f"{POOL}.buffers.1.2", -1, "workers[1].pools[0].buffers[1][2]", "below 3, got -1"),
    (f"{POOL}.buffers.1.3", -1, "workers[1].pools[0].buffers[1][3]", "offset must be ≥ 0, got -1"),
    (f"{POOL}.buffers.1.4", 0, "workers[1].pools[0].buffers[1][4]", "pages must be ≥ 1, got 0"),
    (f"{POOL}.buffers.1.4", 9, "workers[1].pools[0].buffers[1]", "ends at byte 1088 of region 0, which has 1024 bytes"),
    (f"{POOL}.buffers.1.3", 513, "workers[1].pools[0].buffers[1]", "ends at byte 1025"),
    (f"{POOL}.buffers.1.3", 2**63 - 1, "workers[1].pools[0].buffers[1][3]", "offset must be below 1024"),
    (f"{POOL}.buffers.1.3", 1024, "workers[1].pools[0].buffers[1][3]", "offset must be below 1024"),
    (f"{POOL}.buffers.1.4", 2**62, "workers[1].pools[0].buffers[1]", "which has 1024 bytes"),
    (f"{POOL}.buffers.1.3", 511, "workers[1].pools[0].buffers[1]", "shares bytes with buffers[0]"),
    (f"{POOL}.page_bytes", 63, "workers[1].pools[0].modes", "two elements of buffers[0] share a byte"),
    (f"{POOL}.modes.2.2", 1, "workers[1].pools[0].modes", "two elements of buffers[0] share a byte"),
    (f"{POOL}.modes.0.2", 8, "workers[1].pools[0].modes", "two elements of buffers[0] share a byte"),
    # two regions that are the same memory
    ("workers.1.regions.1.base", "0xffff81ab54e01200", "workers[1].pools[0].buffers[2]", "shares bytes with"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value", "path", "problem"), BAD_INSTANCES)
def test_a_bad_instance_is_refused_with_its_path(where: str, value: object, path: str, problem: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_instance(changed(instance(), where, value))
    assert caught.value.path == path
    assert problem in caught.value.problem
    assert "\n" not in str(caught.value)


def test_the_message_of_the_format_page() -> None:
    with pytest.raises(DocumentError) as caught:
        parse_instance(changed(instance(), "workers.1.pools.0.modes.1.2", 0))
    assert str(caught.value) == "workers[1].pools[0].modes[1][2]: stride must be ≥ 1, got 0"


def test_a_layer_in_two_pools_of_a_worker_is_refused() -> None:
    document = instance()
    again = copy.deepcopy(document["workers"][0]["pools"][0])
    again["buffers"] = [[2, "v", 0, 0, 8]]
    document["workers"][0]["pools"].append(again)
    with pytest.raises(DocumentError, match=r"already workers\[0\]\.pools\[0\]\.buffers\[3\]") as caught:
        parse_instance(json.dumps(document))
    assert caught.value.path == "workers[0].pools[2].buffers[0]"


def test_the_good_instance_survives_a_round_trip() -> None:
    parsed = parse_instance(json.dumps(instance()))
    assert isinstance(parsed, Instance)
    assert parse_instance(encode_json(parsed)) == parsed
    assert check_instance(parsed) is parsed


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("workers.1.regions.1", {"base": "0xfffffffffffffc00", "bytes": 1024}),  # the last byte is 2**64 - 1
        (f"{POOL}.owned.head", [[3, 4], [0, 1]]),  # local order is the listed one
        (f"{POOL}.owned.token", [1, 2, 4]),
        (f"{POOL}.modes", [["head", 2, 32], ["token", 2, 16], ["token", 2, 8], ["dim", 2, 4], ["dim", 2, 2]]),
        (f"{POOL}.modes.3", ["dim", 1, 1]),
        ("workers.0.pools.1.modes.1", ["token", 1, 1]),
        ("workers.0.pools", []),  # a worker may hold nothing
        (f"{POOL}.buffers", []),
        ("groups.0.constants", {"k_scale": 0.5, "rope": "neox"}),
        ("groups.0.optional", True),
        ("workers.1.pools.0.table", "shared"),
    ],
)
def test_odd_but_legal(where: str, value: object) -> None:
    parse_instance(changed(instance(), where, value))


def test_a_worker_that_owns_nothing_of_an_axis() -> None:
    document = instance()
    pool = document["workers"][1]["pools"][0]
    pool["owned"]["head"] = []
    pool["modes"] = [["head", 0, 32], ["token", 4, 8], ["dim", 4, 2]]
    parse_instance(json.dumps(document))
    pool["modes"].append(["dim", 0, 2])
    with pytest.raises(DocumentError, match="extent must be ≥ 1, got 0"):
        parse_instance(json.dumps(document))


def test_pages_may_lie_inside_the_heads() -> None:
    document = instance()
    pool = document["workers"][1]["pools"][0]
    pool.update(page_bytes=32, modes=[["head", 2, 256], ["token", 4, 8], ["dim", 4, 2]])
    parse_instance(json.dumps(document))
    pool["modes"][0][2] = 248
    with pytest.raises(DocumentError, match="share a byte"):
        parse_instance(json.dumps(document))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, '{"format":"x"}'])
def test_junk_is_a_document_error(data: bytes | str) -> None:
    with pytest.raises(DocumentError):
        parse_instance(data)


def test_malformed_json_is_called_so() -> None:
    with pytest.raises(DocumentError, match="JSON is malformed"):
        parse_instance('{"format": NaN}')


def test_a_hostile_layout_is_refused_not_computed() -> None:
    document = instance()
    document["groups"][0]["axes"] = {"head": 1, "dim": 2**60}
    strides = [10**9 + 7919 * index * index for index in range(60)]
    pool = document["workers"][1]["pools"][0]
    pool.update(page_tokens=1, page_bytes=10**12, owned={}, modes=[["dim", 2, stride] for stride in strides])
    pool["buffers"] = [[0, "k", 0, 0, 1]]
    document["workers"] = document["workers"][1:]
    document["workers"][0]["regions"][0] = {"base": "0x1000", "bytes": 10**13}
    with pytest.raises(DocumentError, match="can't be shown to be free of overlaps") as caught:
        parse_instance(json.dumps(document))
    assert caught.value.path == "workers[0].pools[0].modes"


def parsed_pair(target: Json | None = None) -> tuple[Instance, Instance]:
    return parse_instance(json.dumps(instance())), parse_instance(json.dumps(target or instance()))


BAD_REQUESTS: list[tuple[str, object, str, str]] = [
    ("format", "kvferry-request/2", "format", "kvferry-request/2"),
    ("groups.attn.tokens", [2], "groups.attn.tokens", "length 2"),
    ("groups.attn.tokens.1", "3", "groups.attn.tokens[1]", "expected int"),
    ("groups.attn.token", [2, 3], "groups.attn", "unknown field"),
    ("groups.a.b", {"tokens": 3}, "groups.a.b.tokens", "expected array"),
    ("source.tables.conv.pages.0", 0.5, "source.tables.conv.pages[0]", "expected int | null, got float"),
    (
        "target.workers",
        {"0": {"tables": {}}, "1": {"tables": {"conv": {"pages": []}, "attn": {"page": []}}}},
        "target.workers.1.tables.attn",
        "unknown field",
    ),
    ("groups.attn", REMOVE, "groups.attn", "missing: both sides cache this group"),  # F43
    ("groups.conv", REMOVE, "groups.conv", "missing: both sides cache this group"),  # F43
    ("groups.mla", {"tokens": [0, 1]}, "groups.mla", "source 'p' has no such group; expected one of attn, conv"),
    ("groups.attn", {}, "groups.attn", "a token group is named by its tokens"),
    ("groups.attn", {"position": 3}, "groups.attn", "a token group is named by its tokens"),
    ("groups.attn.position", 3, "groups.attn", "a token group is named by its tokens"),
    ("groups.conv", {}, "groups.conv", "a state group is named by its position"),
    ("groups.conv", {"tokens": [0, 3]}, "groups.conv", "a state group is named by its position"),
    ("groups.conv.position", -1, "groups.conv.position", "position must be ≥ 0, got -1"),
    ("groups.attn.tokens", [-1, 3], "groups.attn.tokens[0]", "start must be ≥ 0, got -1"),
    ("groups.attn.tokens", [4, 3], "groups.attn.tokens[1]", "stop must be ≥ start 4, got 3"),
    ("groups.attn.tokens", [4, 2**63], "groups.attn.tokens[1]", "below 2**63"),
    ("source.tables.attn.pages.1", -1, "source.tables.attn.pages[1]", "page must be ≥ 0, got -1"),
    ("source.tables.attn.pages.1", 2**63, "source.tables.attn.pages[1]", "below 2**63"),
    ("target.tables.attn.start", -4, "target.tables.attn.start", "start must be ≥ 0, got -4"),
    ("target.workers", {"2": {"tables": {}}}, "target.workers.2", "'p' has no such rank; expected one of 0, 1"),
    ("target.workers", {"01": {"tables": {}}}, "target.workers.01", "no such rank"),
    (
        "source.workers",
        {"1": {"tables": {"attn": {"pages": [None, -2]}}}},
        "source.workers.1.tables.attn.pages[1]",
        "page must be ≥ 0, got -2",
    ),
]


@pytest.mark.parametrize(("where", "value", "path", "problem"), BAD_REQUESTS)
def test_a_bad_request_is_refused_with_its_path(where: str, value: object, path: str, problem: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_request(changed(request(), where, value), *parsed_pair())
    assert caught.value.path == path
    assert problem in caught.value.problem


def test_a_group_of_one_side_only_cannot_be_asked_for() -> None:
    target = instance()
    target["groups"] = target["groups"][:1]
    for worker in target["workers"]:
        worker["pools"] = worker["pools"][:1]
    with pytest.raises(DocumentError, match="target 'p' has no such group") as caught:
        parse_request(json.dumps(request()), *parsed_pair(target))
    assert caught.value.path == "groups.conv"
    parse_request(changed(request(), "groups.conv", REMOVE), *parsed_pair(target))


def test_an_empty_range_names_a_group_and_an_optional_group_may_be_left_out() -> None:
    parse_request(changed(request(), "groups.attn.tokens", [5, 5]), *parsed_pair())
    document = instance()
    document["groups"][0]["optional"] = True
    one = parse_instance(json.dumps(document))
    parse_request(changed(request(), "groups.attn", REMOVE), one, one)


def test_a_table_of_a_cyclic_worker_starts_at_a_whole_cycle() -> None:
    target = instance()
    target["workers"][1]["pools"][0]["owned"]["token"] = [1, 2, 3]
    pair = parsed_pair(target)
    parse_request(changed(request(), "target.tables.attn.start", 12), *pair)
    for start in (2, 3, 9):
        with pytest.raises(DocumentError, match=r"multiple of block × size = 6 of rank 1") as caught:
            parse_request(changed(request(), "target.tables.attn.start", start), *pair)
        assert caught.value.path == "target.tables.attn.start"
    # rank 1 has a table of its own, so the shared one may start anywhere
    own = changed(request(), "target.workers", {"1": {"tables": {"attn": {"pages": [1], "start": 6}}}})
    parse_request(own, *pair)
    own = changed(request(), "target.workers", {"1": {"tables": {"attn": {"pages": [1], "start": 4}}}})
    with pytest.raises(DocumentError) as caught:
        parse_request(own, *pair)
    assert caught.value.path == "target.workers.1.tables.attn.start"
