"""What two real endpoints of this process write down and count."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.errors import TransferTimeout
from kvferry.layout.request import Wanted
from kvferry.observe.files import Files
from kvferry.observe.numbers import FAMILIES
from kvferry.observe.records import Log, decode_log, encode_log
from kvferry.observe.story import tell
from kvferry.session.keys import make_keys
from kvferry.session.registry import RegistryServer
from tests.observe.duo import SHAPE, Duo, samples
from tests.session.pools import page_list, table

Open = Callable[..., Duo]
MILESTONES = ("receive", "planned", "offer sent", "ready heard", "grants sent", "done heard", "complete sent", "done")


def test_a_transfer_leaves_its_story(duo: Open) -> None:
    pair = duo()
    report = pair.move("t")
    story = tell(pair.logs(), "t")
    assert [(side.role, side.state, side.repeated) for side in story.sides] == [
        ("source", "done", 0),
        ("target", "done", 0),
    ]
    for side in story.sides:
        (flow,) = side.flows
        assert flow.expected_bytes == flow.moved_bytes == report.bytes
        assert flow.pieces == flow.moved_pieces == report.chunks
    of_target = [event.event for event in story.events if event.worker == f"{pair.decode_name}/0"]
    for earlier, later in itertools.pairwise(MILESTONES):
        assert of_target.index(earlier) < of_target.index(later)


def test_numbers_are_what_really_moved(duo: Open) -> None:
    pair = duo()
    first = pair.move("t1")
    second = pair.move("t2", tokens=40)
    moved, chunks = first.bytes + second.bytes, first.chunks + second.chunks
    source, target = pair.logs()
    (labels,) = samples(source, "kvferry_bytes_total")
    assert (labels[0], labels[2], samples(source, "kvferry_bytes_total")[labels]) == ("source", "yes", moved)
    assert samples(target, "kvferry_bytes_total") == {("target", "", "yes"): moved}
    assert samples(target, "kvferry_copies_total") == {("target",): first.copies + second.copies}
    assert samples(source, "kvferry_pieces_total") == {("source",): chunks}
    assert sum(samples(source, "kvferry_descriptors_total").values()) == chunks  # gathered: one each
    assert samples(source, "kvferry_transfers_total") == {("source", "done", "done"): 2}
    assert samples(target, "kvferry_slots") == {("free",): 4, ("used",): 0, ("quarantined",): 0}
    assert samples(target, "kvferry_peers") == {("connected",): 1, ("silent",): 0, ("greeting",): 0}
    for log in (source, target):
        (ended,) = (s for s in log.samples if s.name == "kvferry_transfer_seconds")
        assert sum(ended.buckets) == 2
        assert not samples(log, "kvferry_transfers_running")


@pytest.mark.parametrize("options", [{"gather": "never"}, {"landing": "pages"}], ids=["posted straight", "into pages"])
def test_what_is_not_staged_is_told_apart(options: dict[str, str], duo: Open) -> None:
    pair = duo(transport="process_vm", **options)
    report = pair.move("t")
    source, target = pair.logs()
    assert samples(source, "kvferry_bytes_total") == {("source", "process_vm", "no"): report.bytes}
    staged = "no" if "landing" in options else "yes"
    assert samples(target, "kvferry_bytes_total") == {("target", "", staged): report.bytes}
    posted = samples(source, "kvferry_descriptors_total")["process_vm",]
    assert posted == samples(source, "kvferry_copies_total")["source",] > report.chunks
    (side,) = (side for side in tell((source, target), "t").sides if side.role == "target")
    assert side.flows[0].moved_bytes == report.bytes


def test_f72_speed_is_bytes_over_the_time_from_first_post_to_last_completion(duo: Open) -> None:
    """With many chunks: never above what a watch beside it measures; the time of the last chunk alone would be."""
    pair = duo()
    pair.move("first")  # handshake and plan are made
    pair.prefill.slow(0.01)
    posted: list[float] = []
    landed: list[float] = []
    pair.around(pair.prefill, "gather", lambda: posted.append(time.monotonic()), lambda: None)
    pair.around(pair.decode, "scatter", lambda: None, lambda: landed.append(time.monotonic()))
    before = [_moved(log, role) for log, role in zip(pair.logs(), ("source", "target"))]
    report = pair.move("t", tokens=40)
    assert report.chunks >= 50
    true_speed = report.bytes / (landed[-1] - posted[0])
    for (log, role), (bytes_before, seconds_before) in zip(zip(pair.logs(), ("source", "target")), before):
        nbytes, seconds = _moved(log, role)
        assert nbytes - bytes_before == report.bytes
        speed = report.bytes / (seconds - seconds_before)
        if role == "target":  # its watch goes from before the first post to after the last scatter
            assert speed <= true_speed
        assert true_speed / 3 < speed < true_speed * 1.2
    last_chunk_only = report.bytes / (landed[-1] - posted[-1])
    assert last_chunk_only > 5 * true_speed


def _moved(log: Log, role: str) -> tuple[float, float]:
    return sum(samples(log, "kvferry_bytes_total").values()), samples(log, "kvferry_moving_seconds_total")[role,]


def test_f73_the_callers_name_of_a_request_is_in_the_log(duo: Open) -> None:
    pair = duo()
    sending, receiving = pair.ends
    pages = page_list(SHAPE, (0, 4), 0, seed=1)
    wanted, side = {"attn": Wanted((0, 4))}, table(pages, 0)
    sending.send("t", wanted, side, timeout_s=20, request="cmpl-prefill-1")
    receiving.wait(receiving.receive("t", pair.prefill_name, wanted, side, timeout_s=20, request="cmpl-decode-1"))
    assert tell(pair.logs(), "t").requests == ("cmpl-decode-1", "cmpl-prefill-1")


def test_every_sample_is_of_a_known_family_with_its_labels(duo: Open) -> None:
    pair = duo(digest=True)
    pair.move("t")
    pair.decode.receive("never", pair.prefill_name, [0], 0, (0, 4), 0.2)
    with pytest.raises(TransferTimeout):
        pair.decode.wait("never")
    seen = set()
    for log in pair.logs():
        for sample in log.samples:
            family = FAMILIES[sample.name]
            assert len(sample.labels) == len(family.labels)
            assert bool(sample.buckets) == (family.kind == "histogram")
            assert "t" not in sample.labels
            assert "never" not in sample.labels
            seen.add(sample.name)
    # these have had no reason to appear
    assert set(FAMILIES) - seen <= {
        "kvferry_transfers_running",
        "kvferry_transfer_waiting_seconds",
        "kvferry_messages_refused_total",
        "kvferry_trace_files_total",
    }


def test_a_failure_is_written_down_and_its_files_are_bounded(duo: Open, tmp_path: Path) -> None:
    folder = tmp_path / "failures"
    pair = duo(trace=folder)
    pair.move("good")
    for number in range(2):
        pair.begin(f"aborted-{number}", tokens=40)
        pair.decode.abort(f"aborted-{number}", "the client left")  # somebody's wish, no failure
    pair.decode.receive("never", pair.prefill_name, [0], 0, (0, 4), 0.2)
    with pytest.raises(TransferTimeout):
        pair.decode.wait("never")
    deadline_s = time.monotonic() + 10
    while not (found := list(folder.glob("*.jsonl"))) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (path,) = found
    log = decode_log(path.read_bytes(), path.name)
    assert path.stat().st_mode & 0o777 == 0o600
    assert log.head.file == "transfer never failed"
    assert {record.transfer for record in log.records} == {"never", ""}
    (end,) = (record for record in log.records if record.event == "failed")
    assert end.values["outcome"] == "timeout"
    assert pair.prefill_name in end.peer


def test_only_the_newest_files_of_a_worker_are_kept(duo: Open, tmp_path: Path) -> None:
    log, _ = duo().logs()
    folder = tmp_path / "failures"
    mine, other = Files(folder, "p", 0, keep=3), Files(folder, "p", 1, keep=3)
    first = other.write(log)
    written = [mine.write(log) for _ in range(5)]
    assert sorted(folder.iterdir()) == sorted([first, *written[2:]])


def test_no_secret_is_in_any_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants, digest keys, the export's key, CURVE keys and the registry's secret: planted, and looked for."""
    monkeypatch.setenv("KVFERRY_RUN", str(tmp_path / "run"))
    keys = make_keys(tmp_path / "keys", "all")
    secrets = [keys.registry, keys.secret.encode()]
    with RegistryServer(keys=keys) as server:
        pair = Duo(server.url, keys=keys, digest=True, trace=tmp_path / "failures")
        for end in pair.ends:
            core = end._machine.core
            secrets += [end._staging.key]
            core.draw_grant = _remember(core.draw_grant, secrets)
        planted = len(secrets)
        pair.move("t")
        pair.decode.receive("never", pair.prefill_name, [0], 0, (0, 4), 0.2)
        with pytest.raises(TransferTimeout):
            pair.decode.wait("never")
        written = b"".join(encode_log(log) for log in pair.logs())
        pair.close()
    files = list((tmp_path / "failures").glob("*.jsonl"))
    assert len(files) == 1
    written += files[0].read_bytes()
    assert len(secrets) > planted + 5
    for secret in secrets:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret)[:-2], str(list(secret)).encode()):
            assert form[:12] not in written


def _remember(draw: Callable[[], bytes], kept: list[bytes]) -> Callable[[], bytes]:
    def drawn() -> bytes:
        kept.append(draw())
        return kept[-1]

    return drawn


def test_what_the_log_can_not_read_disturbs_no_transfer(
    duo: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = duo()
    for end in pair.ends:
        monkeypatch.setattr(end._observer.log, "add", _broken)
    pair.move("t")
    assert "the event log missed a" in caplog.text


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("planted")
