"""`import kvferry` is cheap, and every public name is where it says."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry


def test_import_loads_nothing_heavy() -> None:
    script = "import sys, kvferry; print([m for m in ('numpy', 'msgspec', 'zmq', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30).stdout
    assert out.strip() == "[]"


def test_all_of_it_adds_less_than_a_fifth_of_a_second_to_its_dependencies() -> None:
    """`import kvferry` alone loads nothing, so every public name is asked for.

    Processor time of the thread, the least of some fresh processes, since others may keep the machine busy.
    """
    script = (
        "import time, msgspec, numpy, zmq\n"
        "start_s = time.thread_time()\n"
        "import kvferry\n"
        "for name in kvferry.__all__: getattr(kvferry, name)\n"
        "print(time.thread_time() - start_s)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
        for _ in range(7)
    ]
    assert min(float(run.stdout) for run in runs) < 0.2


@pytest.mark.parametrize("name", kvferry.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(kvferry, name) is not None


def test_type_checkers_and_the_loader_agree_on_where_names_live() -> None:
    """The imports under TYPE_CHECKING and the table that loads lazily are two lists of the same thing."""
    tree = ast.parse(Path(kvferry.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    declared = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert declared == kvferry._HOMES
    assert sorted(declared) == [name for name in kvferry.__all__ if name != "__version__"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module("kvferry").no_such_name  # noqa: B018  # the access is the test
