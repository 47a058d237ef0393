"""Checks of what is installed, and of what UCX finds on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass

import zmq

import kvferry
from kvferry.cli.doctor.finding import Finding
from kvferry.transport.nixl import MODULES

AREA = "packages"
CORE = ("numpy", "msgspec", "pyzmq")
UCX_S = 15.0


@dataclass(frozen=True)
class Extra:
    """An optional package under any of its module names; `packages` are the names of its distributions."""

    name: str
    modules: tuple[str, ...]
    packages: tuple[str, ...]
    purpose: str
    install: str


EXTRAS = (
    Extra(
        "nixl",
        tuple(module.partition(".")[0] for module in MODULES),
        ("nixl-cu12", "nixl-cu13", "nixl"),
        "RDMA and whatever else UCX knows",
        "pip install --no-deps nixl-cu12",
    ),
    Extra("torch", ("torch",), ("torch",), "pages in tensors, on an accelerator", "pip install 'kvferry[torch]'"),
    Extra("metrics", ("prometheus_client",), ("prometheus-client",), "metrics", "pip install 'kvferry[metrics]'"),
    Extra("demo", ("transformers",), ("transformers",), "kvferry demo", "pip install 'kvferry[demo]'"),
    Extra("vllm", ("vllm",), ("vllm",), "the engine", "pip install vllm"),
    Extra("sglang", ("sglang",), ("sglang",), "the engine", "pip install sglang"),
)
NEEDABLE = tuple(extra.name for extra in EXTRAS)


def core() -> Finding:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in CORE)
    found = f"kvferry {kvferry.__version__}, {versions}, ZeroMQ {zmq.zmq_version()}"
    if not zmq.has("curve"):
        cure = "pip install --force-reinstall pyzmq (its wheels have CURVE)"
        return Finding("yellow", AREA, "core", f"{found}: without CURVE, so keys can't be used", cure)
    return Finding("green", AREA, "core", found)


def extras(needed: Collection[str]) -> list[Finding]:
    """One line for each that is there, and one for those that are not; red where one of `needed` is missing."""
    found, absent = [], []
    for extra in EXTRAS:
        if installed(extra):
            found.append(Finding("green", AREA, extra.name, f"{_version(extra)}, for {extra.purpose}"))
        elif extra.name in needed:
            problem = f"missing, and needed here for {extra.purpose}"
            found.append(Finding("red", AREA, extra.name, problem, f"{extra.install}, into {sys.prefix}"))
        else:
            absent.append(extra.name)
    if absent:
        found.append(Finding("green", AREA, "not installed", f"{', '.join(absent)}: optional"))
    return found


def ucx() -> Finding:
    """The transports of the UCX that NIXL brings, by a process of its own: it may print, hang or crash."""
    if not installed(EXTRAS[0]):
        return Finding("green", AREA, "ucx", "not asked, nixl is not installed")
    command = [sys.executable, "-m", "kvferry.cli.doctor.ucx"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=UCX_S)
    except subprocess.TimeoutExpired:
        cure = "UCX_LOG_LEVEL=debug shows where it hangs; a device that does not answer can be left out by UCX_TLS"
        return Finding("red", AREA, "ucx", f"it does not start within {UCX_S:g} s", cure)
    devices = re.findall(r"resource \d+ .* -- (\S+)/(\S+)", done.stdout)
    version = re.search(r"^UCX (\S+)", done.stdout, re.MULTILINE)
    if done.returncode or not devices:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        cure = "reinstall: pip install --force-reinstall --no-deps nixl-cu12"
        return Finding("yellow", AREA, "ucx", f"it can't be asked: {last[:200]}", cure)
    by_name: dict[str, list[str]] = {}
    for name, device in devices:
        by_name.setdefault(name, []).append(device)
    text = "; ".join(name if names == ["memory"] else f"{name} ({', '.join(names)})" for name, names in by_name.items())
    return Finding("green", AREA, "ucx", f"{version[1] if version else '?'}: {text}")


def installed(extra: Extra) -> bool:
    return any(importlib.util.find_spec(module) is not None for module in extra.modules)


def _version(extra: Extra) -> str:
    for package in extra.packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
