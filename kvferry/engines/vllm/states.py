"""The state of recurrent layers (Mamba, gated delta nets, short convolutions) as groups and views of tensors.

Source of the format: vLLM 0.32, `v1/kv_cache_interface.py` (`MambaSpec`: one page per block holds all of a layer's
states, one after the other, then padding) and `model_executor/layers/mamba/mamba_utils.py` (their shapes). A block is
registered as bytes, `[block, 1, 1, bytes]`. The state after n tokens is in the block that holds token n - 1.

The channels of a convolution are sections, each of which is cut over the tensor ranks: `x | B | C` of Mamba-2,
`q | k | v` of a gated delta net. So a rank owns one piece of each (F42).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from kvferry.engines.vllm.layers import STATE, CachedLayer
from kvferry.errors import EngineError
from kvferry.layout.document import DTYPE_BYTES
from kvferry.layout.presets import Segments


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts the cache. `state_groups`: groups of B and C in the model, None where not known;
    `channels_first`: a convolution's state is `[channel, width]` and not `[width, channel]`.
    """

    rank: int
    tp: int
    kv_heads: int
    state_groups: int | None = None
    channels_first: bool = False


@dataclass(frozen=True)
class StateAxes:
    """One tensor of the state: its name, its axes in the order of its dimensions, their global extents and what of
    them this worker owns.
    """

    name: str
    axes: tuple[str, ...]
    extents: dict[str, int]
    owned: dict[str, Segments]


def state_axes(cached: CachedLayer, split: Split) -> tuple[StateAxes, ...]:
    """What each tensor of a recurrent layer's state is. EngineError for a type of layer that isn't known here."""
    kind = cached.kind.removeprefix(STATE)
    shapes = [state.shape for state in cached.states]
    if kind == "mamba2" and len(shapes) == 2 and len(shapes[1]) == 3:
        heads, dim, size = shapes[1]
        return _conv(shapes[0], _x_b_c(cached, split, heads * dim, size), split), _by_head(
            "ssm", shapes[1], ("head", "dim", "state"), split
        )
    if kind == "gdn_attn" and len(shapes) == 2 and len(shapes[1]) == 3:
        heads, dim, _ = shapes[1]
        keys = (_channels(shapes[0], split) - heads * dim) // 2
        even = [(size, split.tp, split.rank) for size in (keys, keys, heads * dim)]
        return _conv(shapes[0], even, split), _by_head("ssm", shapes[1], ("head", "value", "key"), split)
    if kind == "mamba1" and len(shapes) == 2 and len(shapes[1]) == 2:
        return _conv(shapes[0], [(shapes[1][0], split.tp, split.rank)], split), _by_head(
            "ssm", shapes[1], ("channel", "state"), split
        )
    if kind == "short_conv" and len(shapes) == 1:
        return (_conv(shapes[0], [(_channels(shapes[0], split), split.tp, split.rank)], split),)
    if kind == "linear" and len(shapes) == 1 and len(shapes[0]) == 3:
        return (_by_head("ssm", shapes[0], ("head", "key", "value"), split),)
    raise EngineError(
        f"layer {cached.name}: the state of a {kind} layer with tensors of shape {[list(s) for s in shapes]} can't be "
        "moved yet; serve this model without KVFerryConnector"
    )


def state_views(tensor: Any, cached: CachedLayer) -> tuple[Any, ...]:
    """Each tensor of the state as `[block, *shape]`, over the layer's registered bytes `[block, 1, 1, bytes]`."""
    import torch

    nbytes = [prod(state.shape) * DTYPE_BYTES[state.dtype] for state in cached.states]
    if tensor.dim() != 4 or tuple(tensor.shape[1:]) != (1, 1, sum(nbytes)) or tensor.element_size() != 1:
        raise EngineError(
            f"layer {cached.name}: expected bytes [blocks, 1, 1, {sum(nbytes)}] for its state, registered was "
            f"{list(tensor.shape)} of {tensor.dtype}"
        )
    views, first = [], 0
    for state, size in zip(cached.states, nbytes):
        flat = tensor[:, 0, 0, first : first + size].view(getattr(torch, state.dtype))
        views.append(flat.unflatten(1, state.shape))
        first += size
    return tuple(views)


def _conv(shape: tuple[int, ...], sections: list[tuple[int, int, int]], split: Split) -> StateAxes:
    """`sections`: (channels here, ranks that share the section, this one among them), in order."""
    channels = _channels(shape, split)
    width = prod(shape) // channels
    owned, first = [], 0
    for size, ranks, rank in sections:
        owned.append((first + rank * size, first + (rank + 1) * size))
        first += size * ranks
    axes = ("channel", "width") if split.channels_first else ("width", "channel")
    return StateAxes("conv", axes, {"channel": first, "width": width}, {"channel": _joined(owned)})


def _x_b_c(cached: CachedLayer, split: Split, channels: int, state: int) -> list[tuple[int, int, int]]:
    """The sections of a Mamba-2 convolution. B and C of a model with one group are the same on every rank."""
    here, rest = divmod(_channels(cached.states[0].shape, split) - channels, 2 * state)
    if rest or here < 1:
        raise EngineError(f"layer {cached.name}: {cached.states[0].shape} is no convolution of x {channels} | B | C")
    if split.tp > 1 and here == 1 and split.state_groups is None:
        raise EngineError(f"layer {cached.name}: the model's config names no number of state groups (n_groups)")
    shared = split.tp > 1 and here == 1 and split.state_groups == 1
    ranks, rank = (1, 0) if shared else (split.tp, split.rank)
    return [(channels, split.tp, split.rank), (here * state, ranks, rank), (here * state, ranks, rank)]


def _by_head(name: str, shape: tuple[int, ...], axes: tuple[str, ...], split: Split) -> StateAxes:
    """A state whose first axis is cut evenly over the ranks."""
    extents = dict(zip(axes, shape))
    first = axes[0]
    extents[first] = shape[0] * split.tp
    return StateAxes(name, axes, extents, {first: ((shape[0] * split.rank, shape[0] * (split.rank + 1)),)})


def _channels(shape: tuple[int, ...], split: Split) -> int:
    if len(shape) != 2:
        raise EngineError(f"expected a convolution's state of two dimensions, got {list(shape)}")
    return shape[0] if split.channels_first else shape[1]


def _joined(segments: list[tuple[int, int]]) -> Segments:
    """Neighbours become one."""
    found: list[tuple[int, int]] = []
    for start, stop in segments:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
