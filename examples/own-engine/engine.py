"""A toy engine that prefills in one process and decodes in two, with other pages and fewer heads in each.

kvferry registry &                 # once
python engine.py prefill &         # tensor parallel 1, pages of 16 tokens, [token][head]
python engine.py decode 0 &        # tensor parallel 2, pages of 8 tokens, [head][token]
python engine.py decode 1
python engine.py plain             # what one process says, to compare with
"""

from __future__ import annotations

import os
import sys

import numpy as np

import kvferry
from kvferry.layout.presets import attention_group, tp_heads
from kvferry.layout.tensors import pool_of

LAYERS, HEADS, DIM, PAGES = 4, 8, 16, 32
PROMPT = list(range(100, 137))
WORLD = {"prefill": 1, "decode": 2}
REGISTRY = os.environ.get("REGISTRY", "http://127.0.0.1:7700")
GROUP = attention_group(LAYERS, HEADS, DIM, "float32")


class Worker:
    """One worker's cache, and its end of all transfers."""

    def __init__(self, role: str, rank: int) -> None:
        self.heads = slice(*tp_heads(HEADS, WORLD[role], rank)[0])
        heads = self.heads.stop - self.heads.start
        if role == "prefill":
            self.page_tokens, axes = 16, ("part", "layer", "page", "token", "head", "dim")
            self.tensor = np.zeros((2, LAYERS, PAGES, 16, heads, DIM), np.float32)
            self.by_token = self.tensor  # [part, layer, page, token, head, dim], as both sides see it
        else:
            self.page_tokens, axes = 8, ("part", "layer", "page", "head", "token", "dim")
            self.tensor = np.zeros((2, LAYERS, PAGES, heads, 8, DIM), np.float32)
            self.by_token = self.tensor.swapaxes(3, 4)
        owned = {"head": [(self.heads.start, self.heads.stop)]}
        region, pool = pool_of(self.tensor, axes, GROUP, layers=range(LAYERS), parts=("k", "v"), owned=owned)
        worker = kvferry.Worker(rank, (region,), (pool,))
        instance = kvferry.Instance("kvferry-instance/1", role, "toy", (GROUP,), (worker,))
        memory = kvferry.HostMemory([kvferry.map_array(self.tensor)])
        self.endpoint = kvferry.Endpoint(instance, rank, memory, world=WORLD[role], registry=REGISTRY)

    def allocate(self, tokens: int) -> list[int]:
        """Pages in any order, as a busy engine has them."""
        count = -(-tokens // self.page_tokens)
        return [int(page) for page in np.random.default_rng().permutation(PAGES)[:count]]


def side(pages: list[int]) -> kvferry.Side:
    return kvferry.Side({"attn": kvferry.Table(tuple(pages))})


def model(tokens: list[int]) -> np.ndarray:
    """The «forward pass»: [part, layer, token, head, dim]."""
    return np.stack([np.random.default_rng(token).random((2, LAYERS, HEADS, DIM), np.float32) for token in tokens], 2)


def answer(cache: np.ndarray) -> str:
    """Attention of the newest token over all of the cache, each head on its own."""
    keys, values = cache[:, -1].astype(np.float64)  # of the last layer: [token, head, dim]
    scores = np.exp(np.einsum("hd,thd->ht", keys[-1], keys) / DIM**0.5)
    mixed = np.einsum("ht,thd->h", scores / scores.sum(1, keepdims=True), values)
    return " ".join(f"{number:.4f}" for number in mixed)


def prefill(worker: Worker) -> None:
    pages, wanted = worker.allocate(len(PROMPT)), {"attn": kvferry.Wanted((0, len(PROMPT)))}
    for index, token in enumerate(PROMPT):
        page, slot = divmod(index, worker.page_tokens)
        worker.by_token[:, :, pages[page], slot] = model([token])[:, :, 0, worker.heads]
    transfer = worker.endpoint.send("prompt-1", wanted, side(pages), timeout_s=30)
    report = worker.endpoint.wait(transfer)  # from now on its pages may hold another prompt
    print(f"prefill: sent {report.bytes} bytes to {len(report.peers)} workers")


def decode(worker: Worker) -> None:
    pages, wanted = worker.allocate(len(PROMPT)), {"attn": kvferry.Wanted((0, len(PROMPT)))}
    transfer = worker.endpoint.receive("prompt-1", "prefill", wanted, side(pages), timeout_s=30)
    report = worker.endpoint.wait(transfer)  # the pages may be read from now on, not before
    cache = worker.by_token[:, :, pages].reshape(2, LAYERS, -1, worker.by_token.shape[4], DIM)[:, :, : len(PROMPT)]
    print(f"decode: got {report.bytes} bytes; heads {worker.heads.start}-{worker.heads.stop - 1}: {answer(cache)}")


if __name__ == "__main__":
    role, rank = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if role == "plain":
        print(f"plain: {answer(model(PROMPT))}")
    else:
        worker = Worker(role, rank)
        with worker.endpoint:
            {"prefill": prefill, "decode": decode}[role](worker)
