"""What SGLang's own NIXL backend would send between two tensor-parallel sizes: its own functions, with an agent that
only writes down the descriptors, which are then followed in NumPy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.nixl import conn

SLOTS, HEAD_BYTES = 4, 8
BASES = (1 << 20, 1 << 21)
"""Where keys and values lie, on every worker."""


def verdict(heads: int, prefill: int, decode: int) -> str:
    """ "right", "wrong" where heads land elsewhere, are missing or pass the pool's end, or how the backend gives up."""
    for rank in range(decode):
        owned = own(heads, decode, rank)
        landed: dict[int, int | None] = {}
        for source in sources_of(rank, prefill, decode):
            try:
                landed |= heads_sent(heads, prefill, decode, source, rank)
            except AssertionError:
                return "asserts"
        if landed != dict(enumerate(owned)):
            return "wrong"
    return "right"


def own(heads: int, tp: int, rank: int) -> list[int]:
    first = rank * heads // tp
    return list(range(first, max(first + 1, (rank + 1) * heads // tp)))


def sources_of(rank: int, prefill: int, decode: int) -> list[int]:
    """SGLang's own answer."""
    info = PrefillServerInfo(prefill, 1, 1, 1, 1, None, True)
    me = SimpleNamespace(
        is_mla_backend=False,
        is_hybrid_mla_backend=False,
        attn_tp_size=decode,
        kv_args=SimpleNamespace(engine_rank=rank),
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
    )
    CommonKVManager._resolve_rank_mapping(me, info)
    return list(info.target_tp_ranks or ())


def heads_sent(heads: int, prefill: int, decode: int, source: int, rank: int) -> dict[int, int | None]:
    """By the target's local head: which head lands there, None for what is no head of the source."""
    mine, theirs = own(heads, prefill, source), own(heads, decode, rank)
    item, dst_item = len(mine) * HEAD_BYTES, len(theirs) * HEAD_BYTES
    lists: list[list[int]] = []

    def keep(_: str, runs: Any, *rest: Any) -> int:
        lists.append([(base + i * step) for base, _, _, step, count in runs for i in range(count)])
        lengths.extend(run[1] for run in runs)
        return len(lists) - 1

    lengths: list[int] = []
    me = SimpleNamespace(
        attn_tp_size=prefill,
        kv_args=SimpleNamespace(
            page_size=1,
            total_kv_head_num=heads,
            kv_head_num=len(mine),
            engine_rank=source,
            kv_item_lens=[item, item],
            kv_data_lens=[SLOTS * item] * 2,
            kv_data_ptrs=list(BASES),
            gpu_id=0,
        ),
        prep_handle_slice_src=None,
        prep_handles_slice_dst={},
        get_mha_kv_ptrs_with_pp=lambda ours, other: (ours[:1], ours[1:], other[:1], other[1:], 1),
        _pack_stride_descs=lambda runs: runs,
        _prep_xfer_dlist=keep,
    )
    target = SimpleNamespace(
        decode_tp_size=decode,
        decode_tp_rank=rank,
        dst_kv_item_len=dst_item,
        dst_kv_ptrs=list(BASES),
        dst_num_slots=SLOTS,
        gpu_id=0,
    )
    conn.NixlKVManager._init_hetero_tp_prep_handle(me, "peer", target)
    _, groups, pairs, slots = me.prep_handle_slice_src
    _, dst_slots, group = me.prep_handles_slice_dst["peer"]
    pages = np.array([1], np.int32)
    here = conn.expand_page_indices_for_slice(pages, pairs, slots, 1, num_groups=groups, head_group_idx=group)
    there = conn.expand_page_indices_for_slice(pages, pairs, dst_slots, 1)
    landed: dict[int, int | None] = {}
    for at, to in zip(np.ravel(here), np.ravel(there)):
        for step in range(lengths[0] // HEAD_BYTES):
            offset = lists[0][at] - BASES[0] - item + step * HEAD_BYTES
            local = (lists[1][to] - BASES[0] - dst_item) // HEAD_BYTES + step
            if offset < len(mine) * HEAD_BYTES and local < SLOTS * len(theirs):  # keys; values are treated alike
                landed[local] = mine[offset // HEAD_BYTES] if offset >= 0 else None
    return landed
