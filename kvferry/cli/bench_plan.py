"""Workloads of `kvferry bench plan` and how each is measured."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from kvferry.layout.document import Buffer, Group, Instance, Mode, Pool, Worker
from kvferry.layout.presets import latent, pack, regions_from, uniform_instance
from kvferry.plan.bind import Copies, Pages, Segments, bind_tokens, expand, token_runs
from kvferry.plan.document import pair_programs
from kvferry.plan.program import Program
from kvferry.plan.prove import prove_bounds, prove_cells
from kvferry.plan.route import Route, route

T = TypeVar("T")
DEVICE_BASE = 0xFFFF81AB54E01000
TARGET_RANK = 1
STATE_ROW = Pages(np.array([3], np.int64), 0)


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[], tuple[Instance, Instance]]
    tokens: int
    contiguous: bool = False  # page tables in rising order, else shuffled
    symbolic: bool = False  # segments only, no flat copies


@dataclass(frozen=True)
class Measured:
    """`copies`: without merging, one per (buffer, token, run); `merged_copies`: what is made; `peak_bytes`: of one
    bind.
    """

    name: str
    short_runs: bool
    compile_ms: float
    bind_ms: float
    write_once_ms: float
    copies: int
    merged_copies: int
    peak_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _llama(
    source_tp: int,
    target_tp: int,
    layout: str,
    pages: int = 1024,
    target_page_tokens: int = 16,
    source_pp: int = 1,
    target_pp: int = 1,
) -> tuple[Instance, Instance]:
    """Llama-3.1-70B: 80 layers, 8 KV heads, head_dim 128, bfloat16."""
    source = uniform_instance(
        "prefill", 80, 8, 128, source_tp, source_pp, layout=layout, pages=pages, bases=DEVICE_BASE
    )
    target = uniform_instance(
        "decode",
        80,
        8,
        128,
        target_tp,
        target_pp,
        layout=layout,
        pages=pages,
        bases=1 << 40,
        page_tokens=target_page_tokens,
    )
    return source, target


def _mla(tp: int, name: str, layers: int, base: int, extra: bool) -> Instance:
    """DeepSeek-V3's latent (61 layers, 576, bfloat16) on every rank; `extra` adds a state group: a small hybrid."""
    group = Group("latent", "token", "bfloat16", tuple(range(layers)), ("kv",), {"dim": 576})
    state = Group("state", "state", "float32", tuple(range(layers)), ("ssm",), {"head": 16, "value": 64})
    modes, page_bytes = latent(64, 576, 2)
    workers = []
    for rank in range(tp):
        packing = pack("separate", group.layers, group.parts, 256, page_bytes)
        pools = [Pool("latent", 64, page_bytes, modes, packing.buffers)]
        sizes = list(packing.region_bytes)
        if extra:
            pools.append(_state_pool(rank, tp, layers, len(sizes)))
            sizes += [16 * 64 * 4 * 32] * layers
        workers.append(Worker(rank, regions_from(base + rank * (1 << 34), sizes), tuple(pools)))
    return Instance("kvferry-instance/1", name, "deepseek", (group, state) if extra else (group,), tuple(workers))


def _state_pool(rank: int, tp: int, layers: int, first_region: int) -> Pool:
    heads = 16 // tp
    modes = (Mode("head", heads, 256), Mode("value", 64, 4))
    buffers = tuple(Buffer(layer, "ssm", first_region + layer, 0, 32) for layer in range(layers))
    return Pool("state", 1, heads * 256, modes, buffers, owned={"head": ((rank * heads, (rank + 1) * heads),)})


def _latent_pair(source_tp: int, target_tp: int, layers: int, extra: bool) -> tuple[Instance, Instance]:
    source = _mla(source_tp, "prefill", layers, DEVICE_BASE, extra)
    return source, _mla(target_tp, "decode", layers, 1 << 40, extra)


LLAMA = "Llama-70B TP4→TP"
LONG = "131,072 tokens, symbolic"
WORKLOADS = (
    Workload(f"{LLAMA}8 NHD, 8,192 tokens", lambda: _llama(4, 8, "nhd"), 8192),
    Workload(f"{LLAMA}8 NHD, {LONG}", lambda: _llama(4, 8, "nhd", 8192), 131072, symbolic=True),
    Workload(f"{LLAMA}8 HND, 8,192 tokens", lambda: _llama(4, 8, "hnd"), 8192),
    Workload(f"{LLAMA}8 HND, {LONG}", lambda: _llama(4, 8, "hnd", 8192), 131072, symbolic=True),
    Workload(f"{LLAMA}4 NHD, contiguous pages", lambda: _llama(4, 4, "nhd"), 8192, contiguous=True),
    Workload(f"{LLAMA}4 NHD, shuffled pages", lambda: _llama(4, 4, "nhd"), 8192),
    Workload("Llama-70B PP4→PP2 NHD", lambda: _llama(1, 1, "nhd", source_pp=4, target_pp=2), 8192),
    Workload(f"{LLAMA}8 NHD, page 16→24", lambda: _llama(4, 8, "nhd", target_page_tokens=24), 8192),
    Workload("DeepSeek-V3 MLA TP8→TP16", lambda: _latent_pair(8, 16, 61, False), 8192),
    Workload("hybrid: latent and state, TP4→TP8", lambda: _latent_pair(4, 8, 48, True), 8192),
)


def measure(workload: Workload, repeat: int) -> Measured:
    """Compile (route, programs, proof of cells) and bind (pages → copies, proof of bounds) for target worker 1's
    first source; best of `repeat`."""
    source, target = workload.make()
    steps = route(source, target, TARGET_RANK)
    chosen = [step for step in steps if step.source == steps[0].source]
    compile_ms, programs = _best(lambda: _compile(source, target, chosen), repeat)
    tables = [_pages(workload, side) for side in (source, target)]
    bind_ms, copies = _best(lambda: _bind(workload, programs, tables), repeat)
    count = sum(len(c) for c in copies)
    runs = sum(_unmerged(program, workload.tokens) for program in programs)
    write_ms = 0.0 if workload.symbolic else _best(lambda: [np.full(count, 7, np.uint64) for _ in range(3)], repeat)[0]
    peak = _peak(lambda: _bind(workload, programs, tables))
    total = sum(c.total_bytes for c in copies)
    short = bool(count) and total // max(count, 1) < 4096
    return Measured(workload.name, short, compile_ms, bind_ms, write_ms, runs, count, peak)


def _compile(source: Instance, target: Instance, steps: list[Route]) -> list[Program]:
    programs = []
    for step in steps:
        group = target.group(step.box.group)
        programs += pair_programs(source.worker(step.source), target.worker(TARGET_RANK), group, step.box)
    for program in programs:
        prove_cells(program)
    return programs


def _bind(workload: Workload, programs: list[Program], tables: list[Pages]) -> list[Copies]:
    copies = []
    for program in programs:
        if program.source.group.growth == "state":
            segments: Segments = bind_tokens(program, (0, 1), STATE_ROW, STATE_ROW)
        else:
            segments = bind_tokens(program, (0, workload.tokens), tables[0], tables[1])
        prove_bounds(program, segments)
        if not workload.symbolic:
            copies.append(expand(program, segments))
    return copies


def _unmerged(program: Program, tokens: int) -> int:
    """Copies that one run per (buffer, token) and contiguous stretch would need."""
    count = (
        1
        if program.source.group.growth == "state"
        else int(token_runs((0, tokens), program.source.box.cycles)[1].sum())
    )
    return count * sum(len(piece.source_bases) * len(piece.source_starts) for piece in program.pieces)


def _pages(workload: Workload, instance: Instance) -> Pages:
    pool = instance.workers[0].pools[0]
    count = -(-workload.tokens // pool.page_tokens)
    order = (
        np.arange(count) if workload.contiguous else np.random.default_rng(7).permutation(pool.buffers[0].pages)[:count]
    )
    return Pages(order.astype(np.int64), 0)


def _best(action: Callable[[], T], repeat: int) -> tuple[float, T]:
    best, result = float("inf"), None
    for _ in range(repeat):
        result = None
        gc.collect()
        started = time.perf_counter()
        result = action()
        best = min(best, time.perf_counter() - started)
    assert result is not None
    return best * 1e3, result


def _peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
