"""The scheduler side with made-up requests: what is promised to vLLM, ordered of the workers, and answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm.layers import cached_layers, kind_of, layer_id
from kvferry.engines.vllm.options import Options, read_options
from kvferry.engines.vllm.orders import LoadOrder, SendOrder
from kvferry.engines.vllm.params import MAX_ID, make_params, read_handle, transfer_id
from kvferry.engines.vllm.scheduler import BlockTable, SchedulerSide, block_tables
from kvferry.errors import DocumentError, EngineError

REGISTRY = "http://127.0.0.1:7000"
PARAMS = make_params(engine="p", request="r-1", registry=REGISTRY, tokens=100, blocks=[[3, 1, 2, 9]], tp=2, pp=1)


@dataclass
class Request:
    request_id: str = "d-1"
    num_prompt_tokens: int = 100
    num_computed_tokens: int = 100
    kv_transfer_params: dict[str, Any] | None = field(default_factory=lambda: dict(PARAMS))
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_LENGTH_CAPPED"))


def side(*tables: BlockTable) -> SchedulerSide:
    made = SchedulerSide("p", tables or (BlockTable("full", 32),), 1, 1)
    made.registry = REGISTRY
    return made


# prefill


def test_a_finished_prompt_keeps_its_blocks_and_says_where_they_are() -> None:
    prefill = side()
    request = Request("r-1", kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    keep, answer = prefill.finished(request, ((3, 1, 2, 9),))
    assert keep
    assert answer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "r-1",
        "remote_block_ids": [[3, 1, 2, 9]],
        "remote_host": "127.0.0.1",
        "remote_port": 7000,
        "remote_num_tokens": 100,
        "tp_size": 1,
        "pp_size": 1,
    }
    assert prefill.take().sends == (SendOrder("r-1", "p/r-1", 100, ((3, 1, 2, 9),)),)
    assert prefill.take().sends == ()


def test_tokens_of_an_answer_are_not_offered() -> None:
    prefill = side()
    prefill.finished(Request(num_computed_tokens=104, kv_transfer_params={"do_remote_decode": True}), ((3, 1, 2, 9),))
    assert prefill.take().sends[0].tokens == 100


@pytest.mark.parametrize(
    "request_",
    [
        Request(kv_transfer_params=None),
        Request(kv_transfer_params={}),
        Request(kv_transfer_params={"do_remote_decode": True}, status=SimpleNamespace(name="FINISHED_ABORTED")),
    ],
)
def test_other_ends_free_their_blocks_at_once(request_: Request) -> None:
    prefill = side()
    assert prefill.finished(request_, ((3, 1),)) == (False, None)
    assert prefill.take().sends == ()


@pytest.mark.parametrize(("tokens", "kept"), [(100, True), (96 + 63, False), (96 + 64, True)])
def test_a_window_that_vllm_has_cut_too_short_is_not_offered(tokens: int, kept: bool) -> None:
    """Decode computes token N-1 again, which sees tokens from N-64 on; vLLM keeps tokens from N-63 on, in whole blocks.

    Of 159 tokens it frees 96, and token 95 is needed.
    """
    prefill = side(BlockTable("full", 32), BlockTable("window-64", 32))
    freed = (tokens - 64 + 1) // 32
    blocks = tuple(range(1, 1 + -(-tokens // 32)))
    request = Request(
        num_prompt_tokens=tokens, num_computed_tokens=tokens, kv_transfer_params={"do_remote_decode": True}
    )
    keep, _ = prefill.finished(request, (blocks, (0,) * freed + blocks[freed:]))
    assert keep == kept


# decode


def test_all_but_the_last_token_are_fetched_and_only_once() -> None:
    decode, request = side(), Request()
    assert decode.matched(request, 0) == (99, True)
    assert decode.matched(request, 64) == (35, True)
    decode.allocated(request, ((5, 6, 7, 8),), 35)
    (load,) = decode.take().loads
    assert load == LoadOrder("d-1", "p/r-1", "p", REGISTRY, 64, 99, ((5, 6, 7, 8),))
    # vLLM asks again when the load has ended, and after a preemption
    decode.allocated(request, ((5, 6, 7, 8),), 0)
    assert decode.matched(request, 0) == (0, False)
    assert decode.take().loads == ()


def test_a_full_prefix_hit_fetches_nothing_and_still_releases_prefill() -> None:
    decode, request = side(), Request(num_prompt_tokens=97)
    assert decode.matched(request, 96) == (0, False)
    decode.allocated(request, ((5, 6, 7, 8),), 0)
    (load,) = decode.take().loads
    assert (load.transfer, load.start, load.stop) == ("p/r-1", 0, 0)


def test_a_request_that_never_got_blocks_releases_prefill() -> None:
    decode, request = side(), Request(status=SimpleNamespace(name="FINISHED_ABORTED"))
    assert decode.finished(request, ((),)) == (False, None)
    (load,) = decode.take().loads
    assert (load.transfer, load.start, load.stop) == ("p/r-1", 0, 0)


def test_a_prompt_longer_than_what_prefill_has_is_fetched_as_far_as_it_goes() -> None:
    assert side().matched(Request(num_prompt_tokens=300), 0) == (100, True)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": "7000"}, "remote_port"),
        ({"remote_host": "a/b"}, "remote_host"),
        ({"remote_num_tokens": -1}, "remote_num_tokens"),
        ({"remote_request_id": ["r"]}, "remote_request_id"),
    ],
)
def test_bad_parameters_fail_the_load_of_that_request_only(changed: dict[str, Any], path: str) -> None:
    decode = side()
    request = Request(kv_transfer_params={**PARAMS, **changed})
    count, later = decode.matched(request, 32)
    assert (count, later) == (67, True)
    decode.allocated(request, ((5, 6, 7, 8),), count)
    (load,) = decode.take().loads
    assert load.problem.startswith(f"kv_transfer_params.{path}: ")
    assert (load.start, load.stop) == (32, 99)
    with pytest.raises(DocumentError, match=path):
        read_handle({**PARAMS, **changed})


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(DocumentError, match=r"kv_transfer_params: .*remote_host.*pass on what prefill answered"):
        read_handle({name: value for name, value in PARAMS.items() if name != "remote_host"})


def test_block_ids_of_a_client_are_never_read() -> None:
    assert read_handle({**PARAMS, "remote_block_ids": [[1 << 40]]}) == read_handle(PARAMS)


def test_a_long_request_id_still_makes_a_transfer_id() -> None:
    names = {transfer_id("p", "x" * 400), transfer_id("p", "x" * 401), transfer_id("p", "x" * 10)}
    assert len(names) == 3
    assert all(len(name) <= MAX_ID for name in names)


# offer-first


def test_a_router_that_asks_both_sides_at_once_names_the_request_itself() -> None:
    prefill, decode = side(), side()
    asked = {"do_remote_decode": True, "transfer_id": "both-7"}
    _, answer = prefill.finished(Request("r-1", kv_transfer_params=asked), ((3, 1, 2, 9),))
    assert answer is not None and answer["remote_request_id"] == "both-7"
    (send,) = prefill.take().sends
    told = {name: PARAMS[name] for name in ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port")}
    request = Request(kv_transfer_params={**told, "remote_request_id": "both-7"})
    assert decode.matched(request, 0) == (99, True)
    decode.allocated(request, ((5, 6, 7, 8),), 99)
    (load,) = decode.take().loads
    assert (load.transfer, load.stop, load.problem) == (send.transfer, 99, "") and send.request == "r-1"


@pytest.mark.parametrize("name", ["", 7, ["x"], "x" * 70_000])
def test_a_name_that_is_none_is_not_offered(name: Any) -> None:
    prefill = side()
    keep, answer = prefill.finished(
        Request("r-1", kv_transfer_params={"do_remote_decode": True, "transfer_id": name}), ((3, 1, 2, 9),)
    )
    assert (keep, answer) == (False, None) and prefill.take().sends == ()


# recurrent states

HYBRID = (BlockTable("full", 32), BlockTable("state-mamba2", 32))


@dataclass
class Prompt:
    """As much of a vLLM request as is changed before it runs."""

    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any]
    max_tokens: int = 16
    skips_cache: bool = False

    def __post_init__(self) -> None:
        self._all_token_ids, self.num_prompt_tokens = list(self.prompt_token_ids), len(self.prompt_token_ids)

    def get_skip_reading_prefix_cache(self) -> bool:
        return self.skips_cache


def test_prefill_leaves_the_last_token_of_a_prompt_out_where_there_are_states() -> None:
    asked = {"do_remote_decode": True}
    typed = [7, 8, 9]
    request = Prompt(typed, dict(asked))
    for _ in range(2):  # once, however often it is asked
        side(*HYBRID).new_request(request)
    assert (request.prompt_token_ids, request._all_token_ids, request.num_prompt_tokens) == ([7, 8], [7, 8], 2)
    assert request.max_tokens == 1 and typed == [7, 8, 9]
    for other in (Prompt([7], dict(asked)), Prompt([7, 8], {}), Prompt([7, 8], dict(asked), skips_cache=True)):
        side(*HYBRID).new_request(other)
        assert other.num_prompt_tokens == len(other.prompt_token_ids) and other.max_tokens == 16
    whole = Prompt([7, 8], dict(asked))
    side().new_request(whole)
    assert whole.num_prompt_tokens == 2


def test_a_state_that_is_gone_or_of_the_whole_prompt_is_not_offered() -> None:
    without = {"do_remote_decode": True, "_kvferry_without_last": True}
    blocks = (3, 1, 2, 9)
    for params, states, kept in (
        (without, (0, 0, 0, 5), True),
        (without, (0, 0, 5, 0), False),
        (without, (5,), False),
        ({"do_remote_decode": True}, (0, 0, 0, 5), False),
    ):
        keep, _ = side(*HYBRID).finished(Request(kv_transfer_params=dict(params)), (blocks, states))
        assert keep == kept


def test_a_state_after_other_tokens_than_decode_needs_is_a_failed_load() -> None:
    decode = side(*HYBRID)
    assert decode.matched(Request(num_prompt_tokens=101), 0) == (100, True)
    for tokens in (100, 102):
        request = Request(num_prompt_tokens=tokens)
        count, _ = decode.matched(request, 0)
        assert count == tokens - 1
        decode.allocated(request, ((5, 6, 7, 8), (0, 0, 0, 9)), count)
        (load,) = decode.take().loads
        assert load.problem.startswith("kv_transfer_params.remote_num_tokens: prefill's states are after 100 tokens, ")


# options and specs


def test_options_have_defaults() -> None:
    assert read_options({}) == Options()
    assert read_options({"lease_s": 5, "transport": "tcp", "registry": REGISTRY}).lease_s == 5.0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"slots": 0}, "kv_connector_extra_config.slots: expected `int` >= 1"),
        ({"slots": "8"}, "kv_connector_extra_config.slots: expected `int`, got `str`"),
        ({"slot_bytes": 12}, "kv_connector_extra_config.slot_bytes: expected `int` >= 4096"),
        ({"lease_s": 0}, "kv_connector_extra_config.lease_s: expected `float` > 0"),
        ({"timeout_s": 1e9}, "kv_connector_extra_config.timeout_s: expected `float` <= 1000000"),
        ({"leases": 4}, "kv_connector_extra_config: object contains unknown field `leases`"),
        ({"registry": "127.0.0.1:7000"}, "kv_connector_extra_config.registry: registry: expected a URL"),
        ({"transport": 1}, "kv_connector_extra_config.transport: expected `str`, got `int`"),
    ],
)
def test_a_wrong_option_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError) as raised:
        read_options(extra)
    assert str(raised.value).startswith(message.replace("`", ""))


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8, "dtype": "bfloat16"}


def group(spec: Any, *names: str) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(names))


def attention(target: str | None = None) -> Any:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    return SimpleNamespace(kv_sharing_target_layer_name=target, attn_backend=backend)


def test_layers_of_groups() -> None:
    groups = [
        group(FullAttentionSpec(**SIZES), "model.layers.0.self_attn.attn"),
        group(SlidingWindowSpec(sliding_window=16, **SIZES), "model.layers.1.self_attn.attn", "model.layers.2.attn"),
    ]
    layers = {name: attention() for one in groups for name in one.layer_names}
    found = cached_layers(groups, layers)
    assert [(c.layer, c.table, c.kind, c.backend) for c in found] == [
        (0, 0, "full", "CPU_ATTN"),
        (1, 1, "window-16", "CPU_ATTN"),
        (2, 1, "window-16", "CPU_ATTN"),
    ]
    assert block_tables(groups) == (BlockTable("full", 32), BlockTable("window-16", 32))


def test_states_and_latents_of_groups() -> None:
    shapes, dtypes = ((3, 576), (16, 32, 16)), ("torch.bfloat16", "torch.float32")
    state = MambaSpec(shapes=shapes, dtypes=dtypes, mamba_type=SimpleNamespace(name="MAMBA2"), block_size=128)
    latent = MLAAttentionSpec(
        model_version=None, cache_role=SimpleNamespace(name="SPARSE"), **{**SIZES, "num_kv_heads": 1, "head_size_v": 0}
    )
    groups = [group(state, "model.layers.0.mixer"), group(latent, "model.layers.1.self_attn.attn")]
    found = cached_layers(groups, {name: attention() for one in groups for name in one.layer_names})
    assert [(c.kind, c.heads, c.value_dim) for c in found] == [("state-mamba2", 0, 0), ("latent", 1, 0)]
    assert [(one.shape, one.dtype) for one in found[0].states] == [((3, 576), "bfloat16"), ((16, 32, 16), "float32")]
    assert block_tables(groups) == (BlockTable("state-mamba2", 128), BlockTable("latent", 32))


def test_a_layer_that_shares_another_ones_cache_is_left_out() -> None:
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    shared = {names[0]: attention(), names[1]: attention(target=names[0])}
    assert [c.layer for c in cached_layers([group(FullAttentionSpec(**SIZES), *names)], shared)] == [0]


def test_caches_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"model\.layers\.0\.attn: a cache of kind ChunkedLocalAttentionSpec"):
        kind_of(ChunkedLocalAttentionSpec(), "model.layers.0.attn")
    index = MLAAttentionSpec(model_version=None, cache_role=SimpleNamespace(name="INDEXER"))
    with pytest.raises(EngineError, match="a cache of kind MLAAttentionSpec"):
        kind_of(index, "model.layers.0.indexer")
    quantised = FullAttentionSpec(kv_quant_mode=1, **SIZES)
    with pytest.raises(EngineError, match="quantised"):
        cached_layers([group(quantised, "model.layers.0.attn")], {"model.layers.0.attn": attention()})


def test_a_layer_name_has_one_number() -> None:
    assert layer_id("model.layers.17.self_attn.attn") == 17
    with pytest.raises(EngineError, match="one number"):
        layer_id("model.layers.1.self_attn.0.attn")
