from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.errors import DocumentError, KeysError
from kvferry.observe import prometheus
from kvferry.observe.numbers import FAMILIES, Stopwatch
from tests.observe.duo import Duo, free_port

client = pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
Open = Callable[..., Duo]
DOCS = Path(__file__).parents[2] / "docs"


def test_names_follow_prometheus_conventions() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"kvferry(_[a-z]+)+", name)
        assert name.endswith("_total") == (family.kind == "counter")
        if family.kind == "histogram":
            assert name.endswith("_seconds")
        assert not {"transfer", "request", "generation"} & set(family.labels)


def test_every_metric_in_the_docs_exists_and_every_metric_is_in_the_docs() -> None:
    page = (DOCS / "how-to" / "observe.md").read_text(encoding="utf-8")
    named = {re.sub(r"_(bucket|sum|count)\Z", "", name) for name in re.findall(r"\bkvferry_[a-z_]+\b", page)}
    assert named - set(FAMILIES) - {prometheus.UP} == set()
    assert set(FAMILIES) - named == set()


def test_bytes_over_seconds_is_a_speed_at_any_moment() -> None:
    """F72: time goes on with each piece, not at the end of a transfer; pieces side by side share it."""
    watch = Stopwatch()
    watch.start(10.0)
    watch.start(11.0, 2)
    assert watch.seconds(12.0) == 2.0
    watch.stop(13.0, 3)
    assert watch.seconds(20.0) == 3.0
    watch.start(20.0)
    assert watch.seconds(21.0) == 4.0


def test_an_endpoint_is_served_where_it_was_told(duo: Open) -> None:
    port = free_port()
    pair = duo(metrics=f"127.0.0.1:{port}")
    report = pair.move("t")
    page = _get(port)
    source, target = (f'worker="{name}/0"' for name in (pair.prefill_name, pair.decode_name))
    assert f"kvferry_worker_up{{{source}}} 1.0" in page
    assert f'kvferry_bytes_total{{role="target",staged="yes",way="",{target}}} {float(report.bytes)}' in page
    assert re.search(rf'kvferry_phase_seconds_bucket{{le="\+Inf",phase="moving",role="source",{source}}} 1\.0', page)
    pair.close()
    with pytest.raises(OSError):
        _get(port)


def test_a_port_that_is_taken_is_told_and_the_endpoint_works(duo: Open, caplog: pytest.LogCaptureFixture) -> None:
    stop = prometheus.serve(prometheus.Address("127.0.0.1", port := free_port()), lambda: ((), ()))
    try:
        assert duo(metrics=f"127.0.0.1:{port}").move("t").bytes
    finally:
        stop()
    assert f"metrics: 127.0.0.1:{port} can't be used" in caplog.text
    assert "`kvferry metrics` serves all workers of this host" in caplog.text


def test_an_engine_takes_our_numbers_into_its_own_registry(duo: Open) -> None:
    registry = client.CollectorRegistry()
    collector = prometheus.register(registry)
    pair = duo()
    report = pair.move("t")
    labels = {"worker": f"{pair.prefill_name}/0", "role": "source", "outcome": "done", "phase": "done"}
    assert registry.get_sample_value("kvferry_transfers_total", labels) == 1
    pair.close()
    assert registry.get_sample_value("kvferry_transfers_total", labels) is None
    registry.unregister(collector)
    assert report.bytes


@pytest.mark.parametrize("value", ["9400", "host:9400", "127.0.0.1:", "127.0.0.1:65536", "0.0.0.0:9400", ":9400"])
def test_a_bad_place_is_refused_at_the_start(value: str, duo: Open) -> None:
    with pytest.raises(DocumentError, match=r"KVFERRY_METRICS: expected HOST:PORT"):
        duo(metrics=value)


def test_without_keys_metrics_stay_on_loopback(duo: Open) -> None:
    with pytest.raises(KeysError, match=r"KVFERRY_METRICS: without keys only loopback"):
        duo(metrics="10.1.2.3:9400")
    assert prometheus.parse_address("10.1.2.3:9400", "x", True) == prometheus.Address("10.1.2.3", 9400)


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None; import kvferry.session.endpoint\n"
        "from kvferry.cli.main import main; sys.exit(main(['metrics']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvferry: error: metrics need prometheus-client; pip install 'kvferry[metrics]'\n"


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text
