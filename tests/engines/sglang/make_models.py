"""make_models.py KIND FOLDER: the smallest models of other kinds that SGLang runs on a CPU, with random weights.

sliding: Cohere2, whose layers alternate between a window of 64 tokens and all of them, with SGLang's option for models
that keep both in pools of their own. latent: MiniCPM3 (MLA, in the form that attends to latents). gated: Qwen3-Next,
whose layers are gated delta nets and attention in turn.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "sglang" / "make_model.py"
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def sliding() -> tuple[Any, dict[str, Any]]:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Cohere2Config(
        **COMMON, num_key_value_heads=4, head_dim=32, sliding_window=64, layer_types=kinds, logit_scale=1.0
    )
    return Cohere2ForCausalLM(config), {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}


def latent() -> tuple[Any, dict[str, Any]]:
    ranks = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    config = MiniCPM3Config(**COMMON, **ranks, num_key_value_heads=8, scale_emb=1, dim_model_base=256, scale_depth=2.0)
    return MiniCPM3ForCausalLM(config), {}


def gated() -> tuple[Any, dict[str, Any]]:
    linear = {
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0, 1, 2, 3], "decoder_sparse_step": 1}
    kinds = ["linear_attention", "full_attention"] * 2
    config = Qwen3NextConfig(**COMMON, **linear, **experts, num_key_value_heads=4, head_dim=32, layer_types=kinds)
    return Qwen3NextForCausalLM(config), {}


KINDS = {"sliding": sliding, "latent": latent, "gated": gated}


def make(kind: str, folder: Path) -> None:
    runpy.run_path(str(EXAMPLE))["make_model"](folder)  # for its tokenizer
    torch.manual_seed(0)
    model, more = KINDS[kind]()
    model.to(torch.float32).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
