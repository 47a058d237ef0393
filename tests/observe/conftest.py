from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.session.registry import RegistryServer
from tests.observe.duo import Duo
from tests.session.conftest import crew, processes

__all__ = ["crew", "processes"]


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with RegistryServer() as server:
        yield server.url


@pytest.fixture
def duo(registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Duo]]:
    """Opens two endpoints of this process, which are alone in their run folder."""
    monkeypatch.setenv("KVFERRY_RUN", str(tmp_path / "run"))
    opened: list[Duo] = []

    def make(**options: Any) -> Duo:
        opened.append(Duo(registry, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
