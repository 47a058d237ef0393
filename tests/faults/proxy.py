"""A TCP proxy in front of a control socket or a registry, which can be cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
ANSWER_S = 10.0


class Loop:
    """One thread that runs all proxies."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        self._loop.close()


class Proxy:
    """Listens on a port of its own and passes everything on to port `to`, which may change.

    `cut`: connections stay open, new ones are taken, but no byte arrives any more, as if a cable were pulled. `heal`:
    it works again, and all connections so far break, so what was said meanwhile is lost. `blink`: all break, once.
    """

    def __init__(self, loop: Loop, to: int = 0) -> None:
        self.to = to
        self._loop, self.is_cut = loop, False
        self._open: set[asyncio.StreamWriter] = set()
        self._server = loop.do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self.is_cut = True

    def heal(self) -> None:
        self.is_cut = False
        self.blink()

    def blink(self) -> None:
        self._loop.do(self._reset())

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            await self._reset()

        self._loop.do(end())

    async def _reset(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self.is_cut:
                await self._pass(reader, lambda _: None)
            else:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one of the two has gone, or the test is over
        finally:
            self._open.discard(writer)
            writer.close()  # what it was told before is still delivered

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, onward = await asyncio.open_connection("127.0.0.1", self.to)
        self._open.add(onward)
        both = [asyncio.create_task(self._pass(*way)) for way in ((reader, onward.write), (answers, writer.write))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            self._open.discard(onward)
            onward.close()  # what it was told before is still delivered

    async def _pass(self, reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        try:
            while data := await reader.read(1 << 16):
                if not self.is_cut:
                    write(data)
        except OSError:
            pass
