"""`kvferry completion`: real shells, with somebody at the keyboard who presses Tab."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.cli import completion
from kvferry.cli import main as cli

REPOSITORY = Path(__file__).parents[2]
WAIT_S = 30.0
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
BEFORE = {"zsh": "autoload -U compinit && compinit -u -D; "}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for PATH in which this checkout is `kvferry`."""
    command = tmp_path / "kvferry"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvferry.cli.main "$@"\n')
    command.chmod(0o755)
    return tmp_path


class Terminal:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def wait_for(self, text: str) -> None:
        """Read on until `text` has been shown since the last call."""
        end_s = time.monotonic() + WAIT_S
        shown = ""
        while text not in shown:
            assert time.monotonic() < end_s, f"{text!r} was not shown, but {shown!r}"
            if select.select([self._descriptor], [], [], 0.1)[0]:
                shown += os.read(self._descriptor, 65536).decode(errors="replace")


@contextmanager
def terminal(shell: str, folder: Path) -> Iterator[Terminal]:
    """An interactive shell in which what `kvferry completion` prints has been read, as its help says."""
    path = f"{folder}:{os.environ['PATH']}"
    environment = {"PATH": path, "TERM": "dumb", "HOME": str(folder), "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"}
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(SHELLS[shell][0], SHELLS[shell], environment)
    try:
        screen = Terminal(descriptor)
        screen.type(f"{BEFORE.get(shell, '')}{completion.LINES[shell]}; echo set''up\n")
        screen.wait_for("setup")
        yield screen
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(shell, marks=pytest.mark.slow) for shell in ("zsh", "fish"))])
def test_tab_completes_commands_options_and_files(shell: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (folder / "prefill-document.json").write_text("{}")
    with terminal(shell, folder) as screen:
        screen.type("kvferry regi\t")
        screen.wait_for("registry")
        screen.type("--po\t")
        screen.wait_for("port")
        screen.type("\x15kvferry bench tran\t")
        screen.wait_for("transfer")
        screen.type("\x15kvferry plan prefill-doc\t")
        screen.wait_for("ument.json")


def test_each_shell_is_named_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["completion", "--help"])
    shown = capsys.readouterr().out
    assert all(line in shown for line in completion.LINES.values())
    assert tuple(completion.LINES) == completion.SHELLS


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == (
        "kvferry: error: argcomplete is not installed; pip install 'kvferry[completion]'\n"
    )


def test_without_the_extra_tab_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", "kvferry pl")
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 1
    assert capsys.readouterr() == ("", "")
