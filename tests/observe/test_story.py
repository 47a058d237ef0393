from __future__ import annotations

import msgspec
import pytest

from kvferry.observe.records import Head, Log, Record, State
from kvferry.observe.story import Event, briefly, find, tell

DECODE, PREFILL = "d/2/0", "p/1/0"


def log(worker: str, records: list[Record], boot: str = "one", ahead_s: float = 0.0, mono_s: float = 100.0) -> Log:
    """`ahead_s`: its wall clock; `mono_s`: its monotonic clock when the true time is 100."""
    instance, generation, rank = worker.split("/")
    head = Head(
        "kvferry-trace/1", instance, int(generation), int(rank), 9, f"host-{boot}", boot, "0", mono_s, 5000.0 + ahead_s
    )
    moved = [
        msgspec.structs.replace(r, mono_s=r.mono_s + mono_s - 100, last_s=r.mono_s + mono_s - 100) for r in records
    ]
    return Log(head, records=tuple(moved))


def record(number: int, at_s: float, event: str, role: str, peer: str = "", **more: object) -> Record:
    return Record(number, at_s, 0.0, event, "t-1", role, peer, last_s=at_s, **more)  # type: ignore[arg-type]


def decode(**where: object) -> Log:
    records = [
        record(0, 90.0, "receive", "target", values={"request": "user-7"}),
        record(1, 90.2, "offer sent", "target", PREFILL, bytes=30, values={"pieces": 3}),
        record(2, 90.6, "ready heard", "target", PREFILL),
        record(3, 90.7, "grants sent", "target", PREFILL),
        record(4, 91.0, "scattered", "target", PREFILL, bytes=20, count=2),
        record(5, 91.1, "failed", "target", PREFILL, values={"problem": "the deadline has passed"}),
    ]
    return log(DECODE, records, **where)  # type: ignore[arg-type]


def prefill(**where: object) -> Log:
    records = [
        record(0, 89.0, "send", "source"),
        record(1, 90.4, "offer heard", "source", DECODE, bytes=30, values={"pieces": 3}),
        record(2, 90.5, "ready sent", "source", DECODE),
        record(3, 90.9, "written", "source", DECODE, bytes=30, count=3),
    ]
    return log(PREFILL, records, **where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("t-1", ["t-1"]), ("user-7", ["t-1"]), ("user", ["t-1"]), ("ser-", ["t-1"]), ("t", ["t-1", "t-12"]), ("z", [])],
)
def test_f73_a_transfer_is_found_by_its_id_and_by_the_engines_request(wanted: str, found: list[str]) -> None:
    other = log("p/1/1", [Record(0, 1.0, 1.0, "send", "t-12", "source")])
    assert find([decode(), other], wanted) == found


def test_an_exact_name_beats_a_beginning_and_a_beginning_a_part() -> None:
    logs = [log("p/1/0", [Record(i, 1.0, 1.0, "send", name, "source") for i, name in enumerate(["a", "ab", "xab"])])]
    assert [find(logs, wanted) for wanted in ("a", "ab", "x", "b")] == [["a"], ["ab"], ["xab"], ["ab", "xab"]]


def test_sides_and_what_moved() -> None:
    story = tell([decode(), prefill()], "t-1")
    assert story.requests == ("user-7",)
    source, target = story.sides
    assert (source.worker, source.state, source.problem) == ("p/0", "unknown", "its log does not tell the end")
    assert (target.worker, target.state, target.problem) == ("d/0", "failed", "the deadline has passed")
    assert target.seconds == pytest.approx(1.1)
    (flow,) = target.flows
    assert (flow.peer, flow.expected_bytes, flow.moved_bytes, flow.pieces, flow.moved_pieces) == (PREFILL, 30, 20, 3, 2)
    (flow,) = source.flows
    assert (flow.moved_bytes, flow.moved_pieces) == (30, 3)


def test_events_of_one_machine_are_in_their_true_order() -> None:
    """Whatever the wall clock said when each log was written."""
    story = tell([decode(), prefill(ahead_s=40.0)], "t-1")
    assert story.clocks == ()
    assert [event.event for event in story.events] == [
        "send", "receive", "offer sent", "offer heard", "ready sent", "ready heard", "grants sent", "written",
        "scattered", "failed",
    ]  # fmt: skip
    assert [event.at_s for event in story.events][:3] == pytest.approx([0.0, 1.0, 1.2])


@pytest.mark.parametrize("ahead_s", [-3.0, 0.05, 40.0])
def test_clocks_of_two_machines_are_compared_by_what_they_said(ahead_s: float) -> None:
    """The fastest ways take 0.2 s there and 0.1 s back, so the difference is known within 0.15 s."""
    story = tell([decode(), prefill(boot="two", ahead_s=ahead_s, mono_s=7.0)], "t-1")
    (clock,) = story.clocks
    assert clock.host == "host-two"
    assert clock.error_s == pytest.approx(0.15)
    assert abs(clock.ahead_s - ahead_s) <= 0.15 + 1e-6
    order = [event.event for event in story.events]
    assert order.index("offer sent") < order.index("offer heard")
    assert order.index("ready sent") < order.index("ready heard")


def test_clocks_that_no_message_compares_are_believed_and_said_to_be() -> None:
    silent = log(PREFILL, [record(0, 89.0, "send", "source")], boot="two", ahead_s=2.0)
    (clock,) = tell([decode(), silent], "t-1").clocks
    assert (clock.ahead_s, clock.error_s) == (0.0, None)


def test_live_answers_and_files_tell_the_same_records_once() -> None:
    old = decode()
    running = State("t-1", "target", "moving", 1.0, 3.0)
    file = msgspec.structs.replace(old, states=(running,), records=old.records[:3])
    now = msgspec.structs.replace(old, head=msgspec.structs.replace(old.head, mono_s=105.0))
    story = tell([now, file], "t-1")
    assert len(story.events) == len(old.records)
    assert [side.state for side in story.sides] == ["failed"]


def test_pieces_are_told_together_until_they_pause() -> None:
    def event(at_s: float, name: str = "written") -> Event:
        return Event(at_s, "p/0", name, "d/0", "moving", 10, 2, 0.05)

    told = briefly(
        [event(0.0), event(0.1), event(0.15, "ready sent"), event(0.2), event(1.0), event(1.1, "ready sent")]
    )
    assert [(e.event, e.count, e.bytes, e.at_s) for e in told] == [
        ("written", 6, 30, 0.0), ("ready sent", 2, 10, 0.15), ("written", 2, 10, 1.0), ("ready sent", 2, 10, 1.1),
    ]  # fmt: skip
    assert told[0].span_s == pytest.approx(0.25)
