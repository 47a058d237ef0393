"""What the scheduler side asks the worker side to do in a step. Pickled by vLLM from its engine core to its workers."""

from __future__ import annotations

from dataclasses import dataclass

Blocks = tuple[tuple[int, ...], ...]
"""Block ids per KV cache group, from token 0 on; vLLM's null block, 0, stands where a group keeps nothing."""


@dataclass(frozen=True)
class SendOrder:
    """Keep the first `tokens` tokens of a finished request ready until decode has taken them."""

    request: str
    transfer: str
    tokens: int
    blocks: Blocks


@dataclass(frozen=True)
class LoadOrder:
    """Fetch tokens [start, stop) of a request into its blocks.

    Where start == stop nothing is fetched, prefill is only told that it may free its blocks, and vLLM awaits no report.
    `problem` is why it can't be done at all; then it fails at once.
    """

    request: str
    transfer: str
    source: str
    registry: str
    start: int
    stop: int
    blocks: Blocks
    problem: str = ""


@dataclass(frozen=True)
class Orders:
    sends: tuple[SendOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
