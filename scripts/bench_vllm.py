"""Stock NixlConnector's worker classes and ours side by side, on pools as vLLM 0.32 lays them out, from one prefill
worker to one or two decode workers. Run it in the environment of scripts/setup_vllm.sh, with NIXL in it:

    .venv-vllm/bin/python scripts/bench_vllm.py [--mib 1024] [--request-mib 256] [--repeat 5] [--json]

Every worker is a process of its own. The first load includes the handshake, and the others are transfers alone; what
arrived is compared. No model runs: vLLM's classes get their configuration and tensors, as from a model runner.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LAYERS, HEADS, DIM, BLOCK_TOKENS = 16, 8, 128, 32
CELL_BYTES = 2
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
}
WAYS = ("stock", "ours", "ours into pages", "ours over nixl")
ANSWER_S = 180.0


class Worker:
    """One tensor-parallel worker: `blocks` blocks of every layer, in the child process."""

    def __init__(self, role: str, rank: int, tp: int, blocks: int, folder: str, port: int) -> None:
        import torch

        self.role, self.rank, self.tp, self.blocks = role, rank, tp, blocks
        self.heads = HEADS // tp
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        shape = (LAYERS, blocks, self.heads, BLOCK_TOKENS, 2 * DIM)
        self.memory = torch.zeros(shape, dtype=torch.bfloat16)
        self.tensors = dict(zip(self.names, self.memory))
        self.page_bytes = self.heads * BLOCK_TOKENS * 2 * DIM * CELL_BYTES
        self.start(folder, port)

    def start(self, folder: str, port: int) -> None:
        raise NotImplementedError  # each way has its own

    def fill(self, seed: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(seed)
        for layer in self.memory.view(torch.int16):
            layer.random_(generator=draw)

    def sums(self, ids: list[int], heads: tuple[int, int]) -> list[int]:
        """A checksum of some heads of each block, weighted by place, so that swapped ones differ."""
        import torch

        cells = self.memory.view(torch.int16)[:, ids, heads[0] : heads[1]].to(torch.int64)
        weights = torch.arange(1, 1 + cells[0, 0].numel()).reshape(cells.shape[2:])
        return [int((cells[:, block] * weights).sum()) for block in range(len(ids))]


class Stock(Worker):
    """vLLM's own connector: scheduler side for the side channel, worker side for everything else."""

    def start(self, folder: str, port: int) -> None:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        os.environ["VLLM_DIST_IDENT"] = str(port)  # the name that an instance's workers on a CPU share
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            tensor_parallel_size=self.tp,
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlConnector",
                kv_role="kv_producer" if self.role == "prefill" else "kv_consumer",
                engine_id=self.role,
                kv_buffer_device="cpu",
            ),
        ).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        config.cache_config.num_gpu_blocks = self.blocks
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=self.heads, head_size=DIM, dtype=self.memory.dtype
        )
        whole = self.memory.numel() * CELL_BYTES
        tensor = KVCacheTensor(whole, self.names, self.page_bytes * self.blocks, self.page_bytes)
        cache = KVCacheConfig(self.blocks, [tensor], [KVCacheGroupSpec(self.names, spec)])
        with set_current_vllm_config(config):
            init_distributed_environment(self.tp, self.rank, f"tcp://127.0.0.1:{port}", self.rank, "gloo")
            initialize_model_parallel(self.tp)
            self.connector = NixlConnector(config, KVConnectorRole.WORKER, cache)
            self.connector.register_kv_caches(self.tensors)
            self.scheduler = NixlConnector(config, KVConnectorRole.SCHEDULER, cache)
        if self.role == "prefill":
            told = self.connector.get_handshake_metadata()
            self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, self.rank): told})

    def offer(self, request: str, ids: list[int]) -> dict[str, Any]:
        metadata = self._metadata()
        metadata.reqs_in_batch, metadata.reqs_to_send = {request}, {request: time.perf_counter() + 600}
        metadata.scheduler_clock = time.perf_counter()
        self._step(metadata)
        return {
            "remote_block_ids": (ids,),
            "remote_engine_id": self.role,
            "remote_request_id": request,
            "remote_host": self.scheduler.connector_scheduler.side_channel_host,
            "remote_port": self.scheduler.connector_scheduler.side_channel_port,
            "tp_size": self.tp,
            "remote_num_tokens": len(ids) * BLOCK_TOKENS,
        }

    def load(self, params: dict[str, Any], ids: list[int]) -> tuple[float, float]:
        metadata = self._metadata()
        began_s = time.monotonic()
        metadata.add_new_req_to_recv(params["remote_request_id"], (ids,), params, (0,), True)
        while True:
            found = self._step(metadata)
            if found.failed_recving:
                raise RuntimeError("the stock connector reports a failed load")
            if found.finished_recving:
                return began_s, time.monotonic()
            metadata = self._metadata()

    def idle(self) -> bool:
        """A step of prefill; whether it has sent everything."""
        return bool(self._step(self._metadata()).finished_sending)

    def _metadata(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

        return NixlConnectorMetadata()

    def _step(self, metadata: Any) -> Any:
        self.connector.bind_connector_metadata(metadata)
        self.connector.connector_worker.start_load_kv(metadata)
        return self.connector.get_transfer_results(set())

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.shutdown()


class Ours(Worker):
    transport, landing = "auto", "slots"

    def start(self, folder: str, port: int) -> None:
        from kvferry.engines.vllm.layers import CachedLayer
        from kvferry.engines.vllm.layout import merge_groups, read_groups, read_pieces, read_worker
        from kvferry.engines.vllm.options import Options
        from kvferry.engines.vllm.scheduler import BlockTable
        from kvferry.engines.vllm.states import Split
        from kvferry.engines.vllm.worker import WorkerSide, open_endpoint
        from kvferry.layout.document import Instance
        from kvferry.session.registry import RegistryServer
        from kvferry.transport.memory import HostMemory, map_array

        # prefill and the first decode worker each keep their instance's registry
        self.server = RegistryServer(port=port) if self.rank == 0 else None
        options = Options(transport=self.transport, landing=self.landing)
        layers = [
            CachedLayer(name, layer, 0, "full", "FLASH_ATTN", self.heads, DIM, DIM, BLOCK_TOKENS)
            for layer, name in enumerate(self.names)
        ]
        pieces = read_pieces(layers, self.tensors, self.blocks, Split(self.rank, self.tp, HEADS))
        groups = merge_groups([read_groups(pieces)])
        document = Instance(
            "kvferry-instance/1", self.role, "m", tuple(groups.values()), (read_worker(self.rank, pieces, groups),)
        )
        memory = HostMemory([map_array(tensor) for tensor in self.tensors.values()])
        self.registry = f"http://127.0.0.1:{port}"
        endpoint = open_endpoint(document, self.rank, memory, self.tp, self.registry, options)
        self.side = WorkerSide(endpoint, groups, [BlockTable("full", BLOCK_TOKENS)], options)

    def offer(self, request: str, ids: list[int]) -> dict[str, Any]:
        from kvferry.engines.vllm.orders import Orders, SendOrder

        order = SendOrder(request, f"{self.role}/{request}", len(ids) * BLOCK_TOKENS, (tuple(ids),))
        self.side.submit(Orders(sends=(order,)))
        return {"transfer": order.transfer, "registry": self.registry, "tokens": order.tokens}

    def load(self, params: dict[str, Any], ids: list[int]) -> tuple[float, float]:
        from kvferry.engines.vllm.orders import LoadOrder, Orders

        order = LoadOrder("r", params["transfer"], "prefill", params["registry"], 0, params["tokens"], (tuple(ids),))
        began_s = time.monotonic()
        self.side.submit(Orders(loads=(order,)))
        while True:
            ended = self.side.collect(set())
            if ended.failed_blocks or ended.failed:
                raise RuntimeError("our connector reports a failed load")
            if ended.received:
                return began_s, time.monotonic()
            time.sleep(0.0005)

    def idle(self) -> bool:
        return bool(self.side.collect(set()).sent)

    def close(self) -> None:
        self.side.close()
        if self.server is not None:
            self.server.close()


class OursIntoPages(Ours):
    landing = "pages"


class OursOverNixl(Ours):
    transport = "nixl"


KINDS: dict[str, type[Worker]] = {
    "stock": Stock,
    "ours": Ours,
    "ours into pages": OursIntoPages,
    "ours over nixl": OursOverNixl,
}


def serve(pipe: Connection, kind: str, arguments: tuple[Any, ...]) -> None:
    """The child: obeys, and keeps stepping while nothing is asked, as an engine does."""
    os.environ.update(ENVIRONMENT)
    try:
        worker: Any = KINDS[kind](*arguments)
        pipe.send((True, None))
        while True:
            while not pipe.poll(0.002 if worker.role == "prefill" else None):
                worker.idle()
            name, args = pipe.recv()
            pipe.send((True, getattr(worker, name)(*args)))
            if name == "close":
                return
    except EOFError:
        return
    except BaseException as error:
        pipe.send((False, repr(error)))
        raise


class Child:
    def __init__(self, kind: str, *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *args: Any) -> None:
        self._pipe.send((name, args))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"a worker gave no answer in {ANSWER_S:g} s")
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def __call__(self, name: str, *args: Any) -> Any:
        self.ask(name, *args)
        return self.answer()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def measure(kind: str, tp: int, folder: str, blocks: int, moved: int, repeat: int) -> dict[str, float]:
    """Seconds of the first load of two workers' blocks and the others, from the first worker's start to the last's end.
    RuntimeError where a byte is wrong.
    """
    children = [Child(kind, "prefill", 0, 1, blocks, folder, free_port())]
    port = free_port()
    children += [Child(kind, "decode", rank, tp, blocks, folder, port) for rank in range(tp)]
    try:
        for child in children:
            child.answer()
        prefill, targets = children[0], children[1:]
        prefill("fill", 1)
        spans = []
        ids = list(range(1, 1 + moved))
        for number in range(1 + repeat):
            into = ids[number % 7 :] + ids[: number % 7]
            params = prefill("offer", f"r{number}", ids)
            for target in targets:
                target.ask("load", params, into)
            ends = [target.answer() for target in targets]
            spans.append(max(end for _, end in ends) - min(began for began, _ in ends))
        share = HEADS // tp
        for rank, target in enumerate(targets):
            if target("sums", into, (0, share)) != prefill("sums", ids, (rank * share, (rank + 1) * share)):
                raise RuntimeError(f"{kind}: wrong bytes on decode worker {rank}")
        for child in children:
            child.ask("close")
        return {"first_s": spans[0], "transfer_s": statistics.median(spans[1:]), "best_s": min(spans[1:])}
    finally:
        for child in children:
            child.process.join(5)
            if child.process.is_alive():
                child.process.kill()


def write_model(folder: Path) -> None:
    """A config.json with the pool's sizes: all that vLLM's classes read of a model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "hidden_size": HEADS * DIM,
        "intermediate_size": 1024,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of each instance's pool")
    parser.add_argument("--request-mib", type=int, default=256, help="moved per request")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    block_bytes = LAYERS * HEADS * BLOCK_TOKENS * 2 * DIM * CELL_BYTES
    blocks = max((options.mib << 20) // block_bytes, 2)
    moved = min((options.request_mib << 20) // block_bytes, blocks - 1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for tp in (1, 2):
            for way in options.ways:
                found = measure(way, tp, folder, blocks, moved, options.repeat)
                found["handshake_s"] = max(found["first_s"] - found["transfer_s"], 0.0)
                rows.append({"way": way, "decode_workers": tp, "bytes": moved * block_bytes, **found})
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'':16}{'1 →':>4}{'transfer ms':>13}{'GB/s':>7}{'ratio':>7}{'first load ms':>15}{'ratio':>7}")
    for row in rows:
        stock = next((r for r in rows if r["way"] == "stock" and r["decode_workers"] == row["decode_workers"]), row)
        print(
            f"{row['way']:16}{row['decode_workers']:>4}{row['transfer_s'] * 1000:13.1f}"
            f"{row['bytes'] / row['transfer_s'] / 1e9:7.2f}{row['transfer_s'] / stock['transfer_s']:7.2f}"
            f"{row['first_s'] * 1000:15.1f}{row['first_s'] / stock['first_s']:7.2f}"
        )
    print("the first load includes the handshake; the other loads are transfers alone")
    print(f"ratios to stock; {rows[0]['bytes'] / (1 << 20):.0f} MiB per request, median of {options.repeat}, compared")


if __name__ == "__main__":
    main()
