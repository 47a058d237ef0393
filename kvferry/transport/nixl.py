"""NIXL over UCX: one agent per endpoint writes to others' staging memory and makes progress for those that write here.

Facts that this file stands on (docs/transports.md has the measurements): releasing a transfer does not cancel it, so a
write is over only when NIXL says so; without NIXL's own progress thread, which burns a core, both sides have to make
progress themselves; an agent is used by one thread at a time; descriptors are unsigned 64-bit arrays, never tuples.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar

import numpy as np

from kvferry.errors import MissingExtra, TransportError, TransportUnavailable
from kvferry.layout.address import U64, Address, Addresses
from kvferry.transport.base import Export, Fill, LinkClosed, NixlCard, Outbox
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import host_address
from kvferry.transport.staging import HEADER_BYTES, MAGIC, PROBE_OFFSET, Staging

LOG = logging.getLogger("kvferry.transport")
MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
HOST_MEMORY = "DRAM"
BUSY_S, IDLE_S = 0.0005, 0.02
"""Between two rounds of progress, while somebody has leave to write here and otherwise."""
SHORTEST_WAIT_S, LONGEST_WAIT_S = 20e-6, 1e-3
"""Between two looks at a write of ours: it starts short, since most writes have ended by then."""
LATE_WAIT_S = 0.05
CONNECT_S = 10.0
CLOSE_S = 2.0
T = TypeVar("T")
_environment = threading.Lock()


def need_nixl() -> ModuleType:
    """NIXL's Python interface. MissingExtra where it isn't installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it would tell of each agent on stdout
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingExtra("nixl is not installed; pip install --no-deps nixl-cu12")


class Agent:
    """A NIXL agent with a name of its own, used by one thread at a time. Its errors become TransportError."""

    def __init__(self, loopback: bool = True) -> None:
        api = need_nixl()
        self.name = f"kvferry-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._leftovers: deque[Callable[[Any], object]] = deque()
        with _networks(loopback):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(self.name, config)

    def call(self, what: str, use: Callable[[Any], T]) -> T:
        """`use(agent)`, alone."""
        with self._lock:
            if self._agent is None:
                raise TransportError(f"nixl: {what}: the agent is closed")
            self._tidy()
            try:
                return use(self._agent)
            except Exception as error:  # NIXL's errors have no common base
                raise TransportError(f"nixl: {what}: {type(error).__name__}: {error}") from None

    def later(self, use: Callable[[Any], object]) -> None:
        """For giving something back, with the next call, whoever makes it: this one need not wait for its turn. Where
        the agent is gone by then, so is that.
        """
        self._leftovers.append(use)

    def _tidy(self) -> None:
        while self._leftovers:
            try:
                self._leftovers.popleft()(self._agent)
            except Exception as error:
                LOG.debug("nixl: giving back: %s: %s", type(error).__name__, error)

    def register(self, memory: Bytes) -> Any:
        return self.call("register memory", lambda a: a.register_memory(_registration(a, memory)))

    def export(self, memory: Sequence[Bytes]) -> bytes:
        """What a peer needs to reach this memory, all of one kind, and no other that is registered."""

        def metadata(agent: Any) -> bytes:
            chosen = _registration(agent, *memory)
            found: bytes = agent.get_partial_agent_metadata(chosen, True, ["UCX"])
            return found

        return self.call("export", metadata)

    def close(self) -> None:
        """The end of the agent is the end of its writes over tcp; where it hangs in a call it is left to itself."""
        if not self._lock.acquire(timeout=CLOSE_S):
            LOG.warning("nixl: agent %s hangs in a call and can't be closed", self.name)
            return
        self._tidy()  # what is left holds on to the agent
        self._agent = None
        self._lock.release()


class Node:
    """This endpoint's agent: its staging memory is registered, and a thread makes progress for those that write.

    `pages` are registered too, so that bytes can leave straight from them; peers learn how to reach them only with
    `pages_open`.
    """

    def __init__(
        self, staging: Staging, pages: Sequence[Bytes] = (), pages_open: bool = False, loopback: bool = True
    ) -> None:
        self._agent = Agent(loopback)
        self._grants: set[bytes] = set()
        self._wake = threading.Event()
        self._closed = False
        memory = staging.memory
        self._buffer = staging.buffer
        for one in (memory, *pages):
            self._agent.register(one)
        metadata = self._agent.export([memory, *pages] if pages_open else [memory])
        place = Place.of(memory)
        self.card = NixlCard(self._agent.name, metadata, place.address, place.memory, place.device)
        self._thread = threading.Thread(target=self._progress, name="kvferry-nixl", daemon=True)
        self._thread.start()

    def grant(self, grant: bytes) -> None:
        self._grants.add(grant)
        self._wake.set()

    def revoke(self, grant: bytes) -> None:
        self._grants.discard(grant)

    def connect(self, export: Export, card: NixlCard) -> NixlPeer:
        return NixlPeer(self._agent, export, card, self._buffer)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._agent.close()

    def _progress(self) -> None:
        while not self._closed:
            try:
                self._agent.call("progress", lambda agent: agent.get_new_notifs())
            except TransportError as error:
                LOG.warning("%s", error)
                time.sleep(IDLE_S)
            if self._grants:
                time.sleep(BUSY_S)
            else:
                self._wake.wait(IDLE_S)
                self._wake.clear()


class NixlPeer:
    """A target's staging, written by our agent."""

    name = "nixl"
    reason = ""
    moves = True

    def __init__(self, agent: Agent, export: Export, card: NixlCard, buffer: Callable[[int], Bytes]) -> None:
        self._agent, self._slots, self._card = agent, export.slots, card
        if not card.address.spans(HEADER_BYTES + export.slots.total_bytes):
            raise TransportUnavailable(f"the staging at {card.address} passes 2**64")
        self._outbox = RegisteredOutbox(agent, export.slots.slot_bytes, buffer)
        self._closed = False
        try:
            found = agent.call("add the peer", lambda a: a.add_remote_agent(card.metadata))
            if _text(found) != card.agent:
                raise TransportUnavailable(f"the metadata is of agent {_text(found)!r}, expected {card.agent!r}")
            self._probe(export.key)
        except TransportError as error:
            self.close()
            raise TransportUnavailable(str(error)) from None

    def write(self, address: Address, grant: bytes, nbytes: int, fill: Fill, timeout_s: float) -> None:
        remote = self.slot_at(address, nbytes)
        deadline_s = time.monotonic() + timeout_s
        self._check_open()
        with self._outbox.filled(nbytes, fill) as data:
            self._post("WRITE", *_one(data, remote), timeout_s, deadline_s, Place.of(data).kind)

    def move(self, source: Addresses, target: Addresses, lengths: U64, timeout_s: float) -> None:
        self._check_open()
        self._post("WRITE", source, target, lengths, timeout_s, time.monotonic() + timeout_s)

    def slot_at(self, address: Address, nbytes: int) -> Address:
        slot, offset = self._slots.place(address, nbytes)
        return self._card.address.plus(HEADER_BYTES + slot * self._slots.stride_bytes + offset)

    def close(self) -> None:
        """No new write begins. One that is under way goes on until NIXL says that it has ended."""
        if not self._closed:
            self._closed = True
            self._outbox.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed("the connection is closed")

    def _probe(self, key: bytes) -> None:
        """Read the key there and write it beside, as a first sign of life in both directions."""
        deadline_s = time.monotonic() + CONNECT_S
        signature = MAGIC + key
        data = np.zeros(len(signature), np.uint8)  # on the host, wherever the other memory is
        registered = self._agent.register(data)
        try:
            self._post("READ", *_one(data, self._card.address), CONNECT_S, deadline_s)
            if data.tobytes() != signature:
                raise TransportUnavailable("the memory found there has another key")
            beside = self._card.address.plus(PROBE_OFFSET)
            self._post("WRITE", *_one(data[len(MAGIC) :], beside), CONNECT_S, deadline_s)
        finally:
            self._agent.later(_Deregister(registered, data))

    def _post(
        self,
        operation: str,
        here: Addresses,
        there: Addresses,
        lengths: U64,
        timeout_s: float,
        deadline_s: float,
        kind: tuple[str, int] = (HOST_MEMORY, 0),
    ) -> None:
        """`kind`: memory and device of `here`."""
        some = np.flatnonzero(lengths)
        if not len(some):
            return
        sides = (here, *kind), (there, self._card.memory, self._card.device)
        lists = [(_descriptors(at.take(some), lengths[some], device), memory) for at, memory, device in sides]
        what = f"{operation.lower()} of {int(lengths.sum(dtype=np.uint64))} bytes in {len(some)} runs"

        def post(agent: Any) -> tuple[Any, str]:
            local, remote = (agent.get_xfer_descs(rows, memory) for rows, memory in lists)
            handle = agent.initialize_xfer(operation, local, remote, self._card.agent)
            return handle, agent.transfer(handle)

        handle, state = self._agent.call(what, post)
        try:
            self._finish(handle, state, what, timeout_s, deadline_s)
        finally:
            self._agent.later(lambda agent: agent.release_xfer_handle(handle))

    def _finish(self, handle: Any, state: str, what: str, timeout_s: float, deadline_s: float) -> None:
        """Wait for the end, also of a write that is late: until then it may still touch the target."""
        wait_s = SHORTEST_WAIT_S
        late = False
        while state == "PROC":
            time.sleep(wait_s)
            late = late or time.monotonic() > deadline_s
            wait_s = LATE_WAIT_S if late else min(2 * wait_s, LONGEST_WAIT_S)
            state = self._agent.call(what, lambda agent: agent.check_xfer_state(handle))
        if state != "DONE":
            raise TransportError(f"nixl: {what}: ended as {state}")
        if late:
            raise TransportError(f"nixl: {what}: not done within {timeout_s:g} s")


@dataclass(frozen=True)
class _Deregister:
    """Keeps the memory alive until it is done."""

    registered: Any
    memory: Bytes

    def __call__(self, agent: Any) -> None:
        agent.deregister_memory(self.registered)


class RegisteredOutbox(Outbox):
    """Buffers that NIXL knows: registered when they are made, given back when the outbox is closed."""

    def __init__(self, agent: Agent, nbytes: int, buffer: Callable[[int], Bytes]) -> None:
        super().__init__(nbytes)
        self._agent, self._buffer = agent, buffer
        self._registered: dict[int, Any] = {}  # by address

    def _make(self) -> Bytes:
        buffer = self._buffer(self._nbytes)
        self._registered[Place.of(buffer).address.value] = self._agent.register(buffer)
        return buffer

    def _drop(self, buffer: Bytes) -> None:
        registered = self._registered.pop(Place.of(buffer).address.value)
        self._agent.later(_Deregister(registered, buffer))


@dataclass(frozen=True)
class Place:
    """Where bytes are, in NIXL's words."""

    address: Address
    memory: Literal["DRAM", "VRAM"]
    device: int

    @property
    def kind(self) -> tuple[str, int]:
        return self.memory, self.device

    @staticmethod
    def of(memory: Any) -> Place:
        """Of a NumPy array or a torch tensor."""
        if isinstance(memory, np.ndarray):
            return Place(host_address(memory), "DRAM", 0)
        on_host = memory.device.type == "cpu"
        return Place(Address(memory.data_ptr()), "DRAM" if on_host else "VRAM", memory.device.index or 0)


def _registration(agent: Any, *memory: Bytes) -> Any:
    """NIXL's list of memory that is all of one kind."""
    places = [Place.of(one) for one in memory]
    rows = [(place.address.value, one.nbytes, place.device, "") for place, one in zip(places, memory)]
    return agent.get_reg_descs(rows, places[0].memory)


def _descriptors(addresses: Addresses, lengths: U64, device: int) -> U64:
    """One row of (address, bytes, device) per run: contiguous uint64, whatever the addresses are."""
    return np.ascontiguousarray(np.stack([addresses.u64, lengths, np.full_like(lengths, device)], axis=1))


def _one(data: Bytes, remote: Address) -> tuple[Addresses, Addresses, U64]:
    return Addresses([Place.of(data).address]), Addresses([remote]), np.array([data.nbytes], np.uint64)


def _text(name: bytes | str) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


@contextmanager
def _networks(loopback: bool) -> Iterator[None]:
    """UCX listens on every network unless it is told; an endpoint on loopback stays there, unless the user says where.

    It reads its environment when an agent is made, and only then.
    """
    with _environment:
        if not loopback or "UCX_NET_DEVICES" in os.environ:
            yield
            return
        os.environ["UCX_NET_DEVICES"] = "lo"
        try:
            yield
        finally:
            del os.environ["UCX_NET_DEVICES"]
