from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.engines.transformers.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
