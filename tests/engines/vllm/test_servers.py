"""Real vLLM servers: decoded tokens equal those of a plain server, whatever the two sides' sizes; what fails, fails
alone; and nothing stays behind.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.dump import merge_dumps, read_dump
from tests.engines.vllm.servers import (
    Server,
    connector,
    disaggregated,
    idle,
    metric,
    nothing_left,
    prefill,
    received,
    tokens_of,
    usage,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTHS = (6, 31, 32, 33, 64, 100, 200, 500)
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4
"""4 layers of K and V, 4 heads of 32 float32 numbers."""


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1024) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Logs and vLLM's own files. At the end of the module nothing of ours is left."""
    with nothing_left():
        yield tmp_path_factory.mktemp("servers")


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def start(tiny_model: Path, folder: Path) -> Iterator[Start]:
    """Starts a server of the tiny model; all are ended with the module."""
    servers: list[Server] = []

    def started(name: str, config: dict[str, Any] | None, tp: int = 1, block: int = 32) -> Server:
        options = ("--block-size", str(block), "--tensor-parallel-size", str(tp))
        servers.append(Server.of_model(name, tiny_model, folder, *options, connector=config))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def servers(start: Start) -> dict[str, Server]:
    """Started together: on two cores that is faster than one after the other."""
    found = {
        "plain": start("plain", None),
        "one": start("one", connector("kv_both")),
        "decode": start("decode", connector("kv_consumer", slots=2, slot_bytes=65536)),
        "two": start("two", connector("kv_both"), tp=2),
        "sixty-four": start("sixty-four", connector("kv_both", policy="recompute", timeout_s=3), block=64),
    }
    for server in found.values():
        server.ready()
    return found


@pytest.fixture(scope="module")
def odd(start: Start, servers: dict[str, Server]) -> dict[str, Server]:
    """Servers with something wrong; also started together, and not waited for. Two of the others are needed no more."""
    for name in ("two", "sixty-four"):
        servers[name].close()
    return {
        "slow": start("slow", connector("kv_producer", "SlowPrefill", lease_s=8)),
        "swapped": start("swapped", connector("kv_consumer", "SwappedHeads")),
        "keys-as-shown": start("keys-as-shown", connector("kv_producer", "KeysAsShown")),
        "no-slots": start("no-slots", connector("kv_producer", slots=0)),
    }


@pytest.fixture(scope="module")
def slow(odd: dict[str, Server]) -> Server:
    return odd["slow"].ready()


def equal(servers: dict[str, Server], source: str, target: str, seed: int) -> int:
    """How many of the prompts decode to the plain server's tokens. Each call has prompts of its own, so nothing is in a
    prefix cache from before.
    """
    count = 0
    for prompt in prompts(seed):
        expected = tokens_of(servers["plain"].complete(prompt))
        assert len(expected) == 24
        count += tokens_of(disaggregated(servers[source], servers[target], prompt)) == expected
    return count


@pytest.mark.parametrize(
    ("source", "target", "seed"),
    [
        pytest.param("one", "decode", 11, id="tp1-to-tp1"),
        pytest.param("one", "two", 12, id="tp1-to-tp2"),
        pytest.param("two", "decode", 21, id="tp2-to-tp1"),
        pytest.param("one", "sixty-four", 64, id="block32-to-block64"),
        pytest.param("sixty-four", "decode", 32, id="block64-to-block32"),
    ],
)
def test_tokens_equal_those_of_a_plain_server(servers: dict[str, Server], source: str, target: str, seed: int) -> None:
    moved = len(received(servers[target]))
    assert equal(servers, source, target, seed) == len(LENGTHS)
    assert len(received(servers[target])) >= moved + len(LENGTHS), "nothing was moved, so nothing was compared"
    idle(servers[source], servers[target])


def test_requests_at_once(servers: dict[str, Server]) -> None:
    asked = prompts(77)
    expected = [tokens_of(servers["plain"].complete(prompt)) for prompt in asked]
    got: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        got[index] = tokens_of(disaggregated(servers["one"], servers["two"], asked[index]))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(len(asked))] == expected


def test_a_prefix_hit_on_decode_loads_only_what_is_missing(servers: dict[str, Server]) -> None:
    source, target = servers["one"], servers["decode"]
    first = prompts(5)[6]
    disaggregated(source, target, first)
    second = first[:160] + prompts(6)[5]
    assert tokens_of(disaggregated(source, target, second)) == tokens_of(servers["plain"].complete(second))
    assert received(target)[-1] == (len(second) - 1 - 160) * TOKEN_BYTES
    # all but the last token is there: nothing is loaded, and prefill frees its blocks all the same
    whole, loads = first[:161], len(received(target))
    assert tokens_of(disaggregated(source, target, whole)) == tokens_of(servers["plain"].complete(whole))
    assert len(received(target)) == loads
    idle(source, target)


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_request_id": None},
        {"remote_port": "x"},
        {"remote_engine_id": ""},
        {"remote_num_tokens": 0},
    ],
)
def test_bad_parameters_fail_their_request_only(servers: dict[str, Server], changed: dict[str, Any]) -> None:
    source, target = servers["one"], servers["decode"]
    prompt = prompts(8)[4]
    bad = target.complete(prompt, kv_transfer_params={**prefill(source, prompt), **changed})
    assert "choices" not in bad or bad["choices"][0]["finish_reason"] == "error", bad
    assert tokens_of(disaggregated(source, target, prompt)) == tokens_of(servers["plain"].complete(prompt))


def test_foreign_ids_are_recomputed_where_vllm_is_told_so(servers: dict[str, Server]) -> None:
    source, target = servers["one"], servers["sixty-four"]
    for index, changed in enumerate(({"remote_request_id": "nobody"}, {"remote_engine_id": "nobody"})):
        prompt = prompts(20 + index)[5]
        answer = target.complete(prompt, kv_transfer_params={**prefill(source, prompt), **changed})
        assert tokens_of(answer) == tokens_of(servers["plain"].complete(prompt))


def test_few_or_foreign_block_ids_change_nothing(servers: dict[str, Server]) -> None:
    """Block ids in a request come from outside, so they are not used."""
    source, target = servers["one"], servers["decode"]
    for index, ids in enumerate(([[1]], [[10**9] * 4])):
        prompt = prompts(30 + index)[5]
        answer = target.complete(prompt, kv_transfer_params={**prefill(source, prompt), "remote_block_ids": ids})
        assert tokens_of(answer) == tokens_of(servers["plain"].complete(prompt))


def test_transfers_are_counted_in_vllm_s_own_metrics(servers: dict[str, Server]) -> None:
    source, target = servers["one"], servers["two"]
    prompt = prompts(60)[5]

    def counts() -> tuple[float, ...]:
        return (
            metric(source, "vllm:kvferry_sent_bytes_total"),
            metric(target, "vllm:kvferry_received_bytes_total"),
            metric(target, "vllm:kvferry_load_seconds_count"),
            metric(target, "vllm:kvferry_failed_loads_total"),
        )

    def settled() -> tuple[float, ...]:
        """A worker's numbers come with its next step; blocks of prompts that nobody fetched are still in use here."""
        found = counts()
        for _ in range(20):
            time.sleep(1.5)
            found, earlier = counts(), found
            if found == earlier:
                return found
        raise AssertionError(f"the numbers don't settle: {found}")

    disaggregated(source, target, prompt)
    before = settled()
    disaggregated(source, target, prompts(61)[5])
    moved = (len(prompt) - 1) * TOKEN_BYTES
    assert [after - start for after, start in zip(settled(), before)] == [moved, moved, 2, 0]


def test_what_was_registered_and_read_is_written_down(servers: dict[str, Server], folder: Path) -> None:
    dumps = [read_dump(path) for path in (folder / "dumps").glob("vllm-*.json")]
    (second,) = (dump.layout.instance for dump in dumps if dump.rank == 1)
    both = sorted((dump for dump in dumps if dump.layout.instance == second), key=lambda dump: dump.rank)
    assert [tensor.shape[1:] for dump in both for tensor in dump.tensors] == [(2, 32, 64)] * 8
    workers = merge_dumps(both).workers
    assert [pool.owned["head"] for worker in workers for pool in worker.pools] == [((0, 2),)] * 2 + [((2, 4),)] * 2
    # the CPU backend's keys are transposed: the token is the innermost axis
    assert {mode.stride_bytes for mode in workers[0].pools[0].modes if mode.axis == "token"} == {4}


# the slow prefill server: something happens in the middle of a transfer


def ask_in_background(server: Server, prompt: list[int], params: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    body = {"kv_transfer_params": params}
    thread = threading.Thread(target=lambda: answers.append(server.complete(prompt, **body)))
    thread.start()
    return thread, answers


def test_a_lease_that_nobody_claims_ends_and_a_late_claim_is_refused(servers: dict[str, Server], slow: Server) -> None:
    prompt = prompts(40)[5]
    params = prefill(slow, prompt)
    assert usage(slow) > 0
    idle(slow)
    answer = servers["decode"].complete(prompt, kv_transfer_params=params)
    assert "choices" not in answer or answer["choices"][0]["finish_reason"] == "error", answer


def test_a_client_that_leaves_during_the_load_frees_both_sides(servers: dict[str, Server], slow: Server) -> None:
    target, prompt = servers["decode"], prompts(41)[7]
    loads = len(received(target))
    body = {"kv_transfer_params": prefill(slow, prompt), "timeout_s": 3.0}
    left: list[BaseException | None] = []

    def ask() -> None:
        try:
            target.complete(prompt, **body)
            left.append(None)
        except TimeoutError as error:
            left.append(error)

    client = threading.Thread(target=ask)
    client.start()
    seen = 0.0
    while client.is_alive():
        seen = max(seen, usage(target))
        time.sleep(0.1)
    assert seen > 0, "no block was ever in use for the load"
    assert isinstance(left[0], TimeoutError) and len(received(target)) == loads, "the load ended before the client left"
    idle(target, slow)
    assert len(received(target)) == loads
    prompt = prompts(42)[3]
    assert tokens_of(disaggregated(servers["one"], target, prompt)) == tokens_of(servers["plain"].complete(prompt))


def test_prefill_that_is_killed_during_a_load_fails_that_request_only(servers: dict[str, Server], slow: Server) -> None:
    target, prompt = servers["decode"], prompts(43)[7]
    loads = len(received(target))
    thread, answers = ask_in_background(target, prompt, prefill(slow, prompt))
    time.sleep(2.0)
    assert not answers and len(received(target)) == loads, "the load had ended before the kill"
    killed_s = time.monotonic()
    slow.kill()
    thread.join()
    assert time.monotonic() - killed_s < 10
    assert "choices" not in answers[0] or answers[0]["choices"][0]["finish_reason"] == "error", answers
    idle(target)
    assert tokens_of(disaggregated(servers["one"], target, prompt)) == tokens_of(servers["plain"].complete(prompt))


# what must be found out


def test_swapped_heads_are_seen_by_the_comparison(servers: dict[str, Server], odd: dict[str, Server]) -> None:
    odd["swapped"].ready()
    assert equal({**servers, **odd}, "one", "swapped", seed=50) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keys-as-shown", "layout probe: group attn, layer 0, part k: what the engine writes is not where"),
        ("no-slots", "kv_connector_extra_config.slots: expected int >= 1"),
    ],
)
def test_what_can_not_work_does_not_start(odd: dict[str, Server], name: str, message: str) -> None:
    with pytest.raises(AssertionError, match=f"{name} ended with"):
        odd[name].ready()
    assert message in odd[name].text()
