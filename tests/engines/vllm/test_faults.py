"""What corrupts or ends the stock connectors' engines, on real servers: here it ends one request, with an error or a
recomputation as vLLM was told, never in wrong tokens, and every server that is alive answers the next request.

Three servers serve all of these tests: a prefill server that can be made slow, and two decode servers, one for each of
vLLM's two failure policies.
"""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.engines.dump import read_dump
from kvferry.errors import RegistryError, TransferRefused
from kvferry.session.messages import Goodbye, Hello, Peer, encode
from kvferry.session.registry import Entry, Registry
from kvferry.transport.tcp import FRAME_MAGIC, HEADER, VERSION, WRITE
from tests.engines.vllm.peer import OwnPeer, Ports, junk, own_peer, ports_of, put, say, throw
from tests.engines.vllm.servers import (
    ASK_PREFILL,
    Server,
    connector,
    disaggregated,
    free_port,
    idle,
    metric,
    nothing_left,
    prefill,
    received,
    signal_all,
    tokens_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

LEASE_S, TIMEOUT_S, UNKNOWN_S = 6.0, 12.0, 2.0
SMALL = ("--block-size", "32", "--kv-cache-memory-bytes", str(12 << 20))
"""Room for 96 blocks of 32 tokens, so that blocks are used again soon."""


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1024) for _ in range(length)]


class Servers:
    """The three, and the peer of the test's own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        options = {"lease_s": LEASE_S, "timeout_s": TIMEOUT_S, "unknown_s": UNKNOWN_S}
        made = {
            "prefill": connector("kv_producer", "SlowWhenAsked", slots=2, slot_bytes=262144, **options),
            "fail": connector("kv_both", **options),
            "recompute": connector("kv_both", policy="recompute", **options),
        }
        self.all = {name: Server.of_model(name, model, folder, *SMALL, connector=c) for name, c in made.items()}
        self.prefill, self.fail, self.recompute = self.all.values()

    def plain(self, prompt: list[int]) -> list[int]:
        """What a server says that has never loaded anything."""
        return tokens_of(self.prefill.complete(prompt))

    def slow(self, on: bool) -> None:
        file = self.folder / "slow"
        file.touch() if on else file.unlink(missing_ok=True)

    def serve(self, seed: int) -> None:
        """Every server answers, also across: the right tokens, and nothing in use afterwards."""
        for number, target in enumerate((self.fail, self.recompute)):
            prompt, loads = prompt_of(70 + number, 10_000 + 10 * seed + number), len(received(target))
            assert tokens_of(disaggregated(self.prefill, target, prompt)) == self.plain(prompt)
            assert len(received(target)) == loads + 1
        idle(*self.all.values())


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with nothing_left():
        found = Servers(tiny_model, tmp_path_factory.mktemp("faults"))
        try:
            for server in found.all.values():
                server.ready()
            yield found
        finally:
            for server in found.all.values():
                server.close()


@pytest.fixture(scope="module")
def model(servers: Servers) -> str:
    """The model's name as the servers' workers say it."""
    return read_dump(next((servers.folder / "dumps").glob("vllm-*.json"))).layout.model


@pytest.fixture(autouse=True)
def fast(servers: Servers) -> Iterator[None]:
    yield
    servers.slow(False)


def is_error(answer: dict[str, Any]) -> bool:
    return "choices" not in answer or answer["choices"][0]["finish_reason"] == "error"


def both_policies(servers: Servers, prompt: list[int], params: Callable[[], dict[str, Any]], seed: int) -> None:
    """`params` can't be served: one server answers with an error, the other with the right tokens, and neither has
    wrong tokens in its prefix cache afterwards.
    """
    expected = servers.plain(prompt)
    assert is_error(servers.fail.complete(prompt, kv_transfer_params=params()))
    assert tokens_of(servers.recompute.complete(prompt, kv_transfer_params=params())) == expected
    for server in (servers.fail, servers.recompute):
        assert tokens_of(server.complete(prompt)) == expected, f"{server.name}: its prefix cache is poisoned"
    servers.serve(seed)


# what routers and clients say


def test_f52_an_expired_lease_whose_blocks_are_used_again(servers: Servers) -> None:
    prompt = prompt_of(300, 1)
    expected = servers.plain(prompt)
    expired = [prefill(servers.prefill, prompt) for _ in range(2)]
    idle(servers.prefill)
    for seed in range(8):  # 4,000 tokens: every block of the server is written again
        servers.prefill.complete(prompt_of(500, 100 + seed), 1)
    claims = iter(expired)
    both_policies(servers, prompt, lambda: next(claims), 1)
    assert servers.plain(prompt) == expected
    assert re.search(r"did not arrive: .*has passed; no target has made an offer", servers.fail.text())


@pytest.mark.parametrize(
    "ids", [[], [[]], [[1]], [[3, 2, 1]], [[10**9] * 4], [[-1]], [list(range(5000))], [[1], [2], [3]], "x", None]
)
def test_f68_block_ids_of_a_client_are_not_read(servers: Servers, ids: Any) -> None:
    """Foreign, too few, too many or no ids at all: decode takes what prefill keeps for that request."""
    prompt = prompt_of(90, 200 + len(str(ids)))
    loads = len(received(servers.fail))
    params = {**prefill(servers.prefill, prompt), "remote_block_ids": ids}
    assert tokens_of(servers.fail.complete(prompt, kv_transfer_params=params)) == servers.plain(prompt)
    assert len(received(servers.fail)) == loads + 1


@pytest.mark.parametrize(
    "changed",
    [{"remote_request_id": "nobody"}, {"remote_engine_id": "nobody"}, {"remote_port": 1}, {"remote_num_tokens": 10**6}],
)
def test_an_id_that_nobody_knows_ends_early(servers: Servers, changed: dict[str, Any]) -> None:
    prompt = prompt_of(120, 300 + len(str(changed)))
    params = {**prefill(servers.prefill, prompt), **changed}
    began_s = time.monotonic()
    answer = servers.recompute.complete(prompt, kv_transfer_params=params)
    assert tokens_of(answer) == servers.plain(prompt)
    if "remote_request_id" in changed:  # its own instance can say that it never heard of it
        assert time.monotonic() - began_s < TIMEOUT_S - 2, "it waited for the end of the time limit"
        assert f"no send() came here within {UNKNOWN_S:g} s" in servers.recompute.text()
    idle(*servers.all.values())


def test_a_prompt_longer_than_what_is_offered_is_not_taken_for_it(servers: Servers) -> None:
    """The handle of another, shorter prompt: its tokens fit, so only they could be loaded."""
    short, long = prompt_of(40, 400), prompt_of(200, 401)
    foreign = prefill(servers.prefill, short)
    answer = servers.recompute.complete(long, kv_transfer_params={**foreign, "remote_num_tokens": 200})
    assert tokens_of(answer) == servers.plain(long)


# peers that don't fit


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "other"}, r"model: source has 'other', target has '.*@"),
        ({"dtype": "float16"}, r"groups\.attn\.dtype: source has 'float16', target has 'float32'"),
        ({"kv_heads": 8}, r"groups\.attn\.axes: source has .*'head': 8.*target has .*'head': 4"),
        ({"layers": 5}, r"groups\.attn\.layers: source has .*4.*target has "),
        ({"head_dim": 64}, r"groups\.attn\.axes: source has .*'dim': 64.*target has .*'dim': 32"),
    ],
)
def test_f18_f37_a_peer_with_another_model_is_named_with_field_and_both_values(
    servers: Servers, model: str, changed: dict[str, Any], message: str
) -> None:
    prompt = prompt_of(50, 500 + len(message))
    with own_peer(f"strange-{time.time_ns()}", **{"model": model, **changed}) as peer:
        offers = [peer.offer(f"r{number}", 50) for number in range(2)]
        handles = iter([peer.params(f"r{number}", 50) for number in range(2)])
        both_policies(servers, prompt, lambda: next(handles), len(message))
        for offer in offers:  # the peer is told, too
            with pytest.raises(TransferRefused, match="source has"):
                peer.endpoint.wait(offer, 10.0)
    for server in (servers.fail, servers.recompute):
        assert re.search(f"its cache did not arrive: .*{message}", server.text())


def test_a_peer_of_another_page_size_and_layout_is_as_good_as_any(servers: Servers, model: str) -> None:
    """Pages of 16 tokens in `[token][head][dim]`: what vLLM's block of `[head][dim][token]` becomes and comes from."""
    prompt = prompt_of(130, 600)
    expected = servers.plain(prompt)
    with own_peer(f"neighbour-{time.time_ns()}", model) as peer:
        peer.endpoint.wait(peer.take(prefill(servers.prefill, prompt), 129), 20.0)
        assert peer.memory.any()
        offer = peer.offer("r", 129)
        assert tokens_of(servers.fail.complete(prompt, kv_transfer_params=peer.params("r", 129))) == expected
        assert peer.endpoint.wait(offer, 10.0).bytes == received(servers.fail)[-1] == 129 * 4096
        # so the comparison sees what the peer sends: other bytes, other tokens
        other = prompt_of(131, 601)
        peer.memory.view(np.float32)[:] = 0.25
        peer.offer("x", 130)
        answer = servers.fail.complete(other, kv_transfer_params=peer.params("x", 130))
        assert tokens_of(answer) != servers.plain(other)


# ports


@pytest.fixture
def stranger(model: str) -> Iterator[OwnPeer]:
    with own_peer(f"stranger-{time.time_ns()}", model) as peer:
        yield peer


def all_ports(servers: Servers, stranger: OwnPeer) -> dict[str, Ports]:
    return {name: ports_of(prefill(server, prompt_of(33, 7)), stranger) for name, server in servers.all.items()}


def test_f65_junk_on_every_port(servers: Servers, stranger: OwnPeer) -> None:
    """On the registry, the control socket and the data port of each server, while requests cross."""
    for ports in all_ports(servers, stranger).values():
        host, _, port = ports.registry.removeprefix("http://").partition(":")
        control = ports.control.removeprefix("tcp://").rpartition(":")
        messages = junk()
        for at in ((host, int(port)), (control[0], int(control[2])), ports.data):
            throw(at, *messages)
        say(ports.control, *messages)
        for body in (b"", b"{}", b"[" * 10_000, b'{"entry": 1}', b"\xff" * 100, b"x" * 70_000):
            assert put(ports.registry, body, "x") in (0, 400, 413)
        me = Peer(stranger.name, 1, 0)
        card = stranger.endpoint._machine.core.card
        # an unknown rank (the stock side channel's listener dies of one), an earlier start, a far too large rank
        for peer in (
            Peer(ports.engine, ports.generation, 99),
            Peer(ports.engine, ports.generation - 1, 0),
            Peer("another", ports.generation, 0),
            Peer(ports.engine, ports.generation, (1 << 63) - 1),
        ):
            say(ports.control, encode(me, peer, Hello(card)), encode(me, peer, Goodbye()))
        frame = HEADER.pack(FRAME_MAGIC, VERSION, WRITE, 16, 1 << 63, (1 << 64) - 1, b"g" * 32)
        throw(ports.data, frame, HEADER.pack(FRAME_MAGIC, VERSION, 0, 16, 0, 0, b"k" * 32) + frame)
    servers.serve(700)


def test_f62_f67_forged_and_repeated_registrations(servers: Servers, stranger: OwnPeer, model: str) -> None:
    """Without keys whoever is on this machine may register; it ends requests for as long as the forgery lives, and no
    engine. With keys it can't be done at all: see tests/session/test_strangers.py.
    """
    ports = all_ports(servers, stranger)["prefill"]
    registry = Registry(ports.registry)
    (true,) = registry.instance(ports.engine).workers
    for wrong in (
        msgspec.structs.replace(true, rank=5),
        msgspec.structs.replace(true, generation=true.generation - 1, address="tcp://127.0.0.1:9"),
        msgspec.structs.replace(true, address="nowhere"),
    ):
        with pytest.raises(RegistryError):
            registry.put(wrong, 60.0)
    registry.put(true, 30.0)  # the same once more changes nothing
    servers.serve(800)
    prompt = prompt_of(80, 801)
    handles = [prefill(servers.prefill, prompt) for _ in range(2)]
    claims = iter(handles)
    forged = Entry(ports.engine, true.generation + 1, 0, 1, f"tcp://127.0.0.1:{free_port()}")
    registry.put(forged, 2 * TIMEOUT_S + 4)
    expected = servers.plain(prompt)
    assert is_error(servers.fail.complete(prompt, kv_transfer_params=next(claims)))
    assert tokens_of(servers.recompute.complete(prompt, kv_transfer_params=next(claims))) == expected
    end_s = time.monotonic() + 40
    while (found := registry.instance(ports.engine)).workers != (true,):
        assert time.monotonic() < end_s, f"the true worker has not come back: {found}"
        time.sleep(0.5)
    servers.serve(810)


# decode: preemption, clients that leave


def test_preempted_requests_go_on_with_what_they_recompute(servers: Servers) -> None:
    """More at once than the blocks can hold: vLLM takes blocks from requests whose cache had been loaded."""
    prompts = [prompt_of(330 + 7 * number, 900 + number) for number in range(7)]
    expected = [tokens_of(servers.prefill.complete(prompt, 160)) for prompt in prompts]
    before = metric(servers.fail, "vllm:num_preemptions_total")
    got: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        got[number] = tokens_of(disaggregated(servers.prefill, servers.fail, prompts[number], 160))

    together(ask, len(prompts))
    assert metric(servers.fail, "vllm:num_preemptions_total") > before, "nothing was preempted"
    assert [got[number] for number in range(len(prompts))] == expected
    servers.serve(900)


def together(act: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("leaves_after_s", [0.0, 0.02, 0.3])
def test_f56_a_client_that_leaves_while_its_peer_is_silent(servers: Servers, model: str, leaves_after_s: float) -> None:
    """The peer is registered and never sends: decode's blocks are back long before the time limit of the request."""
    prompt = prompt_of(150, 1000 + int(leaves_after_s * 100))
    with own_peer(f"silent-{time.time_ns()}", model) as peer:
        try:
            servers.fail.complete(
                prompt, kv_transfer_params=peer.params("never", 150), timeout_s=max(leaves_after_s, 0.01)
            )
        except TimeoutError:
            pass
        began_s = time.monotonic()
        idle(servers.fail)
        assert time.monotonic() - began_s < 5
    servers.serve(1000)


# prefill dies or stops in the middle of a transfer; last, since it does not come back


def start_slow_load(servers: Servers, target: Server, seed: int) -> tuple[threading.Thread, list[dict[str, Any]]]:
    prompt, answers = prompt_of(500, seed), []
    params = prefill(servers.prefill, prompt)
    servers.slow(True)
    thread = threading.Thread(target=lambda: answers.append(target.complete(prompt, kv_transfer_params=params)))
    thread.start()
    time.sleep(2.0)
    assert not answers, "the load had ended before anything could happen"
    return thread, answers


def test_prefill_that_is_stopped_in_the_middle_and_goes_on_later(servers: Servers) -> None:
    """Blocks of the request that was given up are used by others when prefill goes on with its write."""
    prompts = [prompt_of(300, 1100 + number) for number in range(4)]
    expected = [servers.plain(prompt) for prompt in prompts]
    thread, answers = start_slow_load(servers, servers.fail, 1110)
    signal_all(servers.prefill, signal.SIGSTOP)
    try:
        thread.join(TIMEOUT_S + 10)
        assert answers and is_error(answers[0]), answers
        idle(servers.fail)
        assert [tokens_of(servers.fail.complete(prompt)) for prompt in prompts[:2]] == expected[:2]
    finally:
        servers.slow(False)
        signal_all(servers.prefill, signal.SIGCONT)
    time.sleep(2 * 1.5)
    assert [tokens_of(servers.fail.complete(prompt)) for prompt in prompts] == expected
    servers.serve(1120)


def test_prefill_that_is_killed_in_the_middle(servers: Servers, model: str) -> None:
    prompt = prompt_of(300, 1200)
    expected, slow_expected = servers.plain(prompt), servers.plain(prompt_of(500, 1210))
    thread, answers = start_slow_load(servers, servers.recompute, 1210)
    killed_s = time.monotonic()
    servers.prefill.kill()
    thread.join()
    assert time.monotonic() - killed_s < TIMEOUT_S - 2, "a death is witnessed, it need not be waited for"
    assert tokens_of(answers[0]) == slow_expected
    idle(servers.fail, servers.recompute)
    # the survivors serve each other, either of them as prefill
    assert tokens_of(disaggregated(servers.recompute, servers.fail, prompt)) == expected
    prompt = prompt_of(310, 1201)
    assert tokens_of(disaggregated(servers.fail, servers.recompute, prompt)) == tokens_of(servers.fail.complete(prompt))
    asked = servers.fail.complete(prompt, 1, kv_transfer_params=dict(ASK_PREFILL))
    assert asked["kv_transfer_params"]["remote_request_id"]
    idle(servers.fail, servers.recompute)
