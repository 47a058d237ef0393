"""Where a scheduler's memory is: the pool's tensors on the host or on a device, metadata rows always on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.layout.address import Address
from kvferry.layout.document import Worker
from kvferry.layout.tensors import view_of
from kvferry.plan.dense import DenseCopies
from kvferry.transport.base import Memory
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import HostMemory, MappedRegion
from kvferry.transport.runs import Runs

if TYPE_CHECKING:
    from kvferry.transport.torch_memory import TorchMemory


class SplitMemory:
    """A pool on a device beside rows on the host. A chunk is of one group, and a group lies in one of the two."""

    def __init__(self, worker: Worker, host: HostMemory, device: TorchMemory) -> None:
        self._host, self._device = host, device
        self._on_device = [region for region in worker.regions if region.memory == "device"]

    @property
    def spans(self) -> Sequence[Bytes]:
        return [*self._host.spans, *self._device.spans] if self._device.spans else []

    def gather(self, copies: DenseCopies, out: Bytes) -> None:
        self._of(copies).gather(copies, out)

    def scatter(self, copies: DenseCopies, chunk: Bytes) -> None:
        self._of(copies).scatter(copies, chunk)

    def runs(self, copies: DenseCopies) -> Runs:
        return self._of(copies).runs(copies)

    def view(self, base: Address, nbytes: int) -> Bytes:
        """The bytes as they are now; those on a device are a copy."""
        if self._inside(base):
            copied: Bytes = self._device.view(base, nbytes).cpu().numpy()
            return copied
        return self._host.view(base, nbytes)

    def _of(self, copies: DenseCopies) -> Memory:
        """Both check each run again, so that an address in neither is refused."""
        if not len(copies.addresses):
            return self._host
        return self._device if self._inside(Address(copies.addresses.u64[0])) else self._host

    def _inside(self, address: Address) -> bool:
        regions = self._on_device
        return any(r.base.value <= address.value and address.distance_from(r.base) < r.bytes for r in regions)


def memory_of(
    worker: Worker, tensors: Sequence[Any], map_host: Callable[[Address, int], MappedRegion]
) -> HostMemory | SplitMemory:
    """All that `worker` describes. `tensors`: the pool's, which is how a device's memory can be reached."""
    host = HostMemory([map_host(region.base, region.bytes) for region in worker.regions if region.memory == "host"])
    wanted = {region.base: region for region in worker.regions if region.memory == "device"}
    if not wanted:
        return host
    from kvferry.transport.torch_memory import TorchMemory, map_tensor

    found = [tensor for tensor in tensors if view_of(tensor).address in wanted]
    return SplitMemory(worker, host, TorchMemory([map_tensor(tensor) for tensor in found]))
