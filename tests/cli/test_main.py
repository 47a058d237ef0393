"""The frame around the subcommands: exit codes, one line per error, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry
from kvferry.cli import main as cli
from kvferry.errors import KVFerryError

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
KVFERRY = [sys.executable, "-m", "kvferry.cli.main"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"kvferry {kvferry.__version__}\n"


def test_help_lists_every_command_and_imports_none() -> None:
    script = (
        "import sys\nfrom kvferry.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "watched = ('kvferry.', 'numpy', 'msgspec', 'zmq', 'torch')\n"
        "print('IMPORTED', sorted(m for m in sys.modules if m.startswith(watched)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30).stdout
    help_text, _, imported = out.partition("IMPORTED ")
    assert all(name in help_text for name in cli.COMMANDS)
    assert imported.strip() == "['kvferry.cli', 'kvferry.cli.main', 'kvferry.errors']"


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["plan"], ["plan", "a", "b", "--no-such-option"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KVFerryError("two\nlines"), "kvferry: error: two lines"),
        (PermissionError(13, "Permission denied", "a.json"), "kvferry: error: a.json: Permission denied"),
        (OSError("no errno"), "kvferry: error: no errno"),
    ],
)
def test_each_expected_error_is_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err == line + "\n"
    assert captured.out == ""


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [*KVFERRY, "plan", str(EXAMPLES / "prefill.json"), str(EXAMPLES / "decode.json")]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (cli.EXIT_BROKEN_PIPE, "")


def test_ctrl_c_stops_the_registry_with_130() -> None:
    command = [*KVFERRY, "registry", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("registry at http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, err) == (cli.EXIT_INTERRUPTED, "")


def test_a_closed_stdout_is_no_traceback() -> None:
    command = [*KVFERRY, "plan", str(EXAMPLES / "prefill.json"), str(EXAMPLES / "decode.json")]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
