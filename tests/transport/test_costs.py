from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.errors import DocumentError
from kvferry.transport import costs
from kvferry.transport.costs import Cost, Costs, known_costs


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    monkeypatch.setenv("KVFERRY_COSTS", str(path))
    known_costs.cache_clear()
    return path


def test_short_runs_are_gathered_and_long_ones_are_not() -> None:
    known = known_costs()
    for way in ("nixl", "process_vm"):
        assert known.gathers(way, 8192, 8192 * 512)
        assert not known.gathers(way, 4, 4 << 20)


def test_the_choice_is_what_costs_less() -> None:
    known = Costs("kvferry-costs/1", Cost(1e-6, 1e-9), {"nixl": Cost(3e-6, 5e-9), "tcp": Cost(3e-6, 5e-9)})
    for runs, nbytes in [(1, 10), (2, 1000), (2, 4000), (100, 1000), (1000, 1 << 20)]:
        gathered = (runs * 1e-6 + nbytes * 1e-9) + (3e-6 + nbytes * 5e-9)
        assert known.gathers("nixl", runs, nbytes) == (gathered < runs * 3e-6 + nbytes * 5e-9)
    assert known.gathers("unheard of", 1, 1 << 20)
    assert known.gathers("tcp", 1, 1 << 20), "it can't post runs"


def test_measured_costs_take_the_place_of_the_defaults(no_file: Path) -> None:
    no_file.write_text('{"format": "kvferry-costs/1", "gather": {"run_s": 1, "byte_s": 1}, "ways": {}}')
    assert known_costs().gather == Cost(1, 1)
    known_costs.cache_clear()
    no_file.write_text('{"format": "kvferry-costs/1", "gather": {"run_s": -1, "byte_s": 1}, "ways": {}}')
    with pytest.raises(DocumentError, match=r"costs.json: gather.run_s"):
        known_costs()


def test_the_file_lies_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVFERRY_COSTS")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    assert costs.costs_file() == tmp_path / "costs.json"
