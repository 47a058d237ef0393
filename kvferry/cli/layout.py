"""`kvferry layout`: an instance document from a model's config.json, or from what a running engine registered."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.cli.from_dump import dump_text
from kvferry.engines.dump import merge_dumps, read_dump
from kvferry.errors import AddressError, DocumentError
from kvferry.layout.address import Address
from kvferry.layout.document import DTYPE_BYTES, Instance, encode_json
from kvferry.layout.models import Config, Slab, model_slabs, read_config
from kvferry.layout.placement import ENGINES, LAYOUTS, Shape, place

DEFAULTS = Shape()


LARGEST = 2**31 - 1
MOST_WORKERS = 4096
"""More is a slip of the finger, and takes minutes to write."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.json", help="the model's Hugging Face config.json"
    )
    parser.add_argument(
        "--from-dump",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="instead of a config: show what an engine registered and how it was read, from the files that its workers "
        "write when KVFERRY_DUMP names a folder",
    )
    parser.add_argument("--json", action="store_true", help="with --from-dump: print the instance document instead")
    parser.add_argument(
        "--engine", choices=sorted(ENGINES), default="plain", help="whose memory layout (default: plain)"
    )
    counts = {
        "tp": "tensor parallel ranks",
        "pp": "pipeline stages",
        "cp": "context parallel ranks, beside the tensor parallel ones; tokens go round them",
        "cp-block": "tokens in a row on one context parallel rank",
        "page-tokens": "tokens per page",
        "pages": "pages of every token pool",
        "rows": "rows of every state pool, for models with state",
    }
    for name, meaning in counts.items():
        default = getattr(DEFAULTS, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    parser.add_argument("--layout", choices=LAYOUTS, default=DEFAULTS.layout, help="order in a page (default: nhd)")
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES), help="of keys and values (default: the model's)")
    parser.add_argument(
        "--base",
        default=str(DEFAULTS.base),
        metavar="0x…",
        help=f"first address of each worker (default: {DEFAULTS.base})",
    )
    parser.add_argument("--name", default="instance-0", help="the instance's name (default: instance-0)")
    parser.add_argument("--model", help="the model's name, which both sides must share (default: the config's own)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write there and print a summary; default: print it all"
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the document; a config or options that can't be laid out are raised."""
    if args.from_dump:
        return _show_dumps(args)
    if args.config is None:
        raise DocumentError("CONFIG.json", "expected a model's config.json, or --from-dump FILE")
    config, slabs = _read(args.config, args.dtype)
    numbers = {name: getattr(args, name) for name in ("tp", "pp", "cp", "cp_block", "page_tokens", "pages", "rows")}
    for name, value in numbers.items():
        if value > LARGEST:
            raise DocumentError(f"--{name.replace('_', '-')}", f"must be at most {LARGEST}, got {value}")
    if (workers := args.tp * args.pp * args.cp) > MOST_WORKERS:
        raise DocumentError("--tp × --pp × --cp", f"an instance has at most {MOST_WORKERS} workers, got {workers}")
    shape = Shape(**numbers, layout=args.layout, base=_base(args.base))
    model = args.model or str(config.get("_name_or_path") or config.get("model_type") or args.config.stem)
    instance = place(slabs, ENGINES[args.engine], shape, instance=args.name, model=model)
    _write(instance, args.out)
    return 0


def _show_dumps(args: argparse.Namespace) -> int:
    if args.config is not None:
        raise DocumentError("--from-dump", f"takes the place of a config; leave out {args.config}")
    dumps = [read_dump(path) for path in args.from_dump]
    instance = merge_dumps(dumps)
    if args.json or args.out:
        _write(instance, args.out)
    else:
        print(dump_text(dumps))
    return 0


def _write(instance: Instance, out: Path | None) -> None:
    document = encode_json(instance)
    if out is None:
        print(document.decode())
    else:
        out.write_bytes(document + b"\n")
        print(f"{out}: {summary(instance)}")


def summary(instance: Instance) -> str:
    """One line: the model, the groups with their layers, and the size of the largest worker."""
    groups = ", ".join(f"{group.name} ({len(group.layers)} layers)" for group in instance.groups)
    largest = max(sum(region.bytes for region in worker.regions) for worker in instance.workers)
    count = len(instance.workers)
    workers = "1 worker" if count == 1 else f"{count} workers"
    return f"{instance.model}; {groups}; {workers} of up to {largest} bytes"


def _base(text: str) -> Address:
    try:
        return Address.parse(text)
    except AddressError as error:
        raise DocumentError("base", str(error)) from None


def _read(path: Path, dtype: str | None) -> tuple[Config, tuple[Slab, ...]]:
    try:
        config = read_config(path.read_bytes())
        return config, model_slabs(config, dtype)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error.path}" if error.path else str(path), error.problem) from None
