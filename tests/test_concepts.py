"""What docs/concepts.md shows is what the program prints and draws."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvferry.cli import main as cli

REPOSITORY = Path(__file__).parents[1]
SESSIONS = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", (REPOSITORY / "docs/concepts.md").read_text(), re.M | re.S)
ALGEBRA = REPOSITORY / "examples" / "algebra"


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=range(len(SESSIONS)))
def test_the_output_is_the_programs(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    command, _, lines = command.partition(" | head -")
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[: int(lines) if lines else None] == shown.splitlines()


def test_there_are_examples() -> None:
    assert len(SESSIONS) == 5


def test_the_picture_is_the_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To renew it: `kvferry plan` with these two documents and `--svg docs/images/tp4-to-tp3.svg`."""
    drawn = tmp_path / "map.svg"
    arguments = [str(ALGEBRA / name) for name in ("tp4-page6.json", "tp3-page4.json")]
    assert cli.main(["plan", *arguments, "--svg", str(drawn)]) == 0
    assert drawn.read_text() == (REPOSITORY / "docs/images/tp4-to-tp3.svg").read_text()
