"""The folder of `kvferry keys`, what reads it, and what follows from it for addresses and registry requests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import zmq

from kvferry.cli import main as cli
from kvferry.errors import DocumentError, KeysError, MissingExtra, RegistryError
from kvferry.session.keys import Access, access, make_keys, read_keys
from kvferry.session.reach import host_of, line_problem, registration_problem
from kvferry.session.registry import Directory, Entry, RegistryServer
from kvferry.session.signing import CHALLENGE_S, Challenges, Signer, Unsigned, answer_mac
from tests.session.deployment import deployment, endpoint

A, B = "a" * 40, "b" * 40


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# the folder


def test_the_secret_is_for_its_owner_only_and_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    old = os.umask(0)
    try:
        assert cli.main(["keys", str(folder)]) == 0
    finally:
        os.umask(old)
    assert mode(folder / "secret.json") == 0o600
    assert mode(folder / "allowed") == 0o755
    secret = json.loads((folder / "secret.json").read_bytes())
    keys = read_keys(folder)
    assert keys.allowed == {secret["public"]}
    printed = "".join(capsys.readouterr()) + repr(keys) + (folder / "allowed" / "deployment.json").read_text()
    for hidden in (secret["secret"], secret["registry"], repr(keys.registry)):
        assert hidden not in printed


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_keys(tmp_path, "one")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert cli.main(["keys", str(tmp_path), "--name", "two"]) == 2
    assert capsys.readouterr().err == (
        f"kvferry: error: {tmp_path}/secret.json: exists already and is not overwritten; choose another folder, "
        "or remove it\n"
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_member_that_joins_is_allowed_by_both(tmp_path: Path) -> None:
    one = make_keys(tmp_path / "one", "one")
    two = make_keys(tmp_path / "two", "two", join=tmp_path / "one")
    assert two.allowed == read_keys(tmp_path / "one").allowed == {one.public, two.public}
    assert two.registry == one.registry
    assert two.secret != one.secret
    with pytest.raises(KeysError, match=r"--name: 'two' is a member of .* already; members: one, two"):
        make_keys(tmp_path / "three", "two", join=tmp_path / "one")
    assert not (tmp_path / "three").exists()


def test_a_member_is_taken_off_the_list_by_removing_its_file(tmp_path: Path) -> None:
    one = make_keys(tmp_path / "one", "one")
    make_keys(tmp_path / "two", "two", join=tmp_path / "one")
    (tmp_path / "one" / "allowed" / "two.json").unlink()
    assert read_keys(tmp_path / "one").allowed == {one.public}


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a" * 65, "a\n", "ü"])
def test_names_are_file_names(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", str(tmp_path / "keys"), f"--name={name}"]) == 2
    assert "--name: expected up to 64 letters" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused(bits: int, tmp_path: Path) -> None:
    make_keys(tmp_path, "one")
    (tmp_path / "secret.json").chmod(bits)
    with pytest.raises(KeysError, match=rf"its mode is {bits:04o}, .*expected 0600; chmod 600 "):
        read_keys(tmp_path)


def test_a_list_that_anybody_may_write_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path, "one")
    (tmp_path / "allowed").chmod(0o777)
    with pytest.raises(KeysError, match=r"allowed: its mode is 0777.*chmod o-w"):
        read_keys(tmp_path)


@pytest.mark.parametrize("file", ["secret.json", "allowed/one.json"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"[" * 100_000, b"changed"])
def test_a_damaged_file_is_named_without_its_content(file: str, damage: bytes, tmp_path: Path) -> None:
    make_keys(tmp_path, "one")
    text = (tmp_path / file).read_text()
    public = json.loads(text)["public"]
    (tmp_path / file).write_bytes(text.replace(public, public[1:]).encode() if damage == b"changed" else damage)
    with pytest.raises(KeysError, match=file) as caught:
        read_keys(tmp_path)
    assert public[1:] not in str(caught.value)


def test_a_public_key_of_another_pair_is_refused(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "one")
    path = tmp_path / "secret.json"
    path.write_text(path.read_text().replace(keys.public, zmq.curve_keypair()[0].decode()))
    with pytest.raises(KeysError, match="not that of the secret key"):
        read_keys(tmp_path)


def test_zeromq_without_curve_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(tmp_path, "one")
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    for call in (lambda: read_keys(tmp_path), lambda: make_keys(tmp_path / "new", "two")):
        with pytest.raises(MissingExtra, match=r"pyzmq here was built without CURVE; pip install"):
            call()
    assert not (tmp_path / "new").exists()


# where it comes from


def test_environment_gives_keys_and_host_to_endpoints_and_registries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(tmp_path, "all")
    monkeypatch.setenv("KVFERRY_KEYS", str(tmp_path))
    monkeypatch.setenv("KVFERRY_HOST", "127.0.0.2")
    assert access() == Access("127.0.0.2", keys)
    with (
        RegistryServer() as registry,
        endpoint("p", registry.url, None) as source,
        endpoint("d", registry.url, None) as target,
    ):
        assert registry.url.startswith("http://127.0.0.2:")
        target.connect("p", timeout_s=10)
        (known,) = target._machine.core.known.values()
        assert known.address.startswith("tcp://127.0.0.2:")
        assert known.key == keys.public
        assert source.stats()["refused_messages"] == 0


def test_f69_a_missing_folder_is_no_licence_to_go_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_KEYS", str(tmp_path / "nowhere"))
    with pytest.raises(KeysError, match=r"nowhere/secret.json: No such file .* make keys with `kvferry keys DIR`"):
        RegistryServer()


@pytest.mark.parametrize("host", ["0.0.0.0", "224.0.0.1", "::1", "example.org", "", "127.1"])
def test_f60_with_keys_a_host_is_still_the_address_of_one_machine(host: str) -> None:
    (keys,) = deployment("one")
    with pytest.raises(DocumentError, match="host: expected the IPv4 address of this machine"):
        access(host, keys)


def test_an_address_of_another_machine_is_refused() -> None:
    (keys,) = deployment("one")
    with pytest.raises(DocumentError, match=r"host: '192.0.2.1' can't be bound, is it an address of this machine\?"):
        access("192.0.2.1", keys)


def test_f69_a_registry_elsewhere_needs_keys() -> None:
    with pytest.raises(KeysError, match=r"registry http://192.0.2.1:7700: only one on loopback .*kvferry keys"):
        endpoint("p", "http://192.0.2.1:7700", None)


def test_f60_an_endpoint_that_users_of_its_registry_cannot_reach_does_not_start() -> None:
    (keys,) = deployment("one")
    with pytest.raises(DocumentError, match=r"host: 127.0.0.1 is out of reach for users of registry .*KVFERRY_HOST"):
        endpoint("p", "http://192.0.2.1:7700", keys)


# addresses


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:1", "127.0.0.1"),
        ("tcp://10.1.2.3:65535", "10.1.2.3"),
        ("tcp://10.1.2.3:65536", ""),
        ("tcp://10.1.2.3:0", ""),
        ("tcp://0.0.0.0:5", ""),
        ("tcp://*:5", ""),
        ("tcp://999.1.1.1:5", ""),
        ("tcp://evil.example:5", ""),
        ("ipc:///tmp/x", ""),
        ("tcp://10.1.2.3:5;tcp://10.1.2.4:5", ""),
        ("tcp://10.1.2.3:5\n", ""),
    ],
)
def test_only_addresses_of_one_machine_are_ever_connected_to(address: str, host: str) -> None:
    assert host_of(address) == host


@pytest.mark.parametrize(
    ("own", "allowed", "address", "key", "expected"),
    [
        ("tcp://127.0.0.1:1", (), "tcp://127.0.0.2:2", "", ""),
        ("tcp://10.0.0.1:1", (A,), "tcp://10.0.0.2:2", A, ""),
        ("tcp://127.0.0.1:1", (A,), "tcp://127.0.0.1:2", "", "the peer has no keys and this side has"),
        ("tcp://127.0.0.1:1", (), "tcp://127.0.0.1:2", A, f"the peer has keys (its public key is {A}) and this side"),
        ("tcp://127.0.0.1:1", (A,), "tcp://127.0.0.1:2", B, f"public key {B} is not allowed here"),
        ("tcp://127.0.0.1:1", (), "tcp://10.0.0.2:2", "", "this side's address is on loopback, the peer's is not"),
        ("tcp://10.0.0.1:1", (A,), "tcp://127.0.0.1:2", A, "the peer's address is on loopback, this side's is not"),
        ("tcp://10.0.0.1:1", (A,), "tcp://0.0.0.0:2", A, "address 'tcp://0.0.0.0:2' is not that of one machine"),
    ],
)
def test_f60_f69_who_may_have_a_line_to_whom(
    own: str, allowed: tuple[str, ...], address: str, key: str, expected: str
) -> None:
    problem = line_problem(own, allowed, address, key)
    assert expected in problem
    assert bool(problem) == bool(expected)


@pytest.mark.parametrize(
    ("host", "allowed", "address", "key", "expected"),
    [
        ("127.0.0.1", (), "tcp://127.0.0.1:2", "", ""),
        ("127.0.0.1", (A,), "tcp://10.0.0.2:2", A, ""),
        ("10.0.0.1", (A,), "tcp://10.0.0.2:2", A, ""),
        (
            "10.0.0.1",
            (A,),
            "tcp://127.0.0.1:2",
            A,
            "'tcp://127.0.0.1:2' is on loopback and this registry at '10.0.0.1'",
        ),
        ("10.0.0.1", (A,), "tcp://0.0.0.0:2", A, "address 'tcp://0.0.0.0:2' is not that of one machine"),
        ("10.0.0.1", (A,), "tcp://*:2", A, "address 'tcp://*:2' is not that of one machine"),
        ("127.0.0.1", (), "tcp://0.0.0.0:2", "", "address 'tcp://0.0.0.0:2' is not that of one machine"),
        ("127.0.0.1", (A,), "tcp://127.0.0.1:2", "", "its public key '' is not allowed here"),
        ("127.0.0.1", (A,), "tcp://127.0.0.1:2", B, f"its public key '{B}' is not allowed here"),
        ("127.0.0.1", (), "tcp://127.0.0.1:2", B, f"it has keys (its public key is {B}) and this registry has none"),
    ],
)
def test_f60_what_a_registry_takes(host: str, allowed: tuple[str, ...], address: str, key: str, expected: str) -> None:
    problem = registration_problem(host, allowed, address, key)
    assert expected in problem
    assert bool(problem) == bool(expected)


def test_f60_the_registry_says_which_entry_it_refuses() -> None:
    (keys,) = deployment("one")
    directory = Directory(Access("10.0.0.1", keys))
    with pytest.raises(RegistryError, match=r"instance 'p' rank 0: its address 'tcp://127.0.0.1:9' is on loopback"):
        directory.put(Entry("p", 1, 0, 1, "tcp://127.0.0.1:9", keys.public), 10, 0)


def test_f67_a_rank_keeps_its_key_while_it_is_registered() -> None:
    one, two = deployment("one", "two")
    directory = Directory(Access("127.0.0.1", one))
    first = Entry("p", 1, 0, 1, "tcp://127.0.0.1:9", one.public)
    directory.put(first, 10, 0)
    with pytest.raises(RegistryError, match=r"can't replace while that entry is renewed, or for another 6 s"):
        directory.put(Entry("p", 2, 0, 1, "tcp://127.0.0.1:666", two.public), 10, 4)
    assert directory.view("p", 4).workers == (first,)
    later = Entry("p", 2, 0, 1, "tcp://127.0.0.1:10", two.public)
    directory.put(later, 10, 10)
    assert directory.view("p", 10).workers == (later,)


# signatures


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_challenge_is_good_once_and_for_a_while() -> None:
    clock = Clock()
    challenges = Challenges(b"secret", clock)

    def ask(after_s: float = 0.0) -> str:
        header = Signer(b"secret", challenges.draw()).header("GET", "/x", b"")
        clock.now += after_s
        return header

    header = ask()
    challenges.check(header, "GET", "/x", b"")
    for wait_s in (0.0, CHALLENGE_S + 1):
        clock.now += wait_s
        with pytest.raises(Unsigned, match="used before or is too old"):
            challenges.check(header, "GET", "/x", b"")
    challenges.check(ask(CHALLENGE_S - 1), "GET", "/x", b"")
    with pytest.raises(Unsigned, match="used before or is too old"):
        challenges.check(ask(CHALLENGE_S + 1), "GET", "/x", b"")
    assert not challenges._used, "what is too old to be used again is forgotten"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"method": "DELETE"}, "other keys"),
        ({"path": "/y"}, "other keys"),
        ({"body": b"other"}, "other keys"),
        ({"secret": b"other"}, "other keys"),
        ({"challenge": "00" * 56}, "not of this registry's current start"),
        ({"challenge": "zz"}, "not of this registry's current start"),
        ({"challenge": ""}, "not of this registry's current start"),
    ],
)
def test_a_signature_is_for_one_request_of_a_holder_of_the_secret(change: dict[str, object], expected: str) -> None:
    challenges = Challenges(b"secret")
    signed = {"secret": b"secret", "challenge": challenges.draw(), "method": "PUT", "path": "/x", "body": b"body"}
    signed |= change
    header = Signer(signed["secret"], signed["challenge"]).header(  # type: ignore[arg-type]
        signed["method"],
        signed["path"],
        signed["body"],  # type: ignore[arg-type]
    )
    with pytest.raises(Unsigned, match=expected):
        challenges.check(header, "PUT", "/x", b"body")


@pytest.mark.parametrize(
    "header", ["", "kvferry-1", "Basic YTpi", "kvferry-1 a:b", "kvferry-1 a:b:c:d", "kvferry-2 a:b:c"]
)
def test_headers_of_other_kinds_are_told_what_is_missing(header: str) -> None:
    with pytest.raises(Unsigned, match="this registry has keys and the request none; set KVFERRY_KEYS"):
        Challenges(b"secret").check(header, "GET", "/x", b"")


def test_an_answer_belongs_to_its_request() -> None:
    challenges = Challenges(b"secret")
    answers = []
    for _ in range(2):
        signer = Signer(b"secret", challenges.draw())
        mac = challenges.check(signer.header("GET", "/x", b""), "GET", "/x", b"")
        answers.append((signer, answer_mac(b"secret", mac, 200, b"{}")))
    (one, first), (_, second) = answers
    assert one.answers(first, 200, b"{}")
    for forged in ((second, 200, b"{}"), (first, 409, b"{}"), (first, 200, b"[]"), ("", 200, b"{}"), ("ü", 200, b"{}")):
        assert not one.answers(*forged)
