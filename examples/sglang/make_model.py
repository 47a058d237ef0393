"""make_model.py FOLDER: a small Llama with random weights and one token per byte. What it writes is gibberish, but it
needs no download, and greedy decoding makes the same gibberish every time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<unk>")
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_model(folder: Path) -> None:
    """4 layers, 8 heads, 4 KV heads of 32, float32; tokens 3 … 258 are the bytes."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(zip(("bos_token", "eos_token", "unk_token"), SPECIAL))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        # wide enough that what comes next depends on all of the prompt
        initializer_range=0.1,
        dtype="float32",
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
