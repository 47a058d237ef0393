"""Who can be asked: sockets in a folder of one user."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.errors import DocumentError
from kvferry.observe import runtime
from kvferry.observe.reach import ask_all
from tests.observe.duo import Duo

Open = Callable[..., Duo]


def folder() -> Path:
    return Path(os.environ["KVFERRY_RUN"])


def test_every_endpoint_answers_and_leaves_nothing_behind(duo: Open) -> None:
    pair = duo()
    pair.move("t")
    assert folder().stat().st_mode & 0o777 == 0o700
    asked = ask_all(folder())
    assert not asked.silent
    assert {log.head.worker for log in asked.logs} == {str(end._me) for end in pair.ends}
    assert all(any(record.transfer == "t" for record in log.records) for log in asked.logs)
    assert all(not log.records and log.samples for log in ask_all(folder(), records=False).logs)
    pair.close()
    assert list(folder().iterdir()) == []
    assert ask_all(folder()).logs == ()


def test_closed_endpoints_leave_no_thread_and_no_socket(duo: Open, tmp_path: Path) -> None:
    for _ in range(3):
        duo(trace=tmp_path / "failures").close()
    assert list(folder().iterdir()) == []
    mine = {"kvferry-observe", "kvferry-trace"}
    assert [thread for thread in threading.enumerate() if thread.name in mine] == []


def test_sockets_of_processes_that_are_gone_are_swept(duo: Open) -> None:
    folder().mkdir(mode=0o700)
    dead = folder() / "gone.0.1.1.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(_short(dead))
    assert ask_all(folder()) == ask_all(folder().parent / "nowhere")  # nobody, and nothing silent
    duo()
    assert not dead.exists()


def _short(path: Path) -> str:
    """A path that a socket can be bound to."""
    descriptor = os.open(path.parent, os.O_DIRECTORY)
    return f"/proc/self/fd/{descriptor}/{path.name}"


def test_one_that_does_not_answer_is_named_and_delays_nobody(duo: Open) -> None:
    pair = duo()
    listening, path = runtime.listen(folder(), "stuck", 3, 77)
    with listening:
        asked = ask_all(folder())
    path.unlink()
    assert {log.head.instance for log in asked.logs} == {pair.prefill_name, pair.decode_name}
    (silent,) = asked.silent
    assert (silent.worker, silent.generation) == ("stuck/3", 77)
    assert f"process {os.getpid()} does not answer" in silent.problem


def test_a_folder_that_others_can_enter_is_refused_and_the_endpoint_works(
    duo: Open, caplog: pytest.LogCaptureFixture
) -> None:
    folder().mkdir()
    folder().chmod(0o755)
    with pytest.raises(DocumentError, match=r"must belong to you alone \(mode 0700\), .*mode 755; set KVFERRY_RUN"):
        runtime.open_folder(folder())
    pair = duo()
    assert "can't ask this worker" in caplog.text
    assert pair.move("t").bytes
    assert list(folder().iterdir()) == []


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=r"link"):
        runtime.open_folder(tmp_path / "link")


def test_names_that_no_path_can_hold(duo: Open, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    listening, path = runtime.listen(deep, "a/../b" * 50 + "é", 0, 1)
    with listening:
        assert path.parent == deep
        assert path.name == f"a____ba____ba____ba____ba____ba____ba___.0.{os.getpid()}.1.sock"
        (door,) = runtime.doors(deep)
        assert (door.rank, door.pid, door.generation) == (0, os.getpid(), 1)
