"""The keys of a deployment, and which address of this machine an endpoint or registry uses with them.

A folder that `kvferry keys` makes holds `secret.json`, this member's own CURVE key pair and the secret of the registry,
and `allowed/*.json`, the public keys of all members. docs/security.md describes the format and what it is worth.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import zmq

from kvferry.errors import DocumentError, KeysError, MissingExtra
from kvferry.layout.document import Struct, decode_json, encode_json
from kvferry.transport.hosts import is_loopback, machine_address

KEYS_VARIABLE = "KVFERRY_KEYS"
HOST_VARIABLE = "KVFERRY_HOST"
LOOPBACK = "127.0.0.1"
HOW = f"make keys with `kvferry keys DIR`, copy DIR to every host and set {KEYS_VARIABLE}=DIR (docs/security.md)"
_Z85 = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z"
Key = Annotated[str, msgspec.Meta(pattern=_Z85)]
"""32 bytes of a CURVE key in ZeroMQ's Z85."""
MemberName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")]
T = TypeVar("T", bound=Struct)


class Public(Struct, frozen=True):
    """`allowed/NAME.json`: who may connect."""

    format: Literal["kvferry-public/1"]
    name: MemberName
    public: Key


class Secret(Struct, frozen=True):
    """`secret.json`. `registry`: 32 bytes in hexadecimal, the same for all members."""

    format: Literal["kvferry-secret/1"]
    name: MemberName
    public: Key
    secret: Key
    registry: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True)
class Keys:
    """What a member of a deployment knows. `allowed`: public keys of all members, its own among them."""

    name: str
    public: str
    secret: str = field(repr=False)
    registry: bytes = field(repr=False)
    allowed: frozenset[str] = field(repr=False)


@dataclass(frozen=True)
class Access:
    """Which IPv4 address of this machine is bound and told to others, and the keys that strangers lack."""

    host: str
    keys: Keys | None = None


def access(host: str | None = None, keys: Keys | None = None) -> Access:
    """What isn't given comes from KVFERRY_HOST, else loopback, and from KVFERRY_KEYS, else there are no keys.

    KeysError where the host is not on loopback and there are no keys; DocumentError where it can't be used at all.
    """
    folder = os.environ.get(KEYS_VARIABLE)
    if keys is None and folder:
        keys = read_keys(Path(folder))
    host = os.environ.get(HOST_VARIABLE) or LOOPBACK if host is None else host
    host = LOOPBACK if host == "localhost" else host
    if keys is None and not is_loopback(host):
        raise KeysError(f"host {host!r}: only loopback ({LOOPBACK}) can be used without keys; {HOW}")
    if not machine_address(host):
        raise DocumentError("host", f"expected the IPv4 address of this machine that peers use, got {host!r}")
    try:
        socket.create_server((host, 0)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise DocumentError("host", f"{host!r} can't be bound, is it an address of this machine? {reason}") from None
    return Access(host, keys)


def make_keys(folder: Path, name: str, join: Path | None = None) -> Keys:
    """Write a new member's folder, of a new deployment or of that of `join`, which then allows the new one too.

    KeysError where there are keys already, or the name is taken; nothing is overwritten.
    """
    _need_curve()
    first = None if join is None else read_keys(join)
    others = [] if join is None else _read_allowed(join)
    public, secret = (half.decode("ascii") for half in zmq.curve_keypair())
    registry = first.registry if first else secrets.token_bytes(32)
    own = Public("kvferry-public/1", name, public)
    _check(own, "--name")
    taken = {member.name for member in others}
    if name in taken:
        raise KeysError(f"--name: {name!r} is a member of {str(join)!r} already; members: {', '.join(sorted(taken))}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "allowed").mkdir(mode=0o755, exist_ok=True)
    _write(folder / "secret.json", Secret("kvferry-secret/1", name, public, secret, registry.hex()), 0o600)
    for member in (own, *others):
        _write(_public_file(folder, member), member, 0o644)
    if join is not None:
        _write(_public_file(join, own), own, 0o644)
    return read_keys(folder)


def read_keys(folder: Path) -> Keys:
    """KeysError where the folder holds no keys, contradicts itself, or is open to others."""
    _need_curve()
    path = folder / "secret.json"
    mode = _mode(path)
    if mode & 0o077:
        raise KeysError(f"{path}: its mode is {mode:04o}, so others may read it, expected 0600; chmod 600 {path}")
    secret = _read(path, Secret)
    if zmq.curve_public(secret.secret.encode()).decode() != secret.public:
        raise KeysError(f"{path}: the public key is not that of the secret key; make new ones")
    allowed = frozenset(member.public for member in _read_allowed(folder))
    return Keys(secret.name, secret.public, secret.secret, bytes.fromhex(secret.registry), allowed | {secret.public})


def _read_allowed(folder: Path) -> list[Public]:
    folder = folder / "allowed"
    mode = _mode(folder)
    if mode & 0o002:
        raise KeysError(f"{folder}: its mode is {mode:04o}, so anybody may add members; chmod o-w {folder}")
    return [_read(path, Public) for path in sorted(folder.glob("*.json"))]


def _public_file(folder: Path, member: Public) -> Path:
    return folder / "allowed" / f"{member.name}.json"


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}; {HOW}") from None


def _read(path: Path, kind: type[T]) -> T:
    try:
        return decode_json(path.read_bytes(), kind)
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from None
    except DocumentError as error:
        # the text of an error could hold a part of the secret
        where = f" at {error.path}" if error.path else ""
        raise KeysError(f"{path}: not a document of `kvferry keys`{where}; see docs/security.md") from None


def _write(path: Path, document: Struct, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise KeysError(f"{path}: exists already and is not overwritten; choose another folder, or remove it") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(encode_json(document), indent=2) + b"\n")


def _check(member: Public, field_name: str) -> None:
    try:
        decode_json(encode_json(member), Public)
    except DocumentError:
        raise KeysError(
            f"{field_name}: expected up to 64 letters, digits, '.', '_' or '-', got {member.name!r}"
        ) from None


def _need_curve() -> None:
    if not zmq.has("curve"):
        raise MissingExtra(
            "pyzmq here was built without CURVE; pip install --force-reinstall pyzmq (its wheels have it)"
        )
