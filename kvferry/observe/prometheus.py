"""The numbers of endpoints for Prometheus, by prometheus-client (extra `metrics`), which nothing else here needs.

Three ways: `register()` adds the endpoints of this process to a registry that is served already; KVFERRY_METRICS, or
`Endpoint(metrics="HOST:PORT")`, serves an endpoint by itself; `kvferry metrics` serves all endpoints of a host.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvferry.errors import DocumentError, KeysError, MissingExtra
from kvferry.observe.numbers import FAMILIES, SECONDS, Family
from kvferry.observe.records import Log, short
from kvferry.observe.snapshot import LIVE, Snapshots
from kvferry.transport.hosts import is_loopback, machine_address

LOG = logging.getLogger("kvferry.observe")
VARIABLE = "KVFERRY_METRICS"
UP = "kvferry_worker_up"
"""1 for a worker that has answered, 0 for one that has not: it is stopped or stuck."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Workers:
    """A collector, as prometheus-client calls it: what `ask` answers at each scrape. Silent workers are names only."""

    def __init__(self, ask: Callable[[], tuple[Iterable[Log], Iterable[str]]]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Any]:
        return families(*self._ask())


def families(logs: Iterable[Log], silent: Iterable[str] = ()) -> Iterator[Any]:
    """Prometheus-client's metric families, in the order of `FAMILIES`. Each sample has the label `worker`."""
    core = _client("prometheus_client.core")
    workers = [(short(log.head.worker), log.samples) for log in logs]
    up = core.GaugeMetricFamily(UP, "Whether a worker has answered", labels=("worker",))
    for name, value in [*((name, 1) for name, _ in workers), *((name, 0) for name in silent)]:
        up.add_metric((name,), value)
    yield up
    for name, family in FAMILIES.items():
        found = _empty(core, name, family)
        for worker, samples in workers:
            for sample in samples:
                if sample.name == name and family.kind == "histogram":
                    found.add_metric((worker, *sample.labels), _buckets(sample.buckets), sample.value)
                elif sample.name == name:
                    found.add_metric((worker, *sample.labels), sample.value)
        yield found


def text(logs: Iterable[Log], silent: Iterable[str] = ()) -> str:
    """Prometheus' text format."""
    made = list(families(logs, silent))
    registry = _client().CollectorRegistry()
    registry.register(_Fixed(made))
    document: str = _client().generate_latest(registry).decode()
    return document


def register(registry: Any = None) -> Workers:
    """Adds the endpoints of this process, present and future, to `registry`, by default prometheus-client's own.

    MissingExtra where prometheus-client isn't installed. Once per registry; `registry.unregister` takes it out.
    """
    collector = Workers(lambda: ([one.take(records=False) for one in list(LIVE)], ()))
    (_client().REGISTRY if registry is None else registry).register(collector)
    return collector


def serve(address: Address, ask: Callable[[], tuple[Iterable[Log], Iterable[str]]]) -> Callable[[], None]:
    """Answers scrapes at `address` until the function that is returned is called. OSError where it can't be bound."""
    registry = _client().CollectorRegistry()
    registry.register(Workers(ask))
    server, thread = _client().start_http_server(address.port, address.host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def parse_address(value: str, name: str, keys: bool) -> Address:
    """DocumentError, which names `name`, for what is no HOST:PORT; KeysError for one off loopback without keys."""
    host, colon, port = value.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    if not colon or not machine_address(host) or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise DocumentError(name, f"expected HOST:PORT with an IPv4 address of this machine, got {value!r}")
    if not keys and not is_loopback(host):
        raise KeysError(
            f"{name}: without keys only loopback can be used, got {value!r}; metrics are for everybody there"
        )
    return Address(host, int(port))


def need() -> None:
    """MissingExtra where prometheus-client isn't installed."""
    _client()


class Shared:
    """The servers of this process: endpoints with the same address share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[Address, tuple[list[Snapshots], Callable[[], None]]] = {}

    def open(self, address: Address, source: Snapshots) -> bool:
        """Whether the endpoint is served; a port that another process has is told in the log."""
        with self._lock:
            if address in self._served:
                self._served[address][0].append(source)
                return True
            sources = [source]
            try:
                stop = serve(address, lambda: ([one.take(records=False) for one in list(sources)], ()))
            except OSError as error:
                LOG.warning(
                    "metrics: %s can't be used: %s; `kvferry metrics` serves all workers of this host", address, error
                )
                return False
            self._served[address] = (sources, stop)
            return True

    def close(self, address: Address, source: Snapshots) -> None:
        with self._lock:
            sources, stop = self._served[address]
            sources.remove(source)
            if not sources:
                del self._served[address]
                stop()


SHARED = Shared()


class _Fixed:
    def __init__(self, found: list[Any]) -> None:
        self._found = found

    def collect(self) -> Iterator[Any]:
        return iter(self._found)


def _empty(core: Any, name: str, family: Family) -> Any:
    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[family.kind](name.removesuffix("_total"), family.help, labels=("worker", *family.labels))


def _buckets(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in SECONDS), "+Inf"]
    return list(zip(bounds, itertools.accumulate(counts)))


def _client(module: str = "prometheus_client") -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingExtra("metrics need prometheus-client; pip install 'kvferry[metrics]'") from None
