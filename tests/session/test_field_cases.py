"""The table of field cases has a row for each, and names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = {f"F{number}" for number in (*range(50, 58), *range(60, 70))}
CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec"}


def table() -> dict[str, set[tuple[str, str]]]:
    """By case: files and tests."""
    found = {}
    for row in (ROOT / "docs/reference/field-cases.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if re.fullmatch(r"F\d\d", cells[0]):
            files = (part.split(": ", 1) for part in cells[2].split("<br>"))
            found[cells[0]] = {
                (file.strip("`"), test) for file, tests in files for test in re.findall(r"`(\w+)`", tests)
            }
    return found


def named() -> dict[str, set[tuple[str, str]]]:
    """The same, as the tests' names say."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE):
            for number in re.findall(r"f(\d\d)_", test):
                found.setdefault(f"F{number}", set()).add((path.relative_to(ROOT / "tests").as_posix(), test))
    return {case: tests for case, tests in found.items() if case in CASES}


def test_every_case_has_tests_that_exist() -> None:
    assert table().keys() == CASES
    tests = named()
    for case, listed in table().items():
        assert listed, f"{case} has no test"
        assert listed <= tests.get(case, set()), f"{case}: no such tests"


def test_f66_nothing_that_comes_from_elsewhere_is_unpickled_or_executed() -> None:
    for path in sorted((ROOT / "kvferry").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
            names |= {node.func.id} if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else set()
            assert not names & CODE, f"{path.name}: {names & CODE}"
