"""The backend's real managers, senders and receivers in this process, on pools whose addresses use all 64 bits.

Nothing here uses kvferry's planner: plain NumPy says where a cell lies.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.base import KVArgs
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers, setup_state_kv_args
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from kvferry.engines.sglang.bootstrap import KVFerryBootstrapServer
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.receiver import KVFerryReceiver, Prompt
from kvferry.engines.sglang.sender import KVFerrySender
from kvferry.layout.address import Address
from kvferry.transport.memory import MappedRegion, window
from tests.engines.sglang.shapes import LLAMA, Shape

LAYERS, DIM = LLAMA.layers, LLAMA.dim
BASE = 0xFFFF_81AB_54E0_1000
GUARD = 4096
UNTOUCHED = 0xA5
State = tuple[list[int], range, int]


class HighTensor(torch.Tensor):
    """A tensor that says it lies on a device whose addresses use all 64 bits."""

    def data_ptr(self) -> int:
        real = super().data_ptr()
        start = max(start for start in _ARENAS if start <= real)
        return BASE + real - start


class DeviceTensor(HighTensor):
    """The same, on another device than the CPU as far as it says."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="pretended", index=1)


_ARENAS: set[int] = set()
"""Where the arenas of this process really are, while their memory is there; each of them says that it is at `BASE`."""


class Arena:
    """One worker's memory: buffers with guards between them, at `BASE` and up as far as anybody is told."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, UNTOUCHED, np.uint8)
        self._used = GUARD
        start = self.bytes.ctypes.data
        _ARENAS.add(start)
        # one that nobody closed, as where a manager refused to start, must not be found inside a later one
        weakref.finalize(self.bytes, _ARENAS.discard, start)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, kind: type[HighTensor] = HighTensor) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        start, self._used = self._used, self._used + -(-nbytes // 64) * 64 + GUARD
        assert self._used <= len(self.bytes), f"{self._used} bytes of arena are needed"
        return torch.from_numpy(self.bytes[start : start + nbytes]).view(dtype).reshape(shape).as_subclass(kind)

    def region(self, address: Address, nbytes: int) -> MappedRegion:
        start = address.value - BASE
        return window(address, self.bytes[start : start + nbytes])

    def close(self) -> None:
        _ARENAS.discard(self.bytes.ctypes.data)


class World:
    """Stands for SGLang's group of all ranks, or of a pipeline's: what rank 0 has, everybody gets."""

    def __init__(self, rank: int, size: int, board: dict[str, Any]) -> None:
        self.rank_in_group, self.world_size, self._board = rank, size, board

    def broadcast_object(self, value: Any, src: int) -> Any:
        return self._board.setdefault("said", value)


@dataclass
class Rank:
    """One scheduler: its context, memory, pool, rows and manager. `layers`: those of its pipeline stage."""

    context: Any
    tp_rank: int
    tp: int
    page: int
    shape: Shape = LLAMA
    stage: int = 0
    stages: int = 1
    layers: range = range(4)
    arena: Arena = field(init=False)
    manager: Any = None

    def __post_init__(self) -> None:
        self.arena = Arena(self.shape.arena_bytes(self.tp))
        self.heads = self.shape.heads_of(self.tp_rank, self.tp)
        kind = DeviceTensor if self.shape.device else HighTensor
        self.pool = self.shape.make_pool(self, functools.partial(self.arena.tensor, kind=kind))
        self.twin = self.shape.make_pool(self, self.arena.tensor) if self.shape.host else None
        self.rows = MetadataBuffers(8, 16, torch.float32, 16)
        for name, value in vars(self.rows).items():
            if isinstance(value, torch.Tensor):
                setattr(self.rows, name, self.arena.tensor(tuple(value.shape), value.dtype))
        self.fields = self.shape.cells(self)

    def args(self) -> Any:
        """KVArgs, filled as SGLang's queues do it."""
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank = self.tp_rank, self.stage, 0
        args.kv_cache_dtype_str, args.kv_layout, args.rust_http_port = "float32", None, None
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pool.get_contiguous_buf_infos()
        args.kv_layer_ids, args.num_draft_entries = [], 0
        args.page_size = self.pool.page_size
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.rows.get_buf_infos()
        if self.twin is not None:
            twins = self.twin.get_contiguous_buf_infos()
            args.host_kv_data_ptrs, args.host_kv_data_lens, args.host_kv_item_lens = twins
        setup_state_kv_args(args, self.pool, None, total_kv_layers=self.shape.layers)
        return args

    def start(self, mode: DisaggregationMode, server_args: Any) -> None:
        arena = self.arena

        class Manager(KVFerryManager):
            map_memory = staticmethod(arena.region)

        with runtime_context.use_context(self.context):
            self.manager = Manager(self.args(), mode, server_args, False)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.teardown()
            if self.stages > 1:
                self.manager.request_status.close()
        self.arena.close()

    def cells(self, layer: int, part: int) -> Any:
        """K (0) or V (1) of a layer, [slot, head, dim], a view of the arena."""
        found = next(each for each in self.fields if each.layer == layer and each.tag == part)
        return found.view.reshape(-1, *found.view.shape[2:])

    def row_bytes(self, row: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The request's row in each metadata buffer, views of the arena."""
        pointers, _, items = self.rows.get_buf_infos()
        starts = [pointer - BASE + row * item for pointer, item in zip(pointers, items)]
        return [self.arena.bytes[start : start + item] for start, item in zip(starts, items)]

    def fill(self, pages: list[int], tokens: range, row: int, states: Mapping[str, State] = {}) -> None:
        """The memory as it looks with these tokens in these pages (`pages[0]` holds the first) and nothing else; with
        a row on the last stage. `states`: (ids, tokens, token of the first slot) of what is kept beside the KV cache.
        """
        self.arena.bytes[:] = UNTOUCHED
        held = {"kv": (pages, tokens, tokens.start), **states}
        for each in self.fields:
            each.write(*held[each.table])
        if self.stage == self.stages - 1:
            for index, view in enumerate(self.row_bytes(row)):
                view[:] = np.random.default_rng(index).integers(0, 256, len(view), np.uint8)


@dataclass
class Request:
    """One request as both sides' schedulers place it. `states`: ids by SGLang's name."""

    room: int
    tokens: int
    source_pages: list[int]
    target_pages: list[int]
    rows: tuple[int, int] = (2, 5)
    prefix: int = 0
    window: int | None = None
    source_states: dict[str, list[int]] = field(default_factory=dict)
    target_states: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Rig:
    """Prefill and decode, with the bootstrap server between them."""

    address: str
    prefill: list[Rank]
    decode: list[Rank]

    def move(
        self, room: int, source_pages: list[int], target_pages: list[int], prefix_pages: int, rows: tuple[int, int]
    ) -> tuple[set[int], list[Any], list[Any]]:
        """A request of whole pages, both sides' the same size."""
        page = self.decode[0].page
        return self.run_request(
            Request(room, len(source_pages) * page, source_pages, target_pages, rows, prefix_pages * page)
        )

    def run_request(self, request: Request) -> tuple[set[int], list[Any], list[Any]]:
        """What the schedulers call for one request, the prompt in two chunks; the last states and both sides."""
        receivers = self.receive(request, self.decode)
        senders = self.send(request)
        both = [*senders, *receivers]
        wait_for(lambda: {side.poll() for side in both} <= {KVPoll.Success, KVPoll.Failed}, 60.0)
        return {int(side.poll()) for side in both}, senders, receivers

    def receive(self, request: Request, decode: list[Rank], dp_rank: int = 0, **options: Any) -> list[Any]:
        receivers = []
        for rank in decode:
            receiver = self.run(rank, KVFerryReceiver, rank.manager, self.address, request.room)
            assert self.run(rank, rank.manager.try_ensure_parallel_info, self.address)
            self.run(rank, receiver.init, dp_rank)
            receiver.prompt = Prompt(request.tokens, request.window)
            pages = np.array(request.target_pages[request.prefix // rank.page :], np.int32)
            states = self.state_indices(rank, request.target_states)
            options["decode_prefix_len"] = request.prefix
            self.run(rank, receiver.send_metadata, pages, request.rows[1], states, **options)
            receivers.append(receiver)
        return receivers

    def send(self, request: Request) -> list[Any]:
        senders = [self.run(rank, KVFerrySender, rank.manager, self.address, request.room) for rank in self.prefill]
        wait_for(lambda: KVPoll.Bootstrapping not in {sender.poll() for sender in senders})
        pages = request.source_pages
        half = len(pages) // 2
        for rank, sender in zip(self.prefill, senders):
            assert sender.pop_decode_prefix_len() == 0
            self.run(rank, sender.init, len(pages), request.rows[0])
            if half:
                self.run(rank, sender.send, np.array(pages[:half], np.int32), None, half * rank.page)
            rest = request.tokens - half * rank.page
            states = self.state_indices(rank, request.source_states)
            self.run(rank, sender.send, np.array(pages[half:], np.int32), states, rest)
        return senders

    def state_indices(self, rank: Rank, states: dict[str, list[int]]) -> list[Any]:
        """In the order of KVArgs; a slot of recurrent state comes as SGLang gives it, a list of an array of no axes."""
        ids = [states[name] for name in rank.manager.state_names]
        kinds = rank.manager.state_names
        return [[np.array(each[0])] if kind == "mamba" else np.array(each, np.int32) for kind, each in zip(kinds, ids)]

    def run(self, rank: Rank, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with runtime_context.use_context(rank.context):
            return call(*args, **options)

    def close(self) -> None:
        for rank in [*self.decode, *self.prefill]:
            rank.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it didn't happen in time"
        time.sleep(0.002)


@contextlib.contextmanager
def open_server(port: int) -> Iterator[KVFerryBootstrapServer]:
    load_plugins()
    server = KVFerryBootstrapServer("127.0.0.1", port)
    try:
        yield server
    finally:
        stop(server)


@contextlib.contextmanager
def open_rig(
    prefill_model: Path,
    prefill_tp: int,
    decode_tp: int,
    page: int,
    port: int,
    *,
    decode_model: Path | None = None,
    decode_page: int | None = None,
    shape: Shape = LLAMA,
    decode_shape: Shape | None = None,
    stages: tuple[int, ...] = (),
) -> Iterator[Rig]:
    """A fresh bootstrap server at `port` and fresh managers; everything is given back at the end. `stages`: how many
    layers each pipeline stage of prefill has.
    """
    with open_server(port):
        rig = Rig(f"127.0.0.1:{port}", [], [])
        try:
            start_side(rig.prefill, prefill_model, DisaggregationMode.PREFILL, prefill_tp, page, port, shape, stages)
            other, other_page = decode_model or prefill_model, decode_page or page
            start_side(rig.decode, other, DisaggregationMode.DECODE, decode_tp, other_page, port, decode_shape or shape)
            yield rig
        finally:
            rig.close()


def start_side(
    ranks: list[Rank],
    model: Path,
    mode: DisaggregationMode,
    tp: int,
    page: int,
    port: int,
    shape: Shape = LLAMA,
    stages: tuple[int, ...] = (),
    dp: int = 1,
) -> None:
    """Every rank of one server. An error leaves none running. `dp`: of so many instances by data-parallel attention,
    each of `tp` ranks.
    """
    load_plugins()
    board: dict[str, Any] = {}
    counts = stages or (shape.layers,)
    lines: list[dict[str, Any]] = [{} for _ in range(tp * dp)]
    server_args = _server_args(model, mode, tp, page, port, len(counts), dp)
    for stage, count in enumerate(counts):
        layers = range(sum(counts[:stage]), sum(counts[:stage]) + count)
        for at in range(tp * dp):
            world = World(stage * tp * dp + at, tp * dp * len(counts), board)
            context = _context(server_args, world, World(stage, len(counts), lines[at]))
            rank = Rank(context, at % tp, tp, page, shape, stage, len(counts), layers)
            rank.start(mode, server_args)
            ranks.append(rank)


def stop(server: KVFerryBootstrapServer) -> None:
    """SGLang's own `close`, without the complaint about its cleaning task, which it forgets."""
    for task in list(server._background_tasks):
        server._loop.call_soon_threadsafe(task.cancel)
    time.sleep(0.05)
    server.close()


def write_config(model: Path, folder: Path, **changes: Any) -> Path:
    """A model's folder without weights, which nothing here reads."""
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json" and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder


@functools.lru_cache(maxsize=64)
def _server_args(model: Path, mode: DisaggregationMode, tp: int, page: int, port: int, pp: int, dp: int) -> Any:
    return ServerArgs(
        model_path=str(model),
        device="cpu",
        tp_size=tp * dp,
        pp_size=pp,
        dp_size=dp,
        enable_dp_attention=dp > 1,
        page_size=page,
        dtype="float32",
        attention_backend="torch_native",
        disaggregation_mode=mode.value,
        disaggregation_transfer_backend="kvferry",
        disaggregation_bootstrap_port=port,
        disaggregation_decode_retraction_backup="none",
    )


def _context(server_args: Any, world: World, line: World) -> Any:
    ranks = runtime_context.SpawnRanks(world_rank=world.rank_in_group)
    context = runtime_context.create_context(server_args, role="scheduler", ranks=ranks)
    context.parallel.override_permanently(world_group=world, pp_group=line)
    return context
