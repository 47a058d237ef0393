"""SIGTERM as a wish to stop in good order: what runs ends, what is new is refused, and then the process ends by it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable

from kvferry.session.endpoint import Endpoint


def drain_on_sigterm(endpoints: Iterable[Endpoint], timeout_s: float) -> None:
    """From now on SIGTERM drains these endpoints side by side, within `timeout_s`, and ends the process then. A second
    SIGTERM ends it at once. Call it in the main thread; a program that handles SIGTERM itself calls `Endpoint.drain`.
    """
    chosen = tuple(endpoints)

    def drain() -> None:
        threads = [threading.Thread(target=one.drain, args=(timeout_s,), name="kvferry-drain") for one in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.kill(os.getpid(), signal.SIGTERM)

    def on_sigterm(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=drain, name="kvferry-sigterm").start()

    signal.signal(signal.SIGTERM, on_sigterm)
