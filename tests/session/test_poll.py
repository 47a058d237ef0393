"""What `Endpoint.poll` shows, and when."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvferry.session.registry import RegistryServer
from kvferry.session.transfer import Transfer
from tests.session.deployment import endpoint
from tests.session.sim import TABLES, TOKENS


def test_poll_waits_for_the_first_end_and_no_longer() -> None:
    with (
        RegistryServer() as server,
        endpoint("p", server.url, None) as source,
        endpoint("d", server.url, None) as target,
    ):
        began_s = time.monotonic()
        assert target.poll(0.2) == []
        assert 0.2 <= time.monotonic() - began_s < 5
        transfer = target.receive("t", "p", TOKENS, TABLES, timeout_s=20)
        source.send("t", TOKENS, TABLES, timeout_s=20)
        began_s = time.monotonic()
        assert target.poll(15.0) == [transfer]
        assert time.monotonic() - began_s < 10
        assert target.poll() == []


def test_a_transfer_that_poll_shows_has_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly it is written down."""
    end = Transfer._end

    def slow(self: Transfer, *arguments: Any) -> None:
        time.sleep(0.05)
        end(self, *arguments)

    monkeypatch.setattr(Transfer, "_end", slow)
    with (
        RegistryServer() as server,
        endpoint("p", server.url, None) as source,
        endpoint("d", server.url, None) as target,
    ):
        target.receive("t", "p", TOKENS, TABLES, timeout_s=20)
        source.send("t", TOKENS, TABLES, timeout_s=20)
        for side in (source, target):
            until_s = time.monotonic() + 15
            found: list[Transfer] = []
            while not found and time.monotonic() < until_s:
                found = side.poll()
            assert [(one.state, one.report is not None, one.pages_free) for one in found] == [("done", True, True)]


def test_a_poll_ends_when_the_endpoint_closes() -> None:
    with RegistryServer() as server:
        closed = endpoint("d", server.url, None)
        waiting = threading.Thread(target=closed.poll, args=(30.0,))
        waiting.start()
        time.sleep(0.2)
        began_s = time.monotonic()
        closed.close()
        waiting.join(20)
        assert not waiting.is_alive() and closed.poll(30.0) == []
        assert time.monotonic() - began_s < 15
