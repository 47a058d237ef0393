"""Which layers a worker caches, and of what kind: read from vLLM's KV cache groups, their specs and attention layers.

Nothing of vLLM is imported; its objects are read by the attributes that they have in 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import EngineError

WINDOW, STATE = "window-", "state-"
FULL, LATENT = "full", "latent"


@dataclass(frozen=True)
class State:
    """One tensor of a recurrent layer's state: its shape on this worker and data type."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CachedLayer:
    """One layer on one worker. `table` is its KV cache group, `kind` the name of its logical group.

    A latent has one head that is its own key and no value; a recurrent layer has `states` instead of heads.
    """

    name: str
    layer: int
    table: int
    kind: str
    backend: str
    heads: int
    key_dim: int
    value_dim: int
    block_tokens: int
    states: tuple[State, ...] = ()


def cached_layers(groups: Sequence[Any], attention: Mapping[str, Any]) -> tuple[CachedLayer, ...]:
    """The layers of all KV cache groups, in their order; `attention` is vLLM's attention layer by layer name.

    A layer that reuses the cache of another one is left out. EngineError where a group's kind isn't known here.
    """
    return tuple(
        _layer(name, table, _spec_of(group, name), attention[name])
        for table, group in enumerate(groups)
        for name in group.layer_names
        if getattr(attention.get(name), "kv_sharing_target_layer_name", None) is None
    )


def _spec_of(group: Any, name: str) -> Any:
    """The spec of one layer; a group whose layers differ in size holds one for each."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if each is None else each[name]


def _layer(name: str, table: int, spec: Any, attention: Any) -> CachedLayer:
    kind = kind_of(spec, name)
    if is_state(kind):
        states = tuple(State(tuple(shape), dtype_name(dtype)) for shape, dtype in zip(spec.shapes, spec.dtypes))
        return CachedLayer(name, layer_id(name), table, kind, kind, 0, 0, 0, spec.block_size, states)
    quantised = int(getattr(spec, "kv_quant_mode", 0))
    if quantised or getattr(spec, "state_content_bytes", None) is not None:
        raise EngineError(
            f"layer {name}: a quantised or packed KV cache ({spec.dtype}, mode {quantised}) can't be moved yet; "
            "start vLLM with --kv-cache-dtype auto"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise EngineError(f"layer {name}: a cache of {spec.tokens_per_state} tokens per entry can't be moved yet")
    return CachedLayer(
        name=name,
        layer=layer_id(name),
        table=table,
        kind=kind,
        backend=attention.attn_backend.get_name() if hasattr(attention, "attn_backend") else kind,
        heads=spec.num_kv_heads,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        block_tokens=spec.block_size,
    )


def kind_of(spec: Any, name: str) -> str:
    """`"full"`, `"window-N"` where only the last N tokens are kept, `"latent"`, or `"state-TYPE"` of a recurrent layer;
    EngineError for any other kind of cache.
    """
    kind = type(spec).__name__
    if kind == "FullAttentionSpec":
        return FULL
    if kind == "SlidingWindowSpec":
        return f"{WINDOW}{spec.sliding_window}"
    if kind == "MLAAttentionSpec" and spec.model_version is None and spec.cache_role.name != "INDEXER":
        return LATENT
    if kind == "MambaSpec":
        return f"{STATE}{spec.mamba_type.name.lower()}"
    raise EngineError(
        f"layer {name}: a cache of kind {kind} can't be moved yet, only full, sliding-window and latent attention and "
        "recurrent states; serve this model without KVFerryConnector"
    )


def window_of(kind: str) -> int | None:
    """How many of the last tokens a kind of cache keeps; None where it keeps all."""
    return int(kind.removeprefix(WINDOW)) if kind.startswith(WINDOW) else None


def is_state(kind: str) -> bool:
    """Whether this kind of cache is a state after so many tokens, and nothing of each token."""
    return kind.startswith(STATE)


def layer_id(name: str) -> int:
    """The global layer id in a vLLM layer name such as `model.layers.3.self_attn.attn`."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise EngineError(f"layer {name}: expected one number in its name, the layer's, got {len(numbers)}")
    return int(numbers[0])


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
