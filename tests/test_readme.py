"""What the README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from kvferry.cli import main as cli

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_library_example_runs() -> None:
    (script,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["worker 0 → worker 0: 16384 bytes", "worker 0 → worker 1: 16384 bytes"]


def test_the_console_example_prints_what_it_says() -> None:
    (session,) = blocks("console")
    command, _, shown = session.partition("\n")
    words = shlex.split(command.removeprefix("$ "))
    assert words[0] == "kvferry"
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", *words[1:]],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == shown


def test_every_command_is_listed() -> None:
    (commands,) = blocks("text")
    assert {line.split()[1] for line in commands.splitlines()} == set(cli.COMMANDS)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert targets
    assert [target for target in targets if "://" not in target and not (REPOSITORY / target).exists()] == []
