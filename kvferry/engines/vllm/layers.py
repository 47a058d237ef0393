"""Which layers a worker caches, and of what kind: read from vLLM's KV cache groups, their specs and attention layers.

Nothing of vLLM is imported; its objects are read by the attributes that they have in 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import EngineError

WINDOW = "window-"


@dataclass(frozen=True)
class CachedLayer:
    """One attention layer on one worker. `table` is its KV cache group, `kind` the name of its logical group."""

    name: str
    layer: int
    table: int
    kind: str
    backend: str
    heads: int
    key_dim: int
    value_dim: int
    block_tokens: int


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
    quantised = int(getattr(spec, "kv_quant_mode", 0))
    if quantised or getattr(spec, "state_content_bytes", None) is not None:
        raise EngineError(
            f"layer {name}: a quantised or packed KV cache ({spec.dtype}, mode {quantised}) can't be moved yet; "
            "start vLLM with --kv-cache-dtype auto"
        )
    return CachedLayer(
        name=name,
        layer=layer_id(name),
        table=table,
        kind=kind_of(spec, name),
        backend=attention.attn_backend.get_name(),
        heads=spec.num_kv_heads,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        block_tokens=spec.block_size,
    )


def kind_of(spec: Any, name: str) -> str:
    """`"full"`, or `"window-N"` where only the last N tokens are kept; EngineError for any other kind of cache."""
    kind = type(spec).__name__
    if kind == "FullAttentionSpec":
        return "full"
    if kind == "SlidingWindowSpec":
        return f"{WINDOW}{spec.sliding_window}"
    raise EngineError(
        f"layer {name}: a cache of kind {kind} can't be moved yet, only full and sliding-window attention; "
        "serve this model without KVFerryConnector"
    )


def window_of(kind: str) -> int | None:
    """How many of the last tokens a kind of cache keeps; None where it keeps all."""
    return int(kind.removeprefix(WINDOW)) if kind.startswith(WINDOW) else None


def layer_id(name: str) -> int:
    """The global layer id in a vLLM layer name such as `model.layers.3.self_attn.attn`."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise EngineError(f"layer {name}: expected one number in its name, the layer's, got {len(numbers)}")
    return int(numbers[0])
