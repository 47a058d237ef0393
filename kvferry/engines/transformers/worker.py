"""One worker process: a shard of the model, its page pool and its endpoint, driven by commands from a pipe.

Any worker can prefill and decode; the commands make an instance one or the other.
Nothing heavy is imported at the top: signals and thread counts are set first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
    Start,
    Token,
    decode,
    encode,
)
from kvferry.errors import EngineError, KVFerryError

if TYPE_CHECKING:
    from kvferry.engines.transformers.cache import PagedCache
    from kvferry.session import Report, Transfer

PR_SET_PDEATHSIG = 1


def main(connection: Connection, start_bytes: bytes) -> None:
    """Entry of the process. Ends when the pipe closes, and is killed when the thread that started it ends (Linux)."""
    start: Start = decode(start_bytes, Start)
    _die_with_parent(start.parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        worker = Worker(start, connection)
    except KVFerryError as error:
        _reply(connection, Failed(str(error)))
        return
    except Exception as error:
        _fail(connection, error)
        return
    try:
        worker.serve()
    finally:
        worker.close()


def _die_with_parent(parent: int) -> None:
    # Ctrl-C reaches the whole foreground group: the parent alone decides what happens then
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _reply(connection: Connection, message: Message) -> None:
    try:
        connection.send_bytes(encode(message))
    except OSError:
        sys.exit(1)  # the instance is gone


def _fail(connection: Connection, error: Exception) -> None:
    """Report an error nobody foresaw; the traceback goes to stderr for whoever has to find the cause."""
    # this ends the process if the instance is gone: then the error is no news
    _reply(connection, Failed(f"{type(error).__name__}: {error}"))
    traceback.print_exception(error)


class Worker:
    """Owns the model, the pages and the endpoint of one rank."""

    def __init__(self, start: Start, connection: Connection) -> None:
        self.start = start
        self.connection = connection
        self.kept: dict[str, tuple[PagedCache, Transfer]] = {}
        _set_up_torch(start)

        from kvferry.engines.transformers.cache import CacheShape, PagePool
        from kvferry.engines.transformers.model import load_model, stop_tokens
        from kvferry.engines.transformers.probe import check_layout
        from kvferry.engines.weights import model_name
        from kvferry.layout.document import Instance
        from kvferry.session import Endpoint
        from kvferry.transport.memory import HostMemory, map_array

        folder = Path(start.model)
        self.model = load_model(folder, tp=start.tp, dtype=start.dtype)
        self.stop = stop_tokens(self.model)
        shape = CacheShape.of(self.model)
        self.pool = PagePool(
            shape,
            page_tokens=start.page_tokens,
            pages=start.pages,
            layout=start.layout,
            rank=start.rank,
            tp=start.tp,
            seed=start.instance,
        )
        described = self.pool.describe(start.rank)
        instance = Instance("kvferry-instance/1", start.instance, model_name(folder), (shape.group,), (described,))
        memory = HostMemory([map_array(tensor) for pair in self.pool.tensors for tensor in pair])
        check_layout(self.pool, described, memory)
        self.endpoint = Endpoint(
            instance, start.rank, memory, world=start.tp, registry=start.registry, transport=start.transport
        )

    def serve(self) -> None:
        """Answer commands until the pipe closes."""
        _reply(self.connection, Ready())
        while True:
            try:
                data = self.connection.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                _reply(self.connection, self._do(decode(data, Command)))
            except KVFerryError as error:
                _reply(self.connection, Failed(str(error)))
            except Exception as error:
                _fail(self.connection, error)
                return

    def _do(self, command: Command) -> Message:
        if isinstance(command, Prefill):
            return self._prefill(command)
        if isinstance(command, Release):
            return self._release(command)
        return self._decode(command)

    def _prefill(self, command: Prefill) -> FirstToken:
        from kvferry.engines.transformers.cache import GROUP, PagedCache
        from kvferry.engines.transformers.model import next_token
        from kvferry.layout.request import Wanted

        cache = PagedCache(self.pool)
        try:
            token = next_token(self.model, cache, list(command.tokens))
            wanted = {GROUP: Wanted(tokens=(0, len(command.tokens)))}
            transfer = self.endpoint.send(command.request, wanted, cache.tables(), timeout_s=self.start.timeout_s)
        except BaseException:
            cache.close()
            raise
        self.kept[command.request] = (cache, transfer)
        return FirstToken(token)

    def _release(self, command: Release) -> Moved:
        if command.request not in self.kept:
            raise EngineError(f"request {command.request!r}: nothing is kept for it")
        cache, transfer = self.kept.pop(command.request)
        try:
            report = self.endpoint.wait(transfer)
            return _moved(report, self.endpoint.links())
        finally:
            cache.close()

    def _decode(self, command: Decode) -> Answer:
        from kvferry.engines.transformers.cache import PagedCache

        cache = PagedCache(self.pool, tokens=command.prompt_tokens)
        try:
            moved = self._fetch(command, cache)
            return Answer(tuple(self._continue(command, cache)), moved)
        finally:
            cache.close()

    def _fetch(self, command: Decode, cache: PagedCache) -> Moved:
        from kvferry.engines.transformers.cache import GROUP
        from kvferry.layout.request import Wanted

        wanted = {GROUP: Wanted(tokens=(0, command.prompt_tokens))}
        moved, failure = None, None
        try:
            transfer = self.endpoint.receive(
                command.request, command.source, wanted, cache.tables(), timeout_s=self.start.timeout_s
            )
            moved = _moved(self.endpoint.wait(transfer))
        except KVFerryError as error:
            failure = error
        # the ranks run the model together or not at all: one that stays away would leave the others waiting
        if not _all_agree(moved is not None, self.start.tp) and failure is None:
            failure = EngineError(f"request {command.request!r}: another rank did not get its part of the cache")
        if failure is not None:
            raise failure
        assert moved is not None
        return moved

    def _continue(self, command: Decode, cache: PagedCache) -> list[int]:
        from kvferry.engines.transformers.model import next_token

        tokens = [command.first]
        while len(tokens) < command.max_tokens and tokens[-1] not in self.stop:
            tokens.append(next_token(self.model, cache, tokens[-1:]))
            if self.start.rank == 0:
                _reply(self.connection, Token())
        return tokens

    def close(self) -> None:
        self.endpoint.close()
        self.kept.clear()


def _set_up_torch(start: Start) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if start.tp == 1:
        return
    import socket

    rank, world = str(start.rank), str(start.tp)
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(start.store_port)
    )
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    store = torch.distributed.TCPStore("127.0.0.1", start.store_port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=start.rank, world_size=start.tp)


def _all_agree(mine: bool, tp: int) -> bool:
    """Whether every rank says yes."""
    if tp == 1:
        return mine
    import torch

    vote: Any = torch.tensor([int(mine)])
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN)
    return bool(vote.item())


def _moved(report: Report, links: Mapping[str, str] = MappingProxyType({})) -> Moved:
    """`links`: by peer, `transport: why`."""
    names = sorted({link.partition(":")[0] for link in links.values()})
    return Moved(report.bytes, report.copies, report.chunks, report.seconds, tuple(names))
