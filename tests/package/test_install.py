"""What a stranger gets: wheel and sdist, in environments with nothing else in them, on each Python that is here."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import kvferry
from tests.docs.blocks import REPOSITORY, blocks_of
from tests.docs.session import Session, commands, run_blocks
from tests.package import pythons

pytestmark = [pytest.mark.slow, pytest.mark.package, pytest.mark.timeout(600)]

PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
DEPENDENCIES = {"numpy", "msgspec", "pyzmq"}
EXTRAS = {"nixl", "torch", "metrics", "demo", "completion", "dev", "docs"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist); the wheel is made from the sdist, so that this has all that is needed."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, REPOSITORY, timeout_s=300)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(params=pythons.SUPPORTED)
def python(request: pytest.FixtureRequest) -> Path:
    found = pythons.find(request.param)
    if found is None:
        pytest.skip(f"there is no Python {request.param} here")
    return found


def run(*words: str | Path, cwd: Path | None = None, timeout_s: float = 120) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_alone(built: tuple[Path, Path], python: Path, tmp_path: Path) -> None:
    wheel, _ = built
    run(python, "-m", "venv", tmp_path / "env")
    here = tmp_path / "env" / "bin"
    run(here / "python", *PIP, "install", wheel, timeout_s=300)
    run(here / "python", *PIP, "check")
    listed = run(here / "python", "-m", "pip", "list", "--format=freeze").split()
    assert {line.partition("==")[0].lower() for line in listed} - {"pip", "setuptools"} == DEPENDENCIES | {"kvferry"}
    assert run(here / "kvferry", "--version") == f"kvferry {kvferry.__version__}\n"
    run(here / "python", "-c", "import kvferry; [getattr(kvferry, name) for name in kvferry.__all__]", cwd=tmp_path)
    examples = [REPOSITORY / "examples" / f"{name}.json" for name in ("prefill", "decode", "request")]
    plan = run(here / "kvferry", "plan", *examples[:2], "--request", examples[2], cwd=tmp_path)
    assert plan.endswith("proved: in bounds, exactly once, complete\n")


def test_start_in_five_minutes_in_an_empty_environment(built: tuple[Path, Path], python: Path, tmp_path: Path) -> None:
    """docs/start.md from its first command on, in what the sdist holds."""
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (here,) = tmp_path.glob("kvferry-*")
    session = Session(tmp_path, here, commands(tmp_path / "bin", {"python3": [str(python)]}), {})
    blocks = [replace(block, test="") if block.elsewhere else block for block in blocks_of("docs/start.md")]
    run_blocks(session, [block for block in blocks if block.runs], limit_s=300)


def test_what_the_wheel_says_of_itself(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(wheel.read(metadata))
    assert EXTRAS <= set(said.get_all("Provides-Extra", []))
    needed = [line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split(">")[0] for line in needed} == DEPENDENCIES
    assert "kvferry/py.typed" in names
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "kvferry").rglob("*.py")}
    assert modules <= set(names)
    assert {name.split("/")[0] for name in names} == {"kvferry", metadata.split("/")[0]}


def test_the_sdist_has_what_its_tests_and_pages_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "Makefile", "constraints.txt", "mkdocs.yml", "README.md", "LICENSE"} <= inside
    assert {"tests/package/test_install.py", "docs/start.md", "scripts/docs_hooks.py"} <= inside
    assert not any(name.startswith((".venv", "site", "dist")) for name in inside)
