"""What `kvferry verify` moves where no document is given: a made-up model with every kind of cache, cut as asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvferry.engines.dump import Dump, merge_dumps, read_dump
from kvferry.errors import DocumentError
from kvferry.layout.address import Address
from kvferry.layout.document import Instance
from kvferry.layout.models import Config, Slab, model_slabs, read_config
from kvferry.layout.placement import ENGINES, LAYOUTS, Shape, place
from kvferry.layout.validate import parse_instance

_COMMON = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
_SLIDING = ["full_attention", "sliding_attention"] * 2
PRESETS: Mapping[str, Config] = {
    "attention": {**_COMMON, "layer_types": _SLIDING, "sliding_window": 40},
    "latent": {**_COMMON, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "index_head_dim": 128},
    "hybrid": {
        **_COMMON,
        "full_attention_interval": 2,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
}
ALL = "all"
PAGES, ROWS = 1024, 64
HIGH_BASE = Address(0xFFFF_8000_0000_0000)
"""Device addresses have their highest bit set; what is made up has it too."""


def made_up(model: str, spec: str, name: str) -> Instance:
    """`model`: a preset, `all` of them, or the file of a config.json; `spec` as `parse_spec` reads it."""
    engine, shape = parse_spec(spec)
    return place(_slabs(model), ENGINES[engine], shape, instance=name, model=model)


def parse_spec(spec: str) -> tuple[str, Shape]:
    """`2`, or `tp=2,pp=2,cp=1,page=32,layout=hnd,engine=vllm`: (engine, shape)."""
    shape, engine = Shape(pages=PAGES, rows=ROWS, base=HIGH_BASE), "plain"
    numbers = {"tp": "tp", "pp": "pp", "cp": "cp", "page": "page_tokens", "pages": "pages"}
    for part in spec.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals:
            key, value = "tp", key
        if key in numbers and value.isdecimal() and 0 < int(value) <= 1 << 20:
            shape = replace(shape, **{numbers[key]: int(value)})  # type: ignore[arg-type]  # integers all
        elif key == "layout" and value in LAYOUTS:
            shape = replace(shape, layout=value)
        elif key == "engine" and value in ENGINES:
            engine = value
        else:
            known = f"{'=N, '.join(numbers)}=N, layout={'|'.join(LAYOUTS)}, engine={'|'.join(sorted(ENGINES))}"
            raise DocumentError("--prefill, --decode", f"expected TP or some of {known}, got {part!r}")
    return engine, shape


def read_side(path: Path) -> Instance:
    """An instance document, or what an engine dumped: one file, or a folder with one file per worker."""
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise DocumentError(
                str(path), "no *.json files there; start the engine with KVFERRY_DUMP naming this folder"
            )
        return merge_dumps([read_dump(file) for file in files])
    data = path.read_bytes()
    if b"kvferry-dump/1" in data[:4096]:
        return _whole([read_dump(path)])
    try:
        return parse_instance(data)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error.path}" if error.path else str(path), error.problem) from None


def _whole(dumps: list[Dump]) -> Instance:
    return merge_dumps(dumps)


def _slabs(model: str) -> tuple[Slab, ...]:
    if model == ALL:
        return tuple(slab for config in PRESETS.values() for slab in model_slabs(config))
    if model in PRESETS:
        return model_slabs(PRESETS[model])
    path = Path(model)
    try:
        return model_slabs(read_config(path.read_bytes()))
    except DocumentError as error:
        raise DocumentError(f"{path}: {error.path}" if error.path else str(path), error.problem) from None
    except FileNotFoundError:
        known = ", ".join([ALL, *PRESETS])
        raise DocumentError("--model", f"expected one of {known}, or a config.json; got {model!r}") from None
