from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.session.registry import RegistryServer
from tests.session.crew import Crew


@pytest.fixture(scope="module")
def processes() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def crew(processes: Crew) -> Iterator[Crew]:
    yield processes
    processes.rest()


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with RegistryServer() as server:
        yield server.url
