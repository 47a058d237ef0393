"""`kvferry doctor` finds planted faults, names the cure, hangs for nobody and harms nobody."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.doctor import machine, packages
from kvferry.cli.doctor.finding import Check, Finding, run_checks
from kvferry.cli.doctor.report import as_text
from kvferry.cli.main import main
from kvferry.session.keys import make_keys, read_keys
from kvferry.session.registry import Entry, Registry, RegistryServer
from tests.session import crew as session_crew
from tests.session.crew import Crew, Member, Pair
from tests.session.pools import Shape

COMMAND = [sys.executable, "-m", "kvferry.cli.main", "doctor", "--json"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def processes() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def crew(processes: Crew) -> Iterator[Crew]:
    yield processes
    processes.rest()


@pytest.fixture
def registry() -> Iterator[str]:
    with RegistryServer() as server:
        yield server.url


def examine(capsys: pytest.CaptureFixture[str], *options: str, only: str = "peers") -> tuple[int, list[Finding]]:
    code = main(["doctor", "--json", "--only", only, *options])
    return code, findings_of(capsys.readouterr().out)


def findings_of(text: str) -> list[Finding]:
    document: dict[str, Any] = json.loads(text)
    assert document["format"] == "kvferry-doctor/1"
    return [Finding(**one) for one in document["findings"]]


def faults(findings: list[Finding], level: str = "red") -> list[Finding]:
    return [finding for finding in findings if finding.level == level]


def the_fault(findings: list[Finding], area: str, name: str) -> Finding:
    (found,) = [one for one in findings if (one.area, one.name) == (area, name) and one.level != "green"]
    assert found.cure
    return found


def open_all(members: list[Member], name: str, shape: Shape, registry: str, **options: Any) -> None:
    """Workers that are registered when this returns."""
    session_crew.open_all(members, name, shape, registry, **options)
    client = Registry(registry, keys=options.get("keys"))
    until(lambda: client.instance(name).ready)


def open_workers(crew: Crew, registry: str) -> Pair:
    pair = session_crew.open_pair(crew, registry, Shape(tp=2), Shape(tp=1, page_tokens=8))
    until(lambda: len(Registry(registry).listing()) == 3)
    return pair


# all is well


def test_a_healthy_pair_is_green_and_not_touched(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = open_workers(crew, registry)
    code, findings = examine(capsys, "--registry", registry)
    assert (code, faults(findings), faults(findings, "yellow")) == (0, [], [])
    lines = {finding.name: finding.found for finding in findings if finding.area == "workers"}
    assert set(lines) == {f"{pair.source} rank 0", f"{pair.source} rank 1", f"{pair.target} rank 0"}
    for line in lines.values():
        assert "offers shm, process_vm, tcp; shm from here" in line
    fits = {finding.name: finding.found for finding in findings if finding.area == "pairs"}
    assert fits[pair.source].endswith(f"fits {pair.target} (over shm)")
    assert fits[pair.target].endswith(f"fits {pair.source} (over shm)")
    # the workers have forgotten the doctor, and nothing was registered
    for member in [*pair.sources, *pair.targets]:
        assert member("stats")["peers"] == 0
        assert member("stats")["refused_messages"] == 0
        assert member("untouched")
    assert {one.entry.instance for one in Registry(registry).listing()} == {pair.source, pair.target}


@pytest.mark.slow
def test_this_machine_is_described_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    text = capsys.readouterr().out
    assert "\x1b[" not in text  # no terminal, no colour
    for word in ("kvferry 0.", "python", "memory", "/dev/shm", "open files", "ptrace scope", "rdma devices", "shm"):
        assert word in text
    assert text.rstrip().splitlines()[-1].startswith("0 red, ")


# the eight planted faults


def test_registry_down(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, findings = examine(capsys, "--registry", url)
    fault = the_fault(findings, "registry", "answers")
    assert code == 2
    assert "Connection refused" in fault.found
    assert "start it: `kvferry registry" in fault.cure


@pytest.mark.slow
def test_a_registry_that_never_answers_does_not_hang_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started_s = time.monotonic()
        code, findings = examine(capsys, "--registry", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - started_s < 8
    assert code == 2 and "timed out" in the_fault(findings, "registry", "answers").found


def test_a_peer_with_another_model(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    members = crew.take(2)
    open_all(members[:1], "prefill", Shape(model="llama"), registry)
    open_all(members[1:], "decode", Shape(model="qwen"), registry)
    code, findings = examine(capsys, "--registry", registry)
    fault = the_fault(findings, "pairs", "decode")
    assert code == 2
    assert "model: decode has 'qwen', prefill has 'llama'" in fault.found
    assert fault.cure == "restart one of them: model must be the same on both"


def test_a_peer_with_the_same_model_and_another_cache(
    crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    members = crew.take(3)
    for name, member, heads in zip(("prefill", "decode-a", "decode-b"), members, (4, 4, 8)):
        open_all([member], name, Shape(heads=heads), registry)
    _, findings = examine(capsys, "--registry", registry)
    assert {one.name for one in faults(findings)} == {"decode-b", "decode-b, prefill", "decode-a, decode-b"}
    assert "'head': 8" in the_fault(findings, "pairs", "decode-b").found


@pytest.mark.parametrize(("files", "level"), [(100, "red"), (1024, "yellow")])
def test_limit_too_low(files: int, level: str) -> None:
    command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *COMMAND, "--only", "machine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    fault = the_fault(findings_of(done.stdout), "machine", "open files")
    assert done.returncode == (2 if level == "red" else 1)
    assert fault.level == level and f"{files} per process" in fault.found
    assert "ulimit -n 65536" in fault.cure


@pytest.mark.parametrize(("options", "extra"), [(["--transport", "nixl"], "nixl"), (["--need", "torch"], "torch")])
def test_missing_extra(options: list[str], extra: str) -> None:
    hidden = "nixl_cu12", "nixl_cu13", "nixl", "torch"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); import kvferry.cli.main as m; sys.exit(m.main())"
    )
    command = [sys.executable, "-c", script, "doctor", "--json", "--only", "packages", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    fault = the_fault(findings_of(done.stdout), "packages", extra)
    assert done.returncode == 2
    assert fault.found.startswith("missing, and needed here")
    assert fault.cure.startswith("pip install")


def test_a_missing_extra_that_nobody_needs_is_no_fault() -> None:
    script = "import sys; sys.modules['torch'] = None; import kvferry.cli.main as m; sys.exit(m.main())"
    command = [sys.executable, "-c", script, "doctor", "--json", "--only", "packages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (line,) = [one for one in findings_of(done.stdout) if one.name == "not installed"]
    assert line.level == "green" and "torch" in line.found


def test_unreachable_address(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    Registry(registry).put(Entry("prefill", 7, 0, 1, address), 60)
    code, findings = examine(capsys, "--registry", registry)
    fault = the_fault(findings, "workers", "prefill rank 0")
    assert code == 2
    assert fault.found == f"unreachable address: {address}: Connection refused"
    assert "KVFERRY_HOST" in fault.cure


def test_wrong_key_of_a_registry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = make_keys(tmp_path / "theirs", "theirs")
    make_keys(tmp_path / "ours", "ours")
    with RegistryServer(keys=theirs) as server:
        code, findings = examine(capsys, "--registry", server.url, "--keys", str(tmp_path / "ours"))
        bare, without = examine(capsys, "--registry", server.url)
    for fault in (the_fault(findings, "registry", "answers"), the_fault(without, "registry", "answers")):
        assert "401" in fault.found
        assert "use the same folder of keys here (KVFERRY_KEYS, --keys) and there" in fault.cure
    assert code == bare == 2


def test_wrong_key_of_a_worker(crew: Crew, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both hold the registry's secret, but the worker has not been given the doctor's public key."""
    make_keys(tmp_path / "worker", "worker")
    make_keys(tmp_path / "doctor", "doctor", join=tmp_path / "worker")
    (tmp_path / "registry").mkdir(mode=0o700)
    everybody = read_keys(tmp_path / "worker")
    (tmp_path / "worker" / "allowed" / "doctor.json").unlink()
    with RegistryServer(keys=everybody) as server:
        members = crew.take(1)
        open_all(members, "prefill", Shape(), server.url, keys=read_keys(tmp_path / "worker"))
        code, findings = examine(capsys, "--registry", server.url, "--keys", str(tmp_path / "doctor"))
        crew.rest()
    fault = the_fault(findings, "workers", "prefill rank 0")
    assert code == 2
    assert "it refuses our line: it does not allow this side's public key" in fault.found
    assert "copy the key's file to its allowed/ and restart it" in fault.found


def test_keys_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examine(capsys, "--keys", str(tmp_path / "none"), only="machine")
    assert code == 2
    assert "secret.json: No such file" in the_fault(findings, "machine", "address and keys").found


def test_shared_memory_full(tmp_path: Path) -> None:
    """A file system of its own, in a namespace of its own, so that nobody else's is full."""
    if not can_mount():
        pytest.skip("this user can't mount a file system in a namespace of its own")
    fill = "mount -t tmpfs -o size=40m none /dev/shm && head -c 30M /dev/zero >/dev/shm/left && "
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", f'{fill} exec "$@"', "sh", *COMMAND]
    done = subprocess.run([*command, "--only", "machine"], capture_output=True, text=True, timeout=60)
    fault = the_fault(findings_of(done.stdout), "machine", "shared memory")
    assert done.returncode == 2
    assert "10 MiB free of 40 MiB: full" in fault.found
    assert "docker run --shm-size=8g" in fault.cure


def can_mount() -> bool:
    command = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_stale_generation_that_still_runs(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, later, decode = crew.take(3)
    old = earlier("open", "prefill", Shape(), 0, registry, ttl_s=2.0).split("/")[1]
    new = later("open", "prefill", Shape(), 0, registry).split("/")[1]
    open_all([decode], "decode", Shape(), registry)
    until(lambda: any(one.superseded == int(old) for one in Registry(registry).listing()))
    code, findings = examine(capsys, "--registry", registry)
    fault = the_fault(findings, "registry", "prefill rank 0")
    assert code == 2
    assert f"stale generation: an earlier start, {old}, is still running" in fault.found and new in fault.found
    assert "end the process of the earlier start" in fault.cure


def test_stale_generation_whose_place_another_start_has(
    crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entry names a start that has ended; at its address another one listens."""
    (member,) = crew.take(1)
    open_all([member], "elsewhere", Shape(), registry)
    Registry(registry).put(Entry("prefill", 7, 0, 1, member("address")), 60)
    _, findings = examine(capsys, "--registry", registry)
    fault = the_fault(findings, "workers", "prefill rank 0")
    assert "stale generation" in fault.found and "does not answer as generation 7" in fault.found
    assert "end the earlier start" in fault.cure


def test_a_worker_that_was_killed(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    (member,) = crew.take(1)
    open_all([member], "prefill", Shape(), registry, ttl_s=30.0)
    member.kill()
    code, findings = examine(capsys, "--registry", registry)
    assert code == 2
    fault = the_fault(findings, "workers", "prefill rank 0")
    assert "Connection refused" in fault.found and "it did not sign off" in fault.cure


# and others


@pytest.mark.slow
def test_a_stopped_worker_delays_no_other(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = open_workers(crew, registry)
    pair.sources[1].signal(signal.SIGSTOP)
    try:
        _, findings = examine(capsys, "--registry", registry)
    finally:
        pair.sources[1].signal(signal.SIGCONT)
    assert "its process is stopped" in the_fault(findings, "workers", f"{pair.source} rank 1").found
    levels = {one.name: one.level for one in findings if one.area == "workers"}
    assert levels[f"{pair.source} rank 0"] == levels[f"{pair.target} rank 0"] == "green"


def test_a_missing_rank(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = open_workers(crew, registry)
    pair.sources[1]("close")
    _, findings = examine(capsys, "--registry", registry)
    assert the_fault(findings, "registry", pair.source).found == "1 of 2 workers, rank 1 missing"


def test_no_way_between_the_two(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    members = crew.take(1)
    open_all(members, "prefill", Shape(), registry, transport="tcp")
    _, findings = examine(capsys, "--registry", registry, "--transport", "shm")
    fault = the_fault(findings, "workers", "prefill rank 0")
    assert "offers tcp; no way to the peer over 'shm': shm: not offered by the peer" in fault.found
    assert "the same transport" in fault.cure


def test_a_pair_without_a_common_transport(crew: Crew, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, member, transport in zip(("prefill", "decode"), crew.take(2), ("tcp", "shm")):
        open_all([member], name, Shape(), registry, transport=transport)
    _, findings = examine(capsys, "--registry", registry)
    fault = the_fault(findings, "pairs", "decode, prefill")
    assert "no transport that both could use" in fault.found and "with auto" in fault.cure


def test_something_else_at_an_address(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=greet, args=(server,), daemon=True).start()
        Registry(registry).put(Entry("prefill", 7, 0, 1, f"tcp://127.0.0.1:{port}"), 60)
        _, findings = examine(capsys, "--registry", registry)
    assert "something else listens there" in the_fault(findings, "workers", "prefill rank 0").found


def greet(server: socket.socket) -> None:
    with server.accept()[0] as connection:
        connection.sendall(b"SSH-2.0-x\r\n")


def test_stand_ins_of_verify_are_no_workers(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    Registry(registry).put(Entry("verify/prefill/control", 7, 0, 1, "tcp://127.0.0.1:1"), 60)
    _, findings = examine(capsys, "--registry", registry)
    assert [one.area for one in findings] == ["registry"]


def test_an_empty_registry_is_yellow(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examine(capsys, "--registry", registry)
    assert code == 1 and "start the workers" in the_fault(findings, "registry", "answers").cure


def wait(event: threading.Event) -> list[Finding]:
    event.wait()
    return []


def test_a_check_that_hangs_or_fails_is_a_red_line() -> None:
    def broken() -> list[Finding]:
        raise ZeroDivisionError("x")

    hung = threading.Event()
    started_s = time.monotonic()
    checks = [Check("a", "hangs", lambda: wait(hung), 0.2), Check("a", "breaks", broken)]
    found = run_checks(checks)
    hung.set()
    assert time.monotonic() - started_s < 5
    assert [one.level for one in found] == ["red", "red"]
    assert "no answer within 0.2 s" in found[0].found and "ZeroDivisionError" in found[1].found


# the machine, with files that stand in for what this one doesn't have


@contextmanager
def folder_of(root: Path, files: dict[str, str]) -> Iterator[Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    yield root


def test_rdma_devices_and_what_they_need(tmp_path: Path) -> None:
    files = {"class/mlx5_0/ports/1/state": "1: DOWN\n", "class/mlx5_1/ports/1/state": "4: ACTIVE\n"}
    with folder_of(tmp_path, files) as root:
        (hidden,) = machine.rdma_devices(root / "class", root / "verbs")
        (root / "verbs").mkdir()
        (root / "verbs" / "uverbs0").touch()
        down, active = machine.rdma_devices(root / "class", root / "verbs")
        low = machine.locked_memory(8 * MIB, root / "class")
        enough = machine.locked_memory(resource.RLIM_INFINITY, root / "class")
        none = machine.locked_memory(8 * MIB, root / "nothing")
    assert hidden.level == "yellow" and "--device=/dev/infiniband" in hidden.cure
    assert (down.level, down.found) == ("yellow", "port 1 DOWN: none is active") and active.level == "green"
    assert low.level == "red" and "ulimit -l unlimited" in low.cure
    assert enough.level == none.level == "green"


@pytest.mark.parametrize("files", [("memory.max", "memory.current"),
                                   ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")])  # fmt: skip
def test_memory_of_a_control_group(files: tuple[str, str], tmp_path: Path) -> None:
    with folder_of(tmp_path, {files[0]: str(300 * MIB), files[1]: str(250 * MIB)}) as root:
        low = machine.memory(root)
    assert low.level == "red" and low.found == "50 MiB left by the control group's limit of 300 MiB"
    with folder_of(tmp_path, {files[0]: "max", files[1]: "0"}) as root:
        assert machine.memory(root).found.endswith("left by the machine")


@pytest.mark.parametrize(
    ("scope", "transport", "level"), [("0", "process_vm", "green"), ("1", "auto", "green"), ("1", "process_vm", "red")]
)
def test_ptrace_scope(scope: str, transport: str, level: str, tmp_path: Path) -> None:
    with folder_of(tmp_path, {"scope": scope}) as root:
        found = machine.ptrace_scope(transport, root / "scope")
    assert found.level == level
    assert level == "green" or "kernel.yama.ptrace_scope=0" in found.cure


@pytest.mark.parametrize(("count", "autogroup", "said"), [(2, "1", True), (2, "0", False), (64, "1", False)])
def test_few_cores_that_sessions_share(count: int, autogroup: str, said: bool, tmp_path: Path) -> None:
    with folder_of(tmp_path, {"autogroup": autogroup}) as root:
        found = machine.cores(count, root / "autogroup")
    assert found.level == "green"
    assert ("start busy servers from one session" in found.found) == said


def test_ucx_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda extra: True)
    monkeypatch.setattr(packages, "UCX_S", 0.01)
    assert "does not start within 0.01 s" in packages.ucx().found


def until(true: Any, timeout_s: float = 15.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "in vain"
        time.sleep(0.05)


@pytest.mark.slow
def test_descriptors_per_peer_are_not_more_than_it_says(crew: Crew, registry: str) -> None:
    members = crew.take(5)
    open_all(members[:1], "decode", Shape(), registry)
    for number, member in enumerate(members[1:]):
        open_all([member], f"prefill-{number}", Shape(), registry)
    members[0]("connect", "prefill-0", 20.0)
    before = members[0]("descriptors")
    for number in (1, 2, 3):
        members[0]("connect", f"prefill-{number}", 20.0)
    each = (members[0]("descriptors") - before) / 3
    print(f"{each} descriptors per peer")
    assert 0 < each <= machine.FILES_PER_PEER


def test_colour_is_for_terminals_only() -> None:
    finding = Finding("red", "machine", "memory", "gone", "get more")
    assert "\x1b[31mred" in as_text([finding], 1.0, colour=True)
    plain = as_text([finding], 1.0, colour=False)
    assert plain.splitlines() == [
        "machine", "  red     memory  gone", "                  → get more", "", "1 red, 0 yellow, 0 green; 1.0 s"
    ]  # fmt: skip
