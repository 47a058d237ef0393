"""The pictures are what the program draws."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kvferry.cli import main as cli
from tests.docs.blocks import REPOSITORY, blocks_of

ALGEBRA = REPOSITORY / "examples" / "algebra"


def test_the_picture_is_the_programs(tmp_path: Path) -> None:
    """To renew it: `kvferry plan` with these two documents and `--svg docs/images/tp4-to-tp3.svg`."""
    drawn = tmp_path / "map.svg"
    arguments = [str(ALGEBRA / name) for name in ("tp4-page6.json", "tp3-page4.json")]
    assert cli.main(["plan", *arguments, "--svg", str(drawn)]) == 0
    assert drawn.read_text() == (REPOSITORY / "docs/images/tp4-to-tp3.svg").read_text()


def test_the_picture_of_several_groups_is_what_its_commands_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands above it in docs/concepts.md."""
    (block,) = [block for block in blocks_of("docs/concepts.md") if "--svg hybrid.svg" in block.body]
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    for line in block.body.splitlines():
        assert cli.main(shlex.split(line)[1:]) == 0
    assert Path("hybrid.svg").read_text() == (REPOSITORY / "docs/images/hybrid.svg").read_text()
