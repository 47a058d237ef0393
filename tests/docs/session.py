"""A reader at a terminal: the blocks of one page, one after the other, in a copy of the checkout."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.docs.blocks import REPOSITORY, Block

BACKGROUND_S = 30.0
PORT = "7700"
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.M)


class Session:
    """Starts in the folder `here`, with the commands of `path` before all others; `folder` is for its own files.

    What is exported, and where one is, lasts from block to block. The registry's port is another one than the pages
    say, so that several runs can go side by side.
    """

    def __init__(self, folder: Path, here: Path, path: Path, environment: Mapping[str, str]) -> None:
        self._port = str(_free_port())
        self._state = folder / "state.sh"
        self._state.write_text(f"cd {shlex.quote(str(here))}\n")
        self._background: list[subprocess.Popen[str]] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVFERRY_", "PYTHON"))}
        self._environment = {**inherited, "PATH": f"{path}:{os.environ['PATH']}", "HOME": str(folder), **environment}

    def run(self, block: Block, limit_s: float) -> None:
        """AssertionError, with what was printed, where a command fails or does not print what the page shows."""
        block = replace(block, body=block.body.replace(PORT, self._port))
        if block.is_file:
            (self._folder() / block.title).write_text(block.body)
        elif block.until:
            self._start(block)
        elif block.language == "python":
            self._bash(block, f"python - <<'END_OF_BLOCK'\n{block.body}END_OF_BLOCK\n", limit_s)
        elif block.language == "console":
            commands = _COMMAND.findall(block.body)
            assert commands, f"{block.where}: a console block without a command"
            for command, shown in commands:
                printed = self._bash(block, f"{command}\n", limit_s)
                assert _matches(shown, printed), f"{block.where}: $ {command}\nshown:\n{shown}\nprinted:\n{printed}"
        else:
            self._bash(block, block.body, limit_s)

    def close(self) -> None:
        for process in self._background:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _folder(self) -> Path:
        return Path(self._bash(None, "pwd", 10).strip())

    def _bash(self, block: Block | None, commands: str, limit_s: float) -> str:
        keep = f'{{ export -p; echo cd $(printf %q "$PWD"); }} > {shlex.quote(str(self._state))}'
        script = f"set -eo pipefail\nsource {shlex.quote(str(self._state))}\n{commands}\n{keep}\n"
        # `head` ends before what it reads from does, which is no failure here
        script = script.replace("set -eo pipefail", "set -e") if re.search(r"\| head\b", commands) else script
        with subprocess.Popen(
            ["bash", "-c", script], env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{block and block.where}: not done after {limit_s:g} s:\n{commands}") from None
            finally:
                _kill_group(process.pid)
        assert process.returncode == 0, (
            f"{block and block.where}: exit code {process.returncode}\n{commands}\n{printed}"
        )
        return printed

    def _start(self, block: Block) -> None:
        script = f"source {shlex.quote(str(self._state))}\n{block.body}"
        process = subprocess.Popen(
            ["bash", "-c", script], env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True,
        )  # fmt: skip
        self._background.append(process)
        assert process.stdout is not None
        printed, end_s = "", time.monotonic() + BACKGROUND_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while block.until not in printed:
                left_s = end_s - time.monotonic()
                assert left_s > 0 and process.poll() is None, f"{block.where}: {block.until!r} never came:\n{printed}"
                if selector.select(min(left_s, 0.5)):
                    printed += os.read(process.stdout.fileno(), 65536).decode(errors="replace")


def in_checkout(folder: Path) -> Session:
    """In a copy of this checkout, made of links, in which this interpreter is `python`."""
    here = folder / "kvferry"
    here.mkdir()
    for entry in REPOSITORY.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("site", "dist"):
            (here / entry.name).symlink_to(entry)
    words = {"python": [sys.executable], "kvferry": [sys.executable, "-m", "kvferry.cli.main"]}
    quiet = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "KVFERRY_COSTS": str(folder / "none.json")}
    return Session(folder, here, commands(folder / "bin", words), quiet)


def commands(folder: Path, words: Mapping[str, Sequence[str]]) -> Path:
    """A folder for PATH with commands that stand for these words."""
    folder.mkdir()
    for name, stands_for in words.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(stands_for)} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _matches(shown: str, printed: str) -> bool:
    """Whether `printed` is what is shown, where … is anything."""
    pattern = "(?s:.*?)".join(re.escape(part) for part in shown.strip().split("…"))
    return re.fullmatch(pattern, printed.strip()) is not None


def run_blocks(session: Session, blocks: Sequence[Block], limit_s: float) -> None:
    try:
        for block in blocks:
            session.run(block, limit_s)
    finally:
        session.close()
