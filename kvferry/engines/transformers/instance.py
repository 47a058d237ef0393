"""An instance: the worker processes of one tensor-parallel model, and the commands they all get in the same order."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

from kvferry.engines.transformers import worker
from kvferry.engines.transformers.cache import PageLayout
from kvferry.engines.transformers.messages import (
    Answer,
    Command,
    Decode,
    Failed,
    FirstToken,
    Message,
    Moved,
    Prefill,
    Ready,
    Release,
    Reply,
    Start,
    Token,
    decode,
    encode,
)
from kvferry.engines.transformers.model import check_parallel
from kvferry.errors import EngineError, WorkerFailed

CLOSE_TIMEOUT_S = 3.0
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Prefilled:
    """A prompt's cache lies ready on the prefill instance `source`."""

    request: str
    source: str
    prompt_tokens: int
    first: int


@dataclass(frozen=True)
class Decoded:
    """All tokens of an answer, the first one included, and each rank's side of the transfer."""

    tokens: tuple[int, ...]
    moved: tuple[Moved, ...]


class TransformersInstance:
    """`tp` worker processes that run the model in `folder` together; `ready` waits until the model is loaded.

    Use it as a context manager, from the thread that lives longest: workers are killed when the thread that started
    them ends.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        registry: str,
        pages: int,
        tp: int = 1,
        page_tokens: int = 16,
        layout: PageLayout = "nhd",
        transport: str = "auto",
        dtype: str = "float32",
        timeout_s: float = 120.0,
    ) -> None:
        if page_tokens < 1:
            raise EngineError(f"{name}: page size must be ≥ 1 token, got {page_tokens}")
        check_parallel(folder, tp)
        self.name = name
        self.timeout_s = timeout_s
        self._store: Any
        self._store, store_port = _rendezvous() if tp > 1 else (None, 0)
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(tp):
                self._spawn(
                    Start(
                        instance=name,
                        model=str(folder),
                        rank=rank,
                        tp=tp,
                        dtype=dtype,
                        layout=layout,
                        page_tokens=page_tokens,
                        pages=pages,
                        registry=registry,
                        transport=transport,
                        store_port=store_port,
                        parent=os.getpid(),
                        timeout_s=timeout_s,
                    )
                )
        except BaseException:
            self.close()
            raise

    def _spawn(self, start: Start) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker.main, args=(theirs, encode(start)), name=f"kvferry {self.name} {start.rank}", daemon=True
        )
        with _interrupts_held():
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        theirs.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def ready(self, timeout_s: float = 300.0) -> None:
        """Wait until every worker has loaded its shard and registered its endpoint."""
        self._collect(Ready, "start", timeout_s)

    def prefill(self, request: str, tokens: Sequence[int]) -> Prefilled:
        """Run a prompt; its cache stays until `release`."""
        if not tokens:
            raise EngineError(f"request {request!r}: the prompt is empty")
        firsts = self._command(Prefill(request, tuple(tokens)), FirstToken)
        return Prefilled(request, self.name, len(tokens), _same([first.token for first in firsts], self.name))

    def decode(self, prefilled: Prefilled, max_tokens: int, each: Callable[[], None] = lambda: None) -> Decoded:
        """Fetch the cache of a prefilled request and decode greedily; `each` is called after each new token."""
        command = Decode(prefilled.request, prefilled.source, prefilled.prompt_tokens, prefilled.first, max_tokens)
        answers = self._command(command, Answer, each)
        return Decoded(
            _same([answer.tokens for answer in answers], self.name), tuple(answer.moved for answer in answers)
        )

    def release(self, prefilled: Prefilled) -> tuple[Moved, ...]:
        """Wait until the request's cache has been fetched, free its pages; each rank's side of the transfer."""
        return tuple(self._command(Release(prefilled.request), Moved))

    def _command(self, command: Command, answer: type[M], each: Callable[[], None] = lambda: None) -> list[M]:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(encode(command))
            except OSError:
                raise self._ended(rank) from None
        # a transfer ends within timeout_s on its own; the model's own work comes on top
        return self._collect(answer, type(command).__name__.lower(), 2 * self.timeout_s + 60, each)

    def _collect(
        self, answer: type[M], what: str, timeout_s: float, each: Callable[[], None] = lambda: None
    ) -> list[M]:
        """One `answer` from each worker. All replies are awaited before a failure is raised, so that none is left."""
        deadline = time.monotonic() + timeout_s
        replies: dict[int, Any] = {}
        while len(replies) < len(self._pipes):
            waiting = {self._pipes[rank]: rank for rank in range(len(self._pipes)) if rank not in replies}
            readable = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not readable:
                raise WorkerFailed(self._worker(min(waiting.values())), f"no answer to {what} within {timeout_s:g} s")
            for pipe in readable:
                rank = waiting[pipe]  # type: ignore[index]  # wait() returns what it was given
                try:
                    reply = decode(self._pipes[rank].recv_bytes(), Reply)
                except (EOFError, OSError):
                    raise self._first_failure(replies) or self._ended(rank) from None
                if isinstance(reply, Token):
                    each()
                else:
                    replies[rank] = reply
        failure = self._first_failure(replies)
        if failure is not None:
            raise failure
        return [replies[rank] for rank in sorted(replies)]

    def _first_failure(self, replies: dict[int, Any]) -> WorkerFailed | None:
        for rank, reply in sorted(replies.items()):
            if isinstance(reply, Failed):
                return WorkerFailed(self._worker(rank), reply.problem)
        return None

    def _ended(self, rank: int) -> WorkerFailed:
        process = self._processes[rank]
        process.join(CLOSE_TIMEOUT_S)
        return WorkerFailed(self._worker(rank), f"the process ended with exit code {process.exitcode}")

    def _worker(self, rank: int) -> str:
        return f"instance {self.name!r}, worker {rank}"

    def close(self) -> None:
        """End the workers: closing the pipe asks them to, and after three seconds they are killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._store = None

    def __enter__(self) -> TransformersInstance:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _rendezvous() -> tuple[Any, int]:
    """The store by which the ranks' torch.distributed find each other, and its port.

    It gets our listener, on loopback: its own would be open to every network.
    """
    import torch

    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back: a process must not be left half started, neither by us nor by a signal of its own.

    The mask is for the process that is started meanwhile, which inherits it until it has set itself up. The handler is
    for us: another of our threads may get the signal, and Python then interrupts the main thread whatever that masks.
    """
    resource_tracker.ensure_running()  # it would end the hold when it starts
    main = threading.current_thread() is threading.main_thread()
    caught: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number)) if main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if caught:
            signal.raise_signal(signal.SIGINT)


T = TypeVar("T")


def _same(values: list[T], name: str) -> T:
    if any(value != values[0] for value in values):
        raise EngineError(f"instance {name!r}: its workers computed different tokens: {values}")
    return values[0]
