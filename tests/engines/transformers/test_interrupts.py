"""Ctrl-C while a worker is being started. Python interrupts the main thread whichever thread the signal reaches."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvferry.engines.transformers import instance


@pytest.fixture
def other_thread() -> Iterator[None]:
    """As the demo has: a thread that doesn't mask SIGINT."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_an_interrupt_waits_until_the_worker_is_started(other_thread: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    started = False
    with pytest.raises(KeyboardInterrupt):
        with instance._interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(20):
                time.sleep(0.01)
            started = True
    assert started
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_without_an_interrupt_nothing_happens(other_thread: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    with instance._interrupts_held():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is before
