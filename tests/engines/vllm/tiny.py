"""A tiny random Llama, 8 heads over 4 KV heads, with a byte-level tokeniser, written to a folder that vLLM serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 1024


def write_tiny_model(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.08,  # wide, so that attention matters and no two logits are nearly equal
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


WINDOW = 64


def write_window_model(folder: Path) -> Path:
    """Four layers, three of which see the last 64 tokens only."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(20)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=1024,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def write_state_model(folder: Path) -> Path:
    """Three Mamba-2 layers and one of attention."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    torch.manual_seed(20)
    config = GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=16,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    GraniteMoeHybridForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def write_latent_model(folder: Path) -> Path:
    """Three layers of latent attention; vLLM's CPU kernel knows 512 + 64 numbers per token only.

    Positions are scaled (YaRN) as in DeepSeek's models: with unscaled ones vLLM 0.32 on CPUs computes prompts otherwise
    than answers, so a plain server disagrees with itself (`test_why_the_latent_model_scales_its_positions`).
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(20)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=3,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"<{number}>" for number in range(len(letters), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
