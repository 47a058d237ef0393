"""Every place where bytes or settings from outside become objects, and what is done with the objects next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from kvferry.engines.dump import Dump, DumpedTensor, read_dump
from kvferry.engines.sglang import control
from kvferry.engines.sglang.options import Options as SglangOptions
from kvferry.engines.transformers import messages as worker_messages
from kvferry.engines.vllm.options import read_options
from kvferry.engines.vllm.params import make_params, read_handle
from kvferry.errors import KVFerryError
from kvferry.layout.address import Address, Addresses
from kvferry.layout.document import decode_json, decode_msgpack, encode_json, encode_msgpack
from kvferry.layout.models import model_slabs, read_config
from kvferry.layout.validate import parse_instance, parse_request
from kvferry.plan.dense import dense_copies
from kvferry.plan.document import make_plan
from kvferry.session import events as e
from kvferry.session import keys as session_keys
from kvferry.session import messages, registry
from kvferry.session.signing import Challenges, Signer, Unsigned
from kvferry.transport import costs, tcp
from kvferry.transport.base import Export, LocalCard, NixlCard, TcpCard
from kvferry.transport.runs import Runs, decode_runs
from kvferry.transport.staging import Slots
from tests.fuzz.mutate import JSON, MSGPACK, Codec
from tests.plan import build
from tests.session.pools import Shape
from tests.session.sim import Sim
from tests.session.test_messages import BODIES, ME, YOU

REFUSALS = (KVFerryError, Unsigned, tcp._Refused)
"""What a decoder may raise; the last two are answered with 401 and with the reason on the connection."""


@dataclass(frozen=True)
class Decoder:
    name: str
    corpus: Sequence[bytes]
    codec: Codec | None
    take: Callable[[bytes], object]
    share: int = 1


class File:
    """What a reader of files needs of a path."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_bytes(self) -> bytes:
        return self._data

    def __str__(self) -> str:
        return "fuzzed.json"


class Listener:
    """A machine in the middle of transfers, which gets every envelope that decodes. A new one now and then."""

    def __init__(self) -> None:
        self._left = 0

    def __call__(self, data: bytes) -> object:
        envelope = messages.decode(data)
        self._left -= 1
        if self._left < 0:
            self._sim, self._left = _busy(random.Random(len(data))), 300
        sim = self._sim
        for peer, machine in sim.machines.items():
            senders = [envelope.sender, *(other for other in sim.machines if other != peer)]
            for sender in senders[:2]:
                received = e.Received(sender, peer, envelope.body, envelope.place)
                for action in machine.handle(received, sim.now):
                    _carry_out(sim, peer, action)
        return envelope


def _carry_out(sim: Sim, peer: messages.Peer, action: e.Action) -> None:
    """As the shell does, as far as it uses what the peer has said."""
    if isinstance(action, e.Write):
        instance = sim.machines[peer].core.card.instance
        try:
            dense_copies(instance.workers[0], instance.group(action.chunk.box.group), action.chunk, action.tables)
            decode_runs(action.runs, action.nbytes)
        except KVFerryError as error:
            failed = e.WriteFailed(action.transfer, action.peer, action.piece, error)
            sim.machines[peer].handle(failed, sim.now)
    elif isinstance(action, e.Send):
        messages.encode(peer, action.peer, action.body, action.place)


def _busy(rng: random.Random) -> Sim:
    """Two transfers on their way, between one source and two targets."""
    sim = Sim(rng, {"p": Shape(), "d": Shape(tp=2, page_tokens=6)}, slots=3)
    for name in ("a", "b"):
        for peer, call in sim.start(name, "p", "d", 1e6):
            sim.event(peer, call)
    for _ in range(40 + rng.randrange(40)):
        sim.step()
    return sim


def _traffic() -> list[bytes]:
    """All that is said in two transfers, and one message of each kind."""
    said: list[bytes] = [messages.encode(ME, YOU, body) for body in BODIES]
    sim = Sim(random.Random(1), {"p": Shape(), "d": Shape(tp=2, page_tokens=6)}, slots=3)
    act = sim.act

    def listen(peer: messages.Peer, actions: list[e.Action]) -> None:
        said.extend(messages.encode(peer, a.peer, a.body, a.place) for a in actions if isinstance(a, e.Send))
        act(peer, actions)

    sim.act = listen  # type: ignore[method-assign]
    for name in ("a", "b"):
        for peer, call in sim.start(name, "p", "d"):
            sim.event(peer, call)
    sim.settle()
    return said


def _json(*documents: object) -> list[bytes]:
    return [encode_json(document) for document in documents]


ENTRY = registry.Entry("p", 1, 0, 1, "tcp://127.0.0.1:5000")
LISTED = registry.Listed(ENTRY, 10.0, 1.0, 0)
INSTANCE = build.instance(tp=2)
REQUEST = build.request((0, 12), [0, 1], [2, 3])
KEY = b"k" * 16
SLOTS = Slots(Address(1 << 40), 4, 4096, 4096)
LOCAL = LocalCard(1, 1, 3, 4, 1 << 20, Address(1 << 50))


class _Deaf(registry.Registry):
    """A client whose registry says whatever is to be tried."""

    answer = b""

    def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        return self.answer


def _registry_put(data: bytes) -> object:
    put = decode_json(data, registry._Put)
    directory = registry.Directory()
    directory.put(put.entry, put.ttl_s, 0.0)
    return directory.view(put.entry.instance, 1.0), directory.listing(1.0)


def _registry_answer(data: bytes) -> object:
    client = _Deaf("http://127.0.0.1:1")
    client.answer = data
    return client.instance("p")


def _registry_listing(data: bytes) -> object:
    client = _Deaf("http://127.0.0.1:1")
    client.answer = data
    return client.listing()


def _export(data: bytes) -> object:
    export = decode_msgpack(data, Export)
    export.slots.check()
    return export.slots.place(Address(1 << 40), 100)


def _plan(data: bytes) -> object:
    return make_plan(INSTANCE, INSTANCE, parse_request(data, INSTANCE, INSTANCE))


def _key_file(kind: type[Any], data: bytes) -> object:
    return session_keys._read(cast(Path, File(data)), kind)


def _costs(data: bytes) -> object:
    return decode_json(data, costs.Costs).gathers("nixl", 1 << 40, 1 << 60)


def _mapping(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """For what engines hand over as a mapping that they have read from JSON."""

    def take(data: bytes) -> object:
        try:
            mapping = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            mapping = {data.decode("latin-1"): data}
        return read(mapping if isinstance(mapping, dict) else {"": mapping})

    return take


def _environment(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    return _mapping(lambda mapping: read({str(key): str(value) for key, value in mapping.items()}))


def _control(data: bytes) -> object:
    word = control.decode([data])
    rooms = control.Rooms()
    rooms.hear(word)
    return rooms.last(word.room)


def _signature(data: bytes) -> object:
    return CHALLENGES.check(data.decode("latin-1"), "GET", "/", b"")


CHALLENGES = Challenges(b"s" * 32, lambda: 0.0)


def all_decoders() -> Iterator[Decoder]:
    traffic = _traffic()
    yield Decoder("session messages, bytes", traffic, None, messages.decode, 4)
    yield Decoder("session messages, in a machine", traffic, MSGPACK, Listener(), 6)
    yield Decoder("registry requests", _json(registry._Put(ENTRY, 10.0)), JSON, _registry_put, 2)
    view = registry.View((ENTRY,), "")
    yield Decoder("registry answers", _json(view, registry.View((), "no")), JSON, _registry_answer, 2)
    yield Decoder("registry listings", _json([LISTED, LISTED]), JSON, _registry_listing)
    challenge = _json(registry._Challenge("0f"))
    yield Decoder("registry challenges", challenge, JSON, lambda data: decode_json(data, registry._Challenge))
    signed = [Signer(b"s" * 32, CHALLENGES.draw()).header("GET", "/", b"").encode() for _ in range(3)]
    yield Decoder("registry signatures", signed, None, _signature)
    cards = [
        Export("kvferry-transport/1", SLOTS, KEY, LOCAL, LOCAL, TcpCard("127.0.0.1", 5), None),
        Export("kvferry-transport/1", SLOTS, KEY, nixl=NixlCard("agent", b"metadata", Address(1 << 40))),
    ]
    yield Decoder("transport exports", [MSGPACK.write(_plain(card)) for card in cards], MSGPACK, _export, 2)
    frame = tcp.HEADER.pack(tcp.FRAME_MAGIC, tcp.VERSION, tcp.WRITE, 16, 1 << 40, 100, b"g" * 16)
    yield Decoder("tcp frames", [frame], None, _frame, 2)
    runs = Runs(_addresses(4), _lengths(4)).encode()
    yield Decoder("lists of runs", [runs], None, lambda data: decode_runs(data, 400))
    yield Decoder("instances", _json(INSTANCE, build.instance(tp=2, layout="hnd")), JSON, parse_instance, 2)
    yield Decoder("requests and plans", _json(REQUEST), JSON, _plan, 2)
    tensor = DumpedTensor("k", (2, 3), (3, 1), "float16", Address(1 << 62))
    dump = Dump("kvferry-dump/1", "vllm", "1", 0, (tensor,), build.instance())
    yield Decoder("dumps", _json(dump), JSON, lambda data: read_dump(cast(Path, File(data))))
    public = session_keys.Public("kvferry-public/1", "p0", "a" * 40)
    secret = session_keys.Secret("kvferry-secret/1", "p0", "a" * 40, "b" * 40, "0" * 64)
    for name, key_file in {"public keys": public, "secret keys": secret}.items():
        kind = type(key_file)
        yield Decoder(
            name, _json(key_file), JSON, lambda data, kind=kind: session_keys._read(cast(Path, File(data)), kind)
        )
    yield Decoder("costs", _json(costs.DEFAULTS), JSON, _costs)
    words = [control.encode(control.Ask(7, "t")), control.encode(control.Cancel(7, "t", "why"))]
    yield Decoder("SGLang control", words, MSGPACK, _control, 2)
    variables = {"KVFERRY_TRANSPORT": "tcp", "KVFERRY_SLOTS": "8", "KVFERRY_REGISTRY": "http://127.0.0.1:1"}
    yield Decoder("SGLang options", _json(variables), JSON, _environment(SglangOptions.read))
    handle = make_params(engine="e", request="r", registry="http://127.0.0.1:5", tokens=9, blocks=[[1, 2]], tp=1, pp=1)
    yield Decoder("vLLM kv_transfer_params", _json(handle), JSON, _mapping(read_handle), 2)
    options = {"registry": "http://127.0.0.1:5", "slots": 4, "slot_bytes": 8192, "lease_s": 2.0}
    yield Decoder("vLLM options", _json(options), JSON, _mapping(read_options))
    replies = [worker_messages.encode(m) for m in (worker_messages.Release("r"), worker_messages.Prefill("r", (1, 2)))]
    yield Decoder(
        "worker commands", replies, MSGPACK, lambda data: worker_messages.decode(data, worker_messages.Command)
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    config = {"model_type": "llama", "num_hidden_layers": 2, **heads, "torch_dtype": "bfloat16", "sliding_window": None}
    yield Decoder("model configs", _json(config), JSON, lambda data: model_slabs(read_config(data)))


def _frame(data: bytes) -> object:
    return tcp._parse(bytearray(data[: tcp.HEADER.size].ljust(tcp.HEADER.size, b"\0")))


def _plain(document: object) -> Any:
    return MSGPACK.read(encode_msgpack(document))


def _addresses(count: int) -> Any:
    return Addresses([Address((1 << 40) + 1000 * i) for i in range(count)])


def _lengths(count: int) -> Any:
    return np.full(count, 100, np.uint64)
