"""Move one request's cache between the two instances of this folder: prefill.json → decode.json, as request.json says.

In a server each worker is a process of its own; here all three live in this one, with pools in NumPy arrays that stand
in for the device memory of the documents. Run it from anywhere: `python examples/move.py`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

import kvferry

FOLDER = Path(__file__).parent


def memory_of(instance: kvferry.Instance) -> list[np.ndarray]:
    """One array of bytes for each worker's region."""
    return [np.zeros(worker.regions[0].bytes, np.uint8) for worker in instance.workers]


def open_endpoints(
    stack: ExitStack, instance: kvferry.Instance, pools: list[np.ndarray], registry: str
) -> list[kvferry.Endpoint]:
    endpoints = []
    for worker, pool in zip(instance.workers, pools):
        # the pool answers to the region's device address
        memory = kvferry.HostMemory([kvferry.window(worker.regions[0].base, pool)])
        endpoint = kvferry.Endpoint(instance, worker.rank, memory, world=len(instance.workers), registry=registry)
        endpoints.append(stack.enter_context(endpoint))
    return endpoints


def main() -> None:
    prefill = kvferry.parse_instance((FOLDER / "prefill.json").read_bytes())
    decode = kvferry.parse_instance((FOLDER / "decode.json").read_bytes())
    request = kvferry.parse_request((FOLDER / "request.json").read_bytes(), prefill, decode)
    source_pools, target_pools = memory_of(prefill), memory_of(decode)
    source_pools[0][:] = np.random.default_rng(0).integers(0, 256, source_pools[0].size)

    with ExitStack() as stack:
        registry = stack.enter_context(kvferry.RegistryServer()).url
        sources = open_endpoints(stack, prefill, source_pools, registry)
        targets = open_endpoints(stack, decode, target_pools, registry)
        running = [(end, end.send("request-1", request.groups, request.source, timeout_s=10)) for end in sources]
        running += [
            (end, end.receive("request-1", prefill.instance, request.groups, request.target, timeout_s=10))
            for end in targets
        ]
        reports = [end.wait(transfer) for end, transfer in running]
    print(f"{reports[0].bytes} bytes left worker 0, {reports[1].bytes} and {reports[2].bytes} arrived")

    # the same cache, seen through the layouts of both sides: buffer (layer and part), page, then the order in a page
    source = source_pools[0].view(np.uint16).reshape(8, 8, 16, 4, 16)  # … token, head, dim
    target = [pool.view(np.uint16).reshape(8, 16, 2, 8, 16) for pool in target_pools]  # … head, token, dim
    wanted = source[:, [5, 2, 7]].reshape(8, 48, 4, 16)[:, 8:40]
    for rank in (0, 1):
        arrived = target[rank][:, [1, 0, 6, 3]].swapaxes(2, 3).reshape(8, 32, 2, 16)
        assert np.array_equal(arrived, wanted[:, :, 2 * rank : 2 * rank + 2])
    print("tokens 8 … 39 are the same on both sides")


if __name__ == "__main__":
    main()
