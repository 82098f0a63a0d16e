"""Tiny models with random weights, whose tokens depend on every block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
FIRST_TOKEN = 4
"""The first token without a special meaning."""

KINDS = ("llama", "gemma")
"""Kinds of models: one group of full attention, or sliding windows and full attention."""


def make_model(kind: str, folder: Path) -> Path:
    """Write a tiny random model and its word-level tokenizer.

    Args:
        kind: One of :data:`KINDS`.
        folder: Folder of the model.
    """
    import torch
    import transformers
    from tokenizers import (
        Tokenizer,
        models,
        pre_tokenizers,
    )

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=2, torch_dtype="float32", **sizes)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=4,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=32,
            tie_word_embeddings=False,
            **sizes,
        )
        model = transformers.Gemma3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far enough from zero that attention decides the tokens
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    words = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t3"
    ).save_pretrained(folder)
    return folder
