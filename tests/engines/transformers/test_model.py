from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvferry.engines.transformers import model
from kvferry.engines.weights import model_name
from kvferry.errors import EngineError, MissingExtra


def test_a_folder_is_used_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    assert model.fetch_model(tiny_model) == tiny_model
    with pytest.raises(EngineError, match=r"no config\.json"):
        model.fetch_model(tmp_path)
    with pytest.raises(EngineError, match=r"expected a folder .* or a \.gguf file"):
        model.fetch_model(tmp_path / "absent")


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"first")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    converted: list[Path] = []

    def dequantise(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(file.read_bytes())
        converted.append(folder)

    monkeypatch.setattr(model, "_dequantise", dequantise)
    folder = model.fetch_model(source)
    assert folder.is_relative_to(tmp_path / "cache")
    assert model.fetch_model(source) == folder
    assert len(converted) == 1
    source.write_bytes(b"second")
    assert model.fetch_model(source) != folder
    assert len(converted) == 2


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"first")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    leftover = tmp_path / "cache" / "models" / ".99999999-abc"  # of a process that was killed: there is no such pid
    leftover.mkdir(parents=True)

    def interrupted(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_dequantise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fetch_model(source)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_same_weights_same_name(tiny_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / tiny_model.name
    shutil.copytree(tiny_model, copy)
    assert model_name(copy) == model_name(tiny_model)
    weights = copy / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert model_name(copy) != model_name(tiny_model)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvferry\[demo\]'"):
        model.need_extra()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", "/a")
    assert model.cache_folder() == Path("/a")
    monkeypatch.delenv("KVFERRY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert model.cache_folder() == Path("/b/kvferry")
