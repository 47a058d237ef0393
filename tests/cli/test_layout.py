"""`kvferry layout` on the committed configs, its options, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli import main as cli
from kvferry.layout.validate import parse_instance

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
LLAMA = CONFIGS / "llama-3.1-70b.json"

Run = tuple[int, str, str]


def layout(capsys: pytest.CaptureFixture[str], *arguments: object) -> Run:
    code = cli.main(["layout", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_option_reaches_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--engine sglang --tp 2 --pp 2 --cp 2 --cp-block 4 --page-tokens 32 --pages 10 --rows 5 --layout hnd"
    more = "--dtype float8_e4m3fn --base 0xffff81ab54e01000 --name prefill-7 --model me/mine"
    config = CONFIGS / "qwen3-next-80b-a3b.json"
    code, out, err = layout(capsys, config, *options.split(), *more.split())
    assert (code, err) == (0, "")
    instance = parse_instance(out)
    assert (instance.instance, instance.model, len(instance.workers)) == ("prefill-7", "me/mine", 8)
    assert instance.group("attn").dtype == "float8_e4m3fn"
    worker = instance.worker(7)
    assert str(worker.regions[0].base) == "0xffff81ab54e01000"
    pools = {pool.group: pool for pool in worker.pools}
    assert [mode.axis for mode in pools["attn"].modes] == ["head", "token", "dim"]
    assert (pools["attn"].page_tokens, pools["attn"].buffers[0].pages, pools["attn"].cycle) == (32, 10, (1, 2, 4))
    assert {buffer.pages for buffer in pools["ssm"].buffers} == {5}
    assert [buffer.layer for buffer in pools["attn"].buffers[:6]] == [27, 31, 35, 39, 43, 47]


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_configs_name_their_source_and_make_documents(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Path
) -> None:
    fields = json.loads(config.read_text())
    assert fields["_source"].startswith(fields["_name_or_path"])
    file = tmp_path / "instance.json"
    code, out, err = layout(capsys, config, "--engine", "vllm", "--tp", 2, "--out", file)
    assert (code, err) == (0, "")
    instance = parse_instance(file.read_bytes())
    assert instance.model == fields["_name_or_path"]
    largest = max(sum(region.bytes for region in worker.regions) for worker in instance.workers)
    assert out.startswith(f"{file}: {instance.model}; {instance.groups[0].name} (")
    assert out.endswith(f"; 2 workers of up to {largest} bytes\n")


def test_two_documents_go_straight_into_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / "prefill.json", tmp_path / "decode.json"]
    for file, tp in zip(files, (4, 8)):
        assert layout(capsys, LLAMA, "--tp", tp, "--out", file)[0] == 0
    assert cli.main(["plan", *map(str, files)]) == 0
    traffic, *_ = capsys.readouterr().out.split("\n\n")
    rows = [line.split() for line in traffic.splitlines()[1:]]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(target // 2, target) for target in range(8)]


def test_an_unknown_model_is_refused_with_file_and_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "rwkv", "num_hidden_layers": 24}')
    code, out, err = layout(capsys, file)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvferry: error: {file}: model_type 'rwkv': no known cache; ")
    assert "num_key_value_heads" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--engine", "vllm", "--tp", "3"], "tp: vllm can't cut 8 heads over 3 ranks (group 'attn', axis 'head')"),
        (["--page-tokens", "0"], "page_tokens: must be ≥ 1, got 0"),
        (["--base", "4096"], "base: expected a hex string such as \"0xffff81ab54e01000\", got '4096'"),
        (["--base", "0xfffffffffffff000"], "0xfffffffffffff000 + 2097152 passes 2**64"),
    ],
)
def test_options_that_can_not_be_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    code, out, err = layout(capsys, LLAMA, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvferry: error: {problem}") and err.count("\n") == 1


def test_a_config_that_is_no_json_object_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[]")
    code, _, err = layout(capsys, file)
    assert code == 2
    assert err.startswith(f"kvferry: error: {file}: expected an object, got list")


@pytest.mark.parametrize(
    ("field", "value"), [("num_hidden_layers", 2**63), ("kv_lora_rank", 2**63), ("torch_dtype", ["bfloat16"])]
)
def test_a_config_field_that_can_not_be_is_named(
    field: str, value: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads((CONFIGS / "deepseek-v3.2.json").read_text()), field: value}))
    code, out, err = layout(capsys, file)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvferry: error: {file}: {field}: expected ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--tp 100000000", "--tp × --pp × --cp: an instance has at most 4096 workers"),
        ("--tp 128 --cp 128", "at most 4096 workers, got 16384"),
        ("--page-tokens 99999999999999999999", "--page-tokens: must be at most 2147483647"),
        ("--pages 99999999999999999999", "--pages: must be at most 2147483647"),
    ],
)
def test_sizes_that_no_instance_has_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], options: str, named: str
) -> None:
    code, out, err = layout(capsys, LLAMA, *options.split())
    assert (code, out) == (2, "")
    assert named in err and err.count("\n") == 1
