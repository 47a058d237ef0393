"""Instances made from config.json: what is cached, where engines keep it, and that any two of them plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import DocumentError
from kvferry.layout.address import Address
from kvferry.layout.document import Group, Instance, Pool, Worker, encode_json
from kvferry.layout.models import model_slabs, read_config
from kvferry.layout.placement import ENGINES, Shape, place, plain_stages, sglang_stages, vllm_stages
from kvferry.layout.request import Request, Side, Table, Wanted
from kvferry.plan.document import make_plan
from tests.plan.oracle import replay, truth

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
LLAMA, OSS, DEEPSEEK, QWEN = "llama-3.1-70b", "gpt-oss-120b", "deepseek-v3.2", "qwen3-next-80b-a3b"
BASE = Address(0xFFFF81AB54E01000)
TOKENS = (5, 45)


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A committed config with fields changed; None takes one out."""
    fields = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {field: value for field, value in fields.items() if value is not None}


def build(fields: dict[str, Any], engine: str = "vllm", dtype: str | None = None, **shape: Any) -> Instance:
    slabs = model_slabs(read_config(json.dumps(fields)), dtype)
    return place(
        slabs, ENGINES[engine], Shape(**{"base": BASE, "pages": 16, "rows": 4, **shape}), instance="i", model="m"
    )


def pool_of(worker: Worker, group: str) -> Pool:
    return next(pool for pool in worker.pools if pool.group == group)


def address(instance: Instance, rank: int, group: str, layer: int, part: str, page: int, **index: int) -> int:
    """Bytes from the start of the buffer's region, straight from the document's definition (local indices)."""
    pool = pool_of(instance.worker(rank), group)
    buffer = next(b for b in pool.buffers if (b.layer, b.part) == (layer, part))
    strides = {mode.axis: mode.stride_bytes for mode in pool.modes}
    assert len(strides) == len(pool.modes)
    offset = sum(index.get(axis, 0) * stride for axis, stride in strides.items())
    return buffer.offset_bytes + page * pool.page_bytes + offset


def groups_of(instance: Instance) -> dict[str, Group]:
    return {group.name: group for group in instance.groups}


# --- what each model caches, by numbers known from the models ---


def test_llama_is_one_group_of_keys_and_values() -> None:
    (group,) = build(config(LLAMA)).groups
    assert (group.name, group.dtype, group.parts, group.axes) == (
        "attn",
        "bfloat16",
        ("k", "v"),
        {"head": 8, "dim": 128},
    )
    assert group.layers == tuple(range(80))


def test_gpt_oss_alternates_between_sliding_and_full() -> None:
    groups = groups_of(build(config(OSS)))
    assert groups["sliding"].layers == tuple(range(0, 36, 2))
    assert groups["full"].layers == tuple(range(1, 36, 2))
    assert groups["sliding"].constants == {"window": 128}
    assert groups["full"].axes == groups["sliding"].axes == {"head": 8, "dim": 64}


def test_deepseek_has_a_latent_and_index_keys_with_scales_on_one_table() -> None:
    instance = build(config(DEEPSEEK), tp=2)
    groups = groups_of(instance)
    assert groups["latent"].axes == {"dim": 576}
    assert (groups["index"].dtype, groups["index"].axes) == ("float8_e4m3fn", {"dim": 128})
    assert (groups["index_scale"].dtype, groups["index_scale"].axes) == ("float32", {"block": 1})
    for worker in instance.workers:
        assert {pool.table_name for pool in worker.pools} == {"latent"}
        assert all(not pool.owned for pool in worker.pools)  # F40: a replica on every rank


def test_layer_types_as_transformers_names_them_for_latent_attention_are_known() -> None:
    listed = config(DEEPSEEK, layer_types=["indexed_attention"] * 61)
    assert build(listed) == build(config(DEEPSEEK))


def test_numbers_that_only_python_writes_are_read() -> None:
    text = json.dumps(config(LLAMA, time_limit=[0.0, float("inf")]))
    assert "Infinity" in text
    assert model_slabs(read_config(text)) == model_slabs(config(LLAMA))


def test_a_model_without_index_keys_has_the_latent_only() -> None:
    assert list(groups_of(build(config(DEEPSEEK, index_head_dim=None)))) == ["latent"]


def test_qwen3_next_has_attention_on_every_fourth_layer_and_states_on_the_others() -> None:
    groups = groups_of(build(config(QWEN)))
    assert groups["attn"].layers == tuple(range(3, 48, 4))
    assert groups["conv"].layers == groups["ssm"].layers == tuple(n for n in range(48) if n % 4 != 3)
    assert (groups["conv"].growth, groups["conv"].axes) == ("state", {"channel": 8192, "width": 3})
    assert (groups["ssm"].dtype, groups["ssm"].axes) == ("float32", {"head": 32, "value": 128, "key": 128})


def test_dtype_is_that_of_keys_and_values_and_leaves_states_alone() -> None:
    groups = groups_of(build(config(QWEN), dtype="float8_e4m3fn"))
    assert [groups[name].dtype for name in ("attn", "conv", "ssm")] == ["float8_e4m3fn", "bfloat16", "float32"]


def test_the_language_model_of_a_multimodal_config_counts() -> None:
    inner = config(LLAMA)
    outer = {"model_type": "llava", "num_hidden_layers": 2, "text_config": inner}
    assert build(outer) == build(inner)


# --- how it is cut ---


def test_heads_are_replicated_where_there_are_more_ranks_than_heads() -> None:
    workers = build(config(LLAMA), tp=16).workers
    assert [worker.pools[0].owned["head"] for worker in workers] == [((n // 2, n // 2 + 1),) for n in range(16)]


def test_conv_channels_are_three_segments_each_cut_over_the_ranks() -> None:
    """F42: q and k have 16 heads of 128 channels, v has 32."""
    worker = build(config(QWEN), tp=4).worker(1)
    assert pool_of(worker, "conv").owned["channel"] == ((512, 1024), (2560, 3072), (5120, 6144))
    assert pool_of(worker, "ssm").owned["head"] == ((8, 16),)


def test_context_parallel_ranks_take_tokens_in_turn_and_states_whole() -> None:
    instance = build(config(QWEN), tp=2, cp=4, cp_block=8)
    worker = instance.worker(2 * 2 + 1)  # context rank 2, tensor rank 1
    assert pool_of(worker, "attn").cycle == (2, 4, 8)
    assert pool_of(worker, "attn").owned["head"] == ((1, 2),)
    assert pool_of(worker, "ssm").cycle == (0, 1, 1)


@pytest.mark.parametrize(
    ("stages", "layers", "pp", "counts"),
    [
        (vllm_stages, 80, 4, [20, 20, 20, 20]),
        (vllm_stages, 61, 2, [31, 30]),
        (vllm_stages, 61, 4, [15, 15, 16, 15]),
        (vllm_stages, 7, 4, [2, 2, 2, 1]),
        (sglang_stages, 61, 2, [30, 31]),
        (sglang_stages, 61, 4, [15, 15, 15, 16]),
        (sglang_stages, 7, 4, [1, 2, 2, 2]),
        (plain_stages, 61, 4, [15, 15, 15, 16]),
    ],
)
def test_stages_are_those_of_the_engine(stages: Any, layers: int, pp: int, counts: list[int]) -> None:
    """F20: stages are uneven, and engines don't agree which one is longer."""
    assert stages(layers, pp) == counts


def test_each_stage_keeps_its_own_layers() -> None:
    instance = build(config(DEEPSEEK), pp=4)
    kept = [[buffer.layer for buffer in pool_of(worker, "latent").buffers] for worker in instance.workers]
    assert kept == [list(range(0, 15)), list(range(15, 30)), list(range(30, 46)), list(range(46, 61))]


# --- where it lies: offsets as the engines' kernels index them ---


def test_vllm_keeps_k_and_v_of_a_head_side_by_side() -> None:
    nhd, hnd = (build(config(LLAMA), tp=4, layout=layout) for layout in ("nhd", "hnd"))  # 2 heads, pages of 16
    assert (
        address(nhd, 0, "attn", 7, "v", 3, token=5, head=1, dim=9) == ((((3 * 16 + 5) * 2 + 1) * 2 + 1) * 128 + 9) * 2
    )
    assert (
        address(hnd, 0, "attn", 7, "v", 3, token=5, head=1, dim=9) == ((((3 * 2 + 1) * 16 + 5) * 2 + 1) * 128 + 9) * 2
    )
    assert len(nhd.worker(0).regions) == 80


def test_sglang_keeps_k_and_v_in_tensors_of_their_own() -> None:
    instance = build(config(LLAMA), "sglang", tp=4)
    for part in ("k", "v"):
        assert (
            address(instance, 0, "attn", 7, part, 3, token=5, head=1, dim=9) == ((((3 * 16 + 5) * 2) + 1) * 128 + 9) * 2
        )
    assert len(instance.worker(0).regions) == 160


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_scales_of_index_keys_lie_behind_the_keys_of_the_page(engine: str) -> None:
    instance = build(config(DEEPSEEK), engine, page_tokens=64)
    assert address(instance, 0, "index", 4, "k", 2, token=10, dim=3) == 2 * 64 * 132 + 10 * 128 + 3
    assert address(instance, 0, "index_scale", 4, "k", 2, token=10) == 2 * 64 * 132 + 64 * 128 + 10 * 4
    regions = {name: pool_of(instance.worker(0), name).buffers[4].region for name in ("index", "index_scale", "latent")}
    assert regions["index"] == regions["index_scale"] != regions["latent"]


def test_vllm_keeps_both_states_of_a_layer_in_one_row() -> None:
    sd, ds = (build(config(QWEN), tp=4, layout=layout) for layout in ("nhd", "hnd"))
    conv_bytes, ssm_bytes = 2048 * 3 * 2, 8 * 128 * 128 * 4
    row = 2 * (conv_bytes + ssm_bytes)
    assert address(sd, 1, "conv", 0, "state", 2, channel=5, width=2) == row + (2 * 2048 + 5) * 2
    assert address(ds, 1, "conv", 0, "state", 2, channel=5, width=2) == row + (5 * 3 + 2) * 2
    assert (
        address(sd, 1, "ssm", 0, "state", 2, head=3, value=4, key=6) == row + conv_bytes + ((3 * 128 + 4) * 128 + 6) * 4
    )


def test_sglang_keeps_states_apart_with_the_window_innermost() -> None:
    instance = build(config(QWEN), "sglang", tp=4)
    assert address(instance, 1, "conv", 0, "state", 2, channel=5, width=2) == 2 * 2048 * 3 * 2 + (5 * 3 + 2) * 2
    assert address(instance, 1, "ssm", 0, "state", 2, head=3) == (2 * 8 + 3) * 128 * 128 * 4


# --- any two of them plan; make_plan proves that each wanted byte arrives exactly once ---


def request(source: Instance, target: Instance) -> Request:
    """Tokens TOKENS of every group, states in row 1 on the source and row 2 on the target."""

    def side(instance: Instance, row: int, turn: int) -> Side:
        tables = {}
        for worker in instance.workers:
            for pool in worker.pools:
                page_count = -(-TOKENS[1] // pool.page_tokens)
                pages = tuple(reversed(range(turn, turn + page_count)))
                state = instance.group(pool.group).growth == "state"
                tables[pool.table_name] = Table((row,) if state else pages)
        return Side(tables)

    wanted = {
        group.name: Wanted(position=TOKENS[1]) if group.growth == "state" else Wanted(tokens=TOKENS)
        for group in target.groups
    }
    return Request("kvferry-request/1", wanted, side(source, 1, 1), side(target, 2, 4))


TOKEN_BYTES = {
    LLAMA: 80 * 2 * 8 * 128 * 2,
    OSS: 36 * 2 * 8 * 64 * 2,
    DEEPSEEK: 61 * (576 * 2 + 132),
    QWEN: 12 * 2 * 2 * 256 * 2,
}
KV_HEADS = {LLAMA: 8, OSS: 8, DEEPSEEK: 1, QWEN: 2}
STATE_BYTES = {QWEN: 36 * ((2 * 16 * 128 + 32 * 16) * 3 * 2 + 32 * 16 * 128 * 4)}
# value heads an eighth as wide: proving 600 MB of state would take most of this file's time
NARROWER = {QWEN: {"linear_value_head_dim": 16}}


def expected_bytes(model: str, target: dict[str, int]) -> int:
    """What all workers of the target want together: replicas of heads are wanted once each, states per context rank."""
    copies = max(target.get("tp", 1) // KV_HEADS[model], 1)
    tokens = TOKENS[1] - TOKENS[0]
    return tokens * TOKEN_BYTES[model] * copies + STATE_BYTES.get(model, 0) * target.get("cp", 1)


PAIRS = [({"tp": 4}, {"tp": 8}), ({"tp": 8}, {"tp": 16}), ({"pp": 4}, {"pp": 2}), ({"cp": 1}, {"cp": 8})]


@pytest.mark.parametrize("pair", PAIRS, ids=["tp4-tp8", "tp8-tp16", "pp4-pp2", "cp1-cp8"])
@pytest.mark.parametrize("model", [LLAMA, OSS, DEEPSEEK, QWEN])
def test_pairs_plan(model: str, pair: tuple[dict[str, int], dict[str, int]]) -> None:
    source, target = (build(config(model, **NARROWER.get(model, {})), **shape) for shape in pair)
    plan = make_plan(source, target, request(source, target))
    assert plan.proof.complete and plan.proof.exactly_once and plan.proof.in_bounds
    assert plan.proof.bytes == expected_bytes(model, pair[1])


# the same kinds with few layers and narrow heads, so that each byte can be followed
SMALL: dict[str, dict[str, Any]] = {
    LLAMA: {"num_hidden_layers": 4, "head_dim": 2},
    OSS: {"num_hidden_layers": 4, "head_dim": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    DEEPSEEK: {"num_hidden_layers": 3, "kv_lora_rank": 3, "qk_rope_head_dim": 2},
    QWEN: {"num_hidden_layers": 4, "head_dim": 2, "linear_key_head_dim": 2, "linear_value_head_dim": 3},
}


@pytest.mark.parametrize("layouts", [("nhd", "hnd"), ("hnd", "nhd")], ids="-".join)
@pytest.mark.parametrize("engines", [("vllm", "sglang"), ("sglang", "vllm"), ("plain", "vllm")], ids="-".join)
@pytest.mark.parametrize("model", [LLAMA, OSS, DEEPSEEK, QWEN])
def test_every_byte_arrives_between_engines(model: str, engines: tuple[str, str], layouts: tuple[str, str]) -> None:
    fields = config(model, **SMALL[model])
    prefill = build(fields, engines[0], tp=4, pp=2, page_tokens=16, layout=layouts[0])
    decode = build(fields, engines[1], tp=2, page_tokens=24, layout=layouts[1], cp=2, cp_block=8)
    asked = request(prefill, decode)
    plan = make_plan(prefill, decode, asked)
    *sides, answer = (json.loads(encode_json(document)) for document in (prefill, decode, asked, plan))
    assert replay(truth(*sides), answer) == plan.proof.bytes > 0


def test_plain_cuts_heads_that_do_not_divide() -> None:
    """F16."""
    source, target = build(config(LLAMA), "plain", tp=3), build(config(LLAMA), "plain", tp=5)
    assert make_plan(source, target, request(source, target)).proof.bytes == expected_bytes(LLAMA, {})


# --- what is refused ---


def test_an_unknown_kind_is_refused_with_what_is_missing() -> None:
    with pytest.raises(DocumentError) as refused:
        build({"model_type": "rwkv", "num_hidden_layers": 24, "hidden_size": 2048})
    text = str(refused.value)
    assert "model_type 'rwkv': no known cache; for attention fields num_attention_heads, num_key_value_heads" in text
    assert "for latent attention fields kv_lora_rank, qk_rope_head_dim are missing" in text


@pytest.mark.parametrize(
    ("model", "changes", "problem"),
    [
        (LLAMA, {"num_key_value_heads": None}, "attention, but field num_key_value_heads is missing"),
        (LLAMA, {"num_hidden_layers": "80"}, "num_hidden_layers: expected an integer ≥ 1, got '80'"),
        (LLAMA, {"num_attention_heads": 63}, "hidden_size: 8192 is no multiple of 63 heads"),
        (LLAMA, {"v_head_dim": 64}, "v_head_dim: 64, but keys are 128 wide"),
        (LLAMA, {"mamba_d_state": 128}, "mamba_d_state: model_type 'llama': it means Mamba layers"),
        (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder: model_type 'llama': it means cross attention"),
        (LLAMA, {"torch_dtype": "int4"}, "dtype: expected one of float32"),
        (OSS, {"layer_types": None}, "layer_types: missing: sliding_window is set"),
        (OSS, {"layer_types": ["full_attention"] * 35}, "layer_types: expected a list of 36"),
        (OSS, {"layer_types": ["chunked_attention"] * 36}, "layer_types[0]: expected one of full_attention"),
        (OSS, {"sliding_window": None}, "sliding_window: missing"),
        (DEEPSEEK, {"qk_rope_head_dim": None}, "latent attention, but field qk_rope_head_dim is missing"),
        (DEEPSEEK, {"index_head_dim": 100}, "index_head_dim: must be a multiple of 128, got 100"),
        (DEEPSEEK, {"index_topk_freq": 4}, "index_topk_freq: model_type 'deepseek_v32': it means index keys on some"),
        (
            QWEN,
            {"linear_key_head_dim": None},
            "gated delta net with attention, but field linear_key_head_dim is missing",
        ),
        (QWEN, {"full_attention_interval": None}, "full_attention_interval: missing"),
    ],
)
def test_configs_that_say_too_little_or_something_else_are_refused(
    model: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DocumentError) as refused:
        build(config(model, **changes))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "harmless", [{"num_kv_shared_layers": 0}, {"index_topk_freq": 1}, {"is_encoder_decoder": False}]
)
def test_fields_that_say_there_is_none_of_it_are_fine(harmless: dict[str, Any]) -> None:
    assert build(config(LLAMA, **harmless)) == build(config(LLAMA))


@pytest.mark.parametrize(
    ("model", "engine", "shape", "problem"),
    [
        (LLAMA, "vllm", {"tp": 3}, "tp: vllm can't cut 8 heads over 3 ranks (group 'attn', axis 'head')"),
        (QWEN, "sglang", {"tp": 32}, "tp: sglang can't cut 16 heads over 32 ranks (group 'conv', axis 'channel')"),
        (LLAMA, "plain", {"pp": 81}, "pp: must be ≤ 80, the number of layers, got 81"),
        (LLAMA, "plain", {"cp": 0}, "cp: must be ≥ 1, got 0"),
    ],
)
def test_shapes_that_the_engine_can_not_have_are_refused(
    model: str, engine: str, shape: dict[str, int], problem: str
) -> None:
    with pytest.raises(DocumentError) as refused:
        build(config(model), engine, **shape)
    assert str(refused.value) == problem
