"""What a model caches, read from the fields of its Hugging Face config.json.

One table of kinds; a model's kind is known by the fields its config has, never by its name. What no kind covers is
refused: a layout that leaves a group out still reads as text, and is wrong. Where each group lies is `placement`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

from kvferry.errors import DocumentError
from kvferry.layout.document import DTYPE_BYTES, Group

Config = Mapping[str, Any]
SlabKind = Literal["kv", "latent", "index", "state"]

INDEX_SCALE_BLOCK = 128
"""Index keys are kept in float8 with one float32 scale for so many numbers, in vLLM and SGLang alike."""


@dataclass(frozen=True)
class Cached:
    """A group, the page table it uses, and how tensor parallelism cuts it.

    `sections` are the pieces of an axis that are each cut over the ranks: (units, indices per unit), one after the
    other along the axis. An axis without them is held whole. `replicas`: whether ranks may share a unit where there are
    more ranks than units.
    """

    group: Group
    table: str
    sections: Mapping[str, tuple[tuple[int, int], ...]]
    replicas: bool = True


@dataclass(frozen=True)
class Slab:
    """Groups of the same layers that an engine may keep in one page."""

    kind: SlabKind
    groups: tuple[Cached, ...]


@dataclass(frozen=True)
class Dtypes:
    """`cache`: keys, values, latents; `model`: the convolution state; `state`: the recurrent state."""

    cache: str
    model: str
    state: str


@dataclass(frozen=True)
class Kind:
    """One way to cache. A config that has the field `mark` is of this kind and must have all of `needs`."""

    name: str
    mark: str
    needs: tuple[str, ...]
    slabs: Callable[[Config, Dtypes], tuple[Slab, ...]]


def read_config(data: Union[bytes, str]) -> Config:
    """Decode a config.json. The language model's part of a multimodal one (`text_config`) goes before the rest."""
    try:
        config = json.loads(data)  # and not msgspec: config files may hold Infinity and NaN
    except (ValueError, RecursionError) as error:
        raise DocumentError("", f"no JSON: {error}") from None
    if not isinstance(config, dict):
        raise DocumentError("", f"expected an object, got {type(config).__name__}")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def model_slabs(config: Config, dtype: Union[str, None] = None) -> tuple[Slab, ...]:
    """Everything that the model caches. `dtype` is that of keys and values; default the config's, else bfloat16.

    DocumentError names the fields that are missing, or the field that means a cache of no known kind.
    """
    who = f"model_type {config.get('model_type')!r}"
    for field, meaning in FOREIGN.items():
        value = config.get(field)
        if not (value in (None, False, "", [], {}) or (type(value) is int and value <= 1)):
            raise DocumentError(field, f"{who}: it means {meaning}, which this command can't describe yet")
    for kind in KINDS:
        if config.get(kind.mark) is not None:
            # null is a value: transformers reads num_key_value_heads null as one per attention head
            missing = [field for field in kind.needs if field not in config]
            if missing:
                raise DocumentError("", f"{who}: {kind.name}, but {_fields(missing)} missing")
            return kind.slabs(config, _dtypes(config, dtype))
    lacks = [f"for {kind.name} {_fields([f for f in kind.needs if f not in config])} missing" for kind in KINDS[::-1]]
    raise DocumentError("", f"{who}: no known cache; {'; '.join(lacks)}")


def _attention(config: Config, dtypes: Dtypes) -> tuple[Slab, ...]:
    """Keys and values of every layer; full and sliding layers apart, for their ranges and page tables differ."""
    by_type = _layers_by_type(config, ("full_attention", "sliding_attention"), _all_full(config))
    if "sliding_attention" not in by_type:
        return (_kv_slab(config, dtypes, "attn", by_type["full_attention"]),)
    window = {"window": _count(config, "sliding_window")}
    slabs = [_kv_slab(config, dtypes, "sliding", by_type["sliding_attention"], window)]
    if "full_attention" in by_type:
        slabs.insert(0, _kv_slab(config, dtypes, "full", by_type["full_attention"]))
    return tuple(slabs)


def _latent_attention(config: Config, dtypes: Dtypes) -> tuple[Slab, ...]:
    """One latent per token without a head axis, so every tensor rank holds all of it; index keys where there are any.

    Index keys are float8_e4m3fn and their scales a group beside them, named by their real types instead of one opaque
    encoding: they can be told apart, so a page may hold them in any order.
    """
    everywhere = tuple(range(_count(config, "num_hidden_layers")))
    _layers_by_type(config, ("full_attention", "indexed_attention"), ["full_attention"] * len(everywhere))
    width = _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")
    latent = Group("latent", "token", dtypes.cache, everywhere, ("latent",), {"dim": width})
    slabs = [Slab("latent", (Cached(latent, "latent", {}),))]
    if config.get("index_head_dim") is not None:
        dim = _count(config, "index_head_dim")
        if dim % INDEX_SCALE_BLOCK:
            raise DocumentError("index_head_dim", f"must be a multiple of {INDEX_SCALE_BLOCK}, got {dim}")
        keys = Group("index", "token", "float8_e4m3fn", everywhere, ("k",), {"dim": dim})
        blocks = {"block": dim // INDEX_SCALE_BLOCK}
        scales = Group("index_scale", "token", "float32", everywhere, ("k",), blocks)
        slabs.append(Slab("index", (Cached(keys, "latent", {}), Cached(scales, "latent", {}))))
    return tuple(slabs)


def _gated_delta_net(config: Config, dtypes: Dtypes) -> tuple[Slab, ...]:
    """Full attention on some layers, on the others a convolution state (channels q | k | v, each cut over the ranks)
    and a recurrent state for every value head.
    """
    by_type = _layers_by_type(config, ("full_attention", "linear_attention"), _every_nth_full(config))
    key_heads, key_dim = _count(config, "linear_num_key_heads"), _count(config, "linear_key_head_dim")
    value_heads, value_dim = _count(config, "linear_num_value_heads"), _count(config, "linear_value_head_dim")
    kernel = _count(config, "linear_conv_kernel_dim", least=2)
    sections = ((key_heads, key_dim), (key_heads, key_dim), (value_heads, value_dim))
    slabs = []
    if "full_attention" in by_type:
        slabs.append(_kv_slab(config, dtypes, "attn", by_type["full_attention"]))
    if "linear_attention" in by_type:
        linear = by_type["linear_attention"]
        channels = sum(units * size for units, size in sections)
        conv = Group("conv", "state", dtypes.model, linear, ("state",), {"channel": channels, "width": kernel - 1})
        axes = {"head": value_heads, "value": value_dim, "key": key_dim}
        ssm = Group("ssm", "state", dtypes.state, linear, ("state",), axes)
        states = (
            Cached(conv, "state", {"channel": sections}, replicas=False),
            Cached(ssm, "state", {"head": ((value_heads, 1),)}, replicas=False),
        )
        slabs.append(Slab("state", states))
    return tuple(slabs)


KINDS = (
    Kind(
        "latent attention", "kv_lora_rank", ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"), _latent_attention
    ),
    Kind(
        "gated delta net with attention",
        "linear_num_value_heads",
        (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "linear_num_key_heads",
            "linear_key_head_dim",
            "linear_num_value_heads",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        ),
        _gated_delta_net,
    ),
    Kind(
        "attention",
        "num_attention_heads",
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        _attention,
    ),
)
"""Looked through in this order: a hybrid has the fields of plain attention too."""

FOREIGN: Mapping[str, str] = {
    "attention_chunk_size": "chunked attention",
    "attention_k_eq_v": "keys that are values too",
    "attn_type_list": "lightning attention",
    "block_configs": "layers of different shapes",
    "block_types": "recurrent blocks",
    "cla_share_factor": "layers that share a cache",
    "compress_ratios": "compressed attention",
    "conv_L_cache": "short convolutions",
    "cross_attention_layers": "cross attention",
    "global_head_dim": "heads of different width",
    "hybrid_layer_pattern": "layers of different shapes",
    "hybrid_override_pattern": "Mamba layers",
    "index_kpool": "pooled index keys",
    "index_topk_freq": "index keys on some layers only",
    "indexer_types": "index keys on some layers only",
    "is_encoder_decoder": "cross attention",
    "layers_block_type": "Mamba layers",
    "linear_attn_config": "Kimi delta attention",
    "mamba_d_state": "Mamba layers",
    "num_kv_shared_layers": "layers that share a cache",
    "per_layer_config": "layers of different shapes",
    "ssm_state_size": "Mamba layers",
}
"""Fields of models whose other fields look like a known kind although the cache is not."""


def _kv_slab(
    config: Config,
    dtypes: Dtypes,
    name: str,
    layers: tuple[int, ...],
    constants: Mapping[str, Union[str, float, int, bool, None]] = {},
) -> Slab:
    heads, dim = _kv_heads(config), _head_dim(config)
    group = Group(
        name, "token", dtypes.cache, layers, ("k", "v"), {"head": heads, "dim": dim}, constants=dict(constants)
    )
    return Slab("kv", (Cached(group, name, {"head": ((heads, 1),)}),))


def _kv_heads(config: Config) -> int:
    return _count(config, "num_attention_heads" if config["num_key_value_heads"] is None else "num_key_value_heads")


def _head_dim(config: Config) -> int:
    if config.get("head_dim") is None:
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        if hidden % heads:
            raise DocumentError("hidden_size", f"{hidden} is no multiple of {heads} heads, and head_dim is missing")
        dim = hidden // heads
    else:
        dim = _count(config, "head_dim")
    if config.get("v_head_dim") not in (None, dim):
        raise DocumentError("v_head_dim", f"{config['v_head_dim']!r}, but keys are {dim} wide; expected the same width")
    return dim


def _all_full(config: Config) -> list[str]:
    """The layer types of a config that lists none: all full, unless it says that some unnamed ones slide."""
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        if config.get("layer_types") is None:
            raise DocumentError(
                "layer_types", "missing: sliding_window is set, so say for each layer whether it slides"
            )
    return ["full_attention"] * _count(config, "num_hidden_layers")


def _every_nth_full(config: Config) -> list[str]:
    """The layer types of a hybrid that lists none: the last of every `full_attention_interval` layers is full."""
    if config.get("layer_types") is not None:
        return []
    interval = _count(config, "full_attention_interval")
    layers = range(_count(config, "num_hidden_layers"))
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]


def _layers_by_type(config: Config, known: tuple[str, ...], otherwise: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Layer ids of each type in `layer_types`, or in `otherwise` where the config does not list any."""
    listed = config.get("layer_types")
    types = otherwise if listed is None else listed
    count = _count(config, "num_hidden_layers")
    if not isinstance(types, Sequence) or len(types) != count:
        raise DocumentError("layer_types", f"expected a list of {count}, one for each of num_hidden_layers")
    for layer, kind in enumerate(types):
        if kind not in known:
            raise DocumentError(f"layer_types[{layer}]", f"expected one of {', '.join(known)}, got {kind!r}")
    found = {kind: tuple(layer for layer in range(count) if types[layer] == kind) for kind in known}
    return {kind: layers for kind, layers in found.items() if layers}


def _dtypes(config: Config, cache: Union[str, None]) -> Dtypes:
    model = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    # engines keep the recurrent state in float32 unless told otherwise
    state = config.get("mamba_ssm_dtype") or "float32"
    own = "torch_dtype" if config.get("torch_dtype") else "dtype"
    for field, dtype in ((own, model), ("dtype", cache or model), ("mamba_ssm_dtype", state)):
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise DocumentError(field, f"expected one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return Dtypes(cache or model, model, state)


def _count(config: Config, field: str, least: int = 1) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DocumentError(field, "missing" if value is None else f"expected an integer ≥ {least}, got {value!r}")
    # lists are made of this many layers, so a wrong number must not fill the memory
    most = 10_000 if field == "num_hidden_layers" else 2**31 - 1
    if value > most:
        raise DocumentError(field, f"expected an integer ≤ {most}, got {value}")
    return value


def _fields(names: Sequence[str]) -> str:
    return f"field {names[0]} is" if len(names) == 1 else f"fields {', '.join(names)} are"
