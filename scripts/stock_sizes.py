"""Which pairs of tensor-parallel sizes an engine's own connector serves, asked of its own code; and planned here.

    .venv-vllm/bin/python scripts/stock_sizes.py vllm
    .venv-sglang/bin/python scripts/stock_sizes.py sglang

Only sizes with which an engine can start: they divide the KV heads, or the heads divide them. No server is started and
nothing is moved: the connector's functions are asked which source ranks each target rank turns to and, in SGLang, which
heads it gets from them. «wrong» are pairs in which a target rank gets other heads than it owns, not all of them, or
turns to a source rank that does not exist.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import kvferry
from kvferry.errors import KVFerryError
from kvferry.layout.presets import tp_heads, uniform_instance

HEADS = (1, 2, 4, 8, 12)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
Pair = tuple[int, int, int]
"""(KV heads, tensor-parallel size of prefill, of decode)."""


def owned(heads: int, tp: int, rank: int) -> list[int]:
    (segment,) = tp_heads(heads, tp, rank)
    return list(range(*segment))


def sglang(pair: Pair) -> str:
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params

    heads, prefill, decode = pair
    for rank in range(decode):
        shared = {"attn_cp_size": 1, "pp_size": 1, "enable_kv_cache_sharding": False}
        info = SimpleNamespace(attn_tp_size=prefill, **shared)
        asks = SimpleNamespace(attn_tp_size=decode, attn_cp_rank=0, pp_rank=0, is_mla_backend=False, **shared)
        asks.is_hybrid_mla_backend, asks.kv_args = False, SimpleNamespace(engine_rank=rank)
        try:
            CommonKVManager._resolve_rank_mapping(asks, info)
        except (AssertionError, RuntimeError):
            return "refused"
        mine = owned(heads, decode, rank)
        if any(source >= prefill for source in info.target_tp_ranks):
            return "wrong"
        got: dict[int, int] = {}
        for source in info.target_tp_ranks:
            start, count, landing, _ = compute_head_slice_params(prefill, decode, source, rank, heads)
            sent = owned(heads, prefill, source)[start : start + count]
            if prefill == decode:  # equal sizes copy whole pages
                sent, landing = owned(heads, prefill, source), 0
            got |= {landing + i: head for i, head in enumerate(sent)}
        if got != dict(enumerate(mine)):
            return "wrong"
    return "right"


def vllm(pair: Pair) -> str:
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology

    heads, prefill, decode = pair
    for rank in range(decode):
        topology = TransferTopology(rank, decode, 16, "decode", False, False, heads, [])
        try:
            topology.handshake_target_ranks(prefill)
        except AssertionError:
            return "refused"
    return "not refused"


def planned(pair: Pair) -> str:
    """By kvferry: every byte of every target rank, proved."""
    heads, prefill, decode = pair
    sides = [
        uniform_instance(name, 1, heads, 8, tp, page_tokens=4, pages=4) for name, tp in (("p", prefill), ("d", decode))
    ]
    table = kvferry.Side({"attn": kvferry.Table((2, 0))})
    request = kvferry.Request("kvferry-request/1", {"attn": kvferry.Wanted((0, 8))}, table, table)
    try:
        plan = kvferry.make_plan(*sides, request)
    except KVFerryError:
        return "refused"
    whole = sum(len(owned(heads, decode, rank)) for rank in range(decode)) * 8 * 2 * 8 * 2
    return "right" if plan.proof.bytes == whole and plan.proof.complete else "wrong"


def main(engine: str) -> None:
    ask = {"vllm": vllm, "sglang": sglang}[engine]
    startable = [(heads, size) for heads in HEADS for size in SIZES if heads % size == 0 or size % heads == 0]
    pairs = [(heads, p, d) for heads, p in startable for other, d in startable if other == heads]
    stock = {pair: ask(pair) for pair in pairs}
    for name, verdicts in ((engine, stock), ("kvferry", {pair: planned(pair) for pair in pairs})):
        counts = Counter(verdicts.values())
        print(f"{name}: {len(pairs)} pairs: " + ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts)))
    for kind in ("wrong", "refused"):
        some = [f"{heads} heads {p}→{d}" for (heads, p, d), verdict in stock.items() if verdict == kind]
        if some:
            print(f"{kind} by {engine}'s own, for example: {'; '.join(some[:6])}")


if __name__ == "__main__":
    main(sys.argv[1])
