"""Decode's side of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from kvferry.engines.sglang.bootstrap import Home
from kvferry.engines.sglang.control import Ask, Cancel, Word, encode
from kvferry.engines.sglang.manager import KVFerryManager
from kvferry.engines.sglang.places import Pages, named_states
from kvferry.errors import EngineError, KVFerryError
from kvferry.session import Transfer


@dataclass(frozen=True)
class Prompt:
    """What SGLang knows about a request beside its pages: its tokens, and those that a sliding window reaches back."""

    tokens: int
    window: int | None


class KVFerryReceiver(CommonKVReceiver):
    """Bootstrapping until the prefill instance is known, WaitingForInput until pages are there, then Transferring.

    `prompt` is set from the decode queue, just before it hands over the pages (`plugin.tell_prompt`).
    """

    prompt: Prompt | None = None

    def __init__(self, mgr: KVFerryManager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self._home: Home | None = None
        self._transfer_id = ""
        self._transfer: Transfer | None = None
        self._taken = bootstrap_room in mgr.request_status
        self.bootstrap_infos: list[dict[str, Any]] | None = None
        self._endpoint = mgr.endpoint
        self._number = mgr.attempts.next(bootstrap_addr, bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if self._taken:
            self.conclude_state = KVPoll.Failed

    def init(self, prefill_dp_rank: int) -> None:
        if self.conclude_state is not None:
            return
        try:
            self._home = self.kv_mgr.find_home(self.bootstrap_addr, prefill_dp_rank)
        except EngineError as error:
            return self._fail(str(error))
        own = self.kv_mgr.home.instance
        self._transfer_id = f"{self._home.instance}/{self.bootstrap_room}/{own}/{self._number}"
        super().init(prefill_dp_rank)

    def _register_kv_args(self) -> bool:
        """Nothing to register: layouts are exchanged by the endpoints."""
        return self.bootstrap_infos is not None

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """The pages are allocated: offer them, and tell prefill under which id."""
        if self.conclude_state is not None:
            return
        if self._home is None or self.bootstrap_infos is None or aux_index is None:
            return self._fail(f"prefill server {self.bootstrap_addr} is not known")
        if destination == KVTransferDestination.HOST:
            if self.kv_mgr.host_endpoint is None:
                return self._fail("pages on the host are named, but SGLang listed no pool there at start")
            self._endpoint = self.kv_mgr.host_endpoint
        try:
            page, start = self.kv_mgr.kv_args.page_size, decode_prefix_len or 0
            prompt = self.prompt or Prompt(start + len(kv_indices) * page, None)
            states = named_states(self.kv_mgr.state_names, state_indices)
            pages = Pages(page, prompt.tokens, kv_indices.tolist(), start, states, aux_index)
            source_page = self.prefill_info.page_size or page
            self._transfer = self.kv_mgr.receive_pages(
                self.bootstrap_room, self._transfer_id, self._home, pages, source_page, prompt.window, self._endpoint
            )
            self._tell(Ask(self.bootstrap_room, self._transfer_id))
        except (KVFerryError, zmq.ZMQError) as error:
            self._fail(str(error))

    def _tell(self, word: Word) -> None:
        for info in self.bootstrap_infos or ():
            socket, lock = self._connect_to_bootstrap_server(info)
            with lock:
                socket.send(encode(word), zmq.NOBLOCK)

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Prefill may not have begun: then its endpoint does not hear of our abort."""
        try:
            self._tell(Cancel(self.bootstrap_room, self._transfer_id, "aborted on decode's side"))
        except zmq.ZMQError:
            pass  # it is gone

    def _fail(self, reason: str) -> None:
        self.kv_mgr.fail_room(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed

    def abort(self) -> None:
        if self._taken:
            return
        if self._transfer is not None:
            self._endpoint.abort(self._transfer, "aborted on decode's side")
        super().abort()

    @property
    def supports_host_destination(self) -> bool:
        return self.kv_mgr.host_endpoint is not None

    def is_abort_release_safe(self) -> bool:
        """A transfer that has ended touches its pages no more, wherever the writer is: bytes land in staging first."""
        return self._transfer is None or self._transfer.state != "running"

    def clear(self) -> None:
        if self._taken:
            return
        self.kv_mgr.finish(self._transfer, "given up on decode's side", self._endpoint)
        super().clear()

    def failure_exception(self) -> None:
        """Raises why. The scheduler gives the pages to others afterwards, so it ends the transfer first."""
        if self._taken:
            raise KVTransferError(self.bootstrap_room, "another request uses this bootstrap room; rooms must differ")
        super().failure_exception()
