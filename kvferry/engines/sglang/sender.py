"""Prefill's side of one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from kvferry.engines.sglang.control import Ask
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.places import Pages, named_states
from kvferry.errors import KVFerryError
from kvferry.session import Transfer


class KVFerrySender(CommonKVSender):
    """Bootstrapping until decode asks, WaitingForInput until the first chunk, then Transferring.

    The number of tokens that decode has already is no concern of prefill: all pages are sent, and decode takes from
    them what it lacks.
    """

    def __init__(
        self,
        mgr: KVFerryManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._pages: list[int] = []
        self._tokens = 0
        self._transfer: Transfer | None = None
        self._taken = bootstrap_room in mgr.request_status
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if self._taken:
            self.conclude_state = KVPoll.Failed
        else:
            mgr.follow(bootstrap_room)  # decode may have asked already

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Decode has pages and prefill is about to compute."""
        super().init(num_kv_indices, aux_index)
        word = self.kv_mgr.rooms.last(self.bootstrap_room)
        if not isinstance(word, Ask):
            self.kv_mgr.fail_room(self.bootstrap_room, "decode no longer asks for this request")
            return
        try:
            self._transfer = self.kv_mgr.begin_send(self.bootstrap_room, word.transfer)
        except KVFerryError as error:
            self.kv_mgr.fail_room(self.bootstrap_room, str(error))

    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """One chunk's page ids; it moves while the next is computed. The metadata row is complete with the last."""
        # SGLang may hand over a chunk before the device has computed it, with an event for its end
        event: Any = self._early_send_wait_event
        self._early_send_wait_event: Any = None
        if self.conclude_state is not None or self._transfer is None:
            return
        page = self.kv_mgr.kv_args.page_size
        self._pages += kv_indices.tolist()
        self._tokens += len(kv_indices) * page if num_kv_tokens is None else num_kv_tokens
        last = len(self._pages) >= self.num_kv_indices
        states = named_states(self.kv_mgr.state_names, state_indices) if last else {}
        row = self.aux_index if last else None
        pages = Pages(page, self._tokens, tuple(self._pages), 0, states, row)
        fence = event.synchronize if event is not None else None
        self.kv_mgr.send_more(self.bootstrap_room, self._transfer, pages, fence)

    def get_transfer_metric(self) -> KVTransferMetric:
        report = self._transfer.report if self._transfer is not None else None
        if report is None:
            return KVTransferMetric()
        return KVTransferMetric(transfer_latency_s=report.seconds, transfer_total_bytes=report.bytes)

    def abort(self) -> None:
        if self._taken:
            return
        # some of the scheduler's ways give the pages to others right after this
        self.kv_mgr.finish(self._transfer, "aborted on prefill's side")
        super().abort()

    def clear(self) -> None:
        if self._taken:
            return
        self.kv_mgr.finish(self._transfer, "given up on prefill's side")
        super().clear()
        self.kv_mgr.rooms.forget(self.bootstrap_room)

    def failure_exception(self) -> None:
        """Raises why. The scheduler gives the pages to others afterwards, so it ends the transfer first."""
        if self._taken:
            raise KVTransferError(self.bootstrap_room, "another request uses this bootstrap room; rooms must differ")
        super().failure_exception()
