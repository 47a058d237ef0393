"""The endpoint of one worker: the thin shell of sockets and threads around the session's state machine.

One control thread owns the sockets and the machine. What takes time is done by `Jobs`, on other threads.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import zmq
from msgspec.structs import replace

from kvferry.errors import (
    DocumentError,
    IncompatibleError,
    KVFerryError,
    TransferAborted,
    TransferRefused,
    TransferTimeout,
    Where,
)
from kvferry.layout.address import Address
from kvferry.layout.document import Instance
from kvferry.layout.request import Side, Wanted
from kvferry.observe.observer import Observer
from kvferry.observe.outlet import Outlet, tells
from kvferry.observe.records import encode_log
from kvferry.observe.snapshot import Snapshots
from kvferry.session.choices import GATHER, Gather, Landing, check_landing, check_worker, own_registry, registry_at
from kvferry.session.clock import now_s
from kvferry.session.deaths import Deaths, this_process
from kvferry.session.events import (
    AbortCall,
    Action,
    Allow,
    CancelWrites,
    Close,
    Died,
    DrainCall,
    Ended,
    Event,
    ExtendCall,
    Fence,
    Lookup,
    Note,
    Open,
    Prepare,
    ReceiveCall,
    Received,
    Released,
    Report,
    Revoke,
    Scatter,
    Send,
    SendCall,
    Verify,
    Watch,
    Write,
)
from kvferry.session.jobs import Jobs
from kvferry.session.keys import Keys, access
from kvferry.session.lines import Lines
from kvferry.session.machine import Machine
from kvferry.session.messages import GRANT_BYTES, Card, Peer, Role, decode, encode
from kvferry.session.prepare import Preparer
from kvferry.session.registry import Entry
from kvferry.session.shell import LOG, Bell, Rendezvous
from kvferry.session.source import EARLY_MAX_S, SOURCE_SAYS
from kvferry.session.transfer import Transfer
from kvferry.transport.base import Memory, open_transport
from kvferry.transport.staging import Staging

CLOSE_S = 2.0
MESSAGES_PER_ROUND = 256
_IN_DOUBT: list[Staging] = []
"""Landing memory of closed endpoints that a peer may still write: kept mapped as long as this process lives."""


class Endpoint:
    """Sends and receives the cache of one worker.

    `instance` holds at least this rank's worker, `memory` is where its regions are. `world` workers make the instance.
    `slots` × `slot_bytes` of landing memory are the only memory that peers can write. Addresses such as `staging_base`
    may lie anywhere in 64 bits. Use it as a context manager, or call `close`.

    `gather`: whether a source gathers runs into one write ("always"), posts each run as it lies ("never", where the
    transport can), or does what costs less ("auto", see `kvferry.transport.costs`). `landing="pages"`: peers, who have
    to be trusted, write straight into the target's pages, over nixl and process_vm only; see `Transfer.pages_free`.
    `digest`: what we receive is digested by its sources and again in our pages before it is committed, and
    TransferCorrupted if that differs.

    `early_s`: how long a target's offer waits for our send() at most. Where it is always sent first, as by a prefill
    server that answers its router before decode hears of it, a short time ends requests for ids that were never here.

    `host` is the IPv4 address of this machine that is bound and that peers use; with `keys` it may be any, without only
    one on loopback. Where they aren't given they come from KVFERRY_HOST and KVFERRY_KEYS, see docs/security.md.

    `trace` is a folder for the logs of failed transfers (else KVFERRY_TRACE, else they aren't written), `metrics` the
    HOST:PORT where rank 0 answers Prometheus, the others at the ports after it (else KVFERRY_METRICS, else nowhere).
    """

    def __init__(
        self,
        instance: Instance,
        rank: int,
        memory: Memory,
        *,
        world: int,
        registry: str,
        transport: str = "auto",
        slots: int = 8,
        slot_bytes: int = 8 << 20,
        gather: Gather = "auto",
        landing: Landing = "slots",
        digest: bool = False,
        host: str | None = None,
        keys: Keys | None = None,
        staging_base: Address | None = None,
        ttl_s: float = 10.0,
        early_s: float = EARLY_MAX_S,
        trace: Path | str | None = None,
        metrics: str | None = None,
    ) -> None:
        at = access(host, keys)
        told = tells(trace, metrics, rank, at.keys is not None)
        home = own_registry(registry, at)
        check_worker(instance, rank, world)
        check_landing(slots, slot_bytes, gather, landing)
        self._worker = instance.worker(rank)
        own = Instance(instance.format, instance.instance, instance.model, instance.groups, (self._worker,))
        self._instance, self._memory = own, memory
        self._me = Peer(instance.instance, time.time_ns(), rank)
        self._staging = Staging(slots, slot_bytes, staging_base)
        self._poller = zmq.Poller()
        with ExitStack() as opened:  # what is open already is closed where the next can't be opened
            opened.callback(self._staging.close)
            where = (transport, self._staging, at.host)
            self._transport = open_transport(*where, pages=memory.spans, pages_open=landing == "pages")
            opened.callback(self._transport.close)
            self._lines = Lines(at, self._poller)
            opened.pop_all()
        address, key = self._lines.address, at.keys.public if at.keys else ""
        card = Card(address, world, own, self._transport.export(), this_process(), key)
        allowed = at.keys.allowed if at.keys else frozenset()
        draw_grant = partial(secrets.token_bytes, GRANT_BYTES)
        self._machine = Machine(self._me, card, slots, self._staging.address, draw_grant, digest, allowed, early_s)
        self._observer = Observer(self._machine)
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._bell = Bell()
        self._poller.register(self._bell.descriptor, zmq.POLLIN)
        self._deaths = Deaths(self._poller)
        self._transfers: dict[tuple[Role, str], Transfer] = {}
        self._finished: list[Transfer] = []
        self._held: dict[str, Transfer] = {}  # failed, and a peer may still write into their pages
        self._preparer = Preparer(rank, slot_bytes, memory if landing == "pages" else None)
        parts = (own, self._worker, memory, self._transport, self._staging, self._preparer)
        self._jobs = Jobs(*parts, GATHER[gather], self._post)
        self._closed = self._closing = False
        self._draining = ""  # why nothing new is taken
        self._one_ended = threading.Condition(self._lock)
        self._entry = entry = Entry(instance.instance, self._me.generation, rank, world, address, key)
        self._at = at
        self._snapshots = Snapshots(self._machine, self._observer, self._lock)
        self._outlet = Outlet(self._me, self._observer, self._snapshots, self._lock, told)
        self._rendezvous = Rendezvous(home, entry, ttl_s, self._post)
        self._thread = threading.Thread(target=self._run, name="kvferry-control", daemon=True)
        self._thread.start()

    # the caller's side

    def send(
        self,
        transfer: str,
        groups: dict[str, Wanted],
        tables: Side,
        *,
        timeout_s: float,
        layers: Iterable[int] | None = None,
        last: bool = True,
        fence: Fence | None = None,
        request: str = "",
    ) -> Transfer:
        """Prefill: these tokens are ready in these pages, which are read until the transfer ends, however it ends.

        `last=False`: only these tokens, of these `layers` (None: of all), are there yet; `extend` says what is added.
        `fence` is called before pages named here are read, perhaps more than once and on any thread, and returns when
        they may be. `request` is the caller's own name of it, for `kvferry trace`.
        """
        chosen = None if layers is None else tuple(layers)
        return self._start("source", SendCall(transfer, groups, tables, timeout_s, chosen, last, fence), request)

    def extend(
        self,
        transfer: Transfer,
        groups: dict[str, Wanted],
        tables: Side,
        *,
        layers: Iterable[int] | None = None,
        last: bool = False,
        fence: Fence | None = None,
    ) -> None:
        """Prefill: more of a transfer sent with `last=False` is ready. `groups` and `tables` are all that is there now,
        not only what is new; what was named for other `layers` stays. After the end of a transfer this does nothing.
        """
        chosen = None if layers is None else tuple(layers)
        self._post(ExtendCall(transfer.id, groups, tables, chosen, last, fence))

    def receive(
        self,
        transfer: str,
        source: str,
        groups: dict[str, Wanted],
        tables: Side,
        *,
        timeout_s: float,
        registry: str = "",
        piece_tokens: int = 0,
        request: str = "",
    ) -> Transfer:
        """Decode: fetch these tokens from instance `source` into these pages. Every rank of this instance calls it.

        The pages may be used when the transfer is done, and are untouched from the moment it has failed. `registry` is
        the URL of the registry that knows `source`, if that is not this endpoint's own. `piece_tokens`: tokens that
        travel together at most, so that a source which sends in steps is taken as it goes; 0 leaves it to the slots.
        `request` is the caller's own name of it, for `kvferry trace`.
        """
        if piece_tokens < 0:
            raise DocumentError("piece_tokens", f"must be ≥ 0, got {piece_tokens}")
        call = ReceiveCall(transfer, source, groups, tables, timeout_s, registry=registry, piece_tokens=piece_tokens)
        return self._start("target", call, request)

    def connect(self, source: str, *, timeout_s: float, registry: str = "") -> None:
        """Shake hands with every worker of `source` now. IncompatibleError; TransferTimeout if it is not there."""
        name = f"connect {source} {secrets.token_hex(4)}"[-256:]
        call = ReceiveCall(name, source, {}, Side(), timeout_s, connect_only=True, registry=registry)
        try:
            self.wait(self._start("target", call))
        except TransferRefused as error:
            if isinstance(error.__cause__, IncompatibleError):
                raise error.__cause__ from None
            raise

    def poll(self, timeout_s: float = 0.0) -> list[Transfer]:
        """Transfers that have ended since the last poll, in order; where there are none, wait so long for one, or
        until the endpoint is closed.
        """
        with self._one_ended:
            self._one_ended.wait_for(lambda: self._finished or self._closed, timeout_s)
            ended, self._finished = self._finished, []
        return ended

    def wait(self, transfer: Transfer, timeout_s: float | None = None) -> Report:
        """The report, or the transfer's typed error; TransferTimeout if `timeout_s` ends first, and it goes on then."""
        # the machine ends every transfer by its deadline; the margin only covers a scatter that is still running
        limit_s = transfer.deadline_s + 60.0 - now_s() if timeout_s is None else timeout_s
        if not transfer._ended.wait(max(0.0, limit_s)):
            where = Where(transfer.id, transfer.peer, "waiting", now_s() - transfer.started_s)
            problem = f"wait() gave up after {limit_s:g} s; the transfer is still running"
            raise TransferTimeout(where, problem, "wait again, or abort it")
        if transfer.error is not None:
            raise transfer.error
        assert transfer.report is not None
        return transfer.report

    def abort(self, transfer: Transfer, reason: str = "") -> None:
        """End the transfer on all sides. It is over, and its pages are free, when `wait` or `poll` says so."""
        self._post(AbortCall(transfer.role, transfer.id, reason))

    def stats(self) -> dict[str, int]:
        """Slots free, used and in quarantine; transfers; refused messages, in all and by reason."""
        with self._lock:
            return self._machine.stats()

    def trace(self) -> bytes:
        """What happened here, what runs and what it waits for, and the numbers: a kvferry-trace/1 log, JSON lines."""
        return encode_log(self._snapshots.take())

    def links(self) -> dict[str, str]:
        """By peer that we have written to: which transport moves the bytes, and why that one."""
        return self._jobs.links()

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, let what runs end, then close: after `timeout_s` at the latest. Whether all of it has ended
        by itself. The registry says that this worker is draining, and offers for what was not sent yet are refused.
        """
        with self._lock:
            self._draining = f"{self._me} is draining and takes no new transfers"
        self._rendezvous.announce(replace(self._entry, draining=True))
        self._post(DrainCall())
        with self._one_ended:
            ended = self._one_ended.wait_for(lambda: not self._transfers, timeout_s)
        self.close()
        return ended

    def close(self) -> None:
        """Abort what runs, tell the peers, and give everything back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._one_ended.notify_all()
        self._rendezvous.close()
        self._post(None)
        self._thread.join()
        self._outlet.close(CLOSE_S)
        stopped = self._jobs.close(CLOSE_S)
        self._transport.close()
        if stopped and not self._machine.stats()["slots_quarantined"]:
            self._staging.close()
        else:
            # these addresses must not be used for anything else while somebody may still write there
            _IN_DOUBT.append(self._staging)
            LOG.warning("%s: landing memory stays mapped, a writer is in doubt", self._me)
        self._bell.close()
        self._deaths.close()
        self._lines.end()
        for transfer in self._transfers.values():
            where = Where(transfer.id, transfer.peer, "closing", now_s() - transfer.started_s)
            transfer._end(None, TransferAborted(where, "the endpoint was closed", "open one, and use a new id"))

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, role: Role, call: SendCall | ReceiveCall, request: str = "") -> Transfer:
        if not 1 <= len(call.transfer) <= 256:
            raise DocumentError("transfer", f"an id has 1 … 256 characters, got {len(call.transfer)}")
        if not (0 < call.timeout_s <= 1e6):
            raise DocumentError("timeout_s", f"must be in (0, 1e6], got {call.timeout_s}")
        if isinstance(call, ReceiveCall) and call.registry:
            registry_at(call.registry, self._at)
        peer = call.source if isinstance(call, ReceiveCall) else ""
        transfer = Transfer(role, call.transfer, call.timeout_s, peer)
        transfer.hidden = isinstance(call, ReceiveCall) and call.connect_only
        with self._lock:
            problem = "this id is in use; ids are unique" if (role, call.transfer) in self._transfers else ""
            problem = "the endpoint is closed" if self._closed else self._draining or problem
            if problem:
                raise TransferRefused(Where(call.transfer, peer, "matching", 0.0), problem)
            self._transfers[role, call.transfer] = transfer
            self._observer.called(role, call.transfer, request)
        self._post(call)
        return transfer

    # the control thread

    def _post(self, event: Event | None) -> None:
        self._events.put(event)
        self._bell.ring()

    def _run(self) -> None:
        end_s = math.inf
        while now_s() < end_s:
            try:
                self._round(min(end_s, self._machine.next_s(), self._deaths.next_s()))
            except Exception:
                LOG.exception("%s: internal error in the control thread", self._me)
                time.sleep(0.01)
            if self._closing and end_s == math.inf:
                end_s = now_s() + CLOSE_S
                self._do(self._machine.close)
            if self._closing and self._machine.quiet:
                break
        self._apply(self._machine.goodbye())
        self._lines.close_all(linger_ms=500)

    def _round(self, until_s: float) -> None:
        wait_s = until_s - now_s()
        ready = dict(self._poller.poll(None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000))))
        # first: what follows may close a watch, and its number may then be another one's
        self._deaths.witness(ready, now_s())
        if self._bell.descriptor in ready:
            self._bell.still()
        while not self._events.empty():
            event = self._events.get()
            if event is None:
                self._closing = True
            else:
                self._handle(event)
        for peer, problem in self._lines.handshakes():
            self._do(partial(self._machine.barred, peer, problem))
        if self._lines.router in ready:
            self._read_router()
        for peer in self._deaths.due(now_s()):
            self._handle(Died(peer))
        self._do(self._machine.tick)

    def _read_router(self) -> None:
        for _ in range(MESSAGES_PER_ROUND):
            try:
                frames, key = self._lines.receive()
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise DocumentError("", f"a message has 1 frame, got {len(frames)}")
                envelope = decode(frames[0])
            except KVFerryError as error:
                with self._lock:
                    self._machine.core.refuse("does not decode")
                LOG.warning("%s: message refused: %s", self._me, str(error)[:400])
                continue
            if self._machine.core.key_of(envelope.sender, envelope.body) != key:
                with self._lock:
                    self._machine.core.refuse("said with another key than its sender's")
                continue
            self._handle(Received(envelope.sender, envelope.recipient, envelope.body, envelope.place))

    def _handle(self, event: Event) -> None:
        self._do(partial(self._machine.handle, event), event)

    def _do(self, step: Callable[[float], list[Action]], event: Event | None = None) -> None:
        """One step of the machine, which is written down, and what it asks for."""
        with self._lock:
            now = now_s()
            actions = step(now)
            self._observer.saw(event, actions, now)
        self._apply(actions)

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._act(action)
            except Exception:
                LOG.exception("%s: could not %s", self._me, type(action).__name__)

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action)
        elif isinstance(action, Allow):
            self._transport.grant(action.grant, action.slot, action.nbytes)
        elif isinstance(action, Revoke):
            self._transport.revoke(action.grant)
        elif isinstance(action, (Prepare, Write, CancelWrites, Scatter, Verify)):
            self._jobs.do(action)
        elif isinstance(action, Lookup):
            self._rendezvous.lookup(action.instance, action.until_s, action.registry)
        elif isinstance(action, Open):
            self._lines.open(action.peer, action.address, action.key)
        elif isinstance(action, Watch):
            self._deaths.watch(action.peer, action.process)
        elif isinstance(action, Close):
            self._forget(action.peer)
        elif isinstance(action, Ended):
            self._end(action)
        elif isinstance(action, Released):
            self._held.pop(action.transfer)._pages_free.set()
        elif isinstance(action, Note):
            LOG.warning("%s: %s", self._me, action.text)

    def _send(self, action: Send) -> None:
        try:
            data = encode(self._me, action.peer, action.body, action.place)
            self._lines.send(action.peer, data)
        except zmq.Again:
            LOG.warning("%s: the line to %s is full, a %s waits", self._me, action.peer, type(action.body).__name__)
        except DocumentError as error:
            role: Role = "source" if isinstance(action.body, SOURCE_SAYS) else "target"
            transfer = getattr(action.body, "transfer", "")
            self._post(AbortCall(role, transfer, f"{error}; use larger slots or send less at once"))

    def _forget(self, peer: Peer) -> None:
        self._deaths.forget(peer)
        self._lines.close(peer)
        self._jobs.forget_peer(peer)

    def _end(self, ended: Ended) -> None:
        if ended.role == "source":
            self._jobs.forget_transfer(ended.transfer)
        error = ended.error
        if isinstance(error, TransferTimeout) and self._rendezvous.problem:  # nobody could find us
            problem = f"{error.problem}; this worker is not registered: {self._rendezvous.problem}"
            error = TransferTimeout(error.where, problem, error.advice)
        with self._one_ended:  # whoever polls, or waits, finds it with its end and out of the list of those that run
            transfer = self._transfers.pop((ended.role, ended.transfer))
            if ended.pages_held:
                self._held[ended.transfer] = transfer
            transfer._end(ended.report, error, ended.pages_held)
            if not transfer.hidden:
                self._finished.append(transfer)
            self._one_ended.notify_all()
