"""The backend's real managers, senders and receivers in this process, on pools whose addresses use all 64 bits.

Nothing here uses kvferry's planner: plain NumPy says where a cell lies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.base import KVArgs
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers, setup_state_kv_args
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.receiver import KVFerryReceiver
from kvferry.engines.sglang.sender import KVFerrySender
from kvferry.layout.address import Address
from kvferry.transport.memory import MappedRegion, window

BASE = 0xFFFF_81AB_54E0_1000
LAYERS, HEADS, DIM, SLOTS = 4, 4, 32, 256
GUARD = 4096
UNTOUCHED = 0xA5
Ids = np.ndarray[Any, np.dtype[np.uint32]]


class HighTensor(torch.Tensor):
    """A tensor that says it lies on a device whose addresses use all 64 bits."""

    pretended = 0

    def data_ptr(self) -> int:
        return self.pretended


class Arena:
    """One worker's memory: buffers with guards between them, at `BASE` and up as far as anybody is told."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, UNTOUCHED, np.uint8)
        self._used = GUARD

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        start, self._used = self._used, self._used + nbytes + GUARD
        assert self._used <= len(self.bytes)
        tensor = torch.from_numpy(self.bytes[start : start + nbytes]).view(dtype).reshape(shape).as_subclass(HighTensor)
        tensor.pretended = BASE + start
        return tensor

    def region(self, address: Address, nbytes: int) -> MappedRegion:
        start = address.value - BASE
        return window(address, self.bytes[start : start + nbytes])


class World:
    """Stands for SGLang's group of all ranks: what rank 0 has, everybody gets."""

    def __init__(self, rank: int, size: int, board: dict[str, Any]) -> None:
        self.rank_in_group, self.world_size, self._board = rank, size, board

    def broadcast_object(self, value: Any, src: int) -> Any:
        return self._board.setdefault("home", value)


@dataclass
class Rank:
    """One scheduler: its context, memory, pool, rows and manager."""

    context: Any
    tp_rank: int
    tp: int
    page: int
    arena: Arena = field(default_factory=lambda: Arena(4 << 20))
    manager: Any = None

    def __post_init__(self) -> None:
        heads = max(1, HEADS // self.tp)
        self.heads = range(self.tp_rank * HEADS // self.tp, self.tp_rank * HEADS // self.tp + heads)
        self.pool = MHATokenToKVPool(SLOTS, self.page, torch.float32, heads, DIM, LAYERS, "cpu", False)
        shape = tuple(self.pool.k_buffer[0].shape)
        self.pool.k_buffer = [self.arena.tensor(shape, torch.float32) for _ in range(LAYERS)]
        self.pool.v_buffer = [self.arena.tensor(shape, torch.float32) for _ in range(LAYERS)]
        self.rows = MetadataBuffers(8, 16, torch.float32, 16)
        for name, value in vars(self.rows).items():
            if isinstance(value, torch.Tensor):
                setattr(self.rows, name, self.arena.tensor(tuple(value.shape), value.dtype))

    def args(self) -> Any:
        """KVArgs, filled as SGLang's queues do it."""
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank = self.tp_rank, 0, 0
        args.kv_cache_dtype_str, args.kv_layout, args.rust_http_port = "float32", None, None
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        args.kv_layer_ids, args.num_draft_entries = [], 0
        args.page_size = self.pool.page_size
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.rows.get_buf_infos()
        setup_state_kv_args(args, self.pool, None, total_kv_layers=LAYERS)
        return args

    def start(self, mode: DisaggregationMode, server_args: Any) -> None:
        arena = self.arena

        class Manager(KVFerryManager):
            map_memory = staticmethod(arena.region)

        with runtime_context.use_context(self.context):
            self.manager = Manager(self.args(), mode, server_args, False)

    def cells(self, layer: int, part: int) -> Ids:
        """[slot, head, dim], a view of the arena."""
        tensor = (self.pool.k_buffer, self.pool.v_buffer)[part][layer]
        start = tensor.pretended - BASE
        return self.arena.bytes[start : start + tensor.numel() * 4].view(np.uint32).reshape(tensor.shape)

    def row_bytes(self, row: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The request's row in each metadata buffer, views of the arena."""
        pointers, _, items = self.rows.get_buf_infos()
        starts = [pointer - BASE + row * item for pointer, item in zip(pointers, items)]
        return [self.arena.bytes[start : start + item] for start, item in zip(starts, items)]

    def fill(self, pages: list[int], tokens: range, row: int) -> None:
        """The memory as it looks with these tokens in these pages (`pages[0]` holds the first) and nothing else."""
        self.arena.bytes[:] = UNTOUCHED
        for at, token in enumerate(tokens):
            slot = pages[at // self.page] * self.page + at % self.page
            for layer in range(LAYERS):
                for part in range(2):
                    self.cells(layer, part)[slot] = cell_ids(layer, part, token, self.heads)
        for index, view in enumerate(self.row_bytes(row)):
            view[:] = np.random.default_rng(index).integers(0, 256, len(view), np.uint8)


def cell_ids(layer: int, part: int, token: int, heads: range) -> Ids:
    """[head, dim], all different over everything."""
    head, dim = np.meshgrid(np.array(heads), np.arange(DIM), indexing="ij")
    return ((((layer * 2 + part) * 1024 + token) * HEADS + head) * DIM + dim).astype(np.uint32)


@dataclass
class Rig:
    """Prefill and decode, with the bootstrap server between them."""

    address: str
    prefill: list[Rank]
    decode: list[Rank]

    def move(
        self, room: int, source_pages: list[int], target_pages: list[int], prefix_pages: int, rows: tuple[int, int]
    ) -> tuple[set[int], list[Any], list[Any]]:
        """What the schedulers call for one request, the prompt in two chunks; the last states and both sides."""
        receivers = [self.run(rank, KVFerryReceiver, rank.manager, self.address, room) for rank in self.decode]
        senders = [self.run(rank, KVFerrySender, rank.manager, self.address, room) for rank in self.prefill]
        page = self.decode[0].page
        for rank, receiver in zip(self.decode, receivers):
            assert self.run(rank, rank.manager.try_ensure_parallel_info, self.address)
            self.run(rank, receiver.init, 0)
            pages = np.array(target_pages[prefix_pages:], np.int32)
            self.run(rank, receiver.send_metadata, pages, rows[1], [], decode_prefix_len=prefix_pages * page)
        wait_for(lambda: KVPoll.Bootstrapping not in {sender.poll() for sender in senders})
        for rank, sender in zip(self.prefill, senders):
            assert sender.pop_decode_prefix_len() == 0
            self.run(rank, sender.init, len(source_pages), rows[0])
            half = len(source_pages) // 2
            self.run(rank, sender.send, np.array(source_pages[:half], np.int32), None, half * page)
            self.run(rank, sender.send, np.array(source_pages[half:], np.int32), [], 0)
        both = [*senders, *receivers]
        wait_for(lambda: all(side.poll() in (KVPoll.Success, KVPoll.Failed) for side in both))
        return {int(side.poll()) for side in both}, senders, receivers

    def run(self, rank: Rank, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with runtime_context.use_context(rank.context):
            return call(*args, **options)

    def close(self) -> None:
        for rank in [*self.decode, *self.prefill]:
            rank.manager.teardown()


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it didn't happen in time"
        time.sleep(0.002)


@contextlib.contextmanager
def open_rig(
    prefill_model: Path, prefill_tp: int, decode_tp: int, page: int, port: int, *, decode_model: Path | None = None
) -> Iterator[Rig]:
    """A fresh bootstrap server at `port` and fresh managers; everything is given back at the end."""
    load_plugins()
    server = KVFerryBootstrapServer("127.0.0.1", port)
    rig = Rig(f"127.0.0.1:{port}", [], [])
    try:
        start_side(rig.prefill, prefill_model, DisaggregationMode.PREFILL, prefill_tp, page, port)
        start_side(rig.decode, decode_model or prefill_model, DisaggregationMode.DECODE, decode_tp, page, port)
        yield rig
    finally:
        rig.close()
        stop(server)


def start_side(ranks: list[Rank], model: Path, mode: DisaggregationMode, tp: int, page: int, port: int) -> None:
    """Every rank of one instance. An error leaves none running."""
    board: dict[str, Any] = {}
    server_args = _server_args(model, mode, tp, page, port)
    for tp_rank in range(tp):
        rank = Rank(_context(server_args, tp_rank, tp, board), tp_rank, tp, page)
        rank.start(mode, server_args)
        ranks.append(rank)


def stop(server: KVFerryBootstrapServer) -> None:
    """SGLang's own `close`, without the complaint about its cleaning task, which it forgets."""
    for task in list(server._background_tasks):
        server._loop.call_soon_threadsafe(task.cancel)
    time.sleep(0.05)
    server.close()


def _server_args(model: Path, mode: DisaggregationMode, tp: int, page: int, port: int) -> Any:
    return ServerArgs(
        model_path=str(model),
        device="cpu",
        tp_size=tp,
        page_size=page,
        dtype="float32",
        attention_backend="torch_native",
        disaggregation_mode=mode.value,
        disaggregation_transfer_backend="kvferry",
        disaggregation_bootstrap_port=port,
        disaggregation_decode_retraction_backup="none",
    )


def _context(server_args: Any, tp_rank: int, tp: int, board: dict[str, Any]) -> Any:
    ranks = runtime_context.SpawnRanks(world_rank=tp_rank)
    context = runtime_context.create_context(server_args, role="scheduler", ranks=ranks)
    context.parallel.override_permanently(world_group=World(tp_rank, tp, board), pp_group=World(0, 1, {}))
    return context
