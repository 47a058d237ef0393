"""The scheduler side: what vLLM asks about requests, turned into orders for the workers. No vLLM is imported here.

Ready-first: prefill finishes, keeps its blocks and says in its answer where they are; decode takes them by that. The
last token of a prompt is not moved, since decode computes it again for the first token of the answer. A recurrent state
can't be taken back by a token, so prefill of such a model leaves the last token out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.engines.vllm.layers import is_state, kind_of, window_of
from kvferry.engines.vllm.orders import Blocks, LoadOrder, Orders, SendOrder
from kvferry.engines.vllm.params import Handle, make_params, read_handle, read_name, transfer_id
from kvferry.errors import DocumentError

LOG = logging.getLogger("vllm.kvferry")
FINISHED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""How a prompt ends well; after any other end its blocks may be incomplete."""


WITHOUT_LAST = "_kvferry_without_last"
"""Marks a request on prefill whose last token was left out."""


@dataclass(frozen=True)
class BlockTable:
    """One KV cache group of vLLM: what kind of cache uses its blocks, and how many tokens a block holds."""

    kind: str
    block_tokens: int

    def state_block(self, tokens: int) -> int:
        """Which of a request's blocks holds the state after `tokens` tokens."""
        return (tokens - 1) // self.block_tokens

    def first_token(self, blocks: Sequence[int]) -> int:
        """The first token that these blocks hold. A window's null blocks (0) all come first."""
        empty = next((index for index, block in enumerate(blocks) if block), len(blocks))
        return empty * self.block_tokens


def block_tables(groups: Sequence[Any]) -> tuple[BlockTable, ...]:
    """One for each of vLLM's KV cache groups."""
    tables = []
    for group in groups:
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        spec = group.kv_cache_spec if each is None else next(iter(each.values()))
        tables.append(BlockTable(kind_of(spec, ", ".join(group.layer_names[:1])), spec.block_size))
    return tuple(tables)


class SchedulerSide:
    """Orders gather between two steps of the scheduler; `take` hands them out. Called from one thread."""

    def __init__(self, engine: str, tables: Sequence[BlockTable], tp: int, pp: int) -> None:
        self._engine, self._tables, self._tp, self._pp = engine, tuple(tables), tp, pp
        self._has_states = any(is_state(table.kind) for table in tables)
        self.registry = ""
        """Where our workers are registered; known as soon as they have started."""
        self._sends: list[SendOrder] = []
        self._loads: list[LoadOrder] = []

    def new_request(self, request: Any) -> None:
        """A prompt came. On prefill a model with recurrent states computes all but its last token."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and self._has_states:
            leave_last_token(request)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """(tokens that can be fetched beyond the `computed` ones, whether that happens between steps).

        Parameters that can't be used count as a cache that then fails to arrive: vLLM has one policy for all failures.
        """
        if not _wants_prefill(request):
            return 0, False
        handle, _ = self._read(request)
        count = _stop(request, handle) - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Blocks, external: int) -> None:
        """vLLM has allocated blocks for what `matched` promised, or has found everything in its own prefix cache."""
        if not _wants_prefill(request):
            return
        handle, problem = self._read(request)
        stop = _stop(request, handle) if external else 0
        self._load(request, handle, problem, stop - external, stop, blocks)

    def finished(self, request: Any, blocks: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """(whether the blocks stay ours until the workers report the request as sent, what to answer)."""
        if _wants_prefill(request):
            handle, problem = self._read(request)  # it ended before it got blocks, but prefill's still wait for it
            self._load(request, handle, problem, 0, 0, ())
            return False, None
        params = request.kv_transfer_params or {}
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if not params.get("do_remote_decode") or request.status.name not in FINISHED or not self._holds(blocks, tokens):
            return False, None
        if self._has_states and not params.get(WITHOUT_LAST):
            return False, None
        try:
            name = read_name(params, request.request_id)
        except DocumentError as error:
            LOG.error("kvferry: request %s: %s; its cache is not offered", request.request_id, error)
            return False, None
        transfer = transfer_id(self._engine, name)
        self._sends.append(SendOrder(request.request_id, transfer, tokens, blocks))
        answer = make_params(
            engine=self._engine,
            request=name,
            registry=self.registry,
            tokens=tokens,
            blocks=blocks,
            tp=self._tp,
            pp=self._pp,
        )
        return True, answer

    def take(self) -> Orders:
        orders = Orders(tuple(self._sends), tuple(self._loads))
        self._sends, self._loads = [], []
        return orders

    def _holds(self, blocks: Blocks, tokens: int) -> bool:
        """Whether these blocks hold what decode will ask for, up to the last token but one.

        vLLM frees a window's blocks one token too early for that when a block ends just there; decode then computes the
        prompt itself.
        """
        if not any(blocks):
            return False
        for table, held in zip(self._tables, blocks):
            if is_state(table.kind):
                index = table.state_block(tokens)
                if index >= len(held) or not held[index]:
                    return False
            window = window_of(table.kind)
            if window is not None and table.first_token(held) > max(0, tokens - window):
                return False
        return True

    def _read(self, request: Any) -> tuple[Handle | None, str]:
        """What the router passed on, or why it can't be used."""
        try:
            handle = read_handle(request.kv_transfer_params)
        except DocumentError as error:
            return None, str(error)
        needed = request.num_prompt_tokens - 1
        if self._has_states and handle.tokens not in (needed, None):
            field = "kv_transfer_params.remote_num_tokens"
            return None, f"{field}: prefill's states are after {handle.tokens} tokens, those after {needed} are needed"
        return handle, ""

    def _load(self, request: Any, handle: Handle | None, problem: str, start: int, stop: int, blocks: Blocks) -> None:
        request.kv_transfer_params["do_remote_prefill"] = False  # once per request, also where it is preempted later
        if handle is not None:
            order = LoadOrder(request.request_id, handle.transfer, handle.source, handle.registry, start, stop, blocks)
            self._loads.append(order)
        elif start < stop:
            self._loads.append(LoadOrder(request.request_id, "", "", "", start, stop, blocks, problem))
        else:
            LOG.warning("kvferry: request %s: %s; nothing had to be fetched", request.request_id, problem)


def _wants_prefill(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))


def leave_last_token(request: Any) -> None:
    """Take the last token off the prompt of a vLLM request that has not been scheduled yet, once.

    Prompts of one token, of embeddings, or whose log probabilities are asked for stay whole, and decode computes them.
    """
    params = request.kv_transfer_params
    ids = request.prompt_token_ids
    if params.get(WITHOUT_LAST) or not ids or len(ids) < 2 or request.get_skip_reading_prefix_cache():
        return
    params[WITHOUT_LAST] = True
    request.prompt_token_ids = ids[:-1]  # its list may be the client's too
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def _stop(request: Any, handle: Handle | None) -> int:
    """The end of what is fetched: all but the last prompt token, or as much as prefill has."""
    last = request.num_prompt_tokens - 1
    return int(last if handle is None or handle.tokens is None else min(last, handle.tokens))
