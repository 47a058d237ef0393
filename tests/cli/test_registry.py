"""`kvferry registry` serves what the session's client asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.cli import main as cli
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
