from __future__ import annotations

import msgspec
import pytest

from kvferry.errors import DocumentError
from kvferry.observe.log import MERGE_S, EventLog, as_records
from kvferry.observe.records import Flow, Head, Log, Record, Sample, State, Wait, decode_log, encode_log, short

HEAD = Head("kvferry-trace/1", "p", 7, 0, 99, "host", "boot", "0", 10.0, 1000.0)
LOG = Log(
    HEAD,
    (State("t", "target", "moving", 1.0, 2.0, "r", (Flow("p/1/0", 8),), (Wait("done", 0.5, "p/1/0", 0.1),)),),
    (Sample("kvferry_slots", ("free",), 4), Sample("kvferry_phase_seconds", ("source", "moving"), 1.5, (0, 1))),
    (Record(0, 9.0, 999.0, "send", "t", "source", values={"groups": "attn 0-4", "timeout_s": 2.5, "last": 1}),),
)


def test_the_ring_forgets_its_oldest_in_number() -> None:
    log = EventLog(max_records=3)
    for number in range(5):
        log.add(float(number), f"e{number}")
    assert [record.event for record in as_records(log.entries())] == ["e2", "e3", "e4"]
    assert [record.number for record in as_records(log.entries())] == [2, 3, 4]
    assert log.lost == 2


def test_the_ring_forgets_its_oldest_in_bytes() -> None:
    log = EventLog(max_bytes=4000)
    for number in range(100):
        log.add(0.0, "e", values={"text": "x" * 100_000, "number": number})
    left = as_records(log.entries())
    assert 1 < len(left) < 10
    assert left[-1].values["number"] == 99
    assert max(len(str(record.values["text"])) for record in left) == 400


def test_pieces_that_follow_closely_are_one_record() -> None:
    log = EventLog()
    times = [0.0, 0.01, 0.02, MERGE_S + 0.01]
    for at_s in times:
        log.merge(at_s, "written", "t", "source", "p/1/0", "moving", 10)
    log.merge(0.0, "written", "t", "source", "p/1/1", "moving", 10)
    log.merge(0.0, "written", "u", "source", "p/1/0", "moving", 10)
    found = [(r.transfer, r.peer, r.count, r.bytes, r.mono_s, r.last_s) for r in as_records(log.entries())]
    assert found == [
        ("t", "p/1/0", 3, 30, 0.0, 0.02),
        ("t", "p/1/0", 1, 10, times[3], times[3]),
        ("t", "p/1/1", 1, 10, 0.0, 0.0),
        ("u", "p/1/0", 1, 10, 0.0, 0.0),
    ]


def test_a_log_survives_its_lines() -> None:
    assert decode_log(encode_log(LOG), "x") == LOG


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    data = encode_log(LOG)
    assert decode_log(data[:-5], "x") == msgspec.structs.replace(LOG, records=())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", r"x: expected kvferry-trace/1"),
        (b"nonsense\n", r"x: line 1"),
        (encode_log(LOG).split(b"\n", 1)[1], r"x: line 1: expected the head"),
        (encode_log(LOG).replace(b"kvferry-trace/1", b"kvferry-trace/9"), r"x: line 1: format"),
        (encode_log(LOG).replace(b'"pid":99', b'"pid":-1'), r"x: line 1: pid"),
        (encode_log(LOG).replace(b'"age_s"', b'"agony_s"'), r"x: line 2"),
    ],
    ids=["empty", "no JSON", "no head", "another format", "a bad number", "an unknown field"],
)
def test_what_is_no_log_is_refused_by_line(data: bytes, problem: str) -> None:
    with pytest.raises(DocumentError, match=problem):
        decode_log(data, "x")


def test_names_as_people_read_them() -> None:
    assert [short("a/b/17/3"), short("a/17/3"), short("")] == ["a/b/3", "a/3", ""]
