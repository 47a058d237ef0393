"""`kvferry registry` serves what the session's client asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli import main as cli
from kvferry.errors import RegistryError
from kvferry.session.keys import make_keys
from kvferry.session.registry import Registry, RegistryServer


def test_a_client_reaches_it() -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "registry", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("registry at ").strip()
            view = Registry(url).instance("prefill-0")
        finally:
            process.kill()
    assert not view.ready
    assert "prefill-0" in view.missing


def test_with_keys_only_their_holders_are_served(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "all")
    command = [
        sys.executable,
        "-m",
        "kvferry.cli.main",
        "registry",
        "--port=0",
        f"--keys={tmp_path}",
        "--host=127.0.0.2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("registry at ").strip()
            assert "prefill-0" in Registry(url, keys=keys).instance("prefill-0").missing
            with pytest.raises(RegistryError, match=r"401: .*set KVFERRY_KEYS"):
                Registry(url).instance("prefill-0")
        finally:
            process.kill()
    assert url.startswith("http://127.0.0.2:")


def test_f69_an_address_that_others_reach_needs_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["registry", "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "only loopback (127.0.0.1) can be used without keys; make keys with `kvferry keys" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "x", ""])
def test_a_bad_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["registry", f"--port={port}"])
    assert stopped.value.code == 2
    assert f"expected a port in 0 … 65535, got {port!r}" in capsys.readouterr().err


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with RegistryServer() as server:
        port = server.url.rpartition(":")[2]
        assert cli.main(["registry", "--port", port]) == 2
    assert capsys.readouterr().err == "kvferry: error: Address already in use\n"
