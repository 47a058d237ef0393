"""Every command and program in README and docs is run, here or by the tests that its comment names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, REPOSITORY, RUN, Block, blocks_of
from tests.docs.session import in_checkout, run_blocks

BLOCKS = {page: blocks_of(page) for page in PAGES}
FAST = [page for page, blocks in BLOCKS.items() if any(block.runs and not block.slow for block in blocks)]
SLOW = [page for page, blocks in BLOCKS.items() if any(block.slow for block in blocks)]
ELSEWHERE = [(block, place) for blocks in BLOCKS.values() for block in blocks for place in block.elsewhere]


@pytest.mark.parametrize("page", FAST)
def test_what_a_page_shows_works(page: str, tmp_path: Path) -> None:
    run_blocks(in_checkout(tmp_path), [block for block in BLOCKS[page] if block.runs and not block.slow], limit_s=60)


@pytest.mark.slow
@pytest.mark.docs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SLOW)
def test_what_takes_longer_works(page: str, tmp_path: Path) -> None:
    """With the quick ones before it, on which it may build."""
    run_blocks(in_checkout(tmp_path), [block for block in BLOCKS[page] if block.runs], limit_s=600)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    """A block without a language could be a command that nobody runs; a comment that isn't understood, too."""
    assert [block.where for block in BLOCKS[page] if not block.language] == []
    assert [block.where for block in BLOCKS[page] if block.language in ("bash", "shell", "py")] == [], f"use {RUN}"
    assert [block.where for block in BLOCKS[page] if not block.known] == []
    fences = len(re.findall(r"^ *```", (REPOSITORY / page).read_text(), re.M))
    assert fences == 2 * len(BLOCKS[page]), "a fence that tests/docs/blocks.py does not understand"


@pytest.mark.parametrize(("block", "place"), ELSEWHERE, ids=lambda value: getattr(value, "where", str(value)))
def test_who_runs_it_elsewhere_is_there(block: Block, place: str) -> None:
    if place == ".ci/run":
        return
    if place.startswith("make "):
        target = place.removeprefix("make ")
        assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.M), f"{block.where}: {place}"
        return
    path, _, name = place.partition("::")
    assert (REPOSITORY / path).is_file(), f"{block.where}: {place}"
    tree = ast.parse((REPOSITORY / path).read_text())
    tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not name or name in tests, f"{block.where}: {path} has no {name}"
    assert any(test.startswith("test_") for test in tests), f"{block.where}: {path} has no test"


def test_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/start.md", "docs/concepts.md", "examples/vllm/README.md"} <= {*PAGES}
    assert {"README.md", "docs/concepts.md", "docs/start.md"} <= {*FAST}
