"""A tiny random Llama with 8 heads and 4 KV heads, and a tokeniser of single characters, written to a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ?.!,-'ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def write_tiny_model(folder: Path) -> Path:
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,  # wide, so that attention matters and no two logits are nearly equal
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<unk>": 0, **{character: index + 1 for index, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
